//! Parallel loops over the parts of one computation.
//!
//! A large batch keeps every thread busy with sequences of its own. A single short query cannot: its
//! time is the time to read the weights once. The thread that computes it, the leader, therefore asks
//! idle threads for help and splits each matrix product among those that join. Products follow each
//! other within microseconds, so helpers wait by spinning. The leader takes parts as well until none is
//! left, so it never waits for a helper that has not joined.
//!
//! A loop body borrows from the leader's stack, which the type system cannot express for threads that
//! already exist. Besides the kernels, this is the only file with `unsafe` code.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// A loop body, called with the number of a part.
type ParallelBody<'a> = &'a (dyn Fn(usize) + Sync + 'a);

/// The leader's handle to a group of threads.
pub(crate) struct ThreadGroup {
    state: Option<Arc<GroupState>>,
    size: usize,
}

/// A helper's handle to a group, see [`GroupHelper::assist`].
pub(crate) struct GroupHelper {
    state: Arc<GroupState>,
}

/// State shared by the leader and its helpers.
///
/// Invariant: `body` is written only while `open` is false and `active` is 0, and read only by a helper
/// that has counted itself in `active` and seen `open` afterwards. All operations are sequentially
/// consistent, so either the helper sees that the loop was closed, or the leader sees the helper.
struct GroupState {
    body: UnsafeCell<Option<(ParallelBody<'static>, usize)>>,
    open: AtomicBool,
    /// The number of the current loop, so that a helper joins each loop at most once.
    round: AtomicUsize,
    active: AtomicUsize,
    next: AtomicUsize,
    failed: AtomicBool,
    ended: AtomicBool,
}

// SAFETY: `body` is guarded by the protocol above; everything else is atomic.
unsafe impl Sync for GroupState {}
// SAFETY: the body is `Sync`, so a reference to it may be sent.
unsafe impl Send for GroupState {}

/// Spins before a waiting thread yields its core between checks.
const SPINS: usize = 2_000;

impl ThreadGroup {
    /// The calling thread alone.
    pub(crate) fn solo() -> Self {
        Self { state: None, size: 1 }
    }

    /// The calling thread and up to `helpers` others, one for each of the returned handles.
    pub(crate) fn with_helpers(helpers: usize) -> (Self, Vec<GroupHelper>) {
        if helpers == 0 {
            return (Self::solo(), Vec::new());
        }
        let state = Arc::new(GroupState {
            body: UnsafeCell::new(None),
            open: AtomicBool::new(false),
            round: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let handles = (0..helpers)
            .map(|_| GroupHelper { state: state.clone() })
            .collect();
        (
            Self {
                state: Some(state),
                size: helpers + 1,
            },
            handles,
        )
    }

    /// The largest number of threads that may take part.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Calls `body` once for each number below `parts`, on the threads that have joined, and returns when
    /// all calls have returned.
    pub(crate) fn for_each(&self, parts: usize, body: ParallelBody<'_>) {
        let Some(state) = self.state.as_deref().filter(|_| parts > 1) else {
            (0..parts).for_each(body);
            return;
        };
        // SAFETY: only the lifetime changes. The reference is used only by helpers that are counted
        // in `active` while `open`, and `Closing` ends that before this function returns or unwinds.
        let body: ParallelBody<'static> =
            unsafe { std::mem::transmute::<ParallelBody<'_>, ParallelBody<'static>>(body) };
        // SAFETY: `open` is false and `active` was 0 when the last loop was closed.
        unsafe { *state.body.get() = Some((body, parts)) };
        state.next.store(0, SeqCst);
        state.open.store(true, SeqCst);
        state.round.fetch_add(1, SeqCst);
        let closing = Closing(state);
        take_parts(state, body, parts);
        drop(closing);
        assert!(!state.failed.load(SeqCst), "a helper thread panicked");
    }
}

impl Drop for ThreadGroup {
    fn drop(&mut self) {
        if let Some(state) = &self.state {
            state.ended.store(true, SeqCst);
        }
    }
}

/// Closes a loop: afterwards no helper holds a reference to its body.
struct Closing<'a>(&'a GroupState);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.open.store(false, SeqCst);
        wait_until(|| self.0.active.load(SeqCst) == 0);
    }
}

impl GroupHelper {
    /// Takes part in the leader's loops until the leader drops its group.
    pub(crate) fn assist(self) {
        let state = &*self.state;
        let mut seen = 0;
        loop {
            wait_until(|| state.round.load(SeqCst) != seen || state.ended.load(SeqCst));
            seen = state.round.load(SeqCst);
            if state.ended.load(SeqCst) {
                return;
            }
            state.active.fetch_add(1, SeqCst);
            let leaving = Leaving(state);
            if state.open.load(SeqCst) {
                // SAFETY: counted in `active` and `open` seen afterwards, so the body stays valid.
                if let Some((body, parts)) = unsafe { *state.body.get() } {
                    take_parts(state, body, parts);
                }
            }
            drop(leaving);
        }
    }
}

struct Leaving<'a>(&'a GroupState);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, SeqCst);
        }
        self.0.active.fetch_sub(1, SeqCst);
    }
}

fn take_parts(state: &GroupState, body: ParallelBody<'_>, parts: usize) {
    loop {
        let part = state.next.fetch_add(1, SeqCst);
        if part >= parts {
            return;
        }
        body(part);
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
    fn every_part_runs_exactly_once_with_any_number_of_helpers() {
        for helpers in 0..4 {
            let (threads, handles) = ThreadGroup::with_helpers(helpers);
            std::thread::scope(|scope| {
                for helper in handles {
                    scope.spawn(|| helper.assist());
                }
                for round in 0..2_000 {
                    let parts = round % 17;
                    let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    threads.for_each(parts, &|part| {
                        counts[part].fetch_add(1, SeqCst);
                    });
                    assert!(counts.iter().all(|count| count.load(SeqCst) == 1));
                }
                drop(threads);
            });
        }
    }

    #[test]
    fn a_panic_of_a_helper_reaches_the_leader() {
        let (threads, mut handles) = ThreadGroup::with_helpers(1);
        let helper = handles.pop().unwrap();
        let leader = std::thread::current().id();
        let handle = std::thread::spawn(move || helper.assist());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            loop {
                threads.for_each(64, &|_| {
                    assert!(std::thread::current().id() == leader, "expected by this test");
                    std::thread::sleep(std::time::Duration::from_micros(10));
                });
            }
        }));
        assert!(outcome.is_err());
        drop(threads);
        assert!(handle.join().is_err());
    }
}
