//! `ragstone ingest`: files, folders and rows into a collection.
//!
//! With a server's address the documents are sent there and ingested as jobs; without one, this
//! process opens the data directory itself.

mod remote;
mod show;

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use ragstone_core::collection::{Collection, CollectionName, EMBEDDING_MODEL};
use ragstone_core::document::Metadata;
use ragstone_core::model::Embedder;
use ragstone_core::models::Models;
use ragstone_core::service::Service;
use ragstone_core::storage::{MetadataUpdate, StorageError};
use ragstone_ingest::chunk::keys;
use ragstone_ingest::jobs::check_source;
use ragstone_ingest::known::origin;
use ragstone_ingest::ledger::Ledger;
use ragstone_ingest::size::TokenSizer;
use ragstone_ingest::walk::{SourceFile, Walk, WalkOptions, Walker};
use ragstone_ingest::{
    Chunk, Content, DocumentReader, FileKind, IngestTarget, Ingestion, Input, InputOptions, IsolatedReader,
    KnownFiles, Progress, ReadOptions, Splitter, UNKNOWN_TYPE, chunk_tokens, each_chunk,
};
use ragstone_store::IndexScope;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::remote::server_url;
use super::{block_on, quickstart, wrong_arguments};
use crate::config::{self, EmbeddingsChoice, LocalArgs, Settings, StoreArgs};
use crate::stores::OpenStore;
use crate::{listen, startup, telemetry};

/// The hidden command that parses untrusted documents.
pub const READ_UNTRUSTED: &str = "read-untrusted";
const STDIN: &str = "-";
/// For one document.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// Processor time of a reader, which parses many documents. Ends one whose parent was killed.
#[cfg(unix)]
const MAX_CPU: Duration = Duration::from_secs(600);
/// Memory of a reader beside the gigabyte that its allocator reserves from the start.
#[cfg(unix)]
const MORE_DATA: u64 = 512 << 20;

#[derive(Args)]
#[command(after_help = ENVIRONMENT)]
pub struct IngestArgs {
    /// Files, folders and patterns such as 'docs/**/*.md'; `-` reads JSONL from standard input
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
    /// Ingest into this collection, creating it if needed
    #[arg(long, short, value_name = "NAME")]
    collection: String,
    /// Send the documents to this server instead of opening the data directory [env: RAGSTONE_URL]
    #[arg(long, value_name = "URL", value_parser = server_url)]
    url: Option<String>,
    /// Remove documents of files that this machine ingested before and that are gone from PATH
    #[arg(long)]
    prune: bool,
    /// Prefix for document names, to ingest folders with identical file names
    #[arg(long = "as", value_name = "NAME")]
    prefix: Option<String>,
    /// Show the chunks and store nothing
    #[arg(long)]
    dry_run: bool,
    /// Print the report (or the chunks) as JSON
    #[arg(long)]
    json: bool,
    /// Embedding model of a new collection [default: the first one]
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// Largest chunk, in tokens of the model [default: 256, or what the model can read, if that is less]
    #[arg(long, value_name = "N")]
    chunk_tokens: Option<usize>,
    /// Add this field to the metadata of all documents; FILE.metadata.json adds fields to FILE
    #[arg(long, value_name = "KEY=VALUE", value_parser = metadata_field)]
    metadata: Vec<(String, Value)>,
    /// Types of CSV columns: infer numbers and booleans (auto), or store all cells as strings (text)
    #[arg(long, value_name = "TYPES", default_value = "auto", value_parser = ["auto", "text"])]
    csv_types: String,
    /// Only ingest files in folders that match GLOB
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Do not ingest files in folders that match GLOB
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// Also ingest files that .gitignore excludes, node_modules and build folders
    #[arg(long)]
    no_ignore: bool,
    /// Name for documents from standard input
    #[arg(long, value_name = "NAME", default_value = "stdin")]
    source: String,
    #[command(flatten)]
    local: LocalArgs,
}

