//! Taking turns where a change is read first and written then.

use std::hash::{BuildHasher, RandomState};

use ragstone_core::CollectionName;
use tokio::sync::{Mutex, MutexGuard};

/// Two collections that share a place wait for each other in vain, which with so many is rare.
const PLACES: usize = 64;

/// One turn at a time for each collection. Chroma has no transactions: without turns, of two changes
/// that both read what was there before, one would undo the other.
pub(super) struct Turns {
    places: [Mutex<()>; PLACES],
    hasher: RandomState,
}

impl Turns {
    pub(super) fn new() -> Self {
        Self {
            places: std::array::from_fn(|_| Mutex::new(())),
            hasher: RandomState::new(),
        }
    }

    /// Waits until nobody else has the turn of this collection.
    pub(super) async fn take(&self, name: &CollectionName) -> MutexGuard<'_, ()> {
        let place = self.hasher.hash_one(name.as_str()) % PLACES as u64;
        self.places[place as usize].lock().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writers_of_one_collection_wait_for_each_other() {
        let docs = CollectionName::parse("docs").unwrap();
        let turns = Turns::new();
        let first = turns.take(&docs).await;
        let patience = Duration::from_secs(20);
        assert!(tokio::time::timeout(patience, turns.take(&docs)).await.is_err());
        drop(first);
        assert!(tokio::time::timeout(patience, turns.take(&docs)).await.is_ok());
    }
}
