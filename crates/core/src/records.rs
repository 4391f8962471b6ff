//! Small durable records beside the documents.
//!
//! The embedding ledger, agent memory, jobs and conversations share this interface. Records are
//! written atomically and read by key or by group. A record may have a time to run at; workers claim
//! such records, and every record goes to one worker at a time even when several processes share a
//! store. The owner of a record defines the meaning of its bytes.

use async_trait::async_trait;

use crate::storage::StorageError;

/// Milliseconds since the Unix epoch. The caller always passes the current time.
pub type Millis = i64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub key: String,
    /// A second way to find the record, such as a session. Empty if there is none.
    pub group: String,
    pub value: Vec<u8>,
    /// Grows with every write of this record. A record that is deleted and written again does not
    /// get an old version back.
    pub version: u64,
    /// Time of the next work on the record; `None` if there is none.
    pub run_at: Option<Millis>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordChange {
    Put {
        kind: String,
        key: String,
        group: String,
        value: Vec<u8>,
        run_at: Option<Millis>,
        expect: Expect,
    },
    Delete {
        kind: String,
        key: String,
        expect: Expect,
    },
}

/// The condition on the stored record for a change to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    Anything,
    Absent,
    Version(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// The new version of the record, or the last version of a deleted one.
    Done { version: u64 },
    /// The condition did not hold, or there was nothing to delete. Nothing was changed.
    Skipped,
}

/// The records of a kind to list, in the order of their keys.
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
    /// Records with a time to run at, whether it has come or not.
    pub waiting: u64,
}

/// Durable storage of records.
///
/// When `apply` returns, its changes are durable and visible. They are made in one transaction, in
/// order. A change that is [`Applied::Skipped`] does not stop the others.
#[async_trait]
pub trait Records: Send + Sync {
    /// Returns one answer per change, in order.
    async fn apply(&self, changes: Vec<RecordChange>) -> Result<Vec<Applied>, StorageError>;

    /// The records that exist among these keys, in no particular order.
    async fn get(&self, kind: &str, keys: &[String]) -> Result<Vec<Record>, StorageError>;

    async fn list(&self, kind: &str, range: RecordRange) -> Result<Vec<Record>, StorageError>;

    async fn counts(&self, kind: &str) -> Result<RecordCounts, StorageError>;

    /// Up to `limit` records whose time to run has come at `now`, the earliest first, without claiming
    /// them. For an owner that is alone with the store and keeps track of its work in flight.
    async fn ready(&self, kind: &str, limit: usize, now: Millis) -> Result<Vec<Record>, StorageError>;

    /// Claims up to `limit` records whose time to run has come at `now`, the earliest first, by moving
    /// the time of each to `lease_until`. Until then nobody else gets it. A worker finishes by writing
    /// the record with the version it was given; if the record was changed meanwhile, this is skipped
    /// and the record runs again.
    async fn claim(
        &self,
        kind: &str,
        limit: usize,
        now: Millis,
        lease_until: Millis,
    ) -> Result<Vec<Record>, StorageError>;
}
