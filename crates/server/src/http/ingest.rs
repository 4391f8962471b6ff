//! Ingestion as jobs: documents are handed over, split, embedded and stored in the background.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use futures::stream;
use jiff::Timestamp;
use ragstone_core::collection::CollectionName;
use ragstone_core::records::Millis;
use ragstone_rag::ingest::report::{ChunkCounts, DocumentCounts, ItemError};
use ragstone_rag::ingest::{Earlier, Kind};
use ragstone_rag::jobs::{Job, NewItem, NewJob};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, LargeBody, Params, PathText, optional_objects};
use super::state::AppState;

const MAX_ITEMS: usize = 10_000;

/// Documents to be read and split. A multipart upload does the same, one file a part, with the size
/// of chunks in a field `chunk_tokens`.
#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"documents": [{"name": "guide.md", "content": "# Guide\n\nOpen the dome at dusk."}]}))]
pub(super) struct IngestBody {
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(required = true)]
    documents: Option<Vec<IngestDocument>>,
    /// The largest chunk, in tokens of the collection's model.
    chunk_tokens: Option<usize>,
}

#[derive(Deserialize, ToSchema)]
pub(super) struct IngestDocument {
    /// What the documents are known by as `source`; the same name replaces what was ingested under it.
    #[schema(required = true)]
    name: Option<String>,
    #[serde(alias = "text")]
    #[schema(required = true)]
    content: Option<String>,
    /// What it is, such as `text/markdown`; where absent or unknown, the name's ending says it.
    media_type: Option<String>,
    /// `base64` for what is not text, such as PDF.
    encoding: Option<String>,
    /// Some of the rows of a JSONL or CSV file: those that are not among them stay.
    partial: Option<bool>,
    /// How many lines the parts before this one have, so that errors name the lines of the file.
    lines_before: Option<u64>,
    /// Which rows of this part came in parts before it, and how often: by their id, or the first 16
    /// digits of the SHA-256 of their text.
    rows_before: Option<BTreeMap<String, u32>>,
}

/// Any number of files and, perhaps, the size of chunks.
#[derive(ToSchema)]
#[allow(dead_code, reason = "it only describes the form")]
pub(super) struct IngestForm {
    /// A part for each file, whatever the part is called; the file's name is what it is known by.
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// The largest chunk, in tokens of the collection's model.
    chunk_tokens: Option<usize>,
}

/// A job and how far it is.
#[derive(Serialize, ToSchema)]
#[schema(example = json!({"id": "0198c0de", "collection": "manuals", "state": "running", "created_at": "2025-06-01T10:00:00Z",
    "items": 3, "progress": {"documents_done": 1, "bytes_done": 2048, "bytes_total": 6144, "chunks_done": 4, "chunks_per_second": 2.0, "tokens": 310},
    "documents": {"added": 1, "changed": 0, "unchanged": 0, "removed": 0, "failed": 0},
    "chunks": {"added": 4, "changed": 0, "unchanged": 0, "removed": 0, "embedded": 4, "reused": 0}, "errors": []}))]
