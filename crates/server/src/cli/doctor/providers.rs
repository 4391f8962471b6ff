//! What is reached over the network: providers of embeddings and chat, and RAG services.

use std::collections::BTreeMap;
use std::sync::Arc;

use ragstone_core::chat::{ChatRequest, Message};
use ragstone_core::model::Role;
use ragstone_core::provider::HealthStatus;
use ragstone_models::config::EmbeddingsConfig;
use ragstone_providers::embedding::{Resolution, from_config, resolve};
use ragstone_providers::http::AddressRule;
use ragstone_providers::rag::{ConnectContext, Registry};
use ragstone_providers::{ConfigError, chat};
use ragstone_rag::memory::Kind;
use ragstone_store::InspectedCollection;

use super::{Check, Reach};
use crate::agent::{IN_PROCESS, is_in_process};
use crate::config::{self, EmbeddingsChoice, Settings};

const EMBEDDING: &str = "Embedding / RAG";
const CHAT: &str = "Chat";

pub(super) fn embedding(settings: &Settings, stored: &[InspectedCollection]) -> Check {
    let config = &settings.embedding;
    if is_in_process(config) {
        return in_process(settings);
    }
    let resolution = resolve(config, &settings.providers);
    let backend = match &resolution {
        Resolution::Disabled if config.provider.is_empty() => {
            return Check::skip(
                EMBEDDING,
                "not configured; to embed agent memory set embedding.providerID or embedding.provider",
            );
        }
        Resolution::Disabled => {
            let message = format!(
                "embedding.provider is '{}', which turns embedding off: set it to 'local' or '{IN_PROCESS}', or set embedding.providerID",
                config.provider
            );
            return Check::warn(EMBEDDING, message);
        }
        Resolution::UnknownProvider => {
            let message = format!(
                "embedding.providerID is '{}', which is not among providers ({}): add it there or correct it",
                config.provider_id,
                known(settings)
            );
            return Check::fail(EMBEDDING, message);
        }
        Resolution::NotOffered { provider_type } => {
            let message = format!(
                "provider '{}' is of type '{provider_type}', which offers no embeddings: use one of type openai, gemini or ollama",
                config.provider_id
            );
            return Check::fail(EMBEDDING, message);
        }
        Resolution::Found { backend, .. } => *backend,
    };
    let embedder = match from_config(config, &settings.providers, &config::process_env) {
        Ok(Some(embedder)) => embedder,
        Ok(None) => return Check::skip(EMBEDDING, "not configured"),
        Err(error) => return Check::fail(EMBEDDING, mend(&error)),
    };
    let info = embedder.info();
    let width = info.identity.dimensions;
    let facts = format!(
        "{} with model {}, {width} dimensions",
        backend.as_str(),
        info.name
    );
    if config.dimensions.is_none() {
        return Check::warn(
            EMBEDDING,
            format!(
                "embedding.dimensions is not set, so {width} is assumed ({facts}): set it to what the model makes"
            ),
        );
    }
    let is_memory = |name: &str| Kind::ALL.into_iter().any(|kind| kind.vectors().as_str() == name);
    let other = stored
        .iter()
        .filter(|collection| is_memory(&collection.name))
        .find_map(|collection| collection.dimensions.filter(|stored| *stored != width));
    match other {
        Some(stored) => Check::warn(
            EMBEDDING,
            format!(
                "{facts}, but stored vectors have {stored}: the next start embeds all of memory again; set embedding.dimensions back if that is not meant"
            ),
        ),
        None => Check::pass(EMBEDDING, facts),
    }
}

fn in_process(settings: &Settings) -> Check {
    let wanted = &settings.embedding.model;
    let EmbeddingsChoice::File(path) = &settings.embeddings else {
        return Check::fail(
            EMBEDDING,
            "embedding.provider is 'in-process', and no models are configured: name them with --embeddings-config",
        );
    };
    match EmbeddingsConfig::from_file(path) {
        Err(error) => Check::fail(
            EMBEDDING,
            format!("{}: {error}: correct this file", path.display()),
        ),
        Ok(config) if wanted.is_empty() || config.embeddings.iter().any(|entry| entry.id() == wanted) => {
            let model = config
                .embeddings
                .first()
                .map(ragstone_models::config::ModelEntry::id)
                .filter(|_| wanted.is_empty());
            Check::pass(
                EMBEDDING,
                format!("the model '{}' of this process", model.unwrap_or(wanted)),
            )
        }
        Ok(config) => {
            let ids: Vec<&str> = config
                .embeddings
                .iter()
                .map(ragstone_models::config::ModelEntry::id)
                .collect();
            let message = format!(
                "embedding.model is '{wanted}', and the models are {}: use one of these",
                ids.join(", ")
            );
            Check::fail(EMBEDDING, message)
        }
    }
}

