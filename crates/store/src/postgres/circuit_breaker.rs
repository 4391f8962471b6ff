//! A circuit breaker: callers of a database that does not answer get an error at once.
//!
//! It opens after several timeouts in a row. While it is open, one call per cooldown passes as a
//! probe and the others fail; the first answer closes it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};

/// Timeouts in a row that open the breaker.
const MAX_TIMEOUTS: u32 = 3;
const COOLDOWN: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct CircuitBreaker(Mutex<DatabaseState>);

#[derive(Debug, Default)]
struct DatabaseState {
    timeouts: u32,
    open_until: Option<Instant>,
}

impl CircuitBreaker {
    pub(super) async fn guard<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        if self.is_open() {
            return Err(Error::DatabaseTimeout);
        }
        let outcome = call.await;
        match &outcome {
            Err(Error::DatabaseTimeout) => self.record_timeout(),
            // The database was not asked.
            Err(Error::DatabaseBusy | Error::DatabaseUnreachable(_) | Error::Closed) => {}
            _ => *self.lock() = DatabaseState::default(),
        }
        outcome
    }

    /// The first call after a cooldown passes, and begins the next cooldown.
    fn is_open(&self) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        match state.open_until {
            Some(until) if now < until => true,
            Some(_) => {
                state.open_until = Some(now + COOLDOWN);
                false
            }
            None => false,
        }
    }

    fn record_timeout(&self) {
        let mut state = self.lock();
        state.timeouts = state.timeouts.saturating_add(1);
        if state.timeouts >= MAX_TIMEOUTS {
            state.open_until = Some(Instant::now() + COOLDOWN);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, DatabaseState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn after_some_timeouts_one_call_per_cooldown_passes() {
        let breaker = CircuitBreaker::default();
        let silent = || breaker.guard(async { Err::<(), _>(Error::DatabaseTimeout) });
        let passes = async || breaker.guard(async { Ok(()) }).await.is_ok();
        for _ in 0..MAX_TIMEOUTS - 1 {
            let _ = silent().await;
        }
        assert!(passes().await, "an answer resets the count");
        for _ in 0..MAX_TIMEOUTS {
            let _ = silent().await;
            let _ = breaker.guard(async { Err::<(), _>(Error::DatabaseBusy) }).await;
        }
        assert!(!passes().await);
        tokio::time::advance(COOLDOWN).await;
        let _ = silent().await;
        assert!(!passes().await, "another cooldown begins");
        tokio::time::advance(COOLDOWN).await;
        assert!(passes().await && passes().await);
    }
}
