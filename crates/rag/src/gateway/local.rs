//! This process as a RAG backend.

use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::document::{Added, Metadata, NewDocument};
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::provider::{
    Capability, Health, HealthStatus, ProviderAnswer, ProviderError, ProviderQuery, RagProvider, Reranked,
};
use ragstone_core::storage::{DocumentPage, MetadataUpdate, Page, Selection, StorageError, StorageHealth};
use ragstone_providers::ConfigError;
use ragstone_providers::rag::{ProviderDescription, ProviderKind};
use serde_json::{Value, json};

use super::LOCAL;
use crate::error::ServiceError;
use crate::models::check_comparable;
use crate::{Service, documents, search};

mod query;

pub(crate) use query::document_json;

const CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
    Capability::Rerank,
    Capability::KeywordSearch,
];

#[derive(Clone)]
pub struct LocalProvider {
    service: Service,
}

impl LocalProvider {
    pub fn new(service: Service) -> Self {
        Self { service }
    }
}

/// The kind of which there is exactly one service. It has nothing to configure.
pub(super) fn kind(local: LocalProvider) -> ProviderKind {
    let local: Arc<dyn RagProvider> = Arc::new(local);
    ProviderKind::new(
        ProviderDescription {
            id: LOCAL,
            display_name: "This server",
            description: "The collections and models of this process",
            capabilities: CAPABILITIES,
        },
        json!({"type": "object", "properties": {}, "additionalProperties": false}),
        move |connection, _| match connection.keys().next() {
            None => Ok(Arc::clone(&local)),
            Some(field) => Err(ConfigError::field(field, "this server has nothing to configure")),
        },
    )
}

