//! The command line. Arguments that are settings are in [`crate::config`].

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

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::{ConfigError, ServerArgs};
use crate::stores;
use crate::telemetry::{self, LogFormat};

/// Exit code of a failed command.
const FAILED: u8 = 1;
/// Exit code of an invalid configuration, as in sysexits.h.
const BAD_CONFIGURATION: u8 = 78;

#[derive(Parser)]
#[command(
    name = "ragstone",
    version,
    about = "Retrieval for AI applications in one binary",
    propagate_version = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start the server
    Serve(Box<ServeArgs>),
    /// Start a server with a sample collection and the built-in default model; needs no configuration
    Quickstart(QuickstartArgs),
    /// Search a collection of a running server or of a data directory
    Query(Box<query::QueryArgs>),
    /// Check configuration, keys, data, models and services, and suggest fixes
    Doctor(Box<doctor::DoctorArgs>),
    /// Read, split, embed and store files, folders and rows
    Ingest(Box<ingest::IngestArgs>),
    /// Measure the quality of search against relevance judgments
    Eval(eval::EvalArgs),
    /// Write a collection with its vectors to a file
    Export(transfer::ExportArgs),
    /// Read a collection from a file written by `export`
    Import(transfer::ImportArgs),
    /// Copy collections with their vectors from one store or server to another
    Copy(transfer::CopyArgs),
    /// Back up the embedded store to one file, even while a server uses it
    Backup(backup::BackupArgs),
    /// Restore a backup to a data directory that no server uses
    Restore(backup::RestoreArgs),
    /// Parse a file from standard input within limits; for internal use
    #[command(hide = true, name = ingest::READ_UNTRUSTED)]
    ReadUntrusted { kind: String },
    /// List, download, show and remove models
    #[command(subcommand)]
    Models(ModelsCommand),
    /// Print a completion script for a shell
    Completions { shell: clap_complete::Shell },
}

/// Variables of `serve` without a flag, because other users can read flags.
const SERVE_ENVIRONMENT: &str = "Environment:\n  \
    RAGSTONE_API_KEYS  API keys, separated by commas; if set, every request needs one of them\n  \
    RAGSTONE_LOG       Log filter, such as `debug` or `warn,ragstone=info` [default: info]\n  \
    HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE  Settings of the Hugging Face hub";

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
    /// Port to listen on at 127.0.0.1; 0 picks a free one
    #[arg(long, default_value_t = crate::config::DEFAULT_PORT)]
    port: u16,
    /// Directory of the embedded store
    #[arg(long, value_name = "DIR", default_value = "ragstone-quickstart")]
    data_dir: PathBuf,
    /// Answer the sample questions and exit
    #[arg(long)]
    once: bool,
}

#[derive(Subcommand)]
enum ModelsCommand {
    /// List the models in the cache
    List {
        /// Print JSON instead of a table
        #[arg(long)]
        json: bool,
    },
    /// Download a model to the cache
    Pull {
        /// Hugging Face model id such as BAAI/bge-reranker-base, ID@REVISION for a branch, tag or commit, or
        /// `default` for the built-in default model
        name: String,
        /// Update a model that is in the cache already
        #[arg(long)]
        update: bool,
    },
    /// Remove a model from the cache
    Remove {
        /// Model id as shown by `models list`, for all revisions, ID@REVISION for one of them, or `default` for
        /// the built-in default model
        name: String,
    },
    /// Show details of a model in the cache or in a directory
    Show {
        /// Hugging Face model id, ID@REVISION, `default` for the built-in default model, or a directory
        name: String,
        /// Print JSON instead of lines
        #[arg(long)]
        json: bool,
    },
}

/// Parses the arguments and runs the command.
pub fn run() -> ExitCode {
    let cli = match environment::parse() {
        Ok(cli) => cli,
        Err(error) => return report(&error.into()),
    };
    if cli.command.writes_copies() {
        stores::restrict_to_owner();
    }
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

impl Command {
    /// Whether the files it creates hold the documents of a store, and so must be readable by their owner
    /// only.
    fn writes_copies(&self) -> bool {
        matches!(
            self,
            Self::Export(_) | Self::Import(_) | Self::Copy(_) | Self::Backup(_) | Self::Restore(_)
        )
    }
}

/// Reports a fatal error on stderr, whatever the log filter.
fn report(error: &anyhow::Error) -> ExitCode {
    // The reader of the output closed it, as `head` does. Errors of connections have other types.
    let output = error.downcast_ref::<std::io::Error>();
    if output.is_some_and(|output| output.kind() == std::io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    let message = format!("{error:#}");
    let lines: Vec<String> = message.lines().map(printable).collect();
    telemetry::report_fatal(&lines.join("\n"));
    if error.is::<ConfigError>() {
        ExitCode::from(BAD_CONFIGURATION)
    } else {
        ExitCode::from(FAILED)
    }
}

/// Replaces control characters, which could move the cursor of a terminal, by spaces.
fn printable(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Writes a line for people to stderr. A stderr that cannot be written is no reason to fail.
fn note(line: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Ends the program with a usage error that clap cannot detect.
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
