//! Errors of downloading and loading models, with messages for the user.

use std::path::{Path, PathBuf};

use crate::config::ModelConfigError;
use crate::hub::HubError;

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("model directory {} does not exist", .0.display())]
    NoDirectory(PathBuf),
    #[error("{} has no {file}", directory.display())]
    MissingFile { directory: PathBuf, file: &'static str },
    #[error(
        "{} has its weights only as {file}. Pickled files can run code when they are loaded, so only \
         safetensors files are supported. Convert the model with save_pretrained(..., \
         safe_serialization=True), or use a revision that has model.safetensors",
        directory.display()
    )]
    PickledWeights { directory: PathBuf, file: String },
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{} is damaged or has an unexpected format: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error("{what} is not supported; supported are: {supported}")]
    Unsupported { what: String, supported: String },
    #[error("{} has no tensor '{name}'", path.display())]
    MissingTensor { path: PathBuf, name: String },
    #[error("tensor '{name}' has shape {found:?}, but config.json requires {expected:?}")]
    WrongShape {
        name: String,
        found: Vec<usize>,
        expected: Vec<usize>,
    },
    #[error("{0}")]
    NotAReranker(String),
    #[error(transparent)]
    Hub(#[from] HubError),
    #[error(transparent)]
    Config(#[from] ModelConfigError),
}

impl LoadError {
    /// Whether the given path is not a directory.
    pub fn is_no_directory(&self) -> bool {
        matches!(
            self,
            Self::NoDirectory(_) | Self::Hub(HubError::NoDirectory(_) | HubError::NotADirectory(_))
        )
    }

    pub(crate) fn malformed(path: &Path, reason: impl ToString) -> Self {
        Self::Malformed {
            path: path.to_owned(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn unsupported(what: impl Into<String>, supported: impl Into<String>) -> Self {
        Self::Unsupported {
            what: what.into(),
            supported: supported.into(),
        }
    }
}
