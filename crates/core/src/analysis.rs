//! From text to the words that keyword search compares.
//!
//! Words are folded (compatibility forms, case, diacritics), English ones are stemmed, and very
//! common ones are left out. Identifiers stay findable: of `ZX-4417`, `snake_case`, `camelCase`,
//! `v1.2.3`, `foo::bar` or `ann@example.org` the whole is a word and so is each part. Scripts that
//! put no spaces between words become single characters and overlapping pairs of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use rust_stemmers::{Algorithm, Stemmer};
use unicode_normalization::UnicodeNormalization;

/// Longer words are cut to this many bytes, in documents and queries alike, so they still match.
const MAX_WORD_BYTES: usize = 96;
/// Identifiers are looked at as a whole up to this many bytes; beyond, their parts must do.
const MAX_IDENTIFIER_BYTES: usize = 512;
/// More different words than any person types; a bound on the work of one query.
const MAX_QUERY_TERMS: usize = 256;

/// What all of an identifier counts in a query, beside its parts: enough to put an exact match
/// first, not so much that a hyphen doubles the weight of a word.
const WHOLE_WEIGHT: f32 = 0.4;

/// The words of a document.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TermCounts {
    pub counts: BTreeMap<String, u32>,
    /// How many words the text has. What is counted as a part is not counted again as a whole.
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
        if kind == WordKind::Plain {
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

/// The words of a query, each once; one that is repeated counts more.
pub fn analyze_query(text: &str) -> Vec<QueryTerm> {
    let mut terms = QueryTerms::default();
    for_each_word(text, |word, kind| match kind {
        // A single character of a script without spaces says little where pairs are known.
        WordKind::Extra => terms.fallback.push(word.to_owned()),
        WordKind::Plain => terms.add(word, 1.0),
        WordKind::Whole => terms.add(word, WHOLE_WEIGHT),
    });
    if terms.found.is_empty() {
        for word in std::mem::take(&mut terms.fallback) {
            terms.add(&word, 1.0);
        }
    }
    terms.found
}

#[derive(Default)]
struct QueryTerms {
    found: Vec<QueryTerm>,
    places: HashMap<String, usize>,
    fallback: Vec<String>,
}

impl QueryTerms {
    fn add(&mut self, word: &str, weight: f32) {
        match self.places.get(word) {
            Some(at) => self.found[*at].weight += weight,
            None if self.found.len() < MAX_QUERY_TERMS => {
                self.places.insert(word.to_owned(), self.found.len());
                self.found.push(QueryTerm {
                    text: word.to_owned(),
                    weight,
                });
            }
            None => {}
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WordKind {
    Plain,
    /// All of an identifier whose parts are words as well.
    Whole,
    /// A character on its own, beside the pairs it is part of.
    Extra,
}

static ENGLISH: LazyLock<Stemmer> = LazyLock::new(|| Stemmer::create(Algorithm::English));

fn for_each_word(text: &str, mut visit: impl FnMut(&str, WordKind)) {
    let mut folded = String::new();
    for run in text.split(|c: char| !(is_letter(c) || is_joiner(c))) {
        let run = run.trim_matches(is_joiner);
        if run.is_empty() {
            continue;
        }
        let mut parts = 0;
        for joined in run.split(is_joiner).filter(|part| !part.is_empty()) {
            for part in CamelParts(joined) {
                fold(part, &mut folded);
                // Marks that combine with no letter leave nothing.
                if !folded.is_empty() {
                    parts += 1;
                    visit_part(&folded, &mut visit);
                }
            }
        }
        if parts > 1 && run.len() <= MAX_IDENTIFIER_BYTES {
            fold(run, &mut folded);
            visit(clip(&folded), WordKind::Whole);
        }
    }
}

fn visit_part(part: &str, visit: &mut impl FnMut(&str, WordKind)) {
    if part.is_ascii() {
        if STOP_WORDS.binary_search(&part).is_err() {
            visit(clip(&ENGLISH.stem(clip(part))), WordKind::Plain);
        }
        return;
    }
    // Where a script without spaces begins or ends, a word does too.
    let mut rest = part;
    while let Some(first) = rest.chars().next() {
        let spaceless = is_spaceless(first);
        let end = rest.find(|c| is_spaceless(c) != spaceless).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if spaceless {
            visit_spaceless(word, visit);
        } else {
            visit(clip(&ENGLISH.stem(clip(word))), WordKind::Plain);
        }
        rest = after;
    }
}

fn visit_spaceless(run: &str, visit: &mut impl FnMut(&str, WordKind)) {
    let starts: Vec<usize> = run.char_indices().map(|(at, _)| at).chain([run.len()]).collect();
    let single = if starts.len() == 2 {
        WordKind::Plain
    } else {
        WordKind::Extra
    };
    for pair in starts.windows(2) {
        visit(&run[pair[0]..pair[1]], single);
    }
    for triple in starts.windows(3) {
        visit(&run[triple[0]..triple[2]], WordKind::Plain);
    }
}

/// Letters, digits, and the marks that combine with them.
fn is_letter(c: char) -> bool {
    c.is_alphanumeric() || (!c.is_ascii() && unicode_normalization::char::is_combining_mark(c))
}

/// What holds the parts of an identifier together.
fn is_joiner(c: char) -> bool {
    matches!(
        c,
        '-' | '_' | '.' | ':' | '/' | '@' | '+' | '#' | '&' | '\'' | '’' | '‑'
    )
}

/// Han, kana, Hangul, Thai, Lao, Khmer and Burmese.
fn is_spaceless(c: char) -> bool {
    matches!(u32::from(c),
        0x0e00..=0x0eff | 0x1000..=0x109f | 0x1100..=0x11ff | 0x1780..=0x17ff | 0x3040..=0x30ff | 0x3100..=0x312f
        | 0x3400..=0x4dbf | 0x4e00..=0x9fff | 0xac00..=0xd7af | 0xf900..=0xfaff | 0x20000..=0x3ffff)
}

/// The words within `camelCase`, or all of what is not written so.
struct CamelParts<'a>(&'a str);

impl<'a> Iterator for CamelParts<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.0.is_empty() {
            return None;
        }
        let mut after_lower = false;
        let end = self
            .0
            .char_indices()
            .find(|(_, c)| {
                let boundary = after_lower && c.is_uppercase();
                after_lower = c.is_lowercase();
                boundary
            })
            .map_or(self.0.len(), |(at, _)| at);
        let (part, rest) = self.0.split_at(end);
        self.0 = rest;
        Some(part)
    }
}

