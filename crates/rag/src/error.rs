//! Why an operation was not done.

use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::model::ModelError;
use ragstone_core::storage::StorageError;

#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
    #[error("collection '{collection}' has no embedding_model in metadata. Available models: {available}")]
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
    /// Several collections were to be searched, and each of them failed.
    #[error("none of {} collections could be searched", .0.len())]
    NoneSearched(Vec<(String, ServiceError)>),
    #[error("too many ingestion jobs are unfinished ({open}, with {bytes} bytes): retry later")]
    TooManyJobs { open: u64, bytes: u64 },
    #[error("{what}")]
    File { what: String, source: std::io::Error },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Storage(#[from] StorageError),
}
