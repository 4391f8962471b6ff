//! Loads all collections into memory when the store opens.
//!
//! Vectors are read in bulk from the blobs behind each `vec0` table, which is far quicker than
//! asking the table row by row, while other threads read metadata and words.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use ragstone_core::Metadata;
use roaring::RoaringTreemap;
use rusqlite::Connection;

use crate::error::{Error, Result};
use crate::sqlite::index::fields::{Fields, FieldsBuilder};
use crate::sqlite::index::keyword::KeywordIndex;
use crate::sqlite::index::scope::IndexScope;
use crate::sqlite::index::segment::{MAX_DOCUMENTS, SegmentBuilder, SegmentData};
use crate::sqlite::index::vectors::{BLOCK, Vectors};
use crate::sqlite::index::{Snapshot, SnapshotParts};
use crate::sqlite::schema::{open_reader, vector_table};
use crate::sqlite::writer::deleted_rowids;

struct CollectionHead {
    id: i64,
    version: i64,
    dimensions: Option<usize>,
}

/// Builds the snapshot of every collection. Nothing may write meanwhile.
pub(crate) fn load_all(database: &Path, scope: IndexScope) -> Result<HashMap<i64, Arc<Snapshot>>> {
    let connection = open_reader(database)?;
    let heads: Vec<CollectionHead> = connection
        .prepare("SELECT id, version, dimensions FROM collections")?
        .query_map([], |row| {
            Ok(CollectionHead {
                id: row.get(0)?,
                version: row.get(1)?,
                dimensions: row.get(2)?,
            })
        })?
        .collect::<rusqlite::Result<_>>()?;
    let deleted = &load_deleted(&connection)?;
    let rowids = load_rowids(&connection, &heads, deleted)?;
    let newest = rowids.values().filter_map(|of_one| of_one.last()).max();
    let newest = newest.copied().unwrap_or(0);
    let (vectors, mut fields, mut keywords) = std::thread::scope(|threads| {
        let fields = threads.spawn(|| load_fields(database, scope, deleted));
        let keywords = threads.spawn(|| match scope {
            IndexScope::Everything => load_keywords(database, newest, deleted),
            IndexScope::Fields { .. } => Ok(HashMap::new()),
        });
        let vectors = heads
            .iter()
            .map(|head| match scope {
                IndexScope::Everything => {
                    let rowids = rowids.get(&head.id).map_or(&[][..], Vec::as_slice);
                    load_vectors(&connection, head, rowids, &deleted.rowids)
                }
                IndexScope::Fields { .. } => Ok(None),
            })
            .collect::<Result<Vec<_>>>();
        Ok::<_, Error>((vectors?, joined(fields)?, joined(keywords)?))
    })?;
    let mut snapshots = HashMap::with_capacity(heads.len());
    for (head, vectors) in heads.iter().zip(vectors) {
        let rowids = rowids.get(&head.id).map_or(&[][..], Vec::as_slice);
        let snapshot = Snapshot::from_parts(SnapshotParts {
            version: head.version,
            scope,
            dimensions: head.dimensions.filter(|_| !rowids.is_empty()),
            rowids: rowids.iter().copied().collect(),
            fields: fields.remove(&head.id).unwrap_or_default(),
            keyword: keywords.remove(&head.id).unwrap_or_default(),
            vectors,
        });
        snapshots.insert(head.id, Arc::new(snapshot));
    }
    Ok(snapshots)
}

fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Documents that are deleted, and whose rows are not yet removed.
struct Deleted {
    rowids: RoaringTreemap,
    collections: HashSet<i64>,
}

impl Deleted {
    fn contains(&self, collection: i64, rowid: i64) -> bool {
        self.rowids.contains(rowid.unsigned_abs()) || self.collections.contains(&collection)
    }
}

fn load_deleted(connection: &Connection) -> Result<Deleted> {
    let mut rowids = RoaringTreemap::new();
    let mut records = connection.prepare("SELECT rowids FROM deleted_documents")?;
    let mut rows = records.query([])?;
    while let Some(row) = rows.next()? {
        let record = row.get_ref(0)?.as_blob().map_err(|_| unreadable())?;
        rowids.extend(deleted_rowids(record)?.map(i64::unsigned_abs));
    }
    let mut collections = connection.prepare("SELECT id FROM deleted_collections")?;
    let collections = collections.query_map([], |row| row.get(0))?;
    Ok(Deleted {
        rowids,
        collections: collections.collect::<rusqlite::Result<_>>()?,
    })
}

