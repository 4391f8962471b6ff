//! The worker of the job queue: jobs of one collection run one at a time, of several a few at once.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ragstone_core::backoff::{Backoff, RetryLimits};
use ragstone_core::collection::CollectionName;
use ragstone_core::records::{Expect, Millis, Record, RecordChange};
use ragstone_core::storage::StorageError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;

use super::stored::{ItemRecord, Items, JobRecord, KIND, PART_KIND, StoredJob};
use super::{JobState, Jobs, RunningJob};
use crate::{IngestTarget, Input, Progress, UNKNOWN_TYPE};
use ragstone_core::backend::BackendError;
use ragstone_lease::{ClaimRequest, Leases, millis, now};

/// A worker that is silent for this long counts as dead.
static LEASES: Leases = Leases::shared(Duration::from_secs(10));
/// How long an idle worker waits before it looks for jobs that other processes left.
pub(super) const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Progress is stored after so many documents or so many bytes.
const GROUP_ITEMS: usize = 64;
const GROUP_BYTES: u64 = 4 << 20;
/// Several at once, so that a large job does not delay a small one of another collection.
const PARALLEL_JOBS: usize = 2;
/// A model or store that a job needs may be unavailable for about a day, at one attempt a minute.
const BACKOFF: Backoff = Backoff {
    max_attempts: 24 * 60,
    first_delay: Duration::from_secs(2),
    max_delay: Duration::from_secs(60),
    jitter: 0.0,
};
/// A job is given up after the process has died so often without progress. A document that kills the
/// process must not do so at every start.
const MAX_CRASHES: u32 = 3;
/// The delay of a job behind an earlier one of its collection that no worker has claimed yet.
const QUEUE_DELAY: Millis = 200;

/// Serves the queue until it is stopped.
pub struct JobWorker {
    jobs: Jobs,
    /// True once the server stops: release what is in flight.
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl JobWorker {
    pub(super) fn new(jobs: Jobs) -> Self {
        Self {
            jobs,
            stop: watch::Sender::new(false),
            tasks: Vec::new(),
        }
    }

    /// Starts working in the background.
    pub fn start(mut self) -> Self {
        for _ in 0..PARALLEL_JOBS {
            let jobs = self.jobs.clone();
            let stop = self.stop.subscribe();
            self.tasks
                .push(tokio::spawn(async move { serve(&jobs, stop).await }));
        }
        self
    }

    /// Releases the jobs in flight, so that the next start continues them at once.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        for task in std::mem::take(&mut self.tasks) {
            let _ = task.await;
        }
    }
}

impl Drop for JobWorker {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // A dropped sender means the same.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn serve(jobs: &Jobs, mut stop: watch::Receiver<bool>) {
    let shared = Arc::clone(&jobs.shared);
    while !*stop.borrow() {
        match work_once(jobs, &mut stop).await {
            Ok(NextJob::Continue) => {}
            Ok(NextJob::Stop) => return,
            idle => {
                if let Err(error) = idle {
                    tracing::warn!(%error, "the job queue could not be read");
                }
                tokio::select! {
                    () = shared.wake.notified() => {}
                    () = stopped(&mut stop) => return,
                    () = tokio::time::sleep(POLL_INTERVAL) => {}
                }
            }
        }
    }
}

/// The worker's next step after a job.
enum NextJob {
    Continue,
    /// Nothing is due: wait.
    Wait,
    Stop,
}

pub(super) async fn claim(jobs: &Jobs, now: Millis) -> Result<Option<Record>, StorageError> {
    let request = ClaimRequest::new(&[KIND], 1, now);
    let mut claim = LEASES.claim(&*jobs.ingestion.records, request).await?;
    Ok(claim.take().into_iter().flatten().next())
}

async fn work_once(jobs: &Jobs, stop: &mut watch::Receiver<bool>) -> Result<NextJob, StorageError> {
    let now = now();
    let Some(record) = claim(jobs, now).await? else {
        return Ok(NextJob::Wait);
    };
    let Some(stored) = StoredJob::read(&record) else {
        tracing::error!(job = record.key, "the record of a job is damaged; deleting it");
        jobs.ingestion
            .records
            .apply(vec![delete_job(&record.key, record.version)])
            .await?;
        return Ok(NextJob::Continue);
    };
    if stored.record.state.is_final() {
        // Its retention is over. Its documents should be gone; a crash may have left some.
        jobs.drop_items(&stored).await?;
        let gone = delete_job(&stored.id, stored.version);
        jobs.ingestion.records.apply(vec![gone]).await?;
        return Ok(NextJob::Continue);
    }
    if let Some(first) = jobs.first_open(&stored.record.collection).await?
        && first.key != stored.id
    {
        let run_at = first.run_at.unwrap_or(now).max(now + QUEUE_DELAY);
        release(jobs, stored, run_at).await?;
        return Ok(NextJob::Continue);
    }
    let id = stored.id.clone();
    let next = run_job(jobs, stored, stop).await;
    jobs.shared
        .running
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(&id);
    next
}

