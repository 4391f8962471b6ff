//! Jobs as records.

use std::ops::Range;

use ragstone_core::records::{Expect, Millis, Record, RecordChange, Records};
use ragstone_core::storage::StorageError;
use serde::{Deserialize, Serialize};

use super::{NewItem, NewJob};
use crate::{Earlier, FileKind, InputOptions, Report};
use ragstone_lease::Leased;

pub(super) const KIND: &str = "job";
pub(super) const ITEMS_KIND: &str = "job-items";
pub(super) const PART_KIND: &str = "job-part";
/// One small record for each unfinished job, with the size of its documents.
pub(super) const SIZE_KIND: &str = "job-size";
/// How long a finished job is kept.
pub(super) const RETENTION: Millis = 7 * 24 * 60 * 60 * 1000;
const PART_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    Queued,
    Running,
    Done,
    Failed,
    Cancelled,
}

impl JobState {
    pub fn is_final(self) -> bool {
        matches!(self, Self::Done | Self::Failed | Self::Cancelled)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A job as clients see it.
#[derive(Debug, Clone)]
pub struct Job {
    pub id: String,
    pub collection: String,
    pub state: JobState,
    pub created: Millis,
    pub started: Option<Millis>,
    pub finished: Option<Millis>,
    pub items: u64,
    pub bytes: u64,
    pub report: Report,
    /// Why the job as a whole failed.
    pub error: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct JobRecord {
    pub(super) collection: String,
    pub(super) chunk_tokens: Option<usize>,
    pub(super) state: JobState,
    pub(super) created: Millis,
    pub(super) started: Option<Millis>,
    pub(super) finished: Option<Millis>,
    #[serde(default)]
    pub(super) item_count: u64,
    #[serde(default)]
    pub(super) bytes: u64,
    /// Only in records of older versions. Items have a record of their own now, because this one is
    /// rewritten often.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    items: Vec<ItemRecord>,
    /// The first item that is not done.
    pub(super) next: usize,
    pub(super) report: Report,
    /// Consecutive failures for passing reasons.
    pub(super) attempts: u32,
    /// Attempts since the last progress that did not return: their process died, or works still.
    #[serde(default)]
    pub(super) crashes: u32,
    /// Items before this one were in flight when a process died, and are ingested one at a time.
    #[serde(default)]
    pub(super) suspect_until: usize,
    pub(super) error: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ItemRecord {
    pub(super) source: String,
    /// Absent for files that cannot be read.
    pub(super) kind: Option<FileKind>,
    pub(super) bytes: u64,
    pub(super) parts: usize,
    pub(super) partial: bool,
    /// Absent in records of older versions.
    #[serde(default)]
    pub(super) earlier: Earlier,
    #[serde(default)]
    pub(super) options: InputOptions,
}

impl ItemRecord {
    fn new(item: &NewItem) -> Self {
        Self {
            source: item.source.clone(),
            kind: item.kind,
            bytes: item.bytes.len() as u64,
            parts: item.bytes.len().div_ceil(PART_BYTES),
            partial: item.partial.is_some(),
            earlier: item.partial.clone().unwrap_or_default(),
            options: item.options.clone(),
        }
    }
}

/// The group of a job's record: unfinished jobs of a collection have one of their own, so that the
/// first of them is found at once.
pub(super) fn group(collection: &str, finished: bool) -> String {
    if finished {
        collection.to_owned()
    } else {
        // Collection names have no spaces.
        format!("{collection} open")
    }
}

/// A record with the version it was read at.
pub(super) struct StoredJob {
    pub(super) id: String,
    pub(super) version: u64,
    pub(super) record: JobRecord,
}

impl StoredJob {
    pub(super) fn read(record: &Record) -> Option<Self> {
        let mut parsed: JobRecord = serde_json::from_slice(&record.value).ok()?;
        if !parsed.items.is_empty() {
            parsed.item_count = parsed.items.len() as u64;
            parsed.bytes = parsed.items.iter().map(|item| item.bytes).sum();
        }
        Some(Self {
            id: record.key.clone(),
            version: record.version,
            record: parsed,
        })
    }
}

impl Leased for StoredJob {
    fn put(&self, run_at: Option<Millis>) -> Result<RecordChange, StorageError> {
        Ok(self.record.put(&self.id, run_at, Expect::Version(self.version)))
    }

    fn set_version(&mut self, version: u64) {
        self.version = version;
    }
}

impl JobRecord {
    pub(super) fn new(new: &NewJob, now: Millis) -> Self {
        Self {
            collection: new.collection.to_string(),
            chunk_tokens: new.chunk_tokens,
            state: JobState::Queued,
            created: now,
            started: None,
            finished: None,
            item_count: new.items.len() as u64,
            bytes: new.items.iter().map(|item| item.bytes.len() as u64).sum(),
            items: Vec::new(),
            next: 0,
            report: Report::default(),
            attempts: 0,
            crashes: 0,
            suspect_until: 0,
            error: None,
        }
    }

    pub(super) fn view(&self, id: &str) -> Job {
        Job {
            id: id.to_owned(),
            collection: self.collection.clone(),
            state: self.state,
            created: self.created,
            started: self.started,
            finished: self.finished,
            items: self.item_count,
            bytes: self.bytes,
            report: self.report.clone(),
            error: self.error.clone(),
        }
    }

    pub(super) fn put(&self, id: &str, run_at: Option<Millis>, expect: Expect) -> RecordChange {
        RecordChange::Put {
            kind: KIND.to_owned(),
            key: id.to_owned(),
            group: group(&self.collection, self.state.is_final()),
            value: serde_json::to_vec(self).unwrap_or_default(),
            run_at,
            expect,
        }
    }
}

/// The documents of a job, which do not change.
#[derive(Debug)]
pub(super) struct Items {
    job: String,
    pub(super) list: Vec<ItemRecord>,
}

impl Items {
    pub(super) fn new(job: &str, items: &[NewItem]) -> Self {
        Self {
            job: job.to_owned(),
            list: items.iter().map(ItemRecord::new).collect(),
        }
    }

    /// The items of a job; none once it is finished.
    pub(super) async fn of(stored: &StoredJob, records: &dyn Records) -> Result<Self, StorageError> {
        let mut list = stored.record.items.clone();
        if list.is_empty() {
            let found = records.get(ITEMS_KIND, std::slice::from_ref(&stored.id)).await?;
            let read = found.first().map(|record| serde_json::from_slice(&record.value));
            list = read.and_then(Result::ok).unwrap_or_default();
        }
        let job = stored.id.clone();
        Ok(Self { job, list })
    }

    pub(super) fn put(&self) -> [RecordChange; 2] {
        let bytes: u64 = self.list.iter().map(|item| item.bytes).sum();
        let put = |kind: &str, value| RecordChange::Put {
            kind: kind.to_owned(),
            key: self.job.clone(),
            group: String::new(),
            value,
            run_at: None,
            expect: Expect::Absent,
        };
        [
            put(ITEMS_KIND, serde_json::to_vec(&self.list).unwrap_or_default()),
            put(SIZE_KIND, bytes.to_string().into_bytes()),
        ]
    }

    pub(super) fn delete(&self) -> Vec<RecordChange> {
        let mut changes = self.delete_parts(0..self.list.len());
        changes.extend([ITEMS_KIND, SIZE_KIND].map(|kind| delete(kind, self.job.clone())));
        changes
    }

    pub(super) fn delete_parts(&self, items: Range<usize>) -> Vec<RecordChange> {
        items
            .flat_map(|index| self.part_keys(index))
            .map(|key| delete(PART_KIND, key))
            .collect()
    }

    /// In the order of the bytes.
    pub(super) fn part_keys(&self, index: usize) -> Vec<String> {
        let parts = self.list.get(index).map_or(0, |item| item.parts);
        (0..parts).map(|part| part_key(&self.job, index, part)).collect()
    }
}

/// The size that a record of [`SIZE_KIND`] states.
pub(super) fn size(record: &Record) -> u64 {
    std::str::from_utf8(&record.value)
        .ok()
        .and_then(|bytes| bytes.parse().ok())
        .unwrap_or(0)
}

fn delete(kind: &str, key: String) -> RecordChange {
    RecordChange::Delete {
        kind: kind.to_owned(),
        key,
        expect: Expect::Anything,
    }
}

fn part_key(id: &str, item: usize, part: usize) -> String {
    format!("{id}/{item:06}/{part:06}")
}

pub(super) fn put_parts(id: &str, item: usize, bytes: &[u8]) -> Vec<RecordChange> {
    bytes
        .chunks(PART_BYTES)
        .enumerate()
        .map(|(part, bytes)| RecordChange::Put {
            kind: PART_KIND.to_owned(),
            key: part_key(id, item, part),
            group: String::new(),
            value: bytes.to_vec(),
            run_at: None,
            expect: Expect::Absent,
        })
        .collect()
}
