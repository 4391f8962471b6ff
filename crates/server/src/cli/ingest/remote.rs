//! Ingestion through a running server.

mod lines;

use std::collections::{HashSet, VecDeque};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use ragstone_core::call::CallError;
use ragstone_core::collection::{CollectionName, EMBEDDING_MODEL};
use ragstone_ingest::jobs::check_source;
use ragstone_ingest::report::{ChunkCounts, DocumentCounts, ItemError};
use ragstone_ingest::walk::{SourceFile, Walk};
use ragstone_ingest::{
    Earlier, FileKind, FileRows, IngestedSource, InputOptions, KnownFiles, Progress, ROWS_STAY, Report,
    UNKNOWN_TYPE,
};
use ragstone_providers::http::{Call, Repeat, ServiceClient};
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
    client: &'a ServiceClient,
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
    let client = RemoteArgs::at(url.clone()).http_client()?;
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
            let _ = ask(&client, Call::delete(format!("jobs/{job}"))).await;
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
        let filter = of_source(source).to_string();
        let path = format!("collections/{}/documents", self.collection);
        let page = |limit: usize, offset: usize| {
            Call::get(path.clone())
                .query("where", filter.clone())
                .query("limit", limit.to_string())
                .query("offset", offset.to_string())
        };
        let there = ask(self.client, page(0, 0)).await?["total"].as_u64();
        if there.unwrap_or_default() <= stored {
            return Ok(());
        }
        if rows.has_bad() {
            self.finished.warn(source, ROWS_STAY);
            return Ok(());
        }
        let mut ids: Vec<String> = Vec::new();
        let mut sections = HashSet::new();
        for offset in (0..).step_by(MAX_LIST) {
            let answer = ask(self.client, page(MAX_LIST, offset)).await?;
            let documents = answer["documents"].as_array().map_or(&[][..], Vec::as_slice);
            for document in documents {
                let section = document["metadata"]["section_id"].as_str().unwrap_or_default();
                if let Some(id) = document["id"].as_str()
                    && !rows.has_section(source, section)
                {
                    ids.push(id.to_owned());
                    sections.insert(section.to_owned());
                }
            }
            if documents.len() < MAX_LIST {
                break;
            }
        }
        for ids in ids.chunks(MAX_LIST) {
            let call = Call::delete(path.clone()).json(&json!({"ids": ids}));
            ask(self.client, call).await?;
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
        let call = Call::post(format!("collections/{}/ingest", self.collection))
            .json(&body)
            .repeat(Repeat::Freely);
        let job = ask(self.client, call).await?;
        let id = job["id"].as_str().context("the server gave no job")?;
        self.jobs.push_back(id.to_owned());
        Ok(())
    }

    /// Waits until no more than `left` jobs are unfinished.
    async fn wait_until(&mut self, left: usize) -> anyhow::Result<()> {
        while self.jobs.len() > left {
            let Some(id) = self.jobs.front() else { break };
            let job: JobAnswer =
                serde_json::from_value(ask(self.client, Call::get(format!("jobs/{id}"))).await?)?;
            let mut report = self.finished.clone();
            report.add(&job.report());
            self.progress.update(|shown| *shown = report.clone());
            match job.state.as_str() {
                "done" => {
                    self.finished = report;
                    self.jobs.pop_front();
                }
                "failed" | "cancelled" => {
                    let why = job.error.unwrap_or_else(|| format!("the job was {}", job.state));
                    return Err(anyhow::anyhow!(why));
                }
                _ => tokio::time::sleep(POLL).await,
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
struct JobAnswer {
    state: String,
    error: Option<String>,
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

impl JobAnswer {
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
async fn loaded_model(client: &ServiceClient, wanted: Option<&str>) -> anyhow::Result<String> {
    let health: Value = ask(client, Call::get("health")).await?;
    let loaded = health["embedding_models"].as_array().into_iter().flatten();
    let loaded: Vec<&str> = loaded.filter_map(|model| model["id"].as_str()).collect();
    let first = loaded
        .first()
        .context("the server has no embedding model loaded")?;
    let model = wanted.unwrap_or(first);
    anyhow::ensure!(
        loaded.contains(&model),
        "the server has no embedding model '{model}'; it has {}",
        loaded.join(", ")
    );
    Ok(model.to_owned())
}

async fn ensure_collection(
    client: &ServiceClient,
    name: &CollectionName,
    wanted: Option<&str>,
) -> anyhow::Result<()> {
    match client
        .call_json::<Value>(Call::get(format!("collections/{name}")))
        .await
    {
        Ok(there) => match (there["metadata"][EMBEDDING_MODEL].as_str(), wanted) {
            (Some(there), Some(wanted)) if there != wanted => anyhow::bail!(other_model(name, there, wanted)),
            (None, Some(_)) if there["count"] == 0 => {
                let model = loaded_model(client, wanted).await?;
                let body = json!({"metadata": {EMBEDDING_MODEL: model}});
                let path = format!("collections/{name}/metadata");
                let call = Call::put(path).query("merge", "true").json(&body);
                ask(client, call).await.map(|_| ())
            }
            _ => Ok(()),
        },
        Err(CallError::Answered(answer)) if answer.status == 404 => {
            let model = loaded_model(client, wanted).await?;
            let body = json!({"name": name.as_str(), "embedding_model": model});
            let call = Call::post("collections")
                .json(&body)
                .repeat(Repeat::IfUnprocessed);
            match client.call_json::<Value>(call).await {
                Ok(_) => Ok(()),
                // Another client created it just now.
                Err(CallError::Answered(answer)) if answer.status == 409 => Ok(()),
                Err(error) => Err(explain(error)),
            }
        }
        Err(error) => Err(explain(error)),
    }
}

/// Chunks of a source. Documents that were added otherwise have no content hash.
fn of_source(source: &str) -> Value {
    json!({"$and": [{"source": source}, {"content_hash": {"$exists": true}}]})
}

#[derive(Deserialize)]
struct SourcePage {
    sources: Vec<IngestedSource>,
    next: Option<String>,
}

/// Sources of a collection; none where an older server does not list them.
async fn sources(client: &ServiceClient, collection: &CollectionName) -> anyhow::Result<Vec<IngestedSource>> {
    let mut sources = Vec::new();
    let mut after = None;
    loop {
        let mut call = Call::get(format!("collections/{collection}/sources"));
        if let Some(after) = after.take() {
            call = call.query("after", after);
        }
        let page: SourcePage = match client.call_json(call).await {
            Ok(page) => page,
            Err(CallError::Answered(answer)) if answer.status == 404 => {
                tracing::warn!(
                    "the server is too old to list sources; files are known by name, and --prune removes none"
                );
                return Ok(Vec::new());
            }
            Err(error) => return Err(explain(error)),
        };
        sources.extend(page.sources);
        after = page.next;
        if after.is_none() {
            return Ok(sources);
        }
    }
}

async fn remove_sources(
    client: &ServiceClient,
    collection: &CollectionName,
    sources: &[String],
    progress: &Progress,
) -> anyhow::Result<()> {
    for sources in sources.chunks(MAX_LIST) {
        let call =
            Call::delete(format!("collections/{collection}/sources")).json(&json!({"sources": sources}));
        let removed = ask(client, call).await?;
        progress.update(|report| {
            report.documents.removed += removed["documents"].as_u64().unwrap_or_default();
            report.chunks.removed += removed["chunks"].as_u64().unwrap_or_default();
        });
    }
    Ok(())
}

async fn ask(client: &ServiceClient, call: Call) -> anyhow::Result<Value> {
    client.call_json(call).await.map_err(explain)
}

fn explain(error: CallError) -> anyhow::Error {
    match error {
        CallError::Answered(answer) => anyhow::anyhow!(refusal(&answer, &[KEY])),
        other => other.into(),
    }
}
