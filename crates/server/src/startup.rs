//! Starting the service from its settings.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use ragstone_core::model::{
    EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, ModelInfo, Reranker, Role,
};
use ragstone_core::models::Models;
use ragstone_core::records::Records;
use ragstone_core::service::Service;
use ragstone_ingest::Ingestion;
use ragstone_ingest::jobs::Jobs;
use ragstone_ingest::ledger::{ContractEmbedder, ContractSettings, Ledger};
use ragstone_models::config::{EXAMPLE_CONFIG, EmbeddingsConfig, LocalEntry, ModelEntry, RemoteEntry};
use ragstone_models::default_model;
use ragstone_models::hub::{Hub, HubSettings, ModelSource};
use ragstone_models::{Engine, EngineOptions, LoadError, open_cross_encoder, open_embedder};
use ragstone_providers::config::{ProviderEntry, Providers};
use ragstone_providers::embedding::{self, CONTRACT_TYPE, ContractClient};
use ragstone_providers::http::NamedHost;
use ragstone_search::conversations::{self, Conversations, TopicModel};
use ragstone_search::gateway::{Gateway, GatewayConfig};
use ragstone_search::{QueryVectors, StorageBackend};
use tokio::net::{TcpListener, TcpSocket};

use crate::agent::Agent;
use crate::config::{self, ConfigError, CrossEncoderChoice, EmbeddingsChoice, Settings, StoreLocation};
use crate::http::auth::ApiKeys;
use crate::http::state::{AppState, BodyBudget, Shared, Stopping};
use crate::stores::OpenStore;
use crate::{http, listen, telemetry};

/// Number of request bodies of the largest size that fit into memory at once.
const LARGE_BODIES: usize = 8;
/// Time to embed the rest of agent memory after the last request.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Id of the built-in default model in collections that `quickstart` and `ingest` create.
pub(crate) const DEFAULT_MODEL_ID: &str = "minilm";

/// Binds, opens the store, loads the models, and serves until told to stop.
pub(crate) async fn serve(settings: Settings) -> anyhow::Result<()> {
    let listener = bind(&settings).await?;
    let store = OpenStore::open(&settings.store).await?;
    if settings.embeddings == EmbeddingsChoice::Unset {
        return Err(models_of_collections(&settings, &store).await);
    }
    let models = load_models(&settings, Some(store.records())).await?;
    let running = Running::start(&settings, store, models).await?;
    running.serve_on(listener, &settings, listen::stop_signal()).await
}

pub(crate) async fn bind(settings: &Settings) -> anyhow::Result<TcpListener> {
    let address = SocketAddr::new(settings.host, settings.port);
    listen_on(address).with_context(|| format!("cannot listen on {address}"))
}

/// Connections that may wait to be accepted; the system may allow fewer. With the usual 128, further
/// clients that connect at the same moment succeed only with their retry a second later.
const WAITING_CONNECTIONS: u32 = 4096;

fn listen_on(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    // A restart must not wait for connections of the last run to time out. On Windows the option would let
    // two programs share a port.
    #[cfg(not(windows))]
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(WAITING_CONNECTIONS)
}

/// The service, ready to answer.
pub(crate) struct Running {
    local: StorageBackend,
    store: OpenStore,
    state: AppState,
}

impl Running {
    pub(crate) async fn start(settings: &Settings, store: OpenStore, models: Models) -> anyhow::Result<Self> {
        let service = Service {
            store: store.store(),
            models: Arc::new(models),
        };
        let vectors = QueryVectors::default();
        let local = StorageBackend::new(service.clone(), vectors.clone());
        let gateway = connect_services(settings, local.clone())?;
        let agent = Agent::start(settings, &local, store.records(), store.vectors_of_records()).await?;
        let conversations = Conversations {
            records: store.records(),
            models: Arc::clone(&service.models),
            vectors,
            chat: agent.chat.clone().map(|chat| Arc::new(TopicModel::new(chat))),
            ttl: settings.conversation_ttl,
        };
        let ledger = Ledger::new(store.records());
        let ingestion = Ingestion {
            service: service.clone(),
            records: store.records(),
            ledger: ledger.clone(),
            read: crate::cli::ingest::read_options(),
            // A job that has to wait goes back to the queue.
            attempts: 3,
        };
        let keys = ApiKeys::new(settings.api_keys.iter().map(secrecy::ExposeSecret::expose_secret));
        let state = AppState::new(Shared {
            service,
            agent,
            gateway,
            conversations,
            ledger,
            jobs: Jobs::new(ingestion, settings.limits.open_jobs as u64),
            limits: settings.limits.clone(),
            body_budget: BodyBudget::for_bodies(LARGE_BODIES, settings.limits.add_bytes),
            keys,
            only_this_machine: settings.host.is_loopback(),
            metrics: telemetry::start_metrics()?,
            stopping: Stopping::default(),
        });
        Ok(Self { local, store, state })
    }