const ENVIRONMENT: &str = "Environment:\n  \
    RAGSTONE_API_KEY  The key to send, where the server wants one\n  \
    RAGSTONE_URL      Server to send the documents to, unless --data-dir or --store is given";

pub fn run(args: &IngestArgs) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    let collection =
        CollectionName::parse(args.collection.as_str()).unwrap_or_else(|error| wrong_arguments(error));
    let files: Vec<String> = args.paths.iter().filter(|path| *path != STDIN).cloned().collect();
    if args.prune && files.is_empty() {
        wrong_arguments("--prune needs paths: documents from standard input are never pruned");
    }
    if let Some(Err(problem)) = args.prefix.as_deref().map(check_source) {
        wrong_arguments(format!("--as: {problem}"));
    }
    let url = args.server().unwrap_or_else(|error| wrong_arguments(error));
    let options = WalkOptions {
        include: args.include.clone(),
        exclude: args.exclude.clone(),
        no_ignore: args.no_ignore,
    };
    let walker = Walker::new(&files, &options).unwrap_or_else(|error| wrong_arguments(error));
    let mut walk = walker.walk();
    if args.prune && walk.covered.len() < files.len() {
        tracing::warn!("some paths could not be read completely; skipping --prune for them");
    }
    for pattern in std::mem::take(&mut walk.unmatched) {
        if args.prune {
            // All files that it matched may be gone.
            tracing::warn!(pattern, "no file matches");
        } else {
            walk.problems.push((pattern, "no file matches".to_owned()));
        }
    }
    let could_prune = args.prune && !walk.covered.is_empty();
    let nothing = walk.files.is_empty() && !could_prune && files.len() == args.paths.len();
    if nothing && !walk.problems.is_empty() && !args.dry_run {
        // A mistyped path must not create a collection.
        let progress = Progress::default();
        note_problems(&walk, &progress);
        show::report(&progress, &args.collection, args.json)?;
        return show::failures(&progress, "ingested");
    }
    match url {
        Some(url) if !args.dry_run => block_on(remote::ingest(args, url, &collection, walk)),
        _ => block_on(ingest_here(args, collection, walk)),
    }
}

impl IngestArgs {
    /// The server to send documents to. A store that is given explicitly is used instead of the server
    /// in the environment.
    fn server(&self) -> Result<Option<String>, String> {
        let StoreArgs { data_dir, store, .. } = &self.local.store;
        let data_dir = data_dir.as_ref().and_then(|path| path.to_str());
        let is_explicit = |value: Option<&str>, variable: &str| {
            value.is_some() && value != config::process_env(variable).as_deref()
        };
        if self.url.is_some()
            || is_explicit(data_dir, "RAGSTONE_DATA_DIR")
            || is_explicit(store.as_deref(), "RAGSTONE_STORE")
        {
            return Ok(self.url.clone());
        }
        let from_env = config::process_env("RAGSTONE_URL");
        let checked = from_env.map(|url| server_url(&url).map_err(|error| format!("RAGSTONE_URL: {error}")));
        checked.transpose()
    }

    /// The name of documents, with the prefix.
    fn prefixed(&self, name: &str) -> String {
        match self.prefix() {
            Some(prefix) => format!("{prefix}/{name}"),
            None => name.to_owned(),
        }
    }

    fn prefix(&self) -> Option<&str> {
        self.prefix.as_deref().map(|prefix| prefix.trim_end_matches('/'))
    }

    /// Names the files: a file that was ingested before keeps its name.
    fn name_files(&self, walk: &mut Walk, known: &KnownFiles) {
        for mut file in std::mem::take(&mut walk.files) {
            let wanted = self.prefixed(&file.source);
            match known.name(&file.origin, &wanted, self.prefix()) {
                Ok(name) => {
                    file.source = name;
                    walk.files.push(file);
                }
                Err(problem) => walk.problems.push((wanted, problem.to_string())),
            }
        }
    }

    fn csv_as_text(&self) -> bool {
        self.csv_types == "text"
    }

