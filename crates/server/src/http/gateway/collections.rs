//! `/api/collections`.

use axum::Json;
use axum::extract::State;
use ragstone_core::provider::{HealthStatus, ProviderError};
use ragstone_rag::gateway::{ServiceCollections, all_collections, collections_of};
use serde::Serialize;
use utoipa::ToSchema;

use super::super::collections::{
    CollectionBody, CollectionDeleted, CreateCollection, Created, MetadataUpdated, UpdateMetadata,
};
use super::super::error::{ApiError, ErrorBody};
use super::super::extract::{CollectionPath, Params, ServiceJsonBody};
use super::super::state::AppState;
use super::{InService, named, named_by_params};

type CreateCollectionInService = InService<CreateCollection>;
type UpdateMetadataInService = InService<UpdateMetadata>;

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "collections": [{"name": "manuals", "service": "local", "count": 1200, "metadata": {"embedding_model": "minilm"}}],
    "services": [
        {"name": "local", "provider": "local", "status": "healthy"},
        {"name": "archive", "provider": "chromadb", "status": "unhealthy", "error": "service 'archive' cannot be reached"}],
}))]
pub(crate) struct AllCollections {
    collections: Vec<ServiceCollection>,
    /// Every service that was asked, also those that did not answer.
    services: Vec<ServiceState>,
}

#[derive(Serialize, ToSchema)]
struct ServiceCollection {
    #[serde(flatten)]
    collection: CollectionBody,
    /// The service it is in.
    service: String,
}

#[derive(Serialize, ToSchema)]
struct ServiceState {
    name: String,
    provider: String,
    /// `healthy`, or `unhealthy` when its collections cannot be listed.
    #[schema(value_type = String)]
    status: HealthStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ServiceState {
    fn of(asked: &ServiceCollections<'_>) -> Self {
        Self {
            name: asked.service.name.clone(),
            provider: asked.service.provider.clone(),
            status: asked.status(),
            error: asked.collections.as_ref().err().map(ProviderError::public),
        }
    }
}

/// List the collections of all services, or of one. One that is down is reported, and the others are listed.
#[utoipa::path(
    get, path = "/api/collections", tag = "gateway",
    params(("service" = Option<String>, Query, description = "Only those of this service")),
    responses(
        (status = 200, body = AllCollections),
        (status = 404, body = ErrorBody, description = "No such service"),
    ),
)]
pub(crate) async fn list(
    State(state): State<AppState>,
    params: Params,
) -> Result<Json<AllCollections>, ApiError> {
    let all_asked = match params.get("service") {
        Some(name) => vec![collections_of(named(&state, Some(name))?).await],
        None => all_collections(&state.gateway).await,
    };
    let mut all = AllCollections {
        collections: Vec::new(),
        services: Vec::new(),
    };
    for asked in all_asked {
        all.services.push(ServiceState::of(&asked));
        let service = &asked.service.name;
        all.collections.extend(
            asked
                .collections
                .into_iter()
                .flatten()
                .map(|collection| ServiceCollection {
                    collection: collection.into(),
                    service: service.clone(),
                }),
        );
    }
    Ok(Json(all))
}

/// Create a collection in a service.
#[utoipa::path(
    post, path = "/api/collections", tag = "gateway", request_body = CreateCollectionInService,
    responses(
        (status = 200, body = Created),
        (status = 400, body = ErrorBody, description = "No service is named, or the name or the metadata breaks a rule"),
        (status = 404, body = ErrorBody, description = "No such service"),
        (status = 409, body = ErrorBody, description = "A collection of this name exists"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    )
)]
pub(crate) async fn create(
    State(state): State<AppState>,
    ServiceJsonBody(body): ServiceJsonBody<CreateCollection>,
) -> Result<Json<Created>, ApiError> {
    let service = named(&state, body.service.as_deref())?;
    let (name, metadata) = body.check()?;
    let metadata = service.backend.create_collection(&name, metadata).await?;
    Ok(Json(Created::new(&name, metadata)))
}

/// Describe a collection of a service.
#[utoipa::path(
    get, path = "/api/collections/{name}", tag = "gateway",
    params(
        ("name" = String, Path, description = "The collection"),
        ("service" = String, Query, description = "The service it is in"),
    ),
    responses(
        (status = 200, body = CollectionBody),
        (status = 400, body = ErrorBody, description = "No service is named"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn show(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<CollectionBody>, ApiError> {
    let service = named_by_params(&state, &params)?;
    Ok(Json(service.backend.collection(&name).await?.into()))
}

/// Delete a collection of a service with all its documents.
#[utoipa::path(
    delete, path = "/api/collections/{name}", tag = "gateway",
    params(
        ("name" = String, Path, description = "The collection"),
        ("service" = String, Query, description = "The service it is in"),
    ),
    responses(
        (status = 200, body = CollectionDeleted),
        (status = 400, body = ErrorBody, description = "No service is named"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn delete(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<CollectionDeleted>, ApiError> {
    let service = named_by_params(&state, &params)?;
    service.backend.delete_collection(&name).await?;
    Ok(Json(CollectionDeleted::new(&name)))
}

/// Replace the metadata of a service's collection, or merge into it.
#[utoipa::path(
    put, path = "/api/collections/{name}/metadata", tag = "gateway", request_body = UpdateMetadataInService,
    params(
        ("name" = String, Path, description = "The collection"),
        ("merge" = Option<bool>, Query, description = "Keep the keys that are not given; may stand in the body instead"),
    ),
    responses(
        (status = 200, body = MetadataUpdated),
        (status = 400, body = ErrorBody, description = "No service is named, no metadata object, or a wrong parameter"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn update_metadata(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
    ServiceJsonBody(body): ServiceJsonBody<UpdateMetadata>,
) -> Result<Json<MetadataUpdated>, ApiError> {
    let service = named(&state, body.service.as_deref())?;
    let update = body.update(&params)?;
    let metadata = service
        .backend
        .update_metadata(&name, body.metadata, update)
        .await?;
    Ok(Json(MetadataUpdated::new(&name, metadata, update)))
}
