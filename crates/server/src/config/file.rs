//! The configuration file.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use ragstone_providers::config::{ChatConfig, EmbeddingConfig, Providers, ServiceConfig};
use serde::Deserialize;

use super::ConfigError;

/// Every key is optional, in camelCase or snake_case. The type has no `Debug`, because it may contain API
/// keys and the password of the store.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileConfig {
    pub server: Option<ServerSection>,
    /// Named credentials.
    #[serde(default)]
    pub providers: Providers,
    /// Embedding of agent memory.
    #[serde(default)]
    pub embedding: EmbeddingConfig,
    /// The chat provider.
    pub chat: Option<ChatConfig>,
    /// The gateway's backends, by name.
    #[serde(default)]
    pub services: BTreeMap<String, ServiceConfig>,
    pub conversations: Option<ConversationsSection>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConversationsSection {
    /// Lifetime of a conversation after its last message.
    #[serde(alias = "ttl_seconds")]
    pub ttl_seconds: Option<u64>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ServerSection {
    pub host: Option<String>,
    pub port: Option<u16>,
    #[serde(alias = "data_dir")]
    pub data_dir: Option<PathBuf>,
    pub store: Option<String>,
    /// Each may be `${NAME}`, for an environment variable.
    #[serde(alias = "api_keys")]
    pub api_keys: Option<Vec<String>>,
    #[serde(alias = "allow_no_key")]
    pub allow_no_key: Option<bool>,
    #[serde(alias = "embeddings_config")]
    pub embeddings_config: Option<PathBuf>,
    #[serde(alias = "cross_encoder")]
    pub cross_encoder: Option<String>,
    #[serde(alias = "cross_encoder_path")]
    pub cross_encoder_path: Option<PathBuf>,
    pub threads: Option<NonZeroUsize>,
    pub limits: Option<LimitsSection>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LimitsSection {
    #[serde(alias = "body_bytes")]
    pub body_bytes: Option<usize>,
    #[serde(alias = "add_bytes")]
    pub add_bytes: Option<usize>,
    #[serde(alias = "add_documents")]
    pub add_documents: Option<usize>,
    #[serde(alias = "rerank_documents")]
    pub rerank_documents: Option<usize>,
    #[serde(alias = "top_k")]
    pub top_k: Option<usize>,
    /// Jobs are refused while this many are unfinished.
    #[serde(alias = "open_jobs")]
    pub open_jobs: Option<usize>,
    /// Large requests are refused if more tokens than this would wait for the models.
    #[serde(alias = "model_queue_tokens")]
    pub model_queue_tokens: Option<usize>,
    #[serde(alias = "body_seconds")]
    pub body_seconds: Option<u64>,
    #[serde(alias = "request_seconds")]
    pub request_seconds: Option<u64>,
    #[serde(alias = "header_seconds")]
    pub header_seconds: Option<u64>,
    /// A client that reads nothing for this long is disconnected.
    #[serde(alias = "write_seconds")]
    pub write_seconds: Option<u64>,
    #[serde(alias = "shutdown_seconds")]
    pub shutdown_seconds: Option<u64>,
}

impl FileConfig {
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            ConfigError(format!(
                "The configuration file {} cannot be read: {error}",
                path.display()
            ))
        })?;
        Self::from_yaml(&text).map_err(|error| ConfigError(format!("In {}: {error}", path.display())))
    }

    pub fn from_yaml(text: &str) -> Result<Self, ConfigError> {
        let blank = text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'));
        if blank {
            return Ok(Self::default());
        }
        let mut place = None;
        let parsed = serde_saphyr::with_deserializer_from_str(text, |deserializer| {
            serde_path_to_error::deserialize(deserializer).map_err(|error| {
                place = Some(error.path().to_string());
                error.into_inner()
            })
        });
        parsed.map_err(|error| {
            let message = error.to_string();
            let message = message.lines().next().unwrap_or("not valid YAML");
            let message = plain(message.trim_start_matches("error: "));
            ConfigError(match place.filter(|place| place != ".") {
                Some(place) => format!("'{place}': {message}"),
                None => message.to_owned(),
            })
        })
    }
}

/// Replaces type names of the program by the values that are allowed.
fn plain(message: &str) -> String {
    // YAML reads a bare `null` or `~` as no value.
    if let Some((before, after)) = message.split_once("cannot deserialize null into string") {
        let rest = after.trim_start_matches("; use Option<String>");
        return format!("{before}null is not a string: put it in quotes if a string is meant{rest}");
    }
    for (kind, expected) in [
        ("invalid u16", "a whole number from 0 to 65535 is expected"),
        ("invalid usize", "a whole number, zero or more, is expected"),
        ("invalid u64", "a whole number, zero or more, is expected"),
        ("invalid boolean", "true or false is expected"),
    ] {
        if message.contains(kind) {
            return message.replace(kind, expected);
        }
    }
    message.to_owned()
}

/// Replaces a value of the form `${NAME}` by the environment variable of that name.
pub(super) fn interpolate(value: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<String, ConfigError> {
    match value.strip_prefix("${").and_then(|rest| rest.strip_suffix('}')) {
        Some(name) => env(name).ok_or_else(|| {
            ConfigError(format!(
                "The environment variable {name} is not set, and the configuration refers to it"
            ))
        }),
        None => Ok(value.to_owned()),
    }
}
