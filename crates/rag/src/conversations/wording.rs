//! A chat model that words topics.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ragstone_core::chat::{ChatModel, ChatRequest};
use serde_json::Value;
use tokio::time::Instant;

use crate::collect::normalise_topic;

/// The search waits for the topic, and the user for the search.
const PATIENCE: Duration = Duration::from_secs(4);
/// One that gave no answer within that is left alone for so long: otherwise every message would wait.
const REST: Duration = Duration::from_secs(30);

/// A chat model with the patience that a user has while a topic is worded.
pub struct TopicModel {
    chat: Arc<dyn ChatModel>,
    resting_until: Mutex<Option<Instant>>,
}

impl TopicModel {
    pub fn new(chat: Arc<dyn ChatModel>) -> Self {
        Self {
            chat,
            resting_until: Mutex::new(None),
        }
    }

    pub(super) fn provider(&self) -> &str {
        self.chat.provider()
    }

    /// The topic in one line, or why there is none. What the model said otherwise is not repeated.
    pub(super) async fn ask(&self, request: ChatRequest) -> Result<String, String> {
        if self.rests() {
            return Err(format!(
                "it did not answer within {} s a moment ago",
                PATIENCE.as_secs()
            ));
        }
        let Ok(answer) = tokio::time::timeout(PATIENCE, self.chat.complete(request)).await else {
            *self.lock() = Some(Instant::now() + REST);
            return Err(format!("no answer within {} s", PATIENCE.as_secs()));
        };
        topic_in(&answer.map_err(|error| error.to_string())?)
    }

    fn rests(&self) -> bool {
        self.lock().is_some_and(|until| Instant::now() < until)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.resting_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn topic_in(answer: &Value) -> Result<String, String> {
    let said = answer
        .pointer("/choices/0/message/content")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let said = without_thoughts(said);
    let mut lines = said.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    // "Here is the query:", and then it.
    let line = if first.ends_with(':') {
        lines.next().unwrap_or(first)
    } else {
        first
    };
    let topic = normalise_topic(line);
    if topic.is_empty() {
        Err("its answer is empty".to_owned())
    } else {
        Ok(topic)
    }
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
