//! Leaving a service alone that keeps failing.
//!
//! Closed, every call passes and failures in a row are counted. Open, none passes until the cooldown
//! is over; then one does, and its outcome closes the circuit or opens it again. No other success closes
//! it: a call that began before says how the service was, and a call for its health says little about
//! what else it can do.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug)]
pub(super) struct Breaker {
    failures_to_open: u32,
    cooldown: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
    },
    /// One call is under way to find out.
    Probing,
}

impl Breaker {
    pub(super) fn new(failures_to_open: u32, cooldown: Duration) -> Self {
        Self {
            failures_to_open: failures_to_open.max(1),
            cooldown,
            state: Mutex::new(State::Closed { failures: 0 }),
        }
    }

    /// Lets a call pass, or says how long it should wait.
    pub(super) fn enter(&self) -> Result<Permit<'_>, Duration> {
        let mut state = self.lock();
        match *state {
            State::Closed { .. } => Ok(self.permit(Kind::Ordinary)),
            State::Open { until } => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    *state = State::Probing;
                    Ok(self.permit(Kind::Probe))
                } else {
                    Err(left)
                }
            }
            State::Probing => Err(self.cooldown),
        }
    }

    /// Lets a call pass in any state. Its failure counts as any other; its success only spares the next
    /// call the rest of a cooldown.
    pub(super) fn enter_anyway(&self) -> Permit<'_> {
        self.permit(Kind::Aside)
    }

    fn permit(&self, kind: Kind) -> Permit<'_> {
        Permit { breaker: self, kind }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Ordinary,
    /// The one call that finds out.
    Probe,
    /// It passed without being asked.
    Aside,
}

/// Must be told how the call went; one that is dropped untold, because the call was cancelled,
/// leaves the next call to find out.
#[derive(Debug)]
pub(super) struct Permit<'a> {
    breaker: &'a Breaker,
    kind: Kind,
}

impl Permit<'_> {
    pub(super) fn succeeded(mut self) {
        let mut state = self.breaker.lock();
        match (self.kind, *state) {
            (Kind::Probe, _) | (Kind::Ordinary, State::Closed { .. }) => {
                *state = State::Closed { failures: 0 };
            }
            (Kind::Aside, State::Open { .. }) => {
                *state = State::Open {
                    until: Instant::now(),
                };
            }
            (Kind::Ordinary | Kind::Aside, _) => {}
        }
        self.kind = Kind::Aside;
    }

    pub(super) fn failed(mut self) {
        let breaker = self.breaker;
        let mut state = breaker.lock();
        let failures = match *state {
            State::Closed { failures } => failures.saturating_add(1),
            State::Probing if self.kind == Kind::Probe => breaker.failures_to_open,
            State::Open { .. } | State::Probing => return,
        };
        self.kind = Kind::Aside;
        *state = if failures >= breaker.failures_to_open {
            State::Open {
                until: super::retry::after(breaker.cooldown),
            }
        } else {
            State::Closed { failures }
        };
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.kind == Kind::Probe {
            *self.breaker.lock() = State::Open {
                until: Instant::now(),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOLDOWN: Duration = Duration::from_secs(10);

    fn fail(breaker: &Breaker, times: u32) {
        for _ in 0..times {
            breaker.enter().unwrap().failed();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn opens_after_failures_in_a_row_and_probes_with_one_call() {
        let breaker = Breaker::new(3, COOLDOWN);
        fail(&breaker, 2);
        breaker.enter().unwrap().succeeded();
        fail(&breaker, 3);
        assert_eq!(breaker.enter().unwrap_err(), COOLDOWN);

        tokio::time::advance(COOLDOWN).await;
        let probe = breaker.enter().unwrap();
        assert!(breaker.enter().is_err(), "only one call may probe");
        probe.failed();
        assert_eq!(breaker.enter().unwrap_err(), COOLDOWN);

        tokio::time::advance(COOLDOWN).await;
        breaker.enter().unwrap().succeeded();
        fail(&breaker, 2);
        assert!(breaker.enter().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_cancelled_probe_leaves_the_next_call_to_find_out() {
        let breaker = Breaker::new(1, COOLDOWN);
        fail(&breaker, 1);
        tokio::time::advance(COOLDOWN).await;
        drop(breaker.enter().unwrap());
        assert!(breaker.enter().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_passes_anyway_lets_the_next_one_find_out() {
        let breaker = Breaker::new(1, COOLDOWN);
        fail(&breaker, 1);
        breaker.enter_anyway().failed();
        assert!(breaker.enter().is_err());
        breaker.enter_anyway().succeeded();
        let probe = breaker.enter();
        assert!(probe.is_ok());
        assert!(breaker.enter().is_err(), "the circuit is not closed by it");
        breaker.enter_anyway().succeeded();
        assert!(breaker.enter().is_err(), "one call finds out already");
        probe.unwrap().failed();
        assert_eq!(breaker.enter().unwrap_err(), COOLDOWN);
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_passes_anyway_forgives_no_failure() {
        let breaker = Breaker::new(3, COOLDOWN);
        fail(&breaker, 2);
        breaker.enter_anyway().succeeded();
        fail(&breaker, 1);
        assert!(breaker.enter().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_began_before_an_outage_does_not_end_it() {
        let breaker = Breaker::new(1, COOLDOWN);
        let (slow, slower) = (breaker.enter().unwrap(), breaker.enter().unwrap());
        fail(&breaker, 1);
        slow.succeeded();
        assert_eq!(breaker.enter().unwrap_err(), COOLDOWN);
        tokio::time::advance(COOLDOWN).await;
        let probe = breaker.enter().unwrap();
        slower.succeeded();
        assert!(breaker.enter().is_err(), "the probe has not come back");
        probe.succeeded();
        assert!(breaker.enter().is_ok());
    }
}
