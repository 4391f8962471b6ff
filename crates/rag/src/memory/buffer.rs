//! The background worker that embeds what is due.
//!
//! A round takes due entries from the database, embeds them in calls of at most
//! [`BufferOptions::batch`] texts and within the embedder's own limits, stores the vectors of each
//! call and marks its entries done, with the version it was given: an entry that was saved again
//! meanwhile stays due. Two rounds overlap, so that the provider is busy while the database is.
//!
//! A round begins when a batch is full or when the first entry of one has waited long enough.
//! Saves tell the worker how many there are; that is only a hint, and a look into the database now
//! and then finds what no hint told of: work left by an earlier process, by another one that died,
//! and entries whose pause is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ragstone_core::backoff::Backoff;
use ragstone_core::model::Embedder;
use ragstone_core::records::{Record, Records};
use ragstone_core::storage::{Storage, StorageError};
use tokio::sync::{Mutex, Notify, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::batch::{self, Claimed};
use super::circuit::EmbedderCircuit;
use super::entry::Kind;
use super::in_flight::{InFlight, Underway};
use super::{now, reconcile};

/// Rounds at once.
const ROUNDS: usize = 2;
/// How long the worker leaves the database alone after it failed.
const AFTER_STORE_FAILURE: Duration = Duration::from_secs(1);
const MEASURE_EVERY: Duration = Duration::from_secs(3);
/// Counting is dearer, and done every so many times.
const COUNT_EVERY: u32 = 5;

#[derive(Debug, Clone)]
pub struct BufferOptions {
    /// The most texts in one call of the embedder.
    pub batch: usize,
    /// How many calls a round makes at once.
    pub parallel: usize,
    /// The longest that an entry waits for others to share its call.
    pub max_wait: Duration,
    /// How often the database is looked into without a hint.
    pub poll: Duration,
    /// After this long, an entry that was claimed and not finished can be claimed again.
    pub lease: Duration,
    pub ownership: Ownership,
    /// Delays after failures. An entry that failed `max_attempts` times, by no outage, is given up
    /// for now.
    pub backoff: Backoff,
    /// An entry that was given up is retried after this long, one that the model refused after
    /// twenty-four times as long.
    pub retry_failed_after: Duration,
}

/// Whether other processes may work on the same store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    Shared,
    /// Nobody else does, so nothing has to be claimed in the database.
    Exclusive,
}

impl Default for BufferOptions {
    fn default() -> Self {
        Self {
            batch: 256,
            parallel: 4,
            max_wait: Duration::from_millis(100),
            poll: Duration::from_secs(2),
            lease: Duration::from_secs(30),
            ownership: Ownership::Shared,
            backoff: Backoff {
                max_attempts: 6,
                first_delay: Duration::from_millis(500),
                max_delay: Duration::from_secs(30),
                jitter: 0.25,
            },
            retry_failed_after: Duration::from_secs(3600),
        }
    }
}

impl BufferOptions {
    /// For a model that shares the processor with everything else: calls that leave room for others.
    pub fn in_process() -> Self {
        Self {
            batch: 64,
            parallel: 1,
            ..Self::default()
        }
    }
}

/// The running worker. Clones are handles of the same one.
#[derive(Clone)]
pub struct Buffer {
    hints: Arc<Hints>,
    circuit: Arc<EmbedderCircuit>,
    stop: Arc<watch::Sender<bool>>,
    task: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Buffer {
    /// Starts the worker. It first makes sure that every entry has, or gets, a vector of this model.
    pub fn start(
        records: Arc<dyn Records>,
        store: Arc<dyn Storage>,
        embedder: Arc<dyn Embedder>,
        options: BufferOptions,
    ) -> Self {
        let hints = Arc::new(Hints::default());
        let circuit = Arc::new(EmbedderCircuit::new(options.clone()));
        let (stop, stopped) = watch::channel(false);
        let worker = Worker {
            records,
            store,
            embedder,
            options,
            hints: Arc::clone(&hints),
            circuit: Arc::clone(&circuit),
            in_flight: Arc::default(),
        };
        let task = tokio::spawn(run(Arc::new(worker), stopped));
        Self {
            hints,
            circuit,
            stop: Arc::new(stop),
            task: Arc::new(Mutex::new(Some(task))),
        }
    }

    /// Tells the worker that an entry of this kind is due. The entry is in the database already.
    pub fn enqueued(&self, kind: Kind) {
        self.hints.add(kind);
    }

    /// Why the last call that should have embedded something did not; nothing once one does.
    pub fn last_error(&self) -> Option<String> {
        self.circuit.error()
    }

    /// Embeds what is due now, then ends; what is not done by the deadline waits for the next start.
    pub async fn stop(&self, deadline: Duration) {
        let Some(mut task) = self.task.lock().await.take() else {
            return;
        };
        self.stop.send_replace(true);
        if tokio::time::timeout(deadline, &mut task).await.is_err() {
            task.abort();
            tracing::warn!(
                "the embedding buffer was not empty in time; the rest is embedded after the next start"
            );
        }
    }
}

/// How many entries of each kind may have become due since they were last looked for.
#[derive(Default)]
struct Hints {
    counts: [AtomicUsize; Kind::ALL.len()],
    added: Notify,
}

impl Hints {
    fn add(&self, kind: Kind) {
        if let Some(count) = self.counts.get(kind.index()) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.added.notify_one();
    }

