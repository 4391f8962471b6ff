//! Adding and deleting documents.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{EmbedInput, Role};
use ragstone_core::provider::ProviderError;
use ragstone_core::store::{Selection, StoreError};
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::Chroma;
use super::api::CollectionRecord;
use super::codec;

/// Chroma refuses bodies of more than 40 MB; a batch stays well below that.
const BATCH_BYTES: usize = 16 << 20;

/// A document as it is sent.
pub(super) struct Row {
    pub(super) document: Document,
    pub(super) vector: Vec<f32>,
    /// Goes beside the metadata, under keys of our own.
    pub(super) kept: Metadata,
}

impl Chroma {
    pub(super) async fn add(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, ProviderError> {
        if documents.is_empty() {
            return Err(InvalidInput::new("Documents array is required").into());
        }
        let record = self.api.collection(name).await?;
        let (documents, given): (Vec<Document>, Vec<Option<Vec<f32>>>) = documents
            .into_iter()
            .map(|new| (new.document, new.embedding))
            .unzip();
        let (vectors, truncated) = match given.iter().filter(|vector| vector.is_some()).count() {
            0 => self.embed(&record, &documents).await?,
            some if some == documents.len() => (given.into_iter().flatten().collect(), Vec::new()),
            _ => {
                return Err(InvalidInput::new(
                    "All documents must include pre-computed embeddings, or none of them",
                )
                .into());
            }
        };
        let width = record.described.dimensions.unwrap_or(vectors[0].len());
        for vector in &vectors {
            check_width(name, width, vector.len())?;
        }
        let rows: Vec<Row> = documents
            .into_iter()
            .zip(vectors)
            .map(|(document, vector)| Row {
                document,
                vector,
                kept: Metadata::new(),
            })
            .collect();
        self.store(&record, &rows).await?;
        Ok(Added {
            ids: rows.into_iter().map(|row| row.document.id).collect(),
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
    /// not at all.
    pub(super) async fn store(&self, record: &CollectionRecord, rows: &[Row]) -> Result<(), ProviderError> {
        let limits = self.api.pre_flight().await?;
        let mut stored = 0;
        while stored < rows.len() {
            let end = stored + batch_length(&rows[stored..], limits.max_batch_size);
            let batch = &rows[stored..end];
            let metadatas = self.replacing_metadata(record, batch).await?;
            let embeddings: Value = if limits.supports_base64_encoding {
                batch
                    .iter()
                    .map(|row| Value::String(base64(&row.vector)))
                    .collect()
            } else {
                batch.iter().map(|row| json!(row.vector)).collect()
            };
            let request = json!({
                "ids": batch.iter().map(|row| row.document.id.as_str()).collect::<Vec<_>>(),
                "documents": batch.iter().map(|row| row.document.text.as_str()).collect::<Vec<_>>(),
                "metadatas": metadatas,
                "embeddings": embeddings,
            });
            if let Err(error) = self.api.upsert(record, &request).await {
                if stored > 0 {
                    tracing::warn!(
                        service = self.api.service(), collection = %record.described.name, stored,
                        total = rows.len(), "only the first documents of a large add were stored"
                    );
                }
                return Err(error);
            }
            stored = end;
        }
        Ok(())
    }

    /// Chroma merges the metadata of a document that is there already. To replace it, the keys that
    /// are to go are set to null.
    async fn replacing_metadata(
        &self,
        record: &CollectionRecord,
        batch: &[Row],
    ) -> Result<Vec<Metadata>, ProviderError> {
        let ids: Vec<&str> = batch.iter().map(|row| row.document.id.as_str()).collect();
        let there = self
            .api
            .get(record, &json!({"ids": ids, "include": ["metadatas"]}))
            .await?;
        let metadatas = there.metadatas.unwrap_or_default();
        let old: HashMap<String, Metadata> = there
            .ids
            .into_iter()
            .zip(metadatas.into_iter().map(Option::unwrap_or_default))
            .collect();
        Ok(batch
            .iter()
            .map(|Row { document, kept, .. }| {
                let mut new = codec::encode(&document.metadata);
                new.extend(kept.clone());
                for key in old.get(document.id.as_str()).into_iter().flat_map(Metadata::keys) {
                    if !new.contains_key(key) {
                        new.insert(key.clone(), Value::Null);
                    }
                }
                new
            })
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
    let mismatch = StoreError::DimensionMismatch {
        collection: name.clone(),
        expected,
        actual,
    };
    Err(InvalidInput::new(mismatch.to_string()).into())
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
}
