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
use ragstone_core::storage::{MetadataUpdate, StorageError};
use ragstone_rag::ingest::chunk::keys;
use ragstone_rag::ingest::size::TokenSizer;
use ragstone_rag::ingest::walk::{Found, FoundFile, Selection, is_gone};
use ragstone_rag::ingest::{
    Content, IngestTarget, Ingestion, Input, IsolatedReader, Kind, Progress, ReadOptions, Splitter,
    UNKNOWN_TYPE, chunk_tokens, chunks_of,
};
use ragstone_rag::jobs::check_source;
use ragstone_rag::ledger::Ledger;
use ragstone_rag::{Models, Service};
use ragstone_store::IndexScope;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::remote::{REMOTE_ENVIRONMENT, server_url};
use super::{block_on, quickstart, wrong_arguments};
use crate::config::{EmbeddingsChoice, LocalArgs, Settings};
use crate::stores::OpenStore;
use crate::{listen, startup, telemetry};

/// The name of the hidden command that parses what may be harmful.
pub const READ_UNTRUSTED: &str = "read-untrusted";
const STDIN: &str = "-";
const READ_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// What a reader may take beside what its allocator reserves from the start, which is a gigabyte. Half
/// of it is the stack that HTML is walked on.
#[cfg(unix)]
const MORE_DATA: u64 = 512 << 20;

#[derive(Args)]
#[command(after_help = REMOTE_ENVIRONMENT)]
pub struct IngestArgs {
    /// Files, folders and patterns such as 'docs/**/*.md'; `-` reads JSONL from standard input
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<String>,
    /// The collection to ingest into; made if it is not there
    #[arg(long, short, value_name = "NAME")]
    collection: String,
    /// Send the documents to this server instead of opening the data directory
    #[arg(long, value_name = "URL", env = "RAGSTONE_URL", value_parser = server_url)]
    url: Option<String>,
    /// Remove documents whose files are gone from the given paths. Through a server, files are known
    /// by their names alone: what another folder brought under the same names is taken for this one's
    #[arg(long)]
    prune: bool,
    /// Put this before the names that documents are known by, so that two folders with files of the
    /// same names fit into one collection
    #[arg(long = "as", value_name = "NAME")]
    prefix: Option<String>,
    /// Show the chunks; store nothing
    #[arg(long)]
    dry_run: bool,
    /// Print the report (or the chunks) as JSON
    #[arg(long)]
    json: bool,
    /// The embedding model of a new collection [default: the first one]
    #[arg(long, value_name = "ID")]
    model: Option<String>,
    /// The largest chunk, in tokens of the model [default: 256, or what the model can read, if that is less]
    #[arg(long, value_name = "N")]
    chunk_tokens: Option<usize>,
    /// Of what is in folders, only files that match
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Of what is in folders, no files that match
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// What documents from standard input are known by
    #[arg(long, value_name = "NAME", default_value = "stdin")]
    source: String,
    #[command(flatten)]
    local: LocalArgs,
}

pub fn run(args: &IngestArgs) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    let collection =
        CollectionName::parse(args.collection.as_str()).unwrap_or_else(|error| wrong_arguments(error));
    let files: Vec<String> = args.paths.iter().filter(|path| *path != STDIN).cloned().collect();
    if args.prune && files.is_empty() {
        wrong_arguments("--prune needs paths: what is not in standard input is not taken for gone");
    }
    if let Some(Err(problem)) = args.prefix.as_deref().map(check_source) {
        wrong_arguments(format!("--as: {problem}"));
    }
    let selection =
        Selection::new(&files, &args.include, &args.exclude).unwrap_or_else(|error| wrong_arguments(error));
    let mut found = selection.find();
    for file in &mut found.files {
        file.source = args.known_as(&file.source);
    }
    if args.prune && found.covered.len() < files.len() {
        tracing::warn!("what could not be looked into from end to end is not taken for gone");
    }
    for pattern in std::mem::take(&mut found.unmatched) {
        if args.prune {
            // All that it matched may be what is to be removed.
            tracing::warn!(pattern, "no file matches");
        } else {
            found.problems.push((pattern, "no file matches".to_owned()));
        }
    }
    let could_prune = args.prune && !found.covered.is_empty();
    let nothing = found.files.is_empty() && !could_prune && files.len() == args.paths.len();
    if nothing && !found.problems.is_empty() && !args.dry_run {
        // Nobody wants a collection that is named after a typing error.
        let progress = Progress::default();
        note_problems(&found, &progress);
        show::report(&progress, &args.collection, args.json)?;
        return show::failures(&progress, "ingested");
    }
    match &args.url {
        Some(url) if !args.dry_run => block_on(remote::ingest(args, url.clone(), &collection, found)),
        _ => block_on(ingest_here(args, collection, found)),
    }
}