fn load_rowids(
    connection: &Connection,
    heads: &[CollectionHead],
    deleted: &Deleted,
) -> Result<HashMap<i64, Vec<i64>>> {
    let mut rowids = HashMap::with_capacity(heads.len());
    let mut of_collection = connection.prepare("SELECT rowid FROM documents WHERE collection = ?1")?;
    for head in heads {
        let mut found: Vec<i64> = of_collection
            .query_map([head.id], |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        found.retain(|rowid| !deleted.rowids.contains(rowid.unsigned_abs()));
        found.sort_unstable();
        rowids.insert(head.id, found);
    }
    Ok(rowids)
}

fn load_vectors(
    connection: &Connection,
    head: &CollectionHead,
    rowids: &[i64],
    deleted: &RoaringTreemap,
) -> Result<Option<Vectors>> {
    let Some(dimensions) = head.dimensions.filter(|_| !rowids.is_empty()) else {
        return Ok(None);
    };
    let damaged = |what: &str| Error::Damaged(format!("the vectors of collection {}: {what}", head.id));
    let mut blocks: Vec<Vec<f32>> = rowids
        .chunks(BLOCK)
        .map(|block| vec![0.0; block.len() * dimensions])
        .collect();
    let mut found = 0;
    let table = vector_table(head.id);
    // In this order, or SQLite would read the large blobs first and sort them in a file.
    let mut chunks = connection.prepare(&format!(
        "SELECT c.validity, c.rowids, v.vectors FROM {table}_chunks c
         CROSS JOIN {table}_vector_chunks00 v ON v.rowid = c.chunk_id ORDER BY c.chunk_id"
    ))?;
    let mut rows = chunks.query([])?;
    while let Some(row) = rows.next()? {
        let blob = |column| {
            row.get_ref(column)
                .map_err(Error::from)?
                .as_blob()
                .map_err(|_| damaged("not a blob"))
        };
        let (validity, chunk_rowids, vectors) = (blob(0)?, blob(1)?, blob(2)?);
        let mut expected = 0;
        for (at, rowid) in chunk_rowids.as_chunks::<8>().0.iter().enumerate() {
            if validity.get(at / 8).is_none_or(|byte| byte >> (at % 8) & 1 == 0) {
                continue;
            }
            let rowid = i64::from_ne_bytes(*rowid);
            // Neighbours in a chunk are mostly neighbours in the collection.
            let slot = match rowids.get(expected) {
                Some(next) if *next == rowid => expected,
                _ if deleted.contains(rowid.unsigned_abs()) => continue,
                _ => rowids
                    .binary_search(&rowid)
                    .map_err(|_| damaged("one has no document"))?,
            };
            expected = slot + 1;
            let bytes = vectors
                .get(at * dimensions * 4..(at + 1) * dimensions * 4)
                .ok_or_else(|| damaged("a chunk is too short"))?;
            let start = slot % BLOCK * dimensions;
            let place = blocks
                .get_mut(slot / BLOCK)
                .and_then(|block| block.get_mut(start..start + dimensions))
                .ok_or_else(|| damaged("a slot is out of range"))?;
            for (x, bytes) in place.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*bytes);
            }
            found += 1;
        }
    }
    if found != rowids.len() {
        return Err(damaged(&format!("{found} for {} documents", rowids.len())));
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Some(Vectors::from_blocks(dimensions, blocks, threads)))
}

fn unreadable() -> Error {
    Error::Damaged("a document's row cannot be read".into())
}

/// The metadata index of every collection; documents have their slots in the order of their rows.
fn load_fields(database: &Path, scope: IndexScope, deleted: &Deleted) -> Result<HashMap<i64, Fields>> {
    let connection = open_reader(database)?;
    let mut builders: HashMap<i64, (FieldsBuilder, u32)> = HashMap::new();
    let mut all = connection.prepare("SELECT collection, metadata, rowid FROM documents ORDER BY rowid")?;
    let mut rows = all.query([])?;
    while let Some(row) = rows.next()? {
        let collection = row.get(0)?;
        if deleted.contains(collection, row.get(2)?) {
            continue;
        }
        let (builder, slots) = builders.entry(collection).or_default();
        let metadata: Metadata = serde_json::from_str(row.get_ref(1)?.as_str().map_err(|_| unreadable())?)?;
        builder.insert(*slots, &scope.of(&metadata));
        *slots += 1;
    }
    let finished = builders
        .into_iter()
        .map(|(collection, (builder, _))| (collection, builder.finish()));
    Ok(finished.collect())
}

/// The keyword index of every collection. Threads share the rows, and make segments of their own.
fn load_keywords(database: &Path, newest: i64, deleted: &Deleted) -> Result<HashMap<i64, KeywordIndex>> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as i64;
    // No more than make full segments: many small ones would make every search slower.
    let threads = threads.min(newest / MAX_DOCUMENTS as i64 + 1);
    let share = newest / threads + 1;
    let parts = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|part| scope.spawn(move || load_segments(database, part * share, share, deleted)))
            .collect();
        workers.into_iter().map(joined).collect::<Result<Vec<_>>>()
    })?;
    let mut indexes: HashMap<i64, (KeywordIndex, u32)> = HashMap::new();
    for (collection, segments) in parts.into_iter().flatten() {
        let (index, documents) = indexes.entry(collection).or_default();
        for segment in segments {
            let first = *documents;
            *documents += segment.len() as u32;
            index.add_segment(segment, (first..*documents).collect());
        }
    }
    let finished = indexes
        .into_iter()
        .map(|(collection, (index, _))| (collection, index));
    Ok(finished.collect())
}

/// The words of the documents in the given number of rowids after one.
fn load_segments(
    database: &Path,
    after: i64,
    rows: i64,
    deleted: &Deleted,
) -> Result<HashMap<i64, Vec<SegmentData>>> {
    let connection = open_reader(database)?;
    let mut builders: HashMap<i64, (SegmentBuilder, Vec<SegmentData>)> = HashMap::new();
    let mut some = connection.prepare(
        "SELECT collection, terms, rowid FROM documents WHERE rowid > ?1 AND rowid <= ?2 ORDER BY rowid",
    )?;
    let mut rows = some.query([after, after + rows])?;
    while let Some(row) = rows.next()? {
        let collection = row.get(0)?;
        if deleted.contains(collection, row.get(2)?) {
            continue;
        }
        let (builder, finished) = builders.entry(collection).or_default();
        builder.add(row.get_ref(1)?.as_blob().map_err(|_| unreadable())?)?;
        if builder.len() == MAX_DOCUMENTS {
            finished.push(std::mem::take(builder).finish());
        }
    }
    let finished = builders.into_iter().map(|(collection, (builder, mut finished))| {
        if builder.len() > 0 {
            finished.push(builder.finish());
        }
        (collection, finished)
    });
    Ok(finished.collect())
}
