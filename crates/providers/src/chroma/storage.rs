//! [`Storage`] over a ChromaDB server.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::{StreamExt, TryStreamExt};
use ragstone_core::backend::{Health, HealthStatus};
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{
    Cursor, DocumentBatch, DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page,
    SearchHits, Selection, Storage, StorageError, StorageHealth, StorageQuery,
};
use ragstone_core::vector::normalise;
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::api::CollectionRecord;
use super::read::TEXT_PAGE;
use super::write::Incoming;
use super::{ChromaStorage, ENGINE, Purpose, codec};
use crate::health::{HealthCheck, with_failed_request};
use crate::http::operation;

/// How many collections are counted concurrently.
const CONCURRENT_COUNTS: usize = 16;
/// Target size of an export page.
const EXPORT_BYTES: usize = 16 << 20;
/// Estimated size of a number of a vector, and of a document without its vector, in an answer.
const NUMBER_BYTES: usize = 12;
const DOCUMENT_BYTES: usize = 2048;
/// Timeout of a health check of the default store.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1500);
/// How far the squared length of a vector may be from one to count as normalised.
const UNIT_TOLERANCE: f64 = 1e-3;

impl ChromaStorage {
    /// An empty collection of the default store accepts vectors of any width, because it can be recreated.
    fn with_count(&self, record: &CollectionRecord, count: u64) -> Collection {
        let described = record.described.clone();
        let keeps_width = count > 0 || self.purpose == Purpose::Service;
        Collection {
            count,
            dimensions: described.dimensions.filter(|_| keeps_width),
            ..described
        }
    }

