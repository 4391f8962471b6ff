//! A backend made of a storage engine and the models of this process.
//!
//! With the store of this server it is the backend `local`. With a storage engine behind the network,
//! such as ChromaDB, it is a service of the gateway.

pub(crate) mod search;

use std::time::{Duration, Instant};

use async_trait::async_trait;
use ragstone_core::backend::{Backend, BackendError, Capability, Health, HealthStatus, RankedText};
use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::document::{Added, Document, DocumentId, Metadata, NewDocument};
use ragstone_core::filter::Filter;
use ragstone_core::search::{SearchQuery, SearchResponse};
use ragstone_core::service::Service;
use ragstone_core::storage::{
    DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, Selection, StorageError,
    StorageHealth, VectorPrecision,
};
use serde_json::{Value, json};

use crate::documents;
use crate::vectors::QueryVectors;

pub(crate) const CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
    Capability::Rerank,
    Capability::KeywordSearch,
];

/// Capabilities with a storage engine behind the network. Keyword search works there for small
/// collections only, so nobody should choose it by default; reranking is that of this process.
const SERVICE_CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
];

/// Reranking stops after this long; the texts that were not scored by then keep their order.
const RERANK_BUDGET: Duration = Duration::from_secs(10);
/// Texts scored between two looks at the clock.
const RERANK_BATCH: usize = 16;

#[derive(Clone)]
pub struct StorageBackend {
    service: Service,
    vectors: QueryVectors,
    capabilities: &'static [Capability],
}

impl StorageBackend {
    /// The backend of this process.
    pub fn new(service: Service, vectors: QueryVectors) -> Self {
        Self {
            service,
            vectors,
            capabilities: CAPABILITIES,
        }
    }

    /// A service of the gateway.
    pub fn of_service(service: Service, vectors: QueryVectors) -> Self {
        Self {
            capabilities: SERVICE_CAPABILITIES,
            ..Self::new(service, vectors)
        }
    }

    pub fn service(&self) -> &Service {
        &self.service
    }

    pub fn vectors(&self) -> &QueryVectors {
        &self.vectors
    }

    fn details(&self, storage: Result<StorageHealth, StorageError>) -> Metadata {
        let mut details = Metadata::new();
        details.insert("version".into(), env!("CARGO_PKG_VERSION").into());
        match storage {
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
        details.extend(self.model_details());
        details
    }

    /// The models of this process, as facts of a health report.
    fn model_details(&self) -> Metadata {
        let mut details = Metadata::new();
        let models: Vec<Value> = self
            .service
            .models
            .embedders()
            .map(|embedder| {
                let info = embedder.info();
                json!({
                    "id": info.identity.id, "name": info.name, "status": "loaded",
                    "dimensions": info.identity.dimensions,
                })
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
}

#[async_trait]
impl Backend for StorageBackend {
    fn capabilities(&self) -> &'static [Capability] {
        self.capabilities
    }

    async fn health(&self) -> Health {
        if let Some(mut health) = self.service.store.service_health().await {
            health.details.extend(self.model_details());
            return health;
        }
        let start = Instant::now();
        let storage = self.service.store.health().await;
        let (status, message) = match &storage {
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
            details: self.details(storage),
        }
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, BackendError> {
        Ok(self
            .service
            .store
            .create_collection(name, metadata)
            .await?
            .metadata)
    }

    async fn collections(&self) -> Result<Vec<Collection>, BackendError> {
        Ok(self.service.store.collections().await?)
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, BackendError> {
        Ok(self.service.store.collection(name).await?)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, BackendError> {
        Ok(self.service.store.update_metadata(name, metadata, update).await?)
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), BackendError> {
        Ok(self.service.store.delete_collection(name).await?)
    }

    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, BackendError> {
        documents::add(&self.service, name, documents).await
    }

    async fn document(
        &self,
        name: &CollectionName,
        id: &DocumentId,
    ) -> Result<Option<Document>, BackendError> {
        Ok(self.service.store.document(name, id).await?)
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, BackendError> {
        Ok(self.service.store.documents(name, filter, page).await?)
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, BackendError> {
        Ok(self.service.store.delete_documents(name, selection).await?)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, BackendError> {
        Ok(self.service.store.empty(name).await?)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, BackendError> {
        Ok(self.service.store.metadata_values(name, field).await?)
    }

    async fn search_many(
        &self,
        names: &[CollectionName],
        queries: &[SearchQuery],
    ) -> Vec<Result<Vec<SearchResponse>, BackendError>> {
        self.search_collections(names, queries).await
    }

    async fn rerank(
        &self,
        query: &str,
        texts: Vec<String>,
        top_k: usize,
    ) -> Result<Vec<RankedText>, BackendError> {
        let reranker = self.service.models.reranker()?;
        let start = Instant::now();
        let mut ranked: Vec<RankedText> = Vec::with_capacity(texts.len());
        let mut texts = texts.into_iter();
        while ranked.is_empty() || start.elapsed() < RERANK_BUDGET {
            let batch: Vec<String> = texts.by_ref().take(RERANK_BATCH).collect();
            if batch.is_empty() {
                break;
            }
            let scores = reranker.score(query, batch, None).await?.scores;
            let first = ranked.len();
            let scored = scores.into_iter().enumerate();
            ranked.extend(scored.map(|(place, score)| RankedText {
                index: first + place,
                score,
            }));
        }
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score));
        ranked.truncate(top_k);
        Ok(ranked)
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, BackendError> {
        Ok(self.service.store.export(name, range).await?)
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), BackendError> {
        Ok(self.service.store.import(name, documents).await?)
    }

    async fn vector_precision(&self) -> Result<VectorPrecision, BackendError> {
        let engine = self.service.store.health().await?.engine;
        Ok(engine.map_or(VectorPrecision::Exact, |engine| engine.vectors))
    }
}
