//! The other side of the embedding contract: an embedder that is somebody else's service.
//!
//! The contract lets a service answer "skipped" for content that it has embedded before, without
//! the vector. So the vectors are kept in our own ledger, and what is in there is never sent.

use std::collections::HashMap;

use async_trait::async_trait;
use ragstone_core::Metadata;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, ModelInfo, Role};
use ragstone_core::store::StoreError;
use ragstone_providers::embedding::{Chunk, ContractAnswer, ContractClient, ContractRequest, model_error};

use super::{Entry, Ledger, LedgerKey, Scope};
use crate::ingest::chunk::content_hash;

/// How many chunks are sent in one request.
const MAX_CHUNKS: usize = 128;

#[derive(Debug, Clone)]
pub struct ContractSettings {
    /// Under which the service keeps our content apart from that of others.
    pub knowledgebase_id: String,
    /// `name` is the model's id at the service; the identity carries the version it must answer with.
    pub info: ModelInfo,
}

/// Calls an external embedding service, for new content only.
pub struct ContractEmbedder {
    client: ContractClient,
    ledger: Ledger,
    settings: ContractSettings,
}

impl ContractEmbedder {
    pub fn new(client: ContractClient, ledger: Ledger, settings: ContractSettings) -> Self {
        Self {
            client,
            ledger,
            settings,
        }
    }

    /// Sends new content, at most [`MAX_CHUNKS`] of it, and keeps what comes back.
    async fn fetch(&self, new: &[(LedgerKey, String)]) -> Result<(), ModelError> {
        let own = &self.settings.knowledgebase_id;
        let skipped = self.ask(own, new).await?;
        if skipped.is_empty() {
            return Ok(());
        }
        // The service has these, and we have not: an earlier answer was lost on its way here. Under
        // another knowledge base the contract makes them new again.
        tracing::warn!(
            chunks = skipped.len(),
            "asking again for embeddings whose vectors were lost"
        );
        let again = format!("{own}-{}", uuid::Uuid::new_v4());
        let lost: Vec<(LedgerKey, String)> = new
            .iter()
            .filter(|(key, _)| skipped.contains(&key.embedding_id()))
            .cloned()
            .collect();
        match self.ask(&again, &lost).await? {
            rest if rest.is_empty() => Ok(()),
            rest => Err(ModelError::Failed(format!(
                "the embedding service skips {} chunks that it was never sent before",
                rest.len()
            ))),
        }
    }

    /// Records what the service embeds; returns the chunks that it skips.
    async fn ask(
        &self,
        knowledge_base: &str,
        new: &[(LedgerKey, String)],
    ) -> Result<Vec<String>, ModelError> {
        let request = ContractRequest {
            knowledgebase_id: knowledge_base.to_owned(),
            chunks: new
                .iter()
                .map(|(key, text)| Chunk {
                    chunk_id: key.embedding_id(),
                    content: text.clone(),
                    content_hash: content_hash(text),
                    metadata: Metadata::new(),
                })
                .collect(),
            model_id: Some(self.settings.info.name.clone()),
        };
        let answer = self.client.embed_chunks(&request).await.map_err(model_error)?;
        self.check(&answer)?;
        let mut keys: HashMap<String, &LedgerKey> =
            new.iter().map(|(key, _)| (key.embedding_id(), key)).collect();
        let entries = answer
            .embeddings
            .into_iter()
            .filter_map(|embedding| {
                let key = keys.remove(&embedding.chunk_id)?.clone();
                Some((
                    key,
                    Entry {
                        embedding_id: embedding.embedding_id,
                        vector: embedding.vector,
                    },
                ))
            })
            .collect();
        self.ledger.record(entries).await.map_err(ledger_failed)?;
        Ok(answer.skipped)
    }

    /// Another version makes other vectors, which must not be mixed with those that are there.
    fn check(&self, answer: &ContractAnswer) -> Result<(), ModelError> {
        let identity = &self.settings.info.identity;
        let Some(first) = answer.embeddings.first() else {
            return Ok(());
        };
        if first.model_version != identity.version || first.vector_dimension != identity.dimensions {
            return Err(ModelError::Failed(format!(
                "the embedding service answers with version '{}' and {} dimensions; configured are '{}' and {}",
                first.model_version, first.vector_dimension, identity.version, identity.dimensions
            )));
        }
        Ok(())
    }
}

#[async_trait]
impl Embedder for ContractEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.settings.info
    }

    /// The contract knows no roles: a question is embedded like any other content.
    async fn embed(&self, inputs: Vec<EmbedInput>, _role: Role) -> Result<Vec<Embedding>, ModelError> {
        let scope = Scope::KnowledgeBase(&self.settings.knowledgebase_id);
        let mut texts = Vec::with_capacity(inputs.len());
        for input in inputs {
            match input {
                EmbedInput::Text(text) => {
                    let key = LedgerKey::new(scope, &content_hash(&text), &self.settings.info.identity);
                    texts.push((key, text));
                }
                EmbedInput::Tokens(_) => {
                    return Err(ModelError::InvalidInput(
                        "this model reads texts, not token ids".into(),
                    ));
                }
            }
        }
        let keys: Vec<LedgerKey> = texts.iter().map(|(key, _)| key.clone()).collect();
        let mut known = self.ledger.find(&keys).await.map_err(ledger_failed)?;
        let unknown: Vec<LedgerKey> = keys
            .iter()
            .filter(|key| !known.contains_key(key))
            .cloned()
            .collect();
        // Held until the answer is in the ledger, where others who wait for it find it.
        let _turn = self.ledger.turn(unknown.clone()).await;
        known.extend(self.ledger.find(&unknown).await.map_err(ledger_failed)?);
        let mut new: Vec<(LedgerKey, String)> = texts
            .into_iter()
            .filter(|(key, _)| !known.contains_key(key))
            .collect();
        new.sort();
        new.dedup();
        for chunks in new.chunks(MAX_CHUNKS) {
            self.fetch(chunks).await?;
        }
        if !new.is_empty() {
            let fetched: Vec<LedgerKey> = new.into_iter().map(|(key, _)| key).collect();
            known.extend(self.ledger.find(&fetched).await.map_err(ledger_failed)?);
        }
        keys.iter()
            .map(|key| {
                let entry = known.get(key);
                let entry = entry.ok_or_else(|| ModelError::Failed("an embedding was not kept".into()))?;
                Ok(Embedding {
                    vector: entry.vector.clone(),
                    tokens: 0,
                    truncated: false,
                })
            })
            .collect()
    }
}

fn ledger_failed(error: StoreError) -> ModelError {
    ModelError::Unavailable(format!("the embedding ledger: {error}"))
}