    /// `None` for a collection that was deleted meanwhile.
    async fn counted(&self, record: CollectionRecord) -> Result<Option<Collection>, StorageError> {
        match self.api.count(&record).await {
            Ok(count) => Ok(Some(self.with_count(&record, count))),
            Err(StorageError::CollectionNotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn list(&self) -> Result<Vec<Collection>, StorageError> {
        // A loop, because the compiler does not accept a closure here.
        let mut counts = Vec::new();
        for record in self.api.collections().await? {
            if !record.described.name.is_internal() {
                counts.push(self.counted(record));
            }
        }
        let mut collections: Vec<Collection> = futures::stream::iter(counts)
            .buffer_unordered(CONCURRENT_COUNTS)
            .try_filter_map(async |collection| Ok(collection))
            .try_collect()
            .await?;
        collections.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(collections)
    }

    async fn change_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError> {
        let record = self.api.collection(name).await?;
        let metadata = match update {
            MetadataUpdate::Replace => metadata,
            MetadataUpdate::Merge => {
                let mut merged = record.described.metadata.clone();
                merged.extend(metadata);
                merged
            }
        };
        self.api.replace_metadata(&record, &metadata).await?;
        Ok(metadata)
    }

    /// The models of the first and of the last document, each once.
    pub(super) async fn models_at_both_ends(
        &self,
        record: &CollectionRecord,
    ) -> Result<Vec<ModelIdentity>, StorageError> {
        let at = async |offset: u64| {
            let one = json!({"include": ["metadatas"], "limit": 1, "offset": offset});
            let found = self.api.get(record, &one).await?;
            let metadata = found.metadatas.into_iter().flatten().next().flatten();
            Ok::<_, StorageError>(Origin::read(metadata.as_ref()).model)
        };
        let last = async { at(self.api.count(record).await?.saturating_sub(1)).await };
        let (first, last) = tokio::try_join!(at(0), last)?;
        let mut models: Vec<ModelIdentity> = first.into_iter().chain(last).collect();
        models.dedup();
        Ok(models)
    }

    async fn models_of(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError> {
        let record = self.api.collection(name).await?;
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(TEXT_PAGE) {
            let requested: Vec<&str> = ids.iter().map(DocumentId::as_str).collect();
            let request = json!({"ids": requested, "include": ["metadatas"]});
            let records = self.api.get(&record, &request).await?;
            let metadatas = records.metadatas.unwrap_or_default();
            let models: HashMap<String, Option<ModelIdentity>> = records
                .ids
                .into_iter()
                .zip(metadatas)
                .map(|(id, metadata)| (id, Origin::read(metadata.as_ref()).model))
                .collect();
            let existing = ids
                .iter()
                .filter_map(|id| Some((id.clone(), models.get(id.as_str())?.clone())));
            found.extend(existing);
        }
        Ok(found)
    }

    async fn export_page(
        &self,
        name: &CollectionName,
        range: ExportRange,
    ) -> Result<ExportPage, StorageError> {
        let record = self.api.collection(name).await?;
        let from = range.after.map_or(0, |cursor| cursor.0.saturating_add(1).max(0));
        let size = record.described.dimensions.unwrap_or_default() * NUMBER_BYTES + DOCUMENT_BYTES;
        let limit = range.limit.min(EXPORT_BYTES / size).max(1);
        let total = self.api.count(&record).await?;
        let request =
            json!({"include": ["documents", "metadatas", "embeddings"], "limit": limit, "offset": from});
        let records = self.api.get(&record, &request).await?;
        let count = records.ids.len();
        let texts = records.documents.unwrap_or_else(|| vec![None; count]);
        let metadatas = records.metadatas.unwrap_or_else(|| vec![None; count]);
        let vectors = records.embeddings.unwrap_or_else(|| vec![None; count]);
        let documents = records
            .ids
            .into_iter()
            .zip(texts)
            .zip(metadatas.into_iter().zip(vectors))
            .map(|((id, text), (metadata, vector))| {
                let origin = Origin::read(metadata.as_ref());
                let document = self.read_document(id, text, metadata)?;
                let vector = vector.ok_or_else(|| self.api.bad_answer("a document lacks its vector"))?;
                Ok(origin.exported(document, vector))
            })
            .collect::<Result<Vec<_>, StorageError>>()?;
        let end = from.saturating_add_unsigned(count as u64);
        Ok(ExportPage {
            documents,
            last: (count > 0).then(|| Cursor(end - 1)),
            more: count > 0 && end.unsigned_abs() < total,
        })
    }
}

/// The length and model of a vector, as recorded beside it. Documents of other clients have neither.
struct Origin {
    norm: Option<f32>,
    model: Option<ModelIdentity>,
}

impl Origin {
    fn read(metadata: Option<&Metadata>) -> Self {
        let get = |key: &str| metadata.and_then(|metadata| metadata.get(key));
        let model = get(codec::MODEL).and_then(Value::as_str);
        let model: Option<(String, String, usize)> = model.and_then(|text| serde_json::from_str(text).ok());
        Self {
            norm: get(codec::NORM).and_then(Value::as_f64).map(|norm| norm as f32),
            model: model.map(|(id, version, dimensions)| ModelIdentity {
                id,
                version,
                dimensions,
            }),
        }
    }

    fn exported(self, document: Document, mut vector: Vec<f32>) -> ExportedDocument {
        let square: f64 = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        let is_unit = (square - 1.0).abs() <= UNIT_TOLERANCE;
        let norm = match self.norm {
            Some(norm) if is_unit => norm,
            // Written, or changed since, by another client.
            _ => normalise(&mut vector),
        };
        ExportedDocument {
            document,
            vector,
            norm,
            model: self.model,
        }
    }
}

#[async_trait]
impl Storage for ChromaStorage {
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Collection, StorageError> {
        let created = self.run(self.api.create_collection(name, &metadata)).await?;
        Ok(created.described)
    }

    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        self.run(self.list()).await
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        let count = |record: Arc<CollectionRecord>| async move { self.api.count(&record).await };
        let (record, count) = self.run(self.with_collection(name, count)).await?;
        Ok(self.with_count(&record, count))
    }

    async fn vector_models(&self, name: &CollectionName) -> Result<Vec<ModelIdentity>, StorageError> {
        let models = |record: Arc<CollectionRecord>| async move { self.models_at_both_ends(&record).await };
        let (_, models) = self.run(self.with_collection(name, models)).await?;
        Ok(models)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError> {
        let _lock = self.lock(&self.metadata_locks, name).await?;
        self.run(self.change_metadata(name, metadata, update)).await
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        let _lock = match self.purpose {
            Purpose::DefaultStore => Some(self.lock(&self.document_locks, name).await?),
            Purpose::Service => None,
        };
        self.run(self.api.delete_collection(name)).await
    }

    async fn upsert(&self, name: &CollectionName, batch: DocumentBatch) -> Result<(), StorageError> {
        let DocumentBatch { documents, model } = batch;
        let documents = documents.into_iter().map(|stored| Incoming {
            document: stored.document,
            vector: stored.vector,
            norm: None,
            model: model.clone(),
        });
        let written = self.write(name, documents.collect()).await;
        written.map_err(|error| self.error(error))
    }

    async fn documents_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<Document>, StorageError> {
        let ids: Vec<String> = ids.iter().map(|id| id.as_str().to_owned()).collect();
        let found = async {
            let record = self.api.collection(name).await?;
            self.fetch(&record, &ids).await
        };
        self.run(found).await
    }

    async fn models_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError> {
        self.run(self.models_of(name, ids)).await
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError> {
        self.run(self.page(name, filter, page)).await
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError> {
        let _lock = self.lock(&self.document_locks, name).await?;
        let deleted = self.delete(name, selection).await;
        deleted.map_err(|error| self.error(error))
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, StorageError> {
        let everything = Selection::Matching(Filter::everything());
        self.delete_documents(name, everything).await
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, StorageError> {
        self.run(self.values(name, field)).await
    }

    async fn search_many(
        &self,
        name: &CollectionName,
        queries: Vec<StorageQuery>,
    ) -> Result<Vec<SearchHits>, StorageError> {
        self.run(self.find(name, queries)).await
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        self.run(self.export_page(name, range)).await
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        let documents = documents.into_iter().map(Incoming::from).collect();
        let written = self.write(name, documents).await;
        written.map_err(|error| self.error(error))
    }

    async fn health(&self) -> Result<StorageHealth, StorageError> {
        let records = match self.purpose {
            Purpose::DefaultStore => self.run(self.api.probe(PROBE_TIMEOUT)).await?,
            Purpose::Service => self.run(self.api.collections()).await?,
        };
        let visible = records
            .iter()
            .filter(|record| !record.described.name.is_internal());
        Ok(StorageHealth {
            collections: visible.count() as u64,
            storage_bytes: 0,
            engine: Some(ENGINE),
        })
    }

    async fn service_health(&self) -> Option<Health> {
        match self.purpose {
            Purpose::DefaultStore => None,
            Purpose::Service => Some(operation(self.check_service()).await),
        }
    }
}

impl ChromaStorage {
    async fn check_service(&self) -> Health {
        let check = HealthCheck::start();
        let version = match self.api.version().await {
            Ok(version) => version,
            Err(error) => return check.failed(&error),
        };
        let mut details = Metadata::new();
        details.insert("version".into(), version.into());
        match self.api.count_collections().await {
            Ok(count) => {
                details.insert("collections_count".into(), count.into());
                check.answered(HealthStatus::Healthy, "the server is healthy", details)
            }
            // The server is up, but its tenant or database does not work. A missing one makes it useless.
            Err(error) => {
                details.insert("error".into(), error.to_string().into());
                let status = match error.status() {
                    Some(404) => HealthStatus::Unhealthy,
                    _ => HealthStatus::Degraded,
                };
                let health = check.answered(status, &error.to_string(), details);
                with_failed_request(health, &error)
            }
        }
    }
}
