//! The queries that answer a message: the message as it was typed, or the topic of the conversation.

use ragstone_core::collection::shorten;
use ragstone_core::conversation::{MAX_TOPIC_CHARS, QueryVariant};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// There is no topic yet: the message stands alone.
    FirstMessage,
    /// The message continues a conversation and may make no sense without its topic.
    FollowUp,
}

impl Strategy {
    pub fn name(self) -> &'static str {
        match self {
            Self::FirstMessage => "first message (raw query)",
            Self::FollowUp => "follow-up (contextualized topic)",
        }
    }
}

/// What was decided for one message.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub strategy: Strategy,
    /// At least one, the one that counts most first.
    pub queries: Vec<QueryVariant>,
    /// Which of them stands for all: it is told as what was searched for, and distances are those to it.
    pub reported: usize,
    /// The topic as it now stands.
    pub topic: Option<String>,
    /// What could not be done as configured on the way to this plan.
    pub warnings: Vec<String>,
}

impl Plan {
    pub fn one(strategy: Strategy, text: String, topic: Option<String>) -> Self {
        Self {
            strategy,
            queries: vec![QueryVariant {
                keywords: text.clone(),
                text,
                weight: 1.0,
                alone: true,
            }],
            reported: 0,
            topic,
            warnings: Vec::new(),
        }
    }

    /// Logs the strategy by its name, and the texts at debug level only.
    pub fn log(&self) {
        let strategy = self.strategy.name();
        tracing::info!(strategy, "query strategy: {strategy}");
        for query in &self.queries {
            tracing::debug!(weight = query.weight, text = shorten(&query.text), "query text");
        }
    }

    /// The wording that stands for all: the topic of a follow-up, which the others are parts of, and
    /// otherwise the message.
    pub fn query_text(&self) -> &str {
        self.queries
            .get(self.reported)
            .map_or("", |query| query.text.as_str())
    }
}

/// Decides by `current_topic`, the topic before this message: without one the message is searched
/// for as it is; with one, `topic`, which has the message worked in, or else the current one. Only one
/// without any visible character is none.
pub fn by_topic(user_message: &str, current_topic: Option<&str>, topic: Option<&str>) -> Plan {
    let current = current_topic.map(given_topic).filter(|text| !text.is_empty());
    let topic = topic.map(normalise_topic).filter(|text| !text.is_empty());
    match current {
        None => Plan::one(Strategy::FirstMessage, user_message.to_owned(), topic),
        Some(current) => {
            let topic = topic.unwrap_or(current);
            Plan::one(Strategy::FollowUp, topic.clone(), Some(topic))
        }
    }
}

/// A topic as a client gives it: of nothing but quotes, these stay.
fn given_topic(topic: &str) -> String {
    let normalised = normalise_topic(topic);
    if normalised.is_empty() {
        shortened(&one_line(topic))
    } else {
        normalised
    }
}

/// One line of words with single spaces, without the quotes that models like to put around it, and
/// of a length that makes sense for a topic.
pub fn normalise_topic(topic: &str) -> String {
    shortened(unquoted(&one_line(topic)))
}

fn one_line(topic: &str) -> String {
    topic
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

fn shortened(line: &str) -> String {
    match line.char_indices().nth(MAX_TOPIC_CHARS) {
        Some((end, _)) => line[..end].trim_end().to_owned(),
        None => line.to_owned(),
    }
}

fn unquoted(line: &str) -> &str {
    for (open, close) in [
        ('"', '"'),
        ('\'', '\''),
        ('`', '`'),
        ('“', '”'),
        ('„', '“'),
        ('«', '»'),
    ] {
        let inner = line.strip_prefix(open).and_then(|rest| rest.strip_suffix(close));
        // Two quoted phrases in one line are not one quoted line.
        if let Some(inner) = inner.filter(|inner| !inner.contains([open, close])) {
            return inner.trim();
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_message_query_strategy() {
        for current in [None, Some(""), Some(" \t\n\u{a0}")] {
            let plan = by_topic("  What is InstructLab? ", current, Some("something else"));
            assert_eq!(plan.strategy.name(), "first message (raw query)");
            assert_eq!(
                plan.query_text(),
                "  What is InstructLab? ",
                "the raw message, untouched"
            );
        }
    }

    #[test]
    fn follow_up_message_query_strategy() {
        let plan = by_topic(
            "And the second?",
            Some("planets"),
            Some("  the second\n planet  "),
        );
        assert_eq!(plan.strategy.name(), "follow-up (contextualized topic)");
        assert_eq!(plan.query_text(), "the second planet");
        assert_eq!(plan.topic.as_deref(), Some("the second planet"));
    }

    #[test]
    fn query_text_selection_logic() {
        let without_new_topic = by_topic("And now?", Some(" planets  of the sun "), None);
        assert_eq!(without_new_topic.query_text(), "planets of the sun");
        let blank_new_topic = by_topic("And now?", Some("planets"), Some("  "));
        assert_eq!(blank_new_topic.query_text(), "planets");
    }

    #[test]
    fn a_topic_of_nothing_but_quotes_is_not_empty() {
        for (current, text) in [("\"\"", "\"\""), (" ' ' ", "' '"), ("“”", "“”")] {
            let plan = by_topic("And now?", Some(current), None);
            assert_eq!(plan.strategy, Strategy::FollowUp);
            assert_eq!(plan.query_text(), text);
            let plan = by_topic("And now?", Some(current), Some("planets"));
            assert_eq!(plan.query_text(), "planets");
        }
    }

    #[test]
    fn topics_are_one_plain_line() {
        for (given, line) in [
            (" a\tb\r\n c ", "a b c"),
            ("\"InstructLab and OpenShift AI\"", "InstructLab and OpenShift AI"),
            ("“quoted”", "quoted"),
            ("\"one\" and \"two\"", "\"one\" and \"two\""),
            ("it's", "it's"),
            ("\"", "\""),
            ("a\u{0}b", "a b"),
        ] {
            assert_eq!(normalise_topic(given), line);
        }
        assert_eq!(
            normalise_topic(&"ä".repeat(2000)).chars().count(),
            MAX_TOPIC_CHARS
        );
    }
}
