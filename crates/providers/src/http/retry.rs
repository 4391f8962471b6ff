//! What is worth sending again, and when.

use std::time::Duration;

use jiff::Timestamp;
use ragstone_core::call::CallError;
use tokio::time::Instant;

use super::client::Repeat;

/// No wait between two attempts is longer, unless the service itself asks for it.
const LONGEST_DELAY: Duration = Duration::from_secs(20);

/// One attempt that did not bring an answer of success.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: CallError,
    pub(super) sent: Sent,
}

/// Whether the service may have worked on the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sent {
    No,
    Perhaps,
    /// It answered; the status tells.
    Answered,
    /// It answered what would be the same the next time.
    Final,
}

impl Failure {
    pub(super) fn is_worth_retrying(&self, repeat: Repeat) -> bool {
        match (self.sent, repeat) {
            (Sent::No, _) | (Sent::Perhaps, Repeat::Read | Repeat::Freely) => true,
            (Sent::Perhaps, Repeat::IfUnprocessed) | (Sent::Final, _) => false,
            (Sent::Answered, Repeat::Read) => matches!(self.error.status(), Some(429 | 500..)),
            (Sent::Answered, _) if self.error.is_considered() => false,
            (Sent::Answered, _) => matches!(
                (self.error.status(), repeat),
                (Some(429 | 503), _) | (Some(502 | 504), Repeat::Freely)
            ),
        }
    }

    /// How long the service asks to be left alone.
    pub(super) fn retry_after(&self) -> Option<Duration> {
        match &self.error {
            CallError::Answered(answer) => answer.retry_after,
            _ => None,
        }
    }
}

/// Exponential backoff with full jitter: a random part of a span that doubles, so that many clients
/// of one service do not come back at the same moment. `random` is in 0..1.
pub(super) fn backoff(first: Duration, attempt: u32, random: f64) -> Duration {
    let doubled = first.saturating_mul(1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX));
    doubled.min(LONGEST_DELAY).mul_f64(random)
}

/// The moment after a wait, however long somebody outside says it is.
pub(super) fn after(wait: Duration) -> Instant {
    const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);
    let now = Instant::now();
    now.checked_add(wait.min(NEVER)).unwrap_or(now)
}

/// A service that asks to be left alone for longer is asked again after this long.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(3600);

/// Reads `Retry-After`: seconds, or a date.
pub(super) fn parse_retry_after(value: &str, now: Timestamp) -> Option<Duration> {
    let value = value.trim();
    if let Ok(seconds) = value.parse::<u64>() {
        return Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER));
    }
    let date = jiff::fmt::rfc2822::DateTimeParser::new()
        .parse_timestamp(value)
        .ok()?;
    let wait = Duration::try_from(date.duration_since(now)).unwrap_or(Duration::ZERO);
    Some(wait.min(LONGEST_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_span_doubles_and_is_bounded() {
        let first = Duration::from_millis(100);
        assert_eq!(backoff(first, 1, 1.0), first);
        assert_eq!(backoff(first, 3, 0.5), Duration::from_millis(200));
        assert_eq!(backoff(first, 60, 1.0), LONGEST_DELAY);
        assert_eq!(backoff(first, 5, 0.0), Duration::ZERO);
    }

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
                Some(LONGEST_RETRY_AFTER),
                "{endless}"
            );
        }
    }
}
