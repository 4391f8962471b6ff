//! Points at which a test can make a transaction fail.

use crate::error::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultPoint {
    /// The collection that is emptied was removed, and the new one not yet created.
    WhileEmptying,
    /// Deleted documents are about to be removed from the file.
    Cleanup,
    /// The disk is full when the transaction is committed.
    DiskFull,
    /// A changed collection is ready, and the transaction about to be committed.
    BeforeCommit,
}

/// The fault to raise. Outside tests there is none, and the check costs nothing.
#[derive(Clone, Default)]
pub(crate) struct Faults {
    #[cfg(test)]
    armed: std::sync::Arc<std::sync::Mutex<Option<FaultPoint>>>,
}

impl Faults {
    #[cfg(not(test))]
    pub(crate) fn check(&self, _: FaultPoint) -> Result<()> {
        Ok(())
    }

    /// Fails once at the point a test has armed.
    #[cfg(test)]
    pub(crate) fn check(&self, point: FaultPoint) -> Result<()> {
        let mut armed = self.armed.lock().unwrap();
        if *armed == Some(point) {
            *armed = None;
            if point == FaultPoint::DiskFull {
                return Err(crate::error::Error::DiskFull);
            }
            return Err(crate::error::Error::Worker("an injected fault".into()));
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.lock().unwrap().is_some()
    }

    #[cfg(test)]
    pub(crate) fn arm(&self, point: FaultPoint) {
        *self.armed.lock().unwrap() = Some(point);
    }
}

#[cfg(test)]
mod tests {
    use ragstone_core::storage::{
        DocumentBatch, Page, Selection, Storage, StorageError, StorageQuery, StoredDocument,
    };
    use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};

    use super::*;
    use crate::{SqliteStore, StoreOptions};

    const ALL: Page = Page {
        limit: 1000,
        offset: 0,
    };

    async fn filled(directory: &std::path::Path, faults: &Faults) -> (SqliteStore, CollectionName) {
        let store = SqliteStore::open_with(directory, StoreOptions::default(), faults.clone()).unwrap();
        let docs = CollectionName::parse("docs").unwrap();
        store.create_collection(&docs, Metadata::new()).await.unwrap();
        let documents = (0..50).map(|n| StoredDocument {
            document: Document {
                id: DocumentId::parse(format!("d{n}")).unwrap(),
                text: format!("text {n}"),
                metadata: Metadata::new(),
            },
            vector: vec![1.0, n as f32],
        });
        let batch = DocumentBatch {
            documents: documents.collect(),
            model: None,
        };
        store.upsert(&docs, batch).await.unwrap();
        (store, docs)
    }

    async fn assert_untouched(store: &SqliteStore, docs: &CollectionName) {
        let collection = store.collection(docs).await.unwrap();
        assert_eq!((collection.count, collection.dimensions), (50, Some(2)));
        let page = store.documents(docs, &Filter::everything(), ALL).await.unwrap();
        assert_eq!(page.documents.len(), 50);
        let request = StorageQuery {
            vector: Some(vec![1.0, 7.0]),
            text: Some("text".into()),
            limit: 50,
            ..StorageQuery::default()
        };
        assert_eq!(store.search(docs, request).await.unwrap().hits.len(), 50);
        assert_eq!(store.integrity_check().await.unwrap(), Vec::<String>::new());
    }

    #[tokio::test]
    async fn emptying_that_fails_midway_changes_nothing() {
        for point in [FaultPoint::WhileEmptying, FaultPoint::BeforeCommit] {
            let directory = tempfile::tempdir().unwrap();
            let faults = Faults::default();
            let (store, docs) = filled(directory.path(), &faults).await;
            faults.arm(point);
            assert!(matches!(store.empty(&docs).await, Err(StorageError::Failed(_))));
            assert_untouched(&store, &docs).await;
            drop(store);
            let store = SqliteStore::open(directory.path(), StoreOptions::default()).unwrap();
            assert_untouched(&store, &docs).await;
            assert_eq!(store.empty(&docs).await.unwrap(), 50);
        }
    }

