//! The contract of a RAG backend: this process, another Ragstone server, or another database.

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value;

use crate::call::CallError;
use crate::collection::{Collection, CollectionName};
use crate::document::{Added, Document, DocumentId, Metadata, NewDocument};
use crate::error::InvalidInput;
use crate::filter::Filter;
use crate::model::ModelError;
use crate::search::{SearchQuery, SearchResponse};
use crate::storage::{
    DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, Selection, StorageError,
    VectorPrecision,
};

/// Collections that can be filled, searched, exported and imported.
///
/// Callers rely on this, whichever backend is behind it:
/// * Filters mean what [`Filter::matches`] says, and are applied before any limit. `total` is exact.
/// * Documents come back as they were added: text, metadata of any JSON shape, order of insertion
///   where the backend keeps one.
/// * A feature that the backend lacks is emulated with the same results or refused as
///   [`BackendError::Unsupported`]. Results never differ silently.
/// * Every operation ends within the timeout configured for the backend. Adding, deleting and emptying
///   are exempt because they take as long as there are documents; each of their requests has the
///   timeout. Dropping the future cancels the operation.
#[async_trait]
pub trait Backend: Send + Sync {
    /// Capabilities of this kind of backend. Those of one instance are in [`Health::capabilities`].
    fn capabilities(&self) -> &'static [Capability];

    /// Never fails: a backend that is down is [`HealthStatus::Unhealthy`].
    async fn health(&self) -> Health;

    /// Returns the metadata as stored.
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, BackendError>;

    /// All collections, by name.
    async fn collections(&self) -> Result<Vec<Collection>, BackendError>;

    async fn collection(&self, name: &CollectionName) -> Result<Collection, BackendError>;

    /// Returns the metadata after the update.
    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, BackendError>;

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), BackendError>;

    /// Adds documents, replacing those whose id exists. The collection's model embeds documents
    /// without a vector; either all documents have one or none has.
    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, BackendError>;

    async fn document(
        &self,
        name: &CollectionName,
        id: &DocumentId,
    ) -> Result<Option<Document>, BackendError>;

    /// One page of the documents that match, and how many match in all.
    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, BackendError>;

    /// Returns how many documents existed.
    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, BackendError>;

    /// Deletes every document, keeps the collection and its metadata, and returns how many there were.
    async fn empty(&self, name: &CollectionName) -> Result<u64, BackendError>;

    /// The distinct scalars of a field: null, false, true, numbers ascending, then strings ascending.
    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, BackendError>;

    /// Searches several collections for several queries: for each collection, in order, the responses
    /// to the queries, in order.
    async fn search_many(
        &self,
        names: &[CollectionName],
        queries: &[SearchQuery],
    ) -> Vec<Result<Vec<SearchResponse>, BackendError>>;

    /// [`Backend::search_many`] for one collection and one query.
    async fn search(
        &self,
        name: &CollectionName,
        query: SearchQuery,
    ) -> Result<SearchResponse, BackendError> {
        let answers = self
            .search_many(std::slice::from_ref(name), std::slice::from_ref(&query))
            .await;
        let responses = answers.into_iter().next().unwrap_or_else(|| Ok(Vec::new()))?;
        Ok(responses.into_iter().next().unwrap_or_default())
    }

    /// Scores texts with the backend's cross-encoder and returns the best `top_k`, best first. Fewer come
    /// back where the time for reranking ran out; the texts at the front of the list are scored first.
    async fn rerank(
        &self,
        query: &str,
        texts: Vec<String>,
        top_k: usize,
    ) -> Result<Vec<RankedText>, BackendError>;

    /// One page of documents with their vectors, in insertion order. See [`crate::storage::Storage::export`].
    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, BackendError>;

    /// Adds exported documents, replacing those whose id exists.
    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), BackendError>;

    /// Whether imported vectors are exported again to the last bit.
    async fn vector_precision(&self) -> Result<VectorPrecision, BackendError>;
}

/// A text's place in the list that was reranked, counted from 0, and its score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RankedText {
    pub index: usize,
    pub score: f32,
}

