//! Interprets an `embedding` section.

use std::sync::Arc;

use ragstone_core::model::Embedder;
use secrecy::SecretString;

use super::{EmbedderSettings, EmbeddingBackend, create};
use crate::chat::ChatBackend;
use crate::config::{EmbeddingConfig, Environment, ProviderEntry, Providers, Secret};
use crate::error::ConfigError;
use crate::http::Policy;

/// The alias of the embedder that agent memory uses.
const MEMORY_MODEL: &str = "memory";

/// The result of resolving a configuration.
#[derive(Debug, Clone)]
pub enum Resolution {
    /// Neither `providerID` nor `provider: local` is set.
    Disabled,
    Found {
        backend: EmbeddingBackend,
        /// The key as configured; local models need none.
        api_key: Option<Secret>,
        base_url: Option<String>,
    },
    /// The provider's type, such as `anthropic`, has no embeddings.
    NotOffered { provider_type: String },
    /// `providerID` names no entry of `providers`.
    UnknownProvider,
}

impl Resolution {
    /// The type of the embedding backend; empty if there is none.
    pub fn backend_type(&self) -> &'static str {
        match self {
            Self::Found { backend, .. } => backend.as_str(),
            Self::Disabled | Self::NotOffered { .. } | Self::UnknownProvider => "",
        }
    }

    /// The configured API key; `None` if there is none or none is needed.
    pub fn api_key(&self) -> Option<&Secret> {
        match self {
            Self::Found { api_key, .. } => api_key.as_ref(),
            Self::Disabled | Self::NotOffered { .. } | Self::UnknownProvider => None,
        }
    }
}

/// The types of `providers` with embeddings.
const EMBEDDING_TYPES: &str = "openai, gemini, google, ollama";

/// The embedding backend of a provider's type; `None` for types without embeddings.
pub fn provider_type_to_embedding_type(provider_type: &str) -> Option<EmbeddingBackend> {
    match provider_type {
        "openai" => Some(EmbeddingBackend::OpenAi),
        "gemini" | "google" => Some(EmbeddingBackend::Google),
        "ollama" => Some(EmbeddingBackend::Local),
        _ => None,
    }
}

pub fn resolve(config: &EmbeddingConfig, providers: &Providers) -> Resolution {
    if !config.provider_id.is_empty() {
        return match providers.get(&config.provider_id) {
            Some(entry) => resolve_entry(entry),
            None => Resolution::UnknownProvider,
        };
    }
    if config.provider == "local" {
        return Resolution::Found {
            backend: EmbeddingBackend::Local,
            api_key: None,
            base_url: Some(config.local.base_url.clone()).filter(|url| !url.is_empty()),
        };
    }
    Resolution::Disabled
}

fn resolve_entry(entry: &ProviderEntry) -> Resolution {
    match provider_type_to_embedding_type(&entry.provider_type) {
        Some(backend) => Resolution::Found {
            backend,
            api_key: entry
                .api_key
                .clone()
                .filter(|_| backend != EmbeddingBackend::Local),
            base_url: entry.base_url.clone(),
        },
        None => Resolution::NotOffered {
            provider_type: entry.provider_type.clone(),
        },
    }
}

/// The embedder of an `embedding` section; `None` if embedding is disabled.
pub fn from_config(
    config: &EmbeddingConfig,
    providers: &Providers,
    env: Environment,
) -> Result<Option<Arc<dyn Embedder>>, ConfigError> {
    let resolution = resolve(config, providers);
    if matches!(resolution, Resolution::Disabled) {
        return Ok(None);
    }
    let local_model = &config.local.model;
    let is_local = resolution.backend_type() == EmbeddingBackend::Local.as_str();
    let model = if is_local && config.model.is_empty() {
        local_model.clone()
    } else {
        config.model.clone()
    };
    let provider = if config.provider_id.is_empty() {
        &config.provider
    } else {
        &config.provider_id
    };
    open(
        resolution,
        EmbedderRequest {
            id: MEMORY_MODEL,
            provider,
            model: &model,
            dimensions: config.dimensions,
            version: None,
        },
        providers,
        env,
    )
    .map(Some)
}

