//! Tokenization of long texts, off the threads that serve requests.

use std::sync::{Arc, Weak};

use ragstone_core::model::ModelError;

/// Up to this many bytes are tokenized on the calling thread.
const INLINE_BYTES: usize = 4_096;

/// Tells a computation whether its caller still waits for the result.
pub(crate) struct Cancellation(Weak<()>);

impl Cancellation {
    /// Fails once the caller is gone. Long computations call this between steps.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        if self.0.strong_count() > 0 {
            return Ok(());
        }
        Err(ModelError::Unavailable("the request was cancelled".to_owned()))
    }
}

/// Runs `work` on so many bytes of text: inline where they are few, and else on a blocking thread.
///
/// A thread cannot be stopped from outside. Dropping the future cancels the work through
/// [`Cancellation`].
pub(crate) async fn tokenize_blocking<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce(&Cancellation) -> Result<T, ModelError> + Send + 'static,
) -> Result<T, ModelError> {
    let caller = Arc::new(());
    let cancellation = Cancellation(Arc::downgrade(&caller));
    if bytes <= INLINE_BYTES {
        return work(&cancellation);
    }
    let outcome = tokio::task::spawn_blocking(move || work(&cancellation)).await;
    drop(caller);
    outcome.unwrap_or_else(|error| Err(ModelError::Failed(format!("tokenization failed: {error}"))))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn dropping_the_future_cancels_the_work() {
        let (started, starts) = mpsc::channel();
        let (ended, end) = mpsc::channel();
        let waiting = tokio::spawn(tokenize_blocking(INLINE_BYTES + 1, move |cancellation| {
            started.send(cancellation.check().is_ok()).unwrap();
            while cancellation.check().is_ok() {
                std::thread::yield_now();
            }
            ended.send(()).unwrap();
            Ok(())
        }));
        let began = tokio::task::spawn_blocking(move || starts.recv().unwrap());
        assert!(began.await.unwrap(), "not cancelled while the caller waits");
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        tokio::task::spawn_blocking(move || end.recv().unwrap())
            .await
            .unwrap();
    }
}
