//! Ingestion as jobs that split, embed and store documents in the background.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use base64::Engine as _;
use futures::stream;
use jiff::Timestamp;
use ragstone_core::collection::{CollectionName, shorten};
use ragstone_core::document::Metadata;
use ragstone_core::records::Millis;
use ragstone_ingest::jobs::{Job, NewItem, NewJob};
use ragstone_ingest::report::{ChunkCounts, DocumentCounts, ItemError};
use ragstone_ingest::{Earlier, FileKind, InputOptions, Progress, Report};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::{CollectionPath, JsonBody, LargeBody, Params, PathText, optional_objects};
use super::state::AppState;

const MAX_ITEMS: usize = 10_000;
const MAX_ORIGIN_BYTES: usize = 8192;
const MAX_SOURCES: u64 = 10_000;
const MAX_REMOVED: usize = 1_000;

/// Documents to read and split. A multipart upload does the same with one part per file and the fields
/// `chunk_tokens`, `csv_types` and `metadata`.
#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"documents": [{"name": "guide.md", "content": "# Guide\n\nOpen the dome at dusk.", "metadata": {"team": "dome"}}]}))]
pub(super) struct IngestBody {
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(required = true)]
    documents: Option<Vec<IngestDocument>>,
    /// Largest chunk, in tokens of the collection's model.
    chunk_tokens: Option<usize>,
    /// Types of CSV columns: `auto` (the default) infers numbers and booleans, `text` keeps strings.
    csv_types: Option<String>,
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, IgnoredAny>,
}

#[derive(Deserialize, ToSchema)]
pub(super) struct IngestDocument {
    /// Name of the document, stored as `source`. Ingesting the same name again replaces the document.
    #[schema(required = true)]
    name: Option<String>,
    #[serde(alias = "text")]
    #[schema(required = true)]
    content: Option<String>,
    /// Media type, such as `text/markdown`. Default: by the extension of the name.
    media_type: Option<String>,
    /// `base64` for binary content, such as PDF.
    encoding: Option<String>,
    /// Metadata of every chunk. Fields of the document itself, such as front matter, take precedence.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Metadata>,
    /// Origin of the document at the client, such as `machine:/path`. Listed with the sources.
    origin: Option<String>,
    /// Whether this is a part of the rows of a JSONL or CSV file. Rows that are missing are kept.
    partial: Option<bool>,
    /// Number of lines of the parts before this one, for error messages.
    lines_before: Option<u64>,
    /// Rows of this part that came in parts before it, and how often: by their id, or the first 16
    /// digits of the SHA-256 of their text.
    rows_before: Option<BTreeMap<String, u32>>,
    #[serde(flatten)]
    #[schema(ignore)]
    unknown: BTreeMap<String, IgnoredAny>,
}

const BODY_FIELDS: [&str; 3] = ["documents", "chunk_tokens", "csv_types"];
const FORM_FIELDS: [&str; 3] = ["metadata", "chunk_tokens", "csv_types"];
const DOCUMENT_FIELDS: [&str; 9] = [
    "name",
    "content",
    "media_type",
    "encoding",
    "metadata",
    "origin",
    "partial",
    "lines_before",
    "rows_before",
];
/// Names that are less similar are no suggestion.
const MIN_SIMILARITY: f64 = 0.75;
/// Subject of warnings about the request itself.
const REQUEST: &str = "request";

/// Any number of files, with settings for all of them.
#[derive(ToSchema)]
#[allow(dead_code, reason = "it only describes the form")]
pub(super) struct IngestForm {
    /// One part per file, whatever the name of the part. The file name is the name of the document.
    #[schema(value_type = String, format = Binary)]
    file: Vec<u8>,
    /// Largest chunk, in tokens of the collection's model.
    chunk_tokens: Option<usize>,
    /// Types of CSV columns: `auto` or `text`.
    csv_types: Option<String>,
    /// Metadata of all files, as a JSON object.
    metadata: Option<String>,
}

/// A job and its progress.
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
    /// Number of documents that were sent.
    items: u64,
    progress: ProgressBody,
    documents: DocumentCountsBody,
    chunks: ChunkCountsBody,
    /// Documents that could not be ingested, with the reason. The others are ingested.
    errors: Vec<ItemErrorBody>,
    /// Number of errors that are not listed.
    #[serde(skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    more_errors: u64,
    /// Problems that did not make a document fail.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    warnings: Vec<ItemErrorBody>,
    /// Reason that the job failed, or is waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ProgressBody {
    /// Files, or rows of CSV and JSONL files.
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

