//! Checks of the embeddings of an API, and the meaning of its refusals.

use std::time::Duration;

use ragstone_core::call::CallError;
use ragstone_core::document::check_vector;
use ragstone_core::model::{Embedding, ModelError, ModelInfo, RemoteFailure, RemoteFault};

/// Checks that a vector has the right width and finite numbers that are not all zero. The error is the reason.
pub(super) fn check(vector: &[f32], dimensions: usize) -> Result<(), String> {
    if vector.len() != dimensions {
        return Err(format!(
            "a vector has {} numbers where {dimensions} are configured",
            vector.len()
        ));
    }
    check_vector(vector).map_err(|e| e.to_string())
}

/// Checks the vectors of one batch, and distributes its token count over the texts by their length.
pub(super) fn finish(
    vectors: Vec<Vec<f32>>,
    texts: &[String],
    tokens: usize,
    info: &ModelInfo,
) -> Result<Vec<Embedding>, String> {
    if vectors.len() != texts.len() {
        return Err(format!("{} vectors for {} texts", vectors.len(), texts.len()));
    }
    let all_bytes: usize = texts.iter().map(String::len).sum();
    let (mut bytes, mut shared) = (0, 0);
    vectors
        .into_iter()
        .zip(texts)
        .map(|(vector, text)| {
            check(&vector, info.identity.dimensions)?;
            bytes += text.len();
            let until_here = tokens * bytes / all_bytes.max(1);
            let own = until_here - shared;
            shared = until_here;
            Ok(Embedding {
                vector,
                tokens: own,
                truncated: false,
            })
        })
        .collect()
}

/// The model error of a failed call. The provider's message goes to the log.
pub fn model_error(error: CallError) -> ModelError {
    let failure = RemoteFailure {
        provider: error.service().to_owned(),
        fault: fault(&error),
        reason: error.to_string(),
    };
    tracing::warn!(provider = %failure.provider, reason = %failure.reason, "a call of an embedding provider failed");
    ModelError::Remote(failure)
}

fn fault(error: &CallError) -> RemoteFault {
    match error {
        CallError::Answered(answer) => match answer.status {
            429 => RemoteFault::Busy {
                retry_after: answer.retry_after.unwrap_or(Duration::from_secs(1)),
            },
            400 | 413 | 422 if !answer.refuses_our_key() => RemoteFault::Refused {
                status: answer.status,
            },
            500.. => RemoteFault::Down,
            status => RemoteFault::Misconfigured { status },
        },
        CallError::Unreachable { .. }
        | CallError::DeadlineExceeded { .. }
        | CallError::CircuitOpen { .. } => RemoteFault::Down,
        CallError::TooLarge { .. } | CallError::BadAnswer { .. } => RemoteFault::BadAnswer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ragstone_core::model::ModelIdentity;

    #[test]
    fn tokens_are_shared_out_without_loss() {
        let info = ModelInfo {
            identity: ModelIdentity {
                id: "m".into(),
                version: "1".into(),
                dimensions: 1,
            },
            name: "m".into(),
            max_tokens: None,
        };
        let texts = ["aaaa".to_owned(), "b".to_owned(), "cc".to_owned()];
        let done = finish(vec![vec![1.0]; 3], &texts, 10, &info).unwrap();
        assert_eq!(done.iter().map(|e| e.tokens).sum::<usize>(), 10);
        assert!(done[0].tokens > done[1].tokens);
    }

    #[test]
    fn vectors_that_cannot_be_right_are_refused() {
        assert!(check(&[1.0, 2.0], 3).unwrap_err().contains("2 numbers where 3"));
        assert!(check(&[f32::INFINITY], 1).is_err());
        assert!(check(&[0.0], 1).is_err());
    }
}
