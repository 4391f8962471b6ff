//! Compute threads and their queue.
//!
//! All models of a process share one [`Engine`]. A request is a list of tokenized texts for one model. It
//! is split into microbatches of whole texts, a few hundred tokens each, and a thread computes one
//! microbatch at a time.
//!
//! Fair queueing decides which microbatch is next. Every request has a clock that advances by the tokens
//! it was served. A new request starts at the clock of the microbatch served last, and the request with
//! the earliest clock goes first. A short query therefore waits only for the microbatches that are being
//! computed, and a large batch never starves.
//!
//! Small microbatches of the same model that wait at the same time are computed together. When there are
//! fewer microbatches than threads, idle threads help (see [`crate::thread_group`]).
//!
//! The queue is bounded. A request whose future was dropped is removed from it.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ragstone_core::model::ModelError;
use tokio::sync::oneshot;

use crate::encoder::{Scratch, Sequence};
use crate::thread_group::{GroupHelper, ThreadGroup};

/// Tokens of one microbatch: enough for the kernel to reach its full speed, and few enough for their
/// states to stay in the second-level cache and for a query not to wait long.
const MICROBATCH_TOKENS: usize = 384;
/// Smallest microbatch that a request is split into to keep more threads busy.
const MIN_MICROBATCH_TOKENS: usize = 96;
/// Requests up to this size count as queries: they are admitted while a large batch fills the queue.
const SHORT_REQUEST_TOKENS: usize = 1_024;

#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Number of compute threads; defaults to one per available core.
    pub threads: Option<usize>,
    /// Limit on queued tokens. A large request that exceeds it is refused unless the queue is empty.
    pub queue_tokens: usize,
    /// Limit on queued requests, whatever their size.
    pub queue_requests: usize,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            threads: None,
            queue_tokens: 1 << 20,
            queue_requests: 1_024,
        }
    }
}

/// A handle to the compute threads. They end when the last handle and the last model are dropped.
#[derive(Clone)]
pub struct Engine {
    compute_threads: Arc<ComputeThreads>,
}

/// Load of the engine, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLoad {
    pub threads: usize,
    pub waiting_requests: usize,
    pub waiting_tokens: usize,
}

/// The output rows of a request.
type ComputeResult = Result<Vec<Vec<f32>>, ModelError>;

/// A model as seen by the compute threads.
pub(crate) trait Compute: Send + Sync {
    /// Returns one row per sequence, in the same order.
    fn compute(&self, threads: &ThreadGroup, scratch: &mut Scratch, sequences: &[&Sequence])
    -> Vec<Vec<f32>>;
}

struct ComputeThreads {
    state: Arc<EngineState>,
    threads: Vec<JoinHandle<()>>,
}

struct EngineState {
    options: EngineOptions,
    threads: usize,
    queue: Mutex<ComputeQueue>,
    wake: Condvar,
}

#[derive(Default)]
struct ComputeQueue {
    waiting: Vec<QueuedRequest>,
    waiting_tokens: usize,
    /// Clock of the microbatch served last.
    clock: u64,
    idle: usize,
    helpers_wanted: Vec<GroupHelper>,
    tokens_per_second: f64,
    stopping: bool,
}

struct QueuedRequest {
    request: Arc<ComputeRequest>,
    clock: u64,
    microbatches: VecDeque<Range<usize>>,
    tokens: usize,
}

struct ComputeRequest {
    model: Arc<dyn Compute>,
    sequences: Vec<Sequence>,
    output: Mutex<PendingOutput>,
}

struct PendingOutput {
    rows: Vec<Vec<f32>>,
    missing: usize,
    sender: Option<oneshot::Sender<ComputeResult>>,
}

/// A part of one request that may be computed together with parts of others.
struct Microbatch {
    request: Arc<ComputeRequest>,
    range: Range<usize>,
}

impl Engine {
    pub fn start(options: EngineOptions) -> Self {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or_else(available).max(1);
        let state = Arc::new(EngineState {
            options,
            threads,
            queue: Mutex::default(),
            wake: Condvar::new(),
        });
        let spawn = |number| {
            let state = state.clone();
            let builder = std::thread::Builder::new().name(format!("model-{number}"));
            builder
                .spawn(move || work(&state))
                .map_err(|error| tracing::error!(%error, "cannot start a compute thread"))
                .ok()
        };
        let threads = (0..threads).filter_map(spawn).collect();
        Self {
            compute_threads: Arc::new(ComputeThreads { state, threads }),
        }
    }

    pub fn load(&self) -> EngineLoad {
        let queue = self.compute_threads.state.lock();
        EngineLoad {
            threads: self.compute_threads.threads.len(),
            waiting_requests: queue.waiting.len(),
            waiting_tokens: queue.waiting_tokens,
        }
    }

    /// Limit on queued tokens.
    pub(crate) fn queue_tokens(&self) -> usize {
        self.compute_threads.state.options.queue_tokens
    }