pub(super) fn chat(settings: &Settings) -> Check {
    let Some(config) = &settings.chat else {
        return Check::skip(CHAT, "not configured; to chat set chat.providerID and chat.model");
    };
    match chat::from_config(config, &settings.providers, &config::process_env) {
        Ok(model) => Check::pass(
            CHAT,
            format!("{} through provider '{}'", model.model(), config.provider_id),
        ),
        Err(error) => Check::fail(CHAT, mend(&error)),
    }
}

/// Keys that cannot be looked up. What nothing uses is no failure.
pub(super) fn keys(settings: &Settings) -> Vec<Check> {
    settings
        .providers
        .iter()
        .filter_map(|(id, entry)| {
            let key = entry.api_key.as_ref()?;
            let error = key
                .resolve(&format!("providers.{id}.apiKey"), &config::process_env)
                .err()?;
            Some(Check::warn(format!("Provider {id}"), mend(&error)))
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
            embedders: Arc::new(BTreeMap::new()),
            addresses: AddressRule::Configured,
            environment: &config::process_env,
        };
        let backend = registry.connect(service, context);
        async move {
            let title = format!("Service {name}");
            let backend = match backend {
                Ok(backend) => backend,
                Err(error) => return Check::fail(title, mend(&error.under(&format!("services.{name}")))),
            };
            if reach == Reach::Offline {
                return Check::pass(title, "configured; whether it answers is checked with --online");
            }
            let health = backend.health().await;
            match health.status {
                HealthStatus::Healthy => {
                    Check::pass(title, format!("answers in {:.0} ms", health.latency_ms))
                }
                HealthStatus::Degraded => Check::warn(title, format!("{}: look at its log", health.message)),
                HealthStatus::Unhealthy => Check::fail(
                    title,
                    format!("{}: start it, or correct its url or auth", health.message),
                ),
            }
        }
    });
    futures::future::join_all(checks).await
}

/// Asks the providers in use for the least they can do.
pub(super) async fn online(settings: &Settings, reach: Reach) -> Vec<Check> {
    const NAMES: [&str; 2] = ["Embedding provider", "Chat provider"];
    if reach == Reach::Offline {
        return NAMES
            .map(|name| Check::skip(name, "not asked; use --online"))
            .into();
    }
    let (embedding, chat) = futures::join!(ask_embedder(settings), ask_chat(settings));
    NAMES
        .into_iter()
        .zip([embedding, chat])
        .map(|(name, outcome)| match outcome {
            None => Check::skip(name, "not configured, or not usable as configured"),
            Some(Ok(message)) => Check::pass(name, message),
            Some(Err(error)) => Check::fail(name, format!("{error}: check its address, key and model")),
        })
        .collect()
}

async fn ask_embedder(settings: &Settings) -> Option<Result<String, String>> {
    let embedder = from_config(&settings.embedding, &settings.providers, &config::process_env).ok()??;
    let asked = embedder.embed(vec!["ping".to_owned().into()], Role::Query).await;
    Some(match asked {
        Ok(_) => Ok(format!(
            "answers with {} dimensions",
            embedder.info().identity.dimensions
        )),
        Err(error) => Err(error.to_string()),
    })
}

async fn ask_chat(settings: &Settings) -> Option<Result<String, String>> {
    let model = chat::from_config(settings.chat.as_ref()?, &settings.providers, &config::process_env).ok()?;
    let request = ChatRequest::new(vec![Message::new("user", "Say ok.")]);
    Some(match model.complete(request).await {
        Ok(_) => Ok(format!("{} answers", model.model())),
        Err(error) => Err(error.to_string()),
    })
}

fn known(settings: &Settings) -> String {
    let ids: Vec<&str> = settings.providers.keys().map(String::as_str).collect();
    if ids.is_empty() {
        "none are configured".to_owned()
    } else {
        ids.join(", ")
    }
}

fn mend(error: &ConfigError) -> String {
    let hint = match error {
        ConfigError::MissingKey { provider } => {
            format!("set providers.{provider}.apiKey, for example to ${{ENV_NAME}}")
        }
        ConfigError::MissingVariable { variable, .. } => {
            format!("set {variable} in the environment of the server")
        }
        ConfigError::Unknown { .. } | ConfigError::NotOffered { .. } => "use one that is known".to_owned(),
        ConfigError::Field { .. } | ConfigError::Client(_) | ConfigError::Several(_) => {
            "correct the configuration file".to_owned()
        }
    };
    format!("{error}: {hint}")
}
