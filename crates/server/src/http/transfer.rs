//! Documents with their vectors, out of the service and into it, for `ragstone export`, `import` and
//! `copy`.

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::{Cursor, ExportRange};
use ragstone_transfer::{BATCH, DocumentLine, read_documents};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, Params, objects};
use super::scope::{NamesBackend, Scoped, ScopedBackend};
use super::state::AppState;

#[derive(Serialize)]
struct ExportBody<'a> {
    documents: Vec<DocumentLine<'a>>,
    last: Option<i64>,
    more: bool,
}

#[derive(ToSchema)]
#[allow(
    dead_code,
    reason = "describes the answer for the API document; it is an ExportBody"
)]
#[schema(example = json!({
    "documents": [{"id": "intro", "text": "Ragstone keeps documents.", "metadata": {"chapter": 1},
        "embedding": [0.6, 0.8], "norm": 1.0, "model": {"id": "tiny", "version": "5f2c", "dimensions": 2}}],
    "last": 17, "more": false,
}))]
struct ExportPageBody {
    documents: Vec<ExportedDocumentBody>,
    /// Give it as `after` to go on.
    last: Option<i64>,
    /// Whether documents follow.
    more: bool,
}

/// A document with all that is kept of it.
#[derive(ToSchema)]
#[allow(
    dead_code,
    reason = "describes the bodies for the API document; they are DocumentLines"
)]
struct ExportedDocumentBody {
    id: String,
    text: String,
    #[schema(value_type = Option<Object>)]
    metadata: Option<ragstone_core::Metadata>,
    /// Of length one where `norm` is given; then it is kept to the last bit.
    embedding: Vec<f32>,
    /// The length that the embedding was given with.
    norm: Option<f32>,
    model: Option<ExportedModelBody>,
}

/// What made an embedding; absent where the client brought it.
#[derive(ToSchema)]
#[allow(
    dead_code,
    reason = "describes the bodies for the API document; they are DocumentLines"
)]
struct ExportedModelBody {
    id: String,
    version: String,
    dimensions: usize,
}

/// A page of documents with their vectors, in the order of their first insertion.
///
/// A document that is there from the first page to the last is given exactly once. Pages may be
/// smaller than asked for where documents are large.
#[utoipa::path(
    get, path = "/collections/{name}/export", tag = "documents",
    params(
        ("name" = String, Path, description = "The collection"),
        ("after" = Option<i64>, Query, description = "Only documents behind this place: `last` of the page before"),
        ("limit" = Option<u64>, Query, description = "At most so many; 1000 unless given, and at most"),
    ),
    responses(
        (status = 200, body = ExportPageBody),
        (status = 400, body = ErrorBody, description = "A parameter is no number"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn export(
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Response, ApiError> {
    let after = match params.get("after").filter(|text| !text.is_empty()) {
        None => None,
        Some(text) => Some(Cursor(text.parse().map_err(|_| {
            InvalidInput::new("Query parameter 'after' must be the 'last' of an earlier page")
        })?)),
    };
    let limit = params.count("limit", BATCH as u64)?.clamp(1, BATCH as u64) as usize;
    let page = backend
        .backend
        .export(&name, ExportRange { after, limit })
        .await?;
    // Millions of digits are written, which would hold up everybody else on this thread.
    let written = tokio::task::spawn_blocking(move || {
        serde_json::to_vec(&ExportBody {
            documents: page.documents.iter().map(DocumentLine::from).collect(),
            last: page.last.map(|cursor| cursor.0),
            more: page.more,
        })
    });
    let body = written.await.map_err(|error| ApiError::internal(&error))?;
    let body = body.map_err(|error| ApiError::internal(&error))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

#[derive(Deserialize, ToSchema)]
pub(super) struct ImportDocuments {
    /// The service that the collection is in; below `/api` only.
    service: Option<String>,
    #[serde(deserialize_with = "objects")]
    #[schema(value_type = Vec<ExportedDocumentBody>)]
    documents: Vec<DocumentLine<'static>>,
}

impl NamesBackend for ImportDocuments {
    const IS_LARGE: bool = true;

    fn service(&self) -> Option<&str> {
        self.service.as_deref()
    }
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "imported", "collection": "manuals", "count": 1}))]
pub(super) struct DocumentsImported {
    status: &'static str,
    collection: String,
    count: usize,
}

/// Add documents as they were exported, all of them or none. An id that exists is replaced.
#[utoipa::path(
    post, path = "/collections/{name}/import", tag = "documents", request_body = ImportDocuments,
    params(("name" = String, Path, description = "The collection")),
    responses(
        (status = 200, body = DocumentsImported),
        (status = 400, body = ErrorBody, description = "A document breaks a rule; the message has its index"),
        (status = 404, body = ErrorBody),
        (status = 413, body = ErrorBody, description = "The body is too large"),
        (status = 503, body = ErrorBody, description = "The service is busy"),
    ),
)]
pub(super) async fn import(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    Scoped { backend, body }: Scoped<ImportDocuments>,
) -> Result<Json<DocumentsImported>, ApiError> {
    let count = body.documents.len();
    if count > state.limits.add_documents {
        return Err(ApiError::bad_request(format!(
            "{count} documents in one request; at most {} are allowed: send them in several",
            state.limits.add_documents
        )));
    }
    let documents = read_documents(body.documents)?;
    backend.backend.import(&name, documents).await?;
    metrics::counter!("ragstone_documents_added_total").increment(count as u64);
    Ok(Json(DocumentsImported {
        status: "imported",
        collection: name.to_string(),
        count,
    }))
}
