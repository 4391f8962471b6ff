use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::backoff::Backoff;
use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::document::{Document, DocumentId, Metadata};
use ragstone_core::filter::Filter;
use ragstone_core::model::{
    CallLimits, EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, ModelInfo, Role,
};
use ragstone_core::records::{Applied, Millis, Record, RecordChange, RecordCounts, RecordRange, Records};
use ragstone_core::storage::{
    DocumentBatch, DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, SearchHits,
    Selection, Storage, StorageError, StorageHealth, StorageQuery,
};
use ragstone_store::{SqliteStore, StoreOptions};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::{Barrier, Semaphore};

use crate::{Buffer, BufferOptions, Memory, MemoryEntry, MemoryKind, MemoryStatus};
use ragstone_core::models::Models;
use ragstone_core::service::Service;

pub(super) const WIDTH: usize = 64;

/// A vector with one axis per letter pair, so that texts which share words are near each other.
pub(super) fn vector(text: &str) -> Vec<f32> {
    let mut vector = vec![0.01; WIDTH];
    for word in text
        .to_lowercase()
        .split(|c: char| !c.is_alphanumeric())
        .filter(|w| !w.is_empty())
    {
        let hash = word.bytes().fold(7usize, |hash, byte| {
            hash.wrapping_mul(31).wrapping_add(byte.into())
        });
        vector[hash % WIDTH] += 1.0;
    }
    vector
}

pub(super) enum Reply {
    Fail(ModelError),
    Panic,
    Answer,
    /// Refuses every call in which this text is.
    Refuse(&'static str),
}

/// Remembers every call, and answers the first ones as scripted.
pub(super) struct StubEmbedder {
    info: ModelInfo,
    calls: Mutex<Vec<Vec<String>>>,
    script: Mutex<VecDeque<Reply>>,
    refused: Mutex<Option<&'static str>>,
    limits: CallLimits,
    /// A call needs one of these to be answered.
    gate: Semaphore,
}

impl StubEmbedder {
    pub(super) fn new() -> Arc<Self> {
        Self::of_version("stub-1")
    }

    pub(super) fn of_version(version: &str) -> Arc<Self> {
        Arc::new(Self {
            info: ModelInfo {
                identity: ModelIdentity {
                    id: "memory".into(),
                    version: version.into(),
                    dimensions: WIDTH,
                },
                name: "stub".into(),
                max_tokens: None,
            },
            calls: Mutex::default(),
            script: Mutex::default(),
            refused: Mutex::default(),
            limits: CallLimits::NONE,
            gate: Semaphore::new(Semaphore::MAX_PERMITS),
        })
    }

    /// The same version of the model, but with longer vectors.
    pub(super) fn wider() -> Arc<Self> {
        let mut stub = Self::new();
        Arc::get_mut(&mut stub).unwrap().info.identity.dimensions = 2 * WIDTH;
        stub
    }

    pub(super) fn limited(limits: CallLimits) -> Arc<Self> {
        let mut stub = Self::new();
        Arc::get_mut(&mut stub).unwrap().limits = limits;
        stub
    }

    /// Answers only as many calls as are let through.
    pub(super) fn gated() -> Arc<Self> {
        let stub = Self::new();
        stub.hold_back();
        stub
    }