/// Compatibility forms, case and diacritics made alike. Only the marks of Latin, Greek and
/// Cyrillic are dropped; in other scripts they are part of the word.
fn fold(word: &str, folded: &mut String) {
    folded.clear();
    if word.is_ascii() {
        folded.push_str(word);
        folded.make_ascii_lowercase();
        return;
    }
    let plain = word.nfkd().filter(|c| !('\u{300}'..='\u{36f}').contains(c)).nfc();
    for c in plain.flat_map(char::to_lowercase) {
        match c {
            'ß' => folded.push_str("ss"),
            'æ' => folded.push_str("ae"),
            'œ' => folded.push_str("oe"),
            'ø' => folded.push('o'),
            'ł' => folded.push('l'),
            'đ' | 'ð' => folded.push('d'),
            'ı' => folded.push('i'),
            '’' => folded.push('\''),
            '‑' => folded.push('-'),
            other => folded.push(other),
        }
    }
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
    "a",
    "about",
    "all",
    "also",
    "am",
    "an",
    "and",
    "any",
    "are",
    "as",
    "at",
    "be",
    "because",
    "been",
    "being",
    "both",
    "but",
    "by",
    "can",
    "could",
    "did",
    "do",
    "does",
    "doing",
    "done",
    "each",
    "for",
    "from",
    "had",
    "has",
    "have",
    "having",
    "he",
    "her",
    "here",
    "hers",
    "him",
    "his",
    "how",
    "however",
    "i",
    "if",
    "in",
    "into",
    "is",
    "it",
    "its",
    "itself",
    "just",
    "may",
    "me",
    "might",
    "more",
    "most",
    "must",
    "my",
    "nor",
    "of",
    "on",
    "once",
    "only",
    "or",
    "other",
    "our",
    "she",
    "should",
    "so",
    "some",
    "such",
    "than",
    "that",
    "the",
    "their",
    "them",
    "then",
    "there",
    "therefore",
    "these",
    "they",
    "this",
    "those",
    "through",
    "to",
    "too",
    "until",
    "very",
    "was",
    "we",
    "were",
    "what",
    "when",
    "where",
    "whether",
    "which",
    "while",
    "who",
    "whom",
    "whose",
    "why",
    "will",
    "with",
    "would",
    "you",
    "your",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        analyze_document(text).counts.into_keys().collect()
    }

    fn queried(text: &str) -> Vec<String> {
        analyze_query(text).into_iter().map(|term| term.text).collect()
    }

    #[test]
    fn english_is_stemmed_and_common_words_are_left_out() {
        let terms = analyze_document("The engines of an ENGINE are running, and it runs");
        assert_eq!(
            terms.counts,
            BTreeMap::from([("engin".into(), 2), ("run".into(), 2)])
        );
        assert_eq!(terms.length, 4);
        assert_eq!(queried("running engines run"), ["run", "engin"]);
        assert_eq!(analyze_query("running engines run")[0].weight, 2.0);
    }

    #[test]
    fn identifiers_are_found_whole_and_by_their_parts() {
        for (text, whole, parts) in [
            ("ZX-4417", "zx-4417", &["zx", "4417"][..]),
            ("snake_case", "snake_case", &["snake", "case"]),
            ("v1.2.3", "v1.2.3", &["v1", "2", "3"]),
            ("foo::bar", "foo::bar", &["foo", "bar"]),
            ("ann@example.org", "ann@example.org", &["ann", "exampl", "org"]),
            ("getUserName", "getusername", &["get", "user", "name"]),
            ("/usr/lib/x.conf", "usr/lib/x.conf", &["usr", "lib", "x", "conf"]),
        ] {
            for text in [
                text.to_owned(),
                format!("({text}), see {text}."),
                text.to_uppercase().replace("GETUSERNAME", text),
            ] {
                let found = words(&text);
                assert!(found.iter().any(|w| w == whole), "{text}: {found:?}");
                for part in parts {
                    assert!(found.iter().any(|w| w == part), "{text}: {found:?}");
                }
            }
            assert!(queried(text).iter().any(|w| w == whole));
        }
    }

    #[test]
    fn letters_are_folded() {
        assert_eq!(words("Über ﬁne ＡＢＣ"), words("uber fine abc"));
        assert_eq!(words("Straße"), words("STRASSE"));
        assert_eq!(words("Łódź"), words("lodz"));
        assert_eq!(words("ΑΘΉΝΑ"), words("αθηνα"));
        // A mark on its own is no word.
        assert!(words("🦀 \u{200b}\u{301} \u{301}-\u{301}").is_empty());
        // A vowel sign of another script is part of its word.
        assert_ne!(words("की"), words("कि"));
    }

    #[test]
    fn scripts_without_spaces_become_pairs() {
        assert_eq!(words("東京都"), ["京", "京都", "東", "東京", "都"]);
        assert_eq!(queried("東京都"), ["東京", "京都"]);
        assert_eq!(queried("京"), ["京"]);
        assert_eq!(analyze_document("東京都").length, 2);
        assert!(words("MiniLMで検索").contains(&"検索".to_owned()));
        assert!(words("MiniLMで検索").contains(&"lm".to_owned()));
    }

    #[test]
    fn very_long_words_stay_bounded_and_findable() {
        let long = "x".repeat(5_000_000);
        let found = words(&long);
        assert_eq!(found.len(), 1);
        assert!(found[0].len() <= MAX_WORD_BYTES);
        assert_eq!(queried(&long), found);
        let joined = "ab-".repeat(1_000_000);
        assert_eq!(words(&joined), ["ab"]);
        assert_eq!(words(&"é".repeat(1000))[0].len(), MAX_WORD_BYTES);
    }

    #[test]
    fn text_without_words_has_none() {
        for text in ["", " \n\t", "--- ... ::", "!?\u{1F600}"] {
            assert_eq!(analyze_document(text), TermCounts::default(), "{text:?}");
            assert_eq!(analyze_query(text), []);
        }
    }

    #[test]
    fn stop_words_are_sorted() {
        assert!(STOP_WORDS.is_sorted());
    }
}
