//! The embedded store as a [`Storage`].

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use async_trait::async_trait;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, RecordChange};
use ragstone_core::storage::{
    DocumentBatch, DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, SearchHits,
    Selection, Storage, StorageError, StorageHealth, StorageQuery,
};
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use rusqlite::{Connection, OptionalExtension};
use serde_json::Value;

use crate::error::{Error, Result};
use crate::ranking::document;
use crate::sqlite::export::{export, models_by_id, vector_models};
use crate::sqlite::faults::Faults;
use crate::sqlite::index::budget::WorkBudget;
use crate::sqlite::index::scope::IndexScope;
use crate::sqlite::load::load_all;
use crate::sqlite::published::Published;
use crate::sqlite::readers::{CollectionView, ReadTransaction, Readers, read_collection, read_collections};
use crate::sqlite::reserve::DiskReserve;
use crate::sqlite::schema::{DataDirectory, open_writer};
use crate::sqlite::search::{fetch, search};
use crate::sqlite::writer::{QueueLimits, Statements, Transaction, Writer, prepare};

#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Maximum number of queued writes; more are refused.
    pub queued_writes: usize,
    /// Maximum size of queued writes in bytes.
    pub queued_bytes: usize,
    /// Maximum number of concurrent reads; more wait for their turn.
    pub readers: usize,
    pub index_scope: IndexScope,
    /// Up to this many documents are removed from the file by the write that deletes them. More are
    /// only marked as deleted, and removed soon after.
    pub immediate_deletes: usize,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            queued_writes: 8192,
            queued_bytes: 256 << 20,
            readers: std::thread::available_parallelism().map_or(4, usize::from).max(2) * 2,
            index_scope: IndexScope::Everything,
            immediate_deletes: 256,
        }
    }
}

/// Collections, documents and records in one SQLite file, with the indexes in memory.
pub struct SqliteStore {
    published: Arc<Published>,
    readers: Arc<Readers>,
    /// For health checks, which must not wait for slow reads.
    probe: Arc<Readers>,
    writer: Writer,
    thread: Mutex<Option<JoinHandle<()>>>,
    reserve: Arc<DiskReserve>,
    immediate_deletes: usize,
    directory: DataDirectory,
}

impl SqliteStore {
    /// Opens or creates the store in a data directory and loads its indexes. Blocks; a large store takes
    /// a few seconds.
    pub fn open(directory: impl AsRef<Path>, options: StoreOptions) -> Result<Self> {
        Self::open_with(directory.as_ref(), options, Faults::default())
    }

    pub(crate) fn open_with(directory: &Path, options: StoreOptions, faults: Faults) -> Result<Self> {
        let directory = DataDirectory::open(directory)?;
        let reserve = Arc::new(DiskReserve::new(directory.reserve()));
        let connection = reserve.open(|| open_writer(&directory.database()))?;
        let published = Arc::new(Published::new(
            load_all(&directory.database(), options.index_scope)?,
            options.index_scope,
        ));
        let limits = QueueLimits {
            jobs: options.queued_writes.max(1),
            bytes: options.queued_bytes,
        };
        if !reserve.is_full() {
            reserve.fill();
        }
        let (writer, thread) = Writer::start(
            connection,
            published.clone(),
            faults,
            limits,
            Arc::clone(&reserve),
        )?;
        Ok(Self {
            published,
            readers: Arc::new(Readers::new(directory.database(), options.readers)),
            probe: Arc::new(Readers::new(directory.database(), 1)),
            writer,
            thread: Mutex::new(Some(thread)),
            reserve,
            immediate_deletes: options.immediate_deletes,
            directory,
        })
    }

    /// Waits until free pages are returned to the file system and no file contains deleted data. The
    /// store also does this by itself when it is idle, and after ten seconds under load.
    pub async fn flush(&self) -> Result<(), StorageError> {
        Ok(self.writer.flush().await?)
    }

    /// Finishes the accepted writes, empties the log, and stops. Later calls fail. Removing deleted data
    /// is bounded to a few seconds; the next start goes on.
    pub async fn close(&self) -> Result<(), StorageError> {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else {
            return Ok(());
        };
        self.readers.close();
        self.probe.close();
        self.writer.stop();
        let joined = tokio::task::spawn_blocking(move || thread.join()).await;
        match joined {
            Ok(Ok(())) => Ok(()),
            _ => Err(Error::Worker("the writer".into()).into()),
        }
    }

