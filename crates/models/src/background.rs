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