    fn total(&self) -> usize {
        self.counts
            .iter()
            .map(|count| count.load(Ordering::Relaxed))
            .sum()
    }

    /// The kinds with hints, which are thereby taken.
    fn take(&self) -> Vec<Kind> {
        Kind::ALL
            .into_iter()
            .zip(&self.counts)
            .filter_map(|(kind, count)| (count.swap(0, Ordering::Relaxed) > 0).then_some(kind))
            .collect()
    }

    /// Waits until a batch is full, or until the first of its entries has waited for `max_wait`.
    async fn ready(&self, batch: usize, max_wait: Duration) {
        while self.total() == 0 {
            self.added.notified().await;
        }
        let full = async {
            while self.total() < batch {
                self.added.notified().await;
            }
        };
        let _ = tokio::time::timeout(max_wait, full).await;
    }
}

pub(super) struct Worker {
    pub(super) records: Arc<dyn Records>,
    pub(super) store: Arc<dyn Storage>,
    pub(super) embedder: Arc<dyn Embedder>,
    pub(super) options: BufferOptions,
    pub(super) circuit: Arc<EmbedderCircuit>,
    hints: Arc<Hints>,
    in_flight: Arc<InFlight>,
}

/// What the worker woke up for.
struct Wanted {
    kinds: Vec<Kind>,
    sweep: Sweep,
}

#[derive(PartialEq, Eq)]
enum Sweep {
    /// Only what hints told of.
    No,
    /// Also what only the database knows of.
    Yes,
}

async fn run(worker: Arc<Worker>, mut stop: watch::Receiver<bool>) {
    if !prepare(&worker, &mut stop).await {
        return;
    }
    let mut rounds = JoinSet::new();
    // Ends with this function, however that ends.
    let mut measuring = JoinSet::new();
    measuring.spawn(keep_measuring(Arc::clone(&worker)));
    // Kinds of which the last claim left some behind.
    let mut more = Vec::new();
    // The first look is for what an earlier process left.
    let mut is_first = true;
    loop {
        while rounds.len() >= ROUNDS {
            rounds.join_next().await;
        }
        let stopping = *stop.borrow();
        if stopping && worker.circuit.refuses() {
            // A probe in flight may close the circuit.
            match rounds.join_next().await {
                Some(_) => continue,
                None => break,
            }
        }
        let wanted = if stopping || is_first {
            is_first = false;
            Wanted {
                kinds: Kind::ALL.to_vec(),
                sweep: Sweep::Yes,
            }
        } else {
            tokio::select! {
                wanted = worker.wait(std::mem::take(&mut more)) => wanted,
                _ = stop.changed() => continue,
            }
        };
        match worker.look(&wanted).await {
            Ok(found) if found.claimed.is_empty() => {
                more.clear();
                // A round that ends may leave something.
                if stopping && rounds.join_next().await.is_none() {
                    break;
                }
            }
            Ok(found) => {
                more = found.more;
                let round = batch::round(Arc::clone(&worker), found.claimed, found.lease_ends);
                let hints = Arc::clone(&worker.hints);
                rounds.spawn(async move {
                    let left = round.await;
                    drop(found.underway);
                    left.into_iter().for_each(|kind| hints.add(kind));
                });
            }
            Err(error) => {
                tracing::error!(%error, "the embedding buffer cannot read what is due");
                if stopping {
                    break;
                }
                tokio::time::sleep(AFTER_STORE_FAILURE).await;
            }
        }
    }
    while rounds.join_next().await.is_some() {}
}

async fn keep_measuring(worker: Arc<Worker>) {
    for turn in (0..COUNT_EVERY).cycle() {
        let mut measured = reconcile::measure_lag(&worker).await;
        if turn == 0 && measured.is_ok() {
            measured = reconcile::measure_queue(worker.records.as_ref()).await;
        }
        if let Err(error) = measured {
            tracing::warn!(%error, "what waits to be embedded cannot be counted");
        }
        tokio::time::sleep(MEASURE_EVERY).await;
    }
}

/// `false` when the worker was stopped while the store failed.
async fn prepare(worker: &Worker, stop: &mut watch::Receiver<bool>) -> bool {
    while let Err(error) = try_to_prepare(worker).await {
        tracing::error!(%error, "agent memory cannot be prepared for embedding; trying again");
        let stopped = tokio::time::timeout(AFTER_STORE_FAILURE, stop.wait_for(|stop| *stop)).await;
        if stopped.is_ok() {
            return false;
        }
    }
    true
}

async fn try_to_prepare(worker: &Worker) -> Result<(), StorageError> {
    reconcile::with_model(worker).await?;
    reconcile::take_up_all_failed(worker.records.as_ref()).await
}

fn halved(count: usize, times: u32) -> usize {
    count.checked_shr(times).unwrap_or_default()
}

struct Due {
    claimed: Vec<Claimed>,
    /// Nobody else takes them until this is dropped.
    underway: Vec<Underway>,
    more: Vec<Kind>,
    lease_ends: Instant,
}

impl Worker {
    async fn wait(&self, more: Vec<Kind>) -> Wanted {
        self.circuit.ready().await;
        let wanted = if more.is_empty() {
            self.wait_for_work().await
        } else {
            Wanted {
                kinds: more,
                sweep: Sweep::No,
            }
        };
        // A round that was under way may have failed meanwhile.
        self.circuit.ready().await;
        wanted
    }

