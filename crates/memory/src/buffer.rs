//! The background worker that embeds due entries.
//!
//! A round claims due entries, embeds them in calls of at most [`BufferOptions::batch`] texts and within
//! the embedder's own limits, stores the vectors of each call and marks its entries done at the claimed
//! version: an entry that was saved again meanwhile stays due. Two rounds overlap, so that the provider
//! is busy while the database is.
//!
//! A round begins when a batch is full or when its first entry has waited long enough. Saves hint how
//! many entries are due. Hints may get lost, so the worker also polls the database: for work that an
//! earlier process or a dead one left, and for entries whose delay is over.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ragstone_core::backoff::Backoff;
use ragstone_core::model::{Embedder, ModelIdentity};
use ragstone_core::records::Records;
use ragstone_core::storage::{Storage, StorageError};
use tokio::sync::{Mutex, Notify, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::batch::{self, Claimed};
use super::circuit::EmbedderCircuit;
use super::entry::MemoryKind;
use super::reconcile;
use ragstone_lease::{Claim, ClaimRequest, Leases, Ownership, now};

/// Rounds at once.
const ROUNDS: usize = 2;
/// The delay after a failure of the database.
const STORE_RETRY_DELAY: Duration = Duration::from_secs(1);
const METRICS_INTERVAL: Duration = Duration::from_secs(3);
/// Counting entries costs more, and happens every so many intervals.
const COUNT_EVERY: u32 = 5;

#[derive(Debug, Clone)]
pub struct BufferOptions {
    /// The most texts in one call of the embedder.
    pub batch: usize,
    /// How many calls a round makes at once.
    pub parallel: usize,
    /// How long an entry waits for others to share its call.
    pub batch_window: Duration,
    /// How often the database is polled without a hint.
    pub poll_interval: Duration,
    /// After this long, an entry that was claimed and not finished can be claimed again. With
    /// `poll_interval` it bounds how long the entries of a dead process wait: less than half a minute.
    pub lease: Duration,
    pub ownership: Ownership,
    /// Delays after failures. An entry that failed `max_attempts` times, by no outage, is given up
    /// for now.
    pub backoff: Backoff,
    /// An entry that was given up is retried after this long, one that the model refused after
    /// twenty-four times as long.
    pub retry_failed_after: Duration,
}

impl Default for BufferOptions {
    fn default() -> Self {
        Self {
            batch: 256,
            parallel: 4,
            batch_window: Duration::from_millis(100),
            poll_interval: Duration::from_secs(2),
            lease: Duration::from_secs(20),
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
    /// Small calls, for a model that shares the processor with everything else.
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
    model: Arc<ModelIdentity>,
    hints: Arc<Hints>,
    circuit: Arc<EmbedderCircuit>,
    stop: Arc<watch::Sender<bool>>,
    task: Arc<Mutex<Option<JoinHandle<()>>>>,
}

impl Buffer {
    /// Starts the worker. It first makes every entry due that has no vector of this model.
    pub fn start(
        records: Arc<dyn Records>,
        store: Arc<dyn Storage>,
        embedder: Arc<dyn Embedder>,
        options: BufferOptions,
    ) -> Self {
        let hints = Arc::new(Hints::default());
        let circuit = Arc::new(EmbedderCircuit::new(options.clone()));
        let model = Arc::new(embedder.info().identity.clone());
        let (stop, stopped) = watch::channel(false);
        let worker = EmbedWorker {
            records,
            store,
            embedder,
            leases: Leases::new(options.ownership, options.lease),
            options,
            hints: Arc::clone(&hints),
            circuit: Arc::clone(&circuit),
        };
        let task = tokio::spawn(run(Arc::new(worker), stopped));
        Self {
            model,
            hints,
            circuit,
            stop: Arc::new(stop),
            task: Arc::new(Mutex::new(Some(task))),
        }
    }

    pub(super) fn model(&self) -> &ModelIdentity {
        &self.model
    }

    /// Hints that an entry of this kind is due. The entry is stored already.
    pub fn enqueued(&self, kind: MemoryKind) {
        self.hints.add(kind);
    }

    /// The error of the last call of the embedder, if it failed.
    pub fn last_error(&self) -> Option<String> {
        self.circuit.error()
    }

    /// Embeds due entries, then ends. Entries that remain at the deadline wait for the next start.
    pub async fn stop(&self, deadline: Duration) {
        let Some(mut task) = self.task.lock().await.take() else {
            return;
        };
        self.stop.send_replace(true);
        if tokio::time::timeout(deadline, &mut task).await.is_err() {
            task.abort();
            tracing::warn!("stopped before all entries were embedded; the next start embeds the rest");
        }
    }
}

/// How many entries of each kind may have become due since the last claim.
#[derive(Default)]
struct Hints {
    counts: [AtomicUsize; MemoryKind::ALL.len()],
    added: Notify,
}

impl Hints {
    fn add(&self, kind: MemoryKind) {
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

    /// Takes the hints and returns their kinds.
    fn take(&self) -> Vec<MemoryKind> {
        MemoryKind::ALL
            .into_iter()
            .zip(&self.counts)
            .filter_map(|(kind, count)| (count.swap(0, Ordering::Relaxed) > 0).then_some(kind))
            .collect()
    }

    /// Waits until a batch is full, or until its first entry has waited for `batch_window`.
    async fn ready(&self, batch: usize, batch_window: Duration) {
        while self.total() == 0 {
            self.added.notified().await;
        }
        let full = async {
            while self.total() < batch {
                self.added.notified().await;
            }
        };
        let _ = tokio::time::timeout(batch_window, full).await;
    }
}

pub(super) struct EmbedWorker {
    pub(super) records: Arc<dyn Records>,
    pub(super) store: Arc<dyn Storage>,
    pub(super) embedder: Arc<dyn Embedder>,
    pub(super) options: BufferOptions,
    pub(super) circuit: Arc<EmbedderCircuit>,
    hints: Arc<Hints>,
    pub(super) leases: Leases,
}

/// Kinds of entries to look for.
struct Look {
    kinds: Vec<MemoryKind>,
    trigger: Trigger,
}

#[derive(PartialEq, Eq)]
enum Trigger {
    Hint,
    /// Also finishes deletions and retries failed entries.
    Poll,
}

async fn run(worker: Arc<EmbedWorker>, mut stop: watch::Receiver<bool>) {
    if !prepare(&worker, &mut stop).await {
        return;
    }
    let mut rounds = JoinSet::new();
    // Aborted when this function ends.
    let mut metrics = JoinSet::new();
    metrics.spawn(report_metrics(Arc::clone(&worker)));
    // Kinds of which more entries were due than the last claim took.
    let mut more = Vec::new();
    // The first claim takes what an earlier process left.
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
        let look = if stopping || is_first {
            is_first = false;
            Look {
                kinds: MemoryKind::ALL.to_vec(),
                trigger: Trigger::Poll,
            }
        } else {
            tokio::select! {
                look = worker.wait(std::mem::take(&mut more)) => look,
                _ = stop.changed() => continue,
            }
        };
        match worker.claim(&look).await {
            Ok(found) if found.claimed.is_empty() => {
                more.clear();
                // A round that ends may leave entries.
                if stopping && rounds.join_next().await.is_none() {
                    break;
                }
            }
            Ok(found) => {
                more = found.more;
                let round = batch::round(Arc::clone(&worker), found.claimed, found.claim.lease_ends);
                let hints = Arc::clone(&worker.hints);
                rounds.spawn(async move {
                    let left = round.await;
                    drop(found.claim);
                    left.into_iter().for_each(|kind| hints.add(kind));
                });
            }
            Err(error) => {
                tracing::error!(%error, "due entries of agent memory could not be read");
                if stopping {
                    break;
                }
                tokio::time::sleep(STORE_RETRY_DELAY).await;
            }
        }
    }
    while rounds.join_next().await.is_some() {}
}

async fn report_metrics(worker: Arc<EmbedWorker>) {
    for turn in (0..COUNT_EVERY).cycle() {
        let mut measured = reconcile::measure_lag(&worker).await;
        if turn == 0 && measured.is_ok() {
            measured = reconcile::measure_queue(worker.records.as_ref()).await;
        }
        if let Err(error) = measured {
            tracing::warn!(%error, "the embedding queue could not be counted");
        }
        tokio::time::sleep(METRICS_INTERVAL).await;
    }
}

/// `false` when the worker was stopped while the store failed.
async fn prepare(worker: &EmbedWorker, stop: &mut watch::Receiver<bool>) -> bool {
    while let Err(error) = try_to_prepare(worker).await {
        tracing::error!(%error, "agent memory could not be prepared for embedding; retrying");
        let stopped = tokio::time::timeout(STORE_RETRY_DELAY, stop.wait_for(|stop| *stop)).await;
        if stopped.is_ok() {
            return false;
        }
    }
    true
}

async fn try_to_prepare(worker: &EmbedWorker) -> Result<(), StorageError> {
    reconcile::with_model(worker).await?;
    reconcile::retry_all_failed(worker.records.as_ref()).await
}

fn halved(count: usize, times: u32) -> usize {
    count.checked_shr(times).unwrap_or_default()
}

struct EntriesToEmbed {
    claimed: Vec<Claimed>,
    claim: Claim,
    /// Kinds of which more may be due.
    more: Vec<MemoryKind>,
}

impl EmbedWorker {
    async fn wait(&self, more: Vec<MemoryKind>) -> Look {
        self.circuit.ready().await;
        let look = if more.is_empty() {
            self.wait_for_work().await
        } else {
            Look {
                kinds: more,
                trigger: Trigger::Hint,
            }
        };
        // A round in flight may have failed meanwhile.
        self.circuit.ready().await;
        look
    }

    async fn wait_for_work(&self) -> Look {
        let BufferOptions {
            batch, batch_window, ..
        } = self.options;
        match tokio::time::timeout(self.options.poll_interval, self.hints.ready(batch, batch_window)).await {
            Ok(()) => Look {
                kinds: self.hints.take(),
                trigger: Trigger::Hint,
            },
            Err(_) => Look {
                kinds: MemoryKind::ALL.to_vec(),
                trigger: Trigger::Poll,
            },
        }
    }

    /// Entries in a round: fewer while calls fail.
    fn round_size(&self) -> usize {
        let BufferOptions { batch, parallel, .. } = self.options;
        halved(batch * parallel, self.circuit.halvings())
    }

    /// Concurrent calls: a provider that is slow with several may answer one.
    pub(super) fn calls_at_once(&self) -> usize {
        halved(self.options.parallel, self.circuit.halvings()).max(1)
    }

    /// Claims entries for one round.
    async fn claim(&self, look: &Look) -> Result<EntriesToEmbed, StorageError> {
        if look.trigger == Trigger::Poll {
            reconcile::sweep(self).await?;
        }
        let limit = (self.round_size() / look.kinds.len().max(1)).max(1);
        let kinds: Vec<&'static str> = look.kinds.iter().map(|kind| kind.records()).collect();
        let request = ClaimRequest::new(&kinds, limit, now());
        let mut claim = self.leases.claim(self.records.as_ref(), request).await?;
        let (mut claimed, mut more) = (Vec::new(), Vec::new());
        for (kind, records) in look.kinds.iter().zip(claim.take()) {
            if records.len() == limit {
                more.push(*kind);
            }
            claimed.extend(records.into_iter().filter_map(Claimed::read));
        }
        Ok(EntriesToEmbed { claimed, claim, more })
    }
}
