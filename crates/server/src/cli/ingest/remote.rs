//! Ingestion through a running server.

mod lines;

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::call::CallError;
use ragstone_core::collection::{CollectionName, EMBEDDING_MODEL};
use ragstone_core::document::{DocumentId, Metadata};
use ragstone_core::filter::Filter;
use ragstone_core::storage::{MetadataUpdate, Page, Selection};
use ragstone_ingest::jobs::check_source;
use ragstone_ingest::report::{ChunkCounts, DocumentCounts, ItemError};
use ragstone_ingest::walk::{SourceFile, Walk};
use ragstone_ingest::{
    Earlier, FileKind, FileRows, IngestedSource, InputOptions, KnownFiles, Progress, ROWS_STAY, Report,
    UNKNOWN_TYPE,
};
use ragstone_providers::ragstone::{JobState, RagstoneClient, SourcePage};
use serde::Deserialize;
use serde_json::{Value, json};

use self::lines::{LineParts, LiveLines};
use super::{IngestArgs, STDIN, machine, other_model, show};
use crate::cli::remote::{KEY, RemoteArgs, no_server, refusal};
use crate::listen;

/// Size of one request. The limit of the server is larger, and base64 adds a third.
const UPLOAD_BYTES: u64 = 16 << 20;
const UPLOAD_FILES: usize = 256;
/// A file that cannot be sent in parts must fit into one request.
const MAX_FILE_BYTES: u64 = 44 << 20;
/// Jobs at the server while the next is read.
const JOBS_AHEAD: usize = 2;
const POLL: Duration = Duration::from_millis(300);
/// The longest line that a server reads.
const ROW_BYTES: usize = 16 << 20;
/// The longest list in a request or answer.
const MAX_LIST: usize = 1000;

struct Upload<'a> {
    client: &'a RagstoneClient,
    collection: &'a CollectionName,
    chunk_tokens: Option<usize>,
    csv_as_text: bool,
    progress: &'a Progress,
    jobs: VecDeque<String>,
    /// Sum of the finished jobs.
    finished: Report,
    documents: Vec<Value>,
    bytes: u64,
}

pub(super) async fn ingest(
    args: &IngestArgs,
    url: String,
    collection: &CollectionName,
    mut walk: Walk,
) -> anyhow::Result<()> {
    let client = RemoteArgs::at(url.clone()).client()?;
    ensure_collection(&client, collection, args.model.as_deref())
        .await
        .map_err(|error| no_server(error, &url))?;
    let known = async || {
        let sources = sources(&client, collection).await?;
        anyhow::Ok(KnownFiles::new(&machine(), sources))
    };
    args.name_files(&mut walk, &known().await?);
    let progress = Arc::new(Progress::default());
    let total: u64 = walk.files.iter().map(|file| file.bytes).sum();
    let shown = show::IngestDisplay::start(Arc::clone(&progress), total, args.json);
    let covered = std::mem::take(&mut walk.covered);
    let mut upload = Upload {
        client: &client,
        collection,
        chunk_tokens: args.chunk_tokens,
        csv_as_text: args.csv_as_text(),
        progress: &progress,
        jobs: VecDeque::new(),
        finished: Report::default(),
        documents: Vec::new(),
        bytes: 0,
    };
    let done = tokio::select! {
        done = upload.all(args, walk) => done,
        () = listen::stop_signal() => Err(anyhow::anyhow!(
            "stopped; documents ingested so far are stored, and the same command continues"
        )),
    };
    if done.is_err() {
        for job in std::mem::take(&mut upload.jobs) {
            let _ = client.cancel_job(&job).await;
        }
    } else if args.prune {
        let gone = known().await?.gone(&covered);
        remove_sources(&client, collection, &gone, &progress).await?;
    }
    shown.stop().await;
    show::report(&progress, &args.collection, args.json)?;
    done?;
    show::failures(&progress, "ingested")
}

