//! `/collections/{name}/documents` and the values of their metadata.

use axum::Json;
use axum::extract::State;
use ragstone_core::backend::BackendError;
use ragstone_core::collection::CollectionName;
use ragstone_core::document::{
    Added, Document, DocumentId, Metadata, NewDocument, RawDocument, check_documents,
};
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::storage::{DocumentPage, Page, Selection};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{AnyJsonBody, CollectionPath, DocumentPath, Params};
use super::scope::{NamesBackend, Scoped, ScopedBackend};
use super::state::{AppState, Limits};

const DEFAULT_LIMIT: u64 = 100;
/// A larger page is cut to this without a word, as documented.
const MAX_LIMIT: u64 = 1000;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"documents": [
    {"id": "intro", "text": "Ragstone keeps documents and finds them again.", "metadata": {"chapter": 1}},
    {"text": "A document without an id gets one."}]}))]
pub(super) struct AddDocuments {
    /// The service that the collection is in; below `/api` only.
    service: Option<String>,
    #[serde(default)]
    #[schema(value_type = Vec<NewDocumentBody>)]
    documents: Option<Vec<RawDocument>>,
}

impl NamesBackend for AddDocuments {
    const IS_LARGE: bool = true;

    fn service(&self) -> Option<&str> {
        self.service.as_deref()
    }
}

impl AddDocuments {
    fn check(self, limits: &Limits) -> Result<Vec<NewDocument>, InvalidInput> {
        let raw = self.documents.unwrap_or_default();
        if raw.len() > limits.add_documents {
            return Err(InvalidInput::new(format!(
                "{} documents in one request; at most {} are allowed: send them in several",
                raw.len(),
                limits.add_documents
            )));
        }
        check_documents(raw)
    }
}

/// A document as it is sent.
#[derive(ToSchema)]
#[allow(
    dead_code,
    reason = "describes the body for the API document; it is read as a RawDocument"
)]
pub(super) struct NewDocumentBody {
    /// Made up when absent; an id that exists is replaced.
    id: Option<String>,
    text: String,
    #[schema(value_type = Option<Object>)]
    metadata: Option<Metadata>,
    /// For all documents of a request or for none; without it the collection's model embeds the text.
    embedding: Option<Vec<f32>>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "added", "collection": "manuals", "count": 2, "ids": ["intro", "doc_8e1f"]}))]
pub(super) struct DocumentsAdded {
    status: &'static str,
    collection: String,
    count: usize,
    ids: Vec<String>,
    /// Documents that are longer than the model reads: only their beginning was embedded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    truncated: Vec<String>,
}

impl DocumentsAdded {
    fn new(name: &CollectionName, added: Added) -> Self {
        Self {
            status: "added",
            collection: name.to_string(),
            count: added.ids.len(),
            ids: added.ids.into_iter().map(DocumentId::into_string).collect(),
            truncated: added.truncated.into_iter().map(DocumentId::into_string).collect(),
        }
    }
}

/// Add documents, all of them or none. An id that exists is replaced.
///
/// Documents without an `embedding` are embedded by the collection's model. That is refused where the
/// collection has vectors of another model, or of another version of the model: they could not be
/// compared. Vectors that clients bring are taken as they are, in the width of the collection, or of
/// its model where it is empty and its model is loaded.
#[utoipa::path(
    post, path = "/collections/{name}/documents", tag = "documents", request_body = AddDocuments,
    params(("name" = String, Path, description = "The collection")),
    responses(
        (status = 200, body = DocumentsAdded),
        (status = 400, body = ErrorBody, description = "A document breaks a rule, and the message has its index; or the collection has vectors of another model"),
        (status = 404, body = ErrorBody),
        (status = 413, body = ErrorBody, description = "The body is too large"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 503, body = ErrorBody, description = "The collection's model is not loaded, or the service is busy"),
    ),
)]
pub(super) async fn add(
    State(state): State<AppState>,
    CollectionPath(name): CollectionPath,
    Scoped { backend, body }: Scoped<AddDocuments>,
) -> Result<Json<DocumentsAdded>, ApiError> {
    let documents = body.check(&state.limits)?;
    let added = backend.backend.add_documents(&name, documents).await?;
    metrics::counter!("ragstone_documents_added_total").increment(added.ids.len() as u64);
    Ok(Json(DocumentsAdded::new(&name, added)))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"id": "intro", "text": "Ragstone keeps documents.", "metadata": {"chapter": 1}}))]
