//! A chat model that words topics.

use std::sync::Arc;
use std::time::Duration;

use ragstone_core::chat::{ChatError, ChatModel, ChatRequest};
use ragstone_core::circuit_breaker::CircuitBreaker;
use serde_json::Value;
use tokio::time::Instant;

use crate::plan::normalise_topic;

/// The search waits for the topic, and the user waits for the search.
const TOPIC_TIMEOUT: Duration = Duration::from_secs(4);
/// After a timeout the model is not asked for this long: otherwise every message would wait.
const COOLDOWN: Duration = Duration::from_secs(30);

/// So long a line may be, at 25 words asked for; in languages without spaces only the characters count.
const MAX_WORDS: usize = 50;
const MAX_CHARS: usize = 400;
/// So long may be all that is said: a remark after the line does no harm, an essay is no line at all.
const MAX_SAID_WORDS: usize = 100;
const MAX_SAID_CHARS: usize = 1000;

/// A chat model that is asked for topics while a user waits.
pub struct TopicModel {
    chat: Arc<dyn ChatModel>,
    breaker: CircuitBreaker,
}

impl TopicModel {
    pub fn new(chat: Arc<dyn ChatModel>) -> Self {
        Self {
            chat,
            breaker: CircuitBreaker::new(1),
        }
    }

    pub(super) fn provider(&self) -> &str {
        self.chat.provider()
    }

    /// The topic in one line, or why there is none. What the model said otherwise is not repeated.
    pub(super) async fn ask(&self, request: ChatRequest) -> Result<String, NoTopic> {
        let Ok(permit) = self.breaker.enter(Instant::now().into_std()) else {
            return Err(NoTopic::because(format!(
                "it did not answer within {} s a moment ago",
                TOPIC_TIMEOUT.as_secs()
            )));
        };
        let answer = tokio::time::timeout(TOPIC_TIMEOUT, self.chat.complete(request)).await;
        let now = Instant::now().into_std();
        let Ok(answer) = answer else {
            permit.failed(now, COOLDOWN);
            return Err(NoTopic::because(format!(
                "no answer within {} s",
                TOPIC_TIMEOUT.as_secs()
            )));
        };
        permit.succeeded(now);
        topic_in(&answer?).map_err(NoTopic::because)
    }
}

/// Why a model worded no topic.
pub(super) struct NoTopic {
    /// For whoever asked.
    pub(super) public: String,
    /// For the log, with what the provider said of a failure of its own.
    pub(super) full: String,
}

impl NoTopic {
    fn because(reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Self {
            public: reason.clone(),
            full: reason,
        }
    }
}

impl From<ChatError> for NoTopic {
    fn from(error: ChatError) -> Self {
        Self {
            full: error.to_string(),
            public: match error {
                ChatError::Call(error) => error.public(),
                ChatError::Invalid(error) => error.to_string(),
            },
        }
    }
}

fn topic_in(answer: &Value) -> Result<String, &'static str> {
    let said = answer
        .pointer("/choices/0/message/content")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let said = without_thoughts(said);
    if is_longer(&said, MAX_SAID_WORDS, MAX_SAID_CHARS) {
        return Err("its answer is far longer than a topic");
    }
    let mut lines = said.lines().filter_map(words_of);
    let first = lines.next().unwrap_or_default();
    // "Here is the query:", and then it.
    let line = if first.ends_with(':') {
        lines.next().unwrap_or(first)
    } else {
        first
    };
    let topic = normalise_topic(line);
    if topic.is_empty() {
        Err("its answer is empty")
    } else if is_longer(&topic, MAX_WORDS, MAX_CHARS) {
        Err("its answer is far longer than a topic")
    } else if is_refusal(&topic) {
        Err("it declined to word one")
    } else {
        Ok(topic)
    }
}

fn is_longer(text: &str, words: usize, chars: usize) -> bool {
    text.split_whitespace().count() > words || text.chars().count() > chars
}

/// What a line says, if it does: the fences around a block, rules and bullets alone say nothing.
fn words_of(line: &str) -> Option<&str> {
    let line = line.trim();
    let inner = match line.strip_prefix("```") {
        // A fence that closes on its own line has the words between; otherwise it names a language.
        Some(rest) => rest.strip_suffix("```")?.trim(),
        None => line,
    };
    let speaks = !inner.starts_with("~~~") && inner.contains(char::is_alphanumeric);
    speaks.then_some(inner)
}

/// How models begin where they decline. A topic may be worded in the first person as well ("I cannot log
/// in"), so that the bare inability is a refusal only of what a model is asked for.
fn is_refusal(line: &str) -> bool {
    const APOLOGIES: [&str; 12] = [
        "i am sorry",
        "i'm sorry",
        "sorry",
        "i apologize",
        "i apologise",
        "unfortunately",
        "as an ai",
        "as an ai assistant",
        "as an ai language model",
        "es tut mir leid",
        "je suis désolé",
        "lo siento",
    ];
    const INABILITIES: [&str; 7] = [
        "i cannot ",
        "i can't ",
        "i can not ",
        "i am unable to ",
        "i'm unable to ",
        "i am not able to ",
        "i'm not able to ",
    ];
    const SERVICES: [&str; 10] = [
        "help", "assist", "answer", "provide", "comply", "fulfill", "fulfil", "respond", "word", "do that",
    ];
    let line = line.to_lowercase().replace('’', "'");
    let begins = |starts: &[&str], goes_on: fn(&str) -> bool| {
        let mut rests = starts.iter().filter_map(|start| line.strip_prefix(start));
        rests.any(goes_on)
    };
    let apologises = begins(&APOLOGIES, |rest| {
        rest.is_empty() || rest.starts_with([',', '.', '!', ';']) || rest.starts_with(" but")
    });
    let declines = begins(&INABILITIES, |rest| {
        SERVICES.iter().any(|service| rest.starts_with(service))
    });
    apologises || declines
}

/// Models that think aloud put it between these tags, before what they say. A thought that does not end
/// leaves nothing said.
fn without_thoughts(said: &str) -> String {
    let mut spoken = String::with_capacity(said.len());
    let mut rest = said;
    while let Some((before, thought)) = rest.split_once("<think>") {
        spoken.push_str(before);
        rest = thought.split_once("</think>").map_or("", |(_, after)| after);
    }
    spoken.push_str(rest);
    // Some begin to think before they are given the word.
    match spoken.rsplit_once("</think>") {
        Some((_, after)) => after.to_owned(),
        None => spoken,
    }
}
