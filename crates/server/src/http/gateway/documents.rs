//! `/api/collections/{name}/documents` and the values of their metadata.

use axum::Json;
use axum::extract::State;
use ragstone_core::provider::ProviderError;

use super::super::documents::{
    AddDocuments, DeleteDocuments, DocumentList, DocumentsAdded, DocumentsDeleted, Emptied, MetadataValues,
    filter_and_page, no_collection_to_read_values_of, required_field,
};
use super::super::error::{ApiError, ErrorBody};
use super::super::extract::{AnyJsonBody, CollectionPath, LargeJsonBody, Params};
use super::super::state::AppState;
use super::{InService, named, named_by_params};

type AddDocumentsInService = InService<AddDocuments>;

/// Add documents to a service's collection.
#[utoipa::path(
    post, path = "/api/collections/{name}/documents", tag = "gateway", request_body = AddDocumentsInService,
    params(("name" = String, Path, description = "The collection")),
    responses(
        (status = 200, body = DocumentsAdded),
        (status = 400, body = ErrorBody, description = "No service is named, or a document breaks a rule; the message has its index"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 413, body = ErrorBody, description = "The body is too large"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn add(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    LargeJsonBody(body): LargeJsonBody<AddDocuments>,
) -> Result<Json<DocumentsAdded>, ApiError> {
    let service = named(&state, body.service.as_deref())?;
    let documents = body.check(&state.limits)?;
    let added = service.backend.add_documents(&name, documents).await?;
    Ok(Json(DocumentsAdded::new(&name, added)))
}

/// Get documents of a service's collection by their metadata.
#[utoipa::path(
    get, path = "/api/collections/{name}/documents", tag = "gateway",
    params(
        ("name" = String, Path, description = "The collection"),
        ("service" = String, Query, description = "The service it is in"),
        ("where" = Option<String>, Query, description = "A filter, as JSON", example = json!({"chapter": {"$in": [1, 2]}})),
        ("limit" = Option<u64>, Query, description = "At most this many; 100 unless given, never more than 1000; 0 gives only the total"),
        ("offset" = Option<u64>, Query, description = "Leave out this many first"),
    ),
    responses(
        (status = 200, body = DocumentList),
        (status = 400, body = ErrorBody, description = "No service is named, or the filter or a number is malformed"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn list(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<DocumentList>, ApiError> {
    let service = named_by_params(&state, &params)?;
    let (filter, page) = filter_and_page(&params)?;
    Ok(Json(
        service.backend.documents(&name, &filter, page).await?.into(),
    ))
}

/// Delete documents of a service's collection by their ids or by a filter.
#[utoipa::path(
    delete, path = "/api/collections/{name}/documents", tag = "gateway", request_body = DeleteDocuments,
    params(
        ("name" = String, Path, description = "The collection"),
        ("service" = String, Query, description = "The service it is in"),
    ),
    responses(
        (status = 200, body = DocumentsDeleted),
        (status = 400, body = ErrorBody, description = "No service is named, neither ids nor a filter, or a malformed one"),
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
    body: Result<AnyJsonBody<DeleteDocuments>, ApiError>,
) -> Result<Json<DocumentsDeleted>, ApiError> {
    let service = named_by_params(&state, &params)?;
    let AnyJsonBody(body) = body?;
    let count = service.backend.delete_documents(&name, body.selection()?).await?;
    Ok(Json(DocumentsDeleted::new(&name, count)))
}

/// Delete every document of a service's collection and keep the collection with its metadata.
#[utoipa::path(
    delete, path = "/api/collections/{name}/documents/all", tag = "gateway",
    params(
        ("name" = String, Path, description = "The collection"),
        ("service" = String, Query, description = "The service it is in"),
    ),
    responses(
        (status = 200, body = Emptied),
        (status = 400, body = ErrorBody, description = "No service is named"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn empty(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<Emptied>, ApiError> {
    let service = named_by_params(&state, &params)?;
    let count = service.backend.empty(&name).await?;
    Ok(Json(Emptied::new(&name, count)))
}

/// The distinct values of a metadata field in a service's collection.
#[utoipa::path(
    get, path = "/api/collections/{name}/metadata-values", tag = "gateway",
    params(
        ("name" = String, Path, description = "The collection"),
        ("service" = String, Query, description = "The service it is in"),
        ("field" = String, Query, description = "The metadata field"),
    ),
    responses(
        (status = 200, body = MetadataValues),
        (status = 400, body = ErrorBody, description = "No service or no field is named"),
        (status = 404, body = ErrorBody, description = "No such service or collection"),
        (status = 429, body = ErrorBody, description = "The service has too much to do; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The service gives no usable answer"),
        (status = 504, body = ErrorBody, description = "The service does not answer in time"),
    ),
)]
pub(crate) async fn metadata_values(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<MetadataValues>, ApiError> {
    let service = named_by_params(&state, &params)?;
    let field = required_field(&params)?;
    let values = service
        .backend
        .metadata_values(&name, field)
        .await
        .map_err(|error| match error {
            ProviderError::CollectionNotFound(name) => no_collection_to_read_values_of(&name),
            other => other.into(),
        })?;
    Ok(Json(MetadataValues::new(field, values)))
}