    /// Answers nothing until it is let through.
    pub(super) fn hold_back(&self) {
        self.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub(super) fn let_through(&self, calls: usize) {
        self.gate.add_permits(calls);
    }

    pub(super) fn reply(&self, replies: impl IntoIterator<Item = Reply>) {
        self.script.lock().unwrap().extend(replies);
    }

    pub(super) fn calls(&self) -> Vec<Vec<String>> {
        self.calls.lock().unwrap().clone()
    }

    pub(super) fn texts(&self) -> Vec<String> {
        self.calls().concat()
    }

    /// Waits until so many calls have been made.
    pub(super) async fn called(&self, calls: usize) {
        until(|| async { self.calls().len() >= calls }).await;
    }
}

#[async_trait]
impl Embedder for StubEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn limits(&self) -> CallLimits {
        self.limits
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        let texts: Vec<String> = inputs
            .into_iter()
            .map(|input| match input {
                EmbedInput::Text(text) => text,
                EmbedInput::Tokens(_) => unreachable!("memory sends texts"),
            })
            .collect();
        self.calls.lock().unwrap().push(texts.clone());
        self.gate.acquire().await.unwrap().forget();
        match self.script.lock().unwrap().pop_front() {
            Some(Reply::Fail(error)) => return Err(error),
            Some(Reply::Panic) => panic!("the embedder has a defect"),
            Some(Reply::Refuse(text)) => *self.refused.lock().unwrap() = Some(text),
            Some(Reply::Answer) | None => {}
        }
        if self
            .refused
            .lock()
            .unwrap()
            .is_some_and(|refused| texts.iter().any(|text| text == refused))
        {
            return Err(ModelError::InvalidInput("this text cannot be read".into()));
        }
        let embedding = |text: &String| {
            let mut vector = vector(text);
            vector.resize(self.info.identity.dimensions, 0.0);
            Embedding {
                vector,
                tokens: 1,
                truncated: false,
            }
        };
        Ok(texts.iter().map(embedding).collect())
    }
}

/// Quick enough for tests, and otherwise like the real thing.
pub(super) fn quick() -> BufferOptions {
    BufferOptions {
        batch: 8,
        parallel: 2,
        batch_window: Duration::from_millis(10),
        poll_interval: Duration::from_millis(20),
        backoff: Backoff {
            max_attempts: 3,
            first_delay: Duration::from_millis(5),
            max_delay: Duration::from_millis(20),
            jitter: 0.25,
        },
        ..BufferOptions::default()
    }
}

pub(super) struct Home {
    pub(super) store: Arc<SqliteStore>,
    _folder: Arc<TempDir>,
}

impl Home {
    pub(super) fn new() -> Self {
        let folder = Arc::new(tempfile::tempdir().unwrap());
        let store = SqliteStore::open(folder.path(), StoreOptions::default()).unwrap();
        Self {
            store: Arc::new(store),
            _folder: folder,
        }
    }

    pub(super) fn records(&self) -> Arc<dyn Records> {
        self.store.clone()
    }

    pub(super) fn service(&self) -> Service {
        Service {
            store: self.store.clone(),
            models: Arc::new(Models::default()),
        }
    }

    pub(super) fn embedding(&self, embedder: &Arc<StubEmbedder>, options: BufferOptions) -> (Memory, Buffer) {
        let buffer = Buffer::start(self.records(), self.store.clone(), embedder.clone(), options);
        let memory = Memory::with_embedding(self.records(), self.store.clone(), buffer.clone());
        (memory, buffer)
    }

    pub(super) async fn plain(&self) -> Memory {
        Memory::without_embedding(self.records(), self.store.clone())
            .await
            .unwrap()
    }

