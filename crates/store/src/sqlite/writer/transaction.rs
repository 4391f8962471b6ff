//! One transaction of the writer, in the database and in memory.

use std::collections::HashMap;
use std::sync::Arc;

use ragstone_core::CollectionName;
use rusqlite::{Connection, OptionalExtension};

use crate::error::{Error, Result};
use crate::sqlite::faults::{FaultPoint, Faults};
use crate::sqlite::index::{Indexed, Sealed, Snapshot};
use crate::sqlite::published::Published;

/// What a step changes in memory, once its part of the transaction has succeeded.
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
    /// Nothing but the collection's row changes.
    Touch,
    Empty,
    Drop,
}

/// How many statements of a piece of work change something. One is all or nothing by itself; more
/// need a savepoint to go back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Size {
    One,
    Many,
}

/// A collection as its row has it.
pub(crate) struct CollectionRow {
    pub(crate) id: i64,
    pub(crate) metadata: String,
    pub(crate) dimensions: Option<usize>,
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
    /// Set when the database gave up the whole transaction, not only a step of it.
    lost: Option<Error>,
    open: bool,
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
            open: true,
        })
    }

    /// Runs one piece of work: all of it happens, or nothing.
    pub(super) fn step<T>(&mut self, size: Size, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(error) = &self.lost {
            return Err(Error::RolledBack(error.to_string()));
        }
        self.pending.clear();
        if size == Size::Many {
            self.connection.prepare_cached("SAVEPOINT step")?.execute([])?;
        }
        match work(self) {
            Ok(outcome) => {
                if size == Size::Many {
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
                } else if size == Size::One {
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

    /// Makes it durable, and returns the snapshots to publish.
    pub(super) fn commit(mut self) -> Result<HashMap<i64, Option<Arc<Snapshot>>>> {
        if let Some(error) = self.lost.take() {
            return Err(error);
        }
        let mut changes = HashMap::with_capacity(self.next.len());
        for (collection, snapshot) in std::mem::take(&mut self.next) {
            let snapshot = match snapshot {
                None => None,
                Some(snapshot) => Some(Arc::new(self.seal(collection, snapshot)?)),
            };
            changes.insert(collection, snapshot);
        }
        if *self.record_clock != self.clock_at_start {
            self.connection
                .prepare_cached("UPDATE record_clock SET now = ?1")?
                .execute([*self.record_clock])?;
        }
        self.connection.execute_batch("COMMIT")?;
        self.open = false;
        Ok(changes)
    }

    /// Finishes a changed collection and gives it its next version.
    fn seal(&self, collection: i64, mut snapshot: Snapshot) -> Result<Snapshot> {
        if snapshot.seal()? == Sealed::Renumbered {
            self.rewrite_vectors(collection, &snapshot)?;
        }
        self.fault(FaultPoint::BeforeCommit)?;
        snapshot.version = self
            .connection
            .prepare_cached("UPDATE collections SET version = version + 1 WHERE id = ?1 RETURNING version")?
            .query_row([collection], |row| row.get(0))?;
        Ok(snapshot)
    }

    /// Fails here when a test has asked for it.
    pub(super) fn fault(&self, point: FaultPoint) -> Result<()> {
        self.faults.check(point)
    }

    pub(super) fn change(&mut self, collection: i64, change: Change) {
        self.pending.push((collection, change));
    }

    pub(super) fn find(&self, name: &CollectionName) -> Result<Option<CollectionRow>> {
        Ok(self
            .connection
            .prepare_cached("SELECT id, metadata, dimensions FROM collections WHERE name = ?1")?
            .query_row([name.as_str()], |row| {
                Ok(CollectionRow {
                    id: row.get(0)?,
                    metadata: row.get(1)?,
                    dimensions: row.get(2)?,
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

    fn apply_pending(&mut self) -> Result<()> {
        for (collection, change) in std::mem::take(&mut self.pending) {
            match change {
                Change::Create => {
                    self.next
                        .insert(collection, Some(Snapshot::empty(self.published.held())));
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
        Change::Empty => *snapshot = snapshot.emptied(),
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
