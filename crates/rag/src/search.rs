//! Search: by meaning, by word, by both; reranked, expanded, over one collection or several.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ragstone_core::collection::CollectionName;
use ragstone_core::document::{Document, DocumentId, Metadata, check_vector};
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::fusion::{FusionWeights, HitRanks, Rank};
use ragstone_core::model::{Embedder, Embedding, ModelInfo, Scored};
pub use ragstone_core::siblings::Expand;
use ragstone_core::siblings::{Gathering, SIBLING_BYTES};
use ragstone_core::storage::{SiblingsRequest, StageTime, StorageError, StorageQuery};
use tokio::sync::{Mutex, OnceCell};

use crate::Service;
use crate::error::ServiceError;
use crate::models::{check_comparable, embed_query};

/// A reranker sees this many times as many documents as are asked for, within the two bounds, but
/// always some more than are asked for.
const RERANK_FACTOR: usize = 4;
const RERANK_AT_LEAST: usize = 40;
const RERANK_AT_MOST: usize = 200;
const RERANK_SPARE: usize = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Dense,
    Keyword,
    Hybrid,
}

impl Mode {
    pub const ALL: [Mode; 3] = [Mode::Dense, Mode::Keyword, Mode::Hybrid];

    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Keyword => "keyword",
            Self::Hybrid => "hybrid",
        }
    }

    pub fn parse(name: &str) -> Result<Self, InvalidInput> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| {
                InvalidInput::new(format!(
                    "unknown mode '{}': it must be 'dense', 'keyword' or 'hybrid'",
                    ragstone_core::collection::shorten(name)
                ))
            })
    }
}

/// A query that was checked to be complete for its mode; see [`Query::check`].
#[derive(Debug, Clone)]
pub struct Query {
    pub text: Option<String>,
    /// The text's vector, where the client brings it.
    pub vector: Option<Vec<f32>>,
    pub top_k: usize,
    pub top_k_of: TopK,
    pub filter: Filter,
    /// Only these documents.
    pub among: Option<Vec<DocumentId>>,
    pub max_distance: Option<f32>,
    pub mode: Mode,
    pub weights: FusionWeights,
    pub rerank: bool,
    pub expand: Option<Expand>,
}

/// What `top_k` counts when several collections are searched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum TopK {
    #[default]
    AllTogether,
    EachCollection,
}

#[derive(Debug, Clone)]
pub struct Hit {
    pub collection: CollectionName,
    pub document: Document,
    pub distance: Option<f32>,
    pub ranks: HitRanks,
    pub rerank: Option<Reranked>,
    /// In document order, the hit itself included; `None` where nothing was expanded.
    pub siblings: Option<Vec<Arc<Document>>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reranked {
    pub score: f32,
    /// Where the hit stood before, counted from 1.
    pub original_rank: usize,
}

#[derive(Debug, Default)]
pub struct Answer {
    pub hits: Vec<Hit>,
    /// Those that were searched, with their metadata.
    pub collections: Vec<(CollectionName, Metadata)>,
    /// What was asked for and could not be done, without making the answer wrong.
    pub warnings: Vec<String>,
    siblings_cut: bool,
    pub reranked: bool,
    pub stages: Vec<StageTime>,
    /// Collections that could not be searched, when others could.
    pub failures: Vec<(String, ServiceError)>,
}

impl Query {
    /// Says what is missing or contradictory, before anything is computed.
    pub fn check(self) -> Result<Self, InvalidInput> {
        let text = self.text.as_deref().map(str::trim);
        if text.is_some_and(str::is_empty) {
            return Err(InvalidInput::new("'query' must not be empty"));
        }
        if text.is_none() && self.vector.is_none() {
            return Err(InvalidInput::new("'query' or 'query_embedding' is required"));
        }
        if text.is_none() && self.mode != Mode::Dense {
            return Err(InvalidInput::new(format!(
                "mode '{}' needs a 'query' text",
                self.mode.name()
            )));
        }
        if text.is_none() && self.rerank {
            return Err(InvalidInput::new("'rerank' needs a 'query' text"));
        }
        if self.mode == Mode::Keyword && self.max_distance.is_some() {
            return Err(InvalidInput::new(
                "'max_distance' needs a mode with vectors: 'dense' or 'hybrid'",
            ));
        }
        if let Some(vector) = &self.vector {
            check_vector(vector).map_err(|e| InvalidInput::new(format!("'query_embedding': {e}")))?;
        }
        Ok(self)
    }
}

/// Searches one collection.
pub async fn search(service: &Service, name: &CollectionName, query: &Query) -> Result<Answer, ServiceError> {
    let found = find(service, name, query, &QueryVectors::default()).await?;
    let mut answer = Answer::default();
    answer.take(found);
    finish(service, query, &mut answer).await;
    Ok(answer)
}

/// Searches several collections at once and merges what they give. One that fails, or whose name is
/// none, is reported; when all fail, so does the search.
pub async fn search_several(
    service: &Service,
    names: Vec<(String, Result<CollectionName, InvalidInput>)>,
    query: &Query,
) -> Result<Answer, ServiceError> {
    let vectors = QueryVectors::default();
    let searches = names.into_iter().map(|(written, name)| {
        let vectors = &vectors;
        async move {
            let found = match name {
                Ok(name) => find(service, &name, query, vectors).await,
                Err(invalid) => Err(invalid.into()),
            };
            (written, found)
        }
    });
    let mut answer = Answer::default();
    for (name, found) in futures::future::join_all(searches).await {
        match found {
            Ok(found) => answer.take(found),
            Err(error) => {
                tracing::warn!(collection = %name, %error, "a collection could not be searched");
                answer.failures.push((name, error));
            }
        }
    }
    if answer.collections.is_empty() && !answer.failures.is_empty() {
        return Err(ServiceError::NoneSearched(answer.failures));
    }
    sort_merged(&mut answer.hits);
    finish(service, query, &mut answer).await;
    Ok(answer)
}

struct Found {
    hits: Vec<Hit>,
    collection: (CollectionName, Metadata),
    siblings_cut: bool,
    warnings: Vec<String>,
    stages: Vec<StageTime>,
}

impl Answer {
    fn take(&mut self, found: Found) {
        self.hits.extend(found.hits);
        self.collections.push(found.collection);
        self.siblings_cut |= found.siblings_cut;
        for warning in found.warnings {
            self.warn(warning);
        }
        slowest(&mut self.stages, &found.stages);
    }

