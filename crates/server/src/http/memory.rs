//! `/memory`: the entries of an agent. A save is durable at once; embedding follows in the background.

use axum::Json;
use axum::extract::{FromRequestParts, Path, State};
use axum::http::request::Parts;
use ragstone_core::collection::shorten;
use ragstone_core::document::DocumentId;
use ragstone_core::error::InvalidInput;
use ragstone_memory::{EmbeddingState, MemoryEntry, MemoryKind, PageRequest, StoredEntry};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{JsonBody, Params};
use super::state::AppState;

const DEFAULT_LIMIT: u64 = 100;
const MAX_LIMIT: u64 = 1000;

/// An entry of any kind. The required fields depend on the kind.
#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"session_key": "chat-17", "content": "The user prefers short answers."}))]
pub(super) struct SaveEntry {
    /// The id of the entry to save or replace. An id in the path takes precedence.
    id: Option<String>,
    /// Another name of `id`, for knowledge.
    key: Option<String>,
    /// The text of knowledge, an observation or a reflection.
    content: Option<String>,
    /// The session of an observation or a reflection.
    session_key: Option<String>,
    /// When a learning applies.
    trigger: Option<String>,
    /// The fix of a learning.
    fix: Option<String>,
    /// The category of knowledge or a learning.
    category: Option<String>,
}

impl SaveEntry {
    fn into_entry(self, kind: MemoryKind) -> Result<MemoryEntry, InvalidInput> {
        let required = |field: &str, value: Option<String>| {
            value.ok_or_else(|| InvalidInput::new(format!("Field '{field}' is required")))
        };
        let entry = match kind {
            MemoryKind::Knowledge => MemoryEntry::Knowledge {
                content: required("content", self.content)?,
                category: self.category,
            },
            MemoryKind::Observation => MemoryEntry::Observation {
                session_key: required("session_key", self.session_key)?,
                content: required("content", self.content)?,
            },
            MemoryKind::Reflection => MemoryEntry::Reflection {
                session_key: required("session_key", self.session_key)?,
                content: required("content", self.content)?,
            },
            MemoryKind::Learning => MemoryEntry::Learning {
                trigger: required("trigger", self.trigger)?,
                fix: required("fix", self.fix)?,
                category: self.category,
            },
        };
        entry.check()?;
        Ok(entry)
    }
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"id": "deploy-steps", "collection": "knowledge"}))]
pub(super) struct Saved {
    id: String,
    /// The collection of its vector.
    collection: &'static str,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({
    "id": "deploy-steps", "collection": "knowledge", "content": "Deploy on Tuesdays.", "category": "process",
    "saved_at": "2026-01-01T12:00:00Z", "embedding": "embedded",
}))]
pub(super) struct EntryBody {
    id: String,
    collection: &'static str,
    /// For a learning, its trigger and its fix.
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    session_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    category: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trigger: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
    /// Time of the last save (RFC 3339, UTC).
    saved_at: String,
    /// `none`, `queued`, `embedded` or `failed`.
    embedding: &'static str,
    /// The error of a failed embedding.
    #[serde(skip_serializing_if = "Option::is_none")]
    embedding_error: Option<String>,
}

