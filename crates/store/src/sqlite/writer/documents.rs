//! Steps that change documents.

use ragstone_core::analysis::analyze_document;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{ExportedDocument, Selection};
use ragstone_core::{CollectionName, DocumentId};
use rusqlite::{OptionalExtension, params};

use super::transaction::{Change, Transaction};
use crate::error::{Error, Result};
use crate::sqlite::index::{Indexed, Snapshot};
use crate::sqlite::schema::vector_table;
use crate::sqlite::terms::encode;

/// Documents with all that can be worked out before they reach the writer.
pub(crate) struct PreparedBatch {
    documents: Vec<PreparedDocument>,
    /// Every model that made some of the vectors, once.
    models: Vec<ModelIdentity>,
    dimensions: usize,
    pub(crate) bytes: usize,
}

struct PreparedDocument {
    id: DocumentId,
    text: String,
    metadata_json: String,
    /// Which of the batch's models made the vector.
    model: Option<usize>,
    norm: f32,
    /// Of length one.
    vector: Vec<f32>,
    indexed: Indexed,
}

/// Analyses texts; takes time, and no lock.
pub(crate) fn prepare(name: &CollectionName, batch: Vec<ExportedDocument>) -> Result<PreparedBatch> {
    let dimensions = batch.first().map_or(0, |first| first.vector.len());
    let mut bytes = 0;
    let mut models: Vec<ModelIdentity> = Vec::new();
    let mut documents = Vec::with_capacity(batch.len());
    for moved in batch {
        if moved.vector.len() != dimensions {
            return Err(Error::DimensionMismatch {
                collection: name.clone(),
                expected: dimensions,
                actual: moved.vector.len(),
            });
        }
        let model = moved.model.map(|model| {
            let known = models.iter().position(|known| *known == model);
            known.unwrap_or_else(|| {
                models.push(model);
                models.len() - 1
            })
        });
        let document = moved.document;
        let metadata_json = serde_json::to_string(&document.metadata)?;
        let terms = encode(&analyze_document(&document.text));
        bytes += document.text.len() + 4 * metadata_json.len() + 2 * terms.len() + 4 * dimensions + 256;
        documents.push(PreparedDocument {
            id: document.id,
            text: document.text,
            metadata_json,
            model,
            norm: moved.norm,
            vector: moved.vector,
            indexed: Indexed {
                metadata: document.metadata,
                terms,
            },
        });
    }
    Ok(PreparedBatch {
        documents,
        models,
        dimensions,
        bytes,
    })
}