    /// What is true of several collections is said once.
    fn warn(&mut self, warning: String) {
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }
}

/// The vectors of one query text, each made once however many collections share its model.
#[derive(Default)]
struct QueryVectors(Mutex<HashMap<String, Arc<OnceCell<Embedding>>>>);

impl QueryVectors {
    async fn get(&self, embedder: &dyn Embedder, text: &str) -> Result<Embedding, ServiceError> {
        let model = embedder.info().identity.id.clone();
        let cell = Arc::clone(self.0.lock().await.entry(model).or_default());
        cell.get_or_try_init(|| embed_query(embedder, text))
            .await
            .cloned()
    }
}

/// The candidates of one collection: what reranking chooses from, or the answer itself.
async fn find(
    service: &Service,
    name: &CollectionName,
    query: &Query,
    vectors: &QueryVectors,
) -> Result<Found, ServiceError> {
    let mut stages = Vec::new();
    let mut warnings = Vec::new();
    let vector = match query.mode {
        Mode::Keyword => None,
        Mode::Dense | Mode::Hybrid => match &query.vector {
            Some(vector) => Some(vector.clone()),
            None => {
                let collection = service.store.collection(name).await?;
                let embedder = service.models.for_collection(&collection)?;
                let start = Instant::now();
                let text = query.text.as_deref().unwrap_or_default();
                // At once: the store may be a round trip away.
                let (warning, embedding) = tokio::try_join!(
                    check_comparable(service, name, &embedder.info().identity),
                    vectors.get(embedder.as_ref(), text)
                )?;
                warnings.extend(warning);
                if embedding.truncated {
                    warnings.push(truncated_query(embedder.info()));
                }
                stages.push(StageTime {
                    stage: "embed",
                    took: start.elapsed(),
                });
                Some(embedding.vector)
            }
        },
    };
    let limit = if query.rerank {
        (query.top_k * RERANK_FACTOR)
            .clamp(RERANK_AT_LEAST, RERANK_AT_MOST)
            .max(query.top_k + RERANK_SPARE)
    } else {
        query.top_k
    };
    let siblings = query.expand.as_ref().map(|expand| SiblingsRequest {
        expand: expand.clone(),
        // A reranker chooses among more hits than are given out.
        max_bytes: SIBLING_BYTES * if query.rerank { RERANK_FACTOR } else { 1 },
    });
    let request = StorageQuery {
        vector,
        text: if query.mode == Mode::Dense {
            None
        } else {
            query.text.clone()
        },
        filter: query.filter.clone(),
        among: query.among.clone(),
        limit,
        max_distance: query.max_distance,
        weights: query.weights,
        siblings,
    };
    let outcome = service.store.search(name, request).await.map_err(in_query)?;
    stages.extend(outcome.stages);
    let hits = outcome
        .hits
        .into_iter()
        .map(|hit| Hit {
            collection: name.clone(),
            document: hit.document,
            distance: hit.distance,
            ranks: hit.ranks,
            rerank: None,
            siblings: hit.siblings,
        })
        .collect();
    Ok(Found {
        hits,
        collection: (name.clone(), outcome.metadata),
        siblings_cut: outcome.siblings_cut,
        warnings,
        stages,
    })
}

/// A width that does not fit is the query's fault here, and the message should say so.
fn in_query(error: StorageError) -> ServiceError {
    match error {
        StorageError::DimensionMismatch { collection, expected, actual } => InvalidInput::new(format!(
            "Embedding dimension mismatch: the query's vector has {actual} dimensions, collection '{collection}' has {expected}"
        ))
        .into(),
        other => other.into(),
    }
}

fn truncated_query(model: &ModelInfo) -> String {
    let limit = model
        .max_tokens
        .map_or_else(String::new, |tokens| format!(" {tokens} tokens"));
    format!(
        "The query is longer than what model '{}' reads{limit}: only its beginning was searched for",
        model.identity.id
    )
}

/// Reranks, cuts to what was asked for, and keeps as many siblings as fit into an answer.
async fn finish(service: &Service, query: &Query, answer: &mut Answer) {
    if query.rerank {
        rerank(service, query, answer).await;
    }
    cut(&mut answer.hits, query);
    let Some(expand) = &query.expand else {
        return;
    };
    let mut gathering = Gathering::new(expand, SIBLING_BYTES);
    for hit in &mut answer.hits {
        if let Some(siblings) = &mut hit.siblings {
            *siblings = gathering.within(siblings, &hit.document);
        }
    }
    if gathering.cut || answer.siblings_cut {
        answer.warn(too_many_siblings());
    }
}

pub(crate) fn too_many_siblings() -> String {
    format!(
        "Not all siblings are given: those of one answer have at most {} MB. Ask for fewer results, or set \
         'max_chars' of 'expand'",
        SIBLING_BYTES >> 20
    )
}

fn cut(hits: &mut Vec<Hit>, query: &Query) {
    match query.top_k_of {
        TopK::AllTogether => hits.truncate(query.top_k),
        TopK::EachCollection => {
            let mut kept: HashMap<CollectionName, usize> = HashMap::new();
            hits.retain(|hit| {
                let count = kept.entry(hit.collection.clone()).or_default();
                *count += 1;
                *count <= query.top_k
            });
        }
    }
}

/// Leaves the order as it is, with a warning, when there is no reranker or it fails.
async fn rerank(service: &Service, query: &Query, answer: &mut Answer) {
    let reranker = match service.models.reranker() {
        Ok(reranker) => Arc::clone(reranker),
        Err(error) => {
            answer.warnings.push(format!("Reranking was skipped: {error}"));
            return;
        }
    };
    let start = Instant::now();
    let texts = answer.hits.iter().map(|hit| hit.document.text.clone()).collect();
    let text = query.text.as_deref().unwrap_or_default();
    match reranker.score(text, texts, None).await {
        Ok(Scored { scores, .. }) => {
            for (place, (hit, score)) in answer.hits.iter_mut().zip(scores).enumerate() {
                hit.rerank = Some(Reranked {
                    score,
                    original_rank: place + 1,
                });
            }
            let score = |hit: &Hit| hit.rerank.map_or(f32::NEG_INFINITY, |reranked| reranked.score);
            answer.hits.sort_by(|a, b| score(b).total_cmp(&score(a)));
            answer.reranked = true;
            answer.stages.push(StageTime {
                stage: "rerank",
                took: start.elapsed(),
            });
        }
        Err(error) => {
            tracing::warn!(%error, "reranking failed, results stay in their first order");
            answer.warnings.push(format!("Reranking was skipped: {error}"));
        }
    }
}

/// Orders the hits of several collections: by fused score where there is one, else by distance,
/// else by keyword score.
fn sort_merged(hits: &mut [Hit]) {
    let key = |hit: &Hit| -> f64 {
        let score = |stage: Option<Rank>| stage.map(|s| s.score);
        score(hit.ranks.fused)
            .or_else(|| hit.distance.map(|distance| -f64::from(distance)))
            .or_else(|| score(hit.ranks.keyword))
            .unwrap_or(f64::NEG_INFINITY)
    };
    hits.sort_by(|a, b| key(b).total_cmp(&key(a)));
}

/// Collections are searched at the same time, so a stage took as long as its slowest.
fn slowest(stages: &mut Vec<StageTime>, more: &[StageTime]) {
    for time in more {
        match stages.iter_mut().find(|known| known.stage == time.stage) {
            Some(known) => known.took = Duration::max(known.took, time.took),
            None => stages.push(*time),
        }
    }
}
