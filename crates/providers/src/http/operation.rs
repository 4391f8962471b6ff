//! One deadline for all the calls of an operation.

use std::time::Duration;

use tokio::time::Instant;

use super::retry;

tokio::task_local! {
    static STARTED: Instant;
}

/// Runs an operation of several calls. However many it makes, one after another or at once, each has to
/// be done in the time that its service has for one call, counted from here.
pub async fn operation<T>(work: impl Future<Output = T>) -> T {
    STARTED.scope(Instant::now(), work).await
}

/// When a call that begins now has to be done.
pub(super) fn deadline(patience: Duration) -> Instant {
    let alone = retry::after(patience);
    STARTED
        .try_with(|started| {
            started
                .checked_add(patience)
                .map_or(alone, |shared| shared.min(alone))
        })
        .unwrap_or(alone)
}
