//! Checks of providers of embeddings and chat, and of RAG services.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use ragstone_core::backend::HealthStatus;
use ragstone_core::chat::{ChatRequest, Message};
use ragstone_core::model::{Embedder, ModelError, Role};
use ragstone_ingest::ledger::probe;
use ragstone_memory::{MODEL_VERSION, MemoryKind};
use ragstone_models::config::{EmbeddingsConfig, ModelEntry, RemoteEntry};
use ragstone_providers::chat::ChatBackend;
use ragstone_providers::config::Secret;
use ragstone_providers::embedding::{CONTRACT_TYPE, Resolution, from_config, resolve};
use ragstone_providers::http::AddressRule;
use ragstone_providers::registry::{ConnectContext, Registry};
use ragstone_providers::{ConfigError, chat};
use ragstone_search::QueryVectors;
use ragstone_search::gateway::{self, LOCAL, check_service_name};
use ragstone_store::InspectedCollection;

use super::{Check, Reach, models};
use crate::agent::{IN_PROCESS, check_rag, is_in_process};
use crate::config::{self, EmbeddingsChoice, Settings};

const EMBEDDING: &str = "Embedding / RAG";
const CHAT: &str = "Chat";
/// Time for a provider or service to answer.
const ONLINE_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) fn embedding(settings: &Settings, stored: &[InspectedCollection]) -> Check {
    let config = &settings.embedding;
    if let Err(error) = check_rag(&config.rag) {
        return Check::fail(EMBEDDING, format!("{error}: correct the configuration file"));
    }
    if is_in_process(config) {
        return in_process(settings, stored);
    }
    let resolution = resolve(config, &settings.providers);
    let backend = match &resolution {
        Resolution::Disabled if config.provider.is_empty() => {
            return Check::skip(
                EMBEDDING,
                "not configured; set embedding.providerID or embedding.provider to embed agent memory",
            );
        }
        Resolution::Disabled => {
            let message = format!(
                "embedding.provider is '{}', which is unknown and disables embedding: set it to 'local' or '{IN_PROCESS}', or set embedding.providerID",
                config.provider
            );
            return Check::warn(EMBEDDING, message);
        }
        Resolution::UnknownProvider => {
            let message = format!(
                "embedding.providerID is '{}', which is not one of providers ({}): add it there or correct it",
                config.provider_id,
                known(settings)
            );
            return Check::fail(EMBEDDING, message);
        }
        Resolution::NotOffered { provider_type } => {
            let message = format!(
                "provider '{}' is of type '{provider_type}', which has no embeddings: use one of type openai, gemini, google or ollama",
                config.provider_id
            );
            return Check::fail(EMBEDDING, message);
        }
        Resolution::Found { backend, .. } => *backend,
    };
    let embedder = match from_config(config, &settings.providers, &config::process_env) {
        Ok(Some(embedder)) => embedder,
        Ok(None) => return Check::skip(EMBEDDING, "not configured"),
        Err(error) => return Check::fail(EMBEDDING, with_fix(&error)),
    };
    let info = embedder.info();
    let width = info.identity.dimensions;
    let facts = format!(
        "{} with model {}, {width} dimensions",
        backend.as_str(),
        info.name
    );
    let other = other_width(stored, width);
    match (config.dimensions, other) {
        (None, other) => {
            let conflict = other.map_or_else(String::new, |stored| {
                format!(", but stored vectors have {stored}, so the next start embeds all of memory again")
            });
            Check::warn(
                EMBEDDING,
                format!(
                    "embedding.dimensions is not set, so {width} is assumed ({facts}){conflict}: set it to the dimensions of the model"
                ),
            )
        }
        (Some(_), Some(stored)) => embeds_again(&facts, &format!("have {stored}")),
        (Some(_), None) => match other_model(stored, &info.identity.version) {
            Some(other) => embeds_again(&facts, &format!("are of {other}")),
            None => Check::pass(EMBEDDING, facts),
        },
    }
}

fn of_memory(stored: &[InspectedCollection]) -> impl Iterator<Item = &InspectedCollection> {
    let is_memory = |name: &str| {
        MemoryKind::ALL
            .into_iter()
            .any(|kind| kind.vectors().as_str() == name)
    };
    stored
        .iter()
        .filter(move |collection| is_memory(&collection.name))
}

/// The dimensions of stored memory, if they differ.
fn other_width(stored: &[InspectedCollection], width: usize) -> Option<usize> {
    of_memory(stored).find_map(|collection| collection.dimensions.filter(|stored| *stored != width))
}

/// The version of the model that made the vectors of memory, if it differs.
fn other_model<'a>(stored: &'a [InspectedCollection], version: &str) -> Option<&'a str> {
    of_memory(stored)
        .filter(|collection| collection.dimensions.is_some())
        .filter_map(|collection| collection.metadata.get(MODEL_VERSION)?.as_str())
        .find(|stored| *stored != version)
}

