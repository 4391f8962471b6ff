//! One transaction of the writer, in the database and in memory.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use ragstone_core::{CollectionName, Metadata};
use rusqlite::{Connection, OptionalExtension};

use crate::error::{Error, Result};
use crate::sqlite::faults::{FaultPoint, Faults};
use crate::sqlite::index::{Indexed, Snapshot};
use crate::sqlite::published::Published;

/// A change in memory, made once the step's part of the transaction has succeeded.
#[derive(Clone)]
pub(crate) enum Change {
    Create,
    Insert {
        rowid: i64,
        vector: Vec<f32>,
        indexed: Indexed,
    },
    Replace {
        rowid: i64,
        vector: Vec<f32>,
        old: Indexed,
        new: Indexed,
    },
    Remove {
        rowid: i64,
        old: Indexed,
    },
    /// Their rows stay for now.
    RemoveMany {
        rowids: Vec<i64>,
    },
    /// The row of a document that was removed by `RemoveMany` is gone.
    Forget {
        rowid: i64,
        metadata: Metadata,
    },
    /// Nothing but the collection's row changes.
    Touch,
    Drop,
}

/// The number of statements of a step that change something. One is atomic by itself; several need a
/// savepoint, unless the step is the whole transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Statements {
    One,
    Many,
}

/// The row of a collection.
pub(crate) struct CollectionRow {
    pub(crate) id: i64,
    pub(crate) metadata: String,
    pub(crate) dimensions: Option<usize>,
    pub(crate) version: i64,
}

pub(crate) struct Transaction<'a> {
    pub(super) connection: &'a Connection,
    published: &'a Published,
    faults: &'a Faults,
    pub(super) record_clock: &'a mut i64,
    clock_at_start: i64,
    /// The next state of each collection that has one; `None` when it is gone.
    next: HashMap<i64, Option<Snapshot>>,
    pending: Vec<(i64, Change)>,
    /// Set when the whole transaction was rolled back, not only a step of it.
    lost: Option<Error>,
    /// There is one step only. It needs no savepoint, in which SQLite would keep a journal in memory
    /// and walk through it after every statement.
    alone: bool,
    /// That step failed, and the transaction with it.
    failed_alone: bool,
    /// Collections that documents were deleted from.
    deleted: BTreeSet<i64>,
    /// The collection whose changes are recorded.
    recorded: Option<i64>,
    record: Vec<Change>,
    open: bool,
}

/// The result of a committed transaction.
pub(super) struct Committed {
    /// The snapshots to publish; `None` for a collection that is gone.
    pub(super) snapshots: HashMap<i64, Option<Arc<Snapshot>>>,
    pub(super) deleted: BTreeSet<i64>,
    pub(super) record: Vec<Change>,
}

impl<'a> Transaction<'a> {
    pub(super) fn begin(
        connection: &'a Connection,
        published: &'a Published,
        faults: &'a Faults,
        record_clock: &'a mut i64,
    ) -> Result<Self> {
        connection.execute_batch("BEGIN IMMEDIATE")?;
        Ok(Self {
            connection,
            published,
            faults,
            clock_at_start: *record_clock,
            record_clock,
            next: HashMap::new(),
            pending: Vec::new(),
            lost: None,
            alone: false,
            failed_alone: false,
            deleted: BTreeSet::new(),
            recorded: None,
            record: Vec::new(),
            open: true,
        })
    }

    /// Announces that there will be one step only.
    pub(super) fn alone(mut self, alone: bool) -> Self {
        self.alone = alone;
        self
    }

    /// Records the changes of one collection.
    pub(super) fn recording(mut self, collection: Option<i64>) -> Self {
        self.recorded = collection;
        self
    }

    /// Runs one step atomically.
    pub(super) fn step<T>(
        &mut self,
        statements: Statements,
        work: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if let Some(error) = &self.lost {
            return Err(Error::RolledBack(error.to_string()));
        }
        self.pending.clear();
        let savepoint = statements == Statements::Many && !self.alone;
        if savepoint {
            self.connection.prepare_cached("SAVEPOINT step")?.execute([])?;
        }
        match work(self) {
            Ok(outcome) => {
                if savepoint {
                    self.connection.prepare_cached("RELEASE step")?.execute([])?;
                }
                if let Err(error) = self.apply_pending() {
                    // File and memory no longer agree: nothing of this transaction may be published.
                    self.lost = Some(Error::RolledBack(error.to_string()));
                    return Err(error);
                }
                Ok(outcome)
            }
            Err(error) => {
                self.pending.clear();
                // A full disk, among others, makes SQLite roll everything back by itself.
                let undone = if self.connection.is_autocommit() {
                    Err(Error::RolledBack(error.to_string()))
                } else if self.alone {
                    self.failed_alone = true;
                    Ok(())
                } else if !savepoint {
                    Ok(())
                } else {
                    self.connection
                        .execute_batch("ROLLBACK TO step; RELEASE step")
                        .map_err(Error::from)
                };
                if let Err(failure) = undone {
                    self.lost = Some(match &error {
                        Error::DiskFull => Error::DiskFull,
                        _ => failure,
                    });
                }
                Err(error)
            }
        }
    }