    /// The backend of this process.
    pub(crate) fn local(&self) -> &StorageBackend {
        &self.local
    }

    /// The routes, for requests without a socket.
    pub(crate) fn router(&self) -> axum::Router {
        http::router(self.state.clone())
    }

    /// Stops without serving.
    pub(crate) async fn stop(self) -> anyhow::Result<()> {
        self.state.agent.stop(DRAIN_TIMEOUT).await;
        self.store
            .close()
            .await
            .context("the store could not be closed cleanly")
    }

    pub(crate) async fn serve_on(
        self,
        listener: TcpListener,
        settings: &Settings,
        stop: impl Future<Output = ()>,
    ) -> anyhow::Result<()> {
        let address = listener.local_addr()?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            "listening on http://{address}"
        );
        let timeouts = listen::Timeouts {
            headers: settings.limits.header_timeout,
            write: settings.write_timeout,
            shutdown: settings.limits.shutdown_timeout,
        };
        let stopping = self.state.stopping.clone();
        let records = Arc::clone(&self.state.conversations.records);
        let sweeping = tokio::spawn(conversations::keep_sweeping(records, sweep_interval(settings)));
        let agent = self.state.agent.clone();
        let worker = self.state.jobs.worker().start();
        let router = http::router(self.state);
        let served = listen::serve(listener, router, timeouts, stopping, stop).await;
        sweeping.abort();
        worker.stop().await;
        agent.stop(DRAIN_TIMEOUT).await;
        served?;
        self.store
            .close()
            .await
            .context("the store could not be closed cleanly")?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// Interval at which expired conversations, which readers no longer see, are deleted.
fn sweep_interval(settings: &Settings) -> Duration {
    settings.conversation_ttl.min(Duration::from_secs(60))
}

/// The gateway to the configured services. Clients of a server that only this machine can reach may try
/// connections to this machine.
fn connect_services(settings: &Settings, local: StorageBackend) -> Result<Gateway, ConfigError> {
    let this_machine = ["localhost", "127.0.0.1", "[::1]"].map(NamedHost::with_all_ports);
    let config = GatewayConfig {
        services: &settings.services,
        reachable_hosts: if settings.host.is_loopback() {
            this_machine.into()
        } else {
            Vec::new()
        },
        environment: &config::process_env,
    };
    Gateway::new(local, config).map_err(|error| ConfigError(error.to_string()))
}

/// The compute threads shared by all models.
pub(crate) fn engine(settings: &Settings) -> Engine {
    let defaults = EngineOptions::default();
    Engine::start(EngineOptions {
        threads: settings.threads.map(std::num::NonZeroUsize::get),
        queue_tokens: settings.model_queue_tokens.unwrap_or(defaults.queue_tokens),
        ..defaults
    })
}

pub(crate) fn hub() -> anyhow::Result<Hub> {
    Ok(Hub::new(HubSettings::from_env())?)
}

/// Storage for vectors that an embedding service returns only once. Without it, such a model cannot embed.
pub(crate) type Keep = Option<Arc<dyn Records>>;

/// Loads every configured model. The error names the model that cannot be loaded.
pub(crate) async fn load_models(settings: &Settings, keep: Keep) -> anyhow::Result<Models> {
    let engine = engine(settings);
    let hub = hub()?;
    let embedders = configured_embedders(settings, &engine, &hub, keep).await?;
    let reranker = load_reranker(&engine, &hub, settings.cross_encoder.as_ref()).await?;
    Ok(Models::new(embedders, reranker))
}

/// The same for a command on a store of its own: the built-in default model if none is configured.
pub(crate) async fn load_models_or_default(settings: &Settings, keep: Keep) -> anyhow::Result<Models> {
    let (engine, hub) = (engine(settings), hub()?);
    let embedders = match settings.embeddings {
        EmbeddingsChoice::Unset => vec![open_default(&engine, &hub).await?],
        _ => configured_embedders(settings, &engine, &hub, keep).await?,
    };
    let reranker = match &settings.cross_encoder {
        Some(choice) => load_reranker(&engine, &hub, Some(choice)).await?,
        None => None,
    };
    Ok(Models::new(embedders, reranker))
}

/// Opens the built-in default model, and downloads it if need be.
pub(crate) async fn open_default(engine: &Engine, hub: &Hub) -> anyhow::Result<Arc<dyn Embedder>> {
    let entry = LocalEntry {
        id: DEFAULT_MODEL_ID.to_owned(),
        path: default_model::ID.to_owned(),
        version: None,
        normalize: None,
        quantize: None,
    };
    open_local(engine, hub, &entry).await
}

/// Loads the embedding models only.
pub(crate) async fn load_embedding_models(settings: &Settings, keep: Keep) -> anyhow::Result<Models> {
    let embedders = configured_embedders(settings, &engine(settings), &hub()?, keep).await?;
    Ok(Models::new(embedders, None))
}

async fn configured_embedders(
    settings: &Settings,
    engine: &Engine,
    hub: &Hub,
    keep: Keep,
) -> anyhow::Result<Vec<Arc<dyn Embedder>>> {
    match &settings.embeddings {
        EmbeddingsChoice::None => Ok(Vec::new()),
        EmbeddingsChoice::Unset => Err(no_models("no embedding models are configured").into()),
        EmbeddingsChoice::File(path) => {
            let config = EmbeddingsConfig::from_file(path).map_err(|error| match error {
                ragstone_models::config::ModelConfigError::Empty => {
                    no_models(&format!("{} lists no embedding models", path.display()))
                }
                other @ ragstone_models::config::ModelConfigError::Unreadable { .. } => {
                    ConfigError(format!("The embeddings configuration {other}"))
                }
                other => ConfigError(format!("In {}: {other}", path.display())),
            })?;
            load_embedders(engine, hub, &config, &settings.providers, keep).await
        }
    }
}

async fn load_embedders(
    engine: &Engine,
    hub: &Hub,
    config: &EmbeddingsConfig,
    providers: &Providers,
    keep: Keep,
) -> anyhow::Result<Vec<Arc<dyn Embedder>>> {
    let mut embedders: Vec<Arc<dyn Embedder>> = Vec::with_capacity(config.embeddings.len());
    for entry in &config.embeddings {
        embedders.push(match entry {
            ModelEntry::Local(local) => open_local(engine, hub, local).await?,
            ModelEntry::Remote(remote) => open_remote(remote, providers, keep.clone())?,
        });
    }
    Ok(embedders)
}

/// A model behind an entry of `providers`.
fn open_remote(
    entry: &RemoteEntry,
    providers: &Providers,
    keep: Keep,
) -> Result<Arc<dyn Embedder>, ConfigError> {
    let RemoteEntry {
        id,
        provider,
        model,
        dimensions,
        version,
        ..
    } = entry;
    let wrong = |error: String| ConfigError(format!("embedding model '{id}': {error}"));
    let embedder = match providers.get(provider) {
        Some(service) if service.provider_type == CONTRACT_TYPE => {
            open_contract(entry, service, keep).map_err(wrong)?
        }
        _ => embedding::from_entry(
            id,
            provider,
            model,
            Some(*dimensions),
            version.as_deref(),
            providers,
            &config::process_env,
        )
        .map_err(|error| wrong(error.to_string()))?,
    };
    tracing::info!(model = %id, %provider, name = %model, dimensions, "embedding model behind a provider");
    Ok(embedder)
}

/// A model of an external service that speaks the embedding contract.
fn open_contract(
    entry: &RemoteEntry,
    service: &ProviderEntry,
    keep: Keep,
) -> Result<Arc<dyn Embedder>, String> {
    let client = ContractClient::from_entry(&entry.provider, service, &config::process_env)
        .map_err(|error| error.to_string())?;
    let settings = contract_settings(entry).ok_or(
        "'version' is required for a model of an embedding service: the version in the service's answers",
    )?;
    Ok(match keep {
        Some(records) => Arc::new(ContractEmbedder::new(client, Ledger::new(records), settings)),
        None => Arc::new(WithoutStore(settings.info)),
    })
}

/// `None` where the entry lacks a version.
pub(crate) fn contract_settings(entry: &RemoteEntry) -> Option<ContractSettings> {
    Some(ContractSettings {
        knowledgebase_id: entry
            .knowledgebase_id
            .clone()
            .unwrap_or_else(|| "ragstone".to_owned()),
        info: ModelInfo {
            identity: ModelIdentity {
                id: entry.id.clone(),
                version: entry.version.clone()?,
                dimensions: entry.dimensions,
            },
            name: entry.model.clone(),
            max_tokens: None,
        },
    })
}

/// A model of an embedding service without storage for its vectors. It has a description and cannot embed.
struct WithoutStore(ModelInfo);

#[async_trait]
impl Embedder for WithoutStore {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    async fn embed(&self, _: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        Err(ModelError::Failed(
            "a model of an embedding service requires a store".into(),
        ))
    }
}

/// Loads a model into this process.
pub(crate) async fn open_local(
    engine: &Engine,
    hub: &Hub,
    entry: &LocalEntry,
) -> anyhow::Result<Arc<dyn Embedder>> {
    let embedder = open_embedder(engine, hub, entry, &crate::progress::downloads())
        .await
        .map_err(|error| {
            let path = match &entry.path {
                path if *path == entry.id => String::new(),
                path => format!(" ({path})"),
            };
            not_loaded(error, format!("embedding model '{}'{path}", entry.id))
        })?;
    let dimensions = embedder.info().identity.dimensions;
    tracing::info!(model = %entry.id, path = %entry.path, dimensions, "embedding model loaded");
    Ok(Arc::new(embedder))
}

pub(crate) async fn load_reranker(
    engine: &Engine,
    hub: &Hub,
    choice: Option<&CrossEncoderChoice>,
) -> anyhow::Result<Option<Arc<dyn Reranker>>> {
    let source = match choice {
        None => {
            tracing::info!("cross-encoder disabled: /rerank answers 503");
            tracing::info!(
                "enable it with, for example: ragstone serve --cross-encoder BAAI/bge-reranker-base"
            );
            tracing::info!("see --list-reranker-models for more");
            return Ok(None);
        }
        Some(CrossEncoderChoice::Directory(path)) => ModelSource::Directory(path.clone()),
        Some(CrossEncoderChoice::Hub(name)) => ModelSource::parse(name),
    };
    let reranker = open_cross_encoder(engine, hub, &source, &crate::progress::downloads())
        .await
        .map_err(|error| not_loaded(error, format!("cross-encoder {source}")))?;
    tracing::info!(model = %source, "cross-encoder loaded");
    Ok(Some(Arc::new(reranker)))
}

/// A missing directory is an error of the configuration; any other failure to load a model is not.
fn not_loaded(error: LoadError, model: String) -> anyhow::Error {
    if error.is_no_directory() {
        return ConfigError(format!("{model} cannot be loaded: {error}")).into();
    }
    anyhow::Error::new(error).context(format!("{model} cannot be loaded"))
}

/// The error without embedding models, for a store whose collections may name the built-in default model.
async fn models_of_collections(settings: &Settings, store: &OpenStore) -> anyhow::Error {
    let collections = match store.store().collections().await {
        Ok(collections) => collections,
        Err(error) => return error.into(),
    };
    let of_default: Vec<String> = collections
        .iter()
        .filter(|collection| collection.embedding_model() == Some(DEFAULT_MODEL_ID))
        .map(|collection| format!("'{}'", collection.name))
        .collect();
    if of_default.is_empty() {
        return no_models("no embedding models are configured").into();
    }
    let location = match &settings.store {
        StoreLocation::Embedded(directory) => format!("--data-dir {}", directory.display()),
        other => format!("--store '{other}'"),
    };
    ConfigError(format!(
        "no embedding models are configured, but collection {} in {} uses the built-in default model. \
         Start the server with it:\n\n  \
         printf 'embeddings:\\n  - {{id: {DEFAULT_MODEL_ID}, path: {}}}\\n' > embeddings.yml\n  \
         ragstone serve {location} --embeddings-config embeddings.yml",
        of_default.join(", "),
        settings.store,
        default_model::ID,
    ))
    .into()
}

/// The error without embedding models, with an example of the missing file.
fn no_models(problem: &str) -> ConfigError {
    ConfigError(format!(
        "{problem}. Write a file like this one and pass it with --embeddings-config or EMBEDDINGS_CONFIG:\n\n{EXAMPLE_CONFIG}\n\
         Or pass --no-embeddings if documents and queries bring their own vectors, \
         or run `ragstone quickstart`, which needs no configuration."
    ))
}
