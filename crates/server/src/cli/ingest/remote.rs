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
use ragstone_providers::http::{Call, Repeat, ServiceClient};
use ragstone_rag::ingest::report::{ChunkCounts, DocumentCounts, ItemError};
use ragstone_rag::ingest::walk::{Covered, Found, FoundFile, is_gone, path_of};
use ragstone_rag::ingest::{Earlier, FileRows, Kind, Progress, ROWS_STAY, Report, UNKNOWN_TYPE};
use ragstone_rag::jobs::check_source;
use serde::Deserialize;
use serde_json::{Value, json};

use self::lines::{LineParts, LiveLines};
use super::{IngestArgs, STDIN, show};
use crate::cli::remote::{KEY, RemoteArgs, no_server, refusal};
use crate::listen;

/// One request has about this much; the server's own limit is larger, and base64 adds a third.
const UPLOAD_BYTES: u64 = 16 << 20;
const UPLOAD_FILES: usize = 256;
/// A file that cannot be cut must fit into one request.
const MAX_FILE_BYTES: u64 = 44 << 20;
/// Jobs that wait at the server while the next is read.
const JOBS_AHEAD: usize = 2;
const POLL: Duration = Duration::from_millis(300);
/// The longest line that a server reads.
const ROW_BYTES: usize = 16 << 20;
/// The server refuses longer lists in a filter, and gives no longer ones.
const MAX_LIST: usize = 1000;

struct Upload<'a> {
    client: &'a ServiceClient,
    collection: &'a CollectionName,
    chunk_tokens: Option<usize>,
    progress: &'a Progress,
    jobs: VecDeque<String>,
    /// What the jobs that are finished have done.
    finished: Report,
    documents: Vec<Value>,
    bytes: u64,
}

pub(super) async fn ingest(
    args: &IngestArgs,
    url: String,
    collection: &CollectionName,
    mut found: Found,
) -> anyhow::Result<()> {
    let client = RemoteArgs::at(url.clone()).http_client()?;
    ensure_collection(&client, collection, args.model.as_deref())
        .await
        .map_err(|error| no_server(error, &url))?;
    let progress = Arc::new(Progress::default());
    let total: u64 = found.files.iter().map(|file| file.bytes).sum();
    let shown = show::Shown::start(Arc::clone(&progress), total, args.json);
    let covered = std::mem::take(&mut found.covered);
    let mut upload = Upload {
        client: &client,
        collection,
        chunk_tokens: args.chunk_tokens,
        progress: &progress,
        jobs: VecDeque::new(),
        finished: Report::default(),
        documents: Vec::new(),
        bytes: 0,
    };
    let done = tokio::select! {
        done = upload.all(args, found) => done,
        () = listen::stop_signal() => Err(anyhow::anyhow!(
            "stopped; what was ingested so far is stored, and the same command goes on from there"
        )),
    };
    if done.is_err() {
        for job in std::mem::take(&mut upload.jobs) {
            let _ = ask(&client, Call::delete(format!("jobs/{job}"))).await;
        }
    } else if args.prune {
        prune(args, &client, collection, &covered, &progress).await?;
    }
    shown.stop().await;
    show::report(&progress, &args.collection, args.json)?;
    done?;
    show::failures(&progress, "ingested")
}