pub(super) struct JobBody {
    id: String,
    collection: String,
    /// `queued`, `running`, `done`, `failed` or `cancelled`.
    state: &'static str,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    started_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finished_at: Option<String>,
    /// How many documents were handed over.
    items: u64,
    progress: ProgressBody,
    documents: DocumentCountsBody,
    chunks: ChunkCountsBody,
    /// What could not be ingested, and why; it does not stop the rest.
    errors: Vec<ItemErrorBody>,
    /// Errors that are not listed because there are too many.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    more_errors: u64,
    /// What was done in part or not at all, and no document failed by.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    warnings: Vec<ItemErrorBody>,
    /// Why the job as a whole failed, or is waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ProgressBody {
    /// Files, and rows of files that are made of rows.
    documents_done: u64,
    bytes_done: u64,
    bytes_total: u64,
    chunks_done: u64,
    chunks_per_second: f64,
    /// Tokens that the model read.
    tokens: u64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct DocumentCountsBody {
    added: u64,
    changed: u64,
    unchanged: u64,
    removed: u64,
    failed: u64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ChunkCountsBody {
    added: u64,
    changed: u64,
    unchanged: u64,
    removed: u64,
    /// Sent to the model.
    embedded: u64,
    /// Content that had a vector already.
    reused: u64,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ItemErrorBody {
    source: String,
    error: String,
}

#[derive(Serialize, ToSchema)]
pub(super) struct JobList {
    /// Newest first.
    jobs: Vec<JobBody>,
}

impl From<ItemError> for ItemErrorBody {
    fn from(item: ItemError) -> Self {
        Self {
            source: item.source,
            error: item.error,
        }
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Ingest documents: they are split, embedded and stored in the background. Only what changed since
/// they were last ingested is embedded; what vanished from them is removed.
#[utoipa::path(
    post, path = "/collections/{name}/ingest", tag = "ingestion",
    params(("name" = String, Path, description = "The collection")),
    request_body(content((IngestBody = "application/json"), (IngestForm = "multipart/form-data"))),
    responses(
        (status = 200, body = JobBody, description = "The job is durable and will be done"),
        (status = 400, body = ErrorBody, description = "A document breaks a rule, or the collection has no model"),
        (status = 404, body = ErrorBody), (status = 413, body = ErrorBody, description = "The body is too large"),
        (status = 429, body = ErrorBody, description = "Too many jobs are not finished"),
        (status = 503, body = ErrorBody, description = "The collection's model is not loaded"),
    ),
)]
pub(super) async fn ingest(
    State(state): State<AppState>,
    CollectionPath(collection): CollectionPath,
    body: LargeBody,
) -> Result<Json<JobBody>, ApiError> {
    let (items, chunk_tokens) = match multer::parse_boundary(&body.content_type) {
        Ok(boundary) => read_multipart(&body, boundary).await?,
        Err(multer::Error::NoBoundary) => {
            return Err(ApiError::bad_request(
                "The content type of a multipart body needs a boundary: multipart/form-data; boundary=...",
            ));
        }
        Err(_) => read_json(body.json().await?)?,
    };
    if items.len() > MAX_ITEMS {
        return Err(ApiError::bad_request(format!(
            "{} documents in one request; at most {MAX_ITEMS} are allowed: send them in several",
            items.len()
        )));
    }
    let job = state
        .jobs
        .submit(NewJob {
            collection,
            chunk_tokens,
            items,
        })
        .await?;
    Ok(Json(job.into()))
}

fn read_json(body: IngestBody) -> Result<(Vec<NewItem>, Option<usize>), ApiError> {
    let documents = body.documents.unwrap_or_default();
    let mut items = Vec::with_capacity(documents.len());
    for (index, document) in documents.into_iter().enumerate() {
        let at = |problem: &str| ApiError::bad_request(format!("Document at index {index}: {problem}"));
        let name = document
            .name
            .filter(|name| !name.trim().is_empty())
            .ok_or_else(|| at("'name' is required"))?;
        let content = document.content.ok_or_else(|| at("'content' is required"))?;
        let bytes = match document.encoding.as_deref() {
            None | Some("text" | "utf-8") => content.into_bytes(),
            Some("base64") => base64::engine::general_purpose::STANDARD
                .decode(content)
                .map_err(|_| at("'content' is not valid base64"))?,
            Some(_) => return Err(at("'encoding' must be 'base64' or absent")),
        };
        items.push(NewItem {
            kind: document
                .media_type
                .as_deref()
                .and_then(Kind::of_media_type)
                .or_else(|| Kind::of_path(std::path::Path::new(&name))),
            source: name,
            bytes,
            partial: document.partial.unwrap_or(false).then(|| Earlier {
                lines: document.lines_before.unwrap_or_default(),
                rows: document.rows_before.unwrap_or_default(),
            }),
        });
    }
    Ok((items, body.chunk_tokens))
}

async fn read_multipart(
    body: &LargeBody,
    boundary: String,
) -> Result<(Vec<NewItem>, Option<usize>), ApiError> {
    let broken =
        |error: multer::Error| ApiError::bad_request(format!("The multipart body cannot be read: {error}"));
    let whole = stream::iter([Ok::<_, std::convert::Infallible>(body.bytes.clone())]);
    let mut parts = multer::Multipart::new(whole, boundary);
    let mut items: Vec<NewItem> = Vec::new();
    let mut chunk_tokens = None;
    while let Some(part) = parts.next_field().await.map_err(broken)? {
        let file = part.file_name().map(str::to_owned);
        let field = part.name().unwrap_or_default().to_owned();
        let media_type = part.content_type().map(ToString::to_string);
        let bytes = part.bytes().await.map_err(broken)?;
        match file {
            Some(name) => {
                items.push(NewItem {
                    kind: kind_of(&name, media_type.as_deref()),
                    source: name,
                    bytes: bytes.to_vec(),
                    partial: None,
                });
            }
            None if field == "chunk_tokens" => {
                let number = std::str::from_utf8(&bytes)
                    .ok()
                    .and_then(|text| text.trim().parse().ok());
                let wrong = || ApiError::bad_request("The field 'chunk_tokens' must be a whole number");
                chunk_tokens = Some(number.ok_or_else(wrong)?);
            }
            None => {}
        }
    }
    Ok((items, chunk_tokens))
}

/// What an uploaded file is. The media type decides where it says something; browsers often say only
/// that it is bytes. `None` for what cannot be read, which the job reports without stopping at it.
fn kind_of(name: &str, media_type: Option<&str>) -> Option<Kind> {
    let by_type = media_type.and_then(Kind::of_media_type);
    let by_name = Kind::of_path(std::path::Path::new(name));
    match (by_type, by_name) {
        // "text/plain" is also what senders say who do not know better.
        (Some(Kind::Plain) | None, Some(kind)) => Some(kind),
        (by_type, _) => by_type,
    }
}

/// List jobs. Finished ones are kept for a week.
#[utoipa::path(
    get, path = "/jobs", tag = "ingestion",
    params(("collection" = Option<String>, Query, description = "Only jobs of this collection")),
    responses((status = 200, body = JobList), (status = 400, body = ErrorBody)),
)]
pub(super) async fn list(State(state): State<AppState>, params: Params) -> Result<Json<JobList>, ApiError> {
    let collection = params.get("collection").map(CollectionName::parse).transpose()?;
    let jobs = state.jobs.list(collection.as_ref()).await?;
    Ok(Json(JobList {
        jobs: jobs.into_iter().map(JobBody::from).collect(),
    }))
}

/// Get a job: its state, how far it is, and what could not be ingested.
#[utoipa::path(
    get, path = "/jobs/{id}", tag = "ingestion",
    params(("id" = String, Path, description = "The job")),
    responses((status = 200, body = JobBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn show(
    State(state): State<AppState>,
    PathText(id): PathText,
) -> Result<Json<JobBody>, ApiError> {
    let job = state.jobs.get(&id).await?;
    job.map(|job| Json(job.into())).ok_or_else(|| no_job(&id))
}

/// Cancel a job. What it has stored stays; a job that is finished already is not changed.
#[utoipa::path(
    delete, path = "/jobs/{id}", tag = "ingestion",
    params(("id" = String, Path, description = "The job")),
    responses((status = 200, body = JobBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn cancel(
    State(state): State<AppState>,
    PathText(id): PathText,
) -> Result<Json<JobBody>, ApiError> {
    let job = state.jobs.cancel(&id).await?;
    job.map(|job| Json(job.into())).ok_or_else(|| no_job(&id))
}

fn no_job(id: &str) -> ApiError {
    ApiError::not_found(format!(
        "Job '{}' not found",
        ragstone_core::collection::shorten(id)
    ))
}

impl From<Job> for JobBody {
    fn from(job: Job) -> Self {
        let report = job.report;
        let DocumentCounts {
            added,
            changed,
            unchanged,
            removed,
            failed,
            skipped: _,
        } = report.documents;
        let documents_done = report.documents_done();
        let documents = DocumentCountsBody {
            added,
            changed,
            unchanged,
            removed,
            failed,
        };
        let ChunkCounts {
            added,
            changed,
            unchanged,
            removed,
            embedded,
            reused,
        } = report.chunks;
        let chunks = ChunkCountsBody {
            added,
            changed,
            unchanged,
            removed,
            embedded,
            reused,
        };
        let chunks_done = embedded + reused + unchanged;
        let until = job.finished.unwrap_or_else(|| Timestamp::now().as_millisecond());
        let seconds = job
            .started
            .map_or(0.0, |started| (until - started).max(1) as f64 / 1000.0);
        let rate = if seconds > 0.0 {
            (embedded + reused) as f64 / seconds
        } else {
            0.0
        };
        Self {
            id: job.id,
            collection: job.collection,
            state: job.state.name(),
            created_at: time(job.created),
            started_at: job.started.map(time),
            finished_at: job.finished.map(time),
            items: job.items,
            progress: ProgressBody {
                documents_done,
                bytes_done: report.bytes.min(job.bytes),
                bytes_total: job.bytes,
                chunks_done,
                chunks_per_second: (rate * 10.0).round() / 10.0,
                tokens: report.tokens,
            },
            documents,
            chunks,
            errors: report.errors.into_iter().map(ItemErrorBody::from).collect(),
            more_errors: report.more_errors,
            warnings: report.warnings.into_iter().map(ItemErrorBody::from).collect(),
            error: job.error,
        }
    }
}

fn time(millis: Millis) -> String {
    Timestamp::from_millisecond(millis)
        .unwrap_or_default()
        .to_string()
}