/// Ingest documents: split, embed and store them in the background. Only changes since the last
/// ingestion are embedded, and parts that are gone from a document are removed.
#[utoipa::path(
    post, path = "/collections/{name}/ingest", tag = "ingestion",
    params(("name" = String, Path, description = "The collection")),
    request_body(content((IngestBody = "application/json"), (IngestForm = "multipart/form-data"))),
    responses(
        (status = 200, body = JobBody, description = "The job is durable and will be done. Unknown fields of the request are named in `warnings`"),
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
    let request = match multer::parse_boundary(&body.content_type) {
        Ok(boundary) => read_multipart(&body, boundary).await?,
        Err(multer::Error::NoBoundary) => {
            return Err(ApiError::bad_request(
                "The content type of a multipart body needs a boundary: multipart/form-data; boundary=...",
            ));
        }
        Err(_) => read_json(body.json().await?)?,
    };
    let IngestRequest {
        items,
        chunk_tokens,
        warnings,
    } = request;
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
    let mut body = JobBody::from(job);
    body.warnings
        .extend(warnings.warnings.into_iter().map(ItemErrorBody::from));
    Ok(Json(body))
}

/// A request to ingest, in whichever form it came.
struct IngestRequest {
    items: Vec<NewItem>,
    chunk_tokens: Option<usize>,
    /// Only its warnings are used.
    warnings: Report,
}

/// Warns of a field that is not known, and suggests the most similar one.
fn warn_unknown(warnings: &mut Report, source: &str, field: &str, known: &[&str]) {
    let similarity = |name: &&&str| strsim::jaro_winkler(field, name);
    let nearest = known
        .iter()
        .max_by(|one, other| similarity(one).total_cmp(&similarity(other)))
        .filter(|name| similarity(name) >= MIN_SIMILARITY);
    let field = shorten(field);
    warnings.warn(
        source,
        match nearest {
            Some(name) => format!("unknown field '{field}' was ignored; did you mean '{name}'?"),
            None => format!("unknown field '{field}' was ignored"),
        },
    );
}

fn csv_as_text(types: Option<&str>) -> Result<bool, ApiError> {
    match types {
        None | Some("auto") => Ok(false),
        Some("text") => Ok(true),
        Some(other) => Err(ApiError::bad_request(format!(
            "Field 'csv_types' is '{}'; it must be 'auto' or 'text'",
            shorten(other)
        ))),
    }
}

fn read_json(body: IngestBody) -> Result<IngestRequest, ApiError> {
    let csv_as_text = csv_as_text(body.csv_types.as_deref())?;
    let documents = body.documents.unwrap_or_default();
    let mut warnings = Report::default();
    for field in body.unknown.keys() {
        warn_unknown(&mut warnings, REQUEST, field, &BODY_FIELDS);
    }
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
        if document
            .origin
            .as_ref()
            .is_some_and(|origin| origin.len() > MAX_ORIGIN_BYTES)
        {
            return Err(at(&format!("'origin' has more than {MAX_ORIGIN_BYTES} bytes")));
        }
        for field in document.unknown.keys() {
            warn_unknown(&mut warnings, &name, field, &DOCUMENT_FIELDS);
        }
        items.push(NewItem {
            kind: document
                .media_type
                .as_deref()
                .and_then(FileKind::of_media_type)
                .or_else(|| FileKind::of_path(std::path::Path::new(&name))),
            source: name,
            bytes,
            partial: document.partial.unwrap_or(false).then(|| Earlier {
                lines: document.lines_before.unwrap_or_default(),
                rows: document.rows_before.unwrap_or_default(),
            }),
            options: InputOptions {
                origin: document.origin,
                metadata: document.metadata.unwrap_or_default(),
                csv_as_text,
            },
        });
    }
    Ok(IngestRequest {
        items,
        chunk_tokens: body.chunk_tokens,
        warnings,
    })
}

async fn read_multipart(body: &LargeBody, boundary: String) -> Result<IngestRequest, ApiError> {
    let broken =
        |error: multer::Error| ApiError::bad_request(format!("The multipart body cannot be read: {error}"));
    let whole = stream::iter([Ok::<_, std::convert::Infallible>(body.bytes.clone())]);
    let mut parts = multer::Multipart::new(whole, boundary);
    let mut items: Vec<NewItem> = Vec::new();
    let mut chunk_tokens = None;
    let mut options = InputOptions::default();
    let mut warnings = Report::default();
    while let Some(part) = parts.next_field().await.map_err(broken)? {
        let file = part.file_name().map(str::to_owned);
        let field = part.name().unwrap_or_default().to_owned();
        let media_type = part.content_type().map(ToString::to_string);
        let bytes = part.bytes().await.map_err(broken)?;
        if let Some(name) = file {
            items.push(NewItem {
                kind: kind_of(&name, media_type.as_deref()),
                source: name,
                bytes: bytes.to_vec(),
                partial: None,
                options: InputOptions::default(),
            });
            continue;
        }
        let text = String::from_utf8_lossy(&bytes);
        match field.as_str() {
            "chunk_tokens" => {
                let wrong = |_| ApiError::bad_request("The field 'chunk_tokens' must be a whole number");
                chunk_tokens = Some(text.trim().parse().map_err(wrong)?);
            }
            "csv_types" => options.csv_as_text = csv_as_text(Some(text.trim()))?,
            "metadata" => {
                let wrong = |_| ApiError::bad_request("The field 'metadata' must be a JSON object");
                options.metadata = serde_json::from_str(&text).map_err(wrong)?;
            }
            _ => warn_unknown(&mut warnings, REQUEST, &field, &FORM_FIELDS),
        }
    }
    for item in &mut items {
        item.options = options.clone();
    }
    Ok(IngestRequest {
        items,
        chunk_tokens,
        warnings,
    })
}

