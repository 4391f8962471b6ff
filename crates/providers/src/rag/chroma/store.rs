//! A ChromaDB server as the store of this service.
//!
//! What the provider makes up for (metadata, filters, totals, values) is shared with it. Beyond that
//! a store keeps every collection name (`naming`), the length and the model of every vector beside
//! its metadata (`codec`), ranks by words here (`keyword`), and says in [`LIMITATIONS`] what it
//! cannot promise.

mod keyword;
mod remembered;
mod search;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::model::ModelIdentity;
use ragstone_core::provider::{CallError, ProviderError};
use ragstone_core::storage::{
    Cursor, DocumentBatch, DocumentPage, Engine, ExportPage, ExportRange, ExportedDocument, MetadataUpdate,
    Page, SearchHits, Selection, Storage, StorageError, StorageHealth, StorageQuery, VectorPrecision,
};
use ragstone_core::vector::normalise;
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use secrecy::SecretString;
use serde_json::{Value, json};
use tokio::sync::MutexGuard;

use self::remembered::Remembered;
use super::api::{ChromaApi, CollectionRecord, Tenancy};
use super::naming::Naming;
use super::read::TEXT_PAGE;
use super::turns::Turns;
use super::write::Row;
use super::{Chroma, codec, default_database, default_tenant};
use crate::error::ConfigError;
use crate::http::{Auth, ClientSettings, Policy, ServiceClient};

pub(super) const LIMITATIONS: &[&str] = &[
    "Dense search is approximate: ChromaDB finds neighbours through an HNSW graph",
    "Keyword and hybrid search go through all texts of a collection, and are refused beyond 10000 documents",
    "A write of more documents than go into one request to ChromaDB (5461, or 16 MB, or 500 that are replaced) is not all or nothing",
    "What takes several requests (filtered pages, filtered deletes, values) may see parts of two states while others write",
    "Two processes that replace the same document at once may leave metadata of both",
    "Of two processes that merge metadata into a collection at once, what one of them merged may be lost",
    "Documents equally far from a query come in any order, not in that of their insertion",
    "An export from which documents are deleted meanwhile may leave others out",
    "Vectors come back with their last bits rounded",
    "How much ChromaDB stores is not known: storage_bytes is 0",
    "An emptied collection whose vectors change width is made anew, in two requests: what fails in between, or another process adds, is lost with it",
    "Jobs, agent memory, conversations and the embedding ledger are kept in the data directory of this process",
];

const ENGINE: Engine = Engine {
    name: "chromadb",
    limitations: LIMITATIONS,
    vectors: VectorPrecision::Rounded,
};

/// An answer with a page of vectors is larger than what services usually say.
const MAX_ANSWER_BYTES: u64 = 256 << 20;
/// About how large such an answer should be.
const EXPORT_BYTES: usize = 16 << 20;
/// About what a number of a vector, and a document without its vector, take in an answer.
const NUMBER_BYTES: usize = 12;
const DOCUMENT_BYTES: usize = 2048;
const DEADLINE: Duration = Duration::from_secs(20);
const SOON: Duration = Duration::from_secs(1);
/// Who asks whether the server answers does not want to wait for it.
const PROBE: Duration = Duration::from_millis(1500);
/// For one request with documents: of wide vectors, and beside other work, it may rightly take longer
/// than the 20 s that other calls have.
const WRITING: Duration = Duration::from_secs(120);

pub struct ChromaStore {
    chroma: Chroma,
    turns: Turns,
    remembered: Remembered,
}

