//! Tokenization from `tokenizer.json`, with the same results as `transformers`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ragstone_core::model::ModelError;
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokenizers::normalizers::{Lowercase, Sequence as NormalizerSequence};
use tokenizers::utils::truncation::TruncationDirection;
use tokenizers::{Encoding, NormalizerWrapper, PostProcessor, Token, Tokenizer};

use crate::encoder::Sequence;
use crate::encoder::config::EncoderConfig;
use crate::error::LoadError;
use crate::files::{json_optional, read_required};

/// Longest text that is tokenized as a whole. Of a longer one, only a prefix that fills the model is.
const WHOLE: usize = 32 * 1024;

pub(crate) struct TextTokenizer {
    tokenizer: Tokenizer,
    /// Special tokens included.
    max_tokens: usize,
    direction: TruncationDirection,
    /// Number of token types of the encoder, 0 or 1 if it does not use them.
    token_types: usize,
    vocabulary: usize,
}

pub(crate) struct Tokenized {
    pub(crate) sequence: Sequence,
    pub(crate) truncated: bool,
}

/// The common first text of many pairs.
pub(crate) struct FirstText {
    /// Truncated to the length of a pair, since every pair copies it.
    content: Encoding,
    /// Number of tokens before truncation, which determines how pairs are truncated.
    length: usize,
}

pub(crate) struct TokenizerOptions {
    /// The limit in the configuration of the model, if it has one.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) lower_case: bool,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    /// A float of about 1e30 if no limit is known.
    model_max_length: Option<f64>,
    truncation_side: Option<String>,
}

impl TextTokenizer {
    pub(crate) fn load(
        directory: &Path,
        encoder: &EncoderConfig,
        options: &TokenizerOptions,
    ) -> Result<Self, LoadError> {
        let path = directory.join("tokenizer.json");
        let bytes = read_required(directory, "tokenizer.json")?;
        let malformed = |error: tokenizers::Error| LoadError::malformed(&path, error);
        // Damaged JSON makes the library panic; this reports where the damage is.
        serde_json::from_slice::<IgnoredAny>(&bytes).map_err(|error| LoadError::malformed(&path, error))?;
        let mut tokenizer = guarded(|| Tokenizer::from_bytes(bytes)).map_err(malformed)?;
        // Some files contain the truncation and padding of their author; neither is part of the model.
        tokenizer.with_truncation(None).map_err(malformed)?;
        tokenizer.with_padding(None);
        if options.lower_case {
            lower_case_first(&mut tokenizer).map_err(malformed)?;
        }
        let config: TokenizerConfig =
            json_optional(&directory.join("tokenizer_config.json"))?.unwrap_or_default();
        let own_limit = config
            .model_max_length
            .filter(|limit| *limit >= 1.0)
            .map_or(usize::MAX, |limit| limit as usize);
        let max_tokens = options
            .max_tokens
            .unwrap_or_else(|| own_limit.min(encoder.positions))
            .min(encoder.longest_sequence());
        let specials = tokenizer
            .get_post_processor()
            .map_or(0, |processor| processor.added_tokens(true));
        if max_tokens <= specials {
            let reason = format!(
                "a limit of {max_tokens} tokens leaves no room for text besides {specials} special tokens"
            );
            return Err(LoadError::malformed(&path, reason));
        }
        let direction = match config.truncation_side.as_deref() {
            Some("left") => TruncationDirection::Left,
            _ => TruncationDirection::Right,
        };
        Ok(Self {
            tokenizer,
            max_tokens,
            direction,
            token_types: encoder.token_types,
            vocabulary: encoder.vocabulary,
        })
    }

