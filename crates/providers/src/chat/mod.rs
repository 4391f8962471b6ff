//! Chat models behind an API.
//!
//! All of them take an OpenAI chat request and answer in the same format. A service with that protocol
//! gets the caller's body unchanged. For the others, request and answer are translated, and the error
//! for a request that cannot be translated names the field.

mod answer;
mod anthropic;
mod gemini;
mod openai;
mod sse;
mod tools;
mod translate;
mod turns;

use std::sync::Arc;

use ragstone_core::chat::ChatModel;
use secrecy::SecretString;

use crate::config::{ChatConfig, Environment, Providers};
use crate::embedding::{known_ids, resolve_key};
use crate::error::ConfigError;
use crate::http::{Auth, Call, ClientSettings, Policy, Repeat, ServiceClient};
use crate::model_name::in_google_path;

/// A kind of chat API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatBackend {
    OpenAi,
    Anthropic,
    Gemini,
    /// Through its OpenAI-compatible endpoint.
    Ollama,
}

impl ChatBackend {
    /// The backend of a provider's type.
    pub fn of_provider_type(provider_type: &str) -> Result<Self, ConfigError> {
        match provider_type {
            "openai" => Ok(Self::OpenAi),
            "anthropic" => Ok(Self::Anthropic),
            "gemini" | "google" => Ok(Self::Gemini),
            "ollama" => Ok(Self::Ollama),
            unknown => Err(ConfigError::Unknown {
                kind: "provider type",
                given: unknown.to_owned(),
                known: "openai, anthropic, gemini, ollama".to_owned(),
            }),
        }
    }

    fn default_base_url(self) -> &'static str {
        match self {
            Self::OpenAi => "https://api.openai.com/v1",
            Self::Anthropic => "https://api.anthropic.com/v1",
            Self::Gemini => "https://generativelanguage.googleapis.com/v1beta",
            Self::Ollama => "http://localhost:11434/v1",
        }
    }
}

/// The delivery of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Delivery {
    Whole,
    Streamed,
}

/// The settings of a chat model behind an API.
#[derive(Debug, Clone)]
pub struct ChatSettings {
    /// Its entry of `providers`, for errors and logs.
    pub provider: String,
    pub backend: ChatBackend,
    pub api_key: Option<SecretString>,
    pub base_url: Option<String>,
    pub model: String,
    pub policy: Policy,
}

/// The chat model that a `chat` section names.
pub fn from_config(
    config: &ChatConfig,
    providers: &Providers,
    env: Environment,
) -> Result<Arc<dyn ChatModel>, ConfigError> {
    let entry = providers
        .get(&config.provider_id)
        .ok_or_else(|| ConfigError::Unknown {
            kind: "provider id",
            given: config.provider_id.clone(),
            known: known_ids(providers),
        })?;
    create(ChatSettings {
        provider: config.provider_id.clone(),
        backend: ChatBackend::of_provider_type(&entry.provider_type)?,
        api_key: resolve_key(entry.api_key.as_ref(), &config.provider_id, env)?,
        base_url: entry.base_url.clone(),
        model: config.model.clone(),
        // Long answers take minutes.
        policy: Policy {
            deadline: std::time::Duration::from_secs(120),
            ..Policy::default()
        },
    })
}

pub fn create(settings: ChatSettings) -> Result<Arc<dyn ChatModel>, ConfigError> {
    let backend = settings.backend;
    let own_address = settings.base_url.filter(|url| !url.is_empty());
    let needs_key = match backend {
        ChatBackend::OpenAi => own_address.is_none(),
        ChatBackend::Anthropic | ChatBackend::Gemini => true,
        ChatBackend::Ollama => false,
    };
    if needs_key && settings.api_key.is_none() {
        return Err(ConfigError::MissingKey {
            provider: settings.provider,
        });
    }
    let field = format!("providers.{}.baseUrl", settings.provider);
    let base_url = own_address.as_deref().unwrap_or(backend.default_base_url());
    let mut client = ClientSettings::new(settings.provider, base_url, &field)?;
    client.policy = settings.policy;
    client.auth = match (settings.api_key, backend) {
        (None, _) => Auth::None,
        (Some(key), ChatBackend::Anthropic) => header_auth("x-api-key", key),
        (Some(key), ChatBackend::Gemini) => header_auth("x-goog-api-key", key),
        (Some(key), ChatBackend::OpenAi | ChatBackend::Ollama) => Auth::Bearer(key),
    };
    let client = ServiceClient::new(client)?;
    let model = settings.model;
    if model.trim().is_empty() {
        return Err(ConfigError::field("model", "must name the model that answers"));
    }
    if backend == ChatBackend::Gemini {
        in_google_path(&model).map_err(|expected| ConfigError::field("model", expected))?;
    }
    Ok(match backend {
        ChatBackend::OpenAi | ChatBackend::Ollama => Arc::new(openai::OpenAiChat { client, model }),
        ChatBackend::Anthropic => Arc::new(anthropic::AnthropicChat { client, model }),
        ChatBackend::Gemini => Arc::new(gemini::GeminiChat { client, model }),
    })
}

/// Answers cost money and differ each time, so a chat is retried only if the service cannot have
/// processed it.
fn paid(path: impl Into<String>) -> Call {
    Call::post(path).repeat(Repeat::IfUnprocessed)
}

fn header_auth(name: &str, key: SecretString) -> Auth {
    Auth::Header {
        name: name.to_owned(),
        key,
    }
}
