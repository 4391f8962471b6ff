//! Dense, keyword and hybrid search.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use futures::future::try_join_all;
use ragstone_core::filter::{Filter, Scalar};
use ragstone_core::fusion::{HitRanks, Rank, fuse};
use ragstone_core::model::ModelIdentity;
use ragstone_core::search::{SearchHit, StageTime};
use ragstone_core::siblings::{Gathering, in_document_order};
use ragstone_core::storage::{Page, SearchHits, SiblingsRequest, StorageError, StorageQuery};
use ragstone_core::vector::normalise;
use ragstone_core::{CollectionName, Document};

use super::ChromaStorage;
use super::api::CollectionRecord;
use super::dense::{ChromaHit, check_space};

/// How much deeper than the result each ranking goes before the two are fused.
const FUSION_DEPTH: usize = 4;
const FUSION_AT_LEAST: usize = 100;
const SECTION_PAGE: usize = 1_000;
const LARGEST_SECTION: usize = 10_000;

/// Hits of one query, and the time of each stage.
type TimedHits = (Vec<SearchHit>, Vec<StageTime>);

impl ChromaStorage {
    pub(super) async fn find(
        &self,
        name: &CollectionName,
        mut queries: Vec<StorageQuery>,
    ) -> Result<Vec<SearchHits>, StorageError> {
        // Chroma loses the direction of very long and very short vectors.
        let vectors = queries.iter_mut().filter_map(|query| query.vector.as_mut());
        vectors.for_each(|vector| {
            normalise(vector);
        });
        let queries = &queries;
        let (record, (ranked, models)) = self
            .with_collection(name, |record| async move {
                let ranked = try_join_all(queries.iter().map(|query| self.rank(&record, query)));
                let models = self.models_for(&record, queries);
                tokio::try_join!(ranked, models)
            })
            .await?;
        let mut answers = Vec::with_capacity(queries.len());
        for (query, (mut hits, mut timings)) in queries.iter().zip(ranked) {
            let mut siblings_truncated = false;
            if let Some(request) = &query.siblings {
                let start = Instant::now();
                siblings_truncated = self.expand(name, request, &mut hits).await?;
                timings.push(StageTime::new("expand", start.elapsed()));
            }
            answers.push(SearchHits {
                hits,
                metadata: record.described.metadata.clone(),
                models: match query.vector {
                    Some(_) => models.clone(),
                    None => Vec::new(),
                },
                siblings_truncated,
                timings,
            });
        }
        Ok(answers)
    }

    async fn models_for(
        &self,
        record: &CollectionRecord,
        queries: &[StorageQuery],
    ) -> Result<Vec<ModelIdentity>, StorageError> {
        if queries.iter().any(|query| query.vector.is_some()) {
            self.models_at_both_ends(record).await
        } else {
            Ok(Vec::new())
        }
    }

    /// Adds siblings to the hits, and returns whether some were left out. Chroma has no transactions, so
    /// they are read after the hits.
    async fn expand(
        &self,
        name: &CollectionName,
        request: &SiblingsRequest,
        hits: &mut [SearchHit],
    ) -> Result<bool, StorageError> {
        let mut gathering = Gathering::new(&request.expand, request.max_bytes);
        let mut sections: HashMap<Scalar, Vec<Arc<Document>>> = HashMap::new();
        for hit in hits {
            let Some(value) = request.expand.section(&hit.document) else {
                continue;
            };
            if !gathering.cut && !sections.contains_key(&value) {
                let members = self.section(name, &request.expand.filter(value.clone())).await?;
                sections.insert(value.clone(), in_document_order(members));
            }
            let section = sections.get(&value).map(Vec::as_slice).unwrap_or_default();
            hit.siblings = Some(gathering.within(section, &hit.document));
        }
        Ok(gathering.cut)
    }

