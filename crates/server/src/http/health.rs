//! Health, readiness and metrics, for people, probes and dashboards.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use ragstone_core::storage::VectorPrecision;
use ragstone_models::hub::ModelSource;
use serde::Serialize;
use utoipa::ToSchema;

use super::auth::is_authorized;
use super::error::{ApiError, ErrorBody};
use super::state::AppState;

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "status": "healthy", "timestamp": "2026-01-01T12:00:00Z", "version": "0.1.0", "collections_count": 2,
    "storage_bytes": 1_048_576, "embedding_models": [
        {"id": "minilm", "name": "sentence-transformers/all-MiniLM-L6-v2", "status": "loaded", "dimensions": 384}],
}))]
pub(super) struct Health {
    /// `healthy`, or `degraded` when the store does not answer.
    status: &'static str,
    /// RFC 3339, UTC.
    timestamp: String,
    version: &'static str,
    collections_count: u64,
    storage_bytes: u64,
    /// The engine that stores the documents; absent for the embedded store.
    #[serde(skip_serializing_if = "Option::is_none")]
    store: Option<StoreEngine>,
    /// Absent when no embedding model is loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    embedding_models: Vec<LoadedModel>,
    /// Absent when no cross-encoder is loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    cross_encoder: Option<LoadedCrossEncoder>,
}

#[derive(Serialize, ToSchema)]
struct StoreEngine {
    engine: &'static str,
    /// Features that it lacks, or guarantees less strictly than the embedded store.
    limitations: &'static [&'static str],
    /// Whether it rounds the last bits of vectors.
    rounds_vectors: bool,
}

#[derive(Serialize, ToSchema)]
struct LoadedModel {
    id: String,
    name: String,
    status: &'static str,
    dimensions: usize,
}

#[derive(Serialize, ToSchema)]
struct LoadedCrossEncoder {
    model: String,
    status: &'static str,
}

/// The name of a model without the directory it was loaded from. Whoever has no key learns nothing about
/// the machine.
fn without_path(name: &str) -> String {
    match ModelSource::parse(name) {
        ModelSource::Directory(path) => path
            .file_name()
            .map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned()),
        ModelSource::Hub { .. } => name.to_owned(),
    }
}

/// Health, models and size of the service. Without a valid API key, models that were loaded from a
/// directory appear without their path.
#[utoipa::path(get, path = "/health", tag = "service", responses((status = 200, body = Health)), security(()))]
pub(super) async fn health(State(state): State<AppState>, headers: HeaderMap) -> Json<Health> {
    let shows_paths = is_authorized(&state, &headers);
    let shown = |name: &str| {
        if shows_paths {
            name.to_owned()
        } else {
            without_path(name)
        }
    };
    let store = state.service.store.health().await;
    if let Err(error) = &store {
        tracing::warn!(%error, "the store does not answer the health check");
    }
    let embedding_models = state
        .service
        .models
        .embedders()
        .map(|embedder| {
            let info = embedder.info();
            LoadedModel {
                id: info.identity.id.clone(),
                name: shown(&info.name),
                status: "loaded",
                dimensions: info.identity.dimensions,
            }
        })
        .collect();
    let cross_encoder = state
        .service
        .models
        .reranker()
        .ok()
        .map(|reranker| LoadedCrossEncoder {
            model: shown(reranker.name()),
            status: "loaded",
        });
    let facts = store.as_ref().ok();
    Json(Health {
        status: if facts.is_some() { "healthy" } else { "degraded" },
        timestamp: jiff::Timestamp::now().to_string(),
        version: env!("CARGO_PKG_VERSION"),
        collections_count: facts.map_or(0, |facts| facts.collections),
        storage_bytes: facts.map_or(0, |facts| facts.storage_bytes),
        store: facts.and_then(|facts| facts.engine).map(|engine| StoreEngine {
            engine: engine.name,
            limitations: engine.limitations,
            rounds_vectors: engine.vectors == VectorPrecision::Rounded,
        }),
        embedding_models,
        cross_encoder,
    })
}

#[derive(Serialize, ToSchema)]
pub(super) struct Probe {
    status: &'static str,
}

/// The process is running.
#[utoipa::path(get, path = "/livez", tag = "service", responses((status = 200, body = Probe)), security(()))]
pub(super) async fn livez() -> Json<Probe> {
    Json(Probe { status: "alive" })
}

/// The service is ready: its store answers, and it is not stopping.
#[utoipa::path(
    get, path = "/readyz", tag = "service", security(()),
    responses((status = 200, body = Probe), (status = 503, body = ErrorBody, description = "Stopping, or the store does not answer"))
)]
pub(super) async fn readyz(State(state): State<AppState>) -> Result<Json<Probe>, ApiError> {
    let soon = std::time::Duration::from_secs(1);
    if state.stopping.is_set() {
        return Err(ApiError::busy("The server is stopping", soon));
    }
    match state.service.store.health().await {
        Ok(_) => Ok(Json(Probe { status: "ready" })),
        Err(error) => {
            tracing::warn!(%error, "not ready: the store does not answer");
            Err(ApiError::busy("The store does not answer", soon))
        }
    }
}

/// Counters and timings in the Prometheus text format.
#[utoipa::path(get, path = "/metrics", tag = "service", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(state): State<AppState>) -> Response {
    let text = state.metrics.render();
    (
        StatusCode::OK,
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4")],
        text,
    )
        .into_response()
}
