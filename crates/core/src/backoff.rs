//! Retry delays: exponential backoff with jitter, bounded by attempts and a deadline.
//!
//! Randomness and time are passed in. Whether a failure is worth a retry is up to the caller.

use std::time::Duration;

/// How often an operation is attempted and how long to wait between attempts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Backoff {
    /// Attempts in all, including the first.
    pub max_attempts: u32,
    /// The longest delay after the first attempt. It doubles with every further attempt.
    pub first_delay: Duration,
    pub max_delay: Duration,
    /// The random part of a delay, from 0 (none) to 1 (all of it): clients that failed together
    /// should not return together.
    pub jitter: f64,
}

impl Backoff {
    /// The delay after `failures` consecutive failures, for a `random` number in `0..1`.
    pub fn delay(&self, failures: u32, random: f64) -> Duration {
        let factor = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        let longest = self.first_delay.saturating_mul(factor).min(self.max_delay);
        longest.mul_f64((1.0 - self.jitter * (1.0 - random)).clamp(0.0, 1.0))
    }

    /// The delay before the next attempt after `attempts` have failed; `None` if there should be none.
    ///
    /// A delay that the service asked for takes precedence. No attempt starts when less time than the
    /// delay is left: the failure at hand says more than a timeout.
    pub fn retry(&self, attempts: u32, random: f64, limits: RetryLimits) -> Option<Duration> {
        let delay = limits.retry_after.unwrap_or_else(|| self.delay(attempts, random));
        (attempts < self.max_attempts && delay < limits.time_left).then_some(delay)
    }
}

/// Limits on the next attempt, set by the service and by the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryLimits {
    /// The delay that the service asked for, as in `Retry-After`.
    pub retry_after: Option<Duration>,
    /// Time until the caller's deadline.
    pub time_left: Duration,
}

impl Default for RetryLimits {
    /// No request of the service and no deadline.
    fn default() -> Self {
        Self {
            retry_after: None,
            time_left: Duration::MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff {
        max_attempts: 3,
        first_delay: Duration::from_millis(100),
        max_delay: Duration::from_secs(20),
        jitter: 1.0,
    };

    #[test]
    fn delays_double_and_are_bounded() {
        assert_eq!(BACKOFF.delay(1, 1.0), Duration::from_millis(100));
        assert_eq!(BACKOFF.delay(3, 0.5), Duration::from_millis(200));
        assert_eq!(BACKOFF.delay(5, 0.0), Duration::ZERO);
        for many in [30, 60, u32::MAX] {
            assert_eq!(BACKOFF.delay(many, 1.0), BACKOFF.max_delay);
        }
    }

    #[test]
    fn jitter_is_the_random_part_of_a_delay() {
        let some = Backoff {
            jitter: 0.25,
            ..BACKOFF
        };
        assert_eq!(some.delay(1, 0.0), Duration::from_millis(75));
        assert_eq!(some.delay(1, 1.0), Duration::from_millis(100));
        let none = Backoff {
            jitter: 0.0,
            ..BACKOFF
        };
        assert_eq!(none.delay(2, 0.0), Duration::from_millis(200));
    }

    #[test]
    fn attempts_and_the_deadline_bound_retries() {
        let free = RetryLimits::default();
        assert_eq!(BACKOFF.retry(1, 1.0, free), Some(Duration::from_millis(100)));
        assert_eq!(BACKOFF.retry(2, 1.0, free), Some(Duration::from_millis(200)));
        assert_eq!(BACKOFF.retry(3, 1.0, free), None);
        let within = |millis| RetryLimits {
            time_left: Duration::from_millis(millis),
            ..free
        };
        assert_eq!(BACKOFF.retry(1, 1.0, within(100)), None);
        assert!(BACKOFF.retry(1, 1.0, within(101)).is_some());
    }

    #[test]
    fn the_service_decides_how_long_to_wait() {
        let asked = RetryLimits {
            retry_after: Some(Duration::from_secs(60)),
            time_left: Duration::from_secs(61),
        };
        assert_eq!(BACKOFF.retry(1, 0.5, asked), asked.retry_after);
        let impatient = RetryLimits {
            time_left: Duration::from_secs(60),
            ..asked
        };
        assert_eq!(BACKOFF.retry(1, 0.5, impatient), None);
    }
}