    /// Whether the disk is full. Deletes still work; other writes are refused.
    pub fn is_disk_full(&self) -> bool {
        self.reserve.is_full()
    }

    /// Has SQLite check the whole file. Returns the problems found.
    pub async fn integrity_check(&self) -> Result<Vec<String>, StorageError> {
        Ok(self
            .read(|connection| {
                let mut check = connection.prepare("PRAGMA integrity_check")?;
                let lines = check.query_map([], |row| row.get::<_, String>(0))?;
                let mut problems = Vec::new();
                for line in lines {
                    let line = line?;
                    if line != "ok" {
                        problems.push(line);
                    }
                }
                Ok(problems)
            })
            .await?)
    }

    pub(crate) async fn write<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce(&mut Transaction<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.reserve.is_full() {
            return Err(Error::DiskFull);
        }
        self.writer.write(bytes, Statements::Many, work).await
    }

    /// Writes something that frees space, on a full disk too: the first attempt on a full disk makes
    /// the writer release the reserve.
    async fn delete<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl Fn(&mut Transaction<'_>) -> Result<T> + Clone + Send + 'static,
    ) -> Result<T> {
        match self.writer.write(bytes, Statements::Many, work.clone()).await {
            Err(Error::DiskFull) => self.writer.write(bytes, Statements::Many, work).await,
            outcome => outcome,
        }
    }

    pub(crate) async fn write_records(
        &self,
        bytes: usize,
        changes: Vec<RecordChange>,
    ) -> Result<Vec<Applied>> {
        let deletes = |change: &RecordChange| matches!(change, RecordChange::Delete { .. });
        if self.reserve.is_full() && !changes.iter().all(deletes) {
            return Err(Error::DiskFull);
        }
        let statements = if changes.len() == 1 {
            Statements::One
        } else {
            Statements::Many
        };
        self.writer
            .write(bytes, statements, move |transaction| {
                transaction.apply_records(changes)
            })
            .await
    }

    pub(crate) async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.readers.read(move |connection, _| work(connection)).await
    }

    async fn write_documents(
        &self,
        name: &CollectionName,
        documents: impl FnOnce() -> Vec<ExportedDocument> + Send + 'static,
    ) -> Result<(), StorageError> {
        let name = name.clone();
        let for_name = name.clone();
        let prepared = tokio::task::spawn_blocking(move || prepare(&for_name, documents()))
            .await
            .map_err(|e| Error::Worker(e.to_string()))??;
        Ok(self
            .write(prepared.bytes, move |transaction| {
                transaction.upsert(&name, prepared)
            })
            .await?)
    }

    /// Refuses an operation that needs more than the index in memory covers.
    fn require_index(&self, operation: &str, covered: bool) -> Result<(), StorageError> {
        if covered {
            Ok(())
        } else {
            Err(StorageError::Unsupported(format!(
                "{operation} is unavailable: the store was opened in write-only mode"
            )))
        }
    }

    /// Reads one collection, in one state.
    async fn view<T: Send + 'static>(
        &self,
        name: &CollectionName,
        work: impl FnOnce(&ReadTransaction<'_>, CollectionView) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.view_within(name, |transaction, view, _| work(transaction, view))
            .await
    }

    /// The same, with a budget for filters.
    async fn view_within<T: Send + 'static>(
        &self,
        name: &CollectionName,
        work: impl FnOnce(&ReadTransaction<'_>, CollectionView, &WorkBudget) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (published, name) = (self.published.clone(), name.clone());
        let read = self.readers.read(move |connection, budget| {
            let (transaction, view) = read_collection(connection, &published, &name)?;
            work(&transaction, view, budget)
        });
        read.await
    }
}

impl Drop for SqliteStore {
    fn drop(&mut self) {
        let thread = self
            .thread
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            self.writer.stop();
            let _ = thread.join();
        }
    }
}