impl ChromaStore {
    /// Connects to `chroma://HOST:PORT[/TENANT/DATABASE]`, or `chromas://` over TLS. Nothing is sent
    /// yet: a server that is not there now may come later.
    pub fn connect(url: &str, token: Option<SecretString>) -> Result<Self, ConfigError> {
        let problem = |message: &str| ConfigError::field("store", message);
        let (scheme, rest) = match url.split_once("://") {
            Some(("chroma", rest)) => ("http", rest),
            Some(("chromas", rest)) => ("https", rest),
            _ => return Err(problem("must be chroma://HOST:PORT or chromas://HOST:PORT")),
        };
        if rest.contains('@') {
            return Err(problem(
                "must not contain credentials: a token comes from RAGSTONE_CHROMA_TOKEN",
            ));
        }
        let mut parts = rest.split('/').filter(|part| !part.is_empty());
        let host = parts.next().ok_or_else(|| problem("must name a host"))?;
        let tenancy = match (parts.next(), parts.next(), parts.next()) {
            (None, ..) => Tenancy::check(&default_tenant(), &default_database())?,
            (Some(tenant), Some(database), None) => Tenancy::check(tenant, database)?,
            _ => return Err(problem("must have nothing after the host, or /TENANT/DATABASE")),
        };
        let mut settings = ClientSettings::new("chromadb", &format!("{scheme}://{host}"), "store")?;
        if let Some(token) = token {
            settings.auth = Auth::Bearer(token);
        }
        settings.policy = Policy {
            deadline: DEADLINE,
            max_attempts: 2,
            first_delay: Duration::from_millis(200),
            max_answer_bytes: MAX_ANSWER_BYTES,
            failures_to_open: 3,
            cooldown: Duration::from_secs(2),
            ..Policy::default()
        };
        Ok(Self {
            chroma: Chroma {
                api: ChromaApi::new(ServiceClient::new(settings)?, &tenancy, Naming::Wrapped),
                embedders: Arc::default(),
            },
            turns: Turns::new(),
            remembered: Remembered::default(),
        })
    }

    fn api(&self) -> &ChromaApi {
        &self.chroma.api
    }

    /// Until this is dropped, no other call of this process writes to the collection. Whoever has the turn
    /// may wait for a server that hangs, so it is not waited for longer than for the server itself.
    async fn turn(&self, name: &CollectionName) -> Result<MutexGuard<'_, ()>, StorageError> {
        tokio::time::timeout(DEADLINE, self.turns.take(name))
            .await
            .map_err(|_| StorageError::Unavailable {
                message: format!(
                    "Another write to collection '{name}' has been under way for {} s; try again soon",
                    DEADLINE.as_secs()
                ),
                retry_after: SOON,
            })
    }

    /// With its count.
    async fn described(&self, record: &CollectionRecord) -> Result<Collection, ProviderError> {
        Ok(with_count(record, self.api().count(record).await?))
    }

    /// The metadata of the first and of the last document, of one that is both twice.
    async fn first_and_last(&self, record: &CollectionRecord) -> Result<Vec<Metadata>, ProviderError> {
        let at = async |offset: u64| {
            let one = json!({"include": ["metadatas"], "limit": 1, "offset": offset});
            let found = self.api().get(record, &one).await?;
            Ok::<_, ProviderError>(found.metadatas.into_iter().flatten().next().flatten())
        };
        let last = async { at(self.api().count(record).await?.saturating_sub(1)).await };
        let (first, last) = tokio::try_join!(at(0), last)?;
        Ok(first.into_iter().chain(last).collect())
    }

    async fn write(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        let _turn = self.turn(name).await?;
        let mut record = self.api().collection(name).await.map_err(store_error)?;
        let Some(width) = documents.first().map(|moved| moved.vector.len()) else {
            return Ok(());
        };
        let mismatch = |expected, actual| StorageError::DimensionMismatch {
            collection: name.clone(),
            expected,
            actual,
        };
        if let Some(other) = documents.iter().find(|moved| moved.vector.len() != width) {
            return Err(mismatch(width, other.vector.len()));
        }
        if let Some(expected) = record.described.dimensions.filter(|expected| *expected != width) {
            if self.api().count(&record).await.map_err(store_error)? > 0 {
                return Err(mismatch(expected, width));
            }
            record = self.widen(&record).await.map_err(store_error)?;
        }
        let rows: Vec<Row> = documents.into_iter().map(row).collect();
        let stored = self.chroma.store(&record, &rows, Some(WRITING)).await;
        stored.map_err(store_error)
    }

    /// Chroma never forgets the width of a collection, not even of an empty one; so that one is made
    /// anew.
    async fn widen(&self, record: &CollectionRecord) -> Result<CollectionRecord, ProviderError> {
        let Collection { name, metadata, .. } = &record.described;
        self.api().delete_collection(name).await?;
        self.api().create_collection(name, metadata).await
    }

    async fn export_page(
        &self,
        name: &CollectionName,
        range: ExportRange,
    ) -> Result<ExportPage, ProviderError> {
        let record = self.api().collection(name).await?;
        let from = range.after.map_or(0, |place| place.0.saturating_add(1).max(0));
        let size = record.described.dimensions.unwrap_or_default() * NUMBER_BYTES + DOCUMENT_BYTES;
        let limit = range.limit.min(EXPORT_BYTES / size).max(1);
        let total = self.api().count(&record).await?;
        let records = self
            .api()
            .get(
                &record,
                &json!({"include": ["documents", "metadatas", "embeddings"], "limit": limit, "offset": from}),
            )
            .await?;
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
                let kept = Kept::read(metadata.as_ref());
                let document = self.chroma.read_document(id, text, metadata)?;
                let vector = vector.ok_or_else(|| self.api().bad_answer("a document without a vector"))?;
                Ok(kept.moved(document, vector))
            })
            .collect::<Result<Vec<_>, ProviderError>>()?;
        let end = from.saturating_add_unsigned(count as u64);
        Ok(ExportPage {
            documents,
            last: (count > 0).then(|| Cursor(end - 1)),
            more: count > 0 && end.unsigned_abs() < total,
        })
    }
}

