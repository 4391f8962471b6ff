//! Searching by meaning, by word and by both.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use ragstone_core::filter::{Filter, Scalar};
use ragstone_core::fusion::{HitRanks, Rank, fuse};
use ragstone_core::provider::ProviderError;
use ragstone_core::siblings::{Gathering, in_document_order};
use ragstone_core::storage::{
    Page, SearchHit, SearchHits, SiblingsRequest, StageTime, Storage, StorageError, StorageQuery,
};
use ragstone_core::vector::normalise;
use ragstone_core::{CollectionName, Document};

use super::super::api::CollectionRecord;
use super::super::search::{Found, check_space};
use super::ChromaStore;

/// How much deeper than the answer each ranking goes before the two are fused.
const FUSION_DEPTH: usize = 4;
const FUSION_AT_LEAST: usize = 100;
const SECTION_PAGE: usize = 1_000;
const LARGEST_SECTION: usize = 10_000;

impl ChromaStore {
    pub(super) async fn find(
        &self,
        name: &CollectionName,
        mut request: StorageQuery,
    ) -> Result<SearchHits, StorageError> {
        if let Some(vector) = &mut request.vector {
            // Chroma loses the direction of very large and very small numbers.
            normalise(vector);
        }
        let (record, (mut hits, mut stages)) =
            self.ask_of(name, |record| self.ranked(record, &request)).await?;
        let mut siblings_cut = false;
        if let Some(request) = &request.siblings {
            let start = Instant::now();
            siblings_cut = self.expand(name, request, &mut hits).await?;
            note(&mut stages, "expand", start);
        }
        Ok(SearchHits {
            hits,
            metadata: record.described.metadata.clone(),
            siblings_cut,
            stages,
        })
    }

    /// ChromaDB has no transactions, so these are read after the hits. Returns whether some were left
    /// out.
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

    /// All that share a value, or the first of very many: ChromaDB does not tell where among them a
    /// document stands.
    async fn section(&self, name: &CollectionName, filter: &Filter) -> Result<Vec<Document>, StorageError> {
        let mut members = Vec::new();
        while members.len() < LARGEST_SECTION {
            let page = Page {
                limit: SECTION_PAGE,
                offset: members.len() as u64,
            };
            let found = self.documents(name, filter, page).await?.documents;
            let ended = found.len() < SECTION_PAGE;
            members.extend(found);
            if ended {
                break;
            }
        }
        Ok(members)
    }

    async fn ranked(
        &self,
        record: Arc<CollectionRecord>,
        request: &StorageQuery,
    ) -> Result<(Vec<SearchHit>, Vec<StageTime>), ProviderError> {
        let record = record.as_ref();
        if request.limit == 0 || !self.is_comparable(record, request.vector.as_deref()).await? {
            return Ok(Default::default());
        }
        let ranked = || self.ranked_by(record, request);
        self.chroma.despite_races(record, ranked).await
    }

    async fn ranked_by(
        &self,
        record: &CollectionRecord,
        request: &StorageQuery,
    ) -> Result<(Vec<SearchHit>, Vec<StageTime>), ProviderError> {
        let mut stages = Vec::new();
        let hits = match (&request.vector, &request.text) {
            (Some(vector), None) => self.by_meaning(record, request, vector, &mut stages).await?,
            (None, Some(text)) => self.by_words(record, request, text, &mut stages).await?,
            (Some(vector), Some(text)) => self.by_both(record, request, vector, text, &mut stages).await?,
            (None, None) => Vec::new(),
        };
        Ok((hits, stages))
    }

    /// Whether there is anything that a vector can be compared with. An empty collection takes vectors of
    /// any width; ChromaDB, which remembers what it held, does not.
    async fn is_comparable(
        &self,
        record: &CollectionRecord,
        vector: Option<&[f32]>,
    ) -> Result<bool, ProviderError> {
        let Some(expected) = record.described.dimensions else {
            return Ok(false);
        };
        let Some(actual) = vector.map(<[f32]>::len).filter(|actual| *actual != expected) else {
            return Ok(true);
        };
        if self.api().count(record).await? == 0 {
            return Ok(false);
        }
        let mismatch = StorageError::DimensionMismatch {
            collection: record.described.name.clone(),
            expected,
            actual,
        };
        Err(ProviderError::Storage(mismatch))
    }

    async fn by_meaning(
        &self,
        record: &CollectionRecord,
        request: &StorageQuery,
        vector: &[f32],
        stages: &mut Vec<StageTime>,
    ) -> Result<Vec<SearchHit>, ProviderError> {
        let found = self.near(record, request, vector, request.limit, stages).await?;
        Ok(found
            .into_iter()
            .enumerate()
            .map(|(place, Found { document, distance })| SearchHit {
                document,
                distance: Some(distance),
                ranks: HitRanks {
                    dense: Some(Rank {
                        rank: place + 1,
                        score: dense_score(distance),
                    }),
                    ..HitRanks::default()
                },
                siblings: None,
            })
            .collect())
    }

