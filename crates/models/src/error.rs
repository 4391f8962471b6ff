//! Every way in which getting or loading a model can fail, with a message for the user.

use std::path::{Path, PathBuf};

use crate::config::ConfigError;
use crate::hub::HubError;

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("model directory {} does not exist", .0.display())]
    NoDirectory(PathBuf),
    #[error("{} has no {file}, which a model needs", directory.display())]
    MissingFile { directory: PathBuf, file: &'static str },
    #[error(
        "{} holds its weights only as {file}: pickled files can run code when they are loaded, so only \
         safetensors are read. Convert the model with save_pretrained(..., safe_serialization=True), or use a \
         revision that has model.safetensors",
        directory.display()
    )]
    PickledWeights { directory: PathBuf, file: String },
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    /// The file is not what its name says.
    #[error("{} is damaged or not of the expected form: {reason}", path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error("{} is not supported; supported are: {supported}", .what)]
    Unsupported { what: String, supported: String },
    #[error("{} lacks the tensor '{name}'", path.display())]
    MissingTensor { path: PathBuf, name: String },
    #[error("tensor '{name}' has the shape {found:?} where config.json asks for {expected:?}")]
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
    Config(#[from] ConfigError),
}

impl LoadError {
    /// The path that was given leads to no directory.
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