/// What is kept of a vector beside it; nothing for documents that other clients wrote.
struct Kept {
    norm: Option<f32>,
    model: Option<ModelIdentity>,
}

impl Kept {
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

    fn moved(self, document: Document, mut vector: Vec<f32>) -> ExportedDocument {
        let norm = self.norm.unwrap_or_else(|| normalise(&mut vector));
        ExportedDocument {
            document,
            vector,
            norm,
            model: self.model,
        }
    }
}

/// An empty collection has no width: it takes vectors of any.
fn with_count(record: &CollectionRecord, count: u64) -> Collection {
    let described = record.described.clone();
    Collection {
        count,
        dimensions: described.dimensions.filter(|_| count > 0),
        ..described
    }
}

fn row(moved: ExportedDocument) -> Row {
    let mut kept = Metadata::new();
    kept.insert(codec::NORM.into(), f64::from(moved.norm).into());
    if let Some(model) = &moved.model {
        let text = json!([model.id, model.version, model.dimensions]).to_string();
        kept.insert(codec::MODEL.into(), text.into());
    }
    Row {
        document: moved.document,
        vector: moved.vector,
        kept,
    }
}

fn does_not_answer(retry_after: Duration) -> StorageError {
    StorageError::Unavailable {
        message: "The ChromaDB server that keeps the documents does not answer; try again soon".to_owned(),
        retry_after,
    }
}

/// A server that gives no answer may give one later; that the request was at fault, it says itself.
fn store_error(error: ProviderError) -> StorageError {
    match error {
        ProviderError::CollectionNotFound(name) => StorageError::CollectionNotFound(name),
        ProviderError::CollectionExists(name) => StorageError::CollectionExists(name),
        ProviderError::Invalid(invalid) => StorageError::Unsupported(invalid.message().to_owned()),
        ProviderError::Unsupported(message) => StorageError::Unsupported(message),
        ProviderError::Storage(error) => error,
        ProviderError::Call(call) => {
            tracing::warn!(error = %call, "the store gave no usable answer");
            match &call {
                CallError::Unreachable { .. } | CallError::DeadlineExceeded { .. } => does_not_answer(SOON),
                CallError::CircuitOpen { retry_after, .. } => does_not_answer(*retry_after),
                CallError::Answered(answer) if matches!(answer.status, 429 | 502..=504) => {
                    does_not_answer(answer.retry_after.unwrap_or(SOON))
                }
                CallError::Answered(answer) if matches!(answer.status, 401 | 403) => StorageError::Failed(
                    format!(
                        "ChromaDB answered with status {}: its token comes from RAGSTONE_CHROMA_TOKEN",
                        answer.status
                    )
                    .into(),
                ),
                CallError::Answered(answer) if answer.status == 413 => StorageError::Unsupported(
                    "A document is too large for ChromaDB: a request to it may have 40 MB".to_owned(),
                ),
                _ => StorageError::Failed(Box::new(call)),
            }
        }
        other => StorageError::Failed(Box::new(other)),
    }
}