fn delete_job(id: &str, version: u64) -> RecordChange {
    RecordChange::Delete {
        kind: KIND.to_owned(),
        key: id.to_owned(),
        expect: Expect::Version(version),
    }
}

async fn run_job(
    jobs: &Jobs,
    mut stored: StoredJob,
    stop: &mut watch::Receiver<bool>,
) -> Result<NextJob, StorageError> {
    let items = jobs.items(&stored).await?;
    if let Some(reason) = why_given_up(&stored.record, &items) {
        tracing::error!(job = stored.id, reason, "ingestion job given up");
        jobs.end(&mut stored, JobState::Failed, Some(reason)).await?;
        return Ok(NextJob::Continue);
    }
    let record = &mut stored.record;
    record.state = JobState::Running;
    record.started.get_or_insert_with(now);
    if record.crashes > 0 {
        let crashed_in = next_group(&items.list, record.next, GROUP_ITEMS);
        record.suspect_until = record.suspect_until.max(crashed_in.end);
    }
    tracing::info!(
        job = stored.id,
        collection = stored.record.collection,
        "ingestion job started"
    );
    let cancel = Arc::new(Notify::new());
    loop {
        // After a crash, one document at a time shows which one was the cause.
        let is_suspect = stored.record.next < stored.record.suspect_until;
        let most = if is_suspect { 1 } else { GROUP_ITEMS };
        let group = next_group(&items.list, stored.record.next, most);
        if group.is_empty() {
            jobs.end(&mut stored, JobState::Done, None).await?;
            tracing::info!(job = stored.id, "ingestion job done");
            return Ok(NextJob::Continue);
        }
        let progress = Arc::new(Progress::default());
        let running = RunningJob {
            before: stored.record.report.clone(),
            progress: Arc::clone(&progress),
            cancel: Arc::clone(&cancel),
        };
        jobs.shared
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(stored.id.clone(), running);
        let turn = jobs.shared.isolation.enter(is_suspect);
        let _turn = match attend(jobs, &mut stored, turn, &cancel, stop).await {
            Ok(turn) => turn,
            Err(interrupted) => return leave(jobs, stored, interrupted).await,
        };
        // Stored before the work begins: should the process die, the next one finds the attempt.
        stored.record.crashes += 1;
        if !renew(jobs, &mut stored).await? {
            return Ok(NextJob::Continue);
        }
        let record = stored.record.clone();
        let work = GroupOfItems {
            items: &items,
            group: group.clone(),
            progress: &progress,
        };
        let outcome = attend(
            jobs,
            &mut stored,
            ingest_group(jobs, &record, work),
            &cancel,
            stop,
        )
        .await;
        match outcome {
            Ok(Ok(())) => {
                let record = &mut stored.record;
                record.report.add(&progress.snapshot());
                record.next = group.end;
                record.attempts = 0;
                record.crashes = 0;
                record.error = None;
                if !renew(jobs, &mut stored).await? {
                    return Ok(NextJob::Continue);
                }
                let parts = items.delete_parts(group);
                jobs.ingestion.records.apply(parts).await?;
            }
            Ok(Err(error)) => {
                stored.record.crashes -= 1;
                give_up_or_retry(jobs, stored, error).await?;
                return Ok(NextJob::Continue);
            }
            Err(interrupted) => {
                stored.record.crashes -= 1;
                return leave(jobs, stored, interrupted).await;
            }
        }
    }
}

/// The reason why a job cannot be continued, if there is one.
fn why_given_up(record: &JobRecord, items: &Items) -> Option<String> {
    if items.list.len() as u64 != record.item_count {
        return Some("its documents are no longer there".to_owned());
    }
    let source = items.list.get(record.next).map(|item| &item.source)?;
    (record.crashes >= MAX_CRASHES).then(|| {
        format!(
            "the server died {} times while ingesting '{source}': remove this document and submit the rest",
            record.crashes
        )
    })
}

fn next_group(items: &[ItemRecord], start: usize, most: usize) -> Range<usize> {
    let mut bytes = 0;
    let mut end = start;
    for item in items.iter().skip(start).take(most) {
        if end > start && bytes + item.bytes > GROUP_BYTES {
            break;
        }
        bytes += item.bytes;
        end += 1;
    }
    start..end
}

/// Why work on a job ended early.
enum Interrupted {
    /// The job was cancelled, or another process took it over.
    Lost,
    Stopping,
}

