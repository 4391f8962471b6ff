//! Reranking: the service's own route, and the shapes that Cohere's and Jina's clients expect.

use axum::Json;
use axum::extract::State;
use ragstone_core::error::InvalidInput;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{JsonBody, objects};
use super::state::AppState;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"query": "how long are logs kept?", "top_k": 1, "documents": [
    {"id": "a", "text": "Logs are kept for 30 days."}, {"id": "b", "text": "The door is blue."}]}))]
pub(super) struct RerankBody {
    query: String,
    /// At most 10,000, unless the server is configured otherwise.
    #[serde(deserialize_with = "objects")]
    documents: Vec<RerankDocument>,
    /// Return only this many; all unless given.
    top_k: Option<i64>,
}

#[derive(Deserialize, ToSchema)]
pub(super) struct RerankDocument {
    /// Given back as it came; the document's index when absent.
    #[schema(value_type = Option<String>)]
    id: Option<Value>,
    text: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"reranked": [{"id": "a", "score": 0.98, "original_rank": 1}]}))]
pub(super) struct RerankAnswer {
    /// By score, descending.
    reranked: Vec<RerankedDocument>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct RerankedDocument {
    #[schema(value_type = String)]
    id: Value,
    score: f32,
    /// The place in the request, counted from 1.
    original_rank: usize,
}

/// Order documents by how well they answer a query.
#[utoipa::path(
    post, path = "/rerank", tag = "models", request_body = RerankBody,
    responses(
        (status = 200, body = RerankAnswer),
        (status = 400, body = ErrorBody, description = "The query or the documents are missing or malformed"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 500, body = ErrorBody, description = "The model failed; the message says why"),
        (status = 503, body = ErrorBody, description = "No cross-encoder is loaded"),
    ),
)]
pub(super) async fn rerank(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<RerankBody>,
) -> Result<Json<RerankAnswer>, ApiError> {
    let limit = positive(body.top_k, "top_k")?;
    let mut ids = Vec::with_capacity(body.documents.len());
    let mut texts = Vec::with_capacity(body.documents.len());
    for (index, document) in body.documents.into_iter().enumerate() {
        let text = document.text.ok_or_else(|| missing_text(index))?;
        ids.push(
            document
                .id
                .filter(|id| !id.is_null())
                .unwrap_or_else(|| Value::String(index.to_string())),
        );
        texts.push(text);
    }
    let wanted = RerankParams {
        limit,
        max_text_tokens: None,
    };
    let RankedDocuments { order, .. } = ranked(&state, &body.query, texts, wanted).await?;
    let reranked = order
        .into_iter()
        .map(|(index, score)| RerankedDocument {
            id: ids[index].clone(),
            score,
            original_rank: index + 1,
        })
        .collect();
    Ok(Json(RerankAnswer { reranked }))
}

#[derive(Deserialize, ToSchema)]
pub(super) struct CompatibleRerankBody {
    /// Accepted and not looked at: the loaded cross-encoder answers, and the answer names it.
    #[serde(rename = "model")]
    _model: Option<String>,
    query: String,
    /// At most 10,000, unless the server is configured otherwise.
    documents: Vec<TextOrObject>,
    /// Return only this many; all unless given.
    top_n: Option<i64>,
    return_documents: Option<bool>,
    /// Read only this many tokens of each document; the model's own limit counts anyway.
    max_tokens_per_doc: Option<i64>,
}

#[derive(Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected a text or an object with a 'text'")]
pub(super) enum TextOrObject {
    Text(String),
    Object { text: Option<String> },
}

#[derive(Serialize, ToSchema)]
pub(super) struct CompatibleRerankAnswer {
    id: String,
    object: &'static str,
    /// The cross-encoder that is loaded.
    model: String,
    results: Vec<CompatibleResult>,
    /// With the version of the interface and the tokens that were read.
    #[schema(value_type = Object)]
    meta: Value,
    usage: RerankUsage,
}

/// Tokens that the model read, the query's once for every document.
#[derive(Serialize, ToSchema)]
pub(super) struct RerankUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