    async fn near(
        &self,
        record: &CollectionRecord,
        request: &StorageQuery,
        vector: &[f32],
        depth: usize,
        stages: &mut Vec<StageTime>,
    ) -> Result<Vec<Found>, ProviderError> {
        check_space(record)?;
        let start = Instant::now();
        let mut found = self
            .chroma
            .best_of(record, vector, &request.filter, request.among.as_deref(), depth)
            .await?;
        if let Some(farthest) = request.max_distance {
            found.retain(|hit| hit.distance <= farthest);
        }
        note(stages, "dense", start);
        Ok(found)
    }

    async fn by_words(
        &self,
        record: &CollectionRecord,
        request: &StorageQuery,
        text: &str,
        stages: &mut Vec<StageTime>,
    ) -> Result<Vec<SearchHit>, ProviderError> {
        let start = Instant::now();
        let mut words = self.words(record, text, request).await?;
        words.ranked.truncate(request.limit);
        note(stages, "keyword", start);
        let start = Instant::now();
        let best = words.ranked.iter().enumerate().map(|(rank, (place, score))| {
            let keyword = Some(Rank {
                rank: rank + 1,
                score: *score,
            });
            let ranks = HitRanks {
                keyword,
                ..HitRanks::default()
            };
            (*place, ranks)
        });
        let hits = self
            .fetched(record, &words.ids, best.collect(), &HashMap::new())
            .await?;
        note(stages, "fetch", start);
        Ok(hits)
    }

    async fn by_both(
        &self,
        record: &CollectionRecord,
        request: &StorageQuery,
        vector: &[f32],
        text: &str,
        stages: &mut Vec<StageTime>,
    ) -> Result<Vec<SearchHit>, ProviderError> {
        let depth = request.limit.saturating_mul(FUSION_DEPTH).max(FUSION_AT_LEAST);
        let start = Instant::now();
        let mut words = self.words(record, text, request).await?;
        words.ranked.truncate(depth);
        note(stages, "keyword", start);
        let found = self.near(record, request, vector, depth, stages).await?;
        let mut distances = HashMap::new();
        let mut dense = Vec::with_capacity(found.len());
        for hit in &found {
            if let Some(place) = words.places.get(hit.document.id.as_str()) {
                distances.insert(*place, hit.distance);
                dense.push((*place, dense_score(hit.distance)));
            }
        }
        let start = Instant::now();
        let far: Vec<String> = words
            .ranked
            .iter()
            .filter(|(place, _)| !distances.contains_key(place))
            .filter_map(|(place, _)| words.ids.get(*place as usize).cloned())
            .collect();
        if !far.is_empty() {
            for hit in self.chroma.best_there(record, vector, &far, far.len()).await? {
                if let Some(place) = words.places.get(hit.document.id.as_str()) {
                    distances.insert(*place, hit.distance);
                }
            }
        }
        let near_enough = |place: &u32| {
            let distance = distances.get(place);
            request
                .max_distance
                .is_none_or(|farthest| distance.is_some_and(|distance| *distance <= farthest))
        };
        words.ranked.retain(|(place, _)| near_enough(place));
        let fused = fuse(&dense, &words.ranked, request.weights);
        note(stages, "fusion", start);
        let start = Instant::now();
        let best = fused.into_iter().take(request.limit).collect();
        let hits = self.fetched(record, &words.ids, best, &distances).await?;
        note(stages, "fetch", start);
        Ok(hits)
    }

    /// One that is gone by now is left out.
    async fn fetched(
        &self,
        record: &CollectionRecord,
        ids: &[String],
        best: Vec<(u32, HitRanks)>,
        distances: &HashMap<u32, f32>,
    ) -> Result<Vec<SearchHit>, ProviderError> {
        let id_of = |place: u32| ids.get(place as usize).cloned();
        let wanted: Vec<String> = best.iter().filter_map(|(place, _)| id_of(*place)).collect();
        let documents = self.chroma.documents_by_id(record, &wanted).await?;
        let mut documents: HashMap<String, Document> = documents
            .into_iter()
            .map(|document| (document.id.as_str().to_owned(), document))
            .collect();
        Ok(best
            .into_iter()
            .filter_map(|(place, ranks)| {
                Some(SearchHit {
                    document: documents.remove(&id_of(place)?)?,
                    distance: distances.get(&place).copied(),
                    ranks,
                    siblings: None,
                })
            })
            .collect())
    }
}

/// One for the same direction, zero for the opposite one.
fn dense_score(distance: f32) -> f64 {
    f64::from(1.0 - distance / 2.0)
}

fn note(stages: &mut Vec<StageTime>, stage: &'static str, start: Instant) {
    stages.push(StageTime {
        stage,
        took: start.elapsed(),
    });
}