/// Works while holding the lease.
async fn attend<T>(
    jobs: &Jobs,
    stored: &mut StoredJob,
    work: impl Future<Output = T>,
    cancel: &Notify,
    stop: &mut watch::Receiver<bool>,
) -> Result<T, Interrupted> {
    let interruptible = async {
        tokio::select! {
            done = work => Ok(done),
            () = cancel.notified() => Err(Interrupted::Lost),
            () = stopped(stop) => Err(Interrupted::Stopping),
        }
    };
    LEASES
        .hold(&*jobs.ingestion.records, stored, interruptible)
        .await
        .unwrap_or(Err(Interrupted::Lost))
}

async fn leave(jobs: &Jobs, stored: StoredJob, interrupted: Interrupted) -> Result<NextJob, StorageError> {
    match interrupted {
        Interrupted::Lost => {
            tracing::info!(job = stored.id, "ingestion job cancelled or taken over");
            Ok(NextJob::Continue)
        }
        Interrupted::Stopping => {
            release(jobs, stored, now()).await?;
            Ok(NextJob::Stop)
        }
    }
}

/// Some of the documents of a job.
struct GroupOfItems<'a> {
    items: &'a Items,
    group: Range<usize>,
    progress: &'a Arc<Progress>,
}

async fn ingest_group(jobs: &Jobs, record: &JobRecord, work: GroupOfItems<'_>) -> Result<(), BackendError> {
    let GroupOfItems {
        items,
        group,
        progress,
    } = work;
    let target = IngestTarget {
        collection: CollectionName::parse(record.collection.clone())?,
        chunk_tokens: record.chunk_tokens,
    };
    let prepared = jobs.ingestion.check(&target).await?;
    let (sender, inputs) = mpsc::channel(1);
    let feed = async {
        for index in group {
            let Some(item) = items.list.get(index) else {
                break;
            };
            let Some(kind) = item.kind else {
                progress.update(|report| {
                    report.bytes += item.bytes;
                    report.fail(&item.source, UNKNOWN_TYPE);
                });
                continue;
            };
            let keys = items.part_keys(index);
            let mut parts = jobs.ingestion.records.get(PART_KIND, &keys).await?;
            parts.sort_by(|a, b| a.key.cmp(&b.key));
            let bytes: Vec<u8> = parts.into_iter().flat_map(|part| part.value).collect();
            if bytes.len() as u64 != item.bytes {
                progress.update(|report| report.fail(&item.source, "its content is no longer there"));
                continue;
            }
            let input = Input {
                source: item.source.clone(),
                kind,
                content: item.content(bytes),
                options: item.options.clone(),
            };
            if sender.send(input).await.is_err() {
                break;
            }
        }
        drop(sender);
        Ok::<_, BackendError>(())
    };
    let run = jobs.ingestion.run(prepared, inputs, Arc::clone(progress));
    tokio::try_join!(feed, run)?;
    Ok(())
}

/// Stores the record with a new lease. `false` if the job was cancelled or taken over.
async fn renew(jobs: &Jobs, stored: &mut StoredJob) -> Result<bool, StorageError> {
    let is_ours = LEASES.renew(&*jobs.ingestion.records, stored).await?;
    if !is_ours {
        tracing::info!(job = stored.id, "ingestion job cancelled or taken over");
    }
    Ok(is_ours)
}

/// Puts a job back into the queue.
async fn release(jobs: &Jobs, mut stored: StoredJob, run_at: Millis) -> Result<(), StorageError> {
    stored.record.state = JobState::Queued;
    LEASES
        .release(&*jobs.ingestion.records, &[stored], |_| run_at)
        .await
}

/// Retries a job that failed for a passing reason, and ends any other.
async fn give_up_or_retry(
    jobs: &Jobs,
    mut stored: StoredJob,
    error: BackendError,
) -> Result<(), StorageError> {
    let retry_after = match &error {
        BackendError::Model(error) => error.retry_after(),
        BackendError::Storage(StorageError::Unavailable { retry_after, .. }) => Some(*retry_after),
        BackendError::ModelNotLoaded { .. } => Some(Duration::ZERO),
        _ => None,
    };
    stored.record.attempts += 1;
    let message = error.to_string();
    let attempts = stored.record.attempts;
    if let Some(retry_after) = retry_after
        && let Some(delay) = BACKOFF.retry(attempts, 0.0, RetryLimits::default())
    {
        let delay = delay.max(retry_after);
        tracing::warn!(job = stored.id, %error, ?delay, "ingestion job failed; retrying");
        stored.record.error = Some(message);
        return release(jobs, stored, now().saturating_add(millis(delay))).await;
    }
    tracing::error!(job = stored.id, %error, "ingestion job failed");
    // Internal details of the store stay in the log.
    let message = match error {
        BackendError::Storage(StorageError::Failed(_)) => {
            "the store failed; see the log of the server".to_owned()
        }
        _ => message,
    };
    jobs.end(&mut stored, JobState::Failed, Some(message))
        .await
        .map(|_| ())
}