    pub(crate) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    pub(crate) fn count(&self, text: &str) -> Option<usize> {
        guarded(|| self.tokenizer.encode_fast(text, false))
            .ok()
            .map(|encoding| encoding.len())
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Tokenized, ModelError> {
        let content = self.content(text)?;
        self.finish(FirstText::whole(content), None)
    }

    /// Tokenizes the common first text of many pairs.
    pub(crate) fn first_text(&self, text: &str) -> Result<FirstText, ModelError> {
        let mut first = FirstText::whole(self.content(text)?);
        self.cut(&mut first.content, self.max_tokens);
        Ok(first)
    }

    /// Keeps at most `max_second` tokens of the second text, if given.
    pub(crate) fn encode_pair(
        &self,
        first: &FirstText,
        second: &str,
        max_second: Option<usize>,
    ) -> Result<Tokenized, ModelError> {
        let mut second = self.content(second)?;
        if let Some(most) = max_second {
            self.cut(&mut second, most);
        }
        let first = FirstText {
            content: first.content.clone(),
            length: first.length,
        };
        self.finish(first, Some(second))
    }

    /// Truncates to so many tokens.
    fn cut(&self, encoding: &mut Encoding, most: usize) {
        encoding.truncate(most, 0, self.direction);
        encoding.take_overflowing();
    }

    /// Prepares token ids of a client, which have no special tokens, after the tokens of a prompt.
    pub(crate) fn encode_ids(&self, prompt: &str, ids: &[u32]) -> Result<Tokenized, ModelError> {
        let mut all = self.content(prompt)?.get_ids().to_vec();
        all.extend_from_slice(ids);
        // Every token costs an allocation below, so drop those that truncation would.
        let excess = all.len().saturating_sub(self.max_tokens + 1);
        match self.direction {
            TruncationDirection::Left => drop(all.drain(..excess)),
            TruncationDirection::Right => all.truncate(all.len() - excess),
        }
        let tokens = all
            .into_iter()
            .map(|id| Token::new(id, String::new(), (0, 0)))
            .collect();
        self.finish(FirstText::whole(Encoding::from_tokens(tokens, 0)), None)
    }

    /// Number of leading tokens that come from the prompt. Like sentence-transformers, this includes the
    /// special token before it and not the one after it.
    pub(crate) fn prompt_length(&self, prompt: &str) -> Result<usize, ModelError> {
        let encoding = guarded(|| self.tokenizer.encode_fast(prompt, true)).map_err(failed)?;
        let closing = encoding.get_special_tokens_mask().last() == Some(&1);
        Ok(encoding.len() - usize::from(closing))
    }

    /// The tokens of a text without special tokens; of a very long text, at least as many as fit.
    fn content(&self, text: &str) -> Result<Encoding, ModelError> {
        let mut bytes = WHOLE.max(self.max_tokens * 16);
        while bytes < text.len() && self.direction == TruncationDirection::Right {
            let end = text.floor_char_boundary(bytes);
            let end = text[..end]
                .rfind(char::is_whitespace)
                .filter(|at| *at > end / 2)
                .unwrap_or(end);
            let encoding = guarded(|| self.tokenizer.encode_fast(&text[..end], false)).map_err(failed)?;
            // Cutting may change the last tokens of the part, but none far before its end.
            if encoding.len() > 2 * self.max_tokens {
                return Ok(encoding);
            }
            bytes *= 4;
        }
        guarded(|| self.tokenizer.encode_fast(text, false)).map_err(failed)
    }

    fn finish(&self, first: FirstText, second: Option<Encoding>) -> Result<Tokenized, ModelError> {
        let specials = self
            .tokenizer
            .get_post_processor()
            .map_or(0, |processor| processor.added_tokens(second.is_some()));
        let room = self.max_tokens.saturating_sub(specials);
        let FirstText {
            content: mut first,
            length,
        } = first;
        let mut second = second;
        let lengths = (length, second.as_ref().map_or(0, Encoding::len));
        let truncated = lengths.0 + lengths.1 > room;
        let kept = longest_first(lengths, room);
        self.cut(&mut first, kept.0);
        if let Some(second) = &mut second {
            self.cut(second, kept.1);
        }
        let encoding = guarded(|| self.tokenizer.post_process(first, second, true)).map_err(failed)?;
        let ids = encoding.get_ids().to_vec();
        if ids.is_empty() {
            return Err(ModelError::InvalidInput("the text has no tokens".to_owned()));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocabulary) {
            let message = format!(
                "token {id} is not in the model's vocabulary of {} tokens",
                self.vocabulary
            );
            return Err(ModelError::InvalidInput(message));
        }
        // Without token types in the encoder, all tokens have type 0.
        let types = if self.token_types > 1 {
            encoding.get_type_ids().to_vec()
        } else {
            Vec::new()
        };
        if let Some(kind) = types.iter().find(|kind| **kind as usize >= self.token_types) {
            return Err(ModelError::Failed(format!(
                "tokenizer.json uses token type {kind}, but the model has only {}",
                self.token_types
            )));
        }
        Ok(Tokenized {
            sequence: Sequence {
                ids,
                types,
                pool_from: 0,
            },
            truncated,
        })
    }
}

impl FirstText {
    fn whole(content: Encoding) -> Self {
        Self {
            length: content.len(),
            content,
        }
    }
}

/// Number of tokens to keep of two texts, by the strategy `longest_first` of `transformers`: the longer
/// text is truncated first. An odd token goes to the longer text.
fn longest_first((first, second): (usize, usize), room: usize) -> (usize, usize) {
    if first + second <= room {
        return (first, second);
    }
    let shorter = first.min(second).min(room / 2);
    let longer = room - shorter;
    if first > second {
        (longer, shorter)
    } else {
        (shorter, longer)
    }
}

/// Adds lower-casing before the normalization of the tokenizer, unless it already does so.
fn lower_case_first(tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
    let existing = tokenizer.get_normalizer().cloned();
    let lowers = |normalizer: &NormalizerWrapper| match normalizer {
        NormalizerWrapper::Lowercase(_) => true,
        NormalizerWrapper::BertNormalizer(bert) => bert.lowercase,
        _ => false,
    };
    let mut all = vec![NormalizerWrapper::Lowercase(Lowercase)];
    match existing {
        Some(NormalizerWrapper::Sequence(sequence)) => all.extend(sequence.as_ref().iter().cloned()),
        Some(other) => all.push(other),
        None => {}
    }
    if !all[1..].iter().any(lowers) {
        tokenizer.with_normalizer(Some(NormalizerSequence::new(all)))?;
    }
    Ok(())
}

/// Turns a panic of the library, which some tokenizer files cause, into an error.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> tokenizers::Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err("the tokenizer panicked; see the log".into()))
}

fn failed(error: tokenizers::Error) -> ModelError {
    ModelError::Failed(format!("tokenization failed: {error}"))
}
