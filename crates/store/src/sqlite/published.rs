//! The snapshots that readers see.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::sqlite::index::Snapshot;
use crate::sqlite::index::scope::IndexScope;

/// The newest snapshot of each collection, by its id. The lock is held for pointer copies only.
#[derive(Default)]
pub(crate) struct Published {
    snapshots: RwLock<HashMap<i64, Arc<Snapshot>>>,
    scope: IndexScope,
}

impl Published {
    pub(crate) fn new(snapshots: HashMap<i64, Arc<Snapshot>>, scope: IndexScope) -> Self {
        Self {
            snapshots: RwLock::new(snapshots),
            scope,
        }
    }

    /// The part of each collection that snapshots index.
    pub(crate) fn scope(&self) -> IndexScope {
        self.scope
    }

    pub(crate) fn get(&self, collection: i64) -> Option<Arc<Snapshot>> {
        let snapshots = self.snapshots.read().unwrap_or_else(PoisonError::into_inner);
        snapshots.get(&collection).cloned()
    }

    pub(crate) fn ids(&self) -> Vec<i64> {
        let snapshots = self.snapshots.read().unwrap_or_else(PoisonError::into_inner);
        snapshots.keys().copied().collect()
    }

    /// Publishes new snapshots; `None` removes a collection. Returns the replaced ones for the caller
    /// to drop later, because freeing a large snapshot takes a while.
    pub(crate) fn publish(&self, changes: HashMap<i64, Option<Arc<Snapshot>>>) -> Vec<Option<Arc<Snapshot>>> {
        let mut replaced = Vec::with_capacity(changes.len());
        let mut snapshots = self.snapshots.write().unwrap_or_else(PoisonError::into_inner);
        for (collection, snapshot) in changes {
            replaced.push(match snapshot {
                Some(snapshot) => snapshots.insert(collection, snapshot),
                None => snapshots.remove(&collection),
            });
        }
        replaced
    }
}
