//! Compute threads and the queue before them.
//!
//! All models of a process share one [`Engine`]. A request is a list of tokenised texts for one
//! model; it is cut into groups of whole texts, a few hundred tokens each, and a thread computes one
//! group at a time. Which group is next is decided by fair queueing: every request has a clock that
//! advances by the tokens it was served, a new request starts at the clock of the group served last,
//! and the request with the earliest clock goes first. A short query therefore waits for the groups
//! that are being computed, not for the rest of a large batch, and a large batch always goes on.
//!
//! Small groups of the same model that wait at the same time are computed together. When there are
//! fewer groups than threads, the idle threads help with the one that there is (see [`crate::team`]).
//!
//! The queue is bounded. A request whose future was dropped leaves it at the next look.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ragstone_core::model::ModelError;
use tokio::sync::oneshot;

use crate::encoder::{Scratch, Sequence};
use crate::team::{Helper, Team};

/// Tokens of one group: enough to keep the kernel at its best, few enough for their states to stay
/// in the second-level cache and for a query not to wait long.
const GROUP_TOKENS: usize = 384;
/// A request is not cut into groups smaller than this only to give each thread one.
const SMALLEST_GROUP: usize = 96;
/// Requests up to this size are queries: they are admitted while a large batch fills the queue.
const SHORT_REQUEST: usize = 1_024;

#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Compute threads; absent means one per available core.
    pub threads: Option<usize>,
    /// A large request is refused if more than this many tokens would wait with it, unless it is alone.
    pub queue_tokens: usize,
    /// Any request is refused while this many are waiting.
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
    running: Arc<Running>,
}

/// What the engine has before it, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineLoad {
    pub threads: usize,
    pub waiting_requests: usize,
    pub waiting_tokens: usize,
}

/// The rows of a request, or why there are none.
type Computed = Result<Vec<Vec<f32>>, ModelError>;

/// A model as the threads see it.
pub(crate) trait Compute: Send + Sync {
    /// One row of numbers per sequence, in their order.
    fn compute(&self, team: &Team, scratch: &mut Scratch, sequences: &[&Sequence]) -> Vec<Vec<f32>>;
}

struct Running {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    options: EngineOptions,
    threads: usize,
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Waiting>,
    waiting_tokens: usize,
    /// The clock of the group served last.
    clock: u64,
    idle: usize,
    invitations: Vec<Helper>,
    tokens_per_second: f64,
    stopping: bool,
}

struct Waiting {
    request: Arc<Request>,
    clock: u64,
    groups: VecDeque<Range<usize>>,
    tokens: usize,
}

struct Request {
    model: Arc<dyn Compute>,
    sequences: Vec<Sequence>,
    answer: Mutex<Answer>,
}

struct Answer {
    rows: Vec<Vec<f32>>,
    missing: usize,
    sender: Option<oneshot::Sender<Result<Vec<Vec<f32>>, ModelError>>>,
}

/// A part of one request that is computed with others.
struct Group {
    request: Arc<Request>,
    range: Range<usize>,
}

impl Engine {
    pub fn start(options: EngineOptions) -> Self {
        let available = || std::thread::available_parallelism().map_or(1, usize::from);
        let threads = options.threads.unwrap_or_else(available).max(1);
        let shared = Arc::new(Shared {
            options,
            threads,
            queue: Mutex::default(),
            wake: Condvar::new(),
        });
        let spawn = |number| {
            let shared = shared.clone();
            let builder = std::thread::Builder::new().name(format!("model-{number}"));
            builder
                .spawn(move || work(&shared))
                .map_err(|error| tracing::error!(%error, "no compute thread"))
                .ok()
        };
        let threads = (0..threads).filter_map(spawn).collect();
        Self {
            running: Arc::new(Running { shared, threads }),
        }
    }

    pub fn load(&self) -> EngineLoad {
        let queue = self.running.shared.lock();
        EngineLoad {
            threads: self.running.threads.len(),
            waiting_requests: queue.waiting.len(),
            waiting_tokens: queue.waiting_tokens,
        }
    }

