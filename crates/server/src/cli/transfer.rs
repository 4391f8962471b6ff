//! `ragstone export`, `import` and `copy`: collections from one place to another, with vectors.

mod endpoint;
mod show;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::call::CallError;
use ragstone_core::collection::CollectionName;
use ragstone_core::storage::StorageError;
use ragstone_transfer::{
    BackendSource, Begun, ExportFile, FileSource, Head, Sum, TransferError, describe, export_file, export_to,
    transfer, verify_file,
};

use super::block_on;
use crate::{listen, telemetry};
use endpoint::{Access, Endpoint, EndpointArgs};
use show::Shown;

/// Standard input or output.
const STANDARD: &str = "-";

/// What the commands read from the environment and no flag says, because other users can see flags.
const ENVIRONMENT: &str = "Environment:\n  \
    RAGSTONE_API_KEY       The key of a server that wants one\n  \
    RAGSTONE_CHROMA_TOKEN  The token of a ChromaDB server that wants one";
const COPY_ENVIRONMENT: &str = "Environment:\n  \
    RAGSTONE_API_KEY       The key of servers that want one\n  \
    RAGSTONE_FROM_API_KEY, RAGSTONE_TO_API_KEY  The same for one of the two, where their keys differ\n  \
    RAGSTONE_CHROMA_TOKEN  The token of a ChromaDB server that wants one";

#[derive(Args)]
#[command(after_help = ENVIRONMENT)]
pub(super) struct ExportArgs {
    /// The collection
    collection: String,
    /// Where to write it as JSON lines; `-` for standard output
    file: PathBuf,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Args)]
#[command(after_help = ENVIRONMENT)]
pub(super) struct ImportArgs {
    /// What `ragstone export` wrote; `-` for standard input
    file: PathBuf,
    /// Under another name than it was exported with
    #[arg(long, value_name = "NAME")]
    collection: Option<String>,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

#[derive(Args)]
#[command(after_help = COPY_ENVIRONMENT)]
pub(super) struct CopyArgs {
    /// A data directory, sqlite://DIR, postgres://…, chroma://HOST:PORT, or the address of a server
    #[arg(long, value_name = "URL")]
    from: String,
    /// As --from; what is there already is left as it is
    #[arg(long, value_name = "URL")]
    to: String,
    /// Only this collection; may be given more than once [default: all of them]
    #[arg(long, value_name = "NAME")]
    collection: Vec<String>,
}

/// What is done so far stays, and the same command goes on with it.
async fn unless_stopped<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::select! {
        done = work => done,
        () = listen::stop_signal() => Err(anyhow::anyhow!("stopped; the same command goes on from here")),
    }
}

pub(super) fn export(args: &ExportArgs) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    let name = CollectionName::parse(args.collection.as_str())?;
    block_on(async {
        let open = args.endpoint.open(Access::Read).await?;
        let done = unless_stopped(export_from(&open, &name, &args.file)).await;
        open.close().await?;
        done.map_err(|error| open.explain(error))
    })
}

async fn export_from(open: &Endpoint, name: &CollectionName, path: &Path) -> anyhow::Result<()> {
    let backend = open.backend();
    let collection = describe(backend, name).await?;
    let head = Head::of(&collection);
    let shown = Shown::start("exported", collection.count);
    let sum = if path == Path::new(STANDARD) {
        let mut out = std::io::BufWriter::new(std::io::stdout());
        export_to(
            BackendSource::new(backend, name),
            &head,
            &mut out,
            &shown.progress,
        )
        .await
    } else {
        let mut source = BackendSource::new(backend, name);
        let (file, begun) = ExportFile::begin(path, &head, &mut source).await?;
        match begun {
            Begun::New => {}
            Begun::Resumed { documents } => {
                eprintln!("resuming after {documents} documents that an earlier run wrote");
            }
            Begun::Restarted => {
                eprintln!("starting over: the collection has changed since the earlier run");
            }
        }
        export_file(source, file, &shown.progress).await
    };
    let seconds = shown.stop().await;
    let sum = sum?;
    let report = format!("{name}: exported {}", counted(&sum, seconds));
    if path == Path::new(STANDARD) {
        eprintln!("{report}");
        Ok(())
    } else {
        say(&report)
    }
}

