//! What the words of a message say about where it belongs.
//!
//! The lists are English. In another language no cue is found and every word counts as content, so
//! that similarity and shared words decide alone.

use std::collections::HashSet;

/// Pronouns for people. They refer to somebody, but people also begin with them, about whom they have
/// before their eyes.
const PERSONAL: &[&str] = &[
    "he",
    "her",
    "hers",
    "herself",
    "him",
    "himself",
    "his",
    "she",
    "their",
    "theirs",
    "them",
    "themselves",
    "they",
];

/// The pronoun for a thing: nobody opens a subject with it.
const IMPERSONAL: &[&str] = &["it", "its", "itself"];

/// Words that point at what was said.
const POINTING: &[&str] = &["such", "that", "there", "these", "this", "those"];

/// Words that add to what was said.
const ADDING: &[&str] = &[
    "afterwards",
    "again",
    "also",
    "another",
    "besides",
    "else",
    "instead",
    "later",
    "more",
    "next",
    "other",
    "others",
    "then",
    "too",
];

/// Words that nothing can be found by: they build sentences, or address the one who answers.
const FUNCTION: &[&str] = &[
    "a",
    "about",
    "above",
    "after",
    "again",
    "against",
    "all",
    "also",
    "although",
    "am",
    "an",
    "and",
    "another",
    "any",
    "anyone",
    "anything",
    "are",
    "as",
    "at",
    "be",
    "because",
    "been",
    "before",
    "being",
    "below",
    "between",
    "both",
    "but",
    "by",
    "can",
    "could",
    "d",
    "did",
    "do",
    "does",
    "doing",
    "don",
    "done",
    "down",
    "during",
    "each",
    "else",
    "even",
    "ever",
    "everything",
    "few",
    "for",
    "from",
    "get",
    "give",
    "got",
    "had",
    "has",
    "have",
    "having",
    "he",
    "her",
    "here",
    "hers",
    "herself",
    "him",
    "himself",
    "his",
    "how",
    "i",
    "if",
    "in",
    "into",
    "is",
    "it",
    "its",
    "itself",
    "just",
    "know",
    "let",
    "like",
    "ll",
    "m",
    "many",
    "may",
    "me",
    "might",
    "mine",
    "more",
    "most",
    "much",
    "must",
    "my",
    "myself",
    "no",
    "nor",
    "not",
    "nothing",
    "now",
    "of",
    "off",
    "on",
    "once",
    "one",
    "ones",
    "only",
    "or",
    "other",
    "others",
    "our",
    "ours",
    "ourselves",
    "out",
    "over",
    "own",
    "please",
    "re",
    "s",
    "same",
    "say",
    "shall",
    "she",
    "should",
    "since",
    "so",
    "some",
    "someone",
    "something",
    "still",
    "such",
    "t",
    "tell",
    "than",
    "that",
    "the",
    "their",
    "theirs",
    "them",
    "themselves",
    "then",
    "there",
    "these",
    "they",
    "thing",
    "things",
    "this",
    "those",
    "though",
    "through",
    "to",
    "too",
    "under",
    "unless",
    "until",
    "up",
    "upon",
    "us",
    "ve",
    "very",
    "was",
    "we",
    "were",
    "what",
    "when",
    "where",
    "which",
    "while",
    "who",
    "whom",
    "whose",
    "why",
    "will",
    "with",
    "within",
    "without",
    "would",
    "yes",
    "yet",
    "you",
    "your",
    "yours",
    "yourself",
];

/// What a message gives away before anything is searched for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cues {
    pub(super) personal: bool,
    pub(super) impersonal: bool,
    pub(super) pointing: bool,
    pub(super) adding: bool,
    /// The words it could be found by, in lower case.
    pub(super) content: HashSet<String>,
    /// Those of them that look like names, in lower case.
    pub(super) names: HashSet<String>,
}

pub(super) fn cues(message: &str) -> Cues {
    let words: HashSet<String> = words(message).collect();
    let any_of = |list: &[&str]| list.iter().any(|word| words.contains(*word));
    Cues {
        personal: any_of(PERSONAL),
        impersonal: any_of(IMPERSONAL),
        pointing: any_of(POINTING),
        adding: any_of(ADDING),
        names: names(message),
        content: words.into_iter().filter(|word| !is_function_word(word)).collect(),
    }
}

/// Words that begin with a capital letter without being the first. Where there is no English sentence
/// around them that says nothing: other languages write other words so, and some people all of them.
fn names(message: &str) -> HashSet<String> {
    let pieces = || {
        message
            .split(|c: char| !is_word_char(c))
            .filter(|word| !word.is_empty())
    };
    if !pieces().any(is_function_word) {
        return HashSet::new();
    }
    pieces()
        .skip(1)
        .filter(|word| word.starts_with(char::is_uppercase))
        .map(str::to_lowercase)
        .filter(|word| !is_function_word(word))
        .collect()
}

/// The text without the words that nothing can be found by, and each word once. Words stay as they
/// were typed, `ZX-4417` in one piece. When nothing would be left, the text itself.
pub(super) fn keywords(text: &str) -> String {
    let mut seen = HashSet::new();
    let kept: Vec<&str> = text
        .split_whitespace()
        .map(|piece| piece.trim_matches(|c: char| !is_word_char(c)))
        .filter(|piece| words(piece).any(|word| !is_function_word(&word)))
        .filter(|piece| seen.insert(piece.to_lowercase()))
        .collect();
    if kept.is_empty() {
        text.to_owned()
    } else {
        kept.join(" ")
    }
}

fn words(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split(|c: char| !is_word_char(c))
        .filter(|word| !word.is_empty())
        .map(str::to_lowercase)
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_function_word(word: &str) -> bool {
    FUNCTION.binary_search(&word).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_for_binary_search() {
        for list in [PERSONAL, IMPERSONAL, POINTING, ADDING, FUNCTION] {
            assert!(list.windows(2).all(|pair| pair[0] < pair[1]), "{list:?}");
        }
    }

    #[test]
    fn cues_are_whole_words() {
        let cues = cues("Did SHE break his other theremin, and that?");
        assert!(cues.personal && cues.pointing && cues.adding);
        assert_eq!(
            cues.content,
            HashSet::from(["break".to_owned(), "theremin".to_owned()])
        );
        let none = super::cues("Thermal itinerary, history");
        assert!(!none.personal && !none.pointing && !none.adding);
    }

    #[test]
    fn names_are_capitalised_within_an_english_sentence() {
        let names = |message: &str| {
            let mut names: Vec<String> = super::names(message).into_iter().collect();
            names.sort_unstable();
            names.join(" ")
        };
        assert_eq!(names("Where did Miles Dempsey and I study?"), "dempsey miles");
        assert_eq!(names("Who won?"), "");
        assert_eq!(names("Wann erschien das Buch?"), "");
        assert_eq!(names("WHERE DID HE STUDY"), "");
    }

    #[test]
    fn keywords_keep_what_can_be_found() {
        assert_eq!(
            keywords("What is the ZX-4417, and does the zx-4417 run Linux?"),
            "ZX-4417 run Linux"
        );
        assert_eq!(keywords("And then?"), "And then?");
        assert_eq!(keywords(""), "");
    }
}