#[async_trait]
impl Storage for SqliteStore {
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Collection, StorageError> {
        let name = name.clone();
        Ok(self
            .write(1024, move |transaction| {
                transaction.create_collection(name, metadata)
            })
            .await?)
    }

    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        let published = self.published.clone();
        Ok(self
            .read(move |connection| read_collections(connection, &published))
            .await?)
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        Ok(self.view(name, |_, view| Ok(view.collection)).await?)
    }

    async fn vector_models(&self, name: &CollectionName) -> Result<Vec<ModelIdentity>, StorageError> {
        Ok(self
            .view(name, |transaction, view| {
                vector_models(transaction.connection, &view.snapshot)
            })
            .await?)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError> {
        let name = name.clone();
        Ok(self
            .write(1024, move |transaction| {
                transaction.update_metadata(&name, metadata, update)
            })
            .await?)
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        let name = name.clone();
        Ok(self
            .delete(256, move |transaction| transaction.delete_collection(&name))
            .await?)
    }

    async fn upsert(&self, name: &CollectionName, batch: DocumentBatch) -> Result<(), StorageError> {
        self.write_documents(name, move || batch.normalised()).await
    }

    async fn documents_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<Document>, StorageError> {
        let ids = ids.to_vec();
        Ok(self
            .view(name, move |transaction, view| {
                let mut find = transaction.connection.prepare_cached(
                    "SELECT rowid, id, metadata, text FROM documents WHERE collection = ?1 AND id = ?2",
                )?;
                let mut found = Vec::with_capacity(ids.len());
                for id in &ids {
                    let row = find.query_row((view.key, id.as_str()), |row| {
                        let rowid: i64 = row.get(0)?;
                        Ok((rowid, row.get(1)?, row.get::<_, String>(2)?, row.get(3)?))
                    });
                    if let Some((rowid, id, metadata, text)) = row.optional()?
                        && view.snapshot.slot(rowid).is_some()
                    {
                        found.push(document(id, &metadata, text)?);
                    }
                }
                Ok(found)
            })
            .await?)
    }

    async fn models_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError> {
        let ids = ids.to_vec();
        Ok(self
            .view(name, move |transaction, view| {
                models_by_id(transaction.connection, &view, &ids)
            })
            .await?)
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError> {
        self.require_index("this filter", self.published.scope().covers(filter))?;
        let filter = filter.clone();
        Ok(self
            .view_within(name, move |transaction, view, budget| {
                let slots = view.snapshot.matching(&filter, budget)?;
                let total = slots.len();
                let first = u32::try_from(page.offset)
                    .ok()
                    .and_then(|offset| slots.select(offset));
                let documents = match first {
                    None => Vec::new(),
                    Some(first) => slots
                        .range(first..)
                        .take(page.limit)
                        .map(|slot| fetch(transaction.connection, &view.snapshot, slot))
                        .collect::<Result<_>>()?,
                };
                Ok(DocumentPage { documents, total })
            })
            .await?)
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError> {
        let name = name.clone();
        let bytes = match &selection {
            Selection::Ids(ids) => 64 * ids.len() + 256,
            Selection::Matching(filter) => {
                self.require_index("this filter", self.published.scope().covers(filter))?;
                4096
            }
        };
        let immediate = self.immediate_deletes;
        Ok(self
            .delete(bytes, move |transaction| {
                transaction.delete_documents(&name, selection.clone(), immediate)
            })
            .await?)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, StorageError> {
        let name = name.clone();
        Ok(self
            .delete(256, move |transaction| transaction.empty(&name))
            .await?)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, StorageError> {
        self.require_index("listing values", self.published.scope().has_values_of(field))?;
        let field = field.to_owned();
        Ok(self
            .view(name, move |_, view| Ok(view.snapshot.values(&field)))
            .await?)
    }

    async fn search_many(
        &self,
        name: &CollectionName,
        queries: Vec<StorageQuery>,
    ) -> Result<Vec<SearchHits>, StorageError> {
        self.require_index("search", self.published.scope() == IndexScope::Everything)?;
        Ok(self
            .view_within(name, move |transaction, view, budget| {
                let searches = queries.into_iter();
                searches
                    .map(|query| search(transaction.connection, &view, query, budget))
                    .collect()
            })
            .await?)
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        self.require_index("export", self.published.scope() == IndexScope::Everything)?;
        Ok(self
            .view(name, move |transaction, view| {
                export(transaction.connection, &view.snapshot, range)
            })
            .await?)
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        self.write_documents(name, move || documents).await
    }

    async fn health(&self) -> Result<StorageHealth, StorageError> {
        let collections = self
            .probe
            .read(|connection, _| {
                Ok(connection
                    .prepare_cached("SELECT count(*) FROM collections WHERE name NOT LIKE '.%'")?
                    .query_row([], |row| row.get(0))?)
            })
            .await?;
        Ok(StorageHealth {
            collections,
            storage_bytes: self.directory.storage_bytes(),
            engine: None,
        })
    }
}
