//! Doing jobs: of one collection one at a time, of several a few.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ragstone_core::collection::CollectionName;
use ragstone_core::records::{Applied, Expect, Millis, RecordChange};
use ragstone_core::storage::StorageError;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinHandle;

use super::stored::{ItemRecord, Items, JobRecord, KIND, PART_KIND, Stored};
use super::{JobState, Jobs, Running, now};
use crate::error::ServiceError;
use crate::ingest::{IngestTarget, Input, Progress, UNKNOWN_TYPE};

/// A worker that is silent for this long is taken for dead.
const LEASE: Millis = 10_000;
const HEARTBEAT: Duration = Duration::from_secs(3);
/// How long an idle worker waits before it looks again for what other processes left.
const POLL: Duration = Duration::from_secs(2);
/// How far a job is, is noted after so many documents or so many bytes.
const GROUP_ITEMS: usize = 64;
const GROUP_BYTES: u64 = 4 << 20;
/// So many at once, so that a large job does not keep a small one of another collection waiting.
const AT_ONCE: usize = 2;
/// What a job needs may be away for about a day, at one attempt a minute.
const MAX_ATTEMPTS: u32 = 24 * 60;
const MAX_WAIT: Millis = 60_000;
/// How long a job waits that finds an earlier one which nobody has taken yet.
const BEHIND: Millis = 200;

/// Serves the queue until it is told to stop.
pub struct Worker {
    jobs: Jobs,
    /// True once the server is stopping: hand back what is being worked on.
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Worker {
    pub(super) fn new(jobs: Jobs) -> Self {
        Self {
            jobs,
            stop: watch::Sender::new(false),
            tasks: Vec::new(),
        }
    }

    /// Starts working in the background.
    pub fn start(mut self) -> Self {
        for _ in 0..AT_ONCE {
            let jobs = self.jobs.clone();
            let stop = self.stop.subscribe();
            self.tasks
                .push(tokio::spawn(async move { serve(&jobs, stop).await }));
        }
        self
    }

    /// Hands back the jobs that are being worked on, so that the next start goes on with them at once.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        for task in std::mem::take(&mut self.tasks) {
            let _ = task.await;
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // Whoever could say so being gone means the same.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn serve(jobs: &Jobs, mut stop: watch::Receiver<bool>) {
    let shared = Arc::clone(&jobs.shared);
    while !*stop.borrow() {
        match work_once(jobs, &mut stop).await {
            Ok(Found::Job) => {}
            Ok(Found::Stop) => return,
            found => {
                if let Err(error) = found {
                    tracing::warn!(%error, "jobs cannot be looked for");
                }
                tokio::select! {
                    () = shared.wake.notified() => {}
                    () = stopped(&mut stop) => return,
                    () = tokio::time::sleep(POLL) => {}
                }
            }
        }
    }
}

enum Found {
    Job,
    Nothing,
    Stop,
}

async fn work_once(jobs: &Jobs, stop: &mut watch::Receiver<bool>) -> Result<Found, StorageError> {
    let now = now();
    let claimed = jobs.ingestion.records.claim(KIND, 1, now, now + LEASE).await?;
    let Some(record) = claimed.first() else {
        return Ok(Found::Nothing);
    };
    let Some(stored) = Stored::read(record) else {
        tracing::error!(job = record.key, "a job's record cannot be read and is removed");
        jobs.ingestion
            .records
            .apply(vec![delete_job(&record.key, record.version)])
            .await?;
        return Ok(Found::Job);
    };
    if stored.record.state.is_final() {
        // It was kept long enough. Its documents should be gone already; a crash may have left some.
        jobs.drop_items(&stored).await?;
        let gone = delete_job(&stored.id, stored.version);
        jobs.ingestion.records.apply(vec![gone]).await?;
        return Ok(Found::Job);
    }
    if let Some(first) = jobs.first_open(&stored.record.collection).await?
        && first.key != stored.id
    {
        let due = first.due.unwrap_or(now).max(now + BEHIND);
        release(jobs, stored, due).await?;
        return Ok(Found::Job);
    }
    let id = stored.id.clone();
    let ended = do_job(jobs, stored, stop).await;
    jobs.shared
        .running
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remove(&id);
    ended
}

fn delete_job(id: &str, version: u64) -> RecordChange {
    RecordChange::Delete {
        kind: KIND.to_owned(),
        key: id.to_owned(),
        expect: Expect::Version(version),
    }
}

async fn do_job(
    jobs: &Jobs,
    mut stored: Stored,
    stop: &mut watch::Receiver<bool>,
) -> Result<Found, StorageError> {
    stored.record.state = JobState::Running;
    stored.record.started.get_or_insert_with(now);
    let cancel = Arc::new(Notify::new());
    let items = jobs.items(&stored).await?;
    if items.list.len() as u64 != stored.record.item_count {
        let lost = Some("its documents are no longer there".to_owned());
        jobs.end(&mut stored, JobState::Failed, lost).await?;
        return Ok(Found::Job);
    }
    tracing::info!(
        job = stored.id,
        collection = stored.record.collection,
        "ingestion job started"
    );
    loop {
        let group = next_group(&items.list, stored.record.next);
        if group.is_empty() {
            jobs.end(&mut stored, JobState::Done, None).await?;
            tracing::info!(job = stored.id, "ingestion job done");
            return Ok(Found::Job);
        }
        let progress = Arc::new(Progress::default());
        let running = Running {
            before: stored.record.report.clone(),
            progress: Arc::clone(&progress),
            cancel: Arc::clone(&cancel),
        };
        jobs.shared
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(stored.id.clone(), running);
        if !renew(jobs, &mut stored).await? {
            return Ok(Found::Job);
        }
        let work = Work {
            items: &items,
            group: group.clone(),
            progress: &progress,
        };
        match attend(jobs, &mut stored, work, &cancel, stop).await? {
            Attended::Done(Ok(())) => {
                let snapshot = progress.snapshot();
                stored.record.report.add(&snapshot);
                stored.record.next = group.end;
                stored.record.attempts = 0;
                stored.record.error = None;
                if !renew(jobs, &mut stored).await? {
                    return Ok(Found::Job);
                }
                let parts = items.delete_parts(group);
                jobs.ingestion.records.apply(parts).await?;
            }
            Attended::Done(Err(error)) => {
                give_up_or_retry(jobs, stored, error).await?;
                return Ok(Found::Job);
            }
            Attended::Lost => return Ok(Found::Job),
            Attended::Stopping => {
                release(jobs, stored, now()).await?;
                return Ok(Found::Stop);
            }
        }
    }
}

fn next_group(items: &[ItemRecord], start: usize) -> Range<usize> {
    let mut bytes = 0;
    let mut end = start;
    for item in items.iter().skip(start).take(GROUP_ITEMS) {
        if end > start && bytes + item.bytes > GROUP_BYTES {
            break;
        }
        bytes += item.bytes;
        end += 1;
    }
    start..end
}

enum Attended {
    Done(Result<(), ServiceError>),
    /// Cancelled, or another process has it.
    Lost,
    Stopping,
}

/// Some of the documents of a job.
struct Work<'a> {
    items: &'a Items,
    group: Range<usize>,
    progress: &'a Arc<Progress>,
}