impl Upload<'_> {
    async fn all(&mut self, args: &IngestArgs, walk: Walk) -> anyhow::Result<()> {
        for (source, problem) in &walk.problems {
            self.fail(source, problem);
        }
        for file in walk.files {
            let source = file.source.clone();
            if let Err(problem) = self.file(args, file).await? {
                self.fail(&source, &problem);
            }
        }
        if args.paths.iter().any(|path| path == STDIN) {
            let mut lines = LiveLines::of(std::io::stdin());
            let source = args.prefixed(&args.source);
            let options = args.stdin_options();
            let mut rows = FileRows::default();
            while let Some(part) = lines.part().await {
                let part = part?;
                let earlier = rows.part(FileKind::JsonLines, &part, ROW_BYTES);
                self.part(&source, &part, earlier, &options).await?;
            }
        }
        self.send().await?;
        self.wait_until(0).await
    }

    /// The inner error is about this file, the outer one about everything.
    async fn file(&mut self, args: &IngestArgs, file: SourceFile) -> anyhow::Result<Result<(), String>> {
        let Some(kind) = file.kind else {
            if file.named {
                return Ok(Err(UNKNOWN_TYPE.to_owned()));
            }
            self.finished.skip(&file.source);
            return Ok(Ok(()));
        };
        if let Err(problem) = check_source(&file.source) {
            return Ok(Err(problem.to_owned()));
        }
        let options = match args.file_options(&file) {
            Ok(options) => options,
            Err(problem) => return Ok(Err(problem)),
        };
        if kind == FileKind::JsonLines && file.bytes > UPLOAD_BYTES {
            return self.file_in_parts(&file, &options).await;
        }
        if file.bytes > MAX_FILE_BYTES {
            let (size, most) = (file.bytes >> 20, MAX_FILE_BYTES >> 20);
            return Ok(Err(format!(
                "it has {size} MB; at most {most} MB can be sent to a server"
            )));
        }
        let bytes = match std::fs::read(&file.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Err("it is no longer there".to_owned()));
            }
            Err(error) => return Ok(Err(error.to_string())),
        };
        if self.bytes + bytes.len() as u64 > UPLOAD_BYTES || self.documents.len() >= UPLOAD_FILES {
            self.send().await?;
        }
        self.add(&file.source, kind, &bytes, None, &options);
        Ok(Ok(()))
    }

    /// Sends a file of lines that is too large for one request. The server sees only its parts, so that
    /// rows which are missing from the whole file are removed here.
    async fn file_in_parts(
        &mut self,
        file: &SourceFile,
        options: &InputOptions,
    ) -> anyhow::Result<Result<(), String>> {
        let mut reader = match File::open(&file.path) {
            Ok(file) => BufReader::new(file),
            Err(error) => return Ok(Err(error.to_string())),
        };
        if matches!(reader.fill_buf(), Ok([0xff, 0xfe, ..] | [0xfe, 0xff, ..])) {
            return Ok(Err(
                "it is UTF-16 and too large to be sent as a whole: convert it to UTF-8".to_owned(),
            ));
        }
        self.send().await?;
        self.wait_until(0).await?;
        let before = self.finished.chunks;
        let mut rows = FileRows::default();
        for part in LineParts::new(reader) {
            let part = match part {
                Ok(part) => part,
                Err(error) => return Ok(Err(error.to_string())),
            };
            let earlier = rows.part(FileKind::JsonLines, &part, ROW_BYTES);
            self.part(&file.source, &part, earlier, options).await?;
        }
        self.wait_until(0).await?;
        let done = self.finished.chunks;
        let stored =
            (done.added + done.changed + done.unchanged) - (before.added + before.changed + before.unchanged);
        self.remove_vanished(&file.source, &rows, stored).await?;
        Ok(Ok(()))
    }

    /// Removes rows of earlier runs that are in none of the parts. `stored` is the number of documents of
    /// the parts.
    async fn remove_vanished(&mut self, source: &str, rows: &FileRows, stored: u64) -> anyhow::Result<()> {
        let filter = of_source(source)?;
        let page = |limit: usize, offset: u64| {
            let page = Page { limit, offset };
            self.client.documents(self.collection, &filter, page)
        };
        if page(0, 0).await.map_err(explain)?.total <= stored {
            return Ok(());
        }
        if rows.has_bad() {
            self.finished.warn(source, ROWS_STAY);
            return Ok(());
        }
        let mut ids: Vec<DocumentId> = Vec::new();
        let mut sections = HashSet::new();
        for offset in (0..).step_by(MAX_LIST) {
            let documents = page(MAX_LIST, offset).await.map_err(explain)?.documents;
            let is_last = documents.len() < MAX_LIST;
            for document in documents {
                let section = document.metadata.get("section_id").and_then(Value::as_str);
                let section = section.unwrap_or_default();
                if !rows.has_section(source, section) {
                    sections.insert(section.to_owned());
                    ids.push(document.id);
                }
            }
            if is_last {
                break;
            }
        }
        for ids in ids.chunks(MAX_LIST) {
            let selection = Selection::Ids(ids.to_vec());
            let deleted = self.client.delete_documents(self.collection, selection).await;
            deleted.map_err(explain)?;
        }
        self.finished.documents.removed += sections.len() as u64;
        self.finished.chunks.removed += ids.len() as u64;
        self.show_finished();
        Ok(())
    }

    /// Sends a part of a file in a job of its own.
    async fn part(
        &mut self,
        source: &str,
        bytes: &[u8],
        earlier: Earlier,
        options: &InputOptions,
    ) -> anyhow::Result<()> {
        self.send().await?;
        self.add(source, FileKind::JsonLines, bytes, Some(earlier), options);
        self.send().await
    }

    fn add(
        &mut self,
        name: &str,
        kind: FileKind,
        bytes: &[u8],
        earlier: Option<Earlier>,
        options: &InputOptions,
    ) {
        self.bytes += bytes.len() as u64;
        let mut document = json!({
            "name": name,
            "media_type": media_type(kind),
            "encoding": "base64",
            "content": base64::engine::general_purpose::STANDARD.encode(bytes),
            "metadata": options.metadata,
            "origin": options.origin,
        });
        if let Some(earlier) = earlier {
            document["partial"] = true.into();
            document["lines_before"] = earlier.lines.into();
            document["rows_before"] = json!(earlier.rows);
        }
        self.documents.push(document);
    }

    async fn send(&mut self) -> anyhow::Result<()> {
        let documents = std::mem::take(&mut self.documents);
        self.bytes = 0;
        if documents.is_empty() {
            return Ok(());
        }
        self.wait_until(JOBS_AHEAD - 1).await?;
        let csv_types = self.csv_as_text.then_some("text");
        let body = json!({"documents": documents, "chunk_tokens": self.chunk_tokens, "csv_types": csv_types});
        let job = self.client.ingest(self.collection, &body).await;
        self.jobs.push_back(job.map_err(explain_call)?);
        Ok(())
    }

    /// Waits until no more than `left` jobs are unfinished.
    async fn wait_until(&mut self, left: usize) -> anyhow::Result<()> {
        while self.jobs.len() > left {
            let Some(id) = self.jobs.front() else { break };
            let job = self.client.job::<JobReport>(id).await.map_err(explain_call)?;
            let mut report = self.finished.clone();
            report.add(&job.report.report());
            self.progress.update(|shown| *shown = report.clone());
            match job.state {
                JobState::Done => {
                    self.finished = report;
                    self.jobs.pop_front();
                }
                JobState::Failed | JobState::Cancelled => {
                    let outcome = match job.state {
                        JobState::Cancelled => "the job was cancelled",
                        _ => "the job failed",
                    };
                    return Err(anyhow::anyhow!(job.error.unwrap_or_else(|| outcome.to_owned())));
                }
                JobState::Queued | JobState::Running => tokio::time::sleep(POLL).await,
            }
        }
        Ok(())
    }

    fn fail(&mut self, source: &str, problem: &str) {
        self.finished.fail(source, problem);
        self.show_finished();
    }

    fn show_finished(&self) {
        let report = self.finished.clone();
        self.progress.update(|shown| *shown = report);
    }
}

