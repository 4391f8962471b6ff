//! Leases: records that wait for work are claimed by one worker at a time.
//!
//! A worker claims due records for the length of a lease. It renews the lease while it works, and
//! releases records that it does not finish. When a worker dies, its leases run out and its records
//! can be claimed again. Every write expects the version that was claimed, so a worker notices when a
//! record was changed or taken over, and stops.
//!
//! Where one process owns the store, claims are kept in memory and cost no write: when the process
//! ends, however it ends, nothing is in flight.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ragstone_core::records::{Applied, Millis, Record, RecordChange, Records};
use ragstone_core::storage::StorageError;
use tokio::time::Instant;

/// A live worker renews its leases so many times before one would run out.
const RENEWALS: u32 = 3;

/// Whether other processes may work on the same store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    Shared,
    /// No other process does, so claims stay in memory.
    Exclusive,
}

/// A claimed record, as its worker keeps it.
pub trait Leased {
    /// The record with its next run time, for the version that was claimed.
    fn put(&self, run_at: Option<Millis>) -> Result<RecordChange, StorageError>;

    fn set_version(&mut self, version: u64);
}

/// Due records to claim.
#[derive(Debug, Clone, Copy)]
pub struct ClaimRequest<'a> {
    pub kinds: &'a [&'static str],
    /// The most records of each kind.
    pub limit: usize,
    pub now: Millis,
    /// Records that are due by then can be claimed; usually now.
    pub due_by: Millis,
}

impl<'a> ClaimRequest<'a> {
    pub fn new(kinds: &'a [&'static str], limit: usize, now: Millis) -> Self {
        Self {
            kinds,
            limit,
            now,
            due_by: now,
        }
    }
}

/// Records that this worker has claimed. In an owned store they are in flight until this is dropped.
pub struct Claim {
    /// One list for each kind of the request, the longest due first.
    pub records: Vec<Vec<Record>>,
    pub lease_ends: Instant,
    in_flight: Vec<InFlightGuard>,
}

impl Claim {
    /// Takes the records out; what remains only marks them as in flight.
    pub fn take(&mut self) -> Vec<Vec<Record>> {
        std::mem::take(&mut self.records)
    }

    #[cfg(test)]
    fn is_held(&self) -> bool {
        !self.in_flight.is_empty()
    }
}

/// Claims, renews and releases records.
pub struct Leases {
    duration: Duration,
    /// Only in a store that this process owns.
    in_flight: Option<Arc<InFlight>>,
}

impl Leases {
    pub fn new(ownership: Ownership, duration: Duration) -> Self {
        Self {
            duration,
            in_flight: (ownership == Ownership::Exclusive).then(Arc::default),
        }
    }

    pub const fn shared(duration: Duration) -> Self {
        Self {
            duration,
            in_flight: None,
        }
    }

    /// Claims due records. In an owned store, one claim has to end before the next begins.
    pub async fn claim(
        &self,
        records: &dyn Records,
        request: ClaimRequest<'_>,
    ) -> Result<Claim, StorageError> {
        let ClaimRequest {
            kinds,
            limit,
            now,
            due_by,
        } = request;
        let mut claim = Claim {
            records: Vec::with_capacity(kinds.len()),
            lease_ends: Instant::now() + self.duration,
            in_flight: Vec::new(),
        };
        let Some(in_flight) = &self.in_flight else {
            let lease_until = now.saturating_add(millis(self.duration));
            let claims = kinds
                .iter()
                .map(|kind| records.claim(kind, limit, due_by, lease_until));
            claim.records = futures::future::try_join_all(claims).await?;
            return Ok(claim);
        };
        let most = limit.saturating_add(in_flight.begin());
        let due = kinds.iter().map(|kind| records.ready(kind, most, due_by));
        let due = futures::future::try_join_all(due).await?;
        for (kind, due) in kinds.iter().zip(due) {
            let (taken, guard) = in_flight.take(kind, due, limit);
            claim.records.push(taken);
            claim.in_flight.push(guard);
        }
        Ok(claim)
    }

    /// Writes a record with a new lease. `false` if another worker or a user changed it.
    pub async fn renew(&self, records: &dyn Records, leased: &mut impl Leased) -> Result<bool, StorageError> {
        let lease_until = now().saturating_add(millis(self.duration));
        write(records, leased, Some(lease_until)).await
    }