    /// Makes the changes durable.
    pub(super) fn commit(mut self) -> Result<Committed> {
        if let Some(error) = self.lost.take() {
            return Err(error);
        }
        let mut committed = Committed {
            snapshots: HashMap::with_capacity(self.next.len()),
            deleted: std::mem::take(&mut self.deleted),
            record: std::mem::take(&mut self.record),
        };
        if self.failed_alone {
            *self.record_clock = self.clock_at_start;
            return Ok(committed);
        }
        for (collection, snapshot) in std::mem::take(&mut self.next) {
            let snapshot = match snapshot {
                None => None,
                Some(snapshot) => Some(Arc::new(self.seal(collection, snapshot)?)),
            };
            committed.snapshots.insert(collection, snapshot);
        }
        if *self.record_clock != self.clock_at_start {
            self.connection
                .prepare_cached("UPDATE record_clock SET now = ?1")?
                .execute([*self.record_clock])?;
        }
        self.fault(FaultPoint::DiskFull)?;
        self.connection.execute_batch("COMMIT")?;
        self.open = false;
        Ok(committed)
    }

    /// Finishes a changed collection and gives it its next version.
    fn seal(&self, collection: i64, mut snapshot: Snapshot) -> Result<Snapshot> {
        snapshot.seal()?;
        self.fault(FaultPoint::BeforeCommit)?;
        snapshot.version = self
            .connection
            .prepare_cached("UPDATE collections SET version = version + 1 WHERE id = ?1 RETURNING version")?
            .query_row([collection], |row| row.get(0))?;
        Ok(snapshot)
    }

    /// Fails if a test has armed this point.
    pub(super) fn fault(&self, point: FaultPoint) -> Result<()> {
        self.faults.check(point)
    }

    pub(super) fn change(&mut self, collection: i64, change: Change) {
        self.pending.push((collection, change));
    }

    pub(super) fn find(&self, name: &CollectionName) -> Result<Option<CollectionRow>> {
        Ok(self
            .connection
            .prepare_cached("SELECT id, metadata, dimensions, version FROM collections WHERE name = ?1")?
            .query_row([name.as_str()], |row| {
                Ok(CollectionRow {
                    id: row.get(0)?,
                    metadata: row.get(1)?,
                    dimensions: row.get(2)?,
                    version: row.get(3)?,
                })
            })
            .optional()?)
    }

    pub(super) fn require(&self, name: &CollectionName) -> Result<CollectionRow> {
        self.find(name)?
            .ok_or_else(|| Error::CollectionNotFound(name.clone()))
    }

    /// The collection as the steps before this one left it.
    pub(super) fn snapshot(&mut self, collection: i64) -> Result<&mut Snapshot> {
        let entry = match self.next.entry(collection) {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                let current = self.published.get(collection).map(|snapshot| (*snapshot).clone());
                entry.insert(current)
            }
        };
        entry
            .as_mut()
            .ok_or_else(|| Error::Damaged(format!("collection {collection} is not in memory")))
    }

    /// The collection as readers see it.
    pub(super) fn published(&self, collection: i64) -> Option<Arc<Snapshot>> {
        self.published.get(collection)
    }

    /// Replaces the state of a collection by an equal one, after making these changes to it.
    pub(super) fn replace_snapshot(
        &mut self,
        collection: i64,
        mut snapshot: Snapshot,
        changes: Vec<Change>,
    ) -> Result<()> {
        for change in changes {
            apply(&mut snapshot, change)?;
        }
        self.next.insert(collection, Some(snapshot));
        Ok(())
    }

    fn apply_pending(&mut self) -> Result<()> {
        for (collection, change) in std::mem::take(&mut self.pending) {
            if self.recorded == Some(collection) {
                self.record.push(change.clone());
            }
            if change.deletes() {
                self.deleted.insert(collection);
            }
            match change {
                Change::Create => {
                    self.next
                        .insert(collection, Some(Snapshot::empty(self.published.scope())));
                }
                Change::Drop => {
                    self.next.insert(collection, None);
                }
                change => apply(self.snapshot(collection)?, change)?,
            }
        }
        Ok(())
    }
}

impl Change {
    fn deletes(&self) -> bool {
        matches!(self, Self::Remove { .. } | Self::RemoveMany { .. } | Self::Drop)
    }
}

fn apply(snapshot: &mut Snapshot, change: Change) -> Result<()> {
    let slot_of = |snapshot: &Snapshot, rowid| {
        snapshot
            .slot(rowid)
            .ok_or_else(|| Error::Damaged(format!("row {rowid} is not in memory")))
    };
    match change {
        Change::Insert {
            rowid,
            vector,
            indexed,
        } => snapshot.insert(rowid, &vector, indexed),
        Change::Replace {
            rowid,
            vector,
            old,
            new,
        } => snapshot.replace(slot_of(snapshot, rowid)?, &vector, &old, new)?,
        Change::Remove { rowid, old } => snapshot.remove(slot_of(snapshot, rowid)?, &old)?,
        Change::RemoveMany { rowids } => {
            let slots = snapshot
                .slots_of(&rowids)
                .ok_or_else(|| Error::Damaged("a deleted row is not in memory".into()))?;
            snapshot.remove_many(&slots);
        }
        Change::Forget { rowid, metadata } => snapshot.forget(rowid, &metadata),
        Change::Touch | Change::Create | Change::Drop => {}
    }
    Ok(())
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.open
            && !self.connection.is_autocommit()
            && let Err(error) = self.connection.execute_batch("ROLLBACK")
        {
            tracing::error!(%error, "could not roll back");
        }
    }
}