#[async_trait]
impl Storage for ChromaStore {
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Collection, StorageError> {
        let created = self.api().create_collection(name, &metadata).await;
        Ok(created.map_err(store_error)?.described)
    }

    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        let mut collections = Vec::new();
        for record in self.api().collections().await.map_err(store_error)? {
            if record.described.name.is_internal() {
                continue;
            }
            // One that vanishes meanwhile is no longer there to be listed.
            match self.described(&record).await {
                Ok(collection) => collections.push(collection),
                Err(ProviderError::CollectionNotFound(_)) => {}
                Err(error) => return Err(store_error(error)),
            }
        }
        collections.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(collections)
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        let (record, count) = self
            .ask_of(name, |record| async move { self.api().count(&record).await })
            .await?;
        Ok(with_count(&record, count))
    }

    async fn vector_models(&self, name: &CollectionName) -> Result<Vec<ModelIdentity>, StorageError> {
        let (_, metadatas) = self
            .ask_of(name, |record| async move { self.first_and_last(&record).await })
            .await?;
        let mut models = Vec::new();
        for metadata in metadatas {
            let model = Kept::read(Some(&metadata)).model;
            models.extend(model.filter(|model| !models.contains(model)));
        }
        Ok(models)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError> {
        let _turn = self.turn(name).await?;
        self.chroma
            .change_metadata(name, metadata, update)
            .await
            .map_err(store_error)
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        let _turn = self.turn(name).await?;
        self.api().delete_collection(name).await.map_err(store_error)
    }

    async fn upsert(&self, name: &CollectionName, batch: DocumentBatch) -> Result<(), StorageError> {
        let documents = tokio::task::spawn_blocking(move || batch.normalised())
            .await
            .map_err(|error| StorageError::Failed(Box::new(error)))?;
        self.write(name, documents).await
    }

    async fn documents_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<Document>, StorageError> {
        let record = self.api().collection(name).await.map_err(store_error)?;
        let ids: Vec<String> = ids.iter().map(|id| id.as_str().to_owned()).collect();
        let found = self.chroma.documents_by_id(&record, &ids).await;
        found.map_err(store_error)
    }

    async fn models_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError> {
        let record = self.api().collection(name).await.map_err(store_error)?;
        let mut found = Vec::with_capacity(ids.len());
        for ids in ids.chunks(TEXT_PAGE) {
            let of_ids: Vec<&str> = ids.iter().map(DocumentId::as_str).collect();
            let request = json!({"ids": of_ids, "include": ["metadatas"]});
            let records = self.api().get(&record, &request).await.map_err(store_error)?;
            let metadatas = records.metadatas.unwrap_or_default();
            let models: HashMap<String, Option<ModelIdentity>> = records
                .ids
                .into_iter()
                .zip(metadatas)
                .map(|(id, metadata)| (id, Kept::read(metadata.as_ref()).model))
                .collect();
            let there = ids
                .iter()
                .filter_map(|id| Some((id.clone(), models.get(id.as_str())?.clone())));
            found.extend(there);
        }
        Ok(found)
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError> {
        self.chroma.page(name, filter, page).await.map_err(store_error)
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError> {
        let _turn = self.turn(name).await?;
        self.chroma.delete(name, selection).await.map_err(store_error)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, StorageError> {
        let _turn = self.turn(name).await?;
        let record = self.api().collection(name).await.map_err(store_error)?;
        self.api().delete_all(&record).await.map_err(store_error)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, StorageError> {
        self.chroma.values(name, field).await.map_err(store_error)
    }

    async fn search(&self, name: &CollectionName, request: StorageQuery) -> Result<SearchHits, StorageError> {
        self.find(name, request).await
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        self.export_page(name, range).await.map_err(store_error)
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        self.write(name, documents).await
    }

    async fn health(&self) -> Result<StorageHealth, StorageError> {
        let records = self.api().probe(PROBE).await.map_err(store_error)?;
        let shown = records
            .iter()
            .filter(|record| !record.described.name.is_internal());
        Ok(StorageHealth {
            collections: shown.count() as u64,
            storage_bytes: 0,
            engine: Some(ENGINE),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use ragstone_core::provider::ErrorAnswer;

    use super::*;

    #[test]
    fn where_the_token_comes_from_is_said_when_it_is_wanted() {
        let answer = ErrorAnswer {
            service: "chromadb".into(),
            status: 401,
            content_type: None,
            body: Vec::new(),
            retry_after: None,
        };
        let error = store_error(CallError::Answered(Box::new(answer)).into());
        let reason = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(reason.contains("RAGSTONE_CHROMA_TOKEN"), "{reason}");
    }

    #[test]
    fn an_address_with_credentials_is_told_where_the_token_comes_from() {
        let refused = ChromaStore::connect("chroma://ann:hunter2@host:8000", None);
        let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.contains("RAGSTONE_CHROMA_TOKEN"), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
}