impl From<StoredEntry> for EntryBody {
    fn from(stored: StoredEntry) -> Self {
        let (embedding, embedding_error) = match stored.embedding {
            EmbeddingState::None => ("none", None),
            EmbeddingState::Queued => ("queued", None),
            EmbeddingState::Embedded => ("embedded", None),
            EmbeddingState::Failed(error) => ("failed", Some(error)),
        };
        let (trigger, fix) = match &stored.entry {
            MemoryEntry::Learning { trigger, fix, .. } => (Some(trigger.clone()), Some(fix.clone())),
            _ => (None, None),
        };
        let saved_at = jiff::Timestamp::from_millisecond(stored.saved_at).unwrap_or_default();
        Self {
            id: stored.id,
            collection: stored.entry.kind().collection(),
            content: stored.entry.content(),
            session_key: stored.entry.session_key().map(str::to_owned),
            category: stored.entry.category().map(str::to_owned),
            trigger,
            fix,
            saved_at: saved_at.to_string(),
            embedding,
            embedding_error,
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct EntryList {
    /// Ordered by id. Generated ids are in the order of saving.
    records: Vec<EntryBody>,
    /// Entries on this page.
    count: usize,
    /// The `after` of the next page; absent on the last page.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"status": "deleted", "id": "deploy-steps", "collection": "knowledge"}))]
pub(super) struct EntryDeleted {
    status: &'static str,
    id: String,
    collection: &'static str,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"enabled": true, "queued": 12, "embedded": 3400, "failed": 0, "dropped": 0}))]
pub(super) struct Status {
    /// Whether entries are embedded.
    enabled: bool,
    /// Entries that wait to be embedded, including those with a vector of another model.
    queued: u64,
    /// Entries with a vector of the current model.
    embedded: u64,
    /// Entries whose embedding failed; each has its error. They are retried later.
    failed: u64,
    /// Always 0: the queue is the database.
    dropped: u64,
    /// The error of the last call of the embedding provider; absent after a success.
    #[serde(skip_serializing_if = "Option::is_none")]
    last_error: Option<String>,
}

/// The kind of memory in the path.
pub(super) struct KindPath(MemoryKind);

impl FromRequestParts<AppState> for KindPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = segments(parts, state).await?;
        kind(segments.first()).map(Self)
    }
}

/// The kind of memory and the id in the path.
pub(super) struct EntryPath(MemoryKind, String);

impl FromRequestParts<AppState> for EntryPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = segments(parts, state).await?;
        let kind = kind(segments.first())?;
        Ok(Self(kind, segments.into_iter().nth(1).unwrap_or_default()))
    }
}

async fn segments(parts: &mut Parts, state: &AppState) -> Result<Vec<String>, ApiError> {
    let Path(segments) = Path::<Vec<String>>::from_request_parts(parts, state)
        .await
        .map_err(|_| ApiError::bad_request("The path is not valid percent-encoded UTF-8"))?;
    Ok(segments)
}

fn kind(segment: Option<&String>) -> Result<MemoryKind, ApiError> {
    let name = segment.map(String::as_str).unwrap_or_default();
    MemoryKind::from_plural(name).ok_or_else(|| {
        let known = MemoryKind::ALL.map(MemoryKind::plural).join(", ");
        ApiError::not_found(format!(
            "Unknown kind of memory '{}'; use one of: {known}",
            shorten(name)
        ))
    })
}

fn entry_not_found(kind: MemoryKind, id: &str) -> ApiError {
    ApiError::not_found(format!("No {} has the id '{}'", kind.collection(), shorten(id)))
}

/// Save an entry under a new id, or under the id in the body.
#[utoipa::path(
    post, path = "/memory/{kind}", tag = "memory", request_body = SaveEntry,
    params(("kind" = String, Path, description = "`knowledge`, `observations`, `reflections` or `learnings`")),
    responses(
        (status = 200, body = Saved),
        (status = 400, body = ErrorBody, description = "A field is missing, empty or too long"),
        (status = 404, body = ErrorBody, description = "No such kind of memory"),
    ),
)]
pub(super) async fn create(
    State(state): State<AppState>,
    KindPath(kind): KindPath,
    JsonBody(mut body): JsonBody<SaveEntry>,
) -> Result<Json<Saved>, ApiError> {
    let id = body.id.take().or(body.key.take()).map(parse_id).transpose()?;
    if id.is_none() && kind == MemoryKind::Knowledge {
        return Err(ApiError::bad_request(
            "Field 'key' is required for knowledge: add it to the body, or use PUT /memory/knowledge/{key}",
        ));
    }
    save(&state, id, body.into_entry(kind)?).await
}

/// Save an entry under this id. Replaces an existing entry.
#[utoipa::path(
    put, path = "/memory/{kind}/{id}", tag = "memory", request_body = SaveEntry,
    params(
        ("kind" = String, Path, description = "`knowledge`, `observations`, `reflections` or `learnings`"),
        ("id" = String, Path, description = "The entry's id; of knowledge, its key"),
    ),
    responses(
        (status = 200, body = Saved),
        (status = 400, body = ErrorBody, description = "A field is missing, empty or too long"),
        (status = 404, body = ErrorBody, description = "No such kind of memory"),
    ),
)]
pub(super) async fn replace(
    State(state): State<AppState>,
    EntryPath(kind, id): EntryPath,
    JsonBody(body): JsonBody<SaveEntry>,
) -> Result<Json<Saved>, ApiError> {
    let id = parse_id(id)?;
    save(&state, Some(id), body.into_entry(kind)?).await
}