/// One kind of operation a backend offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Capability {
    Collections,
    Search,
    Embeddings,
    MetadataFiltering,
    Rerank,
    /// Keyword and hybrid search.
    KeywordSearch,
}

/// The health of a backend.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Health {
    pub status: HealthStatus,
    pub message: String,
    /// RFC 3339, UTC.
    pub timestamp: String,
    pub latency_ms: f64,
    /// Known facts: `version`, `collections_count`, `storage_bytes`, `store`, `embedding_models`,
    /// `cross_encoder`, `error`.
    pub details: Metadata,
}

impl Health {
    /// The capabilities of this instance: without a model it neither embeds nor reranks. Nothing is
    /// known of a backend that does not answer, so it keeps those of its kind.
    pub fn capabilities(&self, of_its_kind: &[Capability]) -> Vec<Capability> {
        let has = |fact: &str| self.status == HealthStatus::Unhealthy || self.details.contains_key(fact);
        of_its_kind
            .iter()
            .copied()
            .filter(|capability| match capability {
                Capability::Embeddings => has("embedding_models"),
                Capability::Rerank => has("cross_encoder"),
                _ => true,
            })
            .collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthStatus {
    Healthy,
    /// It answers, but part of it does not work.
    Degraded,
    Unhealthy,
}

/// Why a backend did not do what was asked. Messages are safe to show to the client and never contain
/// a secret.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    #[error("Collection '{0}' not found")]
    CollectionNotFound(CollectionName),
    #[error("Collection '{0}' already exists")]
    CollectionExists(CollectionName),
    /// The request breaks a rule; nothing was sent.
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
    /// This kind of backend cannot do it.
    #[error("{0}")]
    Unsupported(String),
    #[error("Collection '{collection}' has no embedding_model in metadata. Available models: {available}")]
    NoModel {
        collection: CollectionName,
        available: String,
    },
    #[error("Embedding model '{model}' not loaded. Available models: {available}")]
    ModelNotLoaded { model: String, available: String },
    #[error("Cross-encoder not loaded. Start server with --cross-encoder flag.")]
    NoReranker,
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The storage engine of this process failed.
    #[error(transparent)]
    Storage(StorageError),
    #[error(transparent)]
    Call(#[from] CallError),
}

impl BackendError {
    /// The message without details that belong in the log only.
    pub fn public(&self) -> String {
        match self {
            Self::Call(error) => error.public(),
            other => other.to_string(),
        }
    }
}

impl From<StorageError> for BackendError {
    fn from(error: StorageError) -> Self {
        match error {
            StorageError::CollectionNotFound(name) => Self::CollectionNotFound(name),
            StorageError::CollectionExists(name) => Self::CollectionExists(name),
            StorageError::DimensionMismatch { .. } => InvalidInput::new(error.to_string()).into(),
            StorageError::Unsupported(message) => Self::Unsupported(message),
            StorageError::Call(error) => Self::Call(error),
            other => Self::Storage(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_can_do_what_it_has_models_for() {
        let all = [Capability::Search, Capability::Embeddings, Capability::Rerank];
        let mut health = Health {
            status: HealthStatus::Healthy,
            message: String::new(),
            timestamp: String::new(),
            latency_ms: 0.0,
            details: Metadata::from_iter([("cross_encoder".to_owned(), Value::Null)]),
        };
        assert_eq!(
            health.capabilities(&all),
            [Capability::Search, Capability::Rerank]
        );
        health.status = HealthStatus::Unhealthy;
        assert_eq!(health.capabilities(&all), all);
    }

    #[test]
    fn capabilities_and_states_have_their_wire_names() {
        assert_eq!(
            serde_json::to_value([Capability::MetadataFiltering, Capability::KeywordSearch]).unwrap(),
            serde_json::json!(["metadata_filtering", "keyword_search"])
        );
        assert_eq!(serde_json::to_value(HealthStatus::Degraded).unwrap(), "degraded");
    }
}
