//! The circuit breaker: stops calling a service that keeps failing.
//!
//! A closed circuit lets every call pass and counts consecutive failures. An open circuit refuses
//! calls until its cooldown is over. Then one call passes as a probe: its success closes the circuit,
//! its failure opens it again. A probe that has not returned after another cooldown does not block
//! the service for good: the next call becomes a probe as well.
//!
//! Only a probe closes an open circuit. A call that began before the circuit opened describes an
//! earlier state of the service.
//!
//! Callers pass the time in. Share the breaker by reference or in an `Arc`.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub struct CircuitBreaker {
    max_failures: u32,
    circuit: Mutex<Circuit>,
}

#[derive(Debug)]
struct Circuit {
    /// Consecutive failures since the last success.
    failures: u32,
    state: BreakerState,
}

#[derive(Debug, Clone, Copy)]
enum BreakerState {
    Closed,
    Open {
        until: Instant,
        cooldown: Duration,
    },
    /// A probe is in flight; at `until` another call may probe.
    Probing {
        until: Instant,
        cooldown: Duration,
    },
}

impl CircuitBreaker {
    /// The circuit opens after `max_failures` consecutive failures, at least one.
    pub fn new(max_failures: u32) -> Self {
        Self {
            max_failures: max_failures.max(1),
            circuit: Mutex::new(Circuit {
                failures: 0,
                state: BreakerState::Closed,
            }),
        }
    }

    /// Lets a call pass, or returns how long the caller should wait.
    pub fn enter(&self, now: Instant) -> Result<Permit<'_>, Duration> {
        let mut circuit = self.lock();
        match circuit.state {
            BreakerState::Closed => Ok(self.permit(CallRole::Ordinary, now)),
            BreakerState::Open { until, cooldown } | BreakerState::Probing { until, cooldown } => {
                let left = until.saturating_duration_since(now);
                if !left.is_zero() {
                    return Err(left);
                }
                circuit.state = BreakerState::Probing {
                    until: after(now, cooldown),
                    cooldown,
                };
                Ok(self.permit(CallRole::Probe, now))
            }
        }
    }

    /// Lets a call pass in any state, such as a health check. Its failure counts as any other; its
    /// success only ends the cooldown early, so that the next call becomes the probe.
    pub fn enter_anyway(&self, now: Instant) -> Permit<'_> {
        self.permit(CallRole::Forced, now)
    }

    /// Time until a call may pass; `None` if it may pass now.
    pub fn retry_after(&self, now: Instant) -> Option<Duration> {
        match self.lock().state {
            BreakerState::Closed => None,
            BreakerState::Open { until, .. } | BreakerState::Probing { until, .. } => {
                Some(until.saturating_duration_since(now)).filter(|left| !left.is_zero())
            }
        }
    }

    /// Consecutive failures. Calls that fail while the circuit is open are not counted.
    pub fn failures(&self) -> u32 {
        self.lock().failures
    }

    /// Keeps an open circuit open for at least `wait`, because the service asked for it.
    pub fn stay_open(&self, now: Instant, wait: Duration) {
        if let BreakerState::Open { until, .. } = &mut self.lock().state {
            *until = (*until).max(after(now, wait));
        }
    }

    fn permit(&self, role: CallRole, entered: Instant) -> Permit<'_> {
        Permit {
            breaker: self,
            role,
            entered,
            reported: false,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Circuit> {
        self.circuit.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallRole {
    Ordinary,
    Probe,
    Forced,
}

/// The right to make one call. A permit that is dropped without a report, because the call was
/// cancelled, leaves the probe to the next call.
#[derive(Debug)]
pub struct Permit<'a> {
    breaker: &'a CircuitBreaker,
    role: CallRole,
    entered: Instant,
    reported: bool,
}

impl Permit<'_> {
    pub fn succeeded(mut self, now: Instant) {
        self.reported = true;
        let mut circuit = self.breaker.lock();
        match (self.role, circuit.state) {
            (CallRole::Probe, _) | (CallRole::Ordinary, BreakerState::Closed) => {
                circuit.failures = 0;
                circuit.state = BreakerState::Closed;
            }
            (CallRole::Forced, BreakerState::Open { cooldown, .. }) => {
                circuit.state = BreakerState::Open { until: now, cooldown };
            }
            (CallRole::Ordinary | CallRole::Forced, _) => {}
        }
    }

    /// If this failure opens the circuit, it stays open for `cooldown`.
    pub fn failed(mut self, now: Instant, cooldown: Duration) {
        self.reported = true;
        let mut circuit = self.breaker.lock();
        match circuit.state {
            BreakerState::Closed => {}
            BreakerState::Probing { .. } if self.role == CallRole::Probe => {}
            BreakerState::Open { .. } | BreakerState::Probing { .. } => return,
        }
        circuit.failures = circuit.failures.saturating_add(1);
        if circuit.failures >= self.breaker.max_failures {
            circuit.state = BreakerState::Open {
                until: after(now, cooldown),
                cooldown,
            };
        }
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.reported || self.role != CallRole::Probe {
            return;
        }
        let mut circuit = self.breaker.lock();
        if let BreakerState::Probing { cooldown, .. } = circuit.state {
            circuit.state = BreakerState::Open {
                until: self.entered,
                cooldown,
            };
        }
    }
}

