//! `/collections`: creating, describing and deleting collections.

use axum::Json;
use axum::extract::State;
use ragstone_core::backend::{BackendError, HealthStatus};
use ragstone_core::collection::{Collection, CollectionName, EMBEDDING_MODEL, EMBEDDING_PROVIDER};
use ragstone_core::document::Metadata;
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::MetadataUpdate;
use ragstone_search::gateway::{LOCAL, ServiceCollections, all_collections, collections_of};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, Params};
use super::scope::{NamesBackend, Scoped, ScopedBackend, named};
use super::state::AppState;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"name": "manuals", "embedding_model": "minilm", "metadata": {"description": "Product manuals"}}))]
pub(super) struct CreateCollection {
    /// The service to create it in; below `/api` only.
    service: Option<String>,
    /// `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`
    name: String,
    /// Stored in the metadata, not checked here.
    embedding_provider: Option<String>,
    /// Which loaded model embeds the documents. Stored in the metadata, not checked here.
    embedding_model: Option<String>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Metadata>,
}

impl NamesBackend for CreateCollection {
    fn service(&self) -> Option<&str> {
        self.service.as_deref()
    }
}

impl CreateCollection {
    /// The name, and the metadata including the two fields that are stored in it.
    fn check(self) -> Result<(CollectionName, Metadata), InvalidInput> {
        let name = CollectionName::parse(self.name)?;
        let mut metadata = self.metadata.unwrap_or_default();
        for (key, value) in [
            (EMBEDDING_PROVIDER, self.embedding_provider),
            (EMBEDDING_MODEL, self.embedding_model),
        ] {
            if let Some(value) = value {
                metadata.insert(key.to_owned(), Value::String(value));
            }
        }
        Ok((name, metadata))
    }
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "created", "name": "manuals", "metadata": {"embedding_model": "minilm"}}))]
pub(super) struct Created {
    status: &'static str,
    name: String,
    #[schema(value_type = Object)]
    metadata: Metadata,
}

impl Created {
    fn new(name: &CollectionName, metadata: Metadata) -> Self {
        Self {
            status: "created",
            name: name.to_string(),
            metadata,
        }
    }
}

/// Create a collection.
#[utoipa::path(
    post, path = "/collections", tag = "collections", request_body = CreateCollection,
    responses(
        (status = 200, body = Created),
        (status = 400, body = ErrorBody, description = "The name or the metadata breaks a rule"),
        (status = 409, body = ErrorBody, description = "A collection of this name exists"),
    )
)]
pub(super) async fn create(
    Scoped { backend, body }: Scoped<CreateCollection>,
) -> Result<Json<Created>, ApiError> {
    let (name, metadata) = body.check()?;
    let metadata = backend.backend.create_collection(&name, metadata).await?;
    Ok(Json(Created::new(&name, metadata)))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"name": "manuals", "count": 1200, "metadata": {"embedding_model": "minilm"}}))]
pub(super) struct CollectionBody {
    name: String,
    /// How many documents it has.
    count: u64,
    #[schema(value_type = Object)]
    metadata: Metadata,
}

impl From<Collection> for CollectionBody {
    fn from(collection: Collection) -> Self {
        Self {
            name: collection.name.to_string(),
            count: collection.count,
            metadata: collection.metadata,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct CollectionList {
    collections: Vec<CollectionBody>,
}

/// List all collections, by name.
#[utoipa::path(get, path = "/collections", tag = "collections", responses((status = 200, body = CollectionList)))]
pub(super) async fn list(State(state): State<AppState>) -> Result<Json<CollectionList>, ApiError> {
    let collections = state.gateway.local().backend.collections().await?;
    Ok(Json(CollectionList {
        collections: collections.into_iter().map(Into::into).collect(),
    }))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "collections": [{"name": "manuals", "service": "local", "count": 1200, "metadata": {"embedding_model": "minilm"}}],
    "services": [
        {"name": "local", "provider": "local", "status": "healthy"},
        {"name": "archive", "provider": "chromadb", "status": "unhealthy", "error": "service 'archive' cannot be reached"}],
}))]
pub(super) struct AllCollections {
    collections: Vec<ServiceCollection>,
    /// Every service that was asked, including those that did not answer.
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
    fn of(listed: &ServiceCollections<'_>) -> Self {
        Self {
            name: listed.service.name.clone(),
            provider: listed.service.provider.clone(),
            status: listed.status(),
            error: listed.collections.as_ref().err().map(BackendError::public),
        }
    }
}

