//! Ingestion through a running server.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use ragstone_core::collection::{CollectionName, EMBEDDING_MODEL};
use ragstone_core::provider::CallError;
use ragstone_providers::http::{Call, Repeat, ServiceClient};
use ragstone_rag::ingest::report::{ChunkCounts, DocumentCounts, ItemError};
use ragstone_rag::ingest::walk::{Found, FoundFile, Selection};
use ragstone_rag::ingest::{Kind, Progress, Report, UNKNOWN_TYPE};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{IngestArgs, STDIN, show, vanished};
use crate::cli::remote::{KEY, RemoteArgs, refusal};
use crate::listen;

/// One request has about this much; the server's own limit is larger, and base64 adds a third.
const UPLOAD_BYTES: u64 = 16 << 20;
const UPLOAD_FILES: usize = 256;
/// A file that cannot be cut must fit into one request.
const MAX_FILE_BYTES: u64 = 44 << 20;
/// Jobs that wait at the server while the next is read.
const JOBS_AHEAD: usize = 2;
const POLL: Duration = Duration::from_millis(300);
/// The server refuses longer lists in a filter.
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
    selection: &Selection,
    found: Found,
) -> anyhow::Result<()> {
    let client = RemoteArgs::at(url).client()?;
    ensure_collection(&client, collection, args.model.as_deref()).await?;
    let progress = Arc::new(Progress::default());
    let total: u64 = found.files.iter().map(|file| file.bytes).sum();
    let shown = show::Shown::start(Arc::clone(&progress), total, args.json);
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
        prune(&client, collection, selection, &progress).await?;
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
            // Read on a thread that may be left waiting, so that an interrupt is heard at once.
            let (sender, mut parts) = tokio::sync::mpsc::channel(1);
            std::thread::spawn(move || {
                for part in LineParts::new(std::io::stdin().lock()) {
                    if sender.blocking_send(part).is_err() {
                        return;
                    }
                }
            });
            while let Some(part) = parts.recv().await {
                self.part(&args.source, Kind::JsonLines, part?).await?;
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
            self.finished.documents.skipped += 1;
            return Ok(Ok(()));
        };
        if kind == Kind::JsonLines && file.bytes > UPLOAD_BYTES {
            let reader = match File::open(&file.path) {
                Ok(file) => BufReader::new(file),
                Err(error) => return Ok(Err(error.to_string())),
            };
            for part in LineParts::new(reader) {
                self.part(&file.source, kind, part?).await?;
            }
            return Ok(Ok(()));
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
        self.add(&file.source, kind, &bytes, false);
        Ok(Ok(()))
    }

    /// Parts of one file go one after the other: a job has each name once.
    async fn part(&mut self, source: &str, kind: Kind, bytes: Vec<u8>) -> anyhow::Result<()> {
        self.send().await?;
        self.add(source, kind, &bytes, true);
        self.send().await
    }

    fn add(&mut self, name: &str, kind: Kind, bytes: &[u8], partial: bool) {
        self.bytes += bytes.len() as u64;
        self.documents.push(json!({
            "name": name,
            "media_type": media_type(kind),
            "encoding": "base64",
            "content": base64::engine::general_purpose::STANDARD.encode(bytes),
            "partial": partial,
        }));
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
            _ => Ok(()),
        },
        Err(CallError::Answered(answer)) if answer.status == 404 => {
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

async fn prune(
    client: &ServiceClient,
    collection: &CollectionName,
    selection: &Selection,
    progress: &Progress,
) -> anyhow::Result<()> {
    let call = Call::get(format!("collections/{collection}/metadata-values")).query("field", "source");
    let answer = ask(client, call).await?;
    let sources = answer["values"].as_array().into_iter().flatten();
    let sources = sources
        .filter_map(|value| value.as_str().map(str::to_owned))
        .collect();
    let vanished = vanished(sources, selection);
    for gone in vanished.chunks(MAX_LIST) {
        let body = json!({"where": {"source": {"$in": gone}}});
        let answer = ask(
            client,
            Call::delete(format!("collections/{collection}/documents")).json(&body),
        )
        .await?;
        progress.update(|report| {
            report.documents.removed += gone.len() as u64;
            report.chunks.removed += answer["count"].as_u64().unwrap_or_default();
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

/// Cuts a stream of lines into pieces that fit into a request; a line is never cut.
struct LineParts<R> {
    reader: R,
}

impl<R: BufRead> LineParts<R> {
    fn new(reader: R) -> Self {
        Self { reader }
    }
}

impl<R: BufRead> Iterator for LineParts<R> {
    type Item = std::io::Result<Vec<u8>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut part = Vec::new();
        while (part.len() as u64) < UPLOAD_BYTES {
            let room = MAX_FILE_BYTES - part.len() as u64;
            match self.reader.by_ref().take(room).read_until(b'\n', &mut part) {
                Ok(0) => break,
                Ok(_) if part.last() == Some(&b'\n') => {}
                Ok(_) if part.len() as u64 >= MAX_FILE_BYTES => {
                    return Some(Err(std::io::Error::other("a line is too long to be sent")));
                }
                Ok(_) => break,
                Err(error) => return Some(Err(error)),
            }
        }
        (!part.is_empty()).then_some(Ok(part))
    }
}
