//! Leaving a database alone that gives no answer, so that callers are told at once.
//!
//! Calls that wait in vain are counted. After some in a row, one call passes in each span of time to
//! find out, and the others are refused; the first answer ends that.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::error::{Error, Result};

const IN_VAIN: u32 = 3;
const SPAN: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Outage(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    in_vain: u32,
    refused_until: Option<Instant>,
}

impl Outage {
    pub(super) async fn guard<T>(&self, call: impl Future<Output = Result<T>>) -> Result<T> {
        if self.refuses() {
            return Err(Error::DatabaseTimeout);
        }
        let outcome = call.await;
        match &outcome {
            Err(Error::DatabaseTimeout) => self.waited_in_vain(),
            // Nothing was asked, so nothing is known.
            Err(Error::DatabaseBusy | Error::DatabaseUnreachable(_) | Error::Closed) => {}
            _ => *self.lock() = State::default(),
        }
        outcome
    }

    /// Of calls at the end of a span, the first passes and begins the next.
    fn refuses(&self) -> bool {
        let mut state = self.lock();
        let now = Instant::now();
        match state.refused_until {
            Some(until) if now < until => true,
            Some(_) => {
                state.refused_until = Some(now + SPAN);
                false
            }
            None => false,
        }
    }

    fn waited_in_vain(&self) {
        let mut state = self.lock();
        state.in_vain = state.in_vain.saturating_add(1);
        if state.in_vain >= IN_VAIN {
            state.refused_until = Some(Instant::now() + SPAN);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn after_some_calls_in_vain_one_at_a_time_finds_out() {
        let outage = Outage::default();
        let silent = || outage.guard(async { Err::<(), _>(Error::DatabaseTimeout) });
        // Whether it was called at all.
        let passes = async || outage.guard(async { Ok(()) }).await.is_ok();
        for _ in 0..IN_VAIN - 1 {
            let _ = silent().await;
        }
        assert!(passes().await, "an answer ends the count");
        for _ in 0..IN_VAIN {
            let _ = silent().await;
            let _ = outage.guard(async { Err::<(), _>(Error::DatabaseBusy) }).await;
        }
        assert!(!passes().await);
        tokio::time::advance(SPAN).await;
        let _ = silent().await;
        assert!(!passes().await, "another span begins");
        tokio::time::advance(SPAN).await;
        assert!(passes().await && passes().await);
    }
}