    /// All documents that share a value, or the first [`LARGEST_SECTION`]: Chroma does not tell the
    /// position of a document among them.
    async fn section(&self, name: &CollectionName, filter: &Filter) -> Result<Vec<Document>, StorageError> {
        let mut members = Vec::new();
        while members.len() < LARGEST_SECTION {
            let page = Page {
                limit: SECTION_PAGE,
                offset: members.len() as u64,
            };
            let found = self.page(name, filter, page).await?.documents;
            let ended = found.len() < SECTION_PAGE;
            members.extend(found);
            if ended {
                break;
            }
        }
        Ok(members)
    }

    async fn rank(&self, record: &CollectionRecord, query: &StorageQuery) -> Result<TimedHits, StorageError> {
        if query.limit == 0 || !self.is_comparable(record, query.vector.as_deref()).await? {
            return Ok(Default::default());
        }
        self.retry_races(record, || self.rank_once(record, query)).await
    }

    async fn rank_once(
        &self,
        record: &CollectionRecord,
        query: &StorageQuery,
    ) -> Result<TimedHits, StorageError> {
        let mut timings = Vec::new();
        let hits = match (&query.vector, &query.text) {
            (Some(vector), None) => self.dense(record, query, vector, &mut timings).await?,
            (None, Some(text)) => self.keyword(record, query, text, &mut timings).await?,
            (Some(vector), Some(text)) => self.hybrid(record, query, vector, text, &mut timings).await?,
            (None, None) => Vec::new(),
        };
        Ok((hits, timings))
    }

    /// Whether the collection has anything to compare a vector with. An empty collection accepts vectors of
    /// any width, although Chroma remembers the former width.
    async fn is_comparable(
        &self,
        record: &CollectionRecord,
        vector: Option<&[f32]>,
    ) -> Result<bool, StorageError> {
        let Some(expected) = record.described.dimensions else {
            return Ok(false);
        };
        let Some(actual) = vector.map(<[f32]>::len).filter(|actual| *actual != expected) else {
            return Ok(true);
        };
        if self.api.count(record).await? == 0 {
            return Ok(false);
        }
        Err(StorageError::DimensionMismatch {
            collection: record.described.name.clone(),
            expected,
            actual,
        })
    }

    async fn dense(
        &self,
        record: &CollectionRecord,
        query: &StorageQuery,
        vector: &[f32],
        timings: &mut Vec<StageTime>,
    ) -> Result<Vec<SearchHit>, StorageError> {
        let found = self.near(record, query, vector, query.limit, timings).await?;
        let hits = found.into_iter().enumerate().map(|(place, neighbour)| {
            let dense = Some(Rank {
                rank: place + 1,
                score: dense_score(neighbour.distance),
            });
            let ranks = HitRanks {
                dense,
                ..HitRanks::default()
            };
            hit(neighbour.document, Some(neighbour.distance), ranks)
        });
        Ok(hits.collect())
    }

    async fn near(
        &self,
        record: &CollectionRecord,
        query: &StorageQuery,
        vector: &[f32],
        depth: usize,
        timings: &mut Vec<StageTime>,
    ) -> Result<Vec<ChromaHit>, StorageError> {
        check_space(record)?;
        let start = Instant::now();
        let mut found = self
            .nearest(record, vector, &query.filter, query.ids.as_deref(), depth)
            .await?;
        if let Some(farthest) = query.max_distance {
            found.retain(|neighbour| neighbour.distance <= farthest);
        }
        timings.push(StageTime::new("dense", start.elapsed()));
        Ok(found)
    }