/// The embedder of an entry of `providers` that `embeddings.yml` names.
pub fn from_entry(
    id: &str,
    provider: &str,
    model: &str,
    dimensions: Option<usize>,
    version: Option<&str>,
    providers: &Providers,
    env: Environment,
) -> Result<Arc<dyn Embedder>, ConfigError> {
    let resolution = providers
        .get(provider)
        .map_or(Resolution::UnknownProvider, resolve_entry);
    let wanted = EmbedderRequest {
        id,
        provider,
        model,
        dimensions,
        version,
    };
    open(resolution, wanted, providers, env)
}

struct EmbedderRequest<'a> {
    id: &'a str,
    provider: &'a str,
    model: &'a str,
    dimensions: Option<usize>,
    version: Option<&'a str>,
}

fn open(
    resolution: Resolution,
    wanted: EmbedderRequest,
    providers: &Providers,
    env: Environment,
) -> Result<Arc<dyn Embedder>, ConfigError> {
    let (backend, api_key, base_url) = match resolution {
        Resolution::Found {
            backend,
            api_key,
            base_url,
        } => (backend, api_key, base_url),
        Resolution::NotOffered { provider_type }
            if ChatBackend::of_provider_type(&provider_type).is_err() =>
        {
            return Err(ConfigError::Unknown {
                kind: "embedding provider type",
                given: provider_type,
                known: EMBEDDING_TYPES.to_owned(),
            });
        }
        Resolution::NotOffered { provider_type } => {
            return Err(ConfigError::NotOffered {
                provider: wanted.provider.to_owned(),
                provider_type,
                lacking: "embeddings",
            });
        }
        Resolution::UnknownProvider | Resolution::Disabled => {
            return Err(ConfigError::Unknown {
                kind: "provider id",
                given: wanted.provider.to_owned(),
                known: known_ids(providers),
            });
        }
    };
    create(EmbedderSettings {
        id: wanted.id.to_owned(),
        provider: wanted.provider.to_owned(),
        backend,
        api_key: resolve_key(api_key.as_ref(), wanted.provider, env)?,
        base_url,
        model: wanted.model.to_owned(),
        dimensions: wanted.dimensions,
        version: wanted.version.map(str::to_owned),
        policy: Policy::default(),
    })
}

pub(crate) fn known_ids(providers: &Providers) -> String {
    if providers.is_empty() {
        "none".to_owned()
    } else {
        providers
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ")
    }
}

