//! Size of a text in tokens of the model.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use ragstone_core::model::Embedder;
use text_splitter::ChunkSizer;

/// Upper bound of the bytes per token. A model may read a megabyte without a space as one unknown
/// word, which must not become one chunk.
const MAX_BYTES_PER_TOKEN: usize = 16;
/// Estimate for English, where only a remote service could count.
const GUESSED_BYTES_PER_TOKEN: usize = 4;
/// Words that are longer are not cached.
const MAX_CACHED_WORD: usize = 48;
const MAX_CACHED_WORDS: usize = 200_000;
/// Room for special tokens and a prompt.
const RESERVED: usize = 8;
const DEFAULT_TOKENS: usize = 256;
pub const MIN_TOKENS: usize = 16;

/// The largest chunk that a model reads to its end, or a reasonable size for one that reads more.
pub fn default_tokens(embedder: &dyn Embedder) -> usize {
    max_tokens(embedder)
        .map_or(DEFAULT_TOKENS, |max| max.min(DEFAULT_TOKENS))
        .max(MIN_TOKENS)
}

pub fn max_tokens(embedder: &dyn Embedder) -> Option<usize> {
    embedder
        .info()
        .max_tokens
        .map(|max| max.saturating_sub(RESERVED).max(MIN_TOKENS))
}

/// Counts tokens word by word with a cache: the splitter measures every text several times, and
/// tokenizing it each time would cost more than a tenth of embedding it. Tokenizers split at white space
/// first, so that the sum over the words is the count of the text.
pub struct TokenSizer {
    embedder: Arc<dyn Embedder>,
    largest: usize,
    words: RefCell<HashMap<Box<str>, u32>>,
}

impl TokenSizer {
    /// `largest` is the chunk size, above which counts need not be exact.
    pub fn new(embedder: Arc<dyn Embedder>, largest: usize) -> Self {
        Self {
            embedder,
            largest,
            words: RefCell::default(),
        }
    }

    fn word(&self, word: &str) -> usize {
        if word.len() > MAX_CACHED_WORD {
            return self.count(word);
        }
        if let Some(tokens) = self.words.borrow().get(word) {
            return *tokens as usize;
        }
        let tokens = self.count(word);
        let mut words = self.words.borrow_mut();
        if words.len() >= MAX_CACHED_WORDS {
            words.clear();
        }
        words.insert(word.into(), u32::try_from(tokens).unwrap_or(u32::MAX));
        tokens
    }

    fn count(&self, text: &str) -> usize {
        self.embedder
            .count_tokens(text)
            .unwrap_or_else(|| text.len().div_ceil(GUESSED_BYTES_PER_TOKEN))
    }
}

impl ChunkSizer for TokenSizer {
    fn size(&self, text: &str) -> usize {
        let at_least = text.len().div_ceil(MAX_BYTES_PER_TOKEN);
        if at_least > self.largest {
            return at_least;
        }
        text.split_whitespace()
            .map(|word| self.word(word))
            .sum::<usize>()
            .max(at_least)
    }
}
