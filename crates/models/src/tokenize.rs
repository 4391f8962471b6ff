//! From text to token ids, as `transformers` does it from the same `tokenizer.json`.

use std::path::Path;

use ragstone_core::model::ModelError;
use serde::Deserialize;
use tokenizers::normalizers::{Lowercase, Sequence as NormalizerSequence};
use tokenizers::utils::truncation::TruncationDirection;
use tokenizers::{Encoding, NormalizerWrapper, PostProcessor, Token, Tokenizer};

use crate::encoder::Sequence;
use crate::encoder::config::EncoderConfig;
use crate::error::LoadError;
use crate::files::{json_optional, read_required};

/// Up to this many bytes a text is tokenized whole; of a longer one, only as much as can count.
const WHOLE: usize = 32 * 1024;

pub(crate) struct TextTokenizer {
    tokenizer: Tokenizer,
    /// Special tokens included.
    max_tokens: usize,
    direction: TruncationDirection,
    /// Whether the encoder tells the two texts of a pair apart by token types.
    typed: bool,
    vocabulary: usize,
}

pub(crate) struct Tokenized {
    pub(crate) sequence: Sequence,
    pub(crate) truncated: bool,
}

/// The text that many pairs begin with.
pub(crate) struct FirstText {
    /// No more tokens than can count in any pair: every pair takes a copy.
    content: Encoding,
    /// How many tokens it had, which decides how pairs are cut.
    length: usize,
}

pub(crate) struct TokenizerOptions {
    /// The limit of the model's own configuration, where it has one.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) lower_case: bool,
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    /// Where no limit is known this is a float of the size 1e30.
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
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(malformed)?;
        // Some files carry the truncation and padding of whoever saved them; neither is part of the model.
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
            let reason = format!("{max_tokens} tokens leave no room for text beside {specials} special ones");
            return Err(LoadError::malformed(&path, reason));
        }
        let direction = match config.truncation_side.as_deref() {
            Some("left") => TruncationDirection::Left,
            _ => TruncationDirection::Right,
        };
        // A tokenizer whose encoder knows no types calls all tokens of type 0.
        let typed = encoder.token_types > 1;
        Ok(Self {
            tokenizer,
            max_tokens,
            direction,
            typed,
            vocabulary: encoder.vocabulary,
        })
    }

    pub(crate) fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    pub(crate) fn count(&self, text: &str) -> Option<usize> {
        self.tokenizer
            .encode_fast(text, false)
            .ok()
            .map(|encoding| encoding.len())
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Tokenized, ModelError> {
        let content = self.content(text)?;
        self.finish(FirstText::whole(content), None)
    }

    /// Tokenizes what many pairs have in common.
    pub(crate) fn first_text(&self, text: &str) -> Result<FirstText, ModelError> {
        let mut first = FirstText::whole(self.content(text)?);
        self.cut(&mut first.content, self.max_tokens);
        Ok(first)
    }

    /// At most `max_second` tokens of the second text are kept, where that is given.
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

    /// Keeps so many tokens, and nothing of the others.
    fn cut(&self, encoding: &mut Encoding, most: usize) {
        encoding.truncate(most, 0, self.direction);
        encoding.take_overflowing();
    }

    /// Token ids as a client sends them, without special tokens, after the tokens of a prompt.
    pub(crate) fn encode_ids(&self, prompt: &str, ids: &[u32]) -> Result<Tokenized, ModelError> {
        let mut all = self.content(prompt)?.get_ids().to_vec();
        all.extend_from_slice(ids);
        // No more than this can count, and every token costs an allocation below.
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

    /// How many tokens at the beginning of a text come from its prompt, counted as
    /// sentence-transformers does: with the special token before it, without the one after it.
    pub(crate) fn prompt_length(&self, prompt: &str) -> Result<usize, ModelError> {
        let encoding = self.tokenizer.encode_fast(prompt, true).map_err(failed)?;
        let closing = encoding.get_special_tokens_mask().last() == Some(&1);
        Ok(encoding.len() - usize::from(closing))
    }

    /// The tokens of a text without special ones; of a very long text, at least as many as fit.
    fn content(&self, text: &str) -> Result<Encoding, ModelError> {
        let mut bytes = WHOLE.max(self.max_tokens * 16);
        while bytes < text.len() && self.direction == TruncationDirection::Right {
            let end = text.floor_char_boundary(bytes);
            let end = text[..end]
                .rfind(char::is_whitespace)
                .filter(|at| *at > end / 2)
                .unwrap_or(end);
            let encoding = self.tokenizer.encode_fast(&text[..end], false).map_err(failed)?;
            // Cutting may change the last tokens of the part, never those far before its end.
            if encoding.len() > 2 * self.max_tokens {
                return Ok(encoding);
            }
            bytes *= 4;
        }
        self.tokenizer.encode_fast(text, false).map_err(failed)
    }

    fn finish(&self, first: FirstText, second: Option<Encoding>) -> Result<Tokenized, ModelError> {
        let specials = self
            .tokenizer
            .get_post_processor()
            .map_or(0, |processor| processor.added_tokens(second.is_some()));
        let room = self.max_tokens - specials;
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
        let encoding = self.tokenizer.post_process(first, second, true).map_err(failed)?;
        let ids = encoding.get_ids().to_vec();
        if ids.is_empty() {
            return Err(ModelError::InvalidInput(
                "the text has no token that the model could read".to_owned(),
            ));
        }
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocabulary) {
            let message = format!(
                "token {id} is not in the model's vocabulary of {} tokens",
                self.vocabulary
            );
            return Err(ModelError::InvalidInput(message));
        }
        let types = if self.typed {
            encoding.get_type_ids().to_vec()
        } else {
            Vec::new()
        };
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

/// How many tokens of two texts are kept so that they fit together: the longer one gives first, as the
/// strategy `longest_first` of `transformers` has it. An odd token goes to the longer text.
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

/// Puts lower-casing before the tokenizer's own normalization, unless it lower-cases already.
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

fn failed(error: tokenizers::Error) -> ModelError {
    ModelError::Failed(format!("the text could not be tokenized: {error}"))
}