#[derive(Deserialize)]
struct JobReport {
    progress: JobProgress,
    documents: RemoteCounts,
    chunks: ChunkCounts,
    errors: Vec<ItemError>,
    #[serde(default)]
    more_errors: u64,
    #[serde(default)]
    warnings: Vec<ItemError>,
}

#[derive(Deserialize)]
struct JobProgress {
    bytes_done: u64,
    /// Absent in answers of older servers.
    #[serde(default)]
    tokens: u64,
}

#[derive(Deserialize)]
struct RemoteCounts {
    added: u64,
    changed: u64,
    unchanged: u64,
    removed: u64,
    failed: u64,
}

impl JobReport {
    fn report(&self) -> Report {
        Report {
            documents: DocumentCounts {
                added: self.documents.added,
                changed: self.documents.changed,
                unchanged: self.documents.unchanged,
                removed: self.documents.removed,
                failed: self.documents.failed,
                skipped: 0,
            },
            chunks: self.chunks,
            tokens: self.progress.tokens,
            bytes: self.progress.bytes_done,
            errors: self.errors.clone(),
            more_errors: self.more_errors,
            warnings: self.warnings.clone(),
            ..Report::default()
        }
    }
}

fn media_type(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Markdown => "text/markdown",
        FileKind::Html => "text/html",
        FileKind::Plain => "text/plain",
        FileKind::Code => "text/x-code",
        FileKind::Pdf => "application/pdf",
        FileKind::JsonLines => "application/jsonl",
        FileKind::Csv => "text/csv",
    }
}

