//! `/api/providers` and `/api/services`: what can be connected, and what is.

use axum::Json;
use axum::extract::State;
use ragstone_core::backend::{Capability, Health, HealthStatus};
use ragstone_core::document::Metadata;
use ragstone_providers::config::ServiceConfig;
use ragstone_providers::registry::{ProviderDescription, ProviderKind};
use ragstone_search::gateway::all_health;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{JsonBody, PathText};
use super::state::AppState;

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"providers": [{
    "id": "chromadb-wrapper", "display_name": "Ragstone service", "description": "A server that speaks the service routes",
    "capabilities": ["collections", "search", "embeddings", "metadata_filtering", "rerank", "keyword_search"]}]}))]
pub(super) struct ProviderList {
    /// Each with `id`, `display_name`, `description` and `capabilities`.
    #[schema(value_type = Vec<Object>)]
    providers: Vec<ProviderDescription>,
}

/// The kinds of backend that a service can be of.
#[utoipa::path(get, path = "/api/providers", tag = "gateway", responses((status = 200, body = ProviderList)))]
pub(super) async fn list(State(state): State<AppState>) -> Json<ProviderList> {
    let providers = state
        .gateway
        .registry()
        .kinds()
        .map(|kind| kind.description.clone())
        .collect();
    Json(ProviderList { providers })
}

/// What a connection of this kind needs, as a JSON Schema that a form can be drawn from.
#[utoipa::path(
    get, path = "/api/providers/{id}/schema", tag = "gateway",
    params(("id" = String, Path, description = "The kind of backend")),
    responses((status = 200, body = Object), (status = 404, body = ErrorBody, description = "No such kind of backend")),
)]
pub(super) async fn schema(
    State(state): State<AppState>,
    PathText(id): PathText,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(kind(&state, &id)?.schema.clone()))
}

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"config": {"url": "http://localhost:5006", "timeoutMs": 5000}}))]
pub(super) struct TestConnection {
    /// A connection as the schema describes it.
    #[schema(value_type = Object)]
    config: Metadata,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "status": "healthy", "message": "the service is healthy", "timestamp": "2026-01-01T12:00:00Z", "latency_ms": 1.4,
    "details": {"version": "0.1.0", "collections_count": 2, "storage_bytes": 1_048_576},
}))]
pub(super) struct HealthBody {
    /// `healthy`, `degraded` or `unhealthy`.
    #[schema(value_type = String)]
    status: HealthStatus,
    message: String,
    timestamp: String,
    /// How long it took to find out.
    latency_ms: f64,
    /// Facts of the service, each where it is known: `version`, `collections_count`, `storage_bytes`,
    /// `embedding_models`, `cross_encoder`, `error`.
    #[schema(value_type = Object)]
    details: Metadata,
}

impl From<Health> for HealthBody {
    fn from(health: Health) -> Self {
        Self {
            status: health.status,
            message: health.message,
            timestamp: health.timestamp,
            latency_ms: health.latency_ms,
            details: health.details,
        }
    }
}

/// Try a connection before it is configured. A connection that does not work is an `unhealthy` answer.
#[utoipa::path(
    post, path = "/api/providers/{id}/test", tag = "gateway", request_body = TestConnection,
    params(("id" = String, Path, description = "The kind of backend")),
    responses(
        (status = 200, body = HealthBody),
        (status = 400, body = ErrorBody, description = "The configuration does not fit the schema; the message names the field"),
        (status = 404, body = ErrorBody, description = "No such kind of backend"),
    ),
)]
pub(super) async fn test(
    State(state): State<AppState>,
    PathText(id): PathText,
    JsonBody(body): JsonBody<TestConnection>,
) -> Result<Json<HealthBody>, ApiError> {
    kind(&state, &id)?;
    let config = ServiceConfig {
        provider: id,
        connection: body.config,
    };
    Ok(Json(state.gateway.try_connection(&config).await?.into()))
}

fn kind<'a>(state: &'a AppState, id: &str) -> Result<&'a ProviderKind, ApiError> {
    let unknown = || {
        ApiError::not_found(format!(
            "Provider \"{}\" not found",
            ragstone_core::collection::shorten(id)
        ))
    };
    state.gateway.registry().kind(id).ok_or_else(unknown)
}

#[derive(Serialize, ToSchema)]
pub(super) struct ServiceList {
    services: Vec<ServiceBody>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "name": "local", "provider": "local", "capabilities": ["collections", "search"],
    "health": {"status": "healthy", "message": "The service answers", "timestamp": "2026-01-01T12:00:00Z", "latency_ms": 0.2, "details": {}},
}))]
struct ServiceBody {
    name: String,
    provider: String,
    /// What it can do as it is: without models, it neither embeds nor reranks.
    #[schema(value_type = Vec<String>)]
    capabilities: Vec<Capability>,
    health: HealthBody,
}

/// The services that are configured, and how each of them is.
#[utoipa::path(get, path = "/api/services", tag = "gateway", responses((status = 200, body = ServiceList)))]
pub(super) async fn services(State(state): State<AppState>) -> Json<ServiceList> {
    let services = all_health(&state.gateway)
        .await
        .into_iter()
        .map(|(service, health)| ServiceBody {
            name: service.name.clone(),
            provider: service.provider.clone(),
            capabilities: health.capabilities(service.backend.capabilities()),
            health: health.into(),
        })
        .collect();
    Json(ServiceList { services })
}
