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

    /// When the oldest entry was saved whose call has failed since one last succeeded.
    pub(super) fn oldest_failed(&self) -> Option<Millis> {
        self.state().oldest_failed
    }

    /// A call that began at this time succeeded. If another failed since, that one knows better.
    pub(super) fn succeeded(&self, began: Instant) {
        let mut state = self.state();
        if state.failed_at.is_none_or(|failed_at| failed_at <= began) {
            *state = State::default();
            drop(state);
            self.ended.notify_one();
        }
    }

    pub(super) fn failed(&self, options: &BufferOptions, at_least: Duration, oldest: Option<Millis>) {
        let now = Instant::now();
        let mut state = self.state();
        // Calls that were under way together fail for one reason.
        if state.until.is_none_or(|until| until <= now) {
            state.failures = state.failures.saturating_add(1);
        }
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

    #[tokio::test(start_paused = true)]
    async fn a_pause_is_as_long_as_was_asked_for_and_ends_with_a_success() {
        let options = BufferOptions::default();
        let pause = Pause::default();
        let before = Instant::now();
        tokio::time::advance(Duration::from_secs(1)).await;
        pause.failed(&options, Duration::from_secs(90), Some(7));
        pause.failed(&options, Duration::ZERO, Some(9));
        assert_eq!((pause.failures(), pause.oldest_failed()), (1, Some(7)));
        let left = pause.until().unwrap() - Instant::now();
        assert!(left >= Duration::from_secs(90), "{left:?}");
        pause.succeeded(before);
        assert!(pause.until().is_some(), "an older call says nothing");
        tokio::join!(pause.over(), async { pause.succeeded(Instant::now()) });
        assert_eq!((pause.until(), pause.failures()), (None, 0));
        assert!(before.elapsed() < Duration::from_secs(2));
        // However long somebody asks for.
        pause.failed(&options, Duration::MAX, None);
    }
}