/// The wanted model or the first one, if the server has it.
async fn loaded_model(client: &RagstoneClient, wanted: Option<&str>) -> anyhow::Result<String> {
    let loaded = client.embedding_models().await.map_err(explain_call)?;
    let first = loaded
        .first()
        .context("the server has no embedding model loaded")?;
    let model = wanted.unwrap_or(first);
    anyhow::ensure!(
        loaded.iter().any(|id| id == model),
        "the server has no embedding model '{model}'; it has {}",
        loaded.join(", ")
    );
    Ok(model.to_owned())
}

async fn ensure_collection(
    client: &RagstoneClient,
    name: &CollectionName,
    wanted: Option<&str>,
) -> anyhow::Result<()> {
    match client.collection(name).await {
        Ok(there) => match (there.embedding_model(), wanted) {
            (Some(there), Some(wanted)) if there != wanted => anyhow::bail!(other_model(name, there, wanted)),
            (None, Some(_)) if there.count == 0 => {
                let metadata = model_metadata(loaded_model(client, wanted).await?);
                let updated = client
                    .update_metadata(name, metadata, MetadataUpdate::Merge)
                    .await;
                updated.map(|_| ()).map_err(explain)
            }
            _ => Ok(()),
        },
        Err(BackendError::CollectionNotFound(_)) => {
            let metadata = model_metadata(loaded_model(client, wanted).await?);
            match client.create_collection(name, metadata).await {
                // Another client may have created it just now.
                Ok(_) | Err(BackendError::CollectionExists(_)) => Ok(()),
                Err(error) => Err(explain(error)),
            }
        }
        Err(error) => Err(explain(error)),
    }
}

fn model_metadata(model: String) -> Metadata {
    Metadata::from_iter([(EMBEDDING_MODEL.to_owned(), model.into())])
}

/// Chunks of a source. Documents that were added otherwise have no content hash.
fn of_source(source: &str) -> anyhow::Result<Filter> {
    let filter = json!({"$and": [{"source": source}, {"content_hash": {"$exists": true}}]});
    Ok(Filter::parse(&filter)?)
}

/// Sources of a collection; none where an older server does not list them.
async fn sources(
    client: &RagstoneClient,
    collection: &CollectionName,
) -> anyhow::Result<Vec<IngestedSource>> {
    let mut sources = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page: SourcePage<IngestedSource> = match client.sources(collection, after.as_deref()).await {
            Ok(page) => page,
            Err(CallError::Answered(answer)) if answer.status == 404 => {
                tracing::warn!(
                    "the server is too old to list sources; files are known by name, and --prune removes none"
                );
                return Ok(Vec::new());
            }
            Err(error) => return Err(explain_call(error)),
        };
        sources.extend(page.sources);
        after = page.next;
        if after.is_none() {
            return Ok(sources);
        }
    }
}

async fn remove_sources(
    client: &RagstoneClient,
    collection: &CollectionName,
    sources: &[String],
    progress: &Progress,
) -> anyhow::Result<()> {
    for sources in sources.chunks(MAX_LIST) {
        let removed = client.remove_sources(collection, sources).await;
        let removed = removed.map_err(explain_call)?;
        progress.update(|report| {
            report.documents.removed += removed.documents;
            report.chunks.removed += removed.chunks;
        });
    }
    Ok(())
}

fn explain(error: BackendError) -> anyhow::Error {
    match error {
        BackendError::Call(error) => explain_call(error),
        other => other.into(),
    }
}

fn explain_call(error: CallError) -> anyhow::Error {
    match error {
        CallError::Answered(answer) => anyhow::anyhow!(refusal(&answer, &[KEY])),
        other => other.into(),
    }
}