impl IngestArgs {
    /// What documents of a file are known by.
    fn known_as(&self, name: &str) -> String {
        match &self.prefix {
            Some(prefix) => format!("{}/{name}", prefix.trim_end_matches('/')),
            None => name.to_owned(),
        }
    }
}

/// The other side of [`IsolatedReader`]: limits this process, then parses standard input.
pub fn read_untrusted(kind: &str) -> anyhow::Result<()> {
    confine();
    let kind: Kind = serde_json::from_value(Value::from(kind)).context("no such kind of file")?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes)?;
    match ragstone_rag::ingest::read::confined(kind, &bytes) {
        Ok(text) => Ok(std::io::stdout().lock().write_all(text.as_bytes())?),
        Err(problem) => {
            eprintln!("{problem}");
            std::process::exit(1)
        }
    }
}

/// What this process has mapped for data already, most of it reserved by the allocator and unused.
#[cfg(unix)]
fn data_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|sizes| sizes.split_whitespace().nth(5)?.parse::<u64>().ok())
        .unwrap_or_default();
    pages * rustix::param::page_size() as u64
}

/// Memory and time that no honest file needs.
fn confine() {
    #[cfg(unix)]
    {
        use rustix::process::{Resource, Rlimit, setrlimit};
        let limit = |most: u64| Rlimit {
            current: Some(most),
            maximum: Some(most),
        };
        let _ = setrlimit(Resource::Data, limit(data_bytes() + MORE_DATA));
        let _ = setrlimit(Resource::Cpu, limit(READ_TIMEOUT.as_secs()));
        let _ = setrlimit(Resource::Core, limit(0));
    }
    // Parsers that give up say so by panicking; the sentence for the user is printed elsewhere.
    std::panic::set_hook(Box::new(|_| {}));
}

/// How documents are read, in the server and here.
pub fn read_options() -> ReadOptions {
    let isolated = std::env::current_exe().ok().map(|program| IsolatedReader {
        program,
        arguments: vec![READ_UNTRUSTED.into()],
        timeout: READ_TIMEOUT,
        max_text_bytes: MAX_TEXT_BYTES,
    });
    ReadOptions {
        isolated,
        ..ReadOptions::default()
    }
}

