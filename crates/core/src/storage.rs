//! The contract of a storage engine: collections, documents, vectors and keyword index.

use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;

use crate::backend::Health;
use crate::call::CallError;
use crate::collection::{Collection, CollectionName};
use crate::document::{Document, DocumentId, Metadata};
use crate::filter::Filter;
use crate::fusion::FusionWeights;
use crate::model::ModelIdentity;
use crate::search::{SearchHit, StageTime};
use crate::siblings::Expand;
use crate::vector::normalise;

/// Collections of documents with their vectors and keyword index.
///
/// Callers rely on this, whichever engine is behind it:
/// * A method that changes something has made it durable, and visible to every later call, when it
///   returns `Ok`. It changes all it was asked to or nothing.
/// * A method that reads sees the state before or after any write, never a mixture, and never waits
///   for a writer.
/// * Documents have an order: that of their first insertion. Replacing a document keeps its place.
#[async_trait]
pub trait Storage: Send + Sync {
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Collection, StorageError>;

    /// All collections, by name.
    async fn collections(&self) -> Result<Vec<Collection>, StorageError>;

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError>;

    /// The models that made the vectors of the first and of the last document, each once; vectors
    /// that clients brought have none. Adding texts never mixes models, so only a collection that is
    /// being ingested anew, or was imported so, can hold others.
    async fn vector_models(&self, name: &CollectionName) -> Result<Vec<ModelIdentity>, StorageError>;

    /// Returns the metadata as it now stands.
    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError>;

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError>;

    /// Adds documents, replacing those whose id exists. All vectors have one width, which is or
    /// becomes that of the collection. Ids are distinct.
    async fn upsert(&self, name: &CollectionName, batch: DocumentBatch) -> Result<(), StorageError>;

    async fn document(
        &self,
        name: &CollectionName,
        id: &DocumentId,
    ) -> Result<Option<Document>, StorageError> {
        let found = self.documents_by_id(name, std::slice::from_ref(id)).await?;
        Ok(found.into_iter().next())
    }

    /// Those of these documents that are there, in the order of their ids.
    async fn documents_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<Document>, StorageError>;

    /// What made the vectors of those of these documents that are there, in no particular order;
    /// `None` where a client brought the vector.
    async fn models_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError>;

    /// One page of the documents that match, in order, and how many match in all.
    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError>;

    /// Returns how many were really there.
    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError>;

    /// Deletes every document, keeps the collection and its metadata, and returns how many there were.
    async fn empty(&self, name: &CollectionName) -> Result<u64, StorageError>;

    /// The distinct scalars of a field: null, false, true, numbers ascending, then strings ascending.
    /// A list counts with each of its scalars.
    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, StorageError>;

    /// Searches one collection for several queries, all in one state of it. Each answer has the best
    /// `limit` documents that match the filter, however few match.
    async fn search_many(
        &self,
        name: &CollectionName,
        queries: Vec<StorageQuery>,
    ) -> Result<Vec<SearchHits>, StorageError>;

    /// [`Storage::search_many`] for one query.
    async fn search(&self, name: &CollectionName, query: StorageQuery) -> Result<SearchHits, StorageError> {
        let mut answers = self.search_many(name, vec![query]).await?;
        Ok(answers.pop().unwrap_or_default())
    }

    /// Documents with all that is kept of them, in order. Fewer than the limit may be given although
    /// more follow, where they are large; [`ExportPage::more`] tells.
    ///
    /// Each page is of one state, the pages together need not be: a document that is there from the
    /// first page to the last is given exactly once, as it is when its page is read; one that is
    /// added or deleted in between may be given or not.
    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError>;

    /// Adds documents as another store gave them, replacing those whose id exists. What is then
    /// exported is the same, to the last bit of every vector unless [`Engine::vectors`] says
    /// otherwise. Ids are distinct, vectors of one width
    /// and of length one.
    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError>;

    async fn health(&self) -> Result<StorageHealth, StorageError>;

