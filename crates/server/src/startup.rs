//! From settings to a running service.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use ragstone_core::model::{Embedder, Reranker};
use ragstone_core::store::Store;
use ragstone_models::config::{EXAMPLE_CONFIG, EmbeddingsConfig, ModelEntry};
use ragstone_models::hub::{Hub, HubSettings, ModelSource};
use ragstone_models::{Engine, EngineOptions, open_cross_encoder, open_embedder};
use ragstone_rag::{Models, Service};
use ragstone_store::{SqliteStore, StoreOptions};
use secrecy::ExposeSecret;
use tokio::net::TcpListener;

use crate::config::{ConfigError, CrossEncoderChoice, EmbeddingsChoice, Settings, StoreLocation};
use crate::http::auth::ApiKeys;
use crate::http::state::{AppState, BodyBudget, Stopping};
use crate::{http, listen, telemetry};

/// How many requests of the largest size may be in memory at once.
const LARGE_BODIES: usize = 8;

/// Loads, opens, binds and serves until told to stop.
pub async fn serve(settings: Settings) -> anyhow::Result<()> {
    let listener = bind(&settings).await?;
    let models = load_models(&settings).await?;
    let running = Running::start(&settings, models)?;
    running.serve_on(listener, &settings, listen::stop_signal()).await
}

pub async fn bind(settings: &Settings) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(settings.host, settings.port);
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// The service, ready to answer.
pub struct Running {
    pub service: Service,
    store: Arc<SqliteStore>,
    state: AppState,
}

impl Running {
    pub fn start(settings: &Settings, models: Models) -> anyhow::Result<Self> {
        let StoreLocation::Embedded(directory) = &settings.store;
        let store = SqliteStore::open(directory, StoreOptions::default())
            .with_context(|| format!("the store in {} cannot be opened", directory.display()))?;
        let store = Arc::new(store);
        let service = Service { store: Arc::clone(&store) as Arc<dyn Store>, models: Arc::new(models) };
        let keys = ApiKeys::new(settings.api_keys.iter().map(|key| key.expose_secret()));
        let state = AppState {
            service: service.clone(),
            limits: Arc::new(settings.limits.clone()),
            body_budget: BodyBudget::for_bodies(LARGE_BODIES, settings.limits.add_bytes),
            keys: Arc::new(keys),
            metrics: telemetry::start_metrics()?,
            stopping: Stopping::default(),
        };
        Ok(Self { service, store, state })
    }

    pub async fn serve_on(
        self,
        listener: TcpListener,
        settings: &Settings,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let address = listener.local_addr()?;
        tracing::info!(version = env!("CARGO_PKG_VERSION"), "listening on http://{address}");
        let stopping = self.state.stopping.clone();
        let router = http::router(self.state);
        listen::serve(listener, router, &settings.limits, stopping, stop).await?;
        self.store.close().await.context("the store could not be closed cleanly")?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// Loads every configured model, or says which one cannot be loaded and why.
pub async fn load_models(settings: &Settings) -> anyhow::Result<Models> {
    let engine = Engine::start(EngineOptions { threads: settings.threads, ..EngineOptions::default() });
    let hub = Hub::new(HubSettings::from_env())?;
    let embedders = match &settings.embeddings {
        EmbeddingsChoice::None => Vec::new(),
        EmbeddingsChoice::Unset => return Err(no_models("no embedding models are configured").into()),
        EmbeddingsChoice::File(path) => {
            let config = EmbeddingsConfig::from_file(path).map_err(|error| match error {
                ragstone_models::config::ConfigError::Empty => no_models(&format!("{} lists no embedding models", path.display())),
                other => ConfigError(format!("{}: {other}", path.display())),
            })?;
            load_embedders(&engine, &hub, &config).await?
        }
    };
    let reranker = load_reranker(&engine, &hub, settings.cross_encoder.as_ref()).await?;
    Ok(Models::new(embedders, reranker))
}

async fn load_embedders(
    engine: &Engine,
    hub: &Hub,
    config: &EmbeddingsConfig,
) -> anyhow::Result<Vec<Arc<dyn Embedder>>> {
    let mut embedders: Vec<Arc<dyn Embedder>> = Vec::with_capacity(config.embeddings.len());
    for entry in &config.embeddings {
        let local = match entry {
            ModelEntry::Local(local) => local,
            ModelEntry::Remote(remote) => {
                return Err(ConfigError(format!("embedding model '{}': provider '{}' is not configured", remote.id, remote.provider)).into());
            }
        };
        let embedder = open_embedder(engine, hub, local, &crate::progress::downloads())
            .await
            .with_context(|| format!("embedding model '{}' ({}) cannot be loaded", local.id, local.path))?;
        tracing::info!(model = %local.id, path = %local.path, dimensions = embedder.info().identity.dimensions, "embedding model loaded");
        embedders.push(Arc::new(embedder));
    }
    Ok(embedders)
}

async fn load_reranker(
    engine: &Engine,
    hub: &Hub,
    choice: Option<&CrossEncoderChoice>,
) -> anyhow::Result<Option<Arc<dyn Reranker>>> {
    let source = match choice {
        None => {
            tracing::info!("cross-encoder disabled: /rerank answers 503");
            tracing::info!("enable it with, for example: ragstone serve --cross-encoder BAAI/bge-reranker-base");
            tracing::info!("see --list-reranker-models for more");
            return Ok(None);
        }
        Some(CrossEncoderChoice::Directory(path)) => ModelSource::Directory(path.clone()),
        Some(CrossEncoderChoice::Hub(name)) => ModelSource::parse(name),
    };
    let reranker = open_cross_encoder(engine, hub, &source, &crate::progress::downloads())
        .await
        .with_context(|| format!("cross-encoder {source} cannot be loaded"))?;
    tracing::info!(model = %source, "cross-encoder loaded");
    Ok(Some(Arc::new(reranker)))
}

/// Fatal, with an example of what is missing.
fn no_models(problem: &str) -> ConfigError {
    ConfigError(format!(
        "{problem}. Write a file such as this and name it with --embeddings-config or EMBEDDINGS_CONFIG:\n\n{EXAMPLE_CONFIG}\n\
         Or start with --no-embeddings if documents and queries bring their own vectors, \
         or try `ragstone quickstart`, which needs no configuration."
    ))
}
