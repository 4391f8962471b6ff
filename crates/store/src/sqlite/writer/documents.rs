//! Steps that change documents.

use ragstone_core::analysis::analyze_document;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{ExportedDocument, Selection};
use ragstone_core::{CollectionName, DocumentId};
use rusqlite::{OptionalExtension, params};

use super::transaction::{Change, Transaction};
use crate::error::{Error, Result};
use crate::sqlite::index::Indexed;
use crate::sqlite::index::budget::WorkBudget;
use crate::sqlite::schema::vector_table;
use crate::sqlite::terms::encode;

/// Documents, prepared as far as possible before they reach the writer.
pub(crate) struct PreparedBatch {
    documents: Vec<PreparedDocument>,
    /// The distinct models of the vectors.
    models: Vec<ModelIdentity>,
    dimensions: usize,
    pub(crate) bytes: usize,
}

struct PreparedDocument {
    id: DocumentId,
    text: String,
    metadata_json: String,
    /// The index of the vector's model in the batch.
    model: Option<usize>,
    norm: f32,
    /// Of length one.
    vector: Vec<f32>,
    indexed: Indexed,
}

/// Analyses the texts. Takes time, but no lock.
pub(crate) fn prepare(name: &CollectionName, batch: Vec<ExportedDocument>) -> Result<PreparedBatch> {
    let dimensions = batch.first().map_or(0, |first| first.vector.len());
    let mut bytes = 0;
    let mut models: Vec<ModelIdentity> = Vec::new();
    let mut documents = Vec::with_capacity(batch.len());
    for exported in batch {
        if exported.vector.len() != dimensions {
            return Err(Error::DimensionMismatch {
                collection: name.clone(),
                expected: dimensions,
                actual: exported.vector.len(),
            });
        }
        let model = exported.model.map(|model| {
            let known = models.iter().position(|known| *known == model);
            known.unwrap_or_else(|| {
                models.push(model);
                models.len() - 1
            })
        });
        let document = exported.document;
        let metadata_json = serde_json::to_string(&document.metadata)?;
        let terms = encode(&analyze_document(&document.text));
        bytes += document.text.len() + 4 * metadata_json.len() + 2 * terms.len() + 4 * dimensions + 256;
        documents.push(PreparedDocument {
            id: document.id,
            text: document.text,
            metadata_json,
            model,
            norm: exported.norm,
            vector: exported.vector,
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
        let connection = self.connection;
        let mut old_row = connection.prepare_cached(
            "SELECT rowid, metadata, terms FROM documents WHERE collection = ?1 AND id = ?2",
        )?;
        let mut insert = connection.prepare_cached(
            "INSERT INTO documents (collection, id, model, norm, metadata, terms, text)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
        )?;
        let mut update = connection.prepare_cached(
            "UPDATE documents SET model = ?2, norm = ?3, metadata = ?4, terms = ?5, text = ?6 WHERE rowid = ?1",
        )?;
        let mut insert_vector = connection.prepare_cached(&format!(
            "INSERT INTO {vectors} (rowid, embedding) VALUES (?1, ?2)"
        ))?;
        // Written in place: a deleted vector would leave its space unused.
        let mut update_vector =
            connection.prepare_cached(&format!("UPDATE {vectors} SET embedding = ?2 WHERE rowid = ?1"))?;
        for document in batch.documents {
            let mut old = old_row
                .query_row((row.id, document.id.as_str()), |row| {
                    Ok((row.get(0)?, row.get::<_, String>(1)?, row.get(2)?))
                })
                .optional()?;
            if let Some((rowid, ..)) = old
                && self.snapshot(row.id)?.slot(rowid).is_none()
            {
                // It was deleted, and its row not yet removed.
                self.purge_document(row.id, rowid)?;
                old = None;
            }
            let model = document.model.and_then(|model| models.get(model));
            let (norm, metadata, terms, text) = (
                document.norm,
                &document.metadata_json,
                &document.indexed.terms,
                &document.text,
            );
            let vector_bytes = vector_bytes(&document.vector);
            let change = if let Some((rowid, old_metadata, old_terms)) = old {
                update.execute(params![rowid, model, norm, metadata, terms, text])?;
                update_vector.execute(params![rowid, vector_bytes])?;
                Change::Replace {
                    rowid,
                    vector: document.vector,
                    old: indexed(&old_metadata, old_terms)?,
                    new: document.indexed,
                }
            } else {
                insert.execute(params![
                    row.id,
                    document.id.as_str(),
                    model,
                    norm,
                    metadata,
                    terms,
                    text
                ])?;
                let rowid = connection.last_insert_rowid();
                insert_vector.execute(params![rowid, vector_bytes])?;
                Change::Insert {
                    rowid,
                    vector: document.vector,
                    indexed: document.indexed,
                }
            };
            self.change(row.id, change);
        }
        Ok(())
    }

    /// Deletes the selected documents and returns how many there were. The rows of up to `immediate`
    /// documents are removed at once.
    pub(crate) fn delete_documents(
        &mut self,
        name: &CollectionName,
        selection: Selection,
        immediate: usize,
    ) -> Result<u64> {
        let row = self.require(name)?;
        let rowids = self.selected(row.id, selection)?;
        let count = rowids.len() as u64;
        if count == 0 {
            return Ok(0);
        }
        if count == self.snapshot(row.id)?.count() {
            return self.empty(name);
        }
        if rowids.len() > immediate {
            self.mark_deleted(row.id, &rowids)?;
            self.change(row.id, Change::RemoveMany { rowids });
            return Ok(count);
        }
        let connection = self.connection;
        let mut delete =
            connection.prepare_cached("DELETE FROM documents WHERE rowid = ?1 RETURNING metadata, terms")?;
        let mut delete_vector =
            connection.prepare_cached(&format!("DELETE FROM {} WHERE rowid = ?1", vector_table(row.id)))?;
        for rowid in rowids {
            let (metadata, terms) =
                delete.query_row([rowid], |row| Ok((row.get::<_, String>(0)?, row.get(1)?)))?;
            delete_vector.execute([rowid])?;
            let old = indexed(&metadata, terms)?;
            self.change(row.id, Change::Remove { rowid, old });
        }
        Ok(count)
    }

    /// The rows of the selected documents that exist, each once and ascending.
    fn selected(&mut self, collection: i64, selection: Selection) -> Result<Vec<i64>> {
        let connection = self.connection;
        let snapshot = self.snapshot(collection)?;
        match selection {
            Selection::Ids(mut ids) => {
                let mut find = connection
                    .prepare_cached("SELECT rowid FROM documents WHERE collection = ?1 AND id = ?2")?;
                // In the order of the index.
                ids.sort_unstable();
                ids.dedup();
                let mut rowids = Vec::with_capacity(ids.len());
                for id in ids {
                    let rowid = find.query_row((collection, id.as_str()), |row| row.get::<_, i64>(0));
                    rowids.extend(rowid.optional()?.filter(|rowid| snapshot.slot(*rowid).is_some()));
                }
                rowids.sort_unstable();
                Ok(rowids)
            }
            Selection::Matching(filter) => {
                let slots = snapshot.matching(&filter, &WorkBudget::uncancelled())?;
                Ok(slots.iter().filter_map(|slot| snapshot.rowid(slot)).collect())
            }
        }
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
