//! ChromaRanking by vector, under any filter.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use ragstone_core::storage::StorageError;
use ragstone_core::vector::normalise;
use ragstone_core::{Document, DocumentId, Filter};
use serde_json::{Value, json};

use super::ChromaStorage;
use super::api::{COSINE, ChromaHits, ChromaRecords, CollectionRecord};
use super::narrow::{Narrowed, narrow};

/// Limit of ids in one query.
const IDS_PER_QUERY: usize = 10_000;
/// Limit of documents that Chroma's index missed and that are compared here instead.
const MAX_MISSED: usize = 5_000;
const VECTORS_PER_PAGE: usize = 500;
/// Delays in milliseconds before a search that lost a race with a writer is retried.
const RACE_DELAYS: [u64; 5] = [0, 10, 30, 100, 300];

/// A document and its cosine distance from the query.
pub(super) struct ChromaHit {
    pub(super) document: Document,
    pub(super) distance: f32,
}

/// The result of one query to Chroma.
struct ChromaRanking {
    neighbours: Vec<ChromaHit>,
    /// How many Chroma returned, unusable ones included.
    returned: usize,
}

impl ChromaStorage {
    /// Repeats a search until no writer interferes. Chroma finds ids first and reads their documents later,
    /// and fails when one is deleted in between. It also fails while a collection receives its first
    /// documents, and for good if their writer died.
    pub(super) async fn retry_races<T, Answer>(
        &self,
        record: &CollectionRecord,
        search: impl Fn() -> Answer,
    ) -> Result<T, StorageError>
    where
        T: Default,
        Answer: Future<Output = Result<T, StorageError>>,
    {
        for delay in RACE_DELAYS {
            match search().await {
                Err(error) if lost_a_race(&error) => {
                    if self.api.count(record).await? == 0 {
                        return Ok(T::default());
                    }
                    tokio::time::sleep(Duration::from_millis(delay)).await;
                }
                outcome => return outcome,
            }
        }
        search().await
    }

    /// The nearest of the matching documents, or of those among `ids`.
    pub(super) async fn nearest(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        filter: &Filter,
        ids: Option<&[DocumentId]>,
        top_k: usize,
    ) -> Result<Vec<ChromaHit>, StorageError> {
        let Some(ids) = ids else {
            return self.nearest_matching(record, vector, filter, top_k).await;
        };
        let ids: Vec<String> = ids.iter().map(|id| id.as_str().to_owned()).collect();
        let mut documents = self.fetch(record, &ids).await?;
        documents.retain(|document| filter.matches(&document.metadata));
        let matching: Vec<String> = documents.into_iter().map(|d| d.id.into_string()).collect();
        let mut nearest = self.nearest_among(record, vector, &matching, top_k).await?;
        nearest.truncate(top_k);
        Ok(nearest)
    }

    /// The nearest of the matching documents. Chroma ranks the candidates. If too few of those it returns
    /// match, and it had more, then the matching ids are collected first and ranked.
    async fn nearest_matching(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        filter: &Filter,
        top_k: usize,
    ) -> Result<Vec<ChromaHit>, StorageError> {
        let mut request =
            json!({"query_embeddings": [vector], "include": ["documents", "metadatas", "distances"]});
        match narrow(filter) {
            _ if top_k == 0 => return Ok(Vec::new()),
            Narrowed::Nothing => return Ok(Vec::new()),
            Narrowed::Everything => {}
            Narrowed::Where(condition) => request["where"] = condition,
        }
        let requested = if filter.is_everything() {
            top_k
        } else {
            top_k * 2 + 10
        };
        request["n_results"] = requested.into();
        let ChromaRanking {
            neighbours: mut found,
            returned,
        } = self.query(record, &request).await?;
        let exhausted = returned < requested;
        found.retain(|candidate| filter.matches(&candidate.document.metadata));
        if found.len() < top_k && !exhausted {
            let ids = self.matching_ids(record, filter).await?;
            found = self.nearest_among(record, vector, &ids, top_k).await?;
        } else if found.len() < top_k && !self.are_all(record, &found).await? {
            let ids = self.matching_ids(record, filter).await?;
            found = self.with_missed(record, vector, &ids, found, top_k).await?;
        }
        found.truncate(top_k);
        Ok(found)
    }

    /// Whether these are all documents of the collection.
    async fn are_all(&self, record: &CollectionRecord, found: &[ChromaHit]) -> Result<bool, StorageError> {
        Ok(self.api.count(record).await? <= found.len() as u64)
    }

    /// The nearest of these ids, all of which must exist.
    async fn nearest_among(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        ids: &[String],
        top_k: usize,
    ) -> Result<Vec<ChromaHit>, StorageError> {
        let mut found = Vec::new();
        for ids in ids.chunks(IDS_PER_QUERY) {
            let request = json!({
                "query_embeddings": [vector], "ids": ids, "n_results": top_k,
                "include": ["documents", "metadatas", "distances"],
            });
            found.extend(self.query(record, &request).await?.neighbours);
        }
        found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
        self.with_missed(record, vector, ids, found, top_k).await
    }