    /// Works while renewing the lease; `None` if the lease was lost. An error of the store only delays
    /// the renewal.
    pub async fn hold<T>(
        &self,
        records: &dyn Records,
        leased: &mut impl Leased,
        work: impl Future<Output = T>,
    ) -> Option<T> {
        let mut work = std::pin::pin!(work);
        let mut beat = tokio::time::interval(self.duration / (RENEWALS + 1));
        beat.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        beat.tick().await;
        loop {
            tokio::select! {
                done = &mut work => return Some(done),
                _ = beat.tick() => match self.renew(records, leased).await {
                    Ok(true) => {}
                    Ok(false) => return None,
                    Err(error) => tracing::warn!(%error, "a lease could not be renewed"),
                },
            }
        }
    }

    /// Makes records available to other workers, each at its time. In an owned store dropping the
    /// claim does that.
    pub async fn release<T: Leased>(
        &self,
        records: &dyn Records,
        leased: &[T],
        run_at: impl Fn(&T) -> Millis,
    ) -> Result<(), StorageError> {
        if self.in_flight.is_some() || leased.is_empty() {
            return Ok(());
        }
        let changes = leased
            .iter()
            .map(|leased| leased.put(Some(run_at(leased))))
            .collect::<Result<_, _>>()?;
        records.apply(changes).await.map(drop)
    }
}

/// Writes a record at the version that was claimed. `false` if it has another version now.
pub async fn write(
    records: &dyn Records,
    leased: &mut impl Leased,
    run_at: Option<Millis>,
) -> Result<bool, StorageError> {
    let applied = records.apply(vec![leased.put(run_at)?]).await?;
    let [Applied::Done { version }] = applied[..] else {
        return Ok(false);
    };
    leased.set_version(version);
    Ok(true)
}

pub fn now() -> Millis {
    jiff::Timestamp::now().as_millisecond()
}

pub fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(Millis::MAX / 4)
}