fn embeds_again(facts: &str, stored: &str) -> Check {
    Check::warn(
        EMBEDDING,
        format!(
            "{facts}, but stored vectors {stored}: the next start embeds all of memory again; set model and dimensions back if this is not intended"
        ),
    )
}

fn in_process(settings: &Settings, stored: &[InspectedCollection]) -> Check {
    let config = &settings.embedding;
    let wanted = &config.model;
    let EmbeddingsChoice::File(path) = &settings.embeddings else {
        return Check::fail(
            EMBEDDING,
            "embedding.provider is 'in-process', but no models are configured: pass --embeddings-config",
        );
    };
    let models = match EmbeddingsConfig::from_file(path) {
        Ok(models) => models.embeddings,
        Err(error) => {
            let message = format!("{}: {error}: correct this file", path.display());
            return Check::fail(EMBEDDING, message);
        }
    };
    let Some(entry) = models
        .iter()
        .find(|entry| wanted.is_empty() || entry.id() == wanted)
    else {
        let ids: Vec<&str> = models.iter().map(ModelEntry::id).collect();
        let message = format!(
            "embedding.model is '{wanted}', which is not configured: use one of {}",
            ids.join(", ")
        );
        return Check::fail(EMBEDDING, message);
    };
    let facts = format!("the model '{}' of this process", entry.id());
    let width = models::width(entry);
    match (width, config.dimensions) {
        (Some(width), Some(wanted)) if wanted != width => Check::fail(
            EMBEDDING,
            format!(
                "embedding.dimensions is {wanted}, but {facts} has {width}: leave it out or set it to {width}"
            ),
        ),
        _ => match width.and_then(|width| other_width(stored, width)) {
            Some(stored) => embeds_again(&facts, &format!("have {stored}")),
            None => Check::pass(EMBEDDING, facts),
        },
    }
}

pub(super) fn chat(settings: &Settings) -> Check {
    let Some(config) = &settings.chat else {
        return Check::skip(CHAT, "not configured; to chat set chat.providerID and chat.model");
    };
    match chat::from_config(config, &settings.providers, &config::process_env) {
        Ok(model) => {
            let unused = if memory_is_unused(settings) {
                "; chats get no context from agent memory: set embedding.rag.enabled to true to add it"
            } else {
                ""
            };
            Check::pass(
                CHAT,
                format!(
                    "{} through provider '{}'{unused}",
                    model.model(),
                    config.provider_id
                ),
            )
        }
        Err(error) => Check::fail(CHAT, with_fix(&error)),
    }
}

fn memory_is_unused(settings: &Settings) -> bool {
    let embedding = &settings.embedding;
    let embeds = is_in_process(embedding)
        || matches!(resolve(embedding, &settings.providers), Resolution::Found { .. });
    embeds && !embedding.rag.enabled
}

/// Warns of unknown types and keys that cannot be looked up. Entries in use fail their own check.
pub(super) fn entries(settings: &Settings) -> Vec<Check> {
    settings
        .providers
        .iter()
        .filter_map(|(id, entry)| {
            let field = format!("providers.{id}.apiKey");
            let resolve = |key: &Secret| key.resolve(&field, &config::process_env).err();
            let unknown = ChatBackend::of_provider_type(&entry.provider_type)
                .err()
                .filter(|_| entry.provider_type != CONTRACT_TYPE);
            let error = unknown.or_else(|| entry.api_key.as_ref().and_then(resolve))?;
            Some(Check::warn(format!("Provider {id}"), with_fix(&error)))
        })
        .collect()
}

pub(super) async fn services(settings: &Settings, reach: Reach) -> Vec<Check> {
    if settings.services.is_empty() {
        return vec![Check::skip("Services", "none are configured")];
    }
    let registry = Registry::built_in();
    let checks = settings.services.iter().map(|(name, service)| {
        let context = ConnectContext {
            service: name,
            addresses: AddressRule::Configured,
            environment: &config::process_env,
        };
        let connected = registry.connect(service, context);
        async move {
            let title = format!("Service {name}");
            if let Err(error) = check_service_name(name) {
                return Check::fail(title, with_fix(&error));
            }
            if service.provider == LOCAL {
                return Check::pass(title, "the collections of this server");
            }
            let backend = match connected {
                Ok(connected) => gateway::backend(connected, &Arc::default(), &QueryVectors::default()),
                Err(error) => return Check::fail(title, with_fix(&error.under(&format!("services.{name}")))),
            };
            if reach == Reach::Offline {
                return Check::pass(title, "configured; use --online to check that it answers");
            }
            let Ok(health) = tokio::time::timeout(ONLINE_TIMEOUT, backend.health()).await else {
                return Check::fail(title, format!("{}: start it, or correct its url", late()));
            };
            match health.status {
                HealthStatus::Healthy => {
                    Check::pass(title, format!("answers in {:.0} ms", health.latency_ms))
                }
                HealthStatus::Degraded => Check::warn(title, format!("{}: see its log", health.message)),
                HealthStatus::Unhealthy => Check::fail(
                    title,
                    format!("{}: start it, or correct its url or auth", health.message),
                ),
            }
        }
    });
    futures::future::join_all(checks).await
}

