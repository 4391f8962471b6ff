//! The sections of the configuration file for providers and services.
//!
//! Keys are `camelCase`, `snake_case` is accepted too, and an unknown key is an error that names it.

mod auth;
mod secret;
mod service;

use std::collections::BTreeMap;

use serde::Deserialize;

pub use auth::AuthConfig;
pub use secret::{Environment, Secret, interpolate, process_environment};
pub(crate) use service::whole_number;
pub use service::{Endpoint, RetryConfig, ServiceConfig, read_connection};

/// The `providers` section: named credentials.
pub type Providers = BTreeMap<String, ProviderEntry>;

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProviderEntry {
    #[serde(rename = "type")]
    pub provider_type: String,
    #[serde(default, alias = "api_key")]
    pub api_key: Option<Secret>,
    #[serde(default, alias = "base_url")]
    pub base_url: Option<String>,
}

/// Omits the URL, which may contain a password. Such a URL is refused only when it is used.
impl std::fmt::Debug for ProviderEntry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProviderEntry")
            .field("provider_type", &self.provider_type)
            .field("api_key", &self.api_key)
            .finish_non_exhaustive()
    }
}

/// The `embedding` section: the embedding of agent memory.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct EmbeddingConfig {
    /// A key of `providers`. Takes precedence over `provider`.
    #[serde(rename = "providerID", alias = "providerId", alias = "provider_id")]
    pub provider_id: String,
    /// `local`, `in-process` for a model of this process, or empty.
    pub provider: String,
    pub model: String,
    pub dimensions: Option<usize>,
    pub local: LocalEmbedding,
    pub rag: RagConfig,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LocalEmbedding {
    #[serde(alias = "base_url")]
    pub base_url: String,
    pub model: String,
}

/// Omits the URL, as for [`ProviderEntry`].
impl std::fmt::Debug for LocalEmbedding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalEmbedding")
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RagConfig {
    pub enabled: bool,
    #[serde(alias = "max_results")]
    pub max_results: usize,
    /// 0 means no limit.
    #[serde(alias = "max_distance")]
    pub max_distance: f32,
    pub collections: Vec<String>,
    /// Maximum number of tokens of context in a chat.
    #[serde(alias = "max_tokens")]
    pub max_tokens: usize,
    /// Maximum time that a chat waits for its context.
    #[serde(alias = "timeout_ms")]
    pub timeout_ms: u64,
}

impl Default for RagConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            max_results: 5,
            max_distance: 0.0,
            collections: ["knowledge", "observation", "reflection", "learning"]
                .map(str::to_owned)
                .into(),
            max_tokens: 2000,
            timeout_ms: 2000,
        }
    }
}

/// The `chat` section: the chat provider.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ChatConfig {
    /// A key of `providers`.
    #[serde(rename = "providerID", alias = "providerId", alias = "provider_id")]
    pub provider_id: String,
    pub model: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct File {
        providers: Providers,
        embedding: EmbeddingConfig,
        chat: ChatConfig,
        services: BTreeMap<String, ServiceConfig>,
    }

    const EXAMPLE: &str = r#"
providers:
  my-openai: {type: openai, apiKey: "${OPENAI_API_KEY}", baseUrl: "http://localhost:1/v1"}
  my-ollama: {type: ollama, base_url: "http://localhost:11434/v1"}
embedding:
  providerID: my-openai
  provider: ""
  model: ""
  dimensions: 768
  local: {baseUrl: "http://localhost:11434/v1", model: ""}
  rag: {enabled: true, maxResults: 7, max_distance: 0.5, collections: [knowledge]}
chat: {provider_id: my-openai, model: gpt-4.1-mini}
services:
  wrapper: {provider: chromadb-wrapper, url: "http://localhost:5007", auth: {type: bearer, token: "${TOKEN}"}, timeoutMs: 30000, retry: {maxAttempts: 3, delayMs: 1000}}
"#;

    #[test]
    fn the_documented_file_is_read() {
        let file: File = serde_saphyr::from_str(EXAMPLE).unwrap();
        assert_eq!(file.providers["my-openai"].provider_type, "openai");
        assert_eq!(
            file.providers["my-ollama"].base_url.as_deref(),
            Some("http://localhost:11434/v1")
        );
        assert_eq!(file.embedding.provider_id, "my-openai");
        assert_eq!(file.embedding.dimensions, Some(768));
        assert_eq!(file.embedding.rag.max_results, 7);
        assert_eq!(file.embedding.rag.max_distance, 0.5);
        assert_eq!(file.chat.provider_id, "my-openai");
        assert_eq!(file.services["wrapper"].provider, "chromadb-wrapper");
        assert_eq!(file.services["wrapper"].connection["timeoutMs"], 30000);
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_it() {
        for (known, misspelt) in [
            ("apiKey:", "apiKye:"),
            ("maxResults:", "maxResult:"),
            ("dimensions:", "dimension:"),
            ("provider_id: my-openai, model", "provider_id: my-openai, modle"),
        ] {
            let key = misspelt.trim_end_matches(':').rsplit(' ').next().unwrap();
            let error = serde_saphyr::from_str::<File>(&EXAMPLE.replace(known, misspelt))
                .unwrap_err()
                .to_string();
            assert!(error.contains(key), "{key}: {error}");
        }
    }

    #[test]
    fn debug_output_shows_no_key() {
        let text = EXAMPLE
            .replace("${OPENAI_API_KEY}", "canary-key-1")
            .replace("${TOKEN}", "canary-key-2");
        let file: File = serde_saphyr::from_str(&text).unwrap();
        assert!(!format!("{file:?}").contains("canary"), "{file:?}");
    }
}