fn parse_id(id: String) -> Result<DocumentId, InvalidInput> {
    if id.chars().any(char::is_control) {
        return Err(InvalidInput::new("'id' must not contain control characters"));
    }
    DocumentId::parse(id).map_err(|error| InvalidInput::new(format!("'id': {error}")))
}

async fn save(state: &AppState, id: Option<DocumentId>, entry: MemoryEntry) -> Result<Json<Saved>, ApiError> {
    let collection = entry.kind().collection();
    let id = state.agent.memory.save(id, entry).await?;
    Ok(Json(Saved {
        id: id.into_string(),
        collection,
    }))
}

/// List entries of a kind, by id.
#[utoipa::path(
    get, path = "/memory/{kind}", tag = "memory",
    params(
        ("kind" = String, Path, description = "`knowledge`, `observations`, `reflections` or `learnings`"),
        ("limit" = Option<u64>, Query, description = "Entries per page, at most 1000 (default: 100)"),
        ("after" = Option<String>, Query, description = "Only entries after this id: the `next` of the previous page"),
        ("session_key" = Option<String>, Query, description = "Only entries of this session"),
    ),
    responses((status = 200, body = EntryList), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn list(
    State(state): State<AppState>,
    KindPath(kind): KindPath,
    params: Params,
) -> Result<Json<EntryList>, ApiError> {
    let limit = params.count("limit", DEFAULT_LIMIT)?.min(MAX_LIMIT);
    if limit == 0 {
        return Err(ApiError::bad_request(
            "Query parameter 'limit' must be at least 1",
        ));
    }
    let request = PageRequest {
        session_key: params
            .get("session_key")
            .filter(|key| !key.is_empty())
            .map(str::to_owned),
        after: params
            .get("after")
            .filter(|after| !after.is_empty())
            .map(str::to_owned),
        limit: limit as usize,
    };
    let page = state.agent.memory.entries(kind, request).await?;
    let records: Vec<EntryBody> = page.entries.into_iter().map(Into::into).collect();
    Ok(Json(EntryList {
        count: records.len(),
        records,
        next: page.next,
    }))
}

/// Read one entry.
#[utoipa::path(
    get, path = "/memory/{kind}/{id}", tag = "memory",
    params(
        ("kind" = String, Path, description = "`knowledge`, `observations`, `reflections` or `learnings`"),
        ("id" = String, Path, description = "The entry's id; of knowledge, its key"),
    ),
    responses((status = 200, body = EntryBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn show(
    State(state): State<AppState>,
    EntryPath(kind, id): EntryPath,
) -> Result<Json<EntryBody>, ApiError> {
    match state.agent.memory.entry(kind, &id).await? {
        Some(entry) => Ok(Json(entry.into())),
        None => Err(entry_not_found(kind, &id)),
    }
}

/// Delete an entry and its vector.
#[utoipa::path(
    delete, path = "/memory/{kind}/{id}", tag = "memory",
    params(
        ("kind" = String, Path, description = "`knowledge`, `observations`, `reflections` or `learnings`"),
        ("id" = String, Path, description = "The entry's id; of knowledge, its key"),
    ),
    responses((status = 200, body = EntryDeleted), (status = 404, body = ErrorBody)),
)]
pub(super) async fn delete(
    State(state): State<AppState>,
    EntryPath(kind, id): EntryPath,
) -> Result<Json<EntryDeleted>, ApiError> {
    if state.agent.memory.delete(kind, &id).await? {
        Ok(Json(EntryDeleted {
            status: "deleted",
            id,
            collection: kind.collection(),
        }))
    } else {
        Err(entry_not_found(kind, &id))
    }
}

/// Show the state of the embedding queue.
#[utoipa::path(get, path = "/memory/status", tag = "memory", responses((status = 200, body = Status)))]
pub(super) async fn status(State(state): State<AppState>) -> Result<Json<Status>, ApiError> {
    let status = state.agent.memory.status().await?;
    Ok(Json(Status {
        enabled: status.enabled,
        queued: status.queued,
        embedded: status.embedded,
        failed: status.failed,
        dropped: status.dropped,
        last_error: status.last_error,
    }))
}