    /// How many tokens may wait before large requests are refused.
    pub(crate) fn queue_tokens(&self) -> usize {
        self.running.shared.options.queue_tokens
    }

    /// Computes all sequences; the answer has their order. Dropping the future cancels what is left.
    pub(crate) async fn compute(
        &self,
        model: Arc<dyn Compute>,
        sequences: Vec<Sequence>,
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        if sequences.is_empty() {
            return Ok(Vec::new());
        }
        let answer = self.running.shared.submit(model, sequences)?;
        answer.await.unwrap_or_else(|_| {
            Err(ModelError::Unavailable(
                "the models are being shut down".to_owned(),
            ))
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        {
            let mut queue = self.shared.lock();
            queue.stopping = true;
            queue.waiting.clear();
        }
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that drops the last handle cannot wait for itself; it ends by itself.
            if thread.thread().id() != std::thread::current().id() {
                drop(thread.join());
            }
        }
    }
}

impl Shared {
    /// No code panics while it holds the lock; if one did, the queue would still be consistent.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn submit(
        &self,
        model: Arc<dyn Compute>,
        sequences: Vec<Sequence>,
    ) -> Result<oneshot::Receiver<Computed>, ModelError> {
        let tokens: usize = sequences.iter().map(|sequence| sequence.ids.len()).sum();
        let groups = cut(&sequences, tokens, self.threads);
        let (sender, receiver) = oneshot::channel();
        let answer = Answer {
            rows: vec![Vec::new(); sequences.len()],
            missing: sequences.len(),
            sender: Some(sender),
        };
        let mut queue = self.lock();
        queue.forget_cancelled();
        let full = queue.waiting.len() >= self.options.queue_requests
            || (tokens > SHORT_REQUEST && !queue.has_room(tokens, self.options.queue_tokens));
        if full {
            return Err(ModelError::Overloaded {
                retry_after: queue.time_to_drain(),
            });
        }
        let request = Arc::new(Request {
            model,
            sequences,
            answer: Mutex::new(answer),
        });
        let clock = queue.clock;
        queue.waiting_tokens += tokens;
        queue.waiting.push(Waiting {
            request,
            clock,
            groups,
            tokens,
        });
        drop(queue);
        self.wake.notify_all();
        Ok(receiver)
    }
}

impl Queue {
    fn forget_cancelled(&mut self) {
        let waiting_tokens = &mut self.waiting_tokens;
        self.waiting.retain(|waiting| {
            let wanted = waiting.request.is_wanted();
            if !wanted {
                *waiting_tokens -= waiting.tokens;
            }
            wanted
        });
    }

    /// One that is larger than the whole budget waits for nothing that a refusal would bring, so it is
    /// let in where it is the only one.
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

