//! Adding and deleting documents.

use std::collections::HashMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{ExportedDocument, Selection, StorageError};
use ragstone_core::vector::normalise;
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::api::{COSINE, CollectionRecord};
use super::{ChromaStorage, Purpose, codec};

/// Chroma refuses bodies of more than 40 MB; a batch stays well below that.
const BATCH_BYTES: usize = 16 << 20;
/// Limit of replaced documents in one request. Chroma repairs its graph around each of them and answers
/// no query meanwhile: 5,461 of 384 numbers took it 67 s, 500 of them 4 s.
const REPLACED_AT_ONCE: usize = 500;
/// Timeout of a request with documents in the default store: with wide vectors, and beside other work,
/// it may take longer than other requests.
const WRITE_TIMEOUT: Duration = Duration::from_secs(120);

/// A document to be written.
pub(super) struct Incoming {
    pub(super) document: Document,
    pub(super) vector: Vec<f32>,
    /// The original length of the vector, where it has been normalised already.
    pub(super) norm: Option<f32>,
    pub(super) model: Option<ModelIdentity>,
}

impl From<ExportedDocument> for Incoming {
    fn from(exported: ExportedDocument) -> Self {
        Self {
            document: exported.document,
            vector: exported.vector,
            norm: Some(exported.norm),
            model: exported.model,
        }
    }
}

/// A document as it is sent.
struct ChromaRow {
    document: Document,
    vector: Vec<f32>,
    /// Our own keys, beside the metadata.
    reserved: Metadata,
}

impl ChromaRow {
    /// Chroma loses the direction of very long and very short vectors, so those for cosine distance are
    /// sent with length one and their length is stored beside them. Other distances depend on the length.
    fn new(incoming: Incoming, space: &str) -> Self {
        let Incoming {
            document,
            mut vector,
            norm,
            model,
        } = incoming;
        let mut reserved = Metadata::new();
        if space == COSINE {
            let norm = norm.unwrap_or_else(|| normalise(&mut vector));
            reserved.insert(codec::NORM.into(), f64::from(norm).into());
        } else if let Some(norm) = norm {
            vector.iter_mut().for_each(|x| *x *= norm);
        }
        if let Some(model) = model {
            let text = json!([model.id, model.version, model.dimensions]).to_string();
            reserved.insert(codec::MODEL.into(), text.into());
        }
        Self {
            document,
            vector,
            reserved,
        }
    }
}

impl ChromaStorage {
    pub(super) async fn write(
        &self,
        name: &CollectionName,
        documents: Vec<Incoming>,
    ) -> Result<(), StorageError> {
        let _lock = self.lock(&self.document_locks, name).await?;
        let mut record = self.api.collection(name).await?;
        let Some(width) = documents.first().map(|incoming| incoming.vector.len()) else {
            return Ok(());
        };
        let mismatch = |expected, actual| StorageError::DimensionMismatch {
            collection: name.clone(),
            expected,
            actual,
        };
        if let Some(other) = documents.iter().find(|incoming| incoming.vector.len() != width) {
            return Err(mismatch(width, other.vector.len()));
        }
        if let Some(expected) = record.described.dimensions.filter(|expected| *expected != width) {
            if self.purpose == Purpose::Service || self.api.count(&record).await? > 0 {
                return Err(mismatch(expected, width));
            }
            record = self.recreate(&record).await?;
        }
        let space = record.space.clone();
        let rows = tokio::task::spawn_blocking(move || {
            let rows = documents
                .into_iter()
                .map(|incoming| ChromaRow::new(incoming, &space));
            rows.collect::<Vec<_>>()
        });
        let rows = rows
            .await
            .map_err(|error| StorageError::Failed(Box::new(error)))?;
        self.send(&record, &rows).await
    }

