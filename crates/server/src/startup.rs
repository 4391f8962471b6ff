//! From settings to a running service.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context;
use ragstone_core::model::{Embedder, Reranker};
use ragstone_core::store::Store;
use ragstone_models::config::{EXAMPLE_CONFIG, EmbeddingsConfig, LocalEntry, ModelEntry};
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

    /// The routes, to be asked without a socket.
    pub fn router(&self) -> axum::Router {
        http::router(self.state.clone())
    }

    /// Ends without having served.
    pub async fn stop(self) -> anyhow::Result<()> {
        self.store.close().await.context("the store could not be closed cleanly")
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

/// The compute threads that all models share.
pub fn engine(settings: &Settings) -> Engine {
    Engine::start(EngineOptions { threads: settings.threads, ..EngineOptions::default() })
}

pub fn hub() -> anyhow::Result<Hub> {
    Ok(Hub::new(HubSettings::from_env())?)
}

/// Loads every configured model, or says which one cannot be loaded and why.
pub async fn load_models(settings: &Settings) -> anyhow::Result<Models> {
    let engine = engine(settings);
    let hub = hub()?;
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
        embedders.push(open_local(engine, hub, local).await?);
    }
    Ok(embedders)
}

/// Loads a model into this process.
pub async fn open_local(engine: &Engine, hub: &Hub, entry: &LocalEntry) -> anyhow::Result<Arc<dyn Embedder>> {
    let embedder = open_embedder(engine, hub, entry, &crate::progress::downloads())
        .await
        .with_context(|| format!("embedding model '{}' ({}) cannot be loaded", entry.id, entry.path))?;
    let dimensions = embedder.info().identity.dimensions;
    tracing::info!(model = %entry.id, path = %entry.path, dimensions, "embedding model loaded");
    Ok(Arc::new(embedder))
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