async fn ingest_here(args: &IngestArgs, collection: CollectionName, mut found: Found) -> anyhow::Result<()> {
    let settings = args.local.settings()?;
    // The store first: whether it can be had is known at once, a model takes a while.
    let store = if args.dry_run {
        None
    } else {
        Some(open_store(&settings).await?)
    };
    let models = load_models(&settings, store.as_ref().map(OpenStore::records)).await?;
    let Some(store) = store else {
        return dry_run(args, &models, found);
    };
    let service = Service {
        store: store.store(),
        models: Arc::new(models),
    };
    let target = IngestTarget {
        collection: collection.clone(),
        chunk_tokens: args.chunk_tokens,
    };
    ensure_collection(&service, &collection, args.model.as_deref()).await?;
    let ingestion = Ingestion {
        service,
        records: store.records(),
        ledger: Ledger::new(store.records()),
        read: read_options(),
        attempts: 8,
    };
    let progress = Arc::new(Progress::default());
    let total: u64 = found.files.iter().map(|file| file.bytes).sum();
    let shown = show::Shown::start(Arc::clone(&progress), total, args.json);
    let work = async {
        let prepared = ingestion.check(&target).await?;
        let covered = std::mem::take(&mut found.covered);
        let inputs = feed(args, found, &progress);
        ingestion.run(prepared, inputs, Arc::clone(&progress)).await?;
        if args.prune {
            for ingested in ingestion.ingested(&collection).await? {
                let vanished = ingested.origin.is_some_and(|origin| {
                    covered.iter().any(|covered| covered.covers(&origin)) && is_gone(&origin)
                });
                if vanished {
                    ingestion
                        .remove_source(&collection, &ingested.source, &progress)
                        .await?;
                }
            }
        }
        anyhow::Ok(())
    };
    let done = tokio::select! {
        done = work => done,
        () = listen::stop_signal() => Err(anyhow::anyhow!(
            "stopped; what was ingested so far is stored, and the same command goes on from there"
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

/// What ingestion asks of a collection. Nobody searches here, and what a search needs would grow with
/// what is ingested.
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

/// Makes the collection, or makes sure that it is of the model that was asked for.
async fn ensure_collection(
    service: &Service,
    name: &CollectionName,
    wanted: Option<&str>,
) -> anyhow::Result<()> {
    let model = |id: &str| Metadata::from_iter([(EMBEDDING_MODEL.to_owned(), Value::from(id))]);
    match service.store.collection(name).await {
        Ok(collection) => match (collection.embedding_model(), wanted) {
            (Some(there), Some(wanted)) if there != wanted => anyhow::bail!(
                "collection '{name}' is embedded by '{there}', not by '{wanted}': leave --model out, or name another collection"
            ),
            (None, Some(wanted)) if is_empty(&collection) => {
                service.models.embedder(wanted)?;
                service
                    .store
                    .update_metadata(name, model(wanted), MetadataUpdate::Merge)
                    .await?;
                Ok(())
            }
            _ => Ok(()),
        },
        Err(StorageError::CollectionNotFound(_)) => {
            let embedder: &Arc<dyn Embedder> = match wanted {
                Some(id) => service.models.embedder(id)?,
                None => service
                    .models
                    .default_embedder()
                    .context("no embedding model is loaded")?,
            };
            service
                .store
                .create_collection(name, model(&embedder.info().identity.id))
                .await?;
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

fn is_empty(collection: &Collection) -> bool {
    collection.count == 0
}

/// Hands over what was found, one after the other, as fast as it is taken.
fn feed(args: &IngestArgs, found: Found, progress: &Arc<Progress>) -> mpsc::Receiver<Input> {
    let (sender, inputs) = mpsc::channel(16);
    let stdin = args
        .paths
        .iter()
        .any(|path| path == STDIN)
        .then(|| args.known_as(&args.source));
    note_problems(&found, progress);
    let progress = Arc::clone(progress);
    std::thread::spawn(move || {
        let stdin = stdin.map(|source| Input {
            source,
            origin: None,
            kind: Kind::JsonLines,
            content: Content::Stream(Box::new(std::io::stdin())),
        });
        let files = found
            .files
            .into_iter()
            .filter_map(|file| to_input(file, &progress));
        for input in files.chain(stdin) {
            if sender.blocking_send(input).is_err() {
                return;
            }
        }
    });
    inputs
}

fn note_problems(found: &Found, progress: &Progress) {
    for (source, problem) in &found.problems {
        progress.update(|report| report.fail(source, problem));
    }
}

fn to_input(file: FoundFile, progress: &Progress) -> Option<Input> {
    match file.kind {
        Some(kind) => Some(Input {
            source: file.source,
            origin: Some(file.origin),
            kind,
            content: Content::File(file.path),
        }),
        None if file.named => {
            progress.update(|report| report.fail(file.source, UNKNOWN_TYPE));
            None
        }
        None => {
            progress.update(|report| report.skip(&file.source));
            None
        }
    }
}

/// Prints the chunks that would be made, without looking at any collection.
fn dry_run(args: &IngestArgs, models: &Models, found: Found) -> anyhow::Result<()> {
    let embedder = match &args.model {
        Some(id) => models.embedder(id)?,
        None => models
            .default_embedder()
            .context("no embedding model is loaded")?,
    };
    let tokens = chunk_tokens(embedder.as_ref(), args.chunk_tokens)?;
    let splitter = Splitter::new(TokenSizer::new(Arc::clone(embedder), tokens), tokens);
    let options = read_options();
    let progress = Arc::new(Progress::default());
    note_problems(&found, &progress);
    let mut out = std::io::stdout().lock();
    let stdin = args
        .paths
        .iter()
        .any(|path| path == STDIN)
        .then(|| -> anyhow::Result<Input> {
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes)?;
            Ok(Input {
                source: args.known_as(&args.source),
                origin: None,
                kind: Kind::JsonLines,
                content: Content::Memory(bytes),
            })
        });
    let inputs = found
        .files
        .into_iter()
        .filter_map(|file| to_input(file, &progress));
    for input in inputs.chain(stdin.transpose()?) {
        let mut bad_row = |problem: String| progress.update(|report| report.fail(&input.source, problem));
        match chunks_of(&input, &splitter, &options, &mut bad_row) {
            Ok(chunks) => {
                for chunk in chunks {
                    if args.json {
                        let document = &chunk.document;
                        let line = json!({"id": document.id.as_str(), "text": document.text, "metadata": document.metadata, "tokens": chunk.tokens});
                        writeln!(out, "{line}")?;
                    } else {
                        show::chunk(&mut out, &chunk)?;
                    }
                }
            }
            Err(problem) => progress.update(|report| report.fail(&input.source, problem.to_string())),
        }
    }
    show::failures(&progress, "read")
}
