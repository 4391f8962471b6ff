//! Recent statistics of each collection, to plan a search before the collection is read. Other
//! processes write too, so an entry is only a guess; every search checks it against what it read.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ragstone_core::{CollectionName, Filter};

use super::read::CollectionState;

/// Number of collections in the cache.
const COLLECTIONS: usize = 256;
/// Number of filters per collection.
const FILTERS: usize = 16;
/// How long the selectivity of a filter is used.
const SELECTIVITY_TTL: Duration = Duration::from_secs(60);
/// The same for a selectivity of zero: the sample may have missed the few that match.
const ZERO_SELECTIVITY_TTL: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct StatsCache(Mutex<HashMap<CollectionName, StatsEntry>>);

struct StatsEntry {
    stats: TableStats,
    /// The oldest first.
    selectivities: VecDeque<(Filter, f64, Instant)>,
}

/// The table of a collection and its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TableStats {
    pub(super) table: String,
    pub(super) dimensions: Option<usize>,
    pub(super) count: u64,
}

impl TableStats {
    /// Whether statements made for one of them are correct for the other. The count only decides how
    /// documents are found, not which.
    pub(super) fn same_table(&self, other: &Self) -> bool {
        self.table == other.table && self.dimensions == other.dimensions
    }
}

impl StatsCache {
    pub(super) fn get(&self, name: &CollectionName) -> Option<TableStats> {
        self.lock().get(name).map(|entry| entry.stats.clone())
    }

    /// The share of all documents that match a filter, from 0 to 1.
    pub(super) fn selectivity(&self, name: &CollectionName, filter: &Filter) -> Option<f64> {
        let entries = self.lock();
        let mut selectivities = entries.get(name)?.selectivities.iter();
        let fresh = selectivities.find(|(of, selectivity, since)| {
            let ttl = match *selectivity > 0.0 {
                true => SELECTIVITY_TTL,
                false => ZERO_SELECTIVITY_TTL,
            };
            of == filter && since.elapsed() < ttl
        });
        fresh.map(|(_, selectivity, _)| *selectivity)
    }

    pub(super) fn update(&self, state: &CollectionState) {
        let mut entries = self.lock();
        let name = &state.collection.name;
        let Some(stats) = state.stats() else {
            entries.remove(name);
            return;
        };
        match entries.get_mut(name) {
            Some(entry) if entry.stats.table == stats.table => entry.stats = stats,
            _ => {
                if entries.len() >= COLLECTIONS {
                    entries.clear();
                }
                let selectivities = VecDeque::new();
                entries.insert(name.clone(), StatsEntry { stats, selectivities });
            }
        }
    }

    pub(super) fn update_selectivity(&self, name: &CollectionName, filter: &Filter, selectivity: f64) {
        if let Some(entry) = self.lock().get_mut(name) {
            entry.selectivities.retain(|(of, _, _)| of != filter);
            if entry.selectivities.len() >= FILTERS {
                entry.selectivities.pop_front();
            }
            let sampled = (filter.clone(), selectivity, Instant::now());
            entry.selectivities.push_back(sampled);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<CollectionName, StatsEntry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
