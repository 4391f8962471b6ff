//! Writers of this process take turns.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ragstone_core::CollectionName;
use tokio::sync::OwnedMutexGuard;

/// What replaces metadata has to read it first, so of the writers of one collection only one is at work.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<CollectionName, Arc<tokio::sync::Mutex<()>>>>);

impl Turns {
    /// Waits for the turn, but not longer than this: whoever has it may wait for a server that hangs.
    pub(super) async fn take(
        &self,
        name: &CollectionName,
        patience: Duration,
    ) -> Option<OwnedMutexGuard<()>> {
        let turn = {
            let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Those that nobody has or waits for.
            turns.retain(|other, turn| other == name || Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(name.clone()).or_default())
        };
        tokio::time::timeout(patience, turn.lock_owned()).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn writers_of_one_collection_take_turns_and_do_not_wait_for_ever() {
        let name = |name: &str| CollectionName::parse(name).unwrap();
        let turns = Turns::default();
        let patience = Duration::from_secs(20);
        let first = turns.take(&name("docs"), patience).await.unwrap();
        assert!(turns.take(&name("others"), patience).await.is_some());
        assert!(turns.take(&name("docs"), patience).await.is_none());
        drop(first);
        assert!(turns.take(&name("docs"), patience).await.is_some());
        assert_eq!(turns.0.lock().unwrap().len(), 1);
    }
}