    /// The next group, and with it small groups of the same model from other requests.
    fn next_batch(&mut self) -> Vec<Group> {
        self.forget_cancelled();
        let mut batch: Vec<Group> = Vec::new();
        let mut room = GROUP_TOKENS;
        loop {
            let model = batch.first().map(|group| group.request.model.clone());
            let fits = |waiting: &Waiting| match &model {
                None => true,
                Some(model) => {
                    Arc::ptr_eq(model, &waiting.request.model)
                        && waiting
                            .groups
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
            let Some(range) = waiting.groups.pop_front() else {
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
            batch.push(Group {
                request: waiting.request.clone(),
                range,
            });
            if waiting.groups.is_empty() {
                self.waiting.swap_remove(index);
            }
        }
    }
}

impl Request {
    fn tokens(&self, range: &Range<usize>) -> usize {
        self.sequences[range.clone()]
            .iter()
            .map(|sequence| sequence.ids.len())
            .sum()
    }

    fn answer(&self) -> MutexGuard<'_, Answer> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody still waits for the answer, and it has not failed.
    fn is_wanted(&self) -> bool {
        self.answer()
            .sender
            .as_ref()
            .is_some_and(|sender| !sender.is_closed())
    }

    fn deliver(&self, range: Range<usize>, rows: impl Iterator<Item = Vec<f32>>) {
        let mut answer = self.answer();
        answer.missing -= range.len();
        for (index, row) in range.zip(rows) {
            answer.rows[index] = row;
        }
        if answer.missing == 0 {
            let rows = std::mem::take(&mut answer.rows);
            if let Some(sender) = answer.sender.take() {
                drop(sender.send(Ok(rows)));
            }
        }
    }

    fn fail(&self, message: &str) {
        if let Some(sender) = self.answer().sender.take() {
            drop(sender.send(Err(ModelError::Failed(message.to_owned()))));
        }
    }
}

/// Groups of neighbouring sequences with nearly equal numbers of tokens.
fn cut(sequences: &[Sequence], tokens: usize, threads: usize) -> VecDeque<Range<usize>> {
    let goal = tokens.div_ceil(threads).clamp(SMALLEST_GROUP, GROUP_TOKENS);
    let goal = tokens.div_ceil(tokens.div_ceil(goal).max(1));
    let mut groups = VecDeque::new();
    let (mut start, mut size) = (0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        if size > 0 && size + sequence.ids.len() / 2 > goal {
            groups.push_back(start..index);
            (start, size) = (index, 0);
        }
        size += sequence.ids.len();
    }
    groups.push_back(start..sequences.len());
    groups
}

enum Task {
    Compute(Vec<Group>, Team),
    Help(Helper),
}

fn work(shared: &Shared) {
    let mut scratch = Scratch::default();
    while let Some(task) = next_task(shared) {
        match task {
            Task::Help(helper) => {
                // The leader notices a failure and reports it.
                drop(catch_unwind(AssertUnwindSafe(|| helper.assist())));
            }
            Task::Compute(batch, team) => {
                let start = Instant::now();
                let tokens: usize = batch.iter().map(|group| group.request.tokens(&group.range)).sum();
                if !compute(&batch, &team, &mut scratch) {
                    scratch = Scratch::default();
                }
                drop(team);
                let rate = tokens as f64 / start.elapsed().as_secs_f64().max(1e-6) * shared.threads as f64;
                let mut queue = shared.lock();
                queue.tokens_per_second = if queue.tokens_per_second > 0.0 {
                    0.9 * queue.tokens_per_second + 0.1 * rate
                } else {
                    rate
                };
            }
        }
    }
}

fn next_task(shared: &Shared) -> Option<Task> {
    let mut queue = shared.lock();
    loop {
        if queue.stopping {
            return None;
        }
        if let Some(helper) = queue.invitations.pop() {
            return Some(Task::Help(helper));
        }
        let batch = queue.next_batch();
        if !batch.is_empty() {
            let helpers = if queue.waiting.is_empty() { queue.idle } else { 0 };
            let (team, invitations) = Team::with_helpers(helpers);
            queue.invitations.extend(invitations);
            drop(queue);
            if helpers > 0 {
                shared.wake.notify_all();
            }
            return Some(Task::Compute(batch, team));
        }
        queue.idle += 1;
        queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        queue.idle -= 1;
    }
}

/// Whether it went well; a failure is reported to everybody who waits for a part of the batch.
fn compute(batch: &[Group], team: &Team, scratch: &mut Scratch) -> bool {
    let Some(first) = batch.first() else { return true };
    let sequences: Vec<&Sequence> = batch
        .iter()
        .flat_map(|group| &group.request.sequences[group.range.clone()])
        .collect();
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        first.request.model.compute(team, scratch, &sequences)
    }));
    let failure = match outcome {
        Ok(rows)
            if rows.len() != sequences.len() || rows.iter().flatten().any(|value| !value.is_finite()) =>
        {
            "the model computed numbers that are not finite"
        }
        Ok(rows) => {
            let mut rows = rows.into_iter();
            for group in batch {
                group
                    .request
                    .deliver(group.range.clone(), rows.by_ref().take(group.range.len()));
            }
            return true;
        }
        Err(_) => "the model failed; the log has the reason",
    };
    tracing::error!(sequences = sequences.len(), "{failure}");
    batch.iter().for_each(|group| group.request.fail(failure));
    false
}

#[cfg(test)]
mod tests;
