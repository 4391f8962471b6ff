//! Places where a test can make a transaction fail.

use crate::error::Result;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FaultPoint {
    /// The documents of a collection are deleted, its vectors are not.
    WhileEmptying,
    /// A changed collection is ready, and the transaction about to be committed.
    BeforeCommit,
}

/// Which fault to raise; outside tests there is none and asking costs nothing.
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
            return Err(crate::error::Error::Worker("a fault was asked for".into()));
        }
        Ok(())
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
}
