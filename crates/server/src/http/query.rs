//! `/query`: search over one collection or several.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use ragstone_core::collection::{CollectionName, shorten};
use ragstone_core::conversation::QueryVariant;
use ragstone_core::document::{DocumentId, Metadata};
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::fusion::{FusionWeights, Rank};
use ragstone_core::search::{QueryVector, SearchHit, SearchMode, SearchQuery, SearchResponse, StageTime};
use ragstone_core::siblings::Expand;
use ragstone_search::fanout::{self, FanoutQuery, Limit, ModeChoice, Target};
use ragstone_search::gateway::NamedBackend;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::documents::DocumentBody;
use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, JsonBody};
use super::scope::{NamesBackend, Scoped};
use super::state::{AppState, Limits};

const DEFAULT_TOP_K: usize = 3;
pub(super) const MAX_COLLECTIONS: usize = 64;
const MAX_IDS: usize = 1000;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"collection": "manuals", "query": "how long are logs kept?", "top_k": 5, "mode": "hybrid", "where": {"chapter": 1}}))]
pub(super) struct QueryBody {
    /// The service that the collection is in; below `/api` only.
    service: Option<String>,
    /// The collection to search; on the route below a collection, the path names it.
    collection: Option<String>,
    /// Several collections to search at once, instead of one. One that cannot be searched is listed
    /// in `failures`; only when none can, the query fails.
    collections: Option<Vec<String>>,
    /// The text to search for. The collection's model embeds it; when the collection has vectors of
    /// another model that is refused, and when they are of another version of the model, `warnings`
    /// says so.
    query: Option<String>,
    /// Its vector, where the client has it already.
    query_embedding: Option<Vec<f32>>,
    /// How many results; 3 unless given, or fewer where the server allows no more.
    top_k: Option<i64>,
    /// With several collections: `top_k` results of each of them instead of all together.
    per_collection: Option<bool>,
    /// Only documents that pass this filter.
    #[serde(rename = "where")]
    #[schema(value_type = Option<Object>)]
    filter: Option<Value>,
    /// Only these documents, at most 1000; one that is not there is left out.
    ids: Option<Vec<String>>,
    /// Leave out results with a larger distance; 0 or absent means off.
    max_distance: Option<f32>,
    /// `dense` (default), `keyword` or `hybrid`.
    mode: Option<String>,
    /// How much each ranking counts in `hybrid`; 1 and 1 unless given.
    weights: Option<WeightsBody>,
    /// Reorder by the cross-encoder. It sees four times as many results as asked for, at least 40 and
    /// at most 200, and always 40 more than asked for.
    rerank: Option<bool>,
    /// Also return the documents that share the value of this metadata field with a result: the
    /// nearest around it in document order (by source and position where they have them, otherwise
    /// as they were added), at most 100 with the result itself. Those of one answer have at most 4 MB;
    /// where that is not enough, later results have fewer and `warnings` says so. In a section of more
    /// than 500 documents on one side of a result, only the 500 that were added nearest to it count.
    expand: Option<ExpandBody>,
    /// Add ranks, scores and timings of every stage.
    explain: Option<bool>,
}

#[derive(Deserialize, ToSchema)]
struct WeightsBody {
    dense: Option<f64>,
    keyword: Option<f64>,
}

#[derive(Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected the name of a metadata field, or an object with 'field' and, optionally, 'max_chars'"
)]
pub enum ExpandBody {
    Field(String),
    Budget {
        field: String,
        /// How many characters of siblings, the result itself included.
        max_chars: Option<usize>,
    },
}

impl From<ExpandBody> for Expand {
    fn from(expand: ExpandBody) -> Self {
        match expand {
            ExpandBody::Field(field) => Self {
                field,
                max_chars: None,
            },
            ExpandBody::Budget { field, max_chars } => Self { field, max_chars },
        }
    }
}

/// Within what the server allows; `default`, or as many as are allowed, where nothing is asked for.
pub(super) fn check_top_k(
    given: Option<i64>,
    default: usize,
    limits: &Limits,
) -> Result<usize, InvalidInput> {
    let Some(top_k) = given else {
        return Ok(default.min(limits.top_k));
    };
    usize::try_from(top_k)
        .ok()
        .filter(|k| (1..=limits.top_k).contains(k))
        .ok_or_else(|| InvalidInput::new(format!("'top_k' must be from 1 to {}, not {top_k}", limits.top_k)))
}

