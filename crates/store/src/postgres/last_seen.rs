//! What the last searches saw of each collection. Only ever a guess: other processes write, too.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ragstone_core::{CollectionName, Filter};

use super::read::View;

/// So many collections are remembered, and so many filters of each, for so long.
const COLLECTIONS: usize = 256;
const FILTERS: usize = 16;
const FRESH: Duration = Duration::from_secs(60);
/// Where a sample had none, it may have been bad luck.
const FRESH_IF_NONE: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct LastSeen(Mutex<HashMap<CollectionName, Known>>);

struct Known {
    seen: Seen,
    /// How many of all documents match a filter; the oldest first.
    shares: VecDeque<(Filter, f64, Instant)>,
}

/// A collection, and how a filter fits it.
#[derive(Clone)]
pub(super) struct Seen {
    pub(super) table: String,
    pub(super) dimensions: Option<usize>,
    pub(super) count: u64,
    /// How many of all documents match the filter, where that is known.
    pub(super) share: Option<f64>,
}

impl LastSeen {
    pub(super) fn get(&self, name: &CollectionName, filter: &Filter) -> Option<Seen> {
        let all = self.lock();
        let known = all.get(name)?;
        let share = known
            .shares
            .iter()
            .find(|(of, share, when)| {
                let fresh = if *share > 0.0 { FRESH } else { FRESH_IF_NONE };
                of == filter && when.elapsed() < fresh
            })
            .map(|(_, share, _)| *share);
        Some(Seen {
            share,
            ..known.seen.clone()
        })
    }

    pub(super) fn note(&self, view: &View) {
        let mut all = self.lock();
        let Some(table) = &view.table else {
            all.remove(&view.collection.name);
            return;
        };
        let seen = Seen {
            table: table.clone(),
            dimensions: view.collection.dimensions,
            count: view.collection.count,
            share: None,
        };
        match all.get_mut(&view.collection.name) {
            Some(known) if known.seen.table == *table => known.seen = seen,
            _ => {
                if all.len() >= COLLECTIONS {
                    all.clear();
                }
                let shares = VecDeque::new();
                all.insert(view.collection.name.clone(), Known { seen, shares });
            }
        }
    }

    pub(super) fn note_share(&self, name: &CollectionName, filter: &Filter, share: f64) {
        if let Some(known) = self.lock().get_mut(name) {
            known.shares.retain(|(of, _, _)| of != filter);
            if known.shares.len() >= FILTERS {
                known.shares.pop_front();
            }
            known.shares.push_back((filter.clone(), share, Instant::now()));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CollectionName, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