    /// The ids that have a vector of this kind.
    pub(super) async fn vectors(&self, kind: MemoryKind) -> Vec<String> {
        let page = Page {
            limit: 1000,
            offset: 0,
        };
        match self
            .store
            .documents(&kind.vectors(), &Filter::everything(), page)
            .await
        {
            Ok(page) => page
                .documents
                .into_iter()
                .map(|document| document.id.into_string())
                .collect(),
            Err(StorageError::CollectionNotFound(_)) => Vec::new(),
            Err(error) => panic!("{error}"),
        }
    }
}

pub(super) fn knowledge(content: &str) -> MemoryEntry {
    MemoryEntry::Knowledge {
        content: content.into(),
        category: None,
    }
}

pub(super) fn observation(session: &str, content: &str) -> MemoryEntry {
    MemoryEntry::Observation {
        session_key: session.into(),
        content: content.into(),
    }
}

pub(super) fn id(id: &str) -> Option<DocumentId> {
    Some(DocumentId::parse(id).unwrap())
}

/// Waits for something that will certainly become true.
pub(super) async fn until<F: Future<Output = bool>>(mut holds: impl FnMut() -> F) {
    for _ in 0..6000 {
        if holds().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("what was waited for did not happen");
}

pub(super) async fn until_status(memory: &Memory, expected: impl Fn(MemoryStatus) -> bool) {
    until(|| async { expected(memory.status().await.unwrap()) }).await;
}

/// A store in which searches meet, or fail.
/// Records that can be read and, from some moment on, not written.
pub(super) struct FrozenRecords {
    pub(super) records: Arc<dyn Records>,
    pub(super) frozen: AtomicBool,
}

#[async_trait]
impl Records for FrozenRecords {
    async fn apply(&self, changes: Vec<RecordChange>) -> Result<Vec<Applied>, StorageError> {
        if self.frozen.load(Ordering::Relaxed) {
            return Err(StorageError::Failed("the disk is gone".into()));
        }
        self.records.apply(changes).await
    }
    async fn get(&self, kind: &str, keys: &[String]) -> Result<Vec<Record>, StorageError> {
        self.records.get(kind, keys).await
    }
    async fn list(&self, kind: &str, range: RecordRange) -> Result<Vec<Record>, StorageError> {
        self.records.list(kind, range).await
    }
    async fn counts(&self, kind: &str) -> Result<RecordCounts, StorageError> {
        self.records.counts(kind).await
    }
    async fn ready(&self, kind: &str, limit: usize, now: Millis) -> Result<Vec<Record>, StorageError> {
        self.records.ready(kind, limit, now).await
    }
    async fn claim(
        &self,
        kind: &str,
        limit: usize,
        now: Millis,
        lease_until: Millis,
    ) -> Result<Vec<Record>, StorageError> {
        self.records.claim(kind, limit, now, lease_until).await
    }
}

pub(super) struct WatchedStore {
    pub(super) inner: Arc<SqliteStore>,
    /// Every search waits here until as many are under way as the barrier wants.
    pub(super) meeting: Option<Barrier>,
    pub(super) broken: Option<CollectionName>,
    /// So many writes of vectors find the store away.
    pub(super) away: AtomicUsize,
}

#[async_trait]
impl Storage for WatchedStore {
    async fn search_many(
        &self,
        name: &CollectionName,
        queries: Vec<StorageQuery>,
    ) -> Result<Vec<SearchHits>, StorageError> {
        if let Some(meeting) = &self.meeting {
            meeting.wait().await;
        }
        if self.broken.as_ref() == Some(name) {
            return Err(StorageError::Failed("the disk is on fire".into()));
        }
        self.inner.search_many(name, queries).await
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Collection, StorageError> {
        self.inner.create_collection(name, metadata).await
    }
    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        self.inner.collections().await
    }
    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        self.inner.collection(name).await
    }
    async fn vector_models(&self, name: &CollectionName) -> Result<Vec<ModelIdentity>, StorageError> {
        self.inner.vector_models(name).await
    }
    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError> {
        self.inner.update_metadata(name, metadata, update).await
    }
    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        self.inner.delete_collection(name).await
    }
    async fn upsert(&self, name: &CollectionName, batch: DocumentBatch) -> Result<(), StorageError> {
        let left = self
            .away
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        if left.is_ok() {
            return Err(StorageError::Unavailable {
                message: "the engine is away".to_owned(),
                retry_after: Duration::from_millis(1),
            });
        }
        self.inner.upsert(name, batch).await
    }
    async fn documents_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<Document>, StorageError> {
        self.inner.documents_by_id(name, ids).await
    }
    async fn models_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError> {
        self.inner.models_by_id(name, ids).await
    }
    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError> {
        self.inner.documents(name, filter, page).await
    }
    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError> {
        self.inner.delete_documents(name, selection).await
    }
    async fn empty(&self, name: &CollectionName) -> Result<u64, StorageError> {
        self.inner.empty(name).await
    }
    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, StorageError> {
        self.inner.metadata_values(name, field).await
    }
    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        self.inner.export(name, range).await
    }
    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        self.inner.import(name, documents).await
    }
    async fn health(&self) -> Result<StorageHealth, StorageError> {
        self.inner.health().await
    }
}
