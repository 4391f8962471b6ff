//! Serialising read-modify-write operations on one collection.

use std::hash::{BuildHasher, RandomState};

use ragstone_core::CollectionName;
use tokio::sync::{Mutex, MutexGuard};

/// Collections that share a lock wait for each other needlessly, which is rare with so many.
const LOCKS: usize = 64;

/// One lock per collection. Chroma has no transactions: without locks, one of two concurrent
/// read-modify-write operations would undo the other.
pub(super) struct CollectionLocks {
    locks: [Mutex<()>; LOCKS],
    hasher: RandomState,
}

impl CollectionLocks {
    pub(super) fn new() -> Self {
        Self {
            locks: std::array::from_fn(|_| Mutex::new(())),
            hasher: RandomState::new(),
        }
    }

    pub(super) async fn lock(&self, name: &CollectionName) -> MutexGuard<'_, ()> {
        let lock = self.hasher.hash_one(name.as_str()) % LOCKS as u64;
        self.locks[lock as usize].lock().await
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writers_of_one_collection_wait_for_each_other() {
        let docs = CollectionName::parse("docs").unwrap();
        let locks = CollectionLocks::new();
        let first = locks.lock(&docs).await;
        let limit = Duration::from_secs(20);
        assert!(tokio::time::timeout(limit, locks.lock(&docs)).await.is_err());
        drop(first);
        assert!(tokio::time::timeout(limit, locks.lock(&docs)).await.is_ok());
    }
}