    fn stdin_options(&self) -> InputOptions {
        InputOptions {
            origin: None,
            metadata: self.metadata.iter().cloned().collect(),
            csv_as_text: self.csv_as_text(),
        }
    }

    /// Options of a file, with the metadata of the file beside it.
    fn file_options(&self, file: &SourceFile) -> Result<InputOptions, String> {
        let mut options = self.stdin_options();
        options.origin = Some(origin(&machine(), &file.origin));
        if let Some(sidecar) = &file.sidecar {
            let read = std::fs::read(sidecar).map_err(|error| error.to_string());
            let fields = read.and_then(|bytes| {
                serde_json::from_slice::<Metadata>(&bytes)
                    .map_err(|error| format!("not a JSON object: {error}"))
            });
            let fields = fields.map_err(|error| format!("its metadata in {}: {error}", sidecar.display()))?;
            options.metadata.extend(fields);
        }
        Ok(options)
    }
}

/// Parses `KEY=VALUE`. Numbers and booleans are stored as such.
fn metadata_field(text: &str) -> Result<(String, Value), String> {
    let (key, value) = text
        .split_once('=')
        .filter(|(key, _)| !key.trim().is_empty())
        .ok_or("expected KEY=VALUE")?;
    let parsed = serde_json::from_str(value).ok();
    let scalar = parsed.filter(|value: &Value| value.is_number() || value.is_boolean());
    Ok((
        key.trim().to_owned(),
        scalar.unwrap_or_else(|| Value::from(value)),
    ))
}

/// The name of this machine, which tells files of several machines apart.
fn machine() -> String {
    #[cfg(unix)]
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let name = std::env::var("COMPUTERNAME").unwrap_or_default();
    name
}

/// The child's side of [`IsolatedReader`]: limits this process, then parses documents.
pub fn read_untrusted(kind: &str) -> anyhow::Result<()> {
    confine();
    let kind: FileKind = serde_json::from_value(Value::from(kind)).context("no such kind of file")?;
    let (input, output) = (std::io::stdin().lock(), std::io::stdout().lock());
    Ok(ragstone_ingest::read::serve(kind, input, output)?)
}

/// Bytes that this process has mapped for data, most of them reserved by the allocator and unused.
#[cfg(unix)]
fn data_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|sizes| sizes.split_whitespace().nth(5)?.parse::<u64>().ok())
        .unwrap_or_default();
    pages * rustix::param::page_size() as u64
}

/// Limits the memory and time of this process.
fn confine() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = |most: u64| Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        let _ = setrlimit(Resource::Data, limit(data_bytes() + MORE_DATA));
        let _ = setrlimit(Resource::Cpu, limit(MAX_CPU.as_secs()));
        let _ = setrlimit(Resource::Core, limit(0));
    }
    // Parsers panic on documents they cannot read; the reason is reported otherwise.
    std::panic::set_hook(Box::new(|_| {}));
}

/// Options for reading documents, in the server and here.
pub fn read_options() -> ReadOptions {
    let program = std::env::current_exe().unwrap_or_else(|_| "ragstone".into());
    ReadOptions {
        isolated: Some(IsolatedReader {
            program,
            arguments: vec![READ_UNTRUSTED.into()],
            timeout: READ_TIMEOUT,
            max_text_bytes: MAX_TEXT_BYTES,
        }),
        ..ReadOptions::default()
    }
}