#[async_trait]
impl RagProvider for LocalProvider {
    fn capabilities(&self) -> &'static [Capability] {
        CAPABILITIES
    }

    async fn health(&self) -> Health {
        let start = Instant::now();
        let store = self.service.store.health().await;
        let (status, message) = match &store {
            Ok(_) => (HealthStatus::Healthy, "The service answers".to_owned()),
            Err(error) => {
                tracing::warn!(%error, "the store does not answer the health check");
                (HealthStatus::Degraded, "The store does not answer".to_owned())
            }
        };
        Health {
            status,
            message,
            timestamp: jiff::Timestamp::now().to_string(),
            latency_ms: start.elapsed().as_secs_f64() * 1e3,
            details: self.details(store),
        }
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, ProviderError> {
        let created = self.service.store.create_collection(name, metadata).await;
        Ok(created.map_err(store_error)?.metadata)
    }

    async fn collections(&self) -> Result<Vec<Collection>, ProviderError> {
        self.service.store.collections().await.map_err(store_error)
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, ProviderError> {
        self.service.store.collection(name).await.map_err(store_error)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, ProviderError> {
        let updated = self.service.store.update_metadata(name, metadata, update).await;
        updated.map_err(store_error)
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), ProviderError> {
        self.service
            .store
            .delete_collection(name)
            .await
            .map_err(store_error)
    }

    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, ProviderError> {
        Ok(documents::add(&self.service, name, documents).await?)
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, ProviderError> {
        self.service
            .store
            .documents(name, filter, page)
            .await
            .map_err(store_error)
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, ProviderError> {
        self.service
            .store
            .delete_documents(name, selection)
            .await
            .map_err(store_error)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, ProviderError> {
        self.service.store.empty(name).await.map_err(store_error)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, ProviderError> {
        self.service
            .store
            .metadata_values(name, field)
            .await
            .map_err(store_error)
    }

    async fn search(
        &self,
        name: &CollectionName,
        mut query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        let warning = match query.vector_by.take() {
            Some(model) => check_comparable(&self.service, name, &model).await?,
            None => None,
        };
        let (query, explain) = query::read(query)?;
        let answer = search::search(&self.service, name, &query).await?;
        let mut answer = query::answer(answer, &query, explain);
        answer.warnings.extend(warning);
        Ok(answer)
    }

    async fn rerank(&self, query: &str, documents: Vec<Metadata>, top_k: Option<usize>) -> Reranked {
        match self.scores(query, &documents).await {
            Ok(scores) => Reranked {
                documents: by_score(documents, &scores, top_k),
                warning: None,
            },
            Err(error) => {
                tracing::warn!(%error, "reranking failed, documents stay as they are");
                Reranked {
                    documents,
                    warning: Some(format!("Reranking was skipped: {error}")),
                }
            }
        }
    }
}

impl LocalProvider {
    fn details(&self, store: Result<StorageHealth, StorageError>) -> Metadata {
        let mut details = Metadata::new();
        details.insert("version".into(), env!("CARGO_PKG_VERSION").into());
        match store {
            Ok(facts) => {
                details.insert("collections_count".into(), facts.collections.into());
                details.insert("storage_bytes".into(), facts.storage_bytes.into());
                if let Some(engine) = facts.engine {
                    let store = json!({"engine": engine.name, "limitations": engine.limitations});
                    details.insert("store".into(), store);
                }
            }
            Err(error) => {
                details.insert("error".into(), error.to_string().into());
            }
        }
        let models: Vec<Value> = self
            .service
            .models
            .embedders()
            .map(|embedder| {
                let info = embedder.info();
                json!({"id": info.identity.id, "name": info.name, "status": "loaded", "dimensions": info.identity.dimensions})
            })
            .collect();
        if !models.is_empty() {
            details.insert("embedding_models".into(), models.into());
        }
        if let Ok(reranker) = self.service.models.reranker() {
            let loaded = json!({"model": reranker.name(), "status": "loaded"});
            details.insert("cross_encoder".into(), loaded);
        }
        details
    }

    async fn scores(&self, query: &str, documents: &[Metadata]) -> Result<Vec<f32>, ServiceError> {
        let reranker = self.service.models.reranker()?;
        if documents.is_empty() {
            return Ok(Vec::new());
        }
        let text = |document: &Metadata| {
            document
                .get("text")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let texts = documents.iter().map(text).collect();
        Ok(reranker.score(query, texts, None).await?.scores)
    }
}

/// Best first; equal scores keep their order.
fn by_score(documents: Vec<Metadata>, scores: &[f32], top_k: Option<usize>) -> Vec<Metadata> {
    let mut ranked: Vec<(usize, f32, Metadata)> = documents
        .into_iter()
        .zip(scores)
        .enumerate()
        .map(|(place, (document, score))| (place + 1, *score, document))
        .collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked.truncate(top_k.unwrap_or(usize::MAX));
    ranked
        .into_iter()
        .map(|(rank, score, mut document)| {
            document.insert("rerank_score".into(), as_written(score).into());
            document.insert("original_rank".into(), rank.into());
            document
        })
        .collect()
}

/// The double that is written with the digits of the float, so that an answer says `0.845` and not
/// `0.8450000286102295`.
fn as_written(number: f32) -> f64 {
    number.to_string().parse().unwrap_or(f64::from(number))
}

fn store_error(error: StorageError) -> ProviderError {
    match error {
        StorageError::CollectionNotFound(name) => ProviderError::CollectionNotFound(name),
        StorageError::CollectionExists(name) => ProviderError::CollectionExists(name),
        StorageError::DimensionMismatch { .. } => InvalidInput::new(error.to_string()).into(),
        StorageError::Unsupported(message) => ProviderError::Unsupported(message),
        other => ProviderError::Storage(other),
    }
}

impl From<ServiceError> for ProviderError {
    fn from(error: ServiceError) -> Self {
        match error {
            ServiceError::Invalid(invalid) => invalid.into(),
            ServiceError::Model(error) => error.into(),
            ServiceError::Storage(error) => store_error(error),
            ServiceError::File { .. } | ServiceError::NoneSearched(_) | ServiceError::TooManyJobs { .. } => {
                store_error(StorageError::Failed(Box::new(error)))
            }
            ServiceError::NoModel { .. } => InvalidInput::new(capitalised(&error.to_string())).into(),
            ServiceError::ModelNotLoaded { model, available } => Self::ModelNotLoaded {
                model,
                // Already a list in words, and as one item it stays that.
                available: vec![available],
            },
            ServiceError::NoReranker | ServiceError::EmbeddingDisabled => {
                Self::Unsupported(error.to_string())
            }
        }
    }
}

fn capitalised(sentence: &str) -> String {
    let mut chars = sentence.chars();
    chars
        .next()
        .map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}