#[derive(Serialize, ToSchema)]
pub(super) struct CompatibleResult {
    index: usize,
    relevance_score: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<TextDocument>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct TextDocument {
    text: String,
}

/// Rerank in the shape of Cohere's version 2 interface.
#[utoipa::path(
    post, path = "/v2/rerank", tag = "models", request_body = CompatibleRerankBody,
    responses(
        (status = 200, body = CompatibleRerankAnswer), (status = 400, body = ErrorBody),
        (status = 429, body = ErrorBody), (status = 500, body = ErrorBody), (status = 503, body = ErrorBody),
    ),
)]
pub(super) async fn rerank_v2(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<CompatibleRerankBody>,
) -> Result<Json<CompatibleRerankAnswer>, ApiError> {
    compatible(&state, body, "2").await
}

/// Rerank in the shape of Jina's interface, which is also Cohere's version 1.
#[utoipa::path(
    post, path = "/v1/rerank", tag = "models", request_body = CompatibleRerankBody,
    responses(
        (status = 200, body = CompatibleRerankAnswer), (status = 400, body = ErrorBody),
        (status = 429, body = ErrorBody), (status = 500, body = ErrorBody), (status = 503, body = ErrorBody),
    ),
)]
pub(super) async fn rerank_v1(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<CompatibleRerankBody>,
) -> Result<Json<CompatibleRerankAnswer>, ApiError> {
    compatible(&state, body, "1").await
}

async fn compatible(
    state: &AppState,
    body: CompatibleRerankBody,
    version: &str,
) -> Result<Json<CompatibleRerankAnswer>, ApiError> {
    let wanted = RerankParams {
        limit: positive(body.top_n, "top_n")?,
        max_text_tokens: positive(body.max_tokens_per_doc, "max_tokens_per_doc")?,
    };
    let mut texts = Vec::with_capacity(body.documents.len());
    for (index, document) in body.documents.into_iter().enumerate() {
        texts.push(match document {
            TextOrObject::Text(text) | TextOrObject::Object { text: Some(text) } => text,
            TextOrObject::Object { text: None } => return Err(missing_text(index).into()),
        });
    }
    let kept = body.return_documents.unwrap_or(false).then(|| texts.clone());
    let RankedDocuments { order, tokens } = ranked(state, &body.query, texts, wanted).await?;
    let results = order
        .into_iter()
        .map(|(index, relevance_score)| CompatibleResult {
            index,
            relevance_score,
            document: kept.as_ref().map(|texts| TextDocument {
                text: texts[index].clone(),
            }),
        })
        .collect();
    let model = state.service.models.reranker()?.name().to_owned();
    Ok(Json(CompatibleRerankAnswer {
        id: uuid::Uuid::new_v4().to_string(),
        object: "list",
        model,
        results,
        meta: serde_json::json!({
            "api_version": {"version": version},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": tokens},
        }),
        usage: RerankUsage {
            prompt_tokens: tokens,
            total_tokens: tokens,
        },
    }))
}

struct RerankParams {
    limit: Option<usize>,
    max_text_tokens: Option<usize>,
}

#[derive(Default)]
struct RankedDocuments {
    /// The indexes of the texts, best first, with their scores. Equal scores keep the order of the
    /// request.
    order: Vec<(usize, f32)>,
    tokens: usize,
}

async fn ranked(
    state: &AppState,
    query: &str,
    texts: Vec<String>,
    wanted: RerankParams,
) -> Result<RankedDocuments, ApiError> {
    let reranker = state.service.models.reranker()?;
    if query.trim().is_empty() {
        return Err(ApiError::bad_request("'query' must not be empty"));
    }
    if texts.len() > state.limits.rerank_documents {
        return Err(ApiError::bad_request(format!(
            "{} documents in one request; at most {} are allowed: send them in several",
            texts.len(),
            state.limits.rerank_documents
        )));
    }
    if texts.is_empty() {
        return Ok(RankedDocuments::default());
    }
    let scored = reranker.score(query, texts, wanted.max_text_tokens).await?;
    let mut order: Vec<(usize, f32)> = scored.scores.into_iter().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(wanted.limit.unwrap_or(usize::MAX));
    metrics::counter!("ragstone_reranks_total").increment(1);
    Ok(RankedDocuments {
        order,
        tokens: scored.tokens,
    })
}

fn positive(limit: Option<i64>, name: &str) -> Result<Option<usize>, InvalidInput> {
    match limit {
        None => Ok(None),
        Some(n) => usize::try_from(n)
            .ok()
            .filter(|n| *n > 0)
            .map(Some)
            .ok_or_else(|| InvalidInput::new(format!("'{name}' must be 1 or more, not {n}"))),
    }
}

fn missing_text(index: usize) -> InvalidInput {
    InvalidInput::new(format!("Document at index {index} missing required 'text' field"))
}
