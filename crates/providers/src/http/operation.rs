//! One deadline for all calls of an operation.

use std::time::Duration;

use tokio::time::Instant;

use super::retry;

tokio::task_local! {
    static STARTED: Instant;
    static BOUND: Bound;
}

#[derive(Debug, Clone, Copy)]
struct Bound {
    since: Instant,
    patience: Duration,
}

/// Runs an operation of several calls. All of them must end within the timeout that the service has for
/// one call, counted from here.
pub async fn operation<T>(work: impl Future<Output = T>) -> T {
    STARTED.scope(Instant::now(), work).await
}

/// Runs operations whose caller waits no longer than this for all of them, whatever the timeouts of their
/// services. A service that does not answer in time counts as failed, also for its circuit breaker. A
/// dropped future would not count, and the next caller would wait as long.
pub async fn within<T>(patience: Duration, work: impl Future<Output = T>) -> T {
    let since = Instant::now();
    BOUND.scope(Bound { since, patience }, work).await
}

/// The timeout of a call whose own timeout is `own`.
pub(super) fn patience(own: Duration) -> Duration {
    BOUND.try_with(|bound| own.min(bound.patience)).unwrap_or(own)
}

/// The deadline of a call that begins now.
pub(super) fn deadline(patience: Duration) -> Instant {
    let alone = retry::after(patience);
    let until = |since: Instant, patience: Duration| since.checked_add(patience).unwrap_or(alone);
    let of_operation = STARTED.try_with(|started| until(*started, patience));
    let of_caller = BOUND.try_with(|bound| until(bound.since, bound.patience));
    alone
        .min(of_operation.unwrap_or(alone))
        .min(of_caller.unwrap_or(alone))
}
