//! Embedders behind an API.
//!
//! [`resolve`] interprets the `embedding` section of a configuration, [`from_config`] creates its
//! embedder, and [`create`] creates one from settings, such as an entry of `embeddings.yml`.

mod batches;
mod contract;
mod google;
mod openai;
mod resolve;
mod vectors;

use std::sync::Arc;

use ragstone_core::model::{Embedder, ModelIdentity, ModelInfo};
use secrecy::SecretString;

pub use batches::split_by;
pub use contract::{
    CONTRACT_TYPE, ChunkEmbedding, ContractAnswer, ContractChunk, ContractClient, ContractRequest,
    SkippedChunk,
};
pub use resolve::{Resolution, from_config, from_entry, provider_type_to_embedding_type, resolve};
pub(crate) use resolve::{known_ids, resolve_key};
pub use vectors::model_error;

use crate::error::ConfigError;
use crate::http::{Auth, ClientSettings, Policy, ServiceClient};

/// A kind of embedding API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbeddingBackend {
    OpenAi,
    Google,
    /// Ollama, through its OpenAI-compatible endpoint.
    Local,
}

impl EmbeddingBackend {
    pub const ALL: [Self; 3] = [Self::OpenAi, Self::Google, Self::Local];

    /// The error for an unknown type lists the known ones.
    pub fn parse(name: &str) -> Result<Self, ConfigError> {
        Self::ALL
            .into_iter()
            .find(|backend| backend.as_str() == name)
            .ok_or_else(|| ConfigError::Unknown {
                kind: "embedding provider type",
                given: name.to_owned(),
                known: Self::ALL.map(Self::as_str).join(", "),
            })
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Google => "google",
            Self::Local => "local",
        }
    }

    pub fn default_model(self) -> &'static str {
        match self {
            Self::OpenAi => "text-embedding-3-small",
            Self::Google => "text-embedding-004",
            Self::Local => "nomic-embed-text",
        }
    }

    pub fn default_dimensions(self) -> usize {
        match self {
            Self::OpenAi => 1536,
            Self::Google | Self::Local => 768,
        }
    }

    fn default_base_url(self) -> &'static str {
        match self {
            Self::OpenAi => "https://api.openai.com/v1",
            Self::Google => "https://generativelanguage.googleapis.com/v1beta",
            Self::Local => "http://localhost:11434/v1",
        }
    }
}

/// The settings of an embedder behind an API.
#[derive(Debug, Clone)]
pub struct EmbedderSettings {
    /// Its name in collections.
    pub id: String,
    /// Its entry of `providers`, for errors and logs.
    pub provider: String,
    pub backend: EmbeddingBackend,
    pub api_key: Option<SecretString>,
    pub base_url: Option<String>,
    /// Empty for the backend's default.
    pub model: String,
    /// Sent with every call; `None` for the backend's default.
    pub dimensions: Option<usize>,
    /// The model's version, if it is configured.
    pub version: Option<String>,
    pub policy: Policy,
}

/// Creates an embedder for any kind of embedding API.
pub fn create(settings: EmbedderSettings) -> Result<Arc<dyn Embedder>, ConfigError> {
    let backend = settings.backend;
    let own_address = settings.base_url.filter(|url| !url.is_empty());
    let needs_key = match backend {
        EmbeddingBackend::OpenAi => own_address.is_none(),
        EmbeddingBackend::Google => true,
        EmbeddingBackend::Local => false,
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
        (Some(key), EmbeddingBackend::Google) => Auth::Header {
            name: "x-goog-api-key".into(),
            key,
        },
        (Some(key), _) => Auth::Bearer(key),
    };
    let dimensions = settings.dimensions.unwrap_or(backend.default_dimensions());
    if dimensions == 0 || dimensions > ragstone_core::document::MAX_DIMENSIONS {
        return Err(ConfigError::field(
            "dimensions",
            format!(
                "must be between 1 and {}",
                ragstone_core::document::MAX_DIMENSIONS
            ),
        ));
    }
    let name = if settings.model.is_empty() {
        backend.default_model().to_owned()
    } else {
        settings.model
    };
    let info = ModelInfo {
        identity: ModelIdentity {
            id: settings.id,
            version: settings.version.unwrap_or_else(|| {
                ModelIdentity::unstated_version(&format!("{}/{name}/{dimensions}", backend.as_str()))
            }),
            dimensions,
        },
        name,
        max_tokens: None,
    };
    let client = ServiceClient::new(client)?;
    Ok(match backend {
        EmbeddingBackend::OpenAi => {
            Arc::new(openai::OpenAiEmbedder::new(client, info, openai::Flavour::OpenAi))
        }
        EmbeddingBackend::Local => {
            Arc::new(openai::OpenAiEmbedder::new(client, info, openai::Flavour::Ollama))
        }
        EmbeddingBackend::Google => Arc::new(google::GoogleEmbedder::new(client, info)?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(backend: EmbeddingBackend) -> EmbedderSettings {
        EmbedderSettings {
            id: "m".into(),
            provider: "p".into(),
            backend,
            api_key: Some("canary-key".to_owned().into()),
            base_url: None,
            model: String::new(),
            dimensions: None,
            version: None,
            policy: Policy::default(),
        }
    }

    #[test]
    fn given_an_unknown_provider_type_when_creating_via_registry_then_an_error_is_returned() {
        let error = EmbeddingBackend::parse("cohere").unwrap_err().to_string();
        assert_eq!(
            error,
            "Unknown embedding provider type 'cohere'; known are: openai, google, local"
        );
    }

    #[test]
    fn defaults_are_those_of_the_backend() {
        for (backend, model, dimensions) in [
            (EmbeddingBackend::OpenAi, "text-embedding-3-small", 1536),
            (EmbeddingBackend::Google, "text-embedding-004", 768),
            (EmbeddingBackend::Local, "nomic-embed-text", 768),
        ] {
            let embedder = create(settings(backend)).unwrap();
            let info = embedder.info();
            assert_eq!(
                (info.name.as_str(), info.identity.dimensions),
                (model, dimensions)
            );
        }
    }

    #[test]
    fn a_missing_key_is_an_error_where_one_is_needed() {
        let without = |backend| EmbedderSettings {
            api_key: None,
            ..settings(backend)
        };
        for backend in [EmbeddingBackend::OpenAi, EmbeddingBackend::Google] {
            assert!(matches!(
                create(without(backend)),
                Err(ConfigError::MissingKey { .. })
            ));
        }
        assert!(create(without(EmbeddingBackend::Local)).is_ok());
    }

    #[test]
    fn debug_output_of_settings_shows_no_key() {
        assert!(!format!("{:?}", settings(EmbeddingBackend::OpenAi)).contains("canary"));
    }
}
