//! `/query`: search over one collection or several.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use ragstone_core::collection::{CollectionName, shorten};
use ragstone_core::document::{DocumentId, Metadata};
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::fusion::{FusionWeights, Rank};
use ragstone_core::provider::ProviderQuery;
use ragstone_rag::search::{self, Answer, Expand, Hit, Mode, Query, TopK};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::documents::DocumentBody;
use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, JsonBody};
use super::state::{AppState, Limits};

const DEFAULT_TOP_K: usize = 3;
pub(super) const MAX_COLLECTIONS: usize = 64;
const MAX_IDS: usize = 1000;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"collection": "manuals", "query": "how long are logs kept?", "top_k": 5, "mode": "hybrid", "where": {"chapter": 1}}))]
pub(super) struct QueryBody {
    /// Which service the collection is in; only for the gateway.
    pub(super) service: Option<String>,
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

#[derive(Serialize, Deserialize, ToSchema)]
pub(super) struct WeightsBody {
    dense: Option<f64>,
    keyword: Option<f64>,
}

#[derive(Serialize, Deserialize, ToSchema)]
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

/// The documents that a search is confined to.
fn among(ids: Vec<String>) -> Result<Vec<DocumentId>, InvalidInput> {
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

/// What is searched: one collection, or several as they were written and as they were understood.
enum Target {
    One(CollectionName),
    Several(Vec<(String, Result<CollectionName, InvalidInput>)>),
}

fn several(names: Vec<String>) -> Result<Target, InvalidInput> {
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
    Ok(Target::Several(names.into_iter().map(parsed).collect()))
}

impl QueryBody {
    fn target(&mut self) -> Result<Target, InvalidInput> {
        match (self.collection.take(), self.collections.take()) {
            (Some(_), Some(_)) => Err(InvalidInput::new(
                "Give either 'collection' or 'collections', not both",
            )),
            (Some(name), None) => Ok(Target::One(CollectionName::parse(name)?)),
            (None, Some(names)) => several(names),
            (None, None) => Err(InvalidInput::new("Field 'collection' is required")),
        }
    }

    /// The same query for any backend: checked here, with the options as they were sent.
    pub(super) fn for_backend(self, limits: &Limits) -> Result<ProviderQuery, InvalidInput> {
        let sent = [
            ("mode", json!(self.mode)),
            ("weights", json!(self.weights)),
            ("rerank", json!(self.rerank)),
            ("expand", json!(self.expand)),
            ("explain", json!(self.explain)),
        ];
        let given = sent.into_iter().filter(|(_, option)| !option.is_null());
        let options = given.map(|(name, option)| (name.to_owned(), option)).collect();
        let query = self.check(limits)?;
        Ok(ProviderQuery {
            text: query.text,
            vector: query.vector,
            vector_by: None,
            top_k: query.top_k,
            filter: query.filter,
            among: query.among,
            max_distance: query.max_distance,
            options,
        })
    }

    fn check(self, limits: &Limits) -> Result<Query, InvalidInput> {
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
        Query {
            text: self.query,
            vector: self.query_embedding,
            top_k,
            top_k_of: if self.per_collection.unwrap_or(false) {
                TopK::EachCollection
            } else {
                TopK::AllTogether
            },
            filter: Filter::parse(&self.filter.unwrap_or(Value::Null))?,
            among: self.ids.map(among).transpose()?,
            max_distance,
            mode: self.mode.as_deref().map_or(Ok(Mode::Dense), Mode::parse)?,
            weights,
            rerank: self.rerank.unwrap_or(false),
            expand: self.expand.map(Into::into),
        }
        .check()
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
    dense: Option<Place>,
    #[serde(skip_serializing_if = "Option::is_none")]
    keyword: Option<Place>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fused: Option<Place>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rerank: Option<Place>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Place {
    /// Counted from 1.
    rank: usize,
    score: f64,
}

impl From<Rank> for Place {
    fn from(stage: Rank) -> Self {
        Self {
            rank: stage.rank,
            score: stage.score,
        }
    }
}

fn result_body(place: usize, hit: Hit, several: bool, explain: bool) -> ResultBody {
    let explain = explain.then(|| Explanation {
        dense: hit.ranks.dense.map(Into::into),
        keyword: hit.ranks.keyword.map(Into::into),
        fused: hit.ranks.fused.map(Into::into),
        rerank: hit.rerank.map(|reranked| Place {
            rank: place + 1,
            score: reranked.score.into(),
        }),
    });
    ResultBody {
        document: hit.document.into(),
        collection: several.then(|| hit.collection.to_string()),
        distance: hit.distance,
        score: hit.distance.map(|distance| 1.0 - distance / 2.0),
        keyword_score: hit.ranks.keyword.map(|stage| stage.score),
        rerank_score: hit.rerank.map(|reranked| reranked.score),
        original_rank: hit.rerank.map(|reranked| reranked.original_rank),
        siblings: hit.siblings.map(|siblings| {
            siblings
                .into_iter()
                .map(|d| Arc::unwrap_or_clone(d).into())
                .collect()
        }),
        explain,
    }
}

fn answer_body(answer: Answer, query: &Query, several: bool, explain: bool) -> QueryAnswer {
    let collection_metadata = if several {
        answer
            .collections
            .into_iter()
            .map(|(name, metadata)| (name.to_string(), Value::Object(metadata)))
            .collect()
    } else {
        answer
            .collections
            .into_iter()
            .next()
            .map(|(_, metadata)| metadata)
            .unwrap_or_default()
    };
    let millis = |time: std::time::Duration| Value::from((time.as_secs_f64() * 1e6).round() / 1e3);
    QueryAnswer {
        collection_metadata,
        reranked: query.rerank.then_some(answer.reranked),
        warnings: answer.warnings,
        failures: answer
            .failures
            .into_iter()
            .map(|(collection, error)| Failure {
                collection,
                detail: ApiError::from(error).into_detail(),
            })
            .collect(),
        timings_ms: explain.then(|| {
            answer
                .stages
                .iter()
                .map(|time| (time.stage.to_owned(), millis(time.took)))
                .collect()
        }),
        results: answer
            .hits
            .into_iter()
            .enumerate()
            .map(|(place, hit)| result_body(place, hit, several, explain))
            .collect(),
    }
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
    let target = body.target()?;
    let query = body.check(&state.limits)?;
    let several = matches!(target, Target::Several(_));
    let answer = match target {
        Target::One(name) => search::search(&state.service, &name, &query).await?,
        Target::Several(names) => search::search_several(&state.service, names, &query).await?,
    };
    count_query(&query);
    Ok(Json(answer_body(answer, &query, several, explain)))
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
    JsonBody(body): JsonBody<QueryBody>,
) -> Result<Json<QueryAnswer>, ApiError> {
    let explain = body.explain.unwrap_or(false);
    let query = body.check(&state.limits)?;
    let answer = search::search(&state.service, &name, &query).await?;
    count_query(&query);
    Ok(Json(answer_body(answer, &query, false, explain)))
}

fn count_query(query: &Query) {
    metrics::counter!("ragstone_queries_total", "mode" => query.mode.name()).increment(1);
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
