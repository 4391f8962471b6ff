//! What every backend over the network has in common: when an operation is over.

use std::sync::Arc;

use async_trait::async_trait;
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::provider::{
    Capability, Health, ProviderAnswer, ProviderError, ProviderQuery, RagProvider, Reranked,
};
use ragstone_core::storage::{DocumentPage, MetadataUpdate, Page, Selection};
use ragstone_core::{Collection, CollectionName, Filter, Metadata};
use serde_json::Value;

use crate::http::operation;

/// A backend whose operations have one deadline each, however many calls they take. Adding, deleting and
/// emptying are left out: they take as long as there are documents, and cut in the middle they would
/// leave half of them done. Of those, each call has the deadline.
pub(super) struct Operations(pub(super) Arc<dyn RagProvider>);

#[async_trait]
impl RagProvider for Operations {
    fn capabilities(&self) -> &'static [Capability] {
        self.0.capabilities()
    }

    async fn health(&self) -> Health {
        operation(self.0.health()).await
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, ProviderError> {
        operation(self.0.create_collection(name, metadata)).await
    }

    async fn collections(&self) -> Result<Vec<Collection>, ProviderError> {
        operation(self.0.collections()).await
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, ProviderError> {
        operation(self.0.collection(name)).await
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, ProviderError> {
        operation(self.0.update_metadata(name, metadata, update)).await
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), ProviderError> {
        operation(self.0.delete_collection(name)).await
    }

    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, ProviderError> {
        self.0.add_documents(name, documents).await
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, ProviderError> {
        operation(self.0.documents(name, filter, page)).await
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, ProviderError> {
        self.0.delete_documents(name, selection).await
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, ProviderError> {
        self.0.empty(name).await
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, ProviderError> {
        operation(self.0.metadata_values(name, field)).await
    }

    async fn search(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        operation(self.0.search(name, query)).await
    }

    async fn search_several(
        &self,
        names: &[CollectionName],
        query: ProviderQuery,
    ) -> Vec<Result<ProviderAnswer, ProviderError>> {
        operation(self.0.search_several(names, query)).await
    }

    async fn rerank(&self, query: &str, documents: Vec<Metadata>, top_k: Option<usize>) -> Reranked {
        operation(self.0.rerank(query, documents, top_k)).await
    }
}
