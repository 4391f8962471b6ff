//! A backend that fails, or rounds vectors.

use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use ragstone_core::backend::{Backend, BackendError, Capability, Health, RankedText};
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::search::{SearchQuery, SearchResponse};
use ragstone_core::storage::{
    DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, Selection, StorageError,
    VectorPrecision,
};
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::Value;

pub(super) struct Faulty<'a> {
    inner: &'a dyn Backend,
    exports_left: AtomicU64,
    imports_left: AtomicU64,
    rounding: Option<f32>,
}

impl<'a> Faulty<'a> {
    /// Stops working after so many calls of a kind.
    pub(super) fn failing_after(inner: &'a dyn Backend, exports: u64, imports: u64) -> Self {
        Self {
            inner,
            exports_left: AtomicU64::new(exports),
            imports_left: AtomicU64::new(imports),
            rounding: None,
        }
    }

    /// Changes the first number of every vector by this much.
    pub(super) fn rounding(inner: &'a dyn Backend, by: f32) -> Self {
        Self {
            rounding: Some(by),
            ..Self::failing_after(inner, u64::MAX, u64::MAX)
        }
    }
}

fn count_down(left: &AtomicU64) -> Result<(), BackendError> {
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1))
        .map(|_| ())
        .map_err(|_| StorageError::Failed("out of order".into()).into())
}

#[async_trait]
impl Backend for Faulty<'_> {
    fn capabilities(&self) -> &'static [Capability] {
        self.inner.capabilities()
    }
    async fn health(&self) -> Health {
        self.inner.health().await
    }
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, BackendError> {
        self.inner.create_collection(name, metadata).await
    }
    async fn collections(&self) -> Result<Vec<Collection>, BackendError> {
        self.inner.collections().await
    }
    async fn collection(&self, name: &CollectionName) -> Result<Collection, BackendError> {
        self.inner.collection(name).await
    }
    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, BackendError> {
        self.inner.update_metadata(name, metadata, update).await
    }
    async fn delete_collection(&self, name: &CollectionName) -> Result<(), BackendError> {
        self.inner.delete_collection(name).await
    }
    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, BackendError> {
        self.inner.add_documents(name, documents).await
    }
    async fn document(
        &self,
        name: &CollectionName,
        id: &DocumentId,
    ) -> Result<Option<Document>, BackendError> {
        self.inner.document(name, id).await
    }
    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, BackendError> {
        self.inner.documents(name, filter, page).await
    }
    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, BackendError> {
        self.inner.delete_documents(name, selection).await
    }
    async fn empty(&self, name: &CollectionName) -> Result<u64, BackendError> {
        self.inner.empty(name).await
    }
    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, BackendError> {
        self.inner.metadata_values(name, field).await
    }
    async fn search_many(
        &self,
        names: &[CollectionName],
        queries: &[SearchQuery],
    ) -> Vec<Result<Vec<SearchResponse>, BackendError>> {
        self.inner.search_many(names, queries).await
    }
    async fn rerank(
        &self,
        query: &str,
        texts: Vec<String>,
        top_k: usize,
    ) -> Result<Vec<RankedText>, BackendError> {
        self.inner.rerank(query, texts, top_k).await
    }
    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, BackendError> {
        count_down(&self.exports_left)?;
        let mut page = self.inner.export(name, range).await?;
        for exported in &mut page.documents {
            exported.vector[0] += self.rounding.unwrap_or(0.0);
        }
        Ok(page)
    }
    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), BackendError> {
        count_down(&self.imports_left)?;
        self.inner.import(name, documents).await
    }
    async fn vector_precision(&self) -> Result<VectorPrecision, BackendError> {
        match self.rounding {
            Some(_) => Ok(VectorPrecision::Rounded),
            None => self.inner.vector_precision().await,
        }
    }
}
