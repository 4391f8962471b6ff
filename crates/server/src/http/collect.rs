//! `/api/rag/collect`: what a message is about, from many collections at once.

use axum::Json;
use axum::extract::State;
use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::search::SearchMode;
use ragstone_search::conversations::{self, ConversationId};
use ragstone_search::fanout::{self, FanoutHit, FanoutQuery, FanoutResponse, ModeChoice, Target};
use ragstone_search::plan::{Plan, by_topic};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::documents::DocumentBody;
use super::error::{ApiError, ErrorBody};
use super::extract::{JsonBody, objects};
use super::query::{ExpandBody, MAX_COLLECTIONS, check_top_k, document_bodies};
use super::scope::named;
use super::state::AppState;

const DEFAULT_TOP_K: usize = 5;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({
    "user_message": "Does it integrate with OpenShift AI?", "current_topic": "InstructLab",
    "topic": "InstructLab and OpenShift AI integration", "collections": [{"service": "local", "name": "manuals"}], "top_k": 5,
}))]
pub(super) struct CollectBody {
    /// What the user typed.
    user_message: String,
    /// The topic before this message; empty or absent for the first one, which is searched for as it is.
    current_topic: Option<String>,
    /// The topic with this message worked in, which a follow-up is searched by.
    topic: Option<String>,
    /// With it the server keeps the topic itself, and the two fields above are ignored.
    conversation_id: Option<String>,
    #[serde(deserialize_with = "objects")]
    collections: Vec<CollectionChoice>,
    /// How many results of all collections together; 5 unless given, or fewer where the server allows no more.
    top_k: Option<i64>,
    /// `dense`, `keyword` or `hybrid`, for services that have it. Unless given: `dense`, and in a
    /// conversation `hybrid` for services that rank by words.
    mode: Option<String>,
    /// Reorder by a cross-encoder: that of this server, or of the one service that all results are from.
    rerank: Option<bool>,
    /// Also return the documents that share this metadata field with a result.
    expand: Option<ExpandBody>,
}

