//! One journey where two would do: what is asked of a collection is sent along with the question which
//! collection has that name now.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use ragstone_core::CollectionName;
use ragstone_core::provider::ProviderError;
use ragstone_core::storage::StorageError;

use super::super::api::CollectionRecord;
use super::{ChromaStore, store_error};

/// Collections as the last calls saw them: guesses, which cost time where they are wrong and never an
/// answer.
#[derive(Default)]
pub(super) struct Remembered(Mutex<HashMap<CollectionName, Arc<CollectionRecord>>>);

impl Remembered {
    const AT_MOST: usize = 1_000;

    fn get(&self, name: &CollectionName) -> Option<Arc<CollectionRecord>> {
        let records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        records.get(name).cloned()
    }

    fn set(&self, record: &Arc<CollectionRecord>) {
        let mut records = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if records.len() >= Self::AT_MOST {
            records.clear();
        }
        let mut guess = CollectionRecord::clone(record);
        // It may be large, and is never guessed.
        guess.described.metadata.clear();
        records.insert(guess.described.name.clone(), Arc::new(guess));
    }
}

impl ChromaStore {
    /// Looks the collection up and asks something of it. While it is the one of the last time, which it
    /// mostly is, both are under way at once; otherwise the first answer is not waited for.
    pub(super) async fn ask_of<T, Answer>(
        &self,
        name: &CollectionName,
        question: impl Fn(Arc<CollectionRecord>) -> Answer,
    ) -> Result<(Arc<CollectionRecord>, T), StorageError>
    where
        Answer: Future<Output = Result<T, ProviderError>>,
    {
        let lookup = self.api().collection(name);
        let (record, early) = match self.remembered.get(name) {
            Some(guess) => {
                tokio::pin!(lookup);
                let answer = question(Arc::clone(&guess)).map(Some);
                tokio::pin!(answer);
                let mut early = None;
                let record = loop {
                    tokio::select! {
                        record = &mut lookup => break record.map_err(store_error)?,
                        answer = &mut answer, if early.is_none() => early = answer,
                    }
                };
                let same_width = record.described.dimensions == guess.described.dimensions;
                if record.id != guess.id || !same_width {
                    early = None;
                } else if early.is_none() {
                    early = answer.await;
                }
                (record, early)
            }
            None => (lookup.await.map_err(store_error)?, None),
        };
        let record = Arc::new(record);
        self.remembered.set(&record);
        let answer = match early {
            Some(answer) => answer,
            None => question(Arc::clone(&record)).await,
        };
        Ok((record, answer.map_err(store_error)?))
    }
}
