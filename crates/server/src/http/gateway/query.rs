//! `/api/collections/{name}/query`.

use axum::Json;
use axum::extract::State;
use ragstone_core::document::Metadata;
use ragstone_core::provider::{ProviderAnswer, ProviderHit};
use serde::Serialize;

use super::super::documents::DocumentBody;
use super::super::error::{ApiError, ErrorBody};
use super::super::extract::{CollectionPath, ServiceJsonBody};
use super::super::query::{QueryAnswer, QueryBody};
use super::super::state::AppState;
use super::{InService, named};

type QueryBodyInService = InService<QueryBody>;

/// A [`QueryAnswer`], whichever backend it comes from: what this program does not know of it is
/// passed on as it is.
#[derive(Serialize)]
pub(crate) struct BackendAnswer {
    results: Vec<BackendHit>,
    collection_metadata: Metadata,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    #[serde(flatten)]
    extra: Metadata,
}

#[derive(Serialize)]
struct BackendHit {
    #[serde(flatten)]
    document: DocumentBody,
    distance: Option<f32>,
    score: Option<f64>,
    #[serde(flatten)]
    extra: Metadata,
}

impl From<ProviderAnswer> for BackendAnswer {
    fn from(answer: ProviderAnswer) -> Self {
        Self {
            results: answer.hits.into_iter().map(Into::into).collect(),
            collection_metadata: answer.collection_metadata,
            warnings: answer.warnings,
            extra: answer.extra,
        }
    }
}

impl From<ProviderHit> for BackendHit {
    fn from(hit: ProviderHit) -> Self {
        Self {
            document: hit.document.into(),
            distance: hit.distance,
            score: hit.score,
            extra: hit.extra,
        }
    }
}

/// Search a collection of a service.
#[utoipa::path(
    post, path = "/api/collections/{name}/query", tag = "gateway", request_body = QueryBodyInService,
    params(("name" = String, Path, description = "The collection")),
    responses(
        (status = 200, body = QueryAnswer),
        (status = 400, body = ErrorBody, description = "No service is named, or the query is incomplete, malformed or more than the service can do"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn query(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    ServiceJsonBody(body): ServiceJsonBody<QueryBody>,
) -> Result<Json<BackendAnswer>, ApiError> {
    let service = named(&state, body.service.as_deref())?;
    let query = body.for_backend(&state.limits)?;
    let answer = service.backend.search(&name, query).await?;
    Ok(Json(answer.into()))
}
