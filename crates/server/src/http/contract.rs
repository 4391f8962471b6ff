//! The embedding service contract: chunks of knowledge bases, each content embedded once.

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use ragstone_core::document::Metadata;
use ragstone_ingest::ledger::{self, ChunkRequest, EmbeddingRequest};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::embeddings::truncated_header;
use super::error::{ApiError, ErrorBody};
use super::extract::{JsonBody, Params, optional_objects};
use super::state::AppState;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"knowledgebase_id": "handbook", "chunks": [
    {"chunk_id": "c1", "content": "Open the dome at dusk.", "content_hash": "9f86d081"}]}))]
pub(super) struct EmbeddingsBody {
    #[schema(required = true)]
    knowledgebase_id: Option<String>,
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(required = true, nullable = false)]
    chunks: Option<Vec<ChunkBody>>,
    /// The id of a loaded model; the first one by default.
    model_id: Option<String>,
    /// Return the vectors of skipped chunks too. With it, a request can be repeated if its answer was lost.
    #[serde(default)]
    include_vectors: bool,
}

#[derive(Deserialize, ToSchema)]
pub(super) struct ChunkBody {
    #[schema(required = true)]
    chunk_id: Option<String>,
    #[schema(required = true)]
    content: Option<String>,
    /// Identifies the content. The client may use any hash.
    #[schema(required = true)]
    content_hash: Option<String>,
    /// Accepted and not stored.
    #[schema(value_type = Option<Object>)]
    #[allow(dead_code, reason = "part of the contract; its type is checked")]
    metadata: Option<Metadata>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct EmbeddingsAnswer {
    /// One for each chunk that was not skipped.
    embeddings: Vec<ChunkEmbeddingBody>,
    /// Content that has an embedding already, with that embedding's id.
    skipped: Vec<SkippedBody>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ChunkEmbeddingBody {
    embedding_id: String,
    chunk_id: String,
    knowledgebase_id: String,
    content_hash: String,
    model_id: String,
    model_version: String,
    vector_dimension: usize,
    vector: Vec<f32>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct SkippedBody {
    chunk_id: String,
    embedding_id: String,
    /// Only with `include_vectors`.
    #[serde(skip_serializing_if = "Option::is_none")]
    vector: Option<Vec<f32>>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct KnowledgeBaseDeleted {
    status: &'static str,
    knowledgebase_id: String,
    /// Embeddings that were deleted.
    deleted: u64,
}

/// Embed the chunks of a knowledge base. Skips content that the same version of the same model has
/// embedded before.
#[utoipa::path(
    post, path = "/embeddings", tag = "models", request_body = EmbeddingsBody,
    responses(
        (status = 200, body = EmbeddingsAnswer, headers(("x-ragstone-truncated" = String,
            description = "Indexes of the chunks that were truncated to the model's limit, such as `0,3`; the first 200, \
                then `...`. Absent if none was truncated"))),
        (status = 400, body = ErrorBody, description = "A field is missing or too long; the message has the chunk's index"),
        (status = 413, body = ErrorBody, description = "The body is too large"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 503, body = ErrorBody, description = "The model is not loaded"),
    ),
)]
pub(super) async fn embeddings(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<EmbeddingsBody>,
) -> Result<(HeaderMap, Json<EmbeddingsAnswer>), ApiError> {
    if body
        .knowledgebase_id
        .as_ref()
        .is_some_and(|id| !id.trim().is_empty())
        && body.chunks.is_none()
    {
        return Err(ApiError::bad_request("chunks is required"));
    }
    let chunks = body.chunks.unwrap_or_default();
    if chunks.len() > state.limits.add_documents {
        return Err(ApiError::bad_request(format!(
            "{} chunks in one request; at most {} are allowed: send them in several",
            chunks.len(),
            state.limits.add_documents
        )));
    }
    let request = EmbeddingRequest {
        knowledgebase_id: body.knowledgebase_id,
        model_id: body.model_id,
        include_vectors: body.include_vectors,
        chunks: chunks
            .into_iter()
            .map(|chunk| ChunkRequest {
                chunk_id: chunk.chunk_id,
                content: chunk.content,
                content_hash: chunk.content_hash,
            })
            .collect(),
    };
    let embedded = ledger::embed_chunks(&state.service.models, &state.ledger, request).await?;
    let headers = truncated_header(&embedded.truncated);
    let answer = EmbeddingsAnswer {
        embeddings: embedded
            .embeddings
            .into_iter()
            .map(|chunk| ChunkEmbeddingBody {
                embedding_id: chunk.embedding_id,
                chunk_id: chunk.chunk_id,
                knowledgebase_id: chunk.knowledgebase_id,
                content_hash: chunk.content_hash,
                model_id: chunk.model_id,
                model_version: chunk.model_version,
                vector_dimension: chunk.vector.len(),
                vector: chunk.vector,
            })
            .collect(),
        skipped: embedded
            .skipped
            .into_iter()
            .map(|skipped| SkippedBody {
                chunk_id: skipped.chunk_id,
                embedding_id: skipped.embedding_id,
                vector: skipped.vector,
            })
            .collect(),
    };
    Ok((headers, Json(answer)))
}

/// Delete all embeddings of a knowledge base from the ledger. Its content is embedded anew when it is
/// sent again.
#[utoipa::path(
    delete, path = "/embeddings", tag = "models",
    params(("knowledgebase_id" = String, Query, description = "The knowledge base")),
    responses(
        (status = 200, body = KnowledgeBaseDeleted),
        (status = 400, body = ErrorBody, description = "`knowledgebase_id` is missing"),
    ),
)]
pub(super) async fn delete_knowledge_base(
    State(state): State<AppState>,
    params: Params,
) -> Result<Json<KnowledgeBaseDeleted>, ApiError> {
    let knowledgebase_id = params
        .get("knowledgebase_id")
        .filter(|id| !id.trim().is_empty())
        .ok_or_else(|| ApiError::bad_request("Query parameter 'knowledgebase_id' is required"))?
        .to_owned();
    let deleted = state.ledger.forget_knowledge_base(&knowledgebase_id).await?;
    Ok(Json(KnowledgeBaseDeleted {
        status: "deleted",
        knowledgebase_id,
        deleted,
    }))
}
