//! Read connections, and reads that see file and memory in one state.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ragstone_core::{Collection, CollectionName, Metadata};
use rusqlite::{Connection, OptionalExtension, Row};
use tokio::sync::Semaphore;

use crate::error::{Error, Result};
use crate::sqlite::index::Snapshot;
use crate::sqlite::index::budget::WorkBudget;
use crate::sqlite::published::Published;
use crate::sqlite::schema::open_reader;

/// A pool of read-only connections, opened on demand.
pub(crate) struct Readers {
    database: PathBuf,
    idle: Mutex<Vec<Connection>>,
    permits: Arc<Semaphore>,
}

impl Readers {
    pub(crate) fn new(database: PathBuf, connections: usize) -> Self {
        Self {
            database,
            idle: Mutex::new(Vec::with_capacity(connections)),
            permits: Arc::new(Semaphore::new(connections.max(1))),
        }
    }

    /// Runs work in one read transaction on a blocking thread. The work gets a budget that ends when the
    /// caller goes away.
    pub(crate) async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Connection, &WorkBudget) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let permit = self
            .permits
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| Error::Closed)?;
        metrics::counter!("ragstone_store_reads_total").increment(1);
        let readers = self.clone();
        let guard = CancelOnDrop::default();
        let budget = WorkBudget::new(Arc::clone(&guard.0));
        let outcome = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let lease = Lease::take(&readers)?;
            work(lease.connection()?, &budget)
        });
        outcome.await.map_err(|e| Error::Worker(e.to_string()))?
    }

    /// Refuses further reads. Running ones go on.
    pub(crate) fn close(&self) {
        self.permits.close();
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Tells the work of a read that its caller is gone.
#[derive(Default)]
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A connection that returns to the pool when dropped.
struct Lease<'a> {
    readers: &'a Readers,
    connection: Option<Connection>,
}

impl<'a> Lease<'a> {
    fn take(readers: &'a Readers) -> Result<Self> {
        let idle = readers.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match idle {
            Some(connection) => connection,
            None => open_reader(&readers.database)?,
        };
        Ok(Self {
            readers,
            connection: Some(connection),
        })
    }

    fn connection(&self) -> Result<&Connection> {
        self.connection.as_ref().ok_or(Error::Closed)
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take()
            && !self.readers.permits.is_closed()
        {
            let mut idle = self.readers.idle.lock().unwrap_or_else(PoisonError::into_inner);
            idle.push(connection);
        }
    }
}

/// A read transaction; ends when it is dropped.
pub(crate) struct ReadTransaction<'c> {
    pub(crate) connection: &'c Connection,
}

impl<'c> ReadTransaction<'c> {
    fn begin(connection: &'c Connection) -> Result<Self> {
        connection.prepare_cached("BEGIN")?.execute([])?;
        Ok(Self { connection })
    }
}

impl Drop for ReadTransaction<'_> {
    fn drop(&mut self) {
        let ended = self
            .connection
            .prepare_cached("COMMIT")
            .and_then(|mut commit| commit.execute([]));
        if let Err(error) = ended {
            tracing::error!(%error, "could not end a read transaction");
        }
    }
}

/// A collection in one state: its row, and the snapshot of the same version.
pub(crate) struct CollectionView {
    /// The id of the collection in the tables.
    pub(crate) key: i64,
    pub(crate) snapshot: Arc<Snapshot>,
    pub(crate) collection: Collection,
}

/// Begins a read transaction in which the rows of a collection and its snapshot have one state.
pub(crate) fn read_collection<'c>(
    connection: &'c Connection,
    published: &Published,
    name: &CollectionName,
) -> Result<(ReadTransaction<'c>, CollectionView)> {
    loop {
        let transaction = ReadTransaction::begin(connection)?;
        let head = transaction
            .connection
            .prepare_cached("SELECT id, name, metadata, version FROM collections WHERE name = ?1")?
            .query_row([name.as_str()], Head::read)
            .optional()?
            .ok_or_else(|| Error::CollectionNotFound(name.clone()))?;
        if let Some(snapshot) = head.snapshot(published) {
            let view = head.view(snapshot)?;
            return Ok((transaction, view));
        }
    }
}

/// All collections in one state, by name, without internal ones.
pub(crate) fn read_collections(connection: &Connection, published: &Published) -> Result<Vec<Collection>> {
    'retry: loop {
        let transaction = ReadTransaction::begin(connection)?;
        let heads: Vec<Head> = transaction
            .connection
            .prepare_cached(
                "SELECT id, name, metadata, version FROM collections WHERE name NOT LIKE '.%' ORDER BY name",
            )?
            .query_map([], Head::read)?
            .collect::<rusqlite::Result<_>>()?;
        let mut collections = Vec::with_capacity(heads.len());
        for head in heads {
            let Some(snapshot) = head.snapshot(published) else {
                continue 'retry;
            };
            collections.push(head.view(snapshot)?.collection);
        }
        return Ok(collections);
    }
}

struct Head {
    id: i64,
    name: String,
    metadata: String,
    version: i64,
}

impl Head {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get(0)?,
            name: row.get(1)?,
            metadata: row.get(2)?,
            version: row.get(3)?,
        })
    }

    /// The published snapshot of this version. Waits for the microseconds between commit and
    /// publication. `None` means that the writer has published a newer one, and the read must start
    /// over.
    fn snapshot(&self, published: &Published) -> Option<Arc<Snapshot>> {
        let mut waited = 0u32;
        loop {
            let snapshot = published.get(self.id);
            match &snapshot {
                Some(found) if found.version == self.version => return snapshot,
                Some(found) if found.version > self.version => return None,
                // Older, not yet published, or deleted.
                _ => {
                    waited += 1;
                    if waited > 1000 {
                        return None;
                    }
                    std::thread::yield_now();
                }
            }
        }
    }

    fn view(self, snapshot: Arc<Snapshot>) -> Result<CollectionView> {
        let metadata: Metadata = serde_json::from_str(&self.metadata)?;
        let name = match self.name.strip_prefix('.') {
            Some(internal) => CollectionName::internal(internal),
            None => CollectionName::parse(self.name).map_err(|e| Error::Damaged(e.to_string()))?,
        };
        Ok(CollectionView {
            key: self.id,
            collection: Collection {
                name,
                count: snapshot.count(),
                metadata,
                dimensions: snapshot.dimensions(),
            },
            snapshot,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ragstone_core::storage::Storage;

    use crate::{SqliteStore, StoreOptions};

    #[tokio::test]
    async fn a_health_check_does_not_wait_for_reads() {
        let directory = tempfile::tempdir().unwrap();
        let options = StoreOptions {
            readers: 1,
            ..StoreOptions::default()
        };
        let store = std::sync::Arc::new(SqliteStore::open(directory.path(), options).unwrap());
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (started, has_started) = tokio::sync::oneshot::channel();
        let busy = store.clone();
        let slow = tokio::spawn(async move {
            busy.read(move |_| {
                let _ = started.send(());
                let _ = released.recv();
                Ok(())
            })
            .await
        });
        has_started.await.unwrap();
        let health = tokio::time::timeout(Duration::from_secs(60), store.health()).await;
        assert_eq!(health.unwrap().unwrap().collections, 0);
        drop(release);
        slow.await.unwrap().unwrap();
    }
}