/// The documents that a search is restricted to.
fn parse_ids(ids: Vec<String>) -> Result<Vec<DocumentId>, InvalidInput> {
    if ids.len() > MAX_IDS {
        return Err(InvalidInput::new(format!(
            "'ids' has {} ids; at most {MAX_IDS} are allowed",
            ids.len()
        )));
    }
    let unique: BTreeSet<String> = ids.into_iter().collect();
    unique
        .into_iter()
        .map(|id| DocumentId::parse(id).map_err(|error| InvalidInput::new(format!("'ids': {error}"))))
        .collect()
}

/// The collections of a query: one, or several as they were written and as they were parsed.
enum Collections {
    One(CollectionName),
    Several(Vec<(String, Result<CollectionName, InvalidInput>)>),
}

fn several(names: Vec<String>) -> Result<Collections, InvalidInput> {
    if names.is_empty() {
        return Err(InvalidInput::new(
            "'collections' must name at least one collection",
        ));
    }
    if names.len() > MAX_COLLECTIONS {
        return Err(InvalidInput::new(format!(
            "'collections' names {} collections; at most {MAX_COLLECTIONS} are allowed",
            names.len()
        )));
    }
    let mut seen = HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        return Err(InvalidInput::new(format!(
            "'collections' names '{}' more than once",
            shorten(twice)
        )));
    }
    let parsed = |name: String| (shorten(&name), CollectionName::parse(name));
    Ok(Collections::Several(names.into_iter().map(parsed).collect()))
}

impl NamesBackend for QueryBody {
    fn service(&self) -> Option<&str> {
        self.service.as_deref()
    }
}

impl QueryBody {
    fn collections(&mut self) -> Result<Collections, InvalidInput> {
        match (self.collection.take(), self.collections.take()) {
            (Some(_), Some(_)) => Err(InvalidInput::new(
                "Give either 'collection' or 'collections', not both",
            )),
            (Some(name), None) => Ok(Collections::One(CollectionName::parse(name)?)),
            (None, Some(names)) => several(names),
            (None, None) => Err(InvalidInput::new("Field 'collection' is required")),
        }
    }

    fn check(self, limits: &Limits) -> Result<SearchQuery, InvalidInput> {
        let top_k = check_top_k(self.top_k, DEFAULT_TOP_K, limits)?;
        let max_distance = match self.max_distance {
            None | Some(0.0) => None,
            Some(far) if far > 0.0 => Some(far),
            Some(other) => {
                return Err(InvalidInput::new(format!(
                    "'max_distance' must not be negative, it is {other}"
                )));
            }
        };
        let weights = self.weights.map_or(Ok(FusionWeights::default()), |weights| {
            let weights = FusionWeights {
                dense: weights.dense.unwrap_or(1.0),
                keyword: weights.keyword.unwrap_or(1.0),
            };
            let fine = |weight: f64| weight.is_finite() && weight >= 0.0;
            if fine(weights.dense) && fine(weights.keyword) && weights.dense + weights.keyword > 0.0 {
                Ok(weights)
            } else {
                Err(InvalidInput::new(
                    "'weights' must be numbers, zero or more, and not both zero",
                ))
            }
        })?;
        SearchQuery {
            text: self.query,
            keywords: None,
            vector: self.query_embedding.map(QueryVector::from_client),
            top_k,
            filter: Filter::parse(&self.filter.unwrap_or(Value::Null))?,
            ids: self.ids.map(parse_ids).transpose()?,
            max_distance,
            mode: self
                .mode
                .as_deref()
                .map_or(Ok(SearchMode::Dense), SearchMode::parse)?,
            weights,
            rerank: self.rerank.unwrap_or(false),
            expand: self.expand.map(Into::into),
        }
        .validate()
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct QueryAnswer {
    /// Best first.
    results: Vec<ResultBody>,
    /// The metadata of the collection; of several, by name.
    #[schema(value_type = Object)]
    collection_metadata: Metadata,
    /// Only when reranking was asked for: whether it was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    reranked: Option<bool>,
    /// What could not be done as asked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    warnings: Vec<String>,
    /// Collections that could not be searched.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    failures: Vec<Failure>,
    /// Milliseconds each stage took; only with `explain`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    timings_ms: Option<Metadata>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Failure {
    collection: String,
    detail: String,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"id": "intro", "text": "Logs are kept for 30 days.", "metadata": {"chapter": 1}, "distance": 0.31, "score": 0.845}))]