async fn ingest_here(args: &IngestArgs, collection: CollectionName, mut walk: Walk) -> anyhow::Result<()> {
    let settings = args.local.settings()?;
    // The store first: opening it fails at once, and loading a model takes a while.
    let store = if args.dry_run {
        None
    } else {
        Some(open_store(&settings).await?)
    };
    let models = load_models(&settings, store.as_ref().map(OpenStore::records)).await?;
    let Some(store) = store else {
        args.name_files(&mut walk, &KnownFiles::default());
        return dry_run(args, &models, walk);
    };
    let service = Service {
        store: store.store(),
        models: Arc::new(models),
    };
    let target = IngestTarget {
        collection: collection.clone(),
        chunk_tokens: args.chunk_tokens,
    };
    let created = ensure_collection(&service, &collection, args.model.as_deref()).await?;
    let ingestion = Ingestion {
        service,
        records: store.records(),
        ledger: Ledger::new(store.records()),
        read: read_options(),
        attempts: 8,
    };
    if created {
        ingestion.forget_collection(&collection).await?;
    }
    let known = async || anyhow::Ok(KnownFiles::new(&machine(), ingestion.sources(&collection).await?));
    args.name_files(&mut walk, &known().await?);
    let progress = Arc::new(Progress::default());
    let total: u64 = walk.files.iter().map(|file| file.bytes).sum();
    let shown = show::IngestDisplay::start(Arc::clone(&progress), total, args.json);
    let work = async {
        let prepared = ingestion.check(&target).await?;
        let covered = std::mem::take(&mut walk.covered);
        let inputs = feed(args, walk, &progress);
        ingestion.run(prepared, inputs, Arc::clone(&progress)).await?;
        if args.prune {
            for source in known().await?.gone(&covered) {
                ingestion.remove_source(&collection, &source, &progress).await?;
            }
        }
        anyhow::Ok(())
    };
    let done = tokio::select! {
        done = work => done,
        () = listen::stop_signal() => Err(anyhow::anyhow!(
            "stopped; documents ingested so far are stored, and the same command continues"
        )),
    };
    shown.stop().await;
    store
        .close()
        .await
        .context("the store could not be closed cleanly")?;
    show::report(&progress, &args.collection, args.json)?;
    done?;
    show::failures(&progress, "ingested")
}

/// Indexes that ingestion needs. Those for search would grow with the collection.
const INDEX_SCOPE: IndexScope = IndexScope::Fields {
    values: &[keys::SOURCE],
    presence: &[keys::CONTENT_HASH],
};

async fn open_store(settings: &Settings) -> anyhow::Result<OpenStore> {
    OpenStore::open_with_scope(&settings.store, INDEX_SCOPE)
        .await
        .map_err(|error| {
            let in_use = matches!(error.downcast_ref(), Some(ragstone_store::Error::InUse(_)));
            if in_use {
                error.context("give --url to send the documents to the server that has the store open")
            } else {
                error
            }
        })
}

async fn load_models(settings: &Settings, keep: startup::Keep) -> anyhow::Result<Models> {
    match settings.embeddings {
        EmbeddingsChoice::Unset => quickstart::default_models(settings).await,
        _ => startup::load_embedding_models(settings, keep).await,
    }
}

/// Creates the collection, or checks that it has the model that was given. Whether it was created.
async fn ensure_collection(
    service: &Service,
    name: &CollectionName,
    wanted: Option<&str>,
) -> anyhow::Result<bool> {
    let model = |id: &str| Metadata::from_iter([(EMBEDDING_MODEL.to_owned(), Value::from(id))]);
    match service.store.collection(name).await {
        Ok(collection) => match (collection.embedding_model(), wanted) {
            (Some(there), Some(wanted)) if there != wanted => anyhow::bail!(other_model(name, there, wanted)),
            (None, Some(wanted)) if is_empty(&collection) => {
                service.models.embedder(wanted)?;
                service
                    .store
                    .update_metadata(name, model(wanted), MetadataUpdate::Merge)
                    .await?;
                Ok(false)
            }
            _ => Ok(false),
        },
        Err(StorageError::CollectionNotFound(_)) => {
            let embedder: &Arc<dyn Embedder> = match wanted {
                Some(id) => service.models.embedder(id)?,
                None => service
                    .models
                    .default_embedder()
                    .context("no embedding model is loaded")?,
            };
            let created = service
                .store
                .create_collection(name, model(&embedder.info().identity.id));
            match created.await {
                Ok(_) => Ok(true),
                // Another process created it just now.
                Err(StorageError::CollectionExists(_)) => {
                    let there = service.store.collection(name).await?;
                    match (there.embedding_model(), wanted) {
                        (Some(there), Some(wanted)) if there != wanted => {
                            Err(anyhow::anyhow!(other_model(name, there, wanted)))
                        }
                        _ => Ok(false),
                    }
                }
                Err(error) => Err(error.into()),
            }
        }
        Err(error) => Err(error.into()),
    }
}

