//! What the words of a message say about where it belongs.
//!
//! The lists are English. In another language no cue is found and every word counts as content, so
//! that similarity and shared words decide alone.

use std::collections::HashSet;

use super::lists::{
    ADDING, ASKING_MORE, AUXILIARIES, COURTESIES, FUNCTION, GOING_ON, IMPERSONAL, MEASURES, PERSONAL,
    POINTING, PREPOSITIONS, QUESTION_WORDS,
};

/// What a message gives away before anything is searched for.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Cues {
    pub(super) personal: bool,
    pub(super) impersonal: bool,
    pub(super) pointing: bool,
    pub(super) adding: bool,
    /// It begins like something that goes on.
    pub(super) going_on: bool,
    /// It begins with a preposition and a question word.
    pub(super) part_of_a_sentence: bool,
    /// The words it could be found by, in lower case.
    pub(super) content: HashSet<String>,
    /// Those of them that look like names, in lower case.
    pub(super) names: HashSet<String>,
}

impl Cues {
    /// How many words it has that say what it is about, besides those for how much and for more.
    pub(super) fn own_subjects(&self) -> usize {
        self.content.iter().filter(|word| is_subject(word)).count()
    }

    /// It has words that say something of a topic; "Why?" and "Can you elaborate?" have none.
    pub(super) fn says_something(&self) -> bool {
        let asks_more = |word: &String| ASKING_MORE.binary_search(&word.as_str()).is_ok();
        !self.content.iter().all(asks_more)
    }

    /// It is less than a question: "At what temperature?", "How long?"
    pub(super) fn is_elliptic(&self) -> bool {
        let subjects = self.own_subjects();
        subjects == 0 || (subjects == 1 && self.part_of_a_sentence)
    }

    /// It asks more of what was asked before: "How long?", "And for two?"
    pub(super) fn asks_more(&self) -> bool {
        self.going_on || self.is_elliptic()
    }

    /// Nothing in it points at what was said before.
    pub(super) fn stands_alone(&self) -> bool {
        let points_back = self.personal || self.impersonal || self.pointing || self.adding;
        !points_back && !self.asks_more()
    }

    /// It says "they" or "that", and little that could tell what is meant.
    pub(super) fn leaves_open_what_is_meant(&self) -> bool {
        (self.personal || self.impersonal || self.pointing) && self.own_subjects() <= 2
    }
}

/// Whether a message is nothing but courtesies: "Ok, thanks!" So is one without any word, such as an emoji.
pub fn is_courtesy(message: &str) -> bool {
    if message.contains('?') {
        return false;
    }
    let said: Vec<String> = words(message).collect();
    if said.is_empty() {
        return !message.trim().is_empty();
    }
    let mut rest = &said[..];
    while !rest.is_empty() {
        // The longest that fits, so that "thank you" leaves no "very much" behind.
        let courtesy = (1..=rest.len().min(4)).rev().find(|length| {
            COURTESIES
                .binary_search(&rest[..*length].join(" ").as_str())
                .is_ok()
        });
        match courtesy {
            Some(length) => rest = &rest[length..],
            None => return false,
        }
    }
    true
}

fn begins_like_going_on(words: &[String]) -> bool {
    GOING_ON.iter().any(|start| {
        let start: Vec<&str> = start.split(' ').collect();
        words.len() > start.len() && words.iter().zip(&start).all(|(word, start)| word == start)
    })
}

/// "Does that also run on Linux?" says "that" for "it"; "Is that city large?" does not.
fn points_like_it(words: &[String]) -> bool {
    words.windows(2).enumerate().any(|(place, pair)| {
        let noun_may_follow = words.get(place + 2).is_some_and(|next| !is_function_word(next));
        AUXILIARIES.binary_search(&pair[0].as_str()).is_ok()
            && POINTING.binary_search(&pair[1].as_str()).is_ok()
            && pair[1] != "there"
            && !noun_may_follow
    })
}

/// "My laptop is broken, where do I bring it?" says itself what "it" is.
fn says_what_it_is(message: &str) -> bool {
    let mut named = false;
    for clause in message.split([',', '.', ';', ':', '!', '?']) {
        if is_courtesy(clause) {
            continue;
        }
        let said: Vec<String> = words(clause).collect();
        if said
            .iter()
            .any(|word| IMPERSONAL.binary_search(&word.as_str()).is_ok())
        {
            return named;
        }
        named |= said
            .iter()
            .any(|word| !is_function_word(word) && is_subject(word));
    }
    false
}

