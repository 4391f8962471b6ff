//! Work that deletions leave behind, done in bounded transactions between other writes.
//!
//! Deleting a few documents removes their rows at once. Deleting many would keep every other write
//! waiting, so it only records which rows are deleted: from the commit on, no read sees them. The
//! rows themselves are removed here, and whatever is left after a crash is removed after the next
//! start. Emptying and deleting a collection work the same way for the whole collection.
//!
//! A `vec0` table reuses the space of deleted vectors only when all of a chunk are deleted. Where
//! more than a third of a table is unused, the vectors of its emptiest chunks are moved, which frees
//! these chunks.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ragstone_core::Metadata;
use roaring::RoaringTreemap;
use rusqlite::{Connection, OptionalExtension, params};

use super::transaction::{Change, Transaction};
use crate::error::{Error, Result};
use crate::sqlite::faults::FaultPoint;
use crate::sqlite::index::Snapshot;
use crate::sqlite::schema::vector_table;

/// Number of rows that one record of deleted rows lists, which are removed together.
pub(super) const ROWS_PER_RECORD: usize = 256;
/// Rows of a deleted collection that are removed together.
const COLLECTION_ROWS: usize = 1024;
/// Vector chunks of a deleted collection that are removed together.
const COLLECTION_CHUNKS: usize = 16;
/// Duration of one transaction of cleanup, which other writes may have to wait for.
const SLICE: Duration = Duration::from_millis(10);
/// Pause between slices while other writes keep coming.
const PAUSE: Duration = Duration::from_millis(10);
/// Pause after a failure, such as a full disk.
const RETRY: Duration = Duration::from_secs(2);

/// The version of the schema that brought the tables of deleted rows.
const FIRST_SCHEMA_WITH_DELETED: i64 = 2;

/// Moving a chunk of wider vectors needs more space than the reserve has.
const MAX_DIMENSIONS_ON_FULL_DISK: usize = 512;

/// Whether there is only the reserve left to write to. If so, transactions have to be small.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disk {
    HasRoom,
    Full,
}

/// Cleanup that is left to do.
#[derive(Default)]
pub(super) struct Cleanup {
    /// Deleted rows may be left.
    purge: bool,
    /// Collections whose vector tables may have unused space.
    compact: BTreeSet<i64>,
    /// Collections whose snapshots may have many empty slots.
    renumber: VecDeque<i64>,
    renumbering: Option<Renumbering>,
    not_before: Option<Instant>,
}

/// A snapshot that another thread builds without empty slots. The changes that are made meanwhile
/// are recorded, and made to the result too.
struct Renumbering {
    collection: i64,
    thread: JoinHandle<Snapshot>,
    finished: Arc<AtomicBool>,
    changes: Vec<Change>,
}

impl Cleanup {
    /// After a start, anything may be left.
    pub(super) fn after_start(collections: Vec<i64>) -> Self {
        Self {
            purge: true,
            compact: collections.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Rows of collections were deleted.
    pub(super) fn deleted(&mut self, collections: impl Iterator<Item = i64>) {
        self.purge = true;
        for collection in collections {
            self.compact.insert(collection);
            if !self.renumber.contains(&collection) {
                self.renumber.push_back(collection);
            }
        }
    }

    /// The collection whose changes have to be recorded.
    pub(super) fn recorded(&self) -> Option<i64> {
        self.renumbering.as_ref().map(|running| running.collection)
    }

    pub(super) fn record(&mut self, changes: Vec<Change>) {
        if let Some(running) = &mut self.renumbering {
            let ends = |change: &Change| matches!(change, Change::Create | Change::Drop);
            if changes.iter().any(ends) {
                // The result is of no use; the thread ends by itself.
                self.renumbering = None;
            } else {
                running.changes.extend(changes);
            }
        }
    }

    /// Whether there is something to do in the file.
    pub(super) fn is_pending(&self) -> bool {
        self.purge || !self.compact.is_empty()
    }

    /// Whether a slice would do something now.
    pub(super) fn is_due(&self) -> bool {
        let in_memory = match self.renumbering {
            Some(_) => self.is_renumbered(),
            None => !self.renumber.is_empty(),
        };
        (self.is_pending() || in_memory) && self.not_before.is_none_or(|time| Instant::now() >= time)
    }

    /// Whether a slice will do something now or later.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_pending() || !self.renumber.is_empty() || self.renumbering.is_some()
    }

    fn is_renumbered(&self) -> bool {
        self.renumbering
            .as_ref()
            .is_some_and(|running| running.finished.load(Ordering::Acquire))
    }

    pub(super) fn ran(&mut self) {
        self.not_before = Some(Instant::now() + PAUSE);
    }

    /// The last slice was rolled back.
    pub(super) fn failed(&mut self) {
        self.purge = true;
        self.not_before = Some(Instant::now() + RETRY);
    }
}

impl Transaction<'_> {
    /// Does some of the cleanup.
    pub(super) fn clean(&mut self, cleanup: &mut Cleanup, disk: Disk) -> Result<()> {
        let start = Instant::now();
        self.fault(FaultPoint::Cleanup)?;
        if cleanup.is_renumbered()
            && let Some(done) = cleanup.renumbering.take()
        {
            return self.install(done);
        }
        while start.elapsed() < SLICE {
            if cleanup.purge {
                cleanup.purge = self.purge_documents()? || self.purge_collection()?;
            } else if let Some(collection) = cleanup.compact.first().copied() {
                if !self.compact_vectors(collection, disk)? {
                    cleanup.compact.remove(&collection);
                }
            } else if cleanup.renumbering.is_none()
                && let Some(collection) = cleanup.renumber.pop_front()
            {
                cleanup.renumbering = self.start_renumbering(collection)?;
            } else {
                break;
            }
            if disk == Disk::Full {
                break;
            }
        }
        Ok(())
    }

