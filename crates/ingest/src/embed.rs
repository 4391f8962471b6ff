//! Embedding with retries.

use std::time::Duration;

use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, RemoteFault, Role};

/// One vector per text; `None` for a text that the model refuses by itself.
pub(super) async fn embed(
    embedder: &dyn Embedder,
    texts: Vec<String>,
    attempts: u32,
) -> Result<Vec<Option<Embedding>>, ModelError> {
    if texts.is_empty() {
        return Ok(Vec::new());
    }
    match embed_with_retries(embedder, texts.clone(), attempts).await {
        Ok(embeddings) => Ok(embeddings.into_iter().map(Some).collect()),
        Err(error) if blame(&error).is_some() => one_by_one(embedder, texts, attempts).await,
        Err(error) => Err(error),
    }
}

/// Finds the text that causes a failure and keeps the others. A model that fails for several texts and
/// embeds none is broken.
async fn one_by_one(
    embedder: &dyn Embedder,
    texts: Vec<String>,
    attempts: u32,
) -> Result<Vec<Option<Embedding>>, ModelError> {
    let mut embeddings = Vec::with_capacity(texts.len());
    let mut failures = 0;
    for text in texts {
        match embed_with_retries(embedder, vec![text], attempts).await {
            Ok(one) => embeddings.push(one.into_iter().next()),
            Err(error) => match blame(&error) {
                None => return Err(error),
                Some(blamed) => {
                    failures += u32::from(blamed == Blame::Perhaps);
                    if failures > 1 && embeddings.iter().all(Option::is_none) {
                        return Err(error);
                    }
                    tracing::warn!(%error, "a text could not be embedded");
                    embeddings.push(None);
                }
            },
        }
    }
    Ok(embeddings)
}

/// Whether a text may be the reason for a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blame {
    Certainly,
    /// The model or its configuration may be the reason just as well.
    Perhaps,
}

fn blame(error: &ModelError) -> Option<Blame> {
    match error {
        ModelError::InvalidInput(_) => Some(Blame::Certainly),
        ModelError::Failed(_) => Some(Blame::Perhaps),
        ModelError::Remote(failure) => match failure.fault {
            RemoteFault::Refused { .. } | RemoteFault::BadAnswer => Some(Blame::Perhaps),
            RemoteFault::Busy { .. }
            | RemoteFault::Down
            | RemoteFault::Misconfigured { .. }
            | RemoteFault::OtherModel => None,
        },
        ModelError::Overloaded { .. } | ModelError::Unavailable(_) => None,
    }
}

/// Waits for a busy model, whose queries come first.
async fn embed_with_retries(
    embedder: &dyn Embedder,
    texts: Vec<String>,
    attempts: u32,
) -> Result<Vec<Embedding>, ModelError> {
    let mut attempt = 1;
    loop {
        let inputs = texts.iter().cloned().map(EmbedInput::Text).collect();
        let error = match embedder.embed(inputs, Role::Passage).await {
            Ok(embeddings) if embeddings.len() == texts.len() => return Ok(embeddings),
            Ok(_) => {
                return Err(ModelError::Failed(
                    "the model gave another number of vectors than texts".into(),
                ));
            }
            Err(error) => error,
        };
        let wait = match error.retry_after() {
            Some(retry_after) if retry_after > Duration::ZERO => {
                retry_after.clamp(Duration::from_millis(50), Duration::from_secs(10))
            }
            Some(_) => Duration::from_millis(250) * 2u32.pow(attempt.min(6)),
            None => return Err(error),
        };
        if attempt >= attempts {
            return Err(error);
        }
        attempt += 1;
        tokio::time::sleep(wait).await;
    }
}