    /// Parts of Chroma's graph may be unreachable after many documents were replaced or deleted. Where it
    /// returned fewer of these ids than exist and are wanted, the others are compared here.
    async fn with_missed(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        ids: &[String],
        mut found: Vec<ChromaHit>,
        top_k: usize,
    ) -> Result<Vec<ChromaHit>, StorageError> {
        if found.len() >= top_k.min(ids.len()) {
            return Ok(found);
        }
        let known: HashSet<&str> = found.iter().map(|hit| hit.document.id.as_str()).collect();
        let missed = ids.iter().map(String::as_str).filter(|id| !known.contains(id));
        let missed: Vec<&str> = missed.collect();
        if missed.len() > MAX_MISSED {
            tracing::warn!(
                service = self.api.service(), collection = %record.described.name, found = found.len(),
                missed = missed.len(), "ChromaDB finds too few of its documents"
            );
            return Ok(found);
        }
        let compared = self.compare(record, vector, &missed).await?;
        found.extend(compared);
        found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
        Ok(found)
    }

    /// Computes the distances of those of these documents that exist, without Chroma's index.
    pub(super) async fn compare(
        &self,
        record: &CollectionRecord,
        vector: &[f32],
        ids: &[&str],
    ) -> Result<Vec<ChromaHit>, StorageError> {
        let mut query = vector.to_vec();
        normalise(&mut query);
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(VECTORS_PER_PAGE) {
            let request = json!({"ids": ids, "include": ["documents", "metadatas", "embeddings"]});
            found.extend(self.distances(&query, self.api.get(record, &request).await?)?);
        }
        Ok(found)
    }

    /// The distances of documents from a query of length one.
    fn distances(&self, query: &[f32], records: ChromaRecords) -> Result<Vec<ChromaHit>, StorageError> {
        let count = records.ids.len();
        let vectors = records.embeddings.unwrap_or_default();
        let texts = records.documents.unwrap_or_else(|| vec![None; count]);
        let metadatas = records.metadatas.unwrap_or_else(|| vec![None; count]);
        if vectors.len() != count {
            return Err(self.api.bad_answer("documents lack their vectors"));
        }
        let mut found = Vec::with_capacity(count);
        let rows = records.ids.into_iter().zip(texts);
        for ((id, text), (metadata, vector)) in rows.zip(metadatas.into_iter().zip(vectors)) {
            let mut vector = vector.ok_or_else(|| self.api.bad_answer("a document lacks its vector"))?;
            normalise(&mut vector);
            let cosine: f32 = query.iter().zip(&vector).map(|(a, b)| a * b).sum();
            if let Some(document) = self.usable_document(id, text, metadata) {
                found.push(ChromaHit {
                    document,
                    distance: (1.0 - cosine).clamp(0.0, 2.0),
                });
            }
        }
        Ok(found)
    }

    async fn query(&self, record: &CollectionRecord, request: &Value) -> Result<ChromaRanking, StorageError> {
        let ChromaHits {
            ids,
            metadatas,
            documents,
            distances,
        } = self.api.query(record, request).await?;
        let ids = ids.into_iter().next().unwrap_or_default();
        let count = ids.len();
        let first = |column: Option<Vec<Vec<Option<f32>>>>| column.and_then(|c| c.into_iter().next());
        let distances = first(distances).unwrap_or_default();
        let texts = documents.and_then(|c| c.into_iter().next()).unwrap_or_default();
        let metadatas = metadatas.and_then(|c| c.into_iter().next()).unwrap_or_default();
        if [distances.len(), texts.len(), metadatas.len()] != [count; 3] {
            return Err(self.api.bad_answer("its columns have different lengths"));
        }
        let is_bare = |n: &usize| texts[*n].is_none() && metadatas[*n].is_none();
        let bare: Vec<String> = (0..count).filter(is_bare).map(|n| ids[n].clone()).collect();
        let mut found = Vec::with_capacity(count);
        for (((id, text), metadata), distance) in ids.into_iter().zip(texts).zip(metadatas).zip(distances) {
            // Rounding may yield a distance just below zero.
            let distance = distance
                .filter(|d| d.is_finite())
                .ok_or_else(|| self.api.bad_answer("a hit lacks its distance"))?
                .clamp(0.0, 2.0);
            if let Some(document) = self.usable_document(id, text, metadata) {
                found.push(ChromaHit { document, distance });
            }
        }
        if !bare.is_empty() {
            self.complete_bare_hits(record, &bare, &mut found).await?;
        }
        Ok(ChromaRanking {
            neighbours: found,
            returned: count,
        })
    }

    /// Reads hits without text and metadata again: most of them are being deleted, a few were written so by
    /// other clients.
    async fn complete_bare_hits(
        &self,
        record: &CollectionRecord,
        bare: &[String],
        found: &mut Vec<ChromaHit>,
    ) -> Result<(), StorageError> {
        let existing = self.fetch(record, bare).await?;
        let mut existing: HashMap<String, Document> = existing
            .into_iter()
            .map(|document| (document.id.as_str().to_owned(), document))
            .collect();
        let bare: HashSet<&str> = bare.iter().map(String::as_str).collect();
        found.retain_mut(|hit| {
            let id = hit.document.id.as_str();
            if !bare.contains(id) {
                return true;
            }
            existing.remove(id).is_some_and(|document| {
                hit.document = document;
                true
            })
        });
        Ok(())
    }
}

fn lost_a_race(error: &StorageError) -> bool {
    matches!(error, StorageError::Call(error) if error.status() == Some(500))
}

pub(super) fn check_space(record: &CollectionRecord) -> Result<(), StorageError> {
    if record.space == COSINE {
        return Ok(());
    }
    Err(StorageError::Unsupported(format!(
        "Collection '{}' uses the distance '{}': to be searched by vector here it must be created with 'cosine'",
        record.described.name, record.space
    )))
}