    /// Records rows as deleted. They are removed later.
    pub(super) fn mark_deleted(&mut self, collection: i64, rowids: &[i64]) -> Result<()> {
        let mut insert = self.connection.prepare_cached(
            "INSERT INTO deleted_documents (collection, first, rowids) VALUES (?1, ?2, ?3)",
        )?;
        for rowids in rowids.chunks(ROWS_PER_RECORD) {
            let mut bytes = Vec::new();
            rowids
                .iter()
                .map(|rowid| rowid.unsigned_abs())
                .collect::<RoaringTreemap>()
                .serialize_into(&mut bytes)
                .map_err(|e| Error::Worker(e.to_string()))?;
            insert.execute(params![collection, rowids.first(), bytes])?;
        }
        Ok(())
    }

    /// Removes the rows of one record of deleted rows. Returns whether there was one.
    fn purge_documents(&mut self) -> Result<bool> {
        let record = self
            .connection
            .prepare_cached(
                "SELECT collection, first, rowids FROM deleted_documents ORDER BY collection, first LIMIT 1",
            )?
            .query_row([], |row| {
                Ok((row.get(0)?, row.get::<_, i64>(1)?, row.get::<_, Vec<u8>>(2)?))
            })
            .optional()?;
        let Some((collection, first, rowids)) = record else {
            return Ok(false);
        };
        for rowid in deleted_rowids(&rowids)? {
            self.purge_document(collection, rowid)?;
        }
        self.connection
            .prepare_cached("DELETE FROM deleted_documents WHERE collection = ?1 AND first = ?2")?
            .execute([collection, first])?;
        Ok(true)
    }

    /// Removes the row and the vector of a document that was marked as deleted, unless they are gone.
    pub(super) fn purge_document(&mut self, collection: i64, rowid: i64) -> Result<()> {
        let metadata = self
            .connection
            .prepare_cached("DELETE FROM documents WHERE rowid = ?1 RETURNING metadata")?
            .query_row([rowid], |row| row.get::<_, String>(0))
            .optional()?;
        let Some(metadata) = metadata else {
            return Ok(());
        };
        self.connection
            .prepare_cached(&format!(
                "DELETE FROM {} WHERE rowid = ?1",
                vector_table(collection)
            ))?
            .execute([rowid])?;
        let metadata: Metadata = serde_json::from_str(&metadata)?;
        self.change(collection, Change::Forget { rowid, metadata });
        Ok(())
    }

    /// Records that a collection id is no longer used. Its rows are removed later.
    pub(super) fn mark_collection_deleted(&mut self, collection: i64) -> Result<()> {
        self.connection
            .prepare_cached("DELETE FROM deleted_documents WHERE collection = ?1")?
            .execute([collection])?;
        self.connection
            .prepare_cached("INSERT INTO deleted_collections (id) VALUES (?1)")?
            .execute([collection])?;
        Ok(())
    }