impl Transaction<'_> {
    pub(crate) fn upsert(&mut self, name: &CollectionName, batch: PreparedBatch) -> Result<()> {
        let row = self.require(name)?;
        if batch.documents.is_empty() {
            return Ok(());
        }
        match row.dimensions {
            None => self.create_vector_table(row.id, batch.dimensions)?,
            Some(expected) if expected != batch.dimensions => {
                return Err(Error::DimensionMismatch {
                    collection: name.clone(),
                    expected,
                    actual: batch.dimensions,
                });
            }
            Some(_) => {}
        }
        let models = batch
            .models
            .iter()
            .map(|model| self.model_number(model))
            .collect::<Result<Vec<_>>>()?;
        let vectors = vector_table(row.id);
        let mut old_row = self.connection.prepare_cached(
            "SELECT rowid, metadata, terms FROM documents WHERE collection = ?1 AND id = ?2",
        )?;
        let mut insert = self.connection.prepare_cached(
            "INSERT INTO documents (collection, id, model, norm, metadata, terms, text)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?;
        let mut update = self.connection.prepare_cached(
            "UPDATE documents SET model = ?2, norm = ?3, metadata = ?4, terms = ?5, text = ?6 WHERE rowid = ?1",
        )?;
        let mut insert_vector = self.connection.prepare_cached(&format!(
            "INSERT INTO {vectors} (rowid, embedding) VALUES (?1, ?2)"
        ))?;
        let mut delete_vector = self
            .connection
            .prepare_cached(&format!("DELETE FROM {vectors} WHERE rowid = ?1"))?;
        let mut changes = Vec::with_capacity(batch.documents.len());
        for document in batch.documents {
            let old = old_row
                .query_row((row.id, document.id.as_str()), |row| {
                    Ok((row.get(0)?, row.get::<_, String>(1)?, row.get(2)?))
                })
                .optional()?;
            let model = document.model.and_then(|model| models.get(model));
            let (norm, metadata, terms, text) = (
                document.norm,
                &document.metadata_json,
                &document.indexed.terms,
                &document.text,
            );
            let rowid = match &old {
                Some((rowid, ..)) => {
                    update.execute(params![rowid, model, norm, metadata, terms, text])?;
                    delete_vector.execute([rowid])?;
                    *rowid
                }
                None => {
                    insert.execute(params![
                        row.id,
                        document.id.as_str(),
                        model,
                        norm,
                        metadata,
                        terms,
                        text
                    ])?;
                    self.connection.last_insert_rowid()
                }
            };
            insert_vector.execute(params![rowid, vector_bytes(&document.vector)])?;
            changes.push(match old {
                Some((rowid, metadata, terms)) => Change::Replace {
                    rowid,
                    vector: document.vector,
                    old: indexed(&metadata, terms)?,
                    new: document.indexed,
                },
                None => Change::Insert {
                    rowid,
                    vector: document.vector,
                    indexed: document.indexed,
                },
            });
        }
        drop((old_row, insert, update, insert_vector, delete_vector));
        changes.into_iter().for_each(|change| self.change(row.id, change));
        Ok(())
    }

    /// Deletes what is selected, and returns how many there were.
    pub(crate) fn delete_documents(&mut self, name: &CollectionName, selection: Selection) -> Result<u64> {
        let row = self.require(name)?;
        let rowids = self.selected(row.id, selection)?;
        if rowids.is_empty() {
            return Ok(0);
        }
        if rowids.len() as u64 == self.snapshot(row.id)?.count() {
            self.remove_all_documents(row.id)?;
            self.change(row.id, Change::Empty);
            return Ok(rowids.len() as u64);
        }
        let mut delete = self
            .connection
            .prepare_cached("DELETE FROM documents WHERE rowid = ?1 RETURNING metadata, terms")?;
        let mut delete_vector = self
            .connection
            .prepare_cached(&format!("DELETE FROM {} WHERE rowid = ?1", vector_table(row.id)))?;
        let mut changes = Vec::with_capacity(rowids.len());
        for rowid in rowids {
            let (metadata, terms) =
                delete.query_row([rowid], |row| Ok((row.get::<_, String>(0)?, row.get(1)?)))?;
            delete_vector.execute([rowid])?;
            changes.push(Change::Remove {
                rowid,
                old: indexed(&metadata, terms)?,
            });
        }
        drop((delete, delete_vector));
        let count = changes.len() as u64;
        changes.into_iter().for_each(|change| self.change(row.id, change));
        Ok(count)
    }

    /// The rows of the documents that are really there, each once.
    fn selected(&mut self, collection: i64, selection: Selection) -> Result<Vec<i64>> {
        match selection {
            Selection::Ids(ids) => {
                let mut find = self
                    .connection
                    .prepare_cached("SELECT rowid FROM documents WHERE collection = ?1 AND id = ?2")?;
                let mut rowids = Vec::with_capacity(ids.len());
                for id in ids {
                    rowids.extend(
                        find.query_row((collection, id.as_str()), |row| row.get::<_, i64>(0))
                            .optional()?,
                    );
                }
                rowids.sort_unstable();
                rowids.dedup();
                Ok(rowids)
            }
            Selection::Matching(filter) => {
                let snapshot = self.snapshot(collection)?;
                let slots = snapshot.matching(&filter);
                Ok(slots.iter().filter_map(|slot| snapshot.rowid(slot)).collect())
            }
        }
    }

    /// Writes the vectors anew. A `vec0` table keeps the space of deleted vectors until all of a
    /// chunk are gone, so when most are it is worth it.
    pub(super) fn rewrite_vectors(&self, collection: i64, snapshot: &Snapshot) -> Result<()> {
        let Some(vectors) = snapshot.vectors() else {
            return Ok(());
        };
        let table = vector_table(collection);
        self.connection.execute_batch(&format!("DROP TABLE {table}"))?;
        self.create_vector_table(collection, vectors.dimensions())?;
        let mut insert = self
            .connection
            .prepare(&format!("INSERT INTO {table} (rowid, embedding) VALUES (?1, ?2)"))?;
        for slot in snapshot.live() {
            insert.execute(params![snapshot.rowid(slot), vector_bytes(vectors.get(slot))])?;
        }
        Ok(())
    }

    fn create_vector_table(&self, collection: i64, dimensions: usize) -> Result<()> {
        self.connection.execute_batch(&format!(
            "CREATE VIRTUAL TABLE {} USING vec0(embedding float[{dimensions}])",
            vector_table(collection)
        ))?;
        self.connection
            .prepare_cached("UPDATE collections SET dimensions = ?2 WHERE id = ?1")?
            .execute((collection, dimensions))?;
        Ok(())
    }

    fn model_number(&self, model: &ModelIdentity) -> Result<i64> {
        self.connection
            .prepare_cached("INSERT OR IGNORE INTO models (id, version, dimensions) VALUES (?1, ?2, ?3)")?
            .execute((&model.id, &model.version, model.dimensions))?;
        Ok(self
            .connection
            .prepare_cached("SELECT number FROM models WHERE id = ?1 AND version = ?2 AND dimensions = ?3")?
            .query_row((&model.id, &model.version, model.dimensions), |row| row.get(0))?)
    }
}

fn indexed(metadata: &str, terms: Vec<u8>) -> Result<Indexed> {
    Ok(Indexed {
        metadata: serde_json::from_str(metadata)?,
        terms,
    })
}

fn vector_bytes(vector: &[f32]) -> Vec<u8> {
    vector.iter().flat_map(|x| x.to_le_bytes()).collect()
}
