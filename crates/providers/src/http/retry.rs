//! Which failed calls are retried, and when.

use std::time::Duration;

use jiff::Timestamp;
use ragstone_core::backoff::Backoff;
use ragstone_core::call::CallError;
use tokio::time::Instant;

use super::client::Repeat;
use super::settings::Policy;

/// The longest wait between two attempts, unless the service asks for more.
const MAX_DELAY: Duration = Duration::from_secs(20);

/// A failed attempt.
#[derive(Debug)]
pub(super) struct CallFailure {
    pub(super) error: CallError,
    pub(super) sent: SendState,
}

/// Whether the service may have processed the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendState {
    No,
    Perhaps,
    /// It answered, and the status decides.
    Answered,
    /// It answered, and a retry would bring the same answer.
    Final,
}

impl CallFailure {
    pub(super) fn is_worth_retrying(&self, repeat: Repeat) -> bool {
        match (self.sent, repeat) {
            (SendState::No, _) | (SendState::Perhaps, Repeat::Read | Repeat::Freely) => true,
            (SendState::Perhaps, Repeat::IfUnprocessed) | (SendState::Final, _) => false,
            (SendState::Answered, Repeat::Read) => matches!(self.error.status(), Some(429 | 500..)),
            (SendState::Answered, _) if self.error.is_considered() => false,
            (SendState::Answered, _) => matches!(
                (self.error.status(), repeat),
                (Some(429 | 503), _) | (Some(502 | 504), Repeat::Freely)
            ),
        }
    }

    /// The delay that the service asks for.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match &self.error {
            CallError::Answered(answer) => answer.retry_after,
            _ => None,
        }
    }
}

/// Full jitter: many clients of one service should not return at the same moment.
pub(super) fn backoff(policy: &Policy) -> Backoff {
    Backoff {
        max_attempts: policy.max_attempts,
        first_delay: policy.first_delay,
        max_delay: MAX_DELAY,
        jitter: 1.0,
    }
}

/// The moment after a wait of any length, also one that a service invented.
pub(super) fn after(wait: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(wait.min(NEVER)).unwrap_or(now)
}

/// The longest `Retry-After` that is honoured.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// Reads `Retry-After`: seconds, or a date.
pub(super) fn parse_retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(Duration::from_secs(seconds).min(MAX_RETRY_AFTER));
    }
    let date = jiff::fmt::rfc2822::DateTimeParser::new()
        .parse_timestamp(value)
        .ok()?;
    let wait = Duration::try_from(date.duration_since(now)).unwrap_or(Duration::ZERO);
    Some(wait.min(MAX_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now: Timestamp = "2026-01-02T03:04:05Z".parse().unwrap();
        assert_eq!(parse_retry_after(" 7 ", now), Some(Duration::from_secs(7)));
        assert_eq!(
            parse_retry_after("Fri, 02 Jan 2026 03:04:35 GMT", now),
            Some(Duration::from_secs(30))
        );
        assert_eq!(
            parse_retry_after("Fri, 02 Jan 2026 03:04:00 GMT", now),
            Some(Duration::ZERO)
        );
        assert_eq!(parse_retry_after("soon", now), None);
        for endless in ["18446744073709551615", "Thu, 31 Dec 2099 23:59:59 GMT"] {
            assert_eq!(
                parse_retry_after(endless, now),
                Some(MAX_RETRY_AFTER),
                "{endless}"
            );
        }
    }
}
