//! The store in Postgres with pgvector, for several processes over one database.
//!
//! No state is kept in this process, so every process sees what any of them has written. A read is one
//! transaction that sees one state; a write locks the row of its collection. While the database cannot
//! be reached or does not answer in time, calls fail with a clear error; they succeed again once it is
//! back.

mod circuit_breaker;
mod encode;
mod inspect;
mod keyword_search;
mod maintenance;
mod pool;
mod read;
mod records;
mod schema;
mod search;
mod siblings;
mod statement;
mod stats_cache;
mod url;
mod vector_search;
mod write;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, Millis, Record, RecordChange, RecordCounts, RecordRange, Records};
use ragstone_core::storage::{
    DocumentBatch, DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, SearchHits,
    Selection, Storage, StorageError, StorageHealth, StorageQuery,
};
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::Value;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

pub use inspect::{PostgresInspection, inspect_postgres};
pub use url::PostgresUrl;

use crate::error::{Error, Result};
use circuit_breaker::CircuitBreaker;
use pool::{Pool, PoolSize, Session};
use records::ClaimStatement;
use search::Searcher;
use stats_cache::StatsCache;

/// Timeouts of calls. Writes wait for each other, and large ones take longer.
const READ_DEADLINE: Duration = Duration::from_secs(15);
const WRITE_DEADLINE: Duration = Duration::from_secs(60);
/// Timeout of a health check.
const PROBE_DEADLINE: Duration = Duration::from_secs(2);
/// Number of attempts of a call that conflicts with others.
const ATTEMPTS: u32 = 6;

#[derive(Debug, Clone)]
pub struct PostgresOptions {
    /// Number of connections that read. Writers have their own, so that writers that wait for each
    /// other do not block readers.
    pub readers: usize,
    pub writers: usize,
    pub thresholds: PostgresThresholds,
}

/// Sizes that decide how a collection is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PostgresThresholds {
    /// Size from which a collection gets an index. Comparing all documents of a smaller one takes a few
    /// milliseconds.
    pub index_from: u64,
    /// Up to this many documents that match a filter are all compared. Walking the index would pass
    /// too many others, and might miss some.
    pub exact_up_to: u64,
    /// Interval between checks of a collection's size. One that has grown since the last check gets no
    /// index yet, because it fills several times as fast without one.
    pub settle: Duration,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        Self {
            readers: 12,
            writers: 6,
            thresholds: PostgresThresholds {
                index_from: 10_000,
                exact_up_to: 25_000,
                settle: Duration::from_secs(5),
            },
        }
    }
}

pub struct PostgresStore {
    readers: Pool,
    writers: Pool,
    thresholds: PostgresThresholds,
    stats: StatsCache,
    discarded: Arc<Notify>,
    maintenance: JoinHandle<()>,
    breaker: CircuitBreaker,
}

impl PostgresStore {
    /// Connects, and migrates the schema unless another process has.
    pub async fn open(url: &PostgresUrl, options: PostgresOptions) -> Result<Self> {
        let size = |connections: usize, wait, statement| PoolSize {
            connections: connections.max(1),
            wait: Duration::from_secs(wait),
            statement,
        };
        let readers = pool::pool(url, &size(options.readers, 5, READ_DEADLINE))?;
        let writers = pool::pool(url, &size(options.writers, 15, WRITE_DEADLINE))?;
        within(WRITE_DEADLINE, retry(|| schema::migrate(&writers))).await?;
        let discarded = Arc::new(Notify::new());
        let background = pool::pool(url, &size(1, 5, READ_DEADLINE))?;
        let maintenance =
            maintenance::Maintenance::new(background, Arc::clone(&discarded), options.thresholds);
        Ok(Self {
            readers,
            writers,
            thresholds: options.thresholds,
            stats: StatsCache::default(),
            discarded,
            maintenance: tokio::spawn(maintenance.run()),
            breaker: CircuitBreaker::default(),
        })
    }

    /// Number of times that calls have waited for the server. Statements sent together count once.
    pub fn round_trips(&self) -> u64 {
        self.readers.round_trips() + self.writers.round_trips()
    }

    /// Closes the connections. Later calls fail.
    pub fn close(&self) {
        self.maintenance.abort();
        self.readers.close();
        self.writers.close();
    }

    async fn read<T, F: Future<Output = Result<T>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> Result<T, StorageError> {
        Ok(self.breaker.guard(within(READ_DEADLINE, retry(attempt))).await?)
    }

    async fn write<T, F: Future<Output = Result<T>>>(
        &self,
        attempt: impl Fn() -> F,
    ) -> Result<T, StorageError> {
        Ok(self.breaker.guard(within(WRITE_DEADLINE, retry(attempt))).await?)
    }

    async fn write_documents(
        &self,
        name: &CollectionName,
        documents: impl FnOnce() -> Vec<ExportedDocument> + Send + 'static,
    ) -> Result<(), StorageError> {
        let for_name = name.clone();
        let prepared = tokio::task::spawn_blocking(move || write::prepare(&for_name, documents()))
            .await
            .map_err(|error| Error::Worker(error.to_string()))??;
        self.write(|| async {
            let session = Session::write(&self.writers).await?;
            write::upsert(session, name, &prepared).await
        })
        .await
    }
}