type Versions = HashMap<(&'static str, String), u64>;

/// The claims of the process that owns a store.
#[derive(Default)]
struct InFlight(Mutex<Claimed>);

#[derive(Default)]
struct Claimed {
    in_flight: Versions,
    /// Finished since the last claim began, which may still read them as due.
    finished: Versions,
}

impl InFlight {
    /// Begins a claim, before the store is read. Returns how many due records may be in flight.
    fn begin(&self) -> usize {
        let mut claimed = self.lock();
        claimed.finished.clear();
        claimed.in_flight.len()
    }

    /// Claims those of the due records that are free, up to the limit. A record that was written
    /// meanwhile has another version and counts as new.
    fn take(
        self: &Arc<Self>,
        kind: &'static str,
        due: Vec<Record>,
        limit: usize,
    ) -> (Vec<Record>, InFlightGuard) {
        let mut claimed = self.lock();
        let mut taken = Vec::new();
        for record in due {
            let key = (kind, record.key.clone());
            let version = Some(&record.version);
            let is_known = claimed.in_flight.get(&key) == version || claimed.finished.get(&key) == version;
            if taken.len() < limit && !is_known {
                claimed.in_flight.insert(key, record.version);
                taken.push(record);
            }
        }
        let guard = InFlightGuard {
            in_flight: Arc::clone(self),
            records: taken
                .iter()
                .map(|record| ((kind, record.key.clone()), record.version))
                .collect(),
        };
        (taken, guard)
    }

    fn lock(&self) -> MutexGuard<'_, Claimed> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct InFlightGuard {
    in_flight: Arc<InFlight>,
    records: Vec<((&'static str, String), u64)>,
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let mut claimed = self.in_flight.lock();
        for (key, version) in std::mem::take(&mut self.records) {
            if claimed.in_flight.get(&key) == Some(&version) {
                claimed.in_flight.remove(&key);
            }
            claimed.finished.insert(key, version);
        }
    }
}

#[cfg(test)]
mod tests {
    use ragstone_core::records::Expect;

    use super::*;
    use ragstone_core::models::Models;
    use ragstone_search::testing::{Parts, parts};

    const KIND: &str = "errand";
    const LEASE: Duration = Duration::from_secs(8);

    struct Errand {
        key: String,
        version: u64,
    }

    impl Errand {
        fn of(claim: &Claim) -> Self {
            let record = &claim.records[0][0];
            Self {
                key: record.key.clone(),
                version: record.version,
            }
        }
    }

    impl Leased for Errand {
        fn put(&self, run_at: Option<Millis>) -> Result<RecordChange, StorageError> {
            Ok(put(&self.key, run_at, Expect::Version(self.version)))
        }

        fn set_version(&mut self, version: u64) {
            self.version = version;
        }
    }

    fn put(key: &str, run_at: Option<Millis>, expect: Expect) -> RecordChange {
        RecordChange::Put {
            kind: KIND.to_owned(),
            key: key.to_owned(),
            group: String::new(),
            value: Vec::new(),
            run_at,
            expect,
        }
    }

    async fn setup() -> Parts {
        let parts = parts(Models::new(Vec::new(), None));
        let errand = put("a", Some(0), Expect::Absent);
        parts.store.apply(vec![errand]).await.unwrap();
        parts
    }

    async fn claimed_at(leases: &Leases, parts: &Parts, now: Millis) -> Claim {
        let request = ClaimRequest::new(&[KIND], 9, now);
        leases.claim(&*parts.store, request).await.unwrap()
    }

    #[tokio::test]
    async fn a_claim_that_is_not_renewed_runs_out() {
        let parts = setup().await;
        let leases = Leases::shared(LEASE);
        let claim = claimed_at(&leases, &parts, 1000).await;
        assert!(claim.records[0].len() == 1 && !claim.is_held());
        let end = 1000 + millis(LEASE);
        let before = claimed_at(&leases, &parts, end - 1).await;
        assert!(before.records[0].is_empty(), "one worker at a time");
        let mut dead = Errand::of(&claim);
        let after = claimed_at(&leases, &parts, end).await;
        assert_eq!(after.records[0].len(), 1, "the worker is dead");
        assert!(
            !leases.renew(&*parts.store, &mut dead).await.unwrap(),
            "it was taken over"
        );
    }

    #[tokio::test]
    async fn a_lease_is_renewed_while_work_goes_on_and_released_afterwards() {
        let parts = setup().await;
        let leases = Leases::shared(Duration::from_millis(80));
        let mut errand = Errand::of(&claimed_at(&leases, &parts, now()).await);
        let first = errand.version;
        let store = Arc::clone(&parts.store);
        // Ends only once the lease was renewed several times.
        let work = async {
            while store.get(KIND, &["a".to_owned()]).await.unwrap()[0].version < first + 3 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            "done"
        };
        let done = leases.hold(&*parts.store, &mut errand, work).await;
        assert_eq!(done, Some("done"));
        leases.release(&*parts.store, &[errand], |_| 7).await.unwrap();
        let claim = claimed_at(&leases, &parts, 7).await;
        assert_eq!(claim.records[0].len(), 1);
    }

    #[tokio::test]
    async fn work_ends_when_its_record_is_changed() {
        let parts = setup().await;
        let leases = Leases::shared(Duration::from_millis(40));
        let mut errand = Errand::of(&claimed_at(&leases, &parts, now()).await);
        let cancelled = put("a", None, Expect::Anything);
        parts.store.apply(vec![cancelled]).await.unwrap();
        let endless = std::future::pending::<()>();
        assert_eq!(leases.hold(&*parts.store, &mut errand, endless).await, None);
    }

    fn record(key: &str, version: u64) -> Record {
        Record {
            key: key.to_owned(),
            group: String::new(),
            value: Vec::new(),
            version,
            run_at: Some(0),
        }
    }

    fn keys(records: &[Record]) -> Vec<&str> {
        records.iter().map(|record| record.key.as_str()).collect()
    }

    #[test]
    fn in_an_owned_store_a_record_is_taken_once_until_it_is_done_or_changed() {
        let in_flight = Arc::new(InFlight::default());
        let due = || vec![record("a", 1), record("b", 2), record("c", 3)];
        let (first, guard) = in_flight.take(KIND, due(), 2);
        assert_eq!(keys(&first), ["a", "b"]);
        let (second, others) = in_flight.take(KIND, due(), 2);
        assert_eq!(keys(&second), ["c"]);
        assert_eq!(
            keys(&in_flight.take("other", due(), 1).0),
            ["a"],
            "of another kind"
        );
        let (retried, newer) = in_flight.take(KIND, vec![record("a", 4)], 2);
        assert_eq!(keys(&retried), ["a"]);
        drop(guard);
        assert_eq!(in_flight.begin(), 2);
        let (third, _) = in_flight.take(KIND, vec![record("a", 4), record("b", 2)], 2);
        assert_eq!(keys(&third), ["b"], "the newer version is still in flight");
        drop((others, newer));
        let stale = vec![record("c", 3)];
        assert_eq!(
            keys(&in_flight.take(KIND, stale.clone(), 2).0),
            Vec::<&str>::new()
        );
        in_flight.begin();
        assert_eq!(keys(&in_flight.take(KIND, stale, 2).0), ["c"], "due again");
    }
}