    #[tokio::test]
    async fn a_commit_that_fails_is_told_to_all_and_the_store_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let faults = Faults::default();
        let (store, docs) = filled(directory.path(), &faults).await;
        faults.arm(FaultPoint::BeforeCommit);
        let one = Selection::Ids(vec![DocumentId::parse("d1").unwrap()]);
        assert!(store.delete_documents(&docs, one.clone()).await.is_err());
        assert_untouched(&store, &docs).await;
        assert_eq!(store.delete_documents(&docs, one).await.unwrap(), 1);
        assert_eq!(store.collection(&docs).await.unwrap().count, 49);
    }

    fn one_document(id: &str) -> DocumentBatch {
        let document = StoredDocument {
            document: Document {
                id: DocumentId::parse(id).unwrap(),
                text: "text".into(),
                metadata: Metadata::new(),
            },
            vector: vec![1.0, 2.0],
        };
        DocumentBatch {
            documents: vec![document],
            model: None,
        }
    }

    #[tokio::test]
    async fn on_a_full_disk_deletes_work_and_other_writes_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let reserve = directory.path().join("ragstone.reserve");
        let faults = Faults::default();
        let (store, docs) = filled(directory.path(), &faults).await;
        store.flush().await.unwrap();
        assert_eq!(
            std::fs::metadata(&reserve).unwrap().len(),
            crate::sqlite::reserve::BYTES as u64
        );
        // A delete is the first to find the disk full. It uses the reserve.
        faults.arm(FaultPoint::DiskFull);
        let one = |id: &str| Selection::Ids(vec![DocumentId::parse(id).unwrap()]);
        assert_eq!(store.delete_documents(&docs, one("d1")).await.unwrap(), 1);
        assert!(!faults.is_armed());
        // Idle time restores the reserve, because this disk has room.
        store.flush().await.unwrap();
        assert!(!store.is_disk_full() && reserve.exists());
        faults.arm(FaultPoint::DiskFull);
        let refused = store.upsert(&docs, one_document("new")).await;
        assert!(
            matches!(refused, Err(StorageError::Unavailable { .. })),
            "{refused:?}"
        );
        assert_eq!(store.delete_documents(&docs, one("d2")).await.unwrap(), 1);
        store.flush().await.unwrap();
        store.upsert(&docs, one_document("new")).await.unwrap();
        assert_eq!(store.collection(&docs).await.unwrap().count, 49);
    }

    /// Copies the files as a crash would leave them.
    fn copy(from: &std::path::Path) -> tempfile::TempDir {
        let to = tempfile::tempdir().unwrap();
        for suffix in ["", "-wal"] {
            let file = format!("ragstone.db{suffix}");
            if from.join(&file).exists() {
                std::fs::copy(from.join(&file), to.path().join(&file)).unwrap();
            }
        }
        to
    }

    #[tokio::test]
    async fn deleted_documents_stay_deleted_after_a_crash() {
        let directory = tempfile::tempdir().unwrap();
        let faults = Faults::default();
        let (store, docs) = filled(directory.path(), &faults).await;
        let other = CollectionName::parse("other").unwrap();
        store.create_collection(&other, Metadata::new()).await.unwrap();
        let batch = |ids: std::ops::Range<usize>| DocumentBatch {
            documents: ids
                .map(|n| StoredDocument {
                    document: Document {
                        id: DocumentId::parse(format!("d{n}")).unwrap(),
                        text: format!("text {n}"),
                        metadata: Metadata::from_iter([("n".to_owned(), n.into())]),
                    },
                    vector: vec![1.0, n as f32],
                })
                .collect(),
            model: None,
        };
        store.upsert(&docs, batch(50..1000)).await.unwrap();
        store.upsert(&other, batch(0..1000)).await.unwrap();
        store.flush().await.unwrap();
        // Cleanup pauses for a while after a failure.
        faults.arm(FaultPoint::Cleanup);
        let ids = (0..900).map(|n| DocumentId::parse(format!("d{n}")).unwrap());
        let deleted = store.delete_documents(&docs, Selection::Ids(ids.collect())).await;
        assert_eq!(deleted.unwrap(), 900);
        assert_eq!(store.empty(&other).await.unwrap(), 1000);
        // One of those deleted is added again while its old row is still there.
        store.upsert(&docs, batch(7..8)).await.unwrap();
        while faults.is_armed() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        let crashed = copy(directory.path());
        let rows = {
            let file = rusqlite::Connection::open(crashed.path().join("ragstone.db")).unwrap();
            let count = "SELECT count(*) FROM documents";
            file.query_row(count, [], |row| row.get::<_, i64>(0)).unwrap()
        };
        assert!(
            rows >= 1999,
            "the test must look at rows that are not yet removed: {rows}"
        );
        let reopened = SqliteStore::open(crashed.path(), StoreOptions::default()).unwrap();
        for store in [&store, &reopened] {
            assert_eq!(store.collection(&docs).await.unwrap().count, 101);
            assert_eq!(store.collection(&other).await.unwrap().count, 0);
            let ids: Vec<DocumentId> = ["d3", "d7", "d950"]
                .map(|id| DocumentId::parse(id).unwrap())
                .into();
            let found = store.documents_by_id(&docs, &ids).await.unwrap();
            assert_eq!(
                found.iter().map(|d| d.id.as_str()).collect::<Vec<_>>(),
                ["d7", "d950"]
            );
            assert_eq!(store.models_by_id(&docs, &ids).await.unwrap().len(), 2);
            assert_eq!(store.metadata_values(&docs, "n").await.unwrap().len(), 101);
            let page = store.documents(&docs, &Filter::everything(), ALL).await.unwrap();
            let order = page.documents.iter().map(|d| d.id.as_str());
            let expected: Vec<String> = (900..1000).chain([7]).map(|n| format!("d{n}")).collect();
            assert_eq!(order.collect::<Vec<_>>(), expected);
            let query = StorageQuery {
                vector: Some(vec![1.0, 7.0]),
                text: Some("text".into()),
                limit: 1000,
                ..StorageQuery::default()
            };
            assert_eq!(store.search(&docs, query).await.unwrap().hits.len(), 101);
        }
        // A backup has nothing that was deleted, whether it was removed already or not.
        let file = crashed.path().join("backup.db");
        let facts = crate::backup(directory.path(), &file, |_, _| {}).unwrap();
        assert_eq!((facts.collections, facts.documents), (2, 101));
        let backup = rusqlite::Connection::open(&file).unwrap();
        let rows = "SELECT (SELECT count(*) FROM documents) + (SELECT count(*) FROM deleted_documents)";
        assert_eq!(
            backup.query_row(rows, [], |row| row.get::<_, i64>(0)).unwrap(),
            101
        );
        reopened.flush().await.unwrap();
        assert_eq!(reopened.integrity_check().await.unwrap(), Vec::<String>::new());
        let left = reopened.read(|connection| {
            let count = "SELECT (SELECT count(*) FROM documents), (SELECT count(*) FROM deleted_documents)
                 + (SELECT count(*) FROM deleted_collections)";
            Ok(connection.query_row(count, [], |row| Ok((row.get(0)?, row.get(1)?)))?)
        });
        assert_eq!(left.await.unwrap(), (101, 0));
    }
}