    async fn keyword(
        &self,
        record: &CollectionRecord,
        query: &StorageQuery,
        text: &str,
        timings: &mut Vec<StageTime>,
    ) -> Result<Vec<SearchHit>, StorageError> {
        let start = Instant::now();
        let mut words = self.rank_by_words(record, text, query).await?;
        words.ranked.truncate(query.limit);
        timings.push(StageTime::new("keyword", start.elapsed()));
        let start = Instant::now();
        let best = words.ranked.iter().enumerate().map(|(rank, (position, score))| {
            let keyword = Some(Rank {
                rank: rank + 1,
                score: *score,
            });
            let ranks = HitRanks {
                keyword,
                ..HitRanks::default()
            };
            (*position, ranks)
        });
        let hits = self
            .fetch_hits(record, &words.ids, best.collect(), &HashMap::new())
            .await?;
        timings.push(StageTime::new("fetch", start.elapsed()));
        Ok(hits)
    }

    async fn hybrid(
        &self,
        record: &CollectionRecord,
        query: &StorageQuery,
        vector: &[f32],
        text: &str,
        timings: &mut Vec<StageTime>,
    ) -> Result<Vec<SearchHit>, StorageError> {
        let depth = query.limit.saturating_mul(FUSION_DEPTH).max(FUSION_AT_LEAST);
        let start = Instant::now();
        let mut words = self.rank_by_words(record, text, query).await?;
        words.ranked.truncate(depth);
        timings.push(StageTime::new("keyword", start.elapsed()));
        let found = self.near(record, query, vector, depth, timings).await?;
        let mut distances = HashMap::new();
        let mut dense = Vec::with_capacity(found.len());
        for neighbour in &found {
            if let Some(position) = words.positions.get(neighbour.document.id.as_str()) {
                distances.insert(*position, neighbour.distance);
                dense.push((*position, dense_score(neighbour.distance)));
            }
        }
        let start = Instant::now();
        let without_distance: Vec<&str> = words
            .ranked
            .iter()
            .filter(|(position, _)| !distances.contains_key(position))
            .filter_map(|(position, _)| words.ids.get(*position as usize).map(String::as_str))
            .collect();
        for neighbour in self.compare(record, vector, &without_distance).await? {
            if let Some(position) = words.positions.get(neighbour.document.id.as_str()) {
                distances.insert(*position, neighbour.distance);
            }
        }
        if let Some(farthest) = query.max_distance {
            let near_enough = |position: &u32| distances.get(position).is_some_and(|d| *d <= farthest);
            words.ranked.retain(|(position, _)| near_enough(position));
        }
        let fused = fuse(&dense, &words.ranked, query.weights);
        timings.push(StageTime::new("fusion", start.elapsed()));
        let start = Instant::now();
        let best = fused.into_iter().take(query.limit).collect();
        let hits = self.fetch_hits(record, &words.ids, best, &distances).await?;
        timings.push(StageTime::new("fetch", start.elapsed()));
        Ok(hits)
    }

    /// Leaves out documents that were deleted meanwhile.
    async fn fetch_hits(
        &self,
        record: &CollectionRecord,
        ids: &[String],
        best: Vec<(u32, HitRanks)>,
        distances: &HashMap<u32, f32>,
    ) -> Result<Vec<SearchHit>, StorageError> {
        let id_of = |position: u32| ids.get(position as usize).cloned();
        let wanted: Vec<String> = best.iter().filter_map(|(position, _)| id_of(*position)).collect();
        let documents = self.fetch(record, &wanted).await?;
        let mut documents: HashMap<String, Document> = documents
            .into_iter()
            .map(|document| (document.id.as_str().to_owned(), document))
            .collect();
        let hits = best.into_iter().filter_map(|(position, ranks)| {
            let document = documents.remove(&id_of(position)?)?;
            Some(hit(document, distances.get(&position).copied(), ranks))
        });
        Ok(hits.collect())
    }
}

fn hit(document: Document, distance: Option<f32>, ranks: HitRanks) -> SearchHit {
    SearchHit {
        document,
        distance,
        ranks,
        rerank: None,
        siblings: None,
    }
}

/// 1 for the same direction, 0 for the opposite one.
fn dense_score(distance: f32) -> f64 {
    f64::from(1.0 - distance / 2.0)
}
