//! What a worker that has the store to itself is embedding right now.
//!
//! Where several processes share a store, an entry is claimed in the database before it is embedded.
//! Where only one uses it, remembering what is under way does the same without a write: when the
//! process ends, however it ends, nothing is under way.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ragstone_core::records::Record;

use super::entry::Kind;

type Versions = HashMap<(Kind, String), u64>;

#[derive(Default)]
pub(super) struct InFlight(Mutex<Entries>);

#[derive(Default)]
struct Entries {
    underway: Versions,
    /// Done since the last look began: what that look reads may still show them as due.
    done: Versions,
}

impl InFlight {
    /// To be called before the database is read, and never while another look goes on. Returns how
    /// many of the entries that are due may be under way.
    pub(super) fn begin_look(&self) -> usize {
        let mut entries = self.entries();
        entries.done.clear();
        entries.underway.len()
    }

    /// Those of the due records that nobody works on, up to the limit; from now on somebody does.
    /// One that was saved again meanwhile has another version and counts as new.
    pub(super) fn take(
        self: &Arc<Self>,
        kind: Kind,
        due: Vec<Record>,
        limit: usize,
    ) -> (Vec<Record>, Underway) {
        let mut entries = self.entries();
        let mut taken = Vec::new();
        for record in due {
            let key = (kind, record.key.clone());
            let version = Some(&record.version);
            let is_known = entries.underway.get(&key) == version || entries.done.get(&key) == version;
            if taken.len() < limit && !is_known {
                entries.underway.insert(key, record.version);
                taken.push(record);
            }
        }
        let underway = Underway {
            in_flight: Arc::clone(self),
            entries: taken
                .iter()
                .map(|record| ((kind, record.key.clone()), record.version))
                .collect(),
        };
        (taken, underway)
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Entries that are being embedded until this is dropped.
pub(super) struct Underway {
    in_flight: Arc<InFlight>,
    entries: Vec<((Kind, String), u64)>,
}

impl Drop for Underway {
    fn drop(&mut self) {
        let mut entries = self.in_flight.entries();
        for (key, version) in std::mem::take(&mut self.entries) {
            if entries.underway.get(&key) == Some(&version) {
                entries.underway.remove(&key);
            }
            entries.done.insert(key, version);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(key: &str, version: u64) -> Record {
        Record {
            key: key.to_owned(),
            group: String::new(),
            value: Vec::new(),
            version,
            due: Some(0),
        }
    }

    fn keys(records: &[Record]) -> Vec<&str> {
        records.iter().map(|record| record.key.as_str()).collect()
    }

    #[test]
    fn an_entry_is_taken_once_until_it_is_done_or_saved_again() {
        let in_flight = Arc::new(InFlight::default());
        let due = || vec![record("a", 1), record("b", 2), record("c", 3)];
        let (first, underway) = in_flight.take(Kind::Knowledge, due(), 2);
        assert_eq!(keys(&first), ["a", "b"]);
        let (second, others) = in_flight.take(Kind::Knowledge, due(), 2);
        assert_eq!(keys(&second), ["c"]);
        assert_eq!(
            keys(&in_flight.take(Kind::Learning, due(), 1).0),
            ["a"],
            "of another kind"
        );
        let (again, newer) = in_flight.take(Kind::Knowledge, vec![record("a", 4)], 2);
        assert_eq!(keys(&again), ["a"]);
        drop(underway);
        assert_eq!(in_flight.begin_look(), 2);
        let (third, _) = in_flight.take(Kind::Knowledge, vec![record("a", 4), record("b", 2)], 2);
        assert_eq!(keys(&third), ["b"], "the newer version is still under way");
        drop((others, newer));
        let stale = vec![record("c", 3)];
        assert_eq!(
            keys(&in_flight.take(Kind::Knowledge, stale.clone(), 2).0),
            Vec::<&str>::new()
        );
        in_flight.begin_look();
        assert_eq!(
            keys(&in_flight.take(Kind::Knowledge, stale, 2).0),
            ["c"],
            "due again"
        );
    }
}
