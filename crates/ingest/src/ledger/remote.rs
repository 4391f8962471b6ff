//! The client side of the embedding contract: an embedder that is an external service.
//!
//! The contract lets a service answer "skipped", without the vector, for content that it has embedded
//! before. So our own ledger keeps the vectors of passages, and content in the ledger is never sent.

use std::collections::HashMap;

use async_trait::async_trait;
use ragstone_core::Metadata;
use ragstone_core::collection::shorten;
use ragstone_core::model::{
    CallLimits, EmbedInput, Embedder, Embedding, ModelError, ModelInfo, RemoteFailure, RemoteFault, Role,
};
use ragstone_core::storage::StorageError;
use ragstone_providers::embedding::{
    ContractAnswer, ContractChunk, ContractClient, ContractRequest, model_error, split_by,
};

use super::{Ledger, LedgerEntry, LedgerKey, LedgerScope};
use crate::chunk::content_hash;

/// The limits of one request. Services refuse bodies of more than a few megabytes.
const REQUEST: CallLimits = CallLimits {
    texts: 128,
    bytes: 1 << 20,
};

type Known = HashMap<LedgerKey, LedgerEntry>;

#[derive(Debug, Clone)]
pub struct ContractSettings {
    /// Separates our content at the service from that of others.
    pub knowledgebase_id: String,
    /// `name` is the model's id at the service; the identity carries the version it must answer with.
    pub info: ModelInfo,
}

/// Sends new content to an external embedding service.
pub struct ContractEmbedder {
    service: ContractService,
    ledger: Ledger,
}

/// The service without the ledger.
struct ContractService {
    client: ContractClient,
    settings: ContractSettings,
}

type Text = (LedgerKey, String);

/// Embeds one word to see whether the service works. Nothing is stored.
pub async fn probe(client: ContractClient, settings: ContractSettings) -> Result<(), ModelError> {
    let service = ContractService { client, settings };
    let ping = service.keyed("ping".to_owned());
    service.ask_anew(&[ping]).await.map(drop)
}

impl ContractEmbedder {
    pub fn new(client: ContractClient, ledger: Ledger, settings: ContractSettings) -> Self {
        Self {
            service: ContractService { client, settings },
            ledger,
        }
    }

    /// Sends one request of new content, and stores the vectors.
    async fn fetch(&self, new: &[Text]) -> Result<(), ModelError> {
        let (entries, skipped) = self
            .service
            .ask(&self.service.settings.knowledgebase_id, new)
            .await?;
        self.record(entries).await?;
        if skipped.is_empty() {
            return Ok(());
        }
        // The service has these vectors and we do not: an earlier answer was lost.
        tracing::warn!(
            chunks = skipped.len(),
            "requesting embeddings anew whose vectors were lost"
        );
        let lost: Vec<Text> = new
            .iter()
            .filter(|(key, _)| skipped.contains(&key.embedding_id()))
            .cloned()
            .collect();
        let entries = self.service.ask_anew(&lost).await?;
        self.record(entries).await
    }

    async fn record(&self, entries: Vec<(LedgerKey, LedgerEntry)>) -> Result<(), ModelError> {
        let scope = LedgerScope::Service(&self.service.settings.knowledgebase_id);
        let recorded = self.ledger.record_in(scope, entries).await;
        recorded.map(drop).map_err(ledger_failed)
    }

    /// Embeds passages that are not in the ledger, and adds them to the known ones.
    async fn learn(&self, new: Vec<Text>, known: &mut Known) -> Result<(), ModelError> {
        let mut new = new;
        let keys: Vec<LedgerKey> = new.iter().map(|(key, _)| key.clone()).collect();
        // Held until the answer is in the ledger, where waiting requests find it.
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

    /// Embeds queries. They are not stored: their number has no bound.
    async fn answer(&self, new: &[Text], known: &mut Known) -> Result<(), ModelError> {
        for chunks in requests(new) {
            known.extend(self.service.ask_anew(chunks).await?);
        }
        Ok(())
    }
}

impl ContractService {
    /// A text with its key in the ledger.
    fn keyed(&self, text: String) -> Text {
        let scope = LedgerScope::Service(&self.settings.knowledgebase_id);
        let key = LedgerKey::new(scope, &content_hash(&text), &self.settings.info.identity);
        (key, text)
    }

    /// Asks under an unused knowledge base, where all content is new.
    async fn ask_anew(&self, chunks: &[Text]) -> Result<Vec<(LedgerKey, LedgerEntry)>, ModelError> {
        let unused = format!("{}-{}", self.settings.knowledgebase_id, uuid::Uuid::new_v4());
        let (entries, skipped) = self.ask(&unused, chunks).await?;
        if skipped.is_empty() {
            return Ok(entries);
        }
        let reason = format!("it skips {} chunks that it was never sent before", skipped.len());
        Err(model_error(self.client.bad_answer(reason)))
    }

    /// Returns the new vectors, and the chunks that the service skipped.
    async fn ask(
        &self,
        knowledge_base: &str,
        new: &[Text],
    ) -> Result<(Vec<(LedgerKey, LedgerEntry)>, Vec<String>), ModelError> {
        let request = ContractRequest {
            knowledgebase_id: knowledge_base.to_owned(),
            chunks: new
                .iter()
                .map(|(key, text)| ContractChunk {
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
                    LedgerEntry {
                        embedding_id: embedding.embedding_id,
                        vector: embedding.vector,
                    },
                ))
            })
            .collect();
        Ok((entries, answer.skipped))
    }

    /// Checks the model: vectors of different versions must not be mixed.
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

    /// The contract has no roles: a query is embedded like other content, and a query that equals a
    /// passage gets its vector.
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

/// Splits content into requests.
fn requests(new: &[Text]) -> Vec<&[Text]> {
    split_by(new, REQUEST, |(_, text)| text.len())
}

fn ledger_failed(error: StorageError) -> ModelError {
    ModelError::Unavailable(format!("the embedding ledger: {error}"))
}
