//! The command line. Arguments as typed are here; what they mean is decided in [`crate::config`]
//! and in the commands.

mod backup;
mod doctor;
mod environment;
mod eval;
pub mod ingest;
mod models;
mod query;
mod quickstart;
mod remote;
mod serve;
mod transfer;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::{ConfigError, ServerArgs};
use crate::telemetry::LogFormat;

/// Something went wrong while doing what was asked.
const FAILED: u8 = 1;
/// The configuration is wrong, as in sysexits.h.
const BAD_CONFIGURATION: u8 = 78;

#[derive(Parser)]
#[command(
    name = "ragstone",
    version,
    about = "Retrieval for AI applications as one program",
    propagate_version = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start the service
    Serve(Box<ServeArgs>),
    /// Start with a sample collection and the built-in default model; needs no configuration
    Quickstart(QuickstartArgs),
    /// Search a collection of a running server
    Query(query::QueryArgs),
    /// Check configuration, keys, data, models and services, and say how to mend what is wrong
    Doctor(doctor::DoctorArgs),
    /// Read, split, embed and store files, folders and rows
    Ingest(Box<ingest::IngestArgs>),
    /// Measure how well search finds what people judged relevant
    Eval(eval::EvalArgs),
    /// Write a collection with its vectors into a file
    Export(transfer::ExportArgs),
    /// Read a collection back from the file that `export` wrote
    Import(transfer::ImportArgs),
    /// Copy collections with their vectors from one store or server to another
    Copy(transfer::CopyArgs),
    /// Write the embedded store into one file, also while a server uses it
    Backup(backup::BackupArgs),
    /// Put a backup into a data directory that no server uses
    Restore(backup::RestoreArgs),
    /// Parse a file from standard input, within limits; used by the program itself
    #[command(hide = true, name = ingest::READ_UNTRUSTED)]
    ReadUntrusted { kind: String },
    /// List, fetch, show and remove downloaded models
    #[command(subcommand)]
    Models(ModelsCommand),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
}

/// What `serve` reads from the environment and no flag says, because other users can see flags.
const SERVE_ENVIRONMENT: &str = "Environment:\n  \
    RAGSTONE_API_KEYS  API keys, separated by commas; with any set, every request needs one\n  \
    RAGSTONE_LOG       What is logged, such as `debug` or `warn,ragstone=info` [default: info]\n  \
    HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE  As for other programs that use the Hugging Face hub";

#[derive(Args)]
#[command(after_help = SERVE_ENVIRONMENT)]
struct ServeArgs {
    #[command(flatten)]
    server: ServerArgs,
    /// Download and check all configured models, then exit
    #[arg(long)]
    download_models: bool,
    /// List recommended cross-encoders, then exit
    #[arg(long)]
    list_reranker_models: bool,
    /// Format of log lines on stderr
    #[arg(
        long,
        value_enum,
        ignore_case = true,
        env = "RAGSTONE_LOG_FORMAT",
        default_value = "text"
    )]
    log_format: LogFormat,
}

#[derive(Args)]
struct QuickstartArgs {
    /// Port to bind to on 127.0.0.1; 0 takes a free one
    #[arg(long, default_value_t = crate::config::DEFAULT_PORT)]
    port: u16,
    /// Where the store keeps its file
    #[arg(long, value_name = "DIR", default_value = "ragstone-quickstart")]
    data_dir: PathBuf,
    /// Answer the sample questions and exit instead of serving on
    #[arg(long)]
    once: bool,
}

#[derive(Subcommand)]
enum ModelsCommand {
    /// List the models in the cache
    List {
        /// As JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Fetch a model into the cache
    Pull {
        /// A Hugging Face model id, such as BAAI/bge-reranker-base, or ID@REVISION for one of its branches,
        /// tags or commits; `default` for the built-in default model
        name: String,
        /// Ask the hub for the present state of a model that is in the cache already
        #[arg(long)]
        update: bool,
    },
    /// Remove a model from the cache
    Remove {
        /// A Hugging Face model id, as `models list` shows it, with all its revisions, or ID@REVISION for one
        /// of them; `default` for the built-in default model
        name: String,
    },
    /// Show what is known of a model in the cache, or of one in a directory
    Show {
        /// A Hugging Face model id or ID@REVISION, `default` for the built-in default model, or a directory
        name: String,
        /// As JSON instead of lines
        #[arg(long)]
        json: bool,
    },
}

/// Parses the arguments, does what they say, and gives the exit code.
pub fn run() -> ExitCode {
    let cli = match environment::parse() {
        Ok(cli) => cli,
        Err(error) => return report(&error.into()),
    };
    let done = match cli.command {
        Command::Serve(args) => serve::run(&args),
        Command::Quickstart(args) => quickstart::run(&args),
        Command::Query(args) => query::run(&args),
        Command::Doctor(args) => return doctor::run(&args),
        Command::Ingest(args) => ingest::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Export(args) => transfer::export(&args),
        Command::Import(args) => transfer::import(&args),
        Command::Copy(args) => transfer::copy(&args),
        Command::Backup(args) => backup::backup(&args),
        Command::Restore(args) => backup::restore(&args),
        Command::ReadUntrusted { kind } => ingest::read_untrusted(&kind),
        Command::Models(command) => models::run(command),
        Command::Completions { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "ragstone", &mut std::io::stdout());
            Ok(())
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

/// Errors go to stderr, whole, whatever the log shows.
fn report(error: &anyhow::Error) -> ExitCode {
    // Whoever reads the output has enough of it, as `head` has. Only what is written to it fails so:
    // errors of connections are of other types.
    let output = error.downcast_ref::<std::io::Error>();
    if output.is_some_and(|output| output.kind() == std::io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    let message = format!("{error:#}");
    let lines: Vec<String> = message.lines().map(printable).collect();
    eprintln!("ragstone: fatal: {}", lines.join("\n"));
    if error.is::<ConfigError>() {
        ExitCode::from(BAD_CONFIGURATION)
    } else {
        ExitCode::from(FAILED)
    }
}

/// Text from documents, files and servers is shown, never obeyed: control characters, which could
/// move a terminal's cursor, become spaces.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Ends the program as wrong arguments do, where the arguments alone do not show that they are.
fn wrong_arguments(problem: impl std::fmt::Display) -> ! {
    Cli::command()
        .error(clap::error::ErrorKind::ValueValidation, problem)
        .exit()
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?
        .block_on(work)
}
