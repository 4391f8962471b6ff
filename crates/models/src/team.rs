//! Several threads working on the pieces of one computation.
//!
//! A large batch keeps every thread busy with sequences of its own. A single short query cannot:
//! its time is the time to read the weights once. So the thread that computes it (the leader)
//! invites idle threads, and splits each matrix product among those that came. Products follow each
//! other within microseconds, so helpers wait by spinning; nobody waits for a helper that has not
//! arrived, because the leader takes pieces as well until none is left.
//!
//! A team's work borrows from the leader's stack, which the type system cannot express across
//! threads that exist already: beside the kernels this is the last file with `unsafe` code.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

type Work<'a> = &'a (dyn Fn(usize) + Sync + 'a);

/// The leader's side of a team.
pub(crate) struct Team {
    shared: Option<Arc<Shared>>,
    size: usize,
}

/// An invitation to work for a leader, see [`Helper::assist`].
pub(crate) struct Helper {
    shared: Arc<Shared>,
}

/// Where leader and helpers meet.
///
/// Invariant: `work` is written only while `open` is false and `present` is 0, and read only by a
/// helper that counts itself in `present` and saw `open` afterwards. All operations are sequentially
/// consistent, so either the helper sees that the work was closed, or the leader sees the helper.
struct Shared {
    work: UnsafeCell<Option<(Work<'static>, usize)>>,
    open: AtomicBool,
    /// Counts the pieces of work, so that a helper takes part in each at most once.
    round: AtomicUsize,
    present: AtomicUsize,
    next: AtomicUsize,
    failed: AtomicBool,
    dissolved: AtomicBool,
}

// SAFETY: `work` is guarded by the protocol above; everything else is atomic.
unsafe impl Sync for Shared {}
// SAFETY: the work is `Sync`, so a reference to it may be sent.
unsafe impl Send for Shared {}

/// Rounds of spinning before a waiting thread gives its core to others between looks.
const SPINS: usize = 2_000;

impl Team {
    /// The calling thread alone.
    pub(crate) fn solo() -> Self {
        Self {
            shared: None,
            size: 1,
        }
    }

    /// The calling thread and up to `helpers` others, each of which needs one of the invitations.
    pub(crate) fn with_helpers(helpers: usize) -> (Self, Vec<Helper>) {
        if helpers == 0 {
            return (Self::solo(), Vec::new());
        }
        let shared = Arc::new(Shared {
            work: UnsafeCell::new(None),
            open: AtomicBool::new(false),
            round: AtomicUsize::new(0),
            present: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            dissolved: AtomicBool::new(false),
        });
        let invitations = (0..helpers)
            .map(|_| Helper {
                shared: shared.clone(),
            })
            .collect();
        (
            Self {
                shared: Some(shared),
                size: helpers + 1,
            },
            invitations,
        )
    }

    /// The most threads that may take part.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Calls `work` once for each number below `parts`, on whichever threads are there, and returns
    /// when all calls have.
    pub(crate) fn for_each(&self, parts: usize, work: Work<'_>) {
        let Some(shared) = self.shared.as_deref().filter(|_| parts > 1) else {
            (0..parts).for_each(work);
            return;
        };
        // SAFETY: only the lifetime changes. The reference is used only by helpers that are counted
        // in `present` while `open`, and `Closing` ends that before this function returns or unwinds.
        let work: Work<'static> = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: `open` is false and `present` was 0 when the last piece of work was closed.
        unsafe { *shared.work.get() = Some((work, parts)) };
        shared.next.store(0, SeqCst);
        shared.open.store(true, SeqCst);
        shared.round.fetch_add(1, SeqCst);
        let closing = Closing(shared);
        take_parts(shared, work, parts);
        drop(closing);
        assert!(!shared.failed.load(SeqCst), "a helping thread failed");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        if let Some(shared) = &self.shared {
            shared.dissolved.store(true, SeqCst);
        }
    }
}

/// Ends a piece of work: afterwards no helper holds a reference to it.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.open.store(false, SeqCst);
        wait_until(|| self.0.present.load(SeqCst) == 0);
    }
}

impl Helper {
    /// Works for the leader until it dissolves the team.
    pub(crate) fn assist(self) {
        let shared = &*self.shared;
        let mut seen = 0;
        loop {
            wait_until(|| shared.round.load(SeqCst) != seen || shared.dissolved.load(SeqCst));
            seen = shared.round.load(SeqCst);
            if shared.dissolved.load(SeqCst) {
                return;
            }
            shared.present.fetch_add(1, SeqCst);
            let leaving = Leaving(shared);
            if shared.open.load(SeqCst) {
                // SAFETY: counted in `present` and `open` seen afterwards, so the work stays as it is.
                if let Some((work, parts)) = unsafe { *shared.work.get() } {
                    take_parts(shared, work, parts);
                }
            }
            drop(leaving);
        }
    }
}

struct Leaving<'a>(&'a Shared);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, SeqCst);
        }
        self.0.present.fetch_sub(1, SeqCst);
    }
}

fn take_parts(shared: &Shared, work: Work<'_>, parts: usize) {
    loop {
        let part = shared.next.fetch_add(1, SeqCst);
        if part >= parts {
            return;
        }
        work(part);
    }
}

fn wait_until(condition: impl Fn() -> bool) {
    let mut spins = 0;
    while !condition() {
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_once_however_many_threads_help() {
        for helpers in 0..4 {
            let (team, invitations) = Team::with_helpers(helpers);
            std::thread::scope(|scope| {
                for helper in invitations {
                    scope.spawn(|| helper.assist());
                }
                for round in 0..2_000 {
                    let parts = round % 17;
                    let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    team.for_each(parts, &|part| {
                        counts[part].fetch_add(1, SeqCst);
                    });
                    assert!(counts.iter().all(|count| count.load(SeqCst) == 1));
                }
                drop(team);
            });
        }
    }

    #[test]
    fn a_failing_helper_fails_the_leader_and_not_silently() {
        let (team, mut invitations) = Team::with_helpers(1);
        let helper = invitations.pop().unwrap();
        let leader = std::thread::current().id();
        let handle = std::thread::spawn(move || helper.assist());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            loop {
                team.for_each(64, &|_| {
                    assert!(std::thread::current().id() == leader, "expected in this test");
                    std::thread::sleep(std::time::Duration::from_micros(10));
                });
            }
        }));
        assert!(outcome.is_err());
        drop(team);
        assert!(handle.join().is_err());
    }
}