    /// Removes some of a deleted collection. Returns whether there was one.
    fn purge_collection(&mut self) -> Result<bool> {
        let collection: Option<i64> = self
            .connection
            .prepare_cached("SELECT id FROM deleted_collections ORDER BY id LIMIT 1")?
            .query_row([], |row| row.get(0))
            .optional()?;
        let Some(collection) = collection else {
            return Ok(false);
        };
        let removed = self
            .connection
            .prepare_cached(
                "DELETE FROM documents WHERE rowid IN
                 (SELECT rowid FROM documents WHERE collection = ?1 LIMIT ?2)",
            )?
            .execute(params![collection, COLLECTION_ROWS])?;
        if removed > 0 || self.purge_vectors(collection)? {
            return Ok(true);
        }
        self.connection
            .execute_batch(&format!("DROP TABLE IF EXISTS {}", vector_table(collection)))?;
        self.connection
            .prepare_cached("DELETE FROM deleted_collections WHERE id = ?1")?
            .execute([collection])?;
        Ok(true)
    }

    /// Removes some rows from the tables behind a vector table that nobody uses any more. Dropping it
    /// as a whole would take seconds. Returns whether there were any.
    fn purge_vectors(&mut self, collection: i64) -> Result<bool> {
        let table = vector_table(collection);
        let exists: bool = self
            .connection
            .prepare_cached("SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = ?1)")?
            .query_row([&table], |row| row.get(0))?;
        if !exists {
            return Ok(false);
        }
        let parts = [
            ("vector_chunks00", "rowid", COLLECTION_CHUNKS),
            ("chunks", "chunk_id", COLLECTION_ROWS),
            ("rowids", "rowid", COLLECTION_ROWS),
        ];
        for (part, key, limit) in parts {
            let removed = self.connection.execute(
                &format!(
                    "DELETE FROM {table}_{part} WHERE {key} IN (SELECT {key} FROM {table}_{part} LIMIT {limit})"
                ),
                [],
            )?;
            if removed > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Moves the vectors of the emptiest chunk if enough space is unused. Returns whether it did.
    fn compact_vectors(&mut self, collection: i64, disk: Disk) -> Result<bool> {
        let dimensions: Option<Option<usize>> = self
            .connection
            .prepare_cached("SELECT dimensions FROM collections WHERE id = ?1")?
            .query_row([collection], |row| row.get(0))
            .optional()?;
        let Some(dimensions) = dimensions.flatten() else {
            return Ok(false);
        };
        if disk == Disk::Full && dimensions > MAX_DIMENSIONS_ON_FULL_DISK {
            return Ok(false);
        }
        let table = vector_table(collection);
        let chunks = self
            .connection
            .prepare(&format!(
                "SELECT chunk_id, size, validity FROM {table}_chunks ORDER BY chunk_id"
            ))?
            .query_map([], |row| {
                let used: u32 = row
                    .get_ref(2)?
                    .as_blob()?
                    .iter()
                    .map(|byte| byte.count_ones())
                    .sum();
                Ok((row.get(0)?, row.get(1)?, used.into()))
            })?
            .collect::<rusqlite::Result<Vec<(i64, u64, u64)>>>()?;
        let (size, used) = chunks.iter().fold((0, 0), |(sizes, uses), (_, size, used)| {
            (sizes + size, uses + used)
        });
        if !wants_compaction(size, used) {
            return Ok(false);
        }
        // The newest chunk is where vectors are moved to.
        let older = chunks.split_last().map_or(&[][..], |(_, older)| older);
        let Some((chunk, ..)) = older.iter().min_by_key(|(.., used)| used) else {
            return Ok(false);
        };
        self.move_vectors(&table, *chunk)?;
        Ok(true)
    }

    fn move_vectors(&mut self, table: &str, chunk: i64) -> Result<()> {
        let (validity, rowids, vectors) = self
            .connection
            .prepare(&format!(
                "SELECT c.validity, c.rowids, v.vectors FROM {table}_chunks c
                 JOIN {table}_vector_chunks00 v ON v.rowid = c.chunk_id WHERE c.chunk_id = ?1"
            ))?
            .query_row([chunk], |row| {
                Ok((
                    row.get::<_, Vec<u8>>(0)?,
                    row.get::<_, Vec<u8>>(1)?,
                    row.get::<_, Vec<u8>>(2)?,
                ))
            })?;
        let mut delete = self
            .connection
            .prepare_cached(&format!("DELETE FROM {table} WHERE rowid = ?1"))?;
        let mut insert = self
            .connection
            .prepare_cached(&format!("INSERT INTO {table} (rowid, embedding) VALUES (?1, ?2)"))?;
        let width = vectors.len() / (8 * validity.len()).max(1);
        let slots = rowids
            .as_chunks::<8>()
            .0
            .iter()
            .zip(vectors.chunks_exact(width.max(1)));
        for (at, (rowid, vector)) in slots.enumerate() {
            if validity.get(at / 8).is_some_and(|byte| byte >> (at % 8) & 1 == 1) {
                let rowid = i64::from_ne_bytes(*rowid);
                delete.execute([rowid])?;
                insert.execute(params![rowid, vector])?;
            }
        }
        Ok(())
    }

    fn start_renumbering(&mut self, collection: i64) -> Result<Option<Renumbering>> {
        let Some(snapshot) = self.published(collection).filter(|s| s.wants_renumbering()) else {
            return Ok(None);
        };
        let finished = Arc::new(AtomicBool::new(false));
        let finish = Arc::clone(&finished);
        let thread = std::thread::Builder::new()
            .name("ragstone-renumber".into())
            .spawn(move || {
                let _finish = SetOnDrop(finish);
                snapshot.renumbered()
            })
            .map_err(|e| Error::Worker(e.to_string()))?;
        Ok(Some(Renumbering {
            collection,
            thread,
            finished,
            changes: Vec::new(),
        }))
    }

    /// Makes a renumbered snapshot the next state of its collection.
    fn install(&mut self, done: Renumbering) -> Result<()> {
        let snapshot = done
            .thread
            .join()
            .map_err(|_| Error::Worker("renumbering panicked".into()))?;
        self.replace_snapshot(done.collection, snapshot, done.changes)
    }
}

/// Tells that a thread has ended, however it ends.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Whether more than a third of a vector table is unused, by more than a chunk. Moving the emptiest
/// chunk then frees at least half as many slots as it writes.
fn wants_compaction(size: u64, used: u64) -> bool {
    const CHUNK: u64 = 1024;
    size - used.min(size) > used / 2 + CHUNK
}

/// The rows that a record of deleted rows lists.
pub(crate) fn deleted_rowids(bytes: &[u8]) -> Result<impl Iterator<Item = i64> + use<>> {
    let rowids = RoaringTreemap::deserialize_from(bytes)
        .map_err(|_| Error::Damaged("a record of deleted rows cannot be read".into()))?;
    Ok(rowids.into_iter().map(|rowid| rowid as i64))
}

/// Removes everything that is marked as deleted from a copy of the database, in one go.
pub(crate) fn purge_deleted(connection: &Connection) -> Result<()> {
    let schema: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if schema < FIRST_SCHEMA_WITH_DELETED {
        return Ok(());
    }
    connection.execute_batch("PRAGMA secure_delete = FAST; BEGIN")?;
    let records = connection
        .prepare("SELECT collection, rowids FROM deleted_documents")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<rusqlite::Result<Vec<(i64, Vec<u8>)>>>()?;
    let mut delete = connection.prepare("DELETE FROM documents WHERE rowid = ?1")?;
    for (collection, rowids) in records {
        let table = vector_table(collection);
        let mut delete_vector =
            connection.prepare_cached(&format!("DELETE FROM {table} WHERE rowid = ?1"))?;
        for rowid in deleted_rowids(&rowids)? {
            if delete.execute([rowid])? > 0 {
                delete_vector.execute([rowid])?;
            }
        }
    }
    let collections = connection
        .prepare("SELECT id FROM deleted_collections")?
        .query_map([], |row| row.get(0))?
        .collect::<rusqlite::Result<Vec<i64>>>()?;
    for collection in collections {
        connection.execute("DELETE FROM documents WHERE collection = ?1", [collection])?;
        connection.execute_batch(&format!("DROP TABLE IF EXISTS {}", vector_table(collection)))?;
    }
    connection.execute_batch("DELETE FROM deleted_documents; DELETE FROM deleted_collections; COMMIT")?;
    Ok(())
}
