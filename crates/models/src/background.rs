//! Work of more than a moment, off the threads that serve requests.

use std::sync::{Arc, Weak};

use ragstone_core::model::ModelError;

/// More text than this is tokenised away from the threads that serve requests.
const INLINE_BYTES: usize = 4_096;

/// Whether whoever asked for some work still waits for it.
pub(crate) struct Asked(Weak<()>);

impl Asked {
    /// An error once nobody waits any more; to be called between steps of the work.
    pub(crate) fn still(&self) -> Result<(), ModelError> {
        if self.0.strong_count() > 0 {
            return Ok(());
        }
        Err(ModelError::Unavailable(
            "nobody waits for the answer any more".to_owned(),
        ))
    }
}

/// Does the work on so much text, where that much is best done. A thread cannot be stopped from outside:
/// dropping the future tells the work, through [`Asked`], to end by itself.
pub(crate) async fn tokenising<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce(&Asked) -> Result<T, ModelError> + Send + 'static,
) -> Result<T, ModelError> {
    let asking = Arc::new(());
    let asked = Asked(Arc::downgrade(&asking));
    if bytes <= INLINE_BYTES {
        return work(&asked);
    }
    let outcome = tokio::task::spawn_blocking(move || work(&asked)).await;
    drop(asking);
    outcome.unwrap_or_else(|error| Err(ModelError::Failed(format!("tokenising failed: {error}"))))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn work_that_nobody_waits_for_any_more_is_told_so() {
        let (started, starts) = mpsc::channel();
        let (ended, end) = mpsc::channel();
        let waiting = tokio::spawn(tokenising(INLINE_BYTES + 1, move |asked| {
            started.send(asked.still().is_ok()).unwrap();
            while asked.still().is_ok() {
                std::thread::yield_now();
            }
            ended.send(()).unwrap();
            Ok(())
        }));
        let began = tokio::task::spawn_blocking(move || starts.recv().unwrap());
        assert!(began.await.unwrap(), "while somebody waits, the work goes on");
        waiting.abort();
        assert!(waiting.await.unwrap_err().is_cancelled());
        tokio::task::spawn_blocking(move || end.recv().unwrap())
            .await
            .unwrap();
    }
}