/// The kind of an uploaded file, by its media type where that is specific. `None` for a type that cannot
/// be read, which the job reports.
fn kind_of(name: &str, media_type: Option<&str>) -> Option<FileKind> {
    let by_type = media_type.and_then(FileKind::of_media_type);
    let by_name = FileKind::of_path(std::path::Path::new(name));
    match (by_type, by_name) {
        // "text/plain" is also sent for files of unknown type.
        (Some(FileKind::Plain) | None, Some(kind)) => Some(kind),
        (by_type, _) => by_type,
    }
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"sources": [{"source": "guide.md", "origin": "laptop:/home/me/docs/guide.md", "empty": false}], "next": null}))]
pub(super) struct SourceList {
    /// In the order of their names.
    sources: Vec<SourceBody>,
    /// Value of `after` for the next page; null on the last one.
    next: Option<String>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct SourceBody {
    /// Name of an ingested document or file.
    source: String,
    /// Origin at the client; null where the client did not send one.
    origin: Option<String>,
    /// Whether it has no documents, because it has no text.
    empty: bool,
}

/// List the sources that were ingested into a collection.
#[utoipa::path(
    get, path = "/collections/{name}/sources", tag = "ingestion",
    params(
        ("name" = String, Path, description = "The collection"),
        ("after" = Option<String>, Query, description = "Only sources after this one, from `next` of the page before"),
        ("limit" = Option<u64>, Query, description = "Largest number of sources (default and most: 10,000)"),
    ),
    responses((status = 200, body = SourceList), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn sources(
    State(state): State<AppState>,
    CollectionPath(collection): CollectionPath,
    params: Params,
) -> Result<Json<SourceList>, ApiError> {
    let limit = params.count("limit", MAX_SOURCES)?.clamp(1, MAX_SOURCES) as usize;
    let after = params.get("after").unwrap_or_default();
    let all = state.jobs.ingestion().sources(&collection).await?;
    let first = all.partition_point(|source| source.source.as_str() <= after);
    let mut sources: Vec<SourceBody> = all
        .into_iter()
        .skip(first)
        .take(limit + 1)
        .map(|source| SourceBody {
            source: source.source,
            // Older versions stored paths of the server itself.
            origin: source.origin.filter(|origin| !origin.starts_with('/')),
            empty: source.empty,
        })
        .collect();
    let has_more = sources.len() > limit;
    sources.truncate(limit);
    let next = sources
        .last()
        .filter(|_| has_more)
        .map(|last| last.source.clone());
    Ok(Json(SourceList { sources, next }))
}

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"sources": ["guide.md"]}))]
pub(super) struct RemoveSources {
    /// Names of the sources, at most 1,000.
    sources: Vec<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"documents": 1, "chunks": 12}))]
pub(super) struct RemovedSources {
    /// Sources that were removed.
    documents: u64,
    /// Documents of the collection that were removed with them.
    chunks: u64,
}

/// Remove sources with all documents that ingestion made of them.
#[utoipa::path(
    delete, path = "/collections/{name}/sources", tag = "ingestion",
    params(("name" = String, Path, description = "The collection")),
    request_body = RemoveSources,
    responses((status = 200, body = RemovedSources), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)),
)]
pub(super) async fn remove_sources(
    State(state): State<AppState>,
    CollectionPath(collection): CollectionPath,
    JsonBody(body): JsonBody<RemoveSources>,
) -> Result<Json<RemovedSources>, ApiError> {
    if body.sources.len() > MAX_REMOVED {
        return Err(ApiError::bad_request(format!(
            "Field 'sources' has {} names; at most {MAX_REMOVED} are allowed: send them in several requests",
            body.sources.len()
        )));
    }
    let progress = Progress::default();
    for source in &body.sources {
        let ingestion = state.jobs.ingestion();
        ingestion.remove_source(&collection, source, &progress).await?;
    }
    let removed = progress.snapshot();
    Ok(Json(RemovedSources {
        documents: removed.documents.removed,
        chunks: removed.chunks.removed,
    }))
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

/// Get a job: its state, its progress, and its errors.
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

/// Cancel a job. Documents that it stored are kept. A finished job does not change.
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
    ApiError::not_found(format!("Job '{}' not found", shorten(id)))
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
