//! Search: by meaning, by word, by both; reranked, expanded, over one collection or several.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::document::{Document, check_vector};
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::{Filter, Scalar};
use ragstone_core::fusion::{FusionWeights, RankTrail, StageRank};
use ragstone_core::model::Embedder;
pub use ragstone_core::siblings::Expand;
use ragstone_core::siblings::{MAX_SIBLINGS, arrange_siblings};
use ragstone_core::store::{Page, SearchRequest, StageTime, StoreError};
use tokio::sync::{Mutex, OnceCell};

use crate::Service;
use crate::error::ServiceError;
use crate::models::embed_query;

/// A reranker sees this many times as many documents as are asked for, within the two bounds.
const RERANK_FACTOR: usize = 4;
const RERANK_AT_LEAST: usize = 40;
const RERANK_AT_MOST: usize = 200;

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
    pub trail: RankTrail,
    pub rerank: Option<Reranked>,
    /// In document order, the hit itself included; `None` where nothing was expanded.
    pub siblings: Option<Vec<Document>>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reranked {
    pub score: f32,
    /// Where the hit stood before, counted from 1.
    pub original_rank: usize,
}

#[derive(Debug)]
pub struct Answer {
    pub hits: Vec<Hit>,
    pub collections: Vec<Collection>,
    /// What was asked for and could not be done, without making the answer wrong.
    pub warnings: Vec<String>,
    pub reranked: bool,
    pub stages: Vec<StageTime>,
    /// Collections that could not be searched, when others could.
    pub failures: Vec<(CollectionName, ServiceError)>,
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
    let mut answer = Answer {
        hits: found.hits,
        collections: vec![found.collection],
        warnings: Vec::new(),
        reranked: false,
        stages: found.stages,
        failures: Vec::new(),
    };
    finish(service, query, &mut answer).await?;
    Ok(answer)
}

/// Searches several collections at once and merges what they give. One that fails is reported;
/// when all fail, so does the search.
pub async fn search_several(
    service: &Service,
    names: &[CollectionName],
    query: &Query,
) -> Result<Answer, ServiceError> {
    let vectors = QueryVectors::default();
    let searches = names.iter().map(|name| find(service, name, query, &vectors));
    let mut answer = Answer {
        hits: Vec::new(),
        collections: Vec::new(),
        warnings: Vec::new(),
        reranked: false,
        stages: Vec::new(),
        failures: Vec::new(),
    };
    for (name, found) in names.iter().zip(futures::future::join_all(searches).await) {
        match found {
            Ok(found) => {
                answer.hits.extend(found.hits);
                answer.collections.push(found.collection);
                slowest(&mut answer.stages, &found.stages);
            }
            Err(error) => {
                tracing::warn!(collection = %name, %error, "a collection could not be searched");
                answer.failures.push((name.clone(), error));
            }
        }
    }
    if answer.collections.is_empty() && !answer.failures.is_empty() {
        return Err(answer.failures.swap_remove(0).1);
    }
    sort_merged(&mut answer.hits);
    finish(service, query, &mut answer).await?;
    Ok(answer)
}

struct Found {
    hits: Vec<Hit>,
    collection: Collection,
    stages: Vec<StageTime>,
}

/// The vectors of one query text, each made once however many collections share its model.
#[derive(Default)]
struct QueryVectors(Mutex<HashMap<String, Arc<OnceCell<Vec<f32>>>>>);

impl QueryVectors {
    async fn get(&self, embedder: &dyn Embedder, text: &str) -> Result<Vec<f32>, ServiceError> {
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
    let vector = match query.mode {
        Mode::Keyword => None,
        Mode::Dense | Mode::Hybrid => match &query.vector {
            Some(vector) => Some(vector.clone()),
            None => {
                let collection = service.store.collection(name).await?;
                let embedder = service.models.for_collection(&collection)?;
                let start = Instant::now();
                let text = query.text.as_deref().unwrap_or_default();
                let vector = vectors.get(embedder.as_ref(), text).await?;
                stages.push(StageTime {
                    stage: "embed",
                    took: start.elapsed(),
                });
                Some(vector)
            }
        },
    };
    let limit = if query.rerank {
        (query.top_k * RERANK_FACTOR)
            .clamp(RERANK_AT_LEAST, RERANK_AT_MOST)
            .max(query.top_k)
    } else {
        query.top_k
    };
    let request = SearchRequest {
        vector,
        text: if query.mode == Mode::Dense {
            None
        } else {
            query.text.clone()
        },
        filter: query.filter.clone(),
        limit,
        max_distance: query.max_distance,
        weights: query.weights,
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
            trail: hit.trail,
            rerank: None,
            siblings: None,
        })
        .collect();
    Ok(Found {
        hits,
        collection: outcome.collection,
        stages,
    })
}

/// A width that does not fit is the query's fault here, and the message should say so.
fn in_query(error: StoreError) -> ServiceError {
    match error {
        StoreError::DimensionMismatch { collection, expected, actual } => InvalidInput::new(format!(
            "Embedding dimension mismatch: the query's vector has {actual} dimensions, collection '{collection}' has {expected}"
        ))
        .into(),
        other => other.into(),
    }
}

/// Reranks, cuts to what was asked for, and gathers siblings.
async fn finish(service: &Service, query: &Query, answer: &mut Answer) -> Result<(), ServiceError> {
    if query.rerank {
        rerank(service, query, answer).await;
    }
    cut(&mut answer.hits, query);
    if let Some(expand) = &query.expand {
        let start = Instant::now();
        for hit in &mut answer.hits {
            hit.siblings = siblings(service, hit, expand).await?;
        }
        answer.stages.push(StageTime {
            stage: "expand",
            took: start.elapsed(),
        });
    }
    Ok(())
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
    match reranker
        .score(query.text.as_deref().unwrap_or_default(), texts)
        .await
    {
        Ok(scores) => {
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

/// The documents that share the hit's value of a field, in document order.
async fn siblings(
    service: &Service,
    hit: &Hit,
    expand: &Expand,
) -> Result<Option<Vec<Document>>, ServiceError> {
    let Some(value) = hit
        .document
        .metadata
        .get(&expand.field)
        .and_then(Scalar::from_json)
    else {
        return Ok(None);
    };
    let filter = Filter::equals(expand.field.clone(), value);
    let page = service
        .store
        .documents(
            &hit.collection,
            &filter,
            Page {
                limit: MAX_SIBLINGS,
                offset: 0,
            },
        )
        .await?;
    Ok(Some(arrange_siblings(page.documents, &hit.document, expand)))
}

/// Orders the hits of several collections: by fused score where there is one, else by distance,
/// else by keyword score.
fn sort_merged(hits: &mut [Hit]) {
    let key = |hit: &Hit| -> f64 {
        let score = |stage: Option<StageRank>| stage.map(|s| s.score);
        score(hit.trail.fused)
            .or_else(|| hit.distance.map(|distance| -f64::from(distance)))
            .or_else(|| score(hit.trail.keyword))
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