pub(super) struct ResultBody {
    #[serde(flatten)]
    document: DocumentBody,
    /// Which collection it is from; only when several were searched.
    #[serde(skip_serializing_if = "Option::is_none")]
    collection: Option<String>,
    /// Cosine distance, 0 to 2; null in keyword mode, which has no vectors.
    distance: Option<f32>,
    /// 1 − distance / 2; null where the distance is.
    score: Option<f32>,
    /// BM25; only in keyword and hybrid mode, null for a result that only the vectors found.
    #[serde(skip_serializing_if = "Option::is_none")]
    keyword_score: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rerank_score: Option<f32>,
    /// The place before reranking, counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    original_rank: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    siblings: Option<Vec<DocumentBody>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    explain: Option<Explanation>,
}

/// Where a result stood in every stage that ranked it.
#[derive(Serialize, ToSchema)]
pub(super) struct Explanation {
    #[serde(skip_serializing_if = "Option::is_none")]
    dense: Option<RankBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keyword: Option<RankBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fused: Option<RankBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rerank: Option<RankBody>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct RankBody {
    /// Counted from 1.
    rank: usize,
    score: f64,
}

impl From<Rank> for RankBody {
    fn from(rank: Rank) -> Self {
        Self {
            rank: rank.rank,
            score: rank.score,
        }
    }
}

/// A hit at its place in the response, counted from 0.
fn result_body(
    place: usize,
    hit: SearchHit,
    collection: Option<&CollectionName>,
    explain: bool,
) -> ResultBody {
    let explain = explain.then(|| Explanation {
        dense: hit.ranks.dense.map(Into::into),
        keyword: hit.ranks.keyword.map(Into::into),
        fused: hit.ranks.fused.map(Into::into),
        rerank: hit.rerank.map(|reranked| RankBody {
            rank: place + 1,
            score: reranked.score.into(),
        }),
    });
    ResultBody {
        score: hit.score(),
        document: hit.document.into(),
        collection: collection.map(ToString::to_string),
        distance: hit.distance,
        keyword_score: hit.ranks.keyword.map(|rank| rank.score),
        rerank_score: hit.rerank.map(|reranked| reranked.score),
        original_rank: hit.rerank.map(|reranked| reranked.original_rank),
        siblings: hit.siblings.map(document_bodies),
        explain,
    }
}

pub(super) fn document_bodies(documents: Vec<Arc<ragstone_core::Document>>) -> Vec<DocumentBody> {
    documents
        .into_iter()
        .map(|document| Arc::unwrap_or_clone(document).into())
        .collect()
}

fn timings(explain: bool, timings: Vec<StageTime>) -> Option<Metadata> {
    let millis = |time: std::time::Duration| Value::from((time.as_secs_f64() * 1e6).round() / 1e3);
    explain.then(|| {
        timings
            .into_iter()
            .map(|time| (time.stage.into_owned(), millis(time.took)))
            .collect()
    })
}

impl QueryAnswer {
    fn new(response: SearchResponse, rerank: bool, explain: bool) -> Self {
        let hits = response.hits.into_iter().enumerate();
        Self {
            results: hits
                .map(|(place, hit)| result_body(place, hit, None, explain))
                .collect(),
            collection_metadata: response.collection_metadata,
            reranked: rerank.then_some(response.reranked),
            warnings: response.warnings,
            failures: Vec::new(),
            timings_ms: timings(explain, response.timings),
        }
    }
}

/// Searches several collections of this process. Names that are invalid count as failures.
async fn query_several(
    state: &AppState,
    names: Vec<(String, Result<CollectionName, InvalidInput>)>,
    query: SearchQuery,
    limit: Limit,
    explain: bool,
) -> Result<QueryAnswer, ApiError> {
    let local = state.gateway.local();
    // In the order of the request.
    let mut failures: Vec<(usize, String, ApiError)> = Vec::new();
    let (mut targets, mut places) = (Vec::new(), Vec::new());
    for (place, (written, name)) in names.into_iter().enumerate() {
        match name {
            Ok(name) => {
                targets.push(Target {
                    service: local.clone(),
                    name,
                });
                places.push(place);
            }
            Err(invalid) => failures.push((place, written, invalid.into())),
        }
    }
    let text = query.text.clone().unwrap_or_default();
    let fanout = FanoutQuery {
        wordings: vec![QueryVariant {
            keywords: text.clone(),
            text,
            weight: 1.0,
            alone: true,
        }],
        reported: 0,
        targets,
        mode: ModeChoice::Given(query.mode),
        options: query,
        limit,
        local: local.clone(),
    };
    let response = fanout::search(&fanout).await;
    let searched = response.metadata.iter().flatten().count();
    for (target, error) in response.failures {
        let name = fanout.targets[target].name.to_string();
        failures.push((places[target], name, error.into()));
    }
    failures.sort_by_key(|(place, ..)| *place);
    let failures = failures.into_iter().map(|(_, name, error)| (name, error));
    if searched == 0 {
        return Err(ApiError::none_searched(failures.collect()));
    }
    let name = |target: usize| &fanout.targets[target].name;
    let mut warnings: Vec<String> = Vec::new();
    for warning in response.warnings {
        if !warnings.contains(&warning.message) {
            warnings.push(warning.message);
        }
    }
    let metadata = response.metadata.into_iter().enumerate();
    let hits = response.hits.into_iter().enumerate();
    Ok(QueryAnswer {
        results: hits
            .map(|(place, hit)| result_body(place, hit.hit, Some(name(hit.target)), explain))
            .collect(),
        collection_metadata: metadata
            .filter_map(|(target, metadata)| Some((name(target).to_string(), Value::Object(metadata?))))
            .collect(),
        reranked: fanout.options.rerank.then_some(response.reranked),
        warnings,
        failures: failures
            .map(|(collection, error)| Failure {
                collection,
                detail: error.into_detail(),
            })
            .collect(),
        timings_ms: timings(explain, response.timings),
    })
}

/// Search one collection or several.
#[utoipa::path(
    post, path = "/query", tag = "search", request_body = QueryBody,
    responses(
        (status = 200, body = QueryAnswer),
        (status = 400, body = ErrorBody, description = "The query is incomplete or malformed, its vector does not fit the collection, or the collection's vectors are of another model"),
        (status = 404, body = ErrorBody, description = "No such collection"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 503, body = ErrorBody, description = "The collection's model is not loaded"),
    ),
)]
pub(super) async fn query(
    State(state): State<AppState>,
    JsonBody(mut body): JsonBody<QueryBody>,
) -> Result<Json<QueryAnswer>, ApiError> {
    let explain = body.explain.unwrap_or(false);
    let limit = if body.per_collection.unwrap_or(false) {
        Limit::EachCollection
    } else {
        Limit::AllTogether
    };
    let collections = body.collections()?;
    let query = body.check(&state.limits)?;
    let mode = query.mode;
    let answer = match collections {
        Collections::One(name) => search(state.gateway.local(), &name, query, explain).await?,
        Collections::Several(names) => query_several(&state, names, query, limit, explain).await?,
    };
    count_query(mode);
    Ok(Json(answer))
}

