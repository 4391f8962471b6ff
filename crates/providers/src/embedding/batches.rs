//! Splits a request by the limits of an API.

use ragstone_core::model::{CallLimits, EmbedInput, ModelError};

pub(super) fn into_texts(inputs: Vec<EmbedInput>, provider: &str) -> Result<Vec<String>, ModelError> {
    inputs
        .into_iter()
        .map(|input| match input {
            EmbedInput::Text(text) => Ok(text),
            EmbedInput::Tokens(_) => Err(ModelError::InvalidInput(format!(
                "provider '{provider}' embeds texts, not token ids"
            ))),
        })
        .collect()
}

/// Splits texts into batches within the limits. A text above the limits is a batch of its own, which the
/// API may refuse.
pub(super) fn split(texts: &[String], limits: CallLimits) -> Vec<&[String]> {
    split_by(texts, limits, String::len)
}

/// Splits any items by the number and size of their texts.
pub fn split_by<T>(items: &[T], limits: CallLimits, bytes_of: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let mut batches = Vec::new();
    let (mut start, mut bytes) = (0, 0_usize);
    for (index, item) in items.iter().enumerate() {
        let full = index - start >= limits.texts || bytes + bytes_of(item) > limits.bytes;
        if full && index > start {
            batches.push(&items[start..index]);
            (start, bytes) = (index, 0);
        }
        bytes += bytes_of(item);
    }
    if start < items.len() {
        batches.push(&items[start..]);
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizes(lengths: &[usize], limits: CallLimits) -> Vec<usize> {
        let texts: Vec<String> = lengths.iter().map(|n| "x".repeat(*n)).collect();
        split(&texts, limits).iter().map(|batch| batch.len()).collect()
    }

    #[test]
    fn batches_keep_to_both_limits() {
        let limits = CallLimits { texts: 3, bytes: 10 };
        assert_eq!(sizes(&[1; 7], limits), [3, 3, 1]);
        assert_eq!(sizes(&[6, 4, 1, 10, 1], limits), [2, 1, 1, 1]);
        assert_eq!(sizes(&[50, 1, 50], limits), [1, 1, 1]);
        assert_eq!(sizes(&[], limits), [0_usize; 0]);
    }
}