    /// Chroma keeps the width of an emptied collection, so a collection for vectors of another width has
    /// to be recreated.
    async fn recreate(&self, record: &CollectionRecord) -> Result<CollectionRecord, StorageError> {
        let name = &record.described.name;
        let _lock = self.lock(&self.metadata_locks, name).await?;
        let Collection { metadata, .. } = self.api.collection(name).await?.described;
        self.api.delete_collection(name).await?;
        self.api.create_collection(name, &metadata).await
    }

    /// Sends documents in as few requests as Chroma accepts. Each request is stored whole or not at all.
    async fn send(&self, record: &CollectionRecord, rows: &[ChromaRow]) -> Result<(), StorageError> {
        let timeout = (self.purpose == Purpose::DefaultStore).then_some(WRITE_TIMEOUT);
        let limits = self.api.pre_flight().await?;
        let mut stored = 0;
        let mut at_most = limits.max_batch_size;
        while stored < rows.len() {
            let batch = &rows[stored..];
            let batch = &batch[..batch_length(batch, at_most)];
            let old = self.existing_metadata(record, batch).await?;
            let piece = &batch[..piece_length(batch, |id| old.contains_key(id))];
            // More replacements are likely to follow, so the next batch is read no further than it can be sent.
            at_most = if piece.len() < batch.len() {
                REPLACED_AT_ONCE.min(limits.max_batch_size)
            } else {
                limits.max_batch_size
            };
            let embeddings: Value = if limits.supports_base64_encoding {
                piece
                    .iter()
                    .map(|row| Value::String(base64(&row.vector)))
                    .collect()
            } else {
                piece.iter().map(|row| json!(row.vector)).collect()
            };
            let request = json!({
                "ids": piece.iter().map(|row| row.document.id.as_str()).collect::<Vec<_>>(),
                "documents": piece.iter().map(|row| row.document.text.as_str()).collect::<Vec<_>>(),
                "metadatas": piece.iter().map(|row| replacing_metadata(row, &old)).collect::<Vec<_>>(),
                "embeddings": embeddings,
            });
            if let Err(error) = self.api.upsert(record, &request, timeout).await {
                if stored > 0 {
                    tracing::warn!(
                        service = self.api.service(), collection = %record.described.name, stored,
                        total = rows.len(), "a large write failed after its first documents were stored"
                    );
                }
                return Err(error);
            }
            stored += piece.len();
        }
        Ok(())
    }

    /// The metadata of the documents that exist already.
    async fn existing_metadata(
        &self,
        record: &CollectionRecord,
        batch: &[ChromaRow],
    ) -> Result<HashMap<String, Metadata>, StorageError> {
        let ids: Vec<&str> = batch.iter().map(|row| row.document.id.as_str()).collect();
        let there = self
            .api
            .get(record, &json!({"ids": ids, "include": ["metadatas"]}))
            .await?;
        let metadatas = there.metadatas.unwrap_or_default();
        Ok(there
            .ids
            .into_iter()
            .zip(metadatas.into_iter().map(Option::unwrap_or_default))
            .collect())
    }