    /// The health of the server behind the storage, where that server is a service of the gateway.
    async fn service_health(&self) -> Option<Health> {
        None
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetadataUpdate {
    Replace,
    /// Top-level keys given replace theirs; the others stay.
    Merge,
}

#[derive(Debug, Clone, Default)]
pub struct DocumentBatch {
    pub documents: Vec<StoredDocument>,
    /// What made the vectors; `None` where the client brought them.
    pub model: Option<ModelIdentity>,
}

/// A document with the vector it is found by.
#[derive(Debug, Clone)]
pub struct StoredDocument {
    pub document: Document,
    pub vector: Vec<f32>,
}

/// A document with all that a store keeps of it, to be moved to another one.
#[derive(Debug, Clone, PartialEq)]
pub struct ExportedDocument {
    pub document: Document,
    /// Of length one, as every store keeps it.
    pub vector: Vec<f32>,
    /// The length it was given with.
    pub norm: f32,
    /// What made the vector; `None` where the client brought it.
    pub model: Option<ModelIdentity>,
}

impl DocumentBatch {
    /// As the documents are kept. Takes a while for many.
    pub fn normalised(self) -> Vec<ExportedDocument> {
        let Self { documents, model } = self;
        documents
            .into_iter()
            .map(|StoredDocument { document, mut vector }| ExportedDocument {
                norm: normalise(&mut vector),
                document,
                vector,
                model: model.clone(),
            })
            .collect()
    }
}

/// Where a document stands in the order of its collection. It stays there while it is replaced, and
/// no other document ever gets its place. Of no meaning to another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor(pub i64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportRange {
    /// Only documents behind this place; all of them where there is none.
    pub after: Option<Cursor>,
    pub limit: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ExportPage {
    pub documents: Vec<ExportedDocument>,
    /// The place of the last of them.
    pub last: Option<Cursor>,
    /// Whether documents follow it.
    pub more: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    pub limit: usize,
    pub offset: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub struct DocumentPage {
    pub documents: Vec<Document>,
    pub total: u64,
}

#[derive(Debug, Clone)]
pub enum Selection {
    Ids(Vec<DocumentId>),
    Matching(Filter),
}

/// One ranking to compute. At least one of `vector` and `text` is given; with both, the two rankings
/// are fused.
#[derive(Debug, Clone, Default)]
pub struct StorageQuery {
    /// Rank by cosine distance to this vector.
    pub vector: Option<Vec<f32>>,
    /// Rank by BM25 of these words.
    pub text: Option<String>,
    pub filter: Filter,
    /// Only these documents; unknown ids are ignored.
    pub ids: Option<Vec<DocumentId>>,
    pub limit: usize,
    /// Leave out documents farther than this from `vector`.
    pub max_distance: Option<f32>,
    pub weights: FusionWeights,
    /// Also gather the siblings of every hit, from the same state.
    pub siblings: Option<SiblingsRequest>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SiblingsRequest {
    pub expand: Expand,
    /// Size limit for the siblings of all hits together.
    pub max_bytes: usize,
}

/// The result of one [`StorageQuery`].
#[derive(Debug, Clone, Default)]
pub struct SearchHits {
    /// Best first.
    pub hits: Vec<SearchHit>,
    /// The collection's metadata in the state that was searched.
    pub metadata: Metadata,
    /// The models that made the vectors of the first and of the last document, each once, in the state
    /// that was searched. Empty where the query has no vector.
    pub models: Vec<ModelIdentity>,
    /// Whether siblings were left out because of [`SiblingsRequest::max_bytes`].
    pub siblings_truncated: bool,
    pub timings: Vec<StageTime>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StorageHealth {
    pub collections: u64,
    /// 0 where the engine does not tell.
    pub storage_bytes: u64,
    /// `None` of the embedded store.
    pub engine: Option<Engine>,
}

/// An engine outside this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Engine {
    pub name: &'static str,
    /// What it refuses, or promises less than the embedded store does, a sentence each.
    pub limitations: &'static [&'static str],
    /// Whether vectors come back as they were given, to the last bit.
    pub vectors: VectorPrecision,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VectorPrecision {
    Exact,
    /// Their numbers may differ by a ten-millionth.
    Rounded,
}

#[derive(Debug, thiserror::Error)]
pub enum StorageError {
    #[error("Collection '{0}' not found")]
    CollectionNotFound(CollectionName),
    #[error("Collection '{0}' already exists")]
    CollectionExists(CollectionName),
    #[error(
        "Embedding dimension mismatch: collection '{collection}' holds vectors of {expected} numbers, these have {actual}"
    )]
    DimensionMismatch {
        collection: CollectionName,
        expected: usize,
        actual: usize,
    },
    /// The engine cannot do this, now or later.
    #[error("{0}")]
    Unsupported(String),
    /// The engine refuses for now; the same call may succeed later.
    #[error("{message}")]
    Unavailable { message: String, retry_after: Duration },
    /// A storage engine behind a network service gave no usable answer.
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("the store failed")]
    Failed(#[source] Box<dyn std::error::Error + Send + Sync>),
}
