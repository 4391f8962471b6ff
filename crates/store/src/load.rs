//! Reading all collections into memory when the store opens.
//!
//! Vectors are read in bulk from the blobs behind each `vec0` table, which is far quicker than
//! asking the table row by row, while another thread reads metadata and words.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ragstone_core::Metadata;
use rusqlite::Connection;

use crate::error::{Error, Result};
use crate::index::fields::{Fields, FieldsBuilder};
use crate::index::keyword::KeywordIndex;
use crate::index::segment::{MAX_DOCUMENTS, SegmentBuilder};
use crate::index::vectors::{CHUNK, Vectors};
use crate::index::{Snapshot, SnapshotParts};
use crate::schema::{open_reader, vector_table};

struct CollectionHead {
    id: i64,
    version: i64,
    dimensions: Option<usize>,
}

/// The snapshot of every collection. Nothing may write meanwhile.
pub(crate) fn load_all(database: &Path) -> Result<HashMap<i64, Arc<Snapshot>>> {
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
    let rowids = load_rowids(&connection, &heads)?;
    let (vectors, mut documents) = std::thread::scope(|scope| {
        let documents = scope.spawn(|| load_documents(database));
        let vectors = heads
            .iter()
            .map(|head| load_vectors(&connection, head, rowids.get(&head.id).map_or(&[], Vec::as_slice)))
            .collect::<Result<Vec<_>>>();
        let documents = documents
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, Error>((vectors?, documents?))
    })?;
    let mut snapshots = HashMap::with_capacity(heads.len());
    for (head, vectors) in heads.iter().zip(vectors) {
        let builder = documents.remove(&head.id).unwrap_or_default();
        let rowids = rowids.get(&head.id).map_or(&[][..], Vec::as_slice);
        let (fields, keyword) = builder.finish();
        let snapshot = Snapshot::from_parts(SnapshotParts {
            version: head.version,
            rowids: rowids.iter().copied().collect(),
            fields,
            keyword,
            vectors,
        });
        snapshots.insert(head.id, Arc::new(snapshot));
    }
    Ok(snapshots)
}

fn load_rowids(connection: &Connection, heads: &[CollectionHead]) -> Result<HashMap<i64, Vec<i64>>> {
    let mut rowids = HashMap::with_capacity(heads.len());
    let mut of_collection = connection.prepare("SELECT rowid FROM documents WHERE collection = ?1")?;
    for head in heads {
        let mut found: Vec<i64> = of_collection
            .query_map([head.id], |row| row.get(0))?
            .collect::<rusqlite::Result<_>>()?;
        found.sort_unstable();
        rowids.insert(head.id, found);
    }
    Ok(rowids)
}

fn load_vectors(connection: &Connection, head: &CollectionHead, rowids: &[i64]) -> Result<Option<Vectors>> {
    let Some(dimensions) = head.dimensions.filter(|_| !rowids.is_empty()) else {
        return Ok(None);
    };
    let damaged = |what: &str| Error::Damaged(format!("the vectors of collection {}: {what}", head.id));
    let mut parts: Vec<Vec<f32>> = rowids
        .chunks(CHUNK)
        .map(|part| vec![0.0; part.len() * dimensions])
        .collect();
    let mut found = 0;
    let table = vector_table(head.id);
    let mut chunks = connection.prepare(&format!(
        "SELECT c.validity, c.rowids, v.vectors FROM {table}_chunks c
         JOIN {table}_vector_chunks00 v ON v.rowid = c.chunk_id ORDER BY c.chunk_id"
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
                _ => rowids
                    .binary_search(&rowid)
                    .map_err(|_| damaged("one has no document"))?,
            };
            expected = slot + 1;
            let bytes = vectors
                .get(at * dimensions * 4..(at + 1) * dimensions * 4)
                .ok_or_else(|| damaged("a chunk is too short"))?;
            let start = slot % CHUNK * dimensions;
            let place = parts
                .get_mut(slot / CHUNK)
                .and_then(|part| part.get_mut(start..start + dimensions))
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
    Ok(Some(Vectors::from_chunks(dimensions, parts, threads)))
}

#[derive(Default)]
struct IndexBuilder {
    fields: FieldsBuilder,
    keyword: KeywordIndex,
    segment: SegmentBuilder,
    slots: Vec<u32>,
    documents: u32,
}

fn load_documents(database: &Path) -> Result<HashMap<i64, IndexBuilder>> {
    let connection = open_reader(database)?;
    let mut builders: HashMap<i64, IndexBuilder> = HashMap::new();
    let mut all = connection.prepare("SELECT collection, metadata, terms FROM documents ORDER BY rowid")?;
    let mut rows = all.query([])?;
    while let Some(row) = rows.next()? {
        let builder = builders.entry(row.get(0)?).or_default();
        let unreadable = || Error::Damaged("a document's row cannot be read".into());
        let metadata: Metadata = serde_json::from_str(row.get_ref(1)?.as_str().map_err(|_| unreadable())?)?;
        builder.add(&metadata, row.get_ref(2)?.as_blob().map_err(|_| unreadable())?)?;
    }
    Ok(builders)
}

impl IndexBuilder {
    fn add(&mut self, metadata: &Metadata, encoded_terms: &[u8]) -> Result<()> {
        let slot = self.documents;
        self.documents += 1;
        self.fields.insert(slot, metadata);
        self.segment.add(encoded_terms)?;
        self.slots.push(slot);
        if self.segment.len() == MAX_DOCUMENTS {
            self.finish_segment();
        }
        Ok(())
    }

    fn finish_segment(&mut self) {
        let segment = std::mem::take(&mut self.segment);
        self.keyword.add_segment(segment, std::mem::take(&mut self.slots));
    }

    fn finish(mut self) -> (Fields, KeywordIndex) {
        if self.segment.len() > 0 {
            self.finish_segment();
        }
        (self.fields.finish(), self.keyword)
    }
}
