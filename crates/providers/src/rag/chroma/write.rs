//! Adding and deleting documents.

use std::collections::HashMap;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ragstone_core::document::NewDocument;
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{EmbedInput, Role};
use ragstone_core::provider::ProviderError;
use ragstone_core::storage::{Selection, StorageError};
use ragstone_core::vector::normalise;
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::Chroma;
use super::api::{COSINE, CollectionRecord};
use super::codec;

/// Chroma refuses bodies of more than 40 MB; a batch stays well below that.
const BATCH_BYTES: usize = 16 << 20;
/// So many documents that are there already go into one request. Chroma mends its graph around each
/// of them and answers no query meanwhile: 5,461 of 384 numbers took it 67 s, 500 of them 4 s.
const REPLACED_AT_ONCE: usize = 500;

/// A document as it is sent.
pub(super) struct Row {
    pub(super) document: Document,
    pub(super) vector: Vec<f32>,
    /// Goes beside the metadata, under keys of our own.
    pub(super) kept: Metadata,
}

/// Documents that can be stored as they are.
pub(super) struct Prepared {
    pub(super) record: CollectionRecord,
    pub(super) rows: Vec<Row>,
    /// Those that the model read only the beginning of.
    pub(super) truncated: Vec<DocumentId>,
}

impl Chroma {
    /// Everything about an add that writes nothing.
    pub(super) async fn prepare(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Prepared, ProviderError> {
        if documents.is_empty() {
            return Err(InvalidInput::new("Documents array is required").into());
        }
        let record = self.api.collection(name).await?;
        let (documents, given): (Vec<Document>, Vec<Option<Vec<f32>>>) = documents
            .into_iter()
            .map(|new| (new.document, new.embedding))
            .unzip();
        let with_vector = given.iter().filter(|vector| vector.is_some()).count();
        let (mut vectors, truncated) = if with_vector == 0 {
            self.embed(&record, &documents).await?
        } else {
            let total = documents.len();
            if let Some(index) = given.iter().position(Option::is_none) {
                return Err(InvalidInput::new(format!(
                    "All documents must include pre-computed embeddings, or none of them: {with_vector} of {total} \
                     have one, the document at index {index} has not"
                ))
                .into());
            }
            (given.into_iter().flatten().collect(), Vec::new())
        };
        check_widths(&record, &vectors)?;
        if record.space == COSINE {
            // Chroma loses the direction of very large and very small numbers. Where other distances
            // count, the length is part of what is kept.
            for vector in &mut vectors {
                normalise(vector);
            }
        }
        let rows = documents
            .into_iter()
            .zip(vectors)
            .map(|(document, vector)| Row {
                document,
                vector,
                kept: Metadata::new(),
            })
            .collect();
        Ok(Prepared {
            record,
            rows,
            truncated,
        })
    }

    /// The vectors, and which documents the model read only the beginning of.
    async fn embed(
        &self,
        record: &CollectionRecord,
        documents: &[Document],
    ) -> Result<(Vec<Vec<f32>>, Vec<DocumentId>), ProviderError> {
        let texts: Vec<EmbedInput> = documents.iter().map(|d| d.text.clone().into()).collect();
        let embedded = self
            .embedder(record, Role::Passage)?
            .embed(texts, Role::Passage)
            .await?;
        let truncated = documents.iter().zip(&embedded);
        let truncated = truncated
            .filter(|(_, embedding)| embedding.truncated)
            .map(|(document, _)| document.id.clone())
            .collect();
        let vectors = embedded.into_iter().map(|embedding| embedding.vector).collect();
        Ok((vectors, truncated))
    }

    /// Sends documents in as few requests as Chroma takes them in. Each request is stored whole or
    /// not at all. `patience` is what each may take, where that is more than other calls have.
    pub(super) async fn store(
        &self,
        record: &CollectionRecord,
        rows: &[Row],
        patience: Option<Duration>,
    ) -> Result<(), ProviderError> {
        let limits = self.api.pre_flight().await?;
        let mut stored = 0;
        let mut at_most = limits.max_batch_size;
        while stored < rows.len() {
            let batch = &rows[stored..];
            let batch = &batch[..batch_length(batch, at_most)];
            let old = self.metadata_there(record, batch).await?;
            let piece = &batch[..piece_length(batch, |id| old.contains_key(id))];
            // Where some are replaced more are likely to follow, which need not be read to be left out.
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
            if let Err(error) = self.api.upsert(record, &request, patience).await {
                if stored > 0 {
                    tracing::warn!(
                        service = self.api.service(), collection = %record.described.name, stored,
                        total = rows.len(), "only the first documents of a large add were stored"
                    );
                }
                return Err(error);
            }
            stored += piece.len();
        }
        Ok(())
    }

    /// The metadata of those documents that are there already.
    async fn metadata_there(
        &self,
        record: &CollectionRecord,
        batch: &[Row],
    ) -> Result<HashMap<String, Metadata>, ProviderError> {
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
    ) -> Result<u64, ProviderError> {
        let record = self.api.collection(name).await?;
        let ids = match selection {
            Selection::Matching(filter) if filter.is_everything() => {
                return self.api.delete_all(&record).await;
            }
            Selection::Matching(filter) => self.matching_ids(&record, &filter).await?,
            // Chroma counts ids that are not there; ours must not.
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
    ) -> Result<Vec<String>, ProviderError> {
        let mut ids = Vec::new();
        self.each_match(record, filter, |id| ids.push(id)).await?;
        Ok(ids)
    }

    async fn existing_ids(
        &self,
        record: &CollectionRecord,
        ids: &[String],
    ) -> Result<Vec<String>, ProviderError> {
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

pub(super) fn check_width(
    name: &CollectionName,
    expected: usize,
    actual: usize,
) -> Result<(), ProviderError> {
    if expected == actual {
        return Ok(());
    }
    let mismatch = StorageError::DimensionMismatch {
        collection: name.clone(),
        expected,
        actual,
    };
    Err(InvalidInput::new(mismatch.to_string()).into())
}

/// That all vectors are as wide as those that are there, or else as the first.
fn check_widths(record: &CollectionRecord, vectors: &[Vec<f32>]) -> Result<(), ProviderError> {
    let stored = record.described.dimensions;
    let Some(width) = stored.or_else(|| vectors.first().map(Vec::len)) else {
        return Ok(());
    };
    let Some((index, other)) = vectors
        .iter()
        .enumerate()
        .find(|(_, vector)| vector.len() != width)
    else {
        return Ok(());
    };
    let whose = match stored {
        Some(_) => format!("collection '{}' has", record.described.name),
        None => "the documents before it have".to_owned(),
    };
    Err(InvalidInput::new(format!(
        "Embedding dimension mismatch: the document at index {index} has {} dimensions, {whose} {width}",
        other.len()
    ))
    .into())
}

/// Chroma merges the metadata of a document that is there already. To replace it, the keys that are
/// to go are set to null.
fn replacing_metadata(row: &Row, old: &HashMap<String, Metadata>) -> Metadata {
    let mut new = codec::encode(&row.document.metadata);
    new.extend(row.kept.clone());
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

/// How many documents of a batch go into one request, so that not too many of them are replaced.
fn piece_length(batch: &[Row], is_there: impl Fn(&str) -> bool) -> usize {
    let mut replaced = 0;
    batch
        .iter()
        .take_while(|row| {
            replaced += usize::from(is_there(row.document.id.as_str()));
            replaced <= REPLACED_AT_ONCE
        })
        .count()
}

/// How many of the next documents go into one request; at least one.
fn batch_length(rows: &[Row], max_batch_size: usize) -> usize {
    let mut bytes = 0;
    let fits = rows
        .iter()
        .take(max_batch_size)
        .take_while(|Row { document, vector, .. }| {
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
    fn batches_keep_to_the_servers_count_and_to_a_size() {
        let document = |length: usize| Row {
            document: Document {
                id: DocumentId::generate(),
                text: "x".repeat(length),
                metadata: Metadata::new(),
            },
            vector: vec![1.0; 3],
            kept: Metadata::new(),
        };
        let small: Vec<Row> = (0..10).map(|_| document(1)).collect();
        assert_eq!(batch_length(&small, 4), 4);
        assert_eq!(batch_length(&small, 100), 10);
        let large: Vec<Row> = (0..3).map(|_| document(9 << 20)).collect();
        assert_eq!(batch_length(&large, 100), 1);
        let huge = [document(BATCH_BYTES * 2)];
        assert_eq!(batch_length(&huge, 100), 1);
    }

    #[test]
    fn one_request_replaces_only_so_many_and_adds_any_number() {
        let rows: Vec<Row> = (0..4 * REPLACED_AT_ONCE)
            .map(|n| Row {
                document: Document {
                    id: DocumentId::parse(n.to_string()).unwrap(),
                    text: "t".into(),
                    metadata: Metadata::new(),
                },
                vector: vec![1.0; 3],
                kept: Metadata::new(),
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