pub(super) struct DocumentBody {
    pub id: String,
    pub text: String,
    #[schema(value_type = Object)]
    pub metadata: Metadata,
}

impl From<Document> for DocumentBody {
    fn from(document: Document) -> Self {
        Self {
            id: document.id.into_string(),
            text: document.text,
            metadata: document.metadata,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct DocumentList {
    documents: Vec<DocumentBody>,
    /// How many are on this page.
    count: usize,
    /// How many match in all.
    total: u64,
}

impl From<DocumentPage> for DocumentList {
    fn from(page: DocumentPage) -> Self {
        Self {
            count: page.documents.len(),
            documents: page.documents.into_iter().map(Into::into).collect(),
            total: page.total,
        }
    }
}

/// Which documents are asked for, and how many of them.
fn filter_and_page(params: &Params) -> Result<(Filter, Page), InvalidInput> {
    let filter = params
        .get("where")
        .filter(|text| !text.trim().is_empty())
        .map_or(Ok(Filter::everything()), Filter::parse_text)?;
    let limit = params.count("limit", DEFAULT_LIMIT)?.min(MAX_LIMIT) as usize;
    let offset = params.count("offset", 0)?;
    Ok((filter, Page { limit, offset }))
}

/// Get documents by their metadata, in the order they were added.
#[utoipa::path(
    get, path = "/collections/{name}/documents", tag = "documents",
    params(
        ("name" = String, Path, description = "The collection"),
        ("where" = Option<String>, Query, description = "A filter, as JSON", example = json!({"chapter": {"$in": [1, 2]}})),
        ("limit" = Option<u64>, Query, description = "At most this many; 100 unless given, never more than 1000; 0 gives only the total"),
        ("offset" = Option<u64>, Query, description = "Leave out this many first"),
    ),
    responses(
        (status = 200, body = DocumentList),
        (status = 400, body = ErrorBody, description = "The filter or a number is malformed; the message names it"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn list(
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<DocumentList>, ApiError> {
    let (filter, page) = filter_and_page(&params)?;
    Ok(Json(
        backend.backend.documents(&name, &filter, page).await?.into(),
    ))
}

/// Get one document.
#[utoipa::path(
    get, path = "/collections/{name}/documents/{id}", tag = "documents",
    params(("name" = String, Path, description = "The collection"), ("id" = String, Path, description = "The document")),
    responses((status = 200, body = DocumentBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn show(
    ScopedBackend(backend): ScopedBackend,
    DocumentPath(name, id): DocumentPath,
) -> Result<Json<DocumentBody>, ApiError> {
    let missing = || ApiError::not_found(format!("Document '{id}' not found in collection '{name}'"));
    let parsed = DocumentId::parse(id.clone()).map_err(|_| missing())?;
    let document = backend.backend.document(&name, &parsed).await?;
    let document = document.ok_or_else(missing)?;
    Ok(Json(document.into()))
}

/// A document may be called `all`, which is also the last word of the route that empties a collection.
pub(super) async fn show_named_all(
    backend: ScopedBackend,
    CollectionPath(name): CollectionPath,
) -> Result<Json<DocumentBody>, ApiError> {
    show(backend, DocumentPath(name, "all".to_owned())).await
}

/// A list of ids, or an object with either `ids` or `where`.
#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"where": {"chapter": 1}}), value_type = Object)]
pub(super) struct DeleteDocuments(Value);

impl DeleteDocuments {
    fn selection(mut self) -> Result<Selection, InvalidInput> {
        if self.0.is_array() {
            return ids(&self.0);
        }
        let field = |body: &mut Value, name: &str| {
            body.get_mut(name)
                .map(Value::take)
                .filter(|value| !value.is_null())
        };
        match (field(&mut self.0, "ids"), field(&mut self.0, "where")) {
            (Some(list), None) => ids(&list),
            (None, Some(filter)) => {
                let filter = Filter::parse(&filter)?;
                if filter.is_everything() {
                    return Err(InvalidInput::new(
                        "'where' is empty and would delete every document: use DELETE …/documents/all for that",
                    ));
                }
                Ok(Selection::Matching(filter))
            }
            (Some(_), Some(_)) => Err(InvalidInput::new("Give either 'ids' or 'where', not both")),
            (None, None) => Err(InvalidInput::new(
                "A list of ids, or an object with 'ids' or 'where', is required",
            )),
        }
    }
}

fn ids(list: &Value) -> Result<Selection, InvalidInput> {
    let not_strings = || InvalidInput::new("'ids' must be a list of strings");
    let list = list.as_array().ok_or_else(not_strings)?;
    let ids = list
        .iter()
        .map(|id| DocumentId::parse(id.as_str().ok_or_else(not_strings)?));
    ids.collect::<Result<_, _>>().map(Selection::Ids)
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "deleted", "collection": "manuals", "count": 3}))]
pub(super) struct DocumentsDeleted {
    status: &'static str,
    collection: String,
    /// How many were really there.
    count: u64,
}

impl DocumentsDeleted {
    fn new(name: &CollectionName, count: u64) -> Self {
        Self {
            status: "deleted",
            collection: name.to_string(),
            count,
        }
    }
}

/// Delete documents by their ids or by a filter.
#[utoipa::path(
    delete, path = "/collections/{name}/documents", tag = "documents", request_body = DeleteDocuments,
    params(("name" = String, Path, description = "The collection")),
    responses(
        (status = 200, body = DocumentsDeleted),
        (status = 400, body = ErrorBody, description = "Neither ids nor a filter, or a malformed one"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn delete(
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
    AnyJsonBody(body): AnyJsonBody<DeleteDocuments>,
) -> Result<Json<DocumentsDeleted>, ApiError> {
    let count = backend.backend.delete_documents(&name, body.selection()?).await?;
    Ok(Json(DocumentsDeleted::new(&name, count)))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "emptied", "collection": "manuals", "count_deleted": 100}))]
pub(super) struct Emptied {
    status: &'static str,
    collection: String,
    count_deleted: u64,
}

impl Emptied {
    fn new(name: &CollectionName, count_deleted: u64) -> Self {
        Self {
            status: "emptied",
            collection: name.to_string(),
            count_deleted,
        }
    }
}

/// Delete every document of a collection and keep the collection with its metadata.
#[utoipa::path(
    delete, path = "/collections/{name}/documents/all", tag = "documents",
    params(("name" = String, Path, description = "The collection")),
    responses((status = 200, body = Emptied), (status = 404, body = ErrorBody)),
)]
pub(super) async fn empty(
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
) -> Result<Json<Emptied>, ApiError> {
    let count_deleted = backend.backend.empty(&name).await?;
    Ok(Json(Emptied::new(&name, count_deleted)))
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"field": "region", "values": ["Asia", "Europe"], "count": 2}))]
pub(super) struct MetadataValues {
    field: String,
    /// Numbers before strings, each ascending.
    values: Vec<Value>,
    count: usize,
}

impl MetadataValues {
    fn new(field: &str, values: Vec<Value>) -> Self {
        Self {
            field: field.to_owned(),
            count: values.len(),
            values,
        }
    }
}

/// The distinct values of a metadata field.
#[utoipa::path(
    get, path = "/collections/{name}/metadata-values", tag = "documents",
    params(("name" = String, Path, description = "The collection"), ("field" = String, Query, description = "The metadata field")),
    responses(
        (status = 200, body = MetadataValues),
        (status = 400, body = ErrorBody, description = "No field given"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn metadata_values(
    ScopedBackend(backend): ScopedBackend,
    CollectionPath(name): CollectionPath,
    params: Params,
) -> Result<Json<MetadataValues>, ApiError> {
    let field = params.get("field").filter(|field| !field.is_empty());
    let field = field.ok_or_else(|| ApiError::bad_request("Query parameter 'field' is required"))?;
    let values = backend.backend.metadata_values(&name, field).await;
    let values = values.map_err(|error| match error {
        // This route has always used these words.
        BackendError::CollectionNotFound(name) => {
            ApiError::not_found(format!("Collection '{name}' does not exist."))
        }
        other => other.into(),
    })?;
    Ok(Json(MetadataValues::new(field, values)))
}