/// Sends a minimal request to every provider in use.
pub(super) async fn online(settings: &Settings, reach: Reach) -> Vec<Check> {
    const NAMES: [&str; 2] = ["Embedding provider", "Chat provider"];
    if reach == Reach::Offline {
        return NAMES
            .map(|name| Check::skip(name, "not checked; use --online"))
            .into();
    }
    let (embedding, chat, models) = futures::join!(
        ask_memory_embedder(settings),
        ask_chat(settings),
        ask_models(settings)
    );
    NAMES
        .map(str::to_owned)
        .into_iter()
        .zip([embedding, chat])
        .chain(models.into_iter().map(|(name, asked)| (name, Some(asked))))
        .map(|(name, outcome)| match outcome {
            None => Check::skip(name, "not configured, or not usable as configured"),
            Some(Ok(message)) => Check::pass(name, message),
            Some(Err(error)) => Check::fail(name, format!("{error}: check its address, key and model")),
        })
        .collect()
}

type Asked = Result<String, String>;

async fn ask_memory_embedder(settings: &Settings) -> Option<Asked> {
    let embedder = from_config(&settings.embedding, &settings.providers, &config::process_env).ok()??;
    Some(ask_embedder(embedder.as_ref()).await)
}

/// Checks the models of the embeddings file that providers serve.
async fn ask_models(settings: &Settings) -> Vec<(String, Asked)> {
    let EmbeddingsChoice::File(path) = &settings.embeddings else {
        return Vec::new();
    };
    let entries = EmbeddingsConfig::from_file(path).map_or_else(|_| Vec::new(), |file| file.embeddings);
    let asking = entries.iter().filter_map(|entry| match entry {
        ModelEntry::Remote(remote) => {
            let asking = ask_model(remote, settings)?;
            let name = format!("Provider of model {}", remote.id);
            Some(async move { (name, asking.await) })
        }
        ModelEntry::Local(_) => None,
    });
    futures::future::join_all(asking).await
}

/// `None` if its configuration is invalid, which another check reports.
fn ask_model(entry: &RemoteEntry, settings: &Settings) -> Option<BoxFuture<'static, Asked>> {
    match settings.providers.get(&entry.provider) {
        Some(service) if service.provider_type == CONTRACT_TYPE => {
            let (client, contract) = models::of_embedding_service(entry, service).ok()?;
            let dimensions = entry.dimensions;
            Some(Box::pin(async move {
                answered(probe(client, contract), dimensions).await
            }))
        }
        _ => {
            let embedder = models::remote_embedder(entry, settings).ok()?;
            Some(Box::pin(async move { ask_embedder(embedder.as_ref()).await }))
        }
    }
}

async fn ask_embedder(embedder: &dyn Embedder) -> Asked {
    let asking = embedder.embed(vec!["ping".to_owned().into()], Role::Query);
    answered(asking, embedder.info().identity.dimensions).await
}

async fn answered<T>(asking: impl Future<Output = Result<T, ModelError>>, dimensions: usize) -> Asked {
    match tokio::time::timeout(ONLINE_TIMEOUT, asking).await {
        Ok(Ok(_)) => Ok(format!("answers with {dimensions} dimensions")),
        Ok(Err(ModelError::Remote(failure))) => Err(failure.reason),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(late()),
    }
}

async fn ask_chat(settings: &Settings) -> Option<Asked> {
    let model = chat::from_config(settings.chat.as_ref()?, &settings.providers, &config::process_env).ok()?;
    let request = ChatRequest::new(vec![Message::new("user", "Say ok.")]);
    Some(
        match tokio::time::timeout(ONLINE_TIMEOUT, model.complete(request)).await {
            Ok(Ok(_)) => Ok(format!("{} answers", model.model())),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(late()),
        },
    )
}

fn late() -> String {
    format!("no answer within {} s", ONLINE_TIMEOUT.as_secs())
}

fn known(settings: &Settings) -> String {
    let ids: Vec<&str> = settings.providers.keys().map(String::as_str).collect();
    if ids.is_empty() {
        "none are configured".to_owned()
    } else {
        ids.join(", ")
    }
}

fn with_fix(error: &ConfigError) -> String {
    let hint = match error {
        ConfigError::MissingKey { provider } => {
            format!("set providers.{provider}.apiKey, for example to ${{ENV_NAME}}")
        }
        ConfigError::MissingVariable { variable, .. } => {
            format!("set {variable} in the environment of the server")
        }
        ConfigError::Unknown { .. } | ConfigError::NotOffered { .. } => {
            "use one of the known ones".to_owned()
        }
        ConfigError::Field { .. } | ConfigError::Client(_) | ConfigError::Several(_) => {
            "correct the configuration file".to_owned()
        }
    };
    format!("{error}: {hint}")
}
