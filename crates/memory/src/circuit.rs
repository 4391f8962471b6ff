//! The circuit breaker of the embedder.
//!
//! While calls fail, the worker claims nothing, so an outage costs little. One failed call opens the
//! circuit. After the cooldown, one small round probes the embedder.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ragstone_core::circuit_breaker::{CircuitBreaker, Permit};
use ragstone_core::records::Millis;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::buffer::BufferOptions;

pub(super) struct EmbedderCircuit {
    breaker: CircuitBreaker,
    options: BufferOptions,
    state: Mutex<CircuitState>,
    changed: Notify,
}

#[derive(Default)]
struct CircuitState {
    failed_at: Option<Instant>,
    oldest_failed: Option<Millis>,
    /// How often a round is halved.
    halvings: u32,
    error: Option<String>,
}

/// A failed call.
pub(super) struct Failed<'a> {
    pub(super) error: &'a str,
    /// The shortest cooldown, as the embedder asks for it.
    pub(super) retry_after: Duration,
    /// When the oldest entry of the call was saved.
    pub(super) oldest: Option<Millis>,
}

impl EmbedderCircuit {
    pub(super) fn new(options: BufferOptions) -> Self {
        Self {
            breaker: CircuitBreaker::new(1),
            options,
            state: Mutex::default(),
            changed: Notify::new(),
        }
    }

    /// Whether calls are refused now.
    pub(super) fn refuses(&self) -> bool {
        self.breaker.retry_after(now()).is_some()
    }

    /// Returns when a call may pass.
    pub(super) async fn ready(&self) {
        while let Some(wait) = self.breaker.retry_after(now()) {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = self.changed.notified() => {}
            }
        }
    }

    /// The right to make one call, unless calls are refused now.
    pub(super) fn enter(&self) -> Option<Attempt<'_>> {
        let permit = self.breaker.enter(now()).ok()?;
        Some(Attempt {
            circuit: self,
            permit,
        })
    }

    /// Opens the circuit for a failure beside the calls, such as one of the store.
    pub(super) fn open(&self, failure: Failed<'_>) {
        let permit = self.breaker.enter_anyway(now());
        Attempt {
            circuit: self,
            permit,
        }
        .failed(failure);
    }

    /// Consecutive failures.
    pub(super) fn failures(&self) -> u32 {
        self.breaker.failures()
    }

    /// How often rounds are halved.
    pub(super) fn halvings(&self) -> u32 {
        self.state().halvings
    }

    /// The error of the last call, if it failed.
    pub(super) fn error(&self) -> Option<String> {
        self.state().error.clone()
    }

    /// When the oldest entry was saved whose call failed since the last success.
    pub(super) fn oldest_failed(&self) -> Option<Millis> {
        self.state().oldest_failed
    }

    /// A round that began at this time is complete. If no call failed meanwhile, the next round may be
    /// twice as large: a provider that has just recovered does not get everything at once.
    pub(super) fn round_done(&self, began: Instant) {
        let mut state = self.state();
        if state.failed_at.is_none_or(|failed_at| failed_at <= began) {
            state.halvings = state.halvings.saturating_sub(1);
        }
    }

    fn state(&self) -> MutexGuard<'_, CircuitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One call of the embedder, or several for the same entries.
pub(super) struct Attempt<'a> {
    circuit: &'a EmbedderCircuit,
    permit: Permit<'a>,
}

impl Attempt<'_> {
    pub(super) fn succeeded(self) {
        let Self { circuit, permit } = self;
        permit.succeeded(now());
        if !circuit.refuses() {
            let mut state = circuit.state();
            state.error = None;
            state.oldest_failed = None;
        }
        circuit.changed.notify_one();
    }

    pub(super) fn failed(self, failure: Failed<'_>) {
        let Self { circuit, permit } = self;
        let Failed {
            error,
            retry_after,
            oldest,
        } = failure;
        let options = &circuit.options;
        let before = circuit.breaker.failures();
        let cooldown = options.backoff.delay(before.saturating_add(1), fastrand::f64());
        permit.failed(now(), cooldown);
        circuit.breaker.stay_open(now(), retry_after);
        let mut state = circuit.state();
        // Calls that were in flight together fail for one reason.
        if circuit.breaker.failures() > before {
            // Less than one full call is enough to find out whether calls still fail; and ever less,
            // so that a text that makes a provider fail is soon alone.
            let below_one_call = options.parallel.max(1).ilog2() + 1;
            state.halvings = state.halvings.saturating_add(1).max(below_one_call);
        }
        state.error = Some(error.to_owned());
        state.failed_at = Some(Instant::now());
        state.oldest_failed = state.oldest_failed.into_iter().chain(oldest).min();
        drop(state);
        circuit.changed.notify_one();
    }
}

fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn failed(retry_after: Duration, oldest: Option<Millis>) -> Failed<'static> {
        Failed {
            error: "it is down",
            retry_after,
            oldest,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_circuit_stays_open_as_long_as_was_asked_for_and_a_probe_closes_it() {
        let circuit = EmbedderCircuit::new(BufferOptions::default());
        let began = Instant::now();
        let (older, one, other) = (circuit.enter(), circuit.enter(), circuit.enter());
        one.unwrap().failed(failed(90 * SECOND, Some(7)));
        other.unwrap().failed(failed(Duration::ZERO, Some(9)));
        assert_eq!((circuit.failures(), circuit.oldest_failed()), (1, Some(7)));
        older.unwrap().succeeded();
        assert!(circuit.refuses(), "an older call does not close it");
        assert_eq!(circuit.error().as_deref(), Some("it is down"));
        circuit.ready().await;
        assert!(began.elapsed() >= 90 * SECOND);
        let probe = circuit.enter().unwrap();
        assert!(circuit.refuses() && circuit.enter().is_none(), "one call probes");
        tokio::join!(circuit.ready(), async { probe.succeeded() });
        assert!(circuit.enter().is_some());
        assert_eq!((circuit.failures(), circuit.error()), (0, None));
        // A service may ask for any wait.
        circuit.open(failed(Duration::MAX, None));
        assert!(circuit.refuses());
    }

    #[tokio::test(start_paused = true)]
    async fn rounds_shrink_with_failures_and_grow_step_by_step() {
        let circuit = EmbedderCircuit::new(BufferOptions::default());
        let began = Instant::now();
        for expected in [3, 4] {
            tokio::time::advance(100 * SECOND).await;
            circuit.enter().unwrap().failed(failed(Duration::ZERO, None));
            assert_eq!(circuit.halvings(), expected);
        }
        circuit.ready().await;
        circuit.enter().unwrap().succeeded();
        circuit.round_done(began);
        assert_eq!(circuit.halvings(), 4, "calls of that round failed");
        for expected in [3, 2, 1, 0, 0] {
            circuit.round_done(Instant::now());
            assert_eq!(circuit.halvings(), expected);
        }
    }
}
