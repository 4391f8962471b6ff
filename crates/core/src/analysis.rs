//! From text to the words that keyword search compares.
//!
//! Words are folded (compatibility forms, case, diacritics), English ones are stemmed, and very
//! common ones are left out. Identifiers stay findable: of `ZX-4417`, `snake_case`, `v1.2.3`,
//! `foo::bar` or `ann@example.org` the whole is a word and so is each part. Scripts that do not
//! put spaces between words become overlapping pairs of characters.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use rust_stemmers::{Algorithm, Stemmer};
use unicode_normalization::UnicodeNormalization;

/// Longer words are cut to this many bytes, in documents and queries alike, so they still match.
const MAX_WORD_BYTES: usize = 96;
/// What counts as one word in a query: more than any person types, and a bound on the work.
const MAX_QUERY_TERMS: usize = 256;

/// The words of a document.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TermCounts {
    pub counts: BTreeMap<String, u32>,
    /// How many words the text has; the whole of an identifier is not counted beside its parts.
    pub length: u32,
}

/// A word to look for, and how much it counts.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryTerm {
    pub text: String,
    pub weight: f32,
}

pub fn analyze_document(text: &str) -> TermCounts {
    let mut terms = TermCounts::default();
    for_each_word(text, |word, kind| {
        if kind != WordKind::Whole {
            terms.length = terms.length.saturating_add(1);
        }
        match terms.counts.get_mut(word) {
            Some(count) => *count = count.saturating_add(1),
            None => {
                terms.counts.insert(word.to_owned(), 1);
            }
        }
    });
    terms
}

pub fn analyze_query(text: &str) -> Vec<QueryTerm> {
    let mut terms: Vec<QueryTerm> = Vec::new();
    let mut places: std::collections::HashMap<String, usize> = std::collections::HashMap::new();
    for_each_word(text, |word, _| match places.get(word) {
        Some(at) => terms[*at].weight += 1.0,
        None if terms.len() < MAX_QUERY_TERMS => {
            places.insert(word.to_owned(), terms.len());
            terms.push(QueryTerm {
                text: word.to_owned(),
                weight: 1.0,
            });
        }
        None => {}
    });
    terms
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WordKind {
    Part,
    Whole,
}

static ENGLISH: LazyLock<Stemmer> = LazyLock::new(|| Stemmer::create(Algorithm::English));

fn for_each_word(text: &str, mut visit: impl FnMut(&str, WordKind)) {
    for piece in text.split(|c: char| !(c.is_alphanumeric() || is_joiner(c))) {
        let piece = piece.trim_matches(is_joiner);
        if piece.is_empty() {
            continue;
        }
        let folded = fold(piece);
        let mut parts = 0;
        for part in folded.split(is_joiner).filter(|part| !part.is_empty()) {
            parts += 1;
            let part = clip(part);
            if STOP_WORDS.binary_search(&part).is_ok() {
                continue;
            }
            visit(&ENGLISH.stem(part), WordKind::Part);
        }
        if parts > 1 {
            visit(clip(&folded), WordKind::Whole);
        }
    }
}

fn is_joiner(c: char) -> bool {
    matches!(c, '-' | '_' | '.' | ':' | '/' | '@' | '+' | '#' | '\'' | '’')
}

fn fold(piece: &str) -> String {
    if piece.is_ascii() {
        return piece.to_ascii_lowercase();
    }
    piece
        .nfkd()
        .filter(|c| !('\u{300}'..='\u{36f}').contains(c))
        .nfc()
        .flat_map(char::to_lowercase)
        .collect()
}

fn clip(word: &str) -> &str {
    let mut end = word.len().min(MAX_WORD_BYTES);
    while !word.is_char_boundary(end) {
        end -= 1;
    }
    &word[..end]
}

/// Sorted, for binary search.
const STOP_WORDS: &[&str] = &[
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this", "to",
    "was", "will", "with",
];
