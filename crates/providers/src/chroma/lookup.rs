//! Looking up a collection and asking something of it in one round trip.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use ragstone_core::CollectionName;
use ragstone_core::storage::StorageError;

use super::ChromaStorage;
use super::api::CollectionRecord;

/// Collections as the last calls saw them. A stale entry costs time and never gives a wrong answer.
#[derive(Default)]
pub(super) struct RecordCache(Mutex<HashMap<CollectionName, Arc<CollectionRecord>>>);

impl RecordCache {
    const CAPACITY: usize = 1_000;

    fn get(&self, name: &CollectionName) -> Option<Arc<CollectionRecord>> {
        let records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        records.get(name).cloned()
    }

    fn set(&self, record: &Arc<CollectionRecord>) {
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() >= Self::CAPACITY {
            records.clear();
        }
        let mut cached = CollectionRecord::clone(record);
        // Metadata may be large, and is always taken from the lookup.
        cached.described.metadata.clear();
        records.insert(cached.described.name.clone(), Arc::new(cached));
    }
}

impl ChromaStorage {
    /// Looks a collection up and runs a request on it. Both run concurrently on the cached record. If the
    /// lookup shows that the record is stale, the request is repeated on the current one.
    pub(super) async fn with_collection<T, Answer>(
        &self,
        name: &CollectionName,
        request: impl Fn(Arc<CollectionRecord>) -> Answer,
    ) -> Result<(Arc<CollectionRecord>, T), StorageError>
    where
        Answer: Future<Output = Result<T, StorageError>>,
    {
        let lookup = self.api.collection(name);
        let (record, early) = match self.records.get(name) {
            Some(cached) => {
                tokio::pin!(lookup);
                let answer = request(Arc::clone(&cached)).map(Some);
                tokio::pin!(answer);
                let mut early = None;
                let record = loop {
                    tokio::select! {
                        record = &mut lookup => break record?,
                        answer = &mut answer, if early.is_none() => early = answer,
                    }
                };
                let same_width = record.described.dimensions == cached.described.dimensions;
                if record.id != cached.id || !same_width {
                    early = None;
                } else if early.is_none() {
                    early = answer.await;
                }
                (record, early)
            }
            None => (lookup.await?, None),
        };
        let record = Arc::new(record);
        self.records.set(&record);
        let answer = match early {
            Some(answer) => answer,
            None => request(Arc::clone(&record)).await,
        };
        Ok((record, answer?))
    }
}
