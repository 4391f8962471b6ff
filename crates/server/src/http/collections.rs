//! `/collections`: creating, describing and deleting collections.

use axum::Json;
use axum::extract::State;
use ragstone_core::collection::{Collection, CollectionName, EMBEDDING_MODEL, EMBEDDING_PROVIDER};
use ragstone_core::document::Metadata;
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::MetadataUpdate;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, JsonBody, Params};
use super::state::AppState;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"name": "manuals", "embedding_model": "minilm", "metadata": {"description": "Product manuals"}}))]
pub(super) struct CreateCollection {
    /// Which service it is made in; only for the gateway.
    pub(super) service: Option<String>,
    /// `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`
    name: String,
    /// Stored in the metadata, not checked here.
    embedding_provider: Option<String>,
    /// Which loaded model embeds the documents. Stored in the metadata, not checked here.
    embedding_model: Option<String>,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Metadata>,
}

impl CreateCollection {
    /// The name, and the metadata with the two fields that belong into it.
    pub(super) fn check(self) -> Result<(CollectionName, Metadata), InvalidInput> {
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
    pub(super) fn new(name: &CollectionName, metadata: Metadata) -> Self {
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
    State(state): State<AppState>,
    JsonBody(body): JsonBody<CreateCollection>,
) -> Result<Json<Created>, ApiError> {
    let (name, metadata) = body.check()?;
    let collection = state.service.store.create_collection(&name, metadata).await?;
    Ok(Json(Created::new(&name, collection.metadata)))
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
    let collections = state.service.store.collections().await?;
    Ok(Json(CollectionList {
        collections: collections.into_iter().map(Into::into).collect(),
    }))
}

/// Describe one collection.
#[utoipa::path(
    get, path = "/collections/{name}", tag = "collections",
    params(("name" = String, Path, description = "The collection")),
    responses((status = 200, body = CollectionBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn show(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
) -> Result<Json<CollectionBody>, ApiError> {
    Ok(Json(state.service.store.collection(&name).await?.into()))
}

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"metadata": {"description": "Product manuals, second edition"}}))]
pub(super) struct UpdateMetadata {
    /// Which service the collection is in; only for the gateway.
    pub(super) service: Option<String>,
    #[schema(value_type = Object)]
    pub(super) metadata: Metadata,
    /// The same as the query parameter, which wins.
    merge: Option<bool>,
}

impl UpdateMetadata {
    pub(super) fn update(&self, params: &Params) -> Result<MetadataUpdate, InvalidInput> {
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
    pub(super) fn new(name: &CollectionName, metadata: Metadata, update: MetadataUpdate) -> Self {
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
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
    JsonBody(body): JsonBody<UpdateMetadata>,
) -> Result<Json<MetadataUpdated>, ApiError> {
    let update = body.update(&params)?;
    let metadata = state
        .service
        .store
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
    pub(super) fn new(name: &CollectionName) -> Self {
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
    CollectionPath(name): CollectionPath,
) -> Result<Json<CollectionDeleted>, ApiError> {
    state.service.store.delete_collection(&name).await?;
    state.jobs.collection_deleted(&name).await;
    Ok(Json(CollectionDeleted::new(&name)))
}
