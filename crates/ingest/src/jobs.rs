//! Ingestion in the background: a job survives the request that submitted it, and a restart.
//!
//! A job is a record, with its documents in others; all are written in one transaction before the job
//! is acknowledged. A worker claims the job with a lease, renews the lease while it works, and stores
//! its progress after every group of documents. When the worker dies, the lease runs out and another
//! one continues after the last group; documents of that group that were stored already are recognised.
//! Jobs of one collection run one after the other, in the order of submission: otherwise an earlier job
//! could replace documents of a later one.
//! A worker that finds its job changed (cancelled, or taken over because the worker seemed dead) stops.
//! A job whose documents kill the process is given up after a few crashes.

mod stored;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::records::{Expect, Record, RecordRange};
use ragstone_core::storage::StorageError;
use tokio::sync::{Notify, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::{Content, Earlier, FileKind, IngestTarget, Ingestion, InputOptions, Progress, Report};
use ragstone_core::backend::BackendError;
use ragstone_lease::now;

use stored::{ItemRecord, Items, JobRecord, KIND, StoredJob};
pub use stored::{Job, JobState};
pub use worker::JobWorker;

const MAX_SOURCE_BYTES: usize = 1024;
/// The most jobs on one page of the list.
pub const MAX_LISTED: usize = 1000;
/// The most bytes of documents in unfinished jobs, which the store keeps until then.
const MAX_OPEN_BYTES: u64 = 8 << 30;

/// Why a job was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("too many ingestion jobs are unfinished ({open}, with {bytes} bytes): retry later")]
    TooManyJobs { open: u64, bytes: u64 },
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl From<StorageError> for JobError {
    fn from(error: StorageError) -> Self {
        Self::Backend(error.into())
    }
}

impl From<InvalidInput> for JobError {
    fn from(error: InvalidInput) -> Self {
        Self::Backend(error.into())
    }
}

/// The documents of one request.
#[derive(Debug, Clone)]
pub struct NewJob {
    pub collection: CollectionName,
    pub chunk_tokens: Option<usize>,
    pub items: Vec<NewItem>,
}

#[derive(Debug, Clone)]
pub struct NewItem {
    pub source: String,
    /// Absent for files that cannot be read, which the job reports.
    pub kind: Option<FileKind>,
    pub bytes: Vec<u8>,
    /// Set for some rows of a larger file, whose other rows come with other requests.
    pub partial: Option<Earlier>,
    pub options: InputOptions,
}

#[derive(Clone)]
pub struct Jobs {
    ingestion: Ingestion,
    /// Unfinished jobs at once.
    max_open: u64,
    max_open_bytes: u64,
    shared: Arc<JobQueue>,
}

/// One page of the list, newest first.
#[derive(Debug)]
pub struct JobPage {
    pub jobs: Vec<Job>,
    /// The `before` of the next page, if there are more.
    pub next: Option<String>,
}

#[derive(Default)]
struct JobQueue {
    /// A job may be due.
    wake: Notify,
    running: Mutex<HashMap<String, RunningJob>>,
    isolation: Isolation,
}

/// Documents that were in flight when a process died run alone: if they kill this process too, no
/// other job is to blame.
#[derive(Default)]
struct Isolation(RwLock<()>);

enum IsolationGuard<'a> {
    Shared(#[allow(dead_code, reason = "held until it is dropped")] RwLockReadGuard<'a, ()>),
    Alone(#[allow(dead_code, reason = "held until it is dropped")] RwLockWriteGuard<'a, ()>),
}

impl Isolation {
    async fn enter(&self, alone: bool) -> IsolationGuard<'_> {
        if alone {
            IsolationGuard::Alone(self.0.write().await)
        } else {
            IsolationGuard::Shared(self.0.read().await)
        }
    }
}

/// A job that this process works on.
#[derive(Clone)]
struct RunningJob {
    /// The report before the present group.
    before: Report,
    progress: Arc<Progress>,
    cancel: Arc<Notify>,
}

impl Jobs {
    pub fn new(ingestion: Ingestion, max_open: u64) -> Self {
        Self {
            ingestion,
            max_open,
            max_open_bytes: MAX_OPEN_BYTES,
            shared: Arc::default(),
        }
    }

    /// Deletes the ingestion state of a deleted collection. State that a failure leaves does no harm.
    pub async fn collection_deleted(&self, collection: &CollectionName) {
        if let Err(error) = self.ingestion.forget_collection(collection).await {
            tracing::warn!(%collection, %error, "the ingestion state of a deleted collection could not be deleted");
        }
    }

    /// Stores a job. It is durable when this returns.
    pub async fn submit(&self, new: NewJob) -> Result<Job, JobError> {
        check_items(&new.items)?;
        let target = IngestTarget {
            collection: new.collection.clone(),
            chunk_tokens: new.chunk_tokens,
        };
        self.ingestion.check(&target).await?;
        self.check_room(&new).await?;
        let now = now();
        // Version 7 ids grow with time, so the list of keys is the order of submission.
        let id = uuid::Uuid::now_v7().to_string();
        let record = JobRecord::new(&new, now);
        let mut changes = Vec::from(Items::new(&id, &new.items).put());
        for (index, item) in new.items.into_iter().enumerate() {
            changes.extend(stored::put_parts(&id, index, &item.bytes));
        }
        changes.push(record.put(&id, Some(now), Expect::Absent));
        self.ingestion.records.apply(changes).await?;
        self.shared.wake.notify_one();
        Ok(record.view(&id))
    }

    /// The present state of a job, with the latest progress if this process works on it.
    pub async fn get(&self, id: &str) -> Result<Option<Job>, StorageError> {
        let Some(stored) = self.load(id).await? else {
            return Ok(None);
        };
        Ok(Some(self.with_progress(stored.record.view(id))))
    }

    /// Concurrent requests may pass together: the limits protect the disk, and a few more do no harm.
    async fn check_room(&self, new: &NewJob) -> Result<(), JobError> {
        let records = &self.ingestion.records;
        let open = records.counts(stored::ITEMS_KIND).await?.total;
        let all = RecordRange {
            limit: usize::try_from(open).unwrap_or(usize::MAX),
            ..RecordRange::default()
        };
        let sizes = records.list(stored::SIZE_KIND, all).await?;
        let bytes: u64 = sizes.iter().map(stored::size).sum();
        let wanted: u64 = new.items.iter().map(|item| item.bytes.len() as u64).sum();
        // A job that exceeds the limit by itself is accepted when nothing else waits.
        let is_full = bytes > 0 && bytes.saturating_add(wanted) > self.max_open_bytes;
        if open >= self.max_open || is_full {
            return Err(JobError::TooManyJobs { open, bytes });
        }
        Ok(())
    }

    /// The newest jobs, newest first.
    pub async fn list(&self, collection: Option<&CollectionName>) -> Result<Vec<Job>, StorageError> {
        Ok(self.page(collection, None, MAX_LISTED).await?.jobs)
    }

    /// Jobs older than `before`, newest first, at most [`MAX_LISTED`].
    pub async fn page(
        &self,
        collection: Option<&CollectionName>,
        before: Option<&str>,
        limit: usize,
    ) -> Result<JobPage, StorageError> {
        let limit = limit.clamp(1, MAX_LISTED);
        let groups = match collection {
            None => vec![None],
            Some(name) => [false, true]
                .map(|finished| Some(stored::group(name.as_str(), finished)))
                .into(),
        };
        let mut found = Vec::new();
        for group in groups {
            let range = RecordRange {
                group,
                after: before.map(str::to_owned),
                // One more shows whether this is the last page.
                limit: limit + 1,
                descending: true,
            };
            found.extend(self.ingestion.records.list(KIND, range).await?);
        }
        found.sort_by(|one, other| other.key.cmp(&one.key));
        // A job that was finished between the two reads is in both.
        found.dedup_by(|one, other| one.key == other.key);
        let is_last = found.len() <= limit;
        found.truncate(limit);
        let next = found.last().filter(|_| !is_last).map(|last| last.key.clone());
        let jobs = found
            .iter()
            .filter_map(StoredJob::read)
            .map(|stored| self.with_progress(stored.record.view(&stored.id)))
            .collect();
        Ok(JobPage { jobs, next })
    }

    /// Cancels an unfinished job. Documents that it has stored stay.
    pub async fn cancel(&self, id: &str) -> Result<Option<Job>, StorageError> {
        loop {
            let Some(mut stored) = self.load(id).await? else {
                return Ok(None);
            };
            if stored.record.state.is_final() {
                return Ok(Some(stored.record.view(id)));
            }
            let progress = self.with_progress(stored.record.view(id)).report;
            stored.record.report = progress;
            if self.end(&mut stored, JobState::Cancelled, None).await? {
                if let Some(running) = self.running(id) {
                    running.cancel.notify_one();
                    self.settle(&mut stored, &running).await?;
                }
                return Ok(Some(stored.record.view(id)));
            }
        }
    }

    /// Waits until the worker of a cancelled job has stopped, and stores its last report.
    async fn settle(&self, stored: &mut StoredJob, running: &RunningJob) -> Result<(), StorageError> {
        for _ in 0..500 {
            if self.running(&stored.id).is_none() && !running.progress.is_writing() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        stored.record.report = running.before.clone();
        stored.record.report.add(&running.progress.snapshot());
        let run_at = stored
            .record
            .finished
            .map(|finished| finished.saturating_add(stored::RETENTION));
        let change = stored
            .record
            .put(&stored.id, run_at, Expect::Version(stored.version));
        self.ingestion.records.apply(vec![change]).await.map(|_| ())
    }

    pub fn ingestion(&self) -> &Ingestion {
        &self.ingestion
    }

    /// The worker that serves this queue. One per process is enough.
    pub fn worker(&self) -> JobWorker {
        JobWorker::new(self.clone())
    }

    async fn load(&self, id: &str) -> Result<Option<StoredJob>, StorageError> {
        let found = self.ingestion.records.get(KIND, &[id.to_owned()]).await?;
        Ok(found.first().and_then(StoredJob::read))
    }

    /// Stores the final state of a job and deletes its documents. `false` if somebody else changed the
    /// job first.
    async fn end(
        &self,
        stored: &mut StoredJob,
        state: JobState,
        error: Option<String>,
    ) -> Result<bool, StorageError> {
        let now = now();
        stored.record.state = state;
        stored.record.error = error;
        stored.record.finished = Some(now);
        let run_at = now.saturating_add(stored::RETENTION);
        if !ragstone_lease::write(&*self.ingestion.records, stored, Some(run_at)).await? {
            return Ok(false);
        }
        self.drop_items(stored).await?;
        self.wake_next(&stored.record.collection).await?;
        Ok(true)
    }

    async fn items(&self, stored: &StoredJob) -> Result<Items, StorageError> {
        Items::of(stored, &*self.ingestion.records).await
    }

    async fn drop_items(&self, stored: &StoredJob) -> Result<(), StorageError> {
        let gone = self.items(stored).await?.delete();
        self.ingestion.records.apply(gone).await.map(|_| ())
    }

    /// The first unfinished job of a collection.
    async fn first_open(&self, collection: &str) -> Result<Option<Record>, StorageError> {
        let range = RecordRange {
            group: Some(stored::group(collection, false)),
            limit: 1,
            ..RecordRange::default()
        };
        Ok(self.ingestion.records.list(KIND, range).await?.into_iter().next())
    }

    /// Makes the next job of a collection due. If this is missed, the job runs when its delay is over.
    async fn wake_next(&self, collection: &str) -> Result<(), StorageError> {
        let now = now();
        if let Some(record) = self.first_open(collection).await?
            && record.run_at.is_none_or(|run_at| run_at > now)
            && let Some(next) = StoredJob::read(&record)
            && next.record.state == JobState::Queued
        {
            let change = next
                .record
                .put(&next.id, Some(now), Expect::Version(next.version));
            self.ingestion.records.apply(vec![change]).await?;
        }
        self.shared.wake.notify_one();
        Ok(())
    }

    fn running(&self, id: &str) -> Option<RunningJob> {
        self.shared
            .running
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(id)
            .cloned()
    }

    fn with_progress(&self, mut job: Job) -> Job {
        if let Some(running) = self.running(&job.id).filter(|_| job.state == JobState::Running) {
            job.report = running.before.clone();
            job.report.add(&running.progress.snapshot());
        }
        job
    }
}

/// Checks the name of a document.
pub fn check_source(source: &str) -> Result<(), &'static str> {
    if source.trim().is_empty() {
        return Err("a name is required");
    }
    if source.len() > MAX_SOURCE_BYTES || source.chars().any(char::is_control) {
        return Err("its name must have at most 1024 bytes and no control characters");
    }
    Ok(())
}

fn check_items(items: &[NewItem]) -> Result<(), InvalidInput> {
    if items.is_empty() {
        return Err(InvalidInput::new("Documents are required: send at least one"));
    }
    let mut sources = HashSet::new();
    for (index, item) in items.iter().enumerate() {
        let at = |problem: &str| InvalidInput::new(format!("Document at index {index}: {problem}"));
        check_source(&item.source).map_err(at)?;
        if !sources.insert(&item.source) {
            return Err(at("its name is that of an earlier document"));
        }
        if item.partial.is_some() && !item.kind.is_some_and(FileKind::is_rows) {
            return Err(at("only JSONL and CSV can come in parts"));
        }
    }
    Ok(())
}

impl ItemRecord {
    fn content(&self, bytes: Vec<u8>) -> Content {
        if self.partial {
            Content::Part(bytes, self.earlier.clone())
        } else {
            Content::Memory(bytes)
        }
    }
}