    pub(super) async fn delete(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError> {
        let record = self.api.collection(name).await?;
        let ids = match selection {
            Selection::Matching(filter) if filter.is_everything() => {
                return self.api.delete_all(&record).await;
            }
            Selection::Matching(filter) => self.matching_ids(&record, &filter).await?,
            // Chroma also counts missing ids.
            Selection::Ids(ids) => {
                let ids: Vec<String> = ids.into_iter().map(DocumentId::into_string).collect();
                self.existing_ids(&record, &ids).await?
            }
        };
        let batch = self.api.pre_flight().await?.max_batch_size.max(1);
        for ids in ids.chunks(batch) {
            self.api.delete_ids(&record, ids).await?;
        }
        Ok(ids.len() as u64)
    }

    pub(super) async fn matching_ids(
        &self,
        record: &CollectionRecord,
        filter: &Filter,
    ) -> Result<Vec<String>, StorageError> {
        let mut ids = Vec::new();
        self.each_match(record, filter, |id| ids.push(id)).await?;
        Ok(ids)
    }

    async fn existing_ids(
        &self,
        record: &CollectionRecord,
        ids: &[String],
    ) -> Result<Vec<String>, StorageError> {
        let batch = self.api.pre_flight().await?.max_batch_size.max(1);
        let mut existing = Vec::new();
        for ids in ids.chunks(batch) {
            let found = self.api.get(record, &json!({"ids": ids, "include": []})).await?;
            existing.extend(found.ids);
        }
        existing.sort_unstable();
        existing.dedup();
        Ok(existing)
    }
}

/// The metadata that replaces that of a document. Chroma merges metadata, so keys that are to go are set
/// to null.
fn replacing_metadata(row: &ChromaRow, old: &HashMap<String, Metadata>) -> Metadata {
    let mut new = codec::encode(&row.document.metadata);
    new.extend(row.reserved.clone());
    for key in old
        .get(row.document.id.as_str())
        .into_iter()
        .flat_map(Metadata::keys)
    {
        if !new.contains_key(key) {
            new.insert(key.clone(), Value::Null);
        }
    }
    new
}

/// How many documents of a batch go into one request: up to [`REPLACED_AT_ONCE`] existing ones.
fn piece_length(batch: &[ChromaRow], exists: impl Fn(&str) -> bool) -> usize {
    let mut replaced = 0;
    batch
        .iter()
        .take_while(|row| {
            replaced += usize::from(exists(row.document.id.as_str()));
            replaced <= REPLACED_AT_ONCE
        })
        .count()
}

/// How many of the next documents go into one request; at least one.
fn batch_length(rows: &[ChromaRow], max_batch_size: usize) -> usize {
    let mut bytes = 0;
    let fits = rows
        .iter()
        .take(max_batch_size)
        .take_while(|ChromaRow { document, vector, .. }| {
            let metadata: usize = document
                .metadata
                .iter()
                .map(|(k, v)| k.len() + v.to_string().len())
                .sum();
            bytes += document.text.len() + metadata + vector.len() * 12;
            bytes <= BATCH_BYTES
        })
        .count();
    fits.max(1)
}

fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_respect_the_servers_limit_and_a_size() {
        let document = |length: usize| ChromaRow {
            document: Document {
                id: DocumentId::generate(),
                text: "x".repeat(length),
                metadata: Metadata::new(),
            },
            vector: vec![1.0; 3],
            reserved: Metadata::new(),
        };
        let small: Vec<ChromaRow> = (0..10).map(|_| document(1)).collect();
        assert_eq!(batch_length(&small, 4), 4);
        assert_eq!(batch_length(&small, 100), 10);
        let large: Vec<ChromaRow> = (0..3).map(|_| document(9 << 20)).collect();
        assert_eq!(batch_length(&large, 100), 1);
        let huge = [document(BATCH_BYTES * 2)];
        assert_eq!(batch_length(&huge, 100), 1);
    }

    #[test]
    fn one_request_replaces_a_limited_number_and_adds_any_number() {
        let rows: Vec<ChromaRow> = (0..4 * REPLACED_AT_ONCE)
            .map(|n| ChromaRow {
                document: Document {
                    id: DocumentId::parse(n.to_string()).unwrap(),
                    text: "t".into(),
                    metadata: Metadata::new(),
                },
                vector: vec![1.0; 3],
                reserved: Metadata::new(),
            })
            .collect();
        assert_eq!(piece_length(&rows, |_| false), rows.len());
        assert_eq!(piece_length(&rows, |_| true), REPLACED_AT_ONCE);
        let even = |id: &str| id.parse::<usize>().unwrap().is_multiple_of(2);
        assert_eq!(piece_length(&rows, even), 2 * REPLACED_AT_ONCE);
        assert_eq!(
            piece_length(&rows[..REPLACED_AT_ONCE], |_| true),
            REPLACED_AT_ONCE
        );
    }
}
