//! `/rag/retrieve`: agent memory and collections, searched at once.

use axum::Json;
use axum::extract::State;
use ragstone_core::document::Metadata;
use ragstone_memory::{Retrieval, RetrievedItem};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::JsonBody;
use super::state::AppState;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"query": "when do we deploy?", "limit": 5, "session_key": "chat-17"}))]
pub(super) struct RetrieveBody {
    query: String,
    /// `knowledge`, `observation`, `reflection`, `learning`, and names of collections; as configured unless given.
    collections: Option<Vec<String>>,
    /// How many results; as configured unless given.
    limit: Option<i64>,
    /// Leave out observations and reflections of other sessions.
    session_key: Option<String>,
    /// Leave out results with a larger distance; 0 means off, and as configured unless given.
    max_distance: Option<f32>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct RetrieveAnswer {
    /// By ascending distance.
    results: Vec<FoundBody>,
    /// Collections that could not be searched.
    warnings: Vec<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"collection": "knowledge", "id": "deploy-steps", "content": "Deploy on Tuesdays.", "distance": 0.21, "metadata": {"category": "process"}}))]
pub(super) struct FoundBody {
    collection: String,
    id: String,
    content: String,
    /// Cosine distance, 0 to 2.
    distance: f32,
    #[schema(value_type = Object)]
    metadata: Metadata,
}

impl From<RetrievedItem> for FoundBody {
    fn from(found: RetrievedItem) -> Self {
        Self {
            collection: found.collection,
            id: found.id,
            content: found.content,
            distance: found.distance,
            metadata: found.metadata,
        }
    }
}

/// Find what memory and collections know about a question.
#[utoipa::path(
    post, path = "/rag/retrieve", tag = "memory", request_body = RetrieveBody,
    responses(
        (status = 200, body = RetrieveAnswer),
        (status = 400, body = ErrorBody, description = "The query is empty, or a field breaks a rule"),
        (status = 429, body = ErrorBody, description = "The embedding model is overloaded; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The embedding provider does not answer, does not take the configured key, or gives no usable answer"),
        (status = 503, body = ErrorBody, description = "Embedding is not configured; or, with Retry-After, its provider or the store has too much to do"),
    ),
)]
pub(super) async fn retrieve(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<RetrieveBody>,
) -> Result<Json<RetrieveAnswer>, ApiError> {
    let Some(rag) = &state.agent.rag else {
        return Err(ApiError::not_configured(
            "Embedding is disabled: set embedding.providerID to an entry of providers, or embedding.provider to 'local' \
             or 'in-process', in the configuration file",
        ));
    };
    let most = state.limits.top_k;
    let limit = match body.limit {
        None => None,
        Some(limit) => Some(
            usize::try_from(limit)
                .ok()
                .filter(|limit| (1..=most).contains(limit))
                .ok_or_else(|| {
                    ApiError::bad_request(format!("'limit' must be from 1 to {most}, not {limit}"))
                })?,
        ),
    };
    let retrieval = Retrieval {
        query: body.query,
        collections: body.collections,
        limit,
        session_key: body.session_key.filter(|key| !key.is_empty()),
        max_distance: body.max_distance,
    };
    let retrieved = rag.retrieve(&retrieval).await?;
    Ok(Json(RetrieveAnswer {
        results: retrieved.found.into_iter().map(Into::into).collect(),
        warnings: retrieved.warnings,
    }))
}
