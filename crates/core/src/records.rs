//! Small durable records: what is not a document but must survive with them.
//!
//! The embedding ledger, agent memory, jobs and conversations all need the same few things: to be
//! written atomically, read by key or by group, and, where work is waiting on them, to be taken by
//! exactly one worker at a time, also when several processes share a store. This is that mechanism,
//! once. What the bytes of a record mean is its owner's business.

use async_trait::async_trait;

use crate::storage::StorageError;

/// Milliseconds since the Unix epoch, always passed in by the caller.
pub type Millis = i64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub key: String,
    /// A second way to find it, such as a session; empty where there is none.
    pub group: String,
    pub value: Vec<u8>,
    /// Grows with every write of this record; a record that is deleted and written again does not
    /// get an old version back.
    pub version: u64,
    /// When work on it is due; `None` when nothing is left to do.
    pub due: Option<Millis>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordChange {
    Put {
        kind: String,
        key: String,
        group: String,
        value: Vec<u8>,
        due: Option<Millis>,
        expect: Expect,
    },
    Delete {
        kind: String,
        key: String,
        expect: Expect,
    },
}

/// What must hold of the stored record for a change to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    Anything,
    Absent,
    Version(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// The version the record has now; of a deleted one, the version it had.
    Done { version: u64 },
    /// What was expected did not hold, or there was nothing to delete. Nothing was changed.
    Skipped,
}

/// Which records of a kind to list, in the order of their keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RecordRange {
    pub group: Option<String>,
    /// Only keys after this one in the order of the list, to continue after the last page.
    pub after: Option<String>,
    pub limit: usize,
    /// The greatest keys first.
    pub descending: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecordCounts {
    pub total: u64,
    /// Of these, how many wait for work, now or later.
    pub due: u64,
}

/// Callers rely on this: `apply` is durable and visible when it returns, and its changes are made
/// in one transaction, in order; a change that is [`Applied::Skipped`] does not stop the others.
#[async_trait]
pub trait Records: Send + Sync {
    /// One answer per change, in their order.
    async fn apply(&self, changes: Vec<RecordChange>) -> Result<Vec<Applied>, StorageError>;

    /// Those of the keys that exist, in no particular order.
    async fn get(&self, kind: &str, keys: &[String]) -> Result<Vec<Record>, StorageError>;

    async fn list(&self, kind: &str, range: RecordRange) -> Result<Vec<Record>, StorageError>;

    async fn counts(&self, kind: &str) -> Result<RecordCounts, StorageError>;

    /// Up to `limit` records that are due at `now`, the longest due first, and left as they are: for
    /// an owner that nobody shares the store with, and that remembers what it works on.
    async fn due(&self, kind: &str, limit: usize, now: Millis) -> Result<Vec<Record>, StorageError>;

    /// Takes up to `limit` records that are due at `now`, the longest due first, and makes each due
    /// again at `lease_until`: until then nobody else gets it. Whoever finishes the work puts the
    /// record with the version it was given, so that a record changed meanwhile stays due.
    async fn claim(
        &self,
        kind: &str,
        limit: usize,
        now: Millis,
        lease_until: Millis,
    ) -> Result<Vec<Record>, StorageError>;
}