    /// Computes one row per sequence, in the same order. Dropping the future cancels the rest.
    pub(crate) async fn compute(
        &self,
        model: Arc<dyn Compute>,
        sequences: Vec<Sequence>,
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let output = self.compute_threads.state.submit(model, sequences)?;
        output
            .await
            .unwrap_or_else(|_| Err(ModelError::Unavailable("the server is shutting down".to_owned())))
    }
}

impl Drop for ComputeThreads {
    fn drop(&mut self) {
        {
            let mut queue = self.state.lock();
            queue.stopping = true;
            queue.waiting.clear();
        }
        self.state.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A compute thread that drops the last handle must not join itself.
            if thread.thread().id() != std::thread::current().id() {
                drop(thread.join());
            }
        }
    }
}

impl EngineState {
    /// Ignores poisoning: no code panics while it holds the lock.
    fn lock(&self) -> MutexGuard<'_, ComputeQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(
        &self,
        model: Arc<dyn Compute>,
        sequences: Vec<Sequence>,
    ) -> Result<oneshot::Receiver<ComputeResult>, ModelError> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.ids.len()).sum();
        let microbatches = split_into_microbatches(&sequences, tokens, self.threads);
        let (sender, receiver) = oneshot::channel();
        let output = PendingOutput {
            rows: vec![Vec::new(); sequences.len()],
            missing: sequences.len(),
            sender: Some(sender),
        };
        let mut queue = self.lock();
        queue.remove_cancelled();
        let full = queue.waiting.len() >= self.options.queue_requests
            || (tokens > SHORT_REQUEST_TOKENS && !queue.has_room(tokens, self.options.queue_tokens));
        if full {
            return Err(ModelError::Overloaded {
                retry_after: queue.time_to_drain(),
            });
        }
        let request = Arc::new(ComputeRequest {
            model,
            sequences,
            output: Mutex::new(output),
        });
        let clock = queue.clock;
        queue.waiting_tokens += tokens;
        queue.waiting.push(QueuedRequest {
            request,
            clock,
            microbatches,
            tokens,
        });
        drop(queue);
        self.wake.notify_all();
        Ok(receiver)
    }
}

impl ComputeQueue {
    fn remove_cancelled(&mut self) {
        let waiting_tokens = &mut self.waiting_tokens;
        self.waiting.retain(|waiting| {
            let wanted = waiting.request.is_wanted();
            if !wanted {
                *waiting_tokens -= waiting.tokens;
            }
            wanted
        });
    }

    /// A request larger than the whole budget is admitted into an empty queue, since a retry would never
    /// find more room.
    fn has_room(&self, tokens: usize, budget: usize) -> bool {
        self.waiting_tokens == 0 || self.waiting_tokens.saturating_add(tokens) <= budget
    }

    fn time_to_drain(&self) -> Duration {
        let rate = if self.tokens_per_second > 0.0 {
            self.tokens_per_second
        } else {
            1_000.0
        };
        Duration::from_secs_f64((self.waiting_tokens as f64 / rate).clamp(1.0, 60.0))
    }

    /// The next microbatch, together with small ones of the same model from other requests.
    fn next_batch(&mut self) -> Vec<Microbatch> {
        self.remove_cancelled();
        let mut batch: Vec<Microbatch> = Vec::new();
        let mut room = MICROBATCH_TOKENS;
        loop {
            let model = batch.first().map(|microbatch| microbatch.request.model.clone());
            let fits = |waiting: &QueuedRequest| match &model {
                None => true,
                Some(model) => {
                    Arc::ptr_eq(model, &waiting.request.model)
                        && waiting
                            .microbatches
                            .front()
                            .is_some_and(|range| waiting.request.tokens(range) <= room)
                }
            };
            let best = self
                .waiting
                .iter()
                .enumerate()
                .filter(|(_, waiting)| fits(waiting))
                .min_by_key(|(_, waiting)| (waiting.clock, waiting.tokens))
                .map(|(index, _)| index);
            let Some(index) = best else { return batch };
            let waiting = &mut self.waiting[index];
            let Some(range) = waiting.microbatches.pop_front() else {
                self.waiting.swap_remove(index);
                continue;
            };
            let tokens = waiting.request.tokens(&range);
            if batch.is_empty() {
                self.clock = waiting.clock;
            }
            waiting.clock += tokens as u64;
            waiting.tokens -= tokens;
            self.waiting_tokens -= tokens;
            room = room.saturating_sub(tokens);
            batch.push(Microbatch {
                request: waiting.request.clone(),
                range,
            });
            if waiting.microbatches.is_empty() {
                self.waiting.swap_remove(index);
            }
        }
    }
}

impl ComputeRequest {
    fn tokens(&self, range: &Range<usize>) -> usize {
        self.sequences[range.clone()]
            .iter()
            .map(|sequence| sequence.ids.len())
            .sum()
    }