async fn search(
    backend: &NamedBackend,
    name: &CollectionName,
    query: SearchQuery,
    explain: bool,
) -> Result<QueryAnswer, ApiError> {
    let rerank = query.rerank;
    let response = backend.backend.search(name, query).await?;
    Ok(QueryAnswer::new(response, rerank, explain))
}

/// Search the collection that the path names.
#[utoipa::path(
    post, path = "/collections/{name}/query", tag = "search", request_body = QueryBody,
    params(("name" = String, Path, description = "The collection")),
    responses(
        (status = 200, body = QueryAnswer),
        (status = 400, body = ErrorBody, description = "The query is incomplete or malformed, its vector does not fit the collection, or the collection's vectors are of another model"),
        (status = 404, body = ErrorBody, description = "No such collection"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 503, body = ErrorBody, description = "The collection's model is not loaded"),
    ),
)]
pub(super) async fn query_collection(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    Scoped { backend, body }: Scoped<QueryBody>,
) -> Result<Json<QueryAnswer>, ApiError> {
    let explain = body.explain.unwrap_or(false);
    let query = body.check(&state.limits)?;
    let mode = query.mode;
    let answer = search(&backend, &name, query, explain).await?;
    count_query(mode);
    Ok(Json(answer))
}

fn count_query(mode: SearchMode) {
    metrics::counter!("ragstone_queries_total", "mode" => mode.name()).increment(1);
}

#[derive(Serialize, ToSchema)]
pub(super) struct QueryReady {
    status: &'static str,
    collections: u64,
}

/// Whether queries can be asked, and of how many collections.
#[utoipa::path(get, path = "/query", tag = "search", responses((status = 200, body = QueryReady)))]
pub(super) async fn ready(State(state): State<AppState>) -> Result<Json<QueryReady>, ApiError> {
    let health = state.service.store.health().await?;
    Ok(Json(QueryReady {
        status: "ready",
        collections: health.collections,
    }))
}