pub(super) fn import(args: &ImportArgs) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    let (mut source, total) = if args.file == Path::new(STANDARD) {
        let source = FileSource::read(Box::new(std::io::BufReader::new(std::io::stdin())))?;
        (source, 0)
    } else {
        // A file that is damaged anywhere is refused before anything of it is stored.
        let sum = verify_file(&args.file)?;
        (FileSource::open(&args.file)?, sum.documents)
    };
    let name = args.collection.as_ref().unwrap_or(&source.head.collection);
    let name = CollectionName::parse(name.as_str())?;
    block_on(async {
        let open = args.endpoint.open(Access::Write).await?;
        let head = source.head.clone();
        let shown = Shown::start("imported", total);
        let done = unless_stopped(async {
            Ok(transfer(&mut source, &head, open.backend(), &name, &shown.progress).await?)
        })
        .await;
        let seconds = shown.stop().await;
        open.close().await?;
        let moved = done.map_err(|error| open.explain(error))?;
        say(&format!(
            "{name}: imported {}{}",
            counted(&moved.sum, seconds),
            already(moved.already_there)
        ))
    })
}

pub(super) fn copy(args: &CopyArgs) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    let named = args
        .collection
        .iter()
        .map(|name| CollectionName::parse(name.as_str()))
        .collect::<Result<Vec<_>, _>>()?;
    if endpoint::are_same(&args.from, &args.to) {
        anyhow::bail!("--from and --to are the same place: there is nothing to copy");
    }
    block_on(async {
        let from = endpoint::open(&args.from, Access::Read)
            .await
            .context("--from cannot be opened")?;
        let done = copy_from(&from, args, named).await;
        from.close().await?;
        done.map_err(|error| from.explain(error))
    })
}

/// A store that is new is not made before there is something to copy into it.
async fn copy_from(from: &Endpoint, args: &CopyArgs, named: Vec<CollectionName>) -> anyhow::Result<()> {
    let names = to_copy(from.backend(), named).await?;
    if names.is_empty() {
        return say("there are no collections to copy");
    }
    let to = endpoint::open(&args.to, Access::Write)
        .await
        .context("--to cannot be opened")?;
    let done = unless_stopped(copy_all(from, &to, &names)).await;
    to.close().await?;
    done.map_err(|error| to.explain(error))
}

/// Those that are named, or all; an error where none of those named is there.
async fn to_copy(from: &dyn Backend, named: Vec<CollectionName>) -> anyhow::Result<Vec<CollectionName>> {
    if named.is_empty() {
        let all = from.collections().await?;
        return Ok(all.into_iter().map(|collection| collection.name).collect());
    }
    let mut missing = None;
    for name in &named {
        match from.collection(name).await {
            Ok(_) => return Ok(named),
            Err(error) => missing = Some(error),
        }
    }
    missing.map_or(Ok(named), |error| Err(error.into()))
}

/// A collection that cannot be copied is no reason to leave out the others.
async fn copy_all(from: &Endpoint, to: &Endpoint, names: &[CollectionName]) -> anyhow::Result<()> {
    let mut failed = Vec::new();
    for name in names {
        if let Err(error) = copy_one(from.backend(), to.backend(), name).await {
            let is_down = is_unavailable(&error);
            let error = from.explain(to.explain(error));
            eprintln!("{name}: not copied: {error:#}");
            failed.push(name.as_str());
            if is_down {
                break;
            }
        }
    }
    if failed.is_empty() {
        return Ok(());
    }
    let list = failed.join(", ");
    anyhow::bail!(
        "{} of {} collections were not copied: {list}",
        failed.len(),
        names.len()
    )
}

/// Whether a store or server is down, so that the other collections would fail as well.
fn is_unavailable(error: &anyhow::Error) -> bool {
    let backend = match error.downcast_ref() {
        Some(TransferError::Backend(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    matches!(
        backend,
        Some(
            BackendError::Storage(StorageError::Unavailable { .. })
                | BackendError::Call(CallError::Unreachable { .. } | CallError::CircuitOpen { .. })
        )
    )
}

async fn copy_one(from: &dyn Backend, to: &dyn Backend, name: &CollectionName) -> anyhow::Result<()> {
    let collection = describe(from, name).await?;
    let shown = Shown::start("copied", collection.count);
    let mut source = BackendSource::new(from, name);
    let done = transfer(&mut source, &Head::of(&collection), to, name, &shown.progress).await;
    let seconds = shown.stop().await;
    let moved = done?;
    say(&format!(
        "{name}: copied {}{}",
        counted(&moved.sum, seconds),
        already(moved.already_there)
    ))
}

fn counted(sum: &Sum, seconds: f64) -> String {
    format!(
        "{} documents in {seconds:.1} s ({:.0}/s), sha256 {}",
        sum.documents,
        sum.documents as f64 / seconds.max(0.001),
        sum.sha256
    )
}

fn already(documents: u64) -> String {
    match documents {
        0 => String::new(),
        some => format!(", {some} of them by an earlier run"),
    }
}

fn say(line: &str) -> anyhow::Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}