impl Drop for PostgresStore {
    fn drop(&mut self) {
        self.maintenance.abort();
    }
}

async fn within<T>(deadline: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(deadline, work)
        .await
        .unwrap_or(Err(Error::DatabaseTimeout))
}

/// Retries a call that was rolled back because it conflicted with another one.
async fn retry<T, F: Future<Output = Result<T>>>(attempt: impl Fn() -> F) -> Result<T> {
    for attempts in 1..ATTEMPTS {
        match attempt().await {
            Err(error) if error.is_conflict() => {
                tracing::debug!(%error, attempts, "a transaction was rolled back; retrying");
                tokio::time::sleep(Duration::from_millis(5) * attempts).await;
            }
            outcome => return outcome,
        }
    }
    attempt().await
}

#[async_trait]
impl Storage for PostgresStore {
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Collection, StorageError> {
        self.write(|| async {
            let session = Session::write(&self.writers).await?;
            write::create_collection(session, name, &metadata).await
        })
        .await
    }

    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        self.read(|| read::collections(&self.readers)).await
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        self.read(|| async {
            let (_session, state) = read::begin(&self.readers, name).await?;
            self.stats.update(&state);
            Ok(state.collection)
        })
        .await
    }

    async fn vector_models(&self, name: &CollectionName) -> Result<Vec<ModelIdentity>, StorageError> {
        self.read(|| read::vector_models(&self.readers, name)).await
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, StorageError> {
        self.write(|| async {
            let session = Session::write(&self.writers).await?;
            write::update_metadata(session, name, &metadata, update).await
        })
        .await
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        self.write(|| async {
            let session = Session::write(&self.writers).await?;
            write::delete_collection(session, name).await
        })
        .await?;
        self.discarded.notify_one();
        Ok(())
    }

    async fn upsert(&self, name: &CollectionName, batch: DocumentBatch) -> Result<(), StorageError> {
        self.write_documents(name, move || batch.normalised()).await
    }

    async fn documents_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<Document>, StorageError> {
        self.read(|| read::by_id(&self.readers, name, ids)).await
    }

    async fn models_by_id(
        &self,
        name: &CollectionName,
        ids: &[DocumentId],
    ) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>, StorageError> {
        self.read(|| read::models_by_id(&self.readers, name, ids)).await
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, StorageError> {
        self.read(|| read::documents(&self.readers, name, filter, page))
            .await
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, StorageError> {
        let gone = self
            .write(|| async {
                let session = Session::write(&self.writers).await?;
                write::delete_documents(session, name, &selection).await
            })
            .await?;
        self.discarded.notify_one();
        Ok(gone)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, StorageError> {
        let gone = self
            .write(|| async {
                let session = Session::write(&self.writers).await?;
                write::empty(session, name).await
            })
            .await?;
        self.discarded.notify_one();
        Ok(gone)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, StorageError> {
        self.read(|| read::metadata_values(&self.readers, name, field))
            .await
    }

    async fn search_many(
        &self,
        name: &CollectionName,
        queries: Vec<StorageQuery>,
    ) -> Result<Vec<SearchHits>, StorageError> {
        let searcher = Searcher::new(&self.readers, &self.stats, self.thresholds, name, &queries);
        self.read(|| searcher.search()).await
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        self.read(|| read::export(&self.readers, name, range)).await
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        self.write_documents(name, move || documents).await
    }

    async fn health(&self) -> Result<StorageHealth, StorageError> {
        let asked = within(PROBE_DEADLINE, read::health(&self.readers));
        Ok(self.breaker.guard(asked).await?)
    }
}

#[async_trait]
impl Records for PostgresStore {
    async fn apply(&self, changes: Vec<RecordChange>) -> Result<Vec<Applied>, StorageError> {
        self.write(|| async {
            let session = Session::write(&self.writers).await?;
            records::apply(session, &changes).await
        })
        .await
    }

    async fn get(&self, kind: &str, keys: &[String]) -> Result<Vec<Record>, StorageError> {
        self.read(|| records::get(&self.readers, kind, keys)).await
    }

    async fn list(&self, kind: &str, range: RecordRange) -> Result<Vec<Record>, StorageError> {
        self.read(|| records::list(&self.readers, kind, &range)).await
    }

    async fn counts(&self, kind: &str) -> Result<RecordCounts, StorageError> {
        self.read(|| records::counts(&self.readers, kind)).await
    }

    async fn ready(&self, kind: &str, limit: usize, now: Millis) -> Result<Vec<Record>, StorageError> {
        self.read(|| records::ready(&self.readers, kind, limit, now))
            .await
    }

    async fn claim(
        &self,
        kind: &str,
        limit: usize,
        now: Millis,
        lease_until: Millis,
    ) -> Result<Vec<Record>, StorageError> {
        let wanted = ClaimStatement {
            kind,
            limit,
            now,
            lease_until,
        };
        self.write(|| async {
            let session = Session::write(&self.writers).await?;
            records::claim(session, &wanted).await
        })
        .await
    }
}
