//! The client of the embedding service contract: an external service that embeds the chunks of a
//! knowledge base.
//!
//! The caller keeps the ledger and sends only new chunks. The answer is checked here: it must embed or
//! skip every chunk exactly once, and contain nothing else.

use std::collections::HashMap;

use ragstone_core::Metadata;
use ragstone_core::call::CallError;
use serde::{Deserialize, Serialize};

use super::{resolve_key, vectors};
use crate::config::{Environment, ProviderEntry};
use crate::error::ConfigError;
use crate::http::{Auth, Call, ClientSettings, ServiceClient};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ContractRequest {
    pub knowledgebase_id: String,
    pub chunks: Vec<ContractChunk>,
    /// The service's default model if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContractChunk {
    pub chunk_id: String,
    pub content: String,
    pub content_hash: String,
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChunkEmbedding {
    pub embedding_id: String,
    pub chunk_id: String,
    pub knowledgebase_id: String,
    pub content_hash: String,
    pub model_id: String,
    pub model_version: String,
    pub vector_dimension: usize,
    pub vector: Vec<f32>,
}

/// A chunk that the service had embedded before, or that was sent twice.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SkippedChunk {
    pub chunk_id: String,
    pub embedding_id: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ContractAnswer {
    pub embeddings: Vec<ChunkEmbedding>,
    /// The ids of the skipped chunks.
    pub skipped: Vec<String>,
}

#[derive(Deserialize)]
struct RawAnswer {
    embeddings: Vec<ChunkEmbedding>,
    skipped: Option<Vec<SkippedChunk>>,
}

#[derive(Debug, Clone)]
pub struct ContractClient(ServiceClient);

/// The type of these services in `providers`.
pub const CONTRACT_TYPE: &str = "embedding-service";

impl ContractClient {
    pub fn new(client: ServiceClient) -> Self {
        Self(client)
    }

    /// The service that an entry of `providers` names.
    pub fn from_entry(name: &str, entry: &ProviderEntry, env: Environment) -> Result<Self, ConfigError> {
        let field = format!("providers.{name}.baseUrl");
        let base_url = entry.base_url.as_deref().filter(|url| !url.is_empty());
        let base_url =
            base_url.ok_or_else(|| ConfigError::field(&field, "is required: the address of the service"))?;
        let mut settings = ClientSettings::new(name.to_owned(), base_url, &field)?;
        if let Some(key) = resolve_key(entry.api_key.as_ref(), name, env)? {
            settings.auth = Auth::Bearer(key);
        }
        Ok(Self(ServiceClient::new(settings)?))
    }

    /// The configured name of the service.
    pub fn service(&self) -> &str {
        self.0.service()
    }

    /// The error for an invalid answer.
    pub fn bad_answer(&self, reason: impl Into<String>) -> CallError {
        self.0.bad_answer(reason)
    }

    /// Embeds chunks. Without chunks, no request is sent.
    pub async fn embed_chunks(&self, request: &ContractRequest) -> Result<ContractAnswer, CallError> {
        if request.chunks.is_empty() {
            return Ok(ContractAnswer {
                embeddings: Vec::new(),
                skipped: Vec::new(),
            });
        }
        let answer = self.0.call_json(Call::post("embeddings").json(request)).await?;
        check(request, answer).map_err(|reason| self.0.bad_answer(reason))
    }
}

fn check(request: &ContractRequest, answer: RawAnswer) -> Result<ContractAnswer, String> {
    let mut open: HashMap<&str, &ContractChunk> = request
        .chunks
        .iter()
        .map(|chunk| (chunk.chunk_id.as_str(), chunk))
        .collect();
    let mut one_model: Option<(&str, &str, usize)> = None;
    for embedding in &answer.embeddings {
        let id = &embedding.chunk_id;
        let chunk = open
            .remove(id.as_str())
            .ok_or_else(|| format!("chunk '{id}' was not sent, or comes twice"))?;
        if embedding.knowledgebase_id != request.knowledgebase_id {
            return Err(format!("chunk '{id}' comes with another knowledgebase_id"));
        }
        if embedding.content_hash != chunk.content_hash {
            return Err(format!("chunk '{id}' comes with another content_hash"));
        }
        if request
            .model_id
            .as_ref()
            .is_some_and(|wanted| *wanted != embedding.model_id)
        {
            return Err(format!("chunk '{id}' comes with another model_id"));
        }
        if embedding.embedding_id.is_empty()
            || embedding.model_id.is_empty()
            || embedding.model_version.is_empty()
        {
            return Err(format!(
                "chunk '{id}' comes without embedding_id, model_id or model_version"
            ));
        }
        vectors::check(&embedding.vector, embedding.vector_dimension)?;
        let model = (
            embedding.model_id.as_str(),
            embedding.model_version.as_str(),
            embedding.vector_dimension,
        );
        if *one_model.get_or_insert(model) != model {
            return Err("its embeddings are of more than one model".to_owned());
        }
    }
    // The contract requires no list of skipped chunks: without one, the missing chunks were skipped.
    let Some(listed) = answer.skipped else {
        return Ok(ContractAnswer {
            skipped: open.into_keys().map(str::to_owned).collect(),
            embeddings: answer.embeddings,
        });
    };
    for skipped in &listed {
        open.remove(skipped.chunk_id.as_str())
            .ok_or_else(|| format!("chunk '{}' was not sent, or comes twice", skipped.chunk_id))?;
    }
    match open.len() {
        0 => Ok(ContractAnswer {
            embeddings: answer.embeddings,
            skipped: listed.into_iter().map(|skipped| skipped.chunk_id).collect(),
        }),
        missing => Err(format!(
            "{missing} of {} chunks are missing",
            request.chunks.len()
        )),
    }
}
