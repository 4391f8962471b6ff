//! Command-line arguments that are settings, with their environment variables and defaults.
//!
//! Every command flattens the group it needs, so that a flag means the same everywhere.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use ragstone_models::catalog;

use super::{ConfigError, FileConfig, Settings, build, process_env};

pub const DEFAULT_HOST: &str = "127.0.0.1";
pub const DEFAULT_PORT: u16 = 5006;
pub const DEFAULT_DATA_DIR: &str = "ragstone-data";

/// Location of the data: for every command that opens a store. The URL may contain a password, so this
/// type has no `Debug`.
#[derive(Args, Clone, Default)]
pub struct StoreArgs {
    /// Directory of the embedded store [default: ragstone-data]
    #[arg(long, value_name = "DIR", env = "RAGSTONE_DATA_DIR")]
    pub data_dir: Option<PathBuf>,
    /// Store to use instead of the data directory: sqlite://DIR, postgres://USER:PASSWORD@HOST/DATABASE or
    /// chroma://HOST:PORT. Set a URL with a password in the environment, because other users can read flags
    #[arg(long, value_name = "URL", env = "RAGSTONE_STORE")]
    pub store: Option<String>,
    /// Configuration file
    #[arg(long, value_name = "FILE", env = "RAGSTONE_CONFIG")]
    pub config: Option<PathBuf>,
}

/// For commands that open a store and run embedding models in their own process.
#[derive(Args, Clone, Default)]
pub struct LocalArgs {
    #[command(flatten)]
    pub store: StoreArgs,
    /// File that lists the embedding models; without it, `ingest` and `query` use the built-in default model
    #[arg(long, value_name = "FILE", env = "EMBEDDINGS_CONFIG")]
    pub embeddings_config: Option<PathBuf>,
    #[command(flatten)]
    pub compute: ComputeArgs,
}

#[derive(Args, Clone, Default)]
pub struct ComputeArgs {
    /// Number of compute threads for models [default: one per core]
    #[arg(long, value_name = "N", env = "RAGSTONE_THREADS", value_parser = threads)]
    pub threads: Option<NonZeroUsize>,
}

#[derive(Args, Clone, Default)]
pub struct CrossEncoderArgs {
    #[arg(long, value_name = "NAME", env = "CROSS_ENCODER_MODEL", help = cross_encoder_help())]
    pub cross_encoder: Option<String>,
    /// Load the cross-encoder from this directory; takes precedence over --cross-encoder
    #[arg(long, value_name = "DIR", env = "CROSS_ENCODER_PATH")]
    pub cross_encoder_path: Option<PathBuf>,
}

#[derive(Args, Clone, Default)]
pub struct ListenArgs {
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, env = "RAGSTONE_HOST")]
    pub host: Option<String>,
    /// Port to listen on; 0 picks a free one [default: 5006]
    #[arg(long, env = "RAGSTONE_PORT", value_parser = port)]
    pub port: Option<u16>,
    /// Allow other machines to connect without an API key
    #[arg(long)]
    pub allow_no_key: bool,
}

/// All settings of a server.
#[derive(Args, Clone, Default)]
pub struct ServerArgs {
    #[command(flatten)]
    pub listen: ListenArgs,
    #[command(flatten)]
    pub local: LocalArgs,
    /// Run without embedding models: documents and queries bring their own vectors
    #[arg(long, conflicts_with = "embeddings_config")]
    pub no_embeddings: bool,
    #[command(flatten)]
    pub cross_encoder: CrossEncoderArgs,
}

/// Flags that supersede the environment variable of an alternative.
pub(crate) const SUPERSEDED_VARIABLES: [(&str, &str); 8] = [
    ("--no-embeddings", "EMBEDDINGS_CONFIG"),
    ("--cross-encoder", "CROSS_ENCODER_PATH"),
    ("--conversations", "CROSS_ENCODER_MODEL"),
    ("--conversations", "CROSS_ENCODER_PATH"),
    ("--url", "RAGSTONE_DATA_DIR"),
    ("--url", "RAGSTONE_STORE"),
    ("--data-dir", "RAGSTONE_URL"),
    ("--store", "RAGSTONE_URL"),
];

impl StoreArgs {
    /// Settings of a command that opens the store, and neither listens nor loads models.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        LocalArgs {
            store: self.clone(),
            ..LocalArgs::default()
        }
        .settings()
    }
}

impl LocalArgs {
    /// Settings of a command that does not listen, and so needs no API key.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        ServerArgs {
            local: self.clone(),
            listen: ListenArgs {
                allow_no_key: true,
                ..ListenArgs::default()
            },
            ..ServerArgs::default()
        }
        .settings()
    }
}

impl ServerArgs {
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let file = match &self.local.store.config {
            Some(path) => FileConfig::read(path)?,
            None => FileConfig::default(),
        };
        build(self, file, &process_env)
    }
}

fn port(text: &str) -> Result<u16, &'static str> {
    text.trim()
        .parse()
        .map_err(|_| "must be a whole number from 0 to 65535")
}

fn threads(text: &str) -> Result<NonZeroUsize, &'static str> {
    text.trim()
        .parse()
        .map_err(|_| "must be a whole number of at least 1")
}

/// The help of `--cross-encoder`, with the curated models as examples.
fn cross_encoder_help() -> String {
    let mut help = "Cross-encoder for reranking, from the Hugging Face hub. Examples:".to_owned();
    for model in catalog::CROSS_ENCODERS {
        help.push_str(&format!(
            "\n  {} ({}, {})",
            model.name,
            model.size,
            model.use_case.name()
        ));
    }
    help.push_str("\nSee --list-reranker-models for all of them");
    help
}
