//! Why an operation was not done.

use ragstone_core::backend::BackendError;
use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::model::ModelError;
use ragstone_core::storage::StorageError;

#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
    #[error("Collection '{collection}' has no embedding_model in metadata. Available models: {available}")]
    NoModel {
        collection: CollectionName,
        available: String,
    },
    #[error("Embedding model '{model}' not loaded. Available models: {available}")]
    ModelNotLoaded { model: String, available: String },
    #[error("Cross-encoder not loaded. Start server with --cross-encoder flag.")]
    NoReranker,
    #[error(
        "Embedding is disabled: set embedding.providerID to an entry of providers, or embedding.provider to 'local' \
         or 'in-process', in the configuration file"
    )]
    EmbeddingDisabled,
    #[error("too many ingestion jobs are unfinished ({open} jobs, {bytes} bytes): retry later")]
    TooManyJobs { open: u64, bytes: u64 },
    #[error("{what}")]
    File { what: String, source: std::io::Error },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}

impl From<BackendError> for ServiceError {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::CollectionNotFound(name) => StorageError::CollectionNotFound(name).into(),
            BackendError::CollectionExists(name) => StorageError::CollectionExists(name).into(),
            BackendError::Invalid(invalid) => invalid.into(),
            BackendError::Unsupported(message) => StorageError::Unsupported(message).into(),
            BackendError::NoModel {
                collection,
                available,
            } => Self::NoModel {
                collection,
                available,
            },
            BackendError::ModelNotLoaded { model, available } => Self::ModelNotLoaded { model, available },
            BackendError::NoReranker => Self::NoReranker,
            BackendError::Model(error) => error.into(),
            BackendError::Storage(error) => error.into(),
            BackendError::Call(error) => StorageError::Call(error).into(),
        }
    }
}