#[derive(Deserialize, ToSchema)]
pub(super) struct CollectionChoice {
    service: Option<String>,
    name: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "strategy": "follow-up (contextualized topic)", "query_text": "InstructLab and OpenShift AI integration",
    "queries": [{"text": "InstructLab and OpenShift AI integration", "weight": 1.0}],
    "topic": "InstructLab and OpenShift AI integration", "result": "match", "reranked": false, "warnings": [],
    "results": [{"id": "intro", "text": "InstructLab runs on OpenShift AI.", "metadata": {}, "distance": 0.21, "score": 0.895,
        "service": "local", "collection": "manuals", "result": "match"}],
}))]
pub(super) struct CollectAnswer {
    /// `first message (raw query)` or `follow-up (contextualized topic)`.
    strategy: &'static str,
    /// What was searched for. In a conversation, distances and verdicts are those to this wording.
    query_text: String,
    /// All wordings that were searched for, the one that counts most first.
    queries: Vec<WordingBody>,
    /// The topic as it stands after this message; null where there is none.
    topic: Option<String>,
    /// How good the best result is, by the `match_threshold` and `partial_threshold` (cosine distances)
    /// in the metadata of its collection: `match`, `partial` or `none`.
    result: &'static str,
    /// Best first.
    results: Vec<CollectResult>,
    /// Whether reranking was asked for and done.
    reranked: bool,
    /// Collections that could not be searched, and whatever else could not be done as asked.
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
struct WordingBody {
    text: String,
    /// How likely it is the right one; all of them add up to 1.
    weight: f64,
}

#[derive(Serialize, ToSchema)]
struct CollectResult {
    #[serde(flatten)]
    document: DocumentBody,
    /// Cosine distance to `query_text`, 0 to 2; null where the service ranked by something else, or where
    /// only another wording found it.
    distance: Option<f32>,
    score: Option<f32>,
    service: String,
    collection: String,
    /// How good this one is, by the thresholds of its collection.
    result: &'static str,
    /// BM25; only where the collection was searched by words too.
    #[serde(skip_serializing_if = "Option::is_none")]
    keyword_score: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rerank_score: Option<f32>,
    /// The place before reranking, counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    original_rank: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    siblings: Option<Vec<DocumentBody>>,
}

impl CollectResult {
    fn new(found: FanoutHit, targets: &[Target]) -> Self {
        let FanoutHit { target, hit, grade } = found;
        let target = &targets[target];
        Self {
            distance: hit.distance,
            score: hit.score(),
            service: target.service.name.clone(),
            collection: target.name.to_string(),
            result: grade.name(),
            keyword_score: hit.ranks.keyword.map(|rank| rank.score),
            rerank_score: hit.rerank.map(|reranked| reranked.score),
            original_rank: hit.rerank.map(|reranked| reranked.original_rank),
            siblings: hit.siblings.map(document_bodies),
            document: hit.document.into(),
        }
    }
}

impl CollectAnswer {
    fn new(plan: Plan, targets: &[Target], response: FanoutResponse) -> Self {
        let place = |target: usize| format!("{}/{}", targets[target].service.name, targets[target].name);
        let result = response.grade().name();
        let mut warnings: Vec<String> = response
            .failures
            .iter()
            .map(|(target, error)| format!("{}: {}", place(*target), error.public()))
            .collect();
        for warning in response.warnings {
            warnings.push(match warning.target {
                Some(target) => format!("{}: {}", place(target), warning.message),
                None => warning.message,
            });
        }
        warnings.extend(plan.warnings.iter().cloned());
        Self {
            strategy: plan.strategy.name(),
            query_text: plan.query_text().to_owned(),
            queries: plan
                .queries
                .into_iter()
                .map(|query| WordingBody {
                    text: query.text,
                    weight: query.weight,
                })
                .collect(),
            topic: plan.topic,
            result,
            results: response
                .hits
                .into_iter()
                .map(|hit| CollectResult::new(hit, targets))
                .collect(),
            reranked: response.reranked,
            warnings,
        }
    }
}

/// Find what a message of a conversation is about, in many collections at once.
#[utoipa::path(
    post, path = "/api/rag/collect", tag = "gateway", request_body = CollectBody,
    responses(
        (status = 200, body = CollectAnswer, description = "Also when some collections could not be searched: the warnings say so"),
        (status = 400, body = ErrorBody, description = "Something required is missing or malformed"),
        (status = 404, body = ErrorBody, description = "No such service, or no such collection where no other could be searched"),
        (status = 429, body = ErrorBody, description = "No collection could be searched: the first one's service, or a model's queue, is full; see Retry-After"),
        (status = 502, body = ErrorBody, description = "No collection could be searched: the first one's service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "No collection could be searched: the first one's service does not answer in time"),
    ),
)]
pub(super) async fn collect(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<CollectBody>,
) -> Result<Json<CollectAnswer>, ApiError> {
    if body.user_message.trim().is_empty() {
        return Err(ApiError::bad_request("'user_message' must not be empty"));
    }
    let top_k = check_top_k(body.top_k, DEFAULT_TOP_K, &state.limits)?;
    let mode = match &body.mode {
        Some(name) => ModeChoice::Given(SearchMode::parse(name)?),
        None if body.conversation_id.is_some() => ModeChoice::Best,
        None => ModeChoice::Given(SearchMode::Dense),
    };
    let targets = targets(&state, body.collections)?;
    let now = conversations::now();
    let step = match body.conversation_id {
        Some(id) => {
            let id = ConversationId::parse(id)?;
            Some(conversations::plan(&state.conversations, &id, &body.user_message, now).await?)
        }
        None => None,
    };
    let plan = match &step {
        Some(step) => step.plan.clone(),
        None => by_topic(
            &body.user_message,
            body.current_topic.as_deref(),
            body.topic.as_deref(),
        ),
    };
    plan.log();
    let mut query = FanoutQuery::for_plan(&plan, targets, top_k, mode, state.gateway.local().clone());
    query.options.rerank = body.rerank.unwrap_or(false);
    query.options.expand = body.expand.map(Into::into);
    let mut response = fanout::search(&query).await;
    if response.failed() {
        let (_, error) = response.failures.swap_remove(0);
        return Err(error.into());
    }
    if let Some(step) = step {
        conversations::keep(&state.conversations, step, now).await?;
    }
    metrics::counter!("ragstone_collects_total", "result" => response.grade().name()).increment(1);
    Ok(Json(CollectAnswer::new(plan, &query.targets, response)))
}

/// The collections that are named, each once.
fn targets(state: &AppState, choices: Vec<CollectionChoice>) -> Result<Vec<Target>, ApiError> {
    if choices.is_empty() {
        return Err(ApiError::bad_request(
            "'collections' must name at least one collection",
        ));
    }
    if choices.len() > MAX_COLLECTIONS {
        let message = format!(
            "'collections' names {} collections; at most {MAX_COLLECTIONS} are allowed",
            choices.len()
        );
        return Err(ApiError::bad_request(message));
    }
    let mut targets: Vec<Target> = Vec::with_capacity(choices.len());
    for (index, choice) in choices.into_iter().enumerate() {
        let service = named(state, choice.service.as_deref())?.clone();
        let missing = || {
            InvalidInput::new(format!(
                "Collection at index {index} missing required 'name' field"
            ))
        };
        let name = CollectionName::parse(choice.name.ok_or_else(missing)?)?;
        if !targets
            .iter()
            .any(|known| known.service.name == service.name && known.name == name)
        {
            targets.push(Target { service, name });
        }
    }
    Ok(targets)
}