impl Upload<'_> {
    async fn all(&mut self, args: &IngestArgs, found: Found) -> anyhow::Result<()> {
        for (source, problem) in &found.problems {
            self.fail(source, problem);
        }
        for file in found.files {
            let source = file.source.clone();
            if let Err(problem) = self.file(file).await? {
                self.fail(&source, &problem);
            }
        }
        if args.paths.iter().any(|path| path == STDIN) {
            let mut lines = LiveLines::of(std::io::stdin());
            let source = args.known_as(&args.source);
            let mut rows = FileRows::default();
            while let Some(part) = lines.part().await {
                let part = part?;
                let earlier = rows.part(Kind::JsonLines, &part, ROW_BYTES);
                self.part(&source, Kind::JsonLines, &part, earlier).await?;
            }
        }
        self.send().await?;
        self.wait_until(0).await
    }

    /// The inner error is about this file, the outer one about everything.
    async fn file(&mut self, file: FoundFile) -> anyhow::Result<Result<(), String>> {
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
        if kind == Kind::JsonLines && file.bytes > UPLOAD_BYTES {
            return self.file_in_parts(&file).await;
        }
        if file.bytes > MAX_FILE_BYTES {
            let (size, most) = (file.bytes >> 20, MAX_FILE_BYTES >> 20);
            return Ok(Err(format!(
                "it has {size} MB; at most {most} can be sent to a server"
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
        self.add(&file.source, kind, &bytes, None);
        Ok(Ok(()))
    }

    /// A file of lines that is too large for one request. The server gets to know no more than its
    /// parts, so what spans them is seen to here.
    async fn file_in_parts(&mut self, file: &FoundFile) -> anyhow::Result<Result<(), String>> {
        let mut reader = match File::open(&file.path) {
            Ok(file) => BufReader::new(file),
            Err(error) => return Ok(Err(error.to_string())),
        };
        if matches!(reader.fill_buf(), Ok([0xff, 0xfe, ..] | [0xfe, 0xff, ..])) {
            return Ok(Err(
                "it is UTF-16, and too large to be sent as a whole: make it UTF-8 first".to_owned(),
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
            let earlier = rows.part(Kind::JsonLines, &part, ROW_BYTES);
            self.part(&file.source, Kind::JsonLines, &part, earlier).await?;
        }
        self.wait_until(0).await?;
        let done = self.finished.chunks;
        let stored =
            (done.added + done.changed + done.unchanged) - (before.added + before.changed + before.unchanged);
        self.remove_vanished(&file.source, &rows, stored).await?;
        Ok(Ok(()))
    }

    /// Removes rows of earlier runs that are in none of the parts. `stored` is how many documents the
    /// parts are now.
    async fn remove_vanished(&mut self, source: &str, rows: &FileRows, stored: u64) -> anyhow::Result<()> {
        let filter = of_sources(&[source.to_owned()]).to_string();
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

    /// Parts of one file go one after the other: a job has each name once.
    async fn part(&mut self, source: &str, kind: Kind, bytes: &[u8], earlier: Earlier) -> anyhow::Result<()> {
        self.send().await?;
        self.add(source, kind, bytes, Some(earlier));
        self.send().await
    }

    fn add(&mut self, name: &str, kind: Kind, bytes: &[u8], earlier: Option<Earlier>) {
        self.bytes += bytes.len() as u64;
        let mut document = json!({
            "name": name,
            "media_type": media_type(kind),
            "encoding": "base64",
            "content": base64::engine::general_purpose::STANDARD.encode(bytes),
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
        let body = json!({"documents": documents, "chunk_tokens": self.chunk_tokens});
        let call = Call::post(format!("collections/{}/ingest", self.collection))
            .json(&body)
            .repeat(Repeat::Freely);
        let job = ask(self.client, call).await?;
        let id = job["id"].as_str().context("the server gave no job")?;
        self.jobs.push_back(id.to_owned());
        Ok(())
    }

    /// Follows the oldest job until no more than so many are left.
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

fn media_type(kind: Kind) -> &'static str {
    match kind {
        Kind::Markdown => "text/markdown",
        Kind::Html => "text/html",
        Kind::Plain => "text/plain",
        Kind::Code => "text/x-code",
        Kind::Pdf => "application/pdf",
        Kind::JsonLines => "application/jsonl",
        Kind::Csv => "text/csv",
    }
}

/// The model that is wanted, or the first; one that the server has.
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
            (Some(there), Some(wanted)) if there != wanted => anyhow::bail!(
                "collection '{name}' is embedded by '{there}', not by '{wanted}': leave --model out, or name another collection"
            ),
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
            ask(
                client,
                Call::post("collections")
                    .json(&body)
                    .repeat(Repeat::IfUnprocessed),
            )
            .await
            .map(|_| ())
        }
        Err(error) => Err(explain(error)),
    }
}

/// What ingestion made of these sources; documents that somebody added by hand have no such hash.
fn of_sources(sources: &[String]) -> Value {
    json!({"$and": [{"source": {"$in": sources}}, {"content_hash": {"$exists": true}}]})
}

/// A server does not know where files are, so they are told apart by their names.
async fn prune(
    args: &IngestArgs,
    client: &ServiceClient,
    collection: &CollectionName,
    covered: &[Covered],
    progress: &Progress,
) -> anyhow::Result<()> {
    let prefix = args.known_as("");
    let from_stdin = args.known_as(&args.source);
    let vanished = |source: &&str| {
        // Rows from standard input are of no file, whatever their name.
        let name = source.strip_prefix(&prefix).filter(|_| **source != from_stdin);
        name.is_some_and(|name| {
            covered.iter().any(|covered| covered.covers_name(name)) && is_gone(&path_of(name))
        })
    };
    let call = Call::get(format!("collections/{collection}/metadata-values")).query("field", "source");
    let answer = ask(client, call).await?;
    let sources = answer["values"].as_array().into_iter().flatten();
    for gone in sources.filter_map(Value::as_str).filter(vanished) {
        let body = json!({"where": of_sources(&[gone.to_owned()])});
        let answer = ask(
            client,
            Call::delete(format!("collections/{collection}/documents")).json(&body),
        )
        .await?;
        let removed = answer["count"].as_u64().unwrap_or_default();
        progress.update(|report| {
            report.documents.removed += u64::from(removed > 0);
            report.chunks.removed += removed;
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