/// List the collections of all services, or of one. A service that is down is reported and the others
/// are listed.
#[utoipa::path(
    get, path = "/api/collections", tag = "gateway",
    params(("service" = Option<String>, Query, description = "Only those of this service")),
    responses(
        (status = 200, body = AllCollections),
        (status = 404, body = ErrorBody, description = "No such service"),
    ),
)]
pub(super) async fn list_all(
    State(state): State<AppState>,
    params: Params,
) -> Result<Json<AllCollections>, ApiError> {
    let listed = match params.get("service") {
        Some(name) => vec![collections_of(named(&state, Some(name))?).await],
        None => all_collections(&state.gateway).await,
    };
    let mut all = AllCollections {
        collections: Vec::new(),
        services: Vec::new(),
    };
    for of_service in listed {
        all.services.push(ServiceState::of(&of_service));
        let service = &of_service.service.name;
        let collections = of_service.collections.into_iter().flatten();
        all.collections
            .extend(collections.map(|collection| ServiceCollection {
                collection: collection.into(),
                service: service.clone(),
            }));
    }
    Ok(Json(all))
}

/// Describe one collection.
#[utoipa::path(
    get, path = "/collections/{name}", tag = "collections",
    params(("name" = String, Path, description = "The collection")),
    responses((status = 200, body = CollectionBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn show(
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
) -> Result<Json<CollectionBody>, ApiError> {
    Ok(Json(backend.backend.collection(&name).await?.into()))
}

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"metadata": {"description": "Product manuals, second edition"}}))]
pub(super) struct UpdateMetadata {
    /// The service that the collection is in; below `/api` only.
    service: Option<String>,
    #[schema(value_type = Object)]
    metadata: Metadata,
    /// The same as the query parameter, which wins.
    merge: Option<bool>,
}

impl NamesBackend for UpdateMetadata {
    fn service(&self) -> Option<&str> {
        self.service.as_deref()
    }
}

impl UpdateMetadata {
    fn update(&self, params: &Params) -> Result<MetadataUpdate, InvalidInput> {
        let merge = params.flag("merge")?.or(self.merge).unwrap_or(false);
        Ok(if merge {
            MetadataUpdate::Merge
        } else {
            MetadataUpdate::Replace
        })
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct MetadataUpdated {
    status: &'static str,
    name: String,
    /// As it stands now.
    #[schema(value_type = Object)]
    metadata: Metadata,
    merge: bool,
}

impl MetadataUpdated {
    fn new(name: &CollectionName, metadata: Metadata, update: MetadataUpdate) -> Self {
        Self {
            status: "updated",
            name: name.to_string(),
            metadata,
            merge: update == MetadataUpdate::Merge,
        }
    }
}

/// Replace a collection's metadata, or merge into it.
#[utoipa::path(
    put, path = "/collections/{name}/metadata", tag = "collections", request_body = UpdateMetadata,
    params(
        ("name" = String, Path, description = "The collection"),
        ("merge" = Option<bool>, Query, description = "Keep the keys that are not given; by default everything is replaced"),
    ),
    responses(
        (status = 200, body = MetadataUpdated),
        (status = 400, body = ErrorBody, description = "No metadata object, or a wrong parameter"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn update_metadata(
    CollectionPath(name): CollectionPath,
    params: Params,
    Scoped { backend, body }: Scoped<UpdateMetadata>,
) -> Result<Json<MetadataUpdated>, ApiError> {
    let update = body.update(&params)?;
    let metadata = backend
        .backend
        .update_metadata(&name, body.metadata, update)
        .await?;
    Ok(Json(MetadataUpdated::new(&name, metadata, update)))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "deleted", "name": "manuals"}))]
pub(super) struct CollectionDeleted {
    status: &'static str,
    name: String,
}

impl CollectionDeleted {
    fn new(name: &CollectionName) -> Self {
        Self {
            status: "deleted",
            name: name.to_string(),
        }
    }
}

/// Delete a collection with all its documents.
#[utoipa::path(
    delete, path = "/collections/{name}", tag = "collections",
    params(("name" = String, Path, description = "The collection")),
    responses((status = 200, body = CollectionDeleted), (status = 404, body = ErrorBody)),
)]
pub(super) async fn delete(
    State(state): State<AppState>,
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
) -> Result<Json<CollectionDeleted>, ApiError> {
    backend.backend.delete_collection(&name).await?;
    if backend.name == LOCAL {
        state.jobs.collection_deleted(&name).await;
    }
    Ok(Json(CollectionDeleted::new(&name)))
}
