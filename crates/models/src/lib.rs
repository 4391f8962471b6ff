//! Embedding models and cross-encoders that run inside this process.
//!
//! Models are read from the files of a model repository as they are: `config.json`,
//! `tokenizer.json`, safetensors weights and, where there is one, the module layout of
//! sentence-transformers. Results agree with those of `sentence-transformers` on the same files.
//!
//! # From a name to a vector
//!
//! ```no_run
//! # use ragstone_models::{Engine, EngineOptions, config, hub, open_embedder, open_cross_encoder};
//! # use ragstone_core::model::{Embedder, Reranker, Role};
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let engine = Engine::start(EngineOptions::default());         // compute threads and their queue, shared by all models
//! let hub = hub::Hub::new(hub::HubSettings::from_env())?;       // cache and downloads
//! let models = config::EmbeddingsConfig::from_yaml("embeddings: [{id: minilm, path: org/name}]")?;
//! for entry in &models.embeddings {
//!     if let config::ModelEntry::Local(local) = entry {
//!         let embedder = open_embedder(&engine, &hub, local, &hub::silent).await?;
//!         let _ = embedder.embed(vec!["a text".to_owned().into()], Role::Passage).await?;
//!     }
//! }
//! let source = hub::ModelSource::parse("BAAI/bge-reranker-base");
//! let reranker = open_cross_encoder(&engine, &hub, &source, &hub::silent).await?;
//! let _ = reranker.score("a question", vec!["a text".to_owned()], None).await?;
//! # Ok(()) }
//! ```
//!
//! [`default_model::ensure`] downloads the model of the quick start, [`cache`] manages downloaded models,
//! [`catalog`] is the curated list of cross-encoders, and [`LoadError`] has a message for the user for
//! every failure.
//!
//! # Threads
//!
//! An [`Engine`] owns the compute threads. A request is split into microbatches of whole sequences. The
//! threads take microbatches from one bounded queue that is fair by tokens, so that a short query
//! overtakes the rest of a large batch. See [`engine`] for details.

mod blocking;
pub mod cache;
pub mod catalog;
pub mod config;
pub mod default_model;
mod embedder;
mod encoder;
pub mod engine;
mod error;
mod files;
pub mod hub;
mod kernel;
mod modules;
mod reranker;
mod sentence;
mod thread_group;
mod tokenize;

pub use embedder::{EmbedderOptions, LocalEmbedder, inspect_embedder};
pub use engine::{Engine, EngineOptions};
pub use error::LoadError;
pub use reranker::{CrossEncoder, CrossEncoderOptions, inspect_cross_encoder};

/// Loads a model of `embeddings.yml`, after downloading its files where necessary.
pub async fn open_embedder(
    engine: &Engine,
    hub: &hub::Hub,
    entry: &config::LocalEntry,
    progress: hub::Progress<'_>,
) -> Result<LocalEmbedder, LoadError> {
    let directory = match entry.path.as_str() {
        default_model::ID => default_model::ensure(hub, progress).await?,
        path => {
            hub.model_directory(&hub::ModelSource::parse(path), progress)
                .await?
        }
    };
    let options = EmbedderOptions {
        id: entry.id.clone(),
        name: entry.path.clone(),
        directory,
        version: entry.version.clone(),
        normalize: entry.normalize,
        quantize: entry.quantize,
    };
    let engine = engine.clone();
    in_background(move || LocalEmbedder::load(&engine, &options)).await
}

/// Loads a cross-encoder, after downloading its files where necessary.
pub async fn open_cross_encoder(
    engine: &Engine,
    hub: &hub::Hub,
    source: &hub::ModelSource,
    progress: hub::Progress<'_>,
) -> Result<CrossEncoder, LoadError> {
    let directory = hub.model_directory(source, progress).await?;
    let options = CrossEncoderOptions {
        name: source.to_string(),
        directory,
    };
    let engine = engine.clone();
    in_background(move || CrossEncoder::load(&engine, &options)).await
}

/// Loads on a blocking thread, since loading takes seconds.
async fn in_background<T: Send + 'static>(
    load: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    match tokio::task::spawn_blocking(load).await {
        Ok(loaded) => loaded,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}