/// The moment after a wait of any length, also one that a service invented.
fn after(now: Instant, wait: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
    now.checked_add(wait.min(LONGEST)).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    const COOLDOWN: Duration = Duration::from_secs(10);

    fn fail(breaker: &CircuitBreaker, times: u32, now: Instant) {
        for _ in 0..times {
            breaker.enter(now).unwrap().failed(now, COOLDOWN);
        }
    }

    #[test]
    fn opens_after_consecutive_failures_and_probes_with_one_call() {
        let start = Instant::now();
        let breaker = CircuitBreaker::new(3);
        fail(&breaker, 2, start);
        breaker.enter(start).unwrap().succeeded(start);
        fail(&breaker, 3, start);
        assert_eq!(breaker.enter(start).unwrap_err(), COOLDOWN);
        assert_eq!(breaker.retry_after(start), Some(COOLDOWN));

        let later = start + COOLDOWN;
        assert_eq!(breaker.retry_after(later), None);
        let probe = breaker.enter(later).unwrap();
        assert!(breaker.enter(later).is_err(), "only one call may probe");
        probe.failed(later, COOLDOWN);
        assert_eq!(breaker.enter(later).unwrap_err(), COOLDOWN);
        assert_eq!(breaker.failures(), 4);

        let last = later + COOLDOWN;
        breaker.enter(last).unwrap().succeeded(last);
        fail(&breaker, 2, last);
        assert!(breaker.enter(last).is_ok());
    }

    #[test]
    fn a_cancelled_probe_leaves_the_next_call_to_probe() {
        let start = Instant::now();
        let breaker = CircuitBreaker::new(1);
        fail(&breaker, 1, start);
        drop(breaker.enter(start + COOLDOWN).unwrap());
        let probe = breaker.enter(start + COOLDOWN).unwrap();
        assert!(
            breaker.enter(start + COOLDOWN).is_err(),
            "the circuit is not closed"
        );
        probe.succeeded(start + COOLDOWN);
        assert!(breaker.enter(start + COOLDOWN).is_ok());
    }

    #[test]
    fn a_probe_that_hangs_blocks_others_for_one_cooldown() {
        let start = Instant::now();
        let breaker = CircuitBreaker::new(1);
        fail(&breaker, 1, start);
        let hanging = breaker.enter(start + COOLDOWN).unwrap();
        assert_eq!(breaker.enter(start + COOLDOWN).unwrap_err(), COOLDOWN);
        let second = breaker.enter(start + 2 * COOLDOWN).unwrap();
        second.succeeded(start + 2 * COOLDOWN);
        drop(hanging);
        assert!(
            breaker.enter(start + 2 * COOLDOWN).is_ok(),
            "the circuit stays closed"
        );
    }

    #[test]
    fn a_forced_call_ends_the_cooldown_and_does_not_close_the_circuit() {
        let now = Instant::now();
        let breaker = CircuitBreaker::new(1);
        fail(&breaker, 1, now);
        breaker.enter_anyway(now).failed(now, COOLDOWN);
        assert!(breaker.enter(now).is_err());
        breaker.enter_anyway(now).succeeded(now);
        let probe = breaker.enter(now);
        assert!(probe.is_ok());
        assert!(breaker.enter(now).is_err(), "the circuit is not closed");
        breaker.enter_anyway(now).succeeded(now);
        assert!(breaker.enter(now).is_err(), "a probe is in flight");
        probe.unwrap().failed(now, COOLDOWN);
        assert_eq!(breaker.enter(now).unwrap_err(), COOLDOWN);
    }

    #[test]
    fn a_forced_success_resets_no_count() {
        let now = Instant::now();
        let breaker = CircuitBreaker::new(3);
        fail(&breaker, 2, now);
        breaker.enter_anyway(now).succeeded(now);
        fail(&breaker, 1, now);
        assert!(breaker.enter(now).is_err());
    }

    #[test]
    fn a_call_that_began_before_the_circuit_opened_does_not_close_it() {
        let start = Instant::now();
        let breaker = CircuitBreaker::new(1);
        let (slow, slower) = (breaker.enter(start).unwrap(), breaker.enter(start).unwrap());
        fail(&breaker, 1, start);
        slow.succeeded(start);
        assert_eq!(breaker.enter(start).unwrap_err(), COOLDOWN);
        let later = start + COOLDOWN;
        let probe = breaker.enter(later).unwrap();
        slower.succeeded(later);
        assert!(breaker.enter(later).is_err(), "the probe has not returned");
        probe.succeeded(later);
        assert!(breaker.enter(later).is_ok());
    }

    #[test]
    fn calls_in_flight_together_count_once_and_extend_the_cooldown_only_on_request() {
        let now = Instant::now();
        let breaker = CircuitBreaker::new(1);
        let (one, other) = (breaker.enter(now).unwrap(), breaker.enter(now).unwrap());
        breaker.stay_open(now, Duration::MAX);
        assert_eq!(breaker.retry_after(now), None, "a closed circuit stays closed");
        one.failed(now, COOLDOWN);
        other.failed(now, 9 * COOLDOWN);
        assert_eq!(
            (breaker.failures(), breaker.retry_after(now)),
            (1, Some(COOLDOWN))
        );
        breaker.stay_open(now, 9 * COOLDOWN);
        breaker.stay_open(now, COOLDOWN);
        assert_eq!(breaker.retry_after(now), Some(9 * COOLDOWN));
        breaker.stay_open(now, Duration::MAX);
        assert!(breaker.enter(now).is_err());
    }
}
