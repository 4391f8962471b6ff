//! The other side of the embedding contract: an embedder that is somebody else's service.
//!
//! The contract lets a service answer "skipped" for content that it has embedded before, without
//! the vector. So the vectors of passages are kept in our own ledger, and what is in there is never
//! sent.

use std::collections::HashMap;

use async_trait::async_trait;
use ragstone_core::Metadata;
use ragstone_core::collection::shorten;
use ragstone_core::model::{
    CallLimits, EmbedInput, Embedder, Embedding, ModelError, ModelInfo, RemoteFailure, RemoteFault, Role,
};
use ragstone_core::storage::StorageError;
use ragstone_providers::embedding::{
    Chunk, ContractAnswer, ContractClient, ContractRequest, model_error, split_by,
};

use super::{Entry, Ledger, LedgerKey, Scope};
use crate::ingest::chunk::content_hash;

/// What is sent in one request. Services refuse bodies of more than a few megabytes.
const REQUEST: CallLimits = CallLimits {
    texts: 128,
    bytes: 1 << 20,
};

type Known = HashMap<LedgerKey, Entry>;

#[derive(Debug, Clone)]
pub struct ContractSettings {
    /// Under which the service keeps our content apart from that of others.
    pub knowledgebase_id: String,
    /// `name` is the model's id at the service; the identity carries the version it must answer with.
    pub info: ModelInfo,
}

/// Calls an external embedding service, for new content only.
pub struct ContractEmbedder {
    service: Service,
    ledger: Ledger,
}

/// The service by itself.
struct Service {
    client: ContractClient,
    settings: ContractSettings,
}

type Text = (LedgerKey, String);

/// Has the service embed a word, as a question: nothing is kept of it.
pub async fn probe(client: ContractClient, settings: ContractSettings) -> Result<(), ModelError> {
    let service = Service { client, settings };
    let ping = service.keyed("ping".to_owned());
    service.ask_anew(&[ping]).await.map(drop)
}

impl ContractEmbedder {
    pub fn new(client: ContractClient, ledger: Ledger, settings: ContractSettings) -> Self {
        Self {
            service: Service { client, settings },
            ledger,
        }
    }

    /// Sends new content of one request, and keeps what comes back.
    async fn fetch(&self, new: &[Text]) -> Result<(), ModelError> {
        let (entries, skipped) = self
            .service
            .ask(&self.service.settings.knowledgebase_id, new)
            .await?;
        self.ledger.record(entries).await.map_err(ledger_failed)?;
        if skipped.is_empty() {
            return Ok(());
        }
        // The service has these, and we have not: an earlier answer was lost on its way here.
        tracing::warn!(
            chunks = skipped.len(),
            "asking again for embeddings whose vectors were lost"
        );
        let lost: Vec<Text> = new
            .iter()
            .filter(|(key, _)| skipped.contains(&key.embedding_id()))
            .cloned()
            .collect();
        let entries = self.service.ask_anew(&lost).await?;
        self.ledger.record(entries).await.map_err(ledger_failed)?;
        Ok(())
    }

    /// Has passages embedded that the ledger does not know, and adds all to what is known.
    async fn learn(&self, new: Vec<Text>, known: &mut Known) -> Result<(), ModelError> {
        let mut new = new;
        let keys: Vec<LedgerKey> = new.iter().map(|(key, _)| key.clone()).collect();
        // Held until the answer is in the ledger, where others who wait for it find it.
        let _turn = self.ledger.turn(keys.clone()).await;
        known.extend(self.ledger.find(&keys).await.map_err(ledger_failed)?);
        new.retain(|(key, _)| !known.contains_key(key));
        for chunks in requests(&new) {
            self.fetch(chunks).await?;
        }
        if !new.is_empty() {
            let fetched: Vec<LedgerKey> = new.into_iter().map(|(key, _)| key).collect();
            known.extend(self.ledger.find(&fetched).await.map_err(ledger_failed)?);
        }
        Ok(())
    }

    /// Has questions embedded, and keeps nothing of them: there is no end to what is searched for.
    async fn answer(&self, new: &[Text], known: &mut Known) -> Result<(), ModelError> {
        for chunks in requests(new) {
            known.extend(self.service.ask_anew(chunks).await?);
        }
        Ok(())
    }
}

impl Service {
    /// A text by what it is known by in the ledger.
    fn keyed(&self, text: String) -> Text {
        let scope = Scope::Service(&self.settings.knowledgebase_id);
        let key = LedgerKey::new(scope, &content_hash(&text), &self.settings.info.identity);
        (key, text)
    }

    /// Asks under a knowledge base that was never used, where the contract makes everything new.
    async fn ask_anew(&self, chunks: &[Text]) -> Result<Vec<(LedgerKey, Entry)>, ModelError> {
        let unused = format!("{}-{}", self.settings.knowledgebase_id, uuid::Uuid::new_v4());
        let (entries, skipped) = self.ask(&unused, chunks).await?;
        if skipped.is_empty() {
            return Ok(entries);
        }
        let reason = format!("it skips {} chunks that it was never sent before", skipped.len());
        Err(model_error(self.client.bad_answer(reason)))
    }

    /// What the service embeds, and the chunks that it skips.
    async fn ask(
        &self,
        knowledge_base: &str,
        new: &[Text],
    ) -> Result<(Vec<(LedgerKey, Entry)>, Vec<String>), ModelError> {
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
        Ok((entries, answer.skipped))
    }

    /// Another version makes other vectors, which must not be mixed with those that are there.
    fn check(&self, answer: &ContractAnswer) -> Result<(), ModelError> {
        let identity = &self.settings.info.identity;
        let Some(first) = answer.embeddings.first() else {
            return Ok(());
        };
        if first.model_version != identity.version || first.vector_dimension != identity.dimensions {
            let failure = RemoteFailure {
                provider: self.client.service().to_owned(),
                fault: RemoteFault::OtherModel,
                reason: format!(
                    "version '{}' and {} dimensions; configured are '{}' and {}",
                    shorten(&first.model_version),
                    first.vector_dimension,
                    identity.version,
                    identity.dimensions
                ),
            };
            tracing::warn!(provider = %failure.provider, reason = %failure.reason, "an embedding service has another model");
            return Err(ModelError::Remote(failure));
        }
        Ok(())
    }
}

#[async_trait]
impl Embedder for ContractEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.service.settings.info
    }

    /// The contract knows no roles: a question is embedded like any other content, and one that is
    /// the text of a passage takes its vector.
    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        let mut texts = Vec::with_capacity(inputs.len());
        for input in inputs {
            match input {
                EmbedInput::Text(text) => texts.push(self.service.keyed(text)),
                EmbedInput::Tokens(_) => {
                    return Err(ModelError::InvalidInput(
                        "this model reads texts, not token ids".into(),
                    ));
                }
            }
        }
        let keys: Vec<LedgerKey> = texts.iter().map(|(key, _)| key.clone()).collect();
        let mut known = self.ledger.find(&keys).await.map_err(ledger_failed)?;
        let mut new = texts;
        new.retain(|(key, _)| !known.contains_key(key));
        new.sort();
        new.dedup();
        match role {
            Role::Passage => self.learn(new, &mut known).await?,
            Role::Query => self.answer(&new, &mut known).await?,
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

/// What is sent together.
fn requests(new: &[Text]) -> Vec<&[Text]> {
    split_by(new, REQUEST, |(_, text)| text.len())
}

fn ledger_failed(error: StorageError) -> ModelError {
    ModelError::Unavailable(format!("the embedding ledger: {error}"))
}
