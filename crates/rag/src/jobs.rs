//! Ingestion that goes on after the request that started it, and after a restart.
//!
//! A job is a record with the documents it was given beside it in others, written in one transaction
//! before it is acknowledged. A worker claims it with a lease, renews the lease while it works, and notes
//! after every group of documents how far it is. When the worker dies, the lease runs out and
//! another goes on after the last group noted; what was stored of the group it died in is found to be there.
//! Jobs of one collection are done one after the other, in the order they came: otherwise what an
//! earlier one brings could replace what a later one brought.
//! A worker that finds its job changed by someone else (cancelled, or taken over because it was
//! thought dead) stops without another word.

mod stored;
#[cfg(test)]
mod tests;
mod worker;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordRange};
use ragstone_core::storage::StorageError;
use tokio::sync::Notify;

use crate::error::ServiceError;
use crate::ingest::{Content, Earlier, IngestTarget, Ingestion, InputOptions, Kind, Progress, Report};

use stored::{ItemRecord, Items, JobRecord, KIND, Stored};
pub use stored::{Job, JobState};
pub use worker::Worker;

const MAX_SOURCE_BYTES: usize = 1024;
/// How many jobs one page of the list has at most.
pub const MAX_LISTED: usize = 1000;

/// What one request brings.
#[derive(Debug, Clone)]
pub struct NewJob {
    pub collection: CollectionName,
    pub chunk_tokens: Option<usize>,
    pub items: Vec<NewItem>,
}

#[derive(Debug, Clone)]
pub struct NewItem {
    pub source: String,
    /// Absent for what cannot be read, which the job reports.
    pub kind: Option<Kind>,
    pub bytes: Vec<u8>,
    /// There for some rows of a larger file, whose others come by other requests.
    pub partial: Option<Earlier>,
    pub options: InputOptions,
}

#[derive(Clone)]
pub struct Jobs {
    ingestion: Ingestion,
    /// How many may be unfinished: what they were given is kept until then.
    most_open: u64,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    /// There may be something to do.
    wake: Notify,
    running: Mutex<HashMap<String, Running>>,
}

/// A job that this process works on.
#[derive(Clone)]
struct Running {
    /// What was done before the group that is being worked on.
    before: Report,
    progress: Arc<Progress>,
    cancel: Arc<Notify>,
}

impl Jobs {
    pub fn new(ingestion: Ingestion, most_open: u64) -> Self {
        Self {
            ingestion,
            most_open,
            shared: Arc::default(),
        }
    }

    /// What has to be done when a collection was deleted. Should it fail, what is left does no harm.
    pub async fn collection_deleted(&self, collection: &CollectionName) {
        if let Err(error) = self.ingestion.forget_collection(collection).await {
            tracing::warn!(%collection, %error, "notes on what was ingested into a deleted collection stay");
        }
    }

    /// Stores a job; it is durable when this returns, and will be done.
    pub async fn submit(&self, new: NewJob) -> Result<Job, ServiceError> {
        check_items(&new.items)?;
        let target = IngestTarget {
            collection: new.collection.clone(),
            chunk_tokens: new.chunk_tokens,
        };
        self.ingestion.check(&target).await?;
        // Requests at the same time may pass together: the limit is for the disk, to which a few more
        // are no harm.
        let open = self.ingestion.records.counts(stored::ITEMS_KIND).await?.total;
        if open >= self.most_open {
            return Err(ServiceError::TooManyJobs { open });
        }
        let now = now();
        // Version 7 ids grow with time, so the list of keys is the order of submission.
        let id = uuid::Uuid::now_v7().to_string();
        let record = JobRecord::new(&new, now);
        let mut changes = vec![Items::new(&id, &new.items).put()];
        for (index, item) in new.items.into_iter().enumerate() {
            changes.extend(stored::put_parts(&id, index, &item.bytes));
        }
        changes.push(record.put(&id, Some(now), Expect::Absent));
        self.ingestion.records.apply(changes).await?;
        self.shared.wake.notify_one();
        Ok(record.view(&id))
    }

    /// A job as it stands, up to date where this process works on it.
    pub async fn get(&self, id: &str) -> Result<Option<Job>, StorageError> {
        let Some(stored) = self.load(id).await? else {
            return Ok(None);
        };
        Ok(Some(self.with_progress(stored.record.view(id))))
    }