    fn output(&self) -> MutexGuard<'_, PendingOutput> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the caller still waits and no part has failed.
    fn is_wanted(&self) -> bool {
        self.output()
            .sender
            .as_ref()
            .is_some_and(|sender| !sender.is_closed())
    }

    fn deliver(&self, range: Range<usize>, rows: impl Iterator<Item = Vec<f32>>) {
        let mut output = self.output();
        output.missing -= range.len();
        for (index, row) in range.zip(rows) {
            output.rows[index] = row;
        }
        if output.missing == 0 {
            let rows = std::mem::take(&mut output.rows);
            if let Some(sender) = output.sender.take() {
                drop(sender.send(Ok(rows)));
            }
        }
    }

    fn fail(&self, message: &str) {
        if let Some(sender) = self.output().sender.take() {
            drop(sender.send(Err(ModelError::Failed(message.to_owned()))));
        }
    }
}

/// Splits sequences into runs of nearly equal numbers of tokens.
fn split_into_microbatches(sequences: &[Sequence], tokens: usize, threads: usize) -> VecDeque<Range<usize>> {
    let goal = tokens
        .div_ceil(threads)
        .clamp(MIN_MICROBATCH_TOKENS, MICROBATCH_TOKENS);
    let goal = tokens.div_ceil(tokens.div_ceil(goal).max(1));
    let mut microbatches = VecDeque::new();
    let (mut start, mut size) = (0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        if size > 0 && size + sequence.ids.len() / 2 > goal {
            microbatches.push_back(start..index);
            (start, size) = (index, 0);
        }
        size += sequence.ids.len();
    }
    microbatches.push_back(start..sequences.len());
    microbatches
}

enum ThreadTask {
    Compute(Vec<Microbatch>, ThreadGroup),
    Help(GroupHelper),
}

fn work(state: &EngineState) {
    let mut scratch = Scratch::default();
    while let Some(task) = next_task(state) {
        match task {
            ThreadTask::Help(helper) => {
                // The leader notices and reports a panic.
                drop(catch_unwind(AssertUnwindSafe(|| helper.assist())));
            }
            ThreadTask::Compute(batch, threads) => {
                let start = Instant::now();
                let tokens: usize = batch
                    .iter()
                    .map(|microbatch| microbatch.request.tokens(&microbatch.range))
                    .sum();
                if !compute(&batch, &threads, &mut scratch) {
                    scratch = Scratch::default();
                }
                drop(threads);
                let rate = tokens as f64 / start.elapsed().as_secs_f64().max(1e-6) * state.threads as f64;
                let mut queue = state.lock();
                queue.tokens_per_second = if queue.tokens_per_second > 0.0 {
                    0.9 * queue.tokens_per_second + 0.1 * rate
                } else {
                    rate
                };
            }
        }
    }
}

fn next_task(state: &EngineState) -> Option<ThreadTask> {
    let mut queue = state.lock();
    loop {
        if queue.stopping {
            return None;
        }
        if let Some(helper) = queue.helpers_wanted.pop() {
            return Some(ThreadTask::Help(helper));
        }
        let batch = queue.next_batch();
        if !batch.is_empty() {
            let helpers = if queue.waiting.is_empty() { queue.idle } else { 0 };
            let (threads, helpers_wanted) = ThreadGroup::with_helpers(helpers);
            queue.helpers_wanted.extend(helpers_wanted);
            drop(queue);
            if helpers > 0 {
                state.wake.notify_all();
            }
            return Some(ThreadTask::Compute(batch, threads));
        }
        queue.idle += 1;
        queue = state.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        queue.idle -= 1;
    }
}

/// Computes a batch and delivers its rows. Returns `false` after a failure, which is reported to every
/// request in the batch.
fn compute(batch: &[Microbatch], threads: &ThreadGroup, scratch: &mut Scratch) -> bool {
    let Some(first) = batch.first() else { return true };
    let sequences: Vec<&Sequence> = batch
        .iter()
        .flat_map(|microbatch| &microbatch.request.sequences[microbatch.range.clone()])
        .collect();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        first.request.model.compute(threads, scratch, &sequences)
    }));
    let failure = match outcome {
        Ok(rows)
            if rows.len() != sequences.len() || rows.iter().flatten().any(|value| !value.is_finite()) =>
        {
            "the model computed values that are not finite"
        }
        Ok(rows) => {
            let mut rows = rows.into_iter();
            for microbatch in batch {
                microbatch.request.deliver(
                    microbatch.range.clone(),
                    rows.by_ref().take(microbatch.range.len()),
                );
            }
            return true;
        }
        Err(_) => "the model panicked; see the log",
    };
    tracing::error!(sequences = sequences.len(), "{failure}");
    batch
        .iter()
        .for_each(|microbatch| microbatch.request.fail(failure));
    false
}

#[cfg(test)]
mod tests;