    async fn wait_for_work(&self) -> Wanted {
        let BufferOptions { batch, max_wait, .. } = self.options;
        match tokio::time::timeout(self.options.poll, self.hints.ready(batch, max_wait)).await {
            Ok(()) => Wanted {
                kinds: self.hints.take(),
                sweep: Sweep::No,
            },
            Err(_) => Wanted {
                kinds: Kind::ALL.to_vec(),
                sweep: Sweep::Yes,
            },
        }
    }

    /// How many entries a round takes: fewer while calls fail.
    fn round_size(&self) -> usize {
        let BufferOptions { batch, parallel, .. } = self.options;
        halved(batch * parallel, self.circuit.halvings())
    }

    /// A provider that is slow with several calls may answer one.
    pub(super) fn calls_at_once(&self) -> usize {
        halved(self.options.parallel, self.circuit.halvings()).max(1)
    }

    /// Takes a round's worth of the kinds that are wanted.
    async fn look(&self, wanted: &Wanted) -> Result<Due, StorageError> {
        if wanted.sweep == Sweep::Yes {
            reconcile::sweep(self).await?;
        }
        let limit = (self.round_size() / wanted.kinds.len().max(1)).max(1);
        let mut due = Due {
            claimed: Vec::new(),
            underway: Vec::new(),
            more: Vec::new(),
            lease_ends: Instant::now() + self.options.lease,
        };
        let underway = self.in_flight.begin_look();
        let taking = wanted.kinds.iter().map(|kind| self.take(*kind, limit, underway));
        for (kind, taken) in wanted.kinds.iter().zip(futures::future::join_all(taking).await) {
            let (records, underway) = taken?;
            if records.len() == limit {
                due.more.push(*kind);
            }
            due.underway.extend(underway);
            due.claimed.extend(records.into_iter().filter_map(Claimed::read));
        }
        Ok(due)
    }

    /// Due entries that nobody else works on; so many are under way here.
    async fn take(
        &self,
        kind: Kind,
        limit: usize,
        underway: usize,
    ) -> Result<(Vec<Record>, Option<Underway>), StorageError> {
        let now = now();
        match self.options.ownership {
            Ownership::Shared => {
                let lease = i64::try_from(self.options.lease.as_millis()).unwrap_or(i64::MAX / 4);
                let claimed = self
                    .records
                    .claim(kind.records(), limit, now, now.saturating_add(lease));
                Ok((claimed.await?, None))
            }
            Ownership::Exclusive => {
                let due = self.records.due(kind.records(), limit + underway, now).await?;
                let (taken, underway) = self.in_flight.take(kind, due, limit);
                Ok((taken, Some(underway)))
            }
        }
    }
}
