//! When the embedder is left alone.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ragstone_core::records::Millis;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::batch;
use super::buffer::BufferOptions;

/// While calls fail, the worker claims nothing, so that an outage costs little.
#[derive(Default)]
pub(super) struct Pause {
    state: Mutex<State>,
    ended: Notify,
}

#[derive(Default)]
struct State {
    /// In a row.
    failures: u32,
    failed_at: Option<Instant>,
    until: Option<Instant>,
    oldest_failed: Option<Millis>,
    /// How often a round is halved.
    halvings: u32,
    error: Option<String>,
}

/// What is to be known of a failure.
pub(super) struct Failed<'a> {
    pub(super) error: &'a str,
    /// How long the embedder is to be left alone.
    pub(super) at_least: Duration,
    /// When the oldest of the entries was saved.
    pub(super) oldest: Option<Millis>,
}

impl Pause {
    pub(super) fn until(&self) -> Option<Instant> {
        self.state().until.filter(|until| *until > Instant::now())
    }

    /// Returns when there is no pause, or no longer.
    pub(super) async fn over(&self) {
        while let Some(until) = self.until() {
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                () = self.ended.notified() => {}
            }
        }
    }

    pub(super) fn failures(&self) -> u32 {
        self.state().failures
    }

    /// By how many halvings rounds are smaller than they could be.
    pub(super) fn halvings(&self) -> u32 {
        self.state().halvings
    }

    /// Why nothing was embedded the last time that something should have been.
    pub(super) fn error(&self) -> Option<String> {
        self.state().error.clone()
    }

    /// When the oldest entry was saved whose call has failed since one last succeeded.
    pub(super) fn oldest_failed(&self) -> Option<Millis> {
        self.state().oldest_failed
    }

    /// A call that began at this time succeeded. If another failed since, that one knows better.
    pub(super) fn succeeded(&self, began: Instant) {
        let mut state = self.state();
        if state.failed_at.is_none_or(|failed_at| failed_at <= began) {
            *state = State {
                failed_at: state.failed_at,
                halvings: state.halvings,
                ..State::default()
            };
            drop(state);
            self.ended.notify_one();
        }
    }

    /// A round that began at this time was done to its end. Where no call failed meanwhile, the next
    /// one may be twice as large: a provider that just got well is not given everything at once.
    pub(super) fn round_done(&self, began: Instant) {
        let mut state = self.state();
        if state.failed_at.is_none_or(|failed_at| failed_at <= began) {
            state.halvings = state.halvings.saturating_sub(1);
        }
    }

    pub(super) fn failed(&self, options: &BufferOptions, failure: Failed<'_>) {
        let Failed {
            error,
            at_least,
            oldest,
        } = failure;
        let now = Instant::now();
        let mut state = self.state();
        // Calls that were under way together fail for one reason.
        if state.until.is_none_or(|until| until <= now) {
            state.failures = state.failures.saturating_add(1);
            // Less than one full call is enough to find out whether calls still fail; and ever less,
            // so that a text that makes a provider fail is soon alone.
            let below_one_call = options.parallel.max(1).ilog2() + 1;
            state.halvings = state.halvings.saturating_add(1).max(below_one_call);
        }
        state.error = Some(error.to_owned());
        state.failed_at = Some(now);
        state.oldest_failed = state.oldest_failed.into_iter().chain(oldest).min();
        let pause = batch::backoff(options, state.failures).max(at_least);
        state.until = state.until.max(now.checked_add(pause));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(at_least: Duration, oldest: Option<Millis>) -> Failed<'static> {
        Failed {
            error: "it is down",
            at_least,
            oldest,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_as_long_as_was_asked_for_and_ends_with_a_success() {
        let options = BufferOptions::default();
        let pause = Pause::default();
        let before = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        pause.failed(&options, failed(Duration::from_secs(90), Some(7)));
        pause.failed(&options, failed(Duration::ZERO, Some(9)));
        assert_eq!((pause.failures(), pause.oldest_failed()), (1, Some(7)));
        let left = pause.until().unwrap() - Instant::now();
        assert!(left >= Duration::from_secs(90), "{left:?}");
        pause.succeeded(before);
        assert!(pause.until().is_some(), "an older call says nothing");
        assert_eq!(pause.error().as_deref(), Some("it is down"));
        tokio::join!(pause.over(), async { pause.succeeded(Instant::now()) });
        assert_eq!((pause.until(), pause.failures()), (None, 0));
        assert_eq!(pause.error(), None);
        assert!(before.elapsed() < Duration::from_secs(2));
        // However long somebody asks for.
        pause.failed(&options, failed(Duration::MAX, None));
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_shrink_with_failures_and_grow_again_by_and_by() {
        let options = BufferOptions::default();
        let pause = Pause::default();
        let second = Duration::from_secs(1);
        let began = Instant::now();
        for expected in [3, 4] {
            tokio::time::advance(100 * second).await;
            pause.failed(&options, failed(Duration::ZERO, None));
            assert_eq!(pause.halvings(), expected);
        }
        tokio::time::advance(second).await;
        pause.succeeded(Instant::now());
        pause.round_done(began);
        assert_eq!(pause.halvings(), 4, "calls of that round failed");
        for expected in [3, 2, 1, 0, 0] {
            pause.round_done(Instant::now());
            assert_eq!(pause.halvings(), expected);
        }
    }
}