/// Works on a group while keeping the lease.
async fn attend(
    jobs: &Jobs,
    stored: &mut Stored,
    work: Work<'_>,
    cancel: &Notify,
    stop: &mut watch::Receiver<bool>,
) -> Result<Attended, StorageError> {
    let record = stored.record.clone();
    let mut work = Box::pin(ingest_group(jobs, &record, work));
    let mut beat = tokio::time::interval(HEARTBEAT);
    beat.tick().await;
    loop {
        tokio::select! {
            done = &mut work => return Ok(Attended::Done(done)),
            () = cancel.notified() => return Ok(Attended::Lost),
            () = stopped(stop) => return Ok(Attended::Stopping),
            _ = beat.tick() => match renew(jobs, stored).await {
                Ok(true) => {}
                Ok(false) => return Ok(Attended::Lost),
                Err(error) => tracing::warn!(%error, job = stored.id, "a job's lease could not be renewed"),
            },
        }
    }
}

async fn ingest_group(jobs: &Jobs, record: &JobRecord, work: Work<'_>) -> Result<(), ServiceError> {
    let Work {
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
        Ok::<_, ServiceError>(())
    };
    let run = jobs.ingestion.run(prepared, inputs, Arc::clone(progress));
    tokio::try_join!(feed, run)?;
    Ok(())
}

/// Writes the record as it stands, with a new lease. False when it is no longer ours.
async fn renew(jobs: &Jobs, stored: &mut Stored) -> Result<bool, StorageError> {
    let change = stored
        .record
        .put(&stored.id, Some(now() + LEASE), Expect::Version(stored.version));
    let applied = jobs.ingestion.records.apply(vec![change]).await?;
    let [Applied::Done { version }] = applied[..] else {
        tracing::info!(job = stored.id, "a job was cancelled or taken over");
        return Ok(false);
    };
    stored.version = version;
    Ok(true)
}

/// Back into the queue.
async fn release(jobs: &Jobs, mut stored: Stored, due: Millis) -> Result<(), StorageError> {
    stored.record.state = JobState::Queued;
    let change = stored
        .record
        .put(&stored.id, Some(due), Expect::Version(stored.version));
    jobs.ingestion.records.apply(vec![change]).await.map(|_| ())
}

/// What may pass is tried again later; what will not is the end of the job.
async fn give_up_or_retry(jobs: &Jobs, mut stored: Stored, error: ServiceError) -> Result<(), StorageError> {
    let passing = match &error {
        ServiceError::Model(error) => error.retry_after().is_some(),
        ServiceError::Storage(StorageError::Unavailable { .. }) | ServiceError::ModelNotLoaded { .. } => true,
        _ => false,
    };
    stored.record.attempts += 1;
    let message = error.to_string();
    if passing && stored.record.attempts < MAX_ATTEMPTS {
        let wait = MAX_WAIT.min(1000 << stored.record.attempts.min(8));
        tracing::warn!(job = stored.id, %error, retry_in_ms = wait, "an ingestion job waits");
        stored.record.error = Some(message);
        return release(jobs, stored, now() + wait).await;
    }
    tracing::error!(job = stored.id, %error, "an ingestion job failed");
    // The reason may be of no concern to clients; the log has it.
    let message = match error {
        ServiceError::Storage(StorageError::Failed(_)) => {
            "the store failed; the server's log says more".to_owned()
        }
        _ => message,
    };
    jobs.end(&mut stored, JobState::Failed, Some(message))
        .await
        .map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_a_dead_process_is_taken_over_within_thirty_seconds() {
        // The lease may have been renewed just before it died, and the others just have looked.
        let lease = Duration::from_millis(LEASE.unsigned_abs());
        assert!(lease + POLL <= Duration::from_secs(30));
        assert!(
            HEARTBEAT * 3 < lease,
            "a live worker misses beats without losing its job"
        );
    }
}