/// "How do I book one?" means one of what was spoken of.
fn ends_with_one(words: &[String]) -> bool {
    words.len() > 1 && words.last().is_some_and(|last| last == "one" || last == "ones")
}

/// "Does the company also add to my pension?" may open a subject: it has one, and "also" is a manner of
/// speaking. Other words that add to what was said do not stand alone like that.
fn adds_something_else(words: &HashSet<String>) -> bool {
    let adding = || ADDING.iter().filter(|word| words.contains(**word));
    let subjects = words
        .iter()
        .filter(|word| !is_function_word(word) && is_subject(word));
    adding().count() > 0 && adding().all(|word| *word == "also") && subjects.count() >= 2
}

fn begins_as_part_of_a_sentence(words: &[String]) -> bool {
    let [first, second, ..] = words else {
        return false;
    };
    PREPOSITIONS.contains(&first.as_str()) && QUESTION_WORDS.contains(&second.as_str())
}

pub(super) fn cues(message: &str) -> Cues {
    let in_order: Vec<String> = words(message).collect();
    let going_on = begins_like_going_on(&in_order);
    let part_of_a_sentence = begins_as_part_of_a_sentence(if going_on { &in_order[1..] } else { &in_order });
    let like_it = points_like_it(&in_order) || ends_with_one(&in_order);
    let words: HashSet<String> = in_order.into_iter().collect();
    let any_of = |list: &[&str]| list.iter().any(|word| words.contains(*word));
    Cues {
        personal: any_of(PERSONAL),
        impersonal: like_it || (any_of(IMPERSONAL) && !says_what_it_is(message)),
        pointing: any_of(POINTING),
        adding: any_of(ADDING) && !adds_something_else(&words),
        going_on,
        part_of_a_sentence,
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

/// Whether a word of content says what a message is about.
fn is_subject(word: &str) -> bool {
    MEASURES.binary_search(&word).is_err() && ASKING_MORE.binary_search(&word).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted_for_binary_search() {
        for list in [
            AUXILIARIES,
            PERSONAL,
            IMPERSONAL,
            POINTING,
            ADDING,
            MEASURES,
            ASKING_MORE,
            COURTESIES,
            FUNCTION,
        ] {
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
    fn that_may_stand_for_it() {
        for pronoun in [
            "Does that also run on Linux?",
            "was that a hit?",
            "And why is this?",
        ] {
            assert!(cues(pronoun).impersonal, "{pronoun}");
        }
        for other in [
            "Is that city large?",
            "Is there a hit?",
            "The city that was large",
        ] {
            assert!(!cues(other).impersonal, "{other}");
        }
    }

    #[test]
    fn it_may_be_what_the_message_names() {
        for within in [
            "My laptop is broken, where do I bring it?",
            "I forgot my password. How do I reset it?",
        ] {
            assert!(!cues(within).impersonal, "{within}");
        }
        for beyond in [
            "It asks for a code, where do I get it?",
            "Can I buy books with it?",
            "Ok, how old is it?",
            "How do I book one?",
        ] {
            assert!(cues(beyond).impersonal, "{beyond}");
        }
        assert!(!cues("Is one of the rooms free?").impersonal);
    }

    #[test]
    fn also_adds_nothing_where_there_is_a_subject() {
        for adding in [
            "Did he also write?",
            "Also from abroad?",
            "What other pension plans are there?",
        ] {
            assert!(cues(adding).adding, "{adding}");
        }
        assert!(!cues("Does the company also add to my pension?").adding);
    }

    #[test]
    fn courtesies_are_known_alone() {
        for courtesy in [
            "Thanks for your help!",
            "thanks a bunch",
            "Hmm, sounds good, ty",
            "👍",
            "thanks",
            "Ok, thank you very much!",
            "Great 👍",
            "I see.",
            "hello",
        ] {
            assert!(is_courtesy(courtesy), "{courtesy}");
        }
        for more in [
            "",
            "?!",
            "ok?",
            "Thank you for the music",
            "good bread",
            "thanks, and the price?",
        ] {
            assert!(!is_courtesy(more), "{more}");
        }
    }

    #[test]
    fn less_than_a_question_is_elliptic() {
        for elliptic in [
            "At what temperature?",
            "And for how long?",
            "With how much notice?",
            "How often?",
            "But when?",
            "From which station?",
            "Can you elaborate?",
            "Really?",
        ] {
            assert!(cues(elliptic).is_elliptic(), "{elliptic}");
        }
        for whole in [
            "Do tulips need food?",
            "At what temperature does lead melt?",
            "How old is Rome?",
            "passport",
        ] {
            assert!(!cues(whole).is_elliptic(), "{whole}");
        }
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