pub(crate) fn resolve_key(
    key: Option<&Secret>,
    provider: &str,
    env: Environment,
) -> Result<Option<SecretString>, ConfigError> {
    match key {
        Some(key) => key.resolve(&format!("providers.{provider}.apiKey"), env),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;

    fn providers() -> Providers {
        serde_saphyr::from_str(
            r#"
gemini-1: {type: gemini, apiKey: key-of-gemini}
google-1: {type: google, apiKey: key-of-google}
my-openai: {type: openai, apiKey: key-of-openai}
my-ollama: {type: ollama}
claude: {type: anthropic, apiKey: key-of-claude}
broken: {type: openai, apiKey: "${NOT_SET_ANYWHERE}"}
"#,
        )
        .unwrap()
    }

    fn by_id(id: &str) -> Resolution {
        let config = EmbeddingConfig {
            provider_id: id.into(),
            ..EmbeddingConfig::default()
        };
        resolve(&config, &providers())
    }

    fn key(resolution: &Resolution) -> String {
        resolution
            .api_key()
            .and_then(|key| key.resolve("f", &|_| None).unwrap())
            .map_or_else(String::new, |key| key.expose_secret().to_owned())
    }

    #[test]
    fn req_emb_010_gemini_resolves_to_google_with_the_providers_key() {
        for (id, expected) in [("gemini-1", "key-of-gemini"), ("google-1", "key-of-google")] {
            let resolution = by_id(id);
            assert_eq!(
                (resolution.backend_type(), key(&resolution).as_str()),
                ("google", expected)
            );
        }
    }

    #[test]
    fn req_emb_010_openai_resolves_to_openai_with_the_providers_key() {
        let resolution = by_id("my-openai");
        assert_eq!(
            (resolution.backend_type(), key(&resolution).as_str()),
            ("openai", "key-of-openai")
        );
    }

    #[test]
    fn req_emb_010_ollama_resolves_to_local_and_no_key_is_required() {
        let resolution = by_id("my-ollama");
        assert_eq!(
            (resolution.backend_type(), key(&resolution).as_str()),
            ("local", "")
        );
        let config = EmbeddingConfig {
            provider_id: "my-ollama".into(),
            ..EmbeddingConfig::default()
        };
        assert!(from_config(&config, &providers(), &|_| None).unwrap().is_some());
    }

    #[test]
    fn req_emb_010_anthropic_resolves_to_an_empty_type_and_an_empty_key() {
        let resolution = by_id("claude");
        assert_eq!((resolution.backend_type(), key(&resolution).as_str()), ("", ""));
    }

    #[test]
    fn req_emb_010_an_unknown_id_resolves_to_an_empty_type_and_an_empty_key() {
        let resolution = by_id("nobody");
        assert_eq!((resolution.backend_type(), key(&resolution).as_str()), ("", ""));
        let config = EmbeddingConfig {
            provider_id: "nobody".into(),
            ..EmbeddingConfig::default()
        };
        let error = from_config(&config, &providers(), &|_| None)
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains("'nobody'") && error.contains("my-openai"),
            "{error}"
        );
    }

    #[test]
    fn an_unknown_type_is_an_error_that_lists_the_known_ones() {
        let providers: Providers = serde_saphyr::from_str("c: {type: cohere, apiKey: k}").unwrap();
        let made = from_entry("m", "c", "x", Some(4), None, &providers, &|_| None);
        assert_eq!(
            made.err().unwrap().to_string(),
            "Unknown embedding provider type 'cohere'; known are: openai, gemini, google, ollama"
        );
    }

    #[test]
    fn req_emb_011_a_provider_id_wins_over_provider() {
        let config = EmbeddingConfig {
            provider_id: "my-openai".into(),
            provider: "local".into(),
            ..EmbeddingConfig::default()
        };
        assert_eq!(resolve(&config, &providers()).backend_type(), "openai");
    }

    #[test]
    fn req_emb_011_provider_local_is_local_with_no_key() {
        let config = EmbeddingConfig {
            provider: "local".into(),
            ..EmbeddingConfig::default()
        };
        let resolution = resolve(&config, &providers());
        assert_eq!(
            (resolution.backend_type(), key(&resolution).as_str()),
            ("local", "")
        );
    }

    #[test]
    fn req_emb_011_with_both_empty_embedding_is_disabled() {
        let config = EmbeddingConfig::default();
        assert!(matches!(resolve(&config, &providers()), Resolution::Disabled));
        assert!(from_config(&config, &providers(), &|_| None).unwrap().is_none());
    }

    #[test]
    fn a_key_variable_is_looked_up_only_when_the_embedder_is_made() {
        assert_eq!(by_id("broken").backend_type(), "openai");
        let config = EmbeddingConfig {
            provider_id: "broken".into(),
            ..EmbeddingConfig::default()
        };
        let error = from_config(&config, &providers(), &|_| None)
            .err()
            .unwrap()
            .to_string();
        assert_eq!(
            error,
            "providers.broken.apiKey: the environment variable 'NOT_SET_ANYWHERE' is not set"
        );
    }
}