    /// The newest jobs, newest first.
    pub async fn list(&self, collection: Option<&CollectionName>) -> Result<Vec<Job>, StorageError> {
        let groups = match collection {
            None => vec![None],
            Some(name) => [false, true]
                .map(|finished| Some(stored::group(name.as_str(), finished)))
                .into(),
        };
        let mut jobs = Vec::new();
        for group in groups {
            let mut range = RecordRange {
                group,
                after: None,
                limit: MAX_LISTED,
            };
            loop {
                let page = self.ingestion.records.list(KIND, range.clone()).await?;
                range.after = page.last().map(|record| record.key.clone());
                let ended = page.len() < MAX_LISTED;
                jobs.extend(
                    page.iter()
                        .filter_map(Stored::read)
                        .map(|stored| self.with_progress(stored.record.view(&stored.id))),
                );
                if ended {
                    break;
                }
            }
        }
        jobs.sort_by(|one, other| other.id.cmp(&one.id));
        jobs.truncate(MAX_LISTED);
        Ok(jobs)
    }

    /// Stops a job that is not finished. What it has stored stays.
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
    async fn settle(&self, stored: &mut Stored, running: &Running) -> Result<(), StorageError> {
        for _ in 0..500 {
            if self.running(&stored.id).is_none() && !running.progress.is_writing() {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        stored.record.report = running.before.clone();
        stored.record.report.add(&running.progress.snapshot());
        let kept_until = stored
            .record
            .finished
            .map(|finished| finished.saturating_add(stored::KEPT_FOR));
        let change = stored
            .record
            .put(&stored.id, kept_until, Expect::Version(stored.version));
        self.ingestion.records.apply(vec![change]).await.map(|_| ())
    }

    pub fn ingestion(&self) -> &Ingestion {
        &self.ingestion
    }

    /// Gives the worker that serves this queue; one per process is enough.
    pub fn worker(&self) -> Worker {
        Worker::new(self.clone())
    }

    async fn load(&self, id: &str) -> Result<Option<Stored>, StorageError> {
        let found = self.ingestion.records.get(KIND, &[id.to_owned()]).await?;
        Ok(found.first().and_then(Stored::read))
    }

    /// Writes the last state of a job and drops the documents it was given. False when somebody
    /// else changed it first.
    async fn end(
        &self,
        stored: &mut Stored,
        state: JobState,
        error: Option<String>,
    ) -> Result<bool, StorageError> {
        let now = now();
        stored.record.state = state;
        stored.record.error = error;
        stored.record.finished = Some(now);
        let change = stored.record.put(
            &stored.id,
            Some(now.saturating_add(stored::KEPT_FOR)),
            Expect::Version(stored.version),
        );
        let applied = self.ingestion.records.apply(vec![change]).await?;
        let [Applied::Done { version }] = applied[..] else {
            return Ok(false);
        };
        stored.version = version;
        self.drop_items(stored).await?;
        self.wake_next(&stored.record.collection).await?;
        Ok(true)
    }

    async fn items(&self, stored: &Stored) -> Result<Items, StorageError> {
        Items::of(stored, &*self.ingestion.records).await
    }

    async fn drop_items(&self, stored: &Stored) -> Result<(), StorageError> {
        let gone = self.items(stored).await?.delete();
        self.ingestion.records.apply(gone).await.map(|_| ())
    }

    /// The job that comes first of those of a collection that are not finished.
    async fn first_open(&self, collection: &str) -> Result<Option<Record>, StorageError> {
        let range = RecordRange {
            group: Some(stored::group(collection, false)),
            after: None,
            limit: 1,
        };
        Ok(self.ingestion.records.list(KIND, range).await?.into_iter().next())
    }

    /// Makes the next job of a collection due. Should this be missed, it comes when its wait is over.
    async fn wake_next(&self, collection: &str) -> Result<(), StorageError> {
        let now = now();
        if let Some(record) = self.first_open(collection).await?
            && record.due.is_none_or(|due| due > now)
            && let Some(next) = Stored::read(&record)
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

    fn running(&self, id: &str) -> Option<Running> {
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

/// What a document may be called, or what is wrong with it.
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
        if item.partial.is_some() && !item.kind.is_some_and(Kind::is_rows) {
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

pub(crate) fn now() -> Millis {
    jiff::Timestamp::now().as_millisecond()
}