fn other_model(collection: &CollectionName, there: &str, wanted: &str) -> String {
    format!(
        "collection '{collection}' uses model '{there}', not '{wanted}': omit --model, or choose another collection"
    )
}

fn is_empty(collection: &Collection) -> bool {
    collection.count == 0
}

/// Sends the files to the run, as fast as it takes them.
fn feed(args: &IngestArgs, walk: Walk, progress: &Arc<Progress>) -> mpsc::Receiver<Input> {
    let (sender, receiver) = mpsc::channel(16);
    note_problems(&walk, progress);
    let files = walk
        .files
        .into_iter()
        .filter_map(|file| to_input(args, file, progress));
    let inputs: Vec<Input> = files.chain(stdin(args)).collect();
    std::thread::spawn(move || {
        for input in inputs {
            if sender.blocking_send(input).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Rows from standard input, where they are wanted.
fn stdin(args: &IngestArgs) -> Option<Input> {
    let wanted = args.paths.iter().any(|path| path == STDIN);
    wanted.then(|| Input {
        source: args.prefixed(&args.source),
        kind: FileKind::JsonLines,
        content: Content::Stream(Box::new(std::io::stdin())),
        options: args.stdin_options(),
    })
}

fn note_problems(walk: &Walk, progress: &Progress) {
    for (source, problem) in &walk.problems {
        progress.update(|report| report.fail(source, problem));
    }
}

fn to_input(args: &IngestArgs, file: SourceFile, progress: &Progress) -> Option<Input> {
    let failed = |source: &str, problem: &str| progress.update(|report| report.fail(source, problem));
    match file.kind {
        Some(kind) => match args.file_options(&file) {
            Ok(options) => Some(Input {
                source: file.source,
                kind,
                content: Content::File(file.path),
                options,
            }),
            Err(problem) => {
                failed(&file.source, &problem);
                None
            }
        },
        None if file.named => {
            failed(&file.source, UNKNOWN_TYPE);
            None
        }
        None => {
            progress.update(|report| report.skip(&file.source));
            None
        }
    }
}

/// Prints the chunks without looking at any collection.
fn dry_run(args: &IngestArgs, models: &Models, walk: Walk) -> anyhow::Result<()> {
    let embedder = match &args.model {
        Some(id) => models.embedder(id)?,
        None => models
            .default_embedder()
            .context("no embedding model is loaded")?,
    };
    let tokens = chunk_tokens(embedder.as_ref(), args.chunk_tokens)?;
    let splitter = Splitter::new(TokenSizer::new(Arc::clone(embedder), tokens), tokens);
    let mut reader = DocumentReader::new(read_options(), || false);
    let progress = Progress::default();
    note_problems(&walk, &progress);
    let mut out = std::io::stdout().lock();
    let files = walk
        .files
        .into_iter()
        .filter_map(|file| to_input(args, file, &progress));
    for input in files.chain(stdin(args)) {
        let source = input.source.clone();
        let failed = |problem: String| progress.update(|report| report.fail(&source, problem));
        let mut print = |chunk: Chunk| {
            if !args.json {
                return show::chunk(&mut out, &chunk);
            }
            let document = &chunk.document;
            let line = json!({"id": document.id.as_str(), "text": document.text, "metadata": document.metadata, "tokens": chunk.tokens});
            writeln!(out, "{line}")
        };
        if let Err(problem) = each_chunk(input, &splitter, &mut reader, &mut print, &mut |bad| failed(bad)) {
            failed(problem.to_string());
        }
    }
    show::failures(&progress, "read")
}
