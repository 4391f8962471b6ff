//! Memory, retrieval and chat for agents, from the settings.

use std::sync::Arc;
use std::time::Duration;

use ragstone_core::chat::ChatModel;
use ragstone_core::model::Embedder;
use ragstone_core::models::Models;
use ragstone_core::records::Records;
use ragstone_core::storage::Storage;
use ragstone_memory::chat::{ContextAwareModelAdapter, ContextOptions};
use ragstone_memory::{Buffer, BufferOptions, Memory, Ownership, Rag, RagDefaults, check_collections};
use ragstone_providers::config::{EmbeddingConfig, RagConfig};
use ragstone_providers::{chat, embedding};
use ragstone_search::StorageBackend;
use ragstone_search::gateway::NamedBackend;

use crate::config::{self, ConfigError, Settings};

/// `embedding.provider` for a model of this process, which `embedding.model` names.
pub(crate) const IN_PROCESS: &str = "in-process";

/// Retrieval and chat exist if they are configured. Saving and reading memory always works.
#[derive(Clone)]
pub struct Agent {
    pub memory: Memory,
    pub rag: Option<Arc<Rag>>,
    pub chat: Option<Arc<dyn ChatModel>>,
    /// Adds context to chats, if enabled.
    pub context: Option<Arc<ContextAwareModelAdapter>>,
    buffer: Option<Buffer>,
}

impl Agent {
    pub async fn start(
        settings: &Settings,
        local: &StorageBackend,
        records: Arc<dyn Records>,
        store: Arc<dyn Storage>,
    ) -> anyhow::Result<Self> {
        check_rag(&settings.embedding.rag)?;
        let chat = chat_model(settings)?;
        let Some((embedder, options)) = memory_embedder(settings, &local.service().models)? else {
            match settings.embedding.provider.as_str() {
                "" => tracing::info!("agent memory is not embedded: no embedding provider is configured"),
                provider => tracing::warn!(
                    provider,
                    "agent memory is not embedded: embedding.provider is unknown; set it to local or in-process, \
                     or set embedding.providerID to an entry of providers"
                ),
            }
            let memory = Memory::without_embedding(records, store).await?;
            return Ok(Self {
                memory,
                rag: None,
                chat,
                context: None,
                buffer: None,
            });
        };
        let identity = &embedder.info().identity;
        tracing::info!(model = %identity.version, dimensions = identity.dimensions, "agent memory is embedded");
        let ownership = if settings.store.is_shared() {
            Ownership::Shared
        } else {
            Ownership::Exclusive
        };
        let options = BufferOptions { ownership, ..options };
        let buffer = Buffer::start(
            Arc::clone(&records),
            Arc::clone(&store),
            Arc::clone(&embedder),
            options,
        );
        let memory = Memory::with_embedding(records, store, buffer.clone());
        let config = &settings.embedding.rag;
        let defaults = RagDefaults {
            max_results: config.max_results,
            max_distance: Some(config.max_distance).filter(|far| *far > 0.0),
            collections: config.collections.clone(),
        };
        let rag = Rag::new(
            memory.clone(),
            embedder,
            NamedBackend::local(local.clone()),
            local.vectors().clone(),
            defaults,
        );
        let rag = Arc::new(rag);
        if chat.is_some() && !config.enabled {
            tracing::info!("chats get no context from agent memory: embedding.rag.enabled is false");
        }
        let context = chat.as_ref().filter(|_| config.enabled).map(|chat| {
            let options = ContextOptions {
                token_budget: config.max_tokens,
                deadline: Duration::from_millis(config.timeout_ms),
            };
            Arc::new(ContextAwareModelAdapter::new(
                Arc::clone(chat),
                Arc::clone(&rag),
                options,
            ))
        });
        Ok(Self {
            memory,
            rag: Some(rag),
            chat,
            context,
            buffer: Some(buffer),
        })
    }

    /// Embeds the remaining entries until the deadline.
    pub async fn stop(&self, deadline: Duration) {
        if let Some(buffer) = &self.buffer {
            buffer.stop(deadline).await;
        }
    }
}

pub(crate) fn check_rag(config: &RagConfig) -> Result<(), ConfigError> {
    let wrong = |what: &str| Err(ConfigError(format!("embedding.rag.{what}")));
    if config.max_results == 0 {
        return wrong("maxResults is 0: it must be at least 1");
    }
    if !config.max_distance.is_finite() || config.max_distance < 0.0 {
        return wrong(&format!(
            "maxDistance is {}: it must be at least 0, which means no limit",
            config.max_distance
        ));
    }
    if config.max_tokens == 0 {
        return wrong("maxTokens is 0: it must be at least 1; set enabled to false to add no context");
    }
    if config.timeout_ms == 0 {
        return wrong("timeoutMs is 0: it must be at least 1; set enabled to false to add no context");
    }
    if config.collections.is_empty() {
        return wrong("collections is empty: name at least one collection, or leave it out");
    }
    check_collections(&config.collections)
        .map_err(|error| ConfigError(format!("embedding.rag.collections: {error}")))
}

fn chat_model(settings: &Settings) -> Result<Option<Arc<dyn ChatModel>>, ConfigError> {
    let Some(config) = &settings.chat else {
        return Ok(None);
    };
    chat::from_config(config, &settings.providers, &config::process_env)
        .map(Some)
        .map_err(|error| ConfigError(format!("chat: {error}")))
}

/// The embedder of agent memory, and the options of its buffer.
type MemoryEmbedder = (Arc<dyn Embedder>, BufferOptions);

fn memory_embedder(settings: &Settings, models: &Models) -> Result<Option<MemoryEmbedder>, ConfigError> {
    let config = &settings.embedding;
    if is_in_process(config) {
        let embedder = in_process_embedder(config, models)?;
        return Ok(Some((embedder, BufferOptions::in_process())));
    }
    let embedder = embedding::from_config(config, &settings.providers, &config::process_env)
        .map_err(|error| ConfigError(format!("embedding: {error}")))?;
    Ok(embedder.map(|embedder| (embedder, BufferOptions::default())))
}

/// A `providerID` takes precedence.
pub(crate) fn is_in_process(config: &EmbeddingConfig) -> bool {
    config.provider_id.is_empty() && config.provider == IN_PROCESS
}

fn in_process_embedder(config: &EmbeddingConfig, models: &Models) -> Result<Arc<dyn Embedder>, ConfigError> {
    let embedder = if config.model.is_empty() {
        let none = "embedding.provider is 'in-process', but no model is loaded: configure one with --embeddings-config";
        models
            .default_embedder()
            .ok_or_else(|| ConfigError(none.to_owned()))?
    } else {
        models
            .embedder(&config.model)
            .map_err(|error| ConfigError(format!("embedding.model: {error}")))?
    };
    let width = embedder.info().identity.dimensions;
    match config.dimensions {
        Some(wanted) if wanted != width => Err(ConfigError(format!(
            "embedding.dimensions is {wanted}, but the model '{}' has {width}: leave it out or set it to {width}",
            embedder.info().identity.id
        ))),
        _ => Ok(Arc::clone(embedder)),
    }
}
