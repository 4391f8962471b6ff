//! What to search for when a message is part of a conversation, without asking a language model.
//!
//! A message may make no sense without what was said before ("Did it sell well?"), or it may open a
//! new subject, for which everything said before is poison. Neither can be told for certain, so the
//! method does not choose. It estimates how likely the message continues the topic, its *continuity*,
//! searches for the message alone and for the topic with the message at its end, and mixes by that
//! likelihood what the two make of each document ([`crate::fusion::mix_wordings`]). So a message that
//! singles out a document is heard even where it seems to continue the topic, and one that could mean
//! anything leaves the decision to the topic. A wrong guess costs some places in the ranking, not the
//! answer.
//!
//! Continuity is a logistic function of what a reader would look at: words that refer back or add to
//! what was said, similarity to the topic by the embedding model, words shared with the topic, names that
//! the topic does not have, and how many words the message brings of its own, since one that brings many
//! can stand alone. The numbers are in [`ContinuityWeights`]; they were fitted on one half of a set of dialogues and
//! checked on the other, where dialogues were also spliced to change subject in the middle.
//!
//! Messages that mean nothing alone continue the topic whatever else speaks against it: less than a
//! question ("At what temperature?"), one that goes on ("And for beans?"), one that says "they" and little
//! else. They ask more of the last question rather than of the topic, where that question stands alone.
//! Courtesies ("Thanks!") leave it as it is.
//!
//! A topic is the messages that made it. Where one seems to open a new subject, the conversation is
//! cut there, but the part before the cut stays in play, by how unlikely the cut was right, until the
//! next cut, and beyond it where the cut was doubtful: a wrong cut is not fatal either. Nor is a missed
//! one: the last message without those before it is in play, by how likely it opened a subject. All state is
//! text, so it outlives a change of the embedding model, and it is bounded however long the
//! conversation goes on.

mod lists;
mod words;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

pub use words::is_courtesy;
use words::{Cues, cues, keywords};

/// A longer topic would only blur the search, and embedding models do not read much more.
pub const MAX_TOPIC_CHARS: usize = 1000;
/// More of one message is not part of a topic; the message itself is searched for as a whole.
const MAX_MESSAGE_CHARS: usize = 400;
/// Sharing more words than this with the topic says nothing further.
const MAX_SHARED: usize = 2;
/// Bringing more words than this of its own says nothing further.
const MAX_OWN: usize = 5;
/// How much of its topic's weight the question has that a message goes on with.
const WEIGHT_OF_A_QUESTION: f64 = 0.6;
/// How much of its topic's weight the last message alone has, with the new one, where it was itself as
/// good as certain to open a subject and yet was not taken for one.
const WEIGHT_OF_A_DOUBT: f64 = 0.3;
/// A wording that counts less is not worth a search.
const LEAST_WEIGHT: f64 = 0.02;
/// A cut that is less likely right than this is taken back at the next one.
const LIKELY_CUT: f64 = 0.6;

/// How much each observation speaks for continuing the topic, in log-odds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ContinuityWeights {
    pub base: f64,
    pub personal_pronoun: f64,
    /// For "it".
    pub impersonal_pronoun: f64,
    pub pointing_word: f64,
    pub adding_word: f64,
    /// Where it begins with "and", "what about" and the like.
    pub going_on: f64,
    /// Where it is less than a question, such as "At what temperature?"
    pub elliptic: f64,
    /// For a cosine of 1 between message and topic.
    pub similarity: f64,
    /// For each word the message shares with the topic.
    pub shared_word: f64,
    /// For each word of content the message has.
    pub own_word: f64,
    /// Where it names somebody or something that the topic does not have, and does not say "it".
    pub new_name: f64,
    /// Added before the conversation is cut: where it matters to all messages to come, continuing is
    /// the safer guess.
    pub reluctance_to_cut: f64,
    /// Added where it is said how likely a cut was right. It is greater: what came before is easily
    /// kept in play and cannot be had back.
    pub doubt_of_a_cut: f64,
}

impl Default for ContinuityWeights {
    fn default() -> Self {
        Self {
            base: -2.4,
            personal_pronoun: 0.05,
            impersonal_pronoun: 4.6,
            pointing_word: 1.75,
            adding_word: 3.85,
            going_on: 3.0,
            elliptic: 3.0,
            similarity: 8.0,
            shared_word: 2.1,
            own_word: -0.3,
            new_name: -4.2,
            reluctance_to_cut: 1.0,
            doubt_of_a_cut: 3.0,
        }
    }
}

/// What is remembered of a conversation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConversationState {
    /// The messages before the last cut, oldest first.
    before: Vec<String>,
    /// The messages since the last cut, oldest first.
    since: Vec<String>,
    /// How likely the last cut was right.
    cut_likelihood: f64,
    /// How likely the last message opened a subject, where the conversation was not cut.
    doubt: f64,
}

/// One wording to search for.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryVariant {
    /// What to embed, and what to show.
    pub text: String,
    /// What to search for by word: the text without words that nothing can be found by.
    pub keywords: String,
    /// How likely it is the right one; those of a plan add up to 1.
    pub weight: f64,
    /// It is the message alone, without a topic.
    pub alone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopicRelation {
    /// There is no topic yet.
    First,
    /// The message most likely continues the topic.
    Continues,
    /// The message most likely opens a new subject.
    Changes,
}

#[derive(Debug, Clone, PartialEq)]
pub struct QueryPlan {
    pub standing: TopicRelation,
    /// How likely the message continues the topic, 0 to 1; 0 where there is none.
    pub continuity: f64,
    /// At least one, the one that counts most first.
    pub variants: Vec<QueryVariant>,
    /// The topic with this message taken in: one line, bounded, each message in it once.
    pub topic: String,
    /// What to remember once the message counts as said.
    pub next: ConversationState,
}

impl QueryPlan {
    /// The wording that counts most.
    pub fn query_text(&self) -> &str {
        self.variants.first().map_or("", |variant| variant.text.as_str())
    }

    /// Which variant is the topic as it now stands; after a cut, that is the message alone.
    pub fn reported(&self) -> usize {
        let is_topic = |variant: &QueryVariant| variant.text == self.topic;
        let place = self.variants.iter().position(is_topic);
        place
            .or_else(|| self.variants.iter().position(|variant| variant.alone))
            .unwrap_or_default()
    }
}

impl ConversationState {
    /// What the conversation is about at the moment; empty when it has not begun.
    pub fn topic(&self) -> String {
        self.since.join(" ")
    }

    /// The texts that a new message is to be compared with by the embedding model. The greatest
    /// cosine is what [`plan`] wants. Empty when there is no topic, else one or two; each was a variant
    /// of an earlier plan or an earlier message, so a cache of embeddings has most of them.
    pub fn topics_to_compare(&self) -> Vec<String> {
        if self.since.is_empty() {
            return Vec::new();
        }
        let mut topics = vec![self.topic()];
        if !self.before.is_empty() {
            topics.push(within_budget(&self.whole()).join(" "));
        }
        topics
    }

    fn whole(&self) -> Vec<String> {
        self.before.iter().chain(&self.since).cloned().collect()
    }
}

/// Decides what to search for. `similarity` is the greatest cosine between the message and
/// [`ConversationState::topics_to_compare`]; without an embedding model it is `None`, and the words
/// decide alone.
pub fn plan(
    state: &ConversationState,
    message: &str,
    similarity: Option<f32>,
    weights: &ContinuityWeights,
) -> QueryPlan {
    if is_courtesy(message) {
        return after_a_courtesy(state, message);
    }
    let cues = cues(message);
    let line = as_line(message);
    if state.since.is_empty() {
        return QueryPlan {
            standing: TopicRelation::First,
            continuity: 0.0,
            // Word by word as if there were no conversation.
            variants: vec![QueryVariant {
                keywords: message.to_owned(),
                ..alone(message, 1.0)
            }],
            topic: line.clone(),
            next: ConversationState {
                since: with_message(&[], &line, &cues),
                ..ConversationState::default()
            },
        };
    }
    let whole = state.whole();
    let log_odds = continuity_log_odds(&whole, &cues, similarity, weights);
    let continuity = logistic(log_odds);
    let cut = log_odds + weights.reluctance_to_cut < 0.0 && !refers_back(&whole, &cues);
    let next = if cut {
        ConversationState {
            before: if state.cut_likelihood < LIKELY_CUT {
                within_budget(&whole)
            } else {
                state.since.clone()
            },
            since: with_message(&[], &line, &cues),
            cut_likelihood: logistic(-log_odds - weights.doubt_of_a_cut),
            doubt: 0.0,
        }
    } else {
        ConversationState {
            since: with_message(&state.since, &line, &cues),
            doubt: if cues.says_something() {
                1.0 - continuity
            } else {
                state.doubt
            },
            ..state.clone()
        }
    };
    QueryPlan {
        standing: if continuity < 0.5 {
            TopicRelation::Changes
        } else {
            TopicRelation::Continues
        },
        continuity,
        variants: variants(state, &cues, message, &line, continuity),
        topic: if cut { line } else { joined(&state.since, &line) },
        next,
    }
}

/// Something polite asks nothing and changes no topic: what the conversation is about is searched for
/// once more. As a first message it is searched for as it is, and the conversation has not begun.
fn after_a_courtesy(state: &ConversationState, message: &str) -> QueryPlan {
    let topic = state.topic();
    let (standing, continuity, variants) = if state.since.is_empty() {
        let variant = QueryVariant {
            keywords: message.to_owned(),
            ..alone(message, 1.0)
        };
        (TopicRelation::First, 0.0, vec![variant])
    } else {
        (TopicRelation::Continues, 1.0, vec![in_topic(topic.clone(), 1.0)])
    };
    QueryPlan {
        standing,
        continuity,
        variants,
        topic,
        next: state.clone(),
    }
}

/// Whether a message means nothing without what was said, so that it cannot open a subject however
/// little it has in common with it.
fn refers_back(topic: &[String], message: &Cues) -> bool {
    /// With more words of its own than these, "and" is only a manner of speaking.
    const FEW: usize = 3;
    let goes_on = message.going_on && message.own_subjects() <= FEW;
    message.is_elliptic()
        || goes_on
        || (message.leaves_open_what_is_meant() && !names_something_new(topic, message))
}

fn names_something_new(topic: &[String], message: &Cues) -> bool {
    !message.names.is_subset(&content_of(topic))
}

fn content_of(topic: &[String]) -> HashSet<String> {
    topic.iter().flat_map(|earlier| cues(earlier).content).collect()
}

fn variants(
    state: &ConversationState,
    cues: &Cues,
    message: &str,
    line: &str,
    continuity: f64,
) -> Vec<QueryVariant> {
    let mut variants = vec![alone(message, 1.0 - continuity)];
    if state.before.is_empty() {
        variants.push(in_topic(joined(&state.since, line), continuity));
    } else {
        let cut = state.cut_likelihood.clamp(0.0, 1.0);
        variants.push(in_topic(joined(&state.since, line), continuity * cut));
        variants.push(in_topic(joined(&state.whole(), line), continuity * (1.0 - cut)));
    }
    let (narrower, share) = narrower_topic(state, cues);
    if !narrower.is_empty() && continuity * share > LEAST_WEIGHT {
        for topic in variants.iter_mut().filter(|variant| !variant.alone) {
            topic.weight *= 1.0 - share;
        }
        variants.push(in_topic(joined(narrower, line), continuity * share));
    }
    variants.sort_by(|a, b| b.weight.total_cmp(&a.weight));
    variants
}

/// The part of the topic that a message may be about instead of all of it, and how much of the topic's
/// weight it has: the question that is gone on with, or else the last message, which may have opened a
/// subject unnoticed.
fn narrower_topic<'a>(state: &'a ConversationState, message: &Cues) -> (&'a [String], f64) {
    let question = question_gone_on_with(state, message);
    match &state.since[..] {
        _ if !question.is_empty() => (question, WEIGHT_OF_A_QUESTION),
        [_, .., last] => (std::slice::from_ref(last), WEIGHT_OF_A_DOUBT * state.doubt),
        _ => (&[], 0.0),
    }
}

/// What "How long?" or "And for two?" most likely asks more of: the last question that can be understood
/// without those before it, which may have been about something close to it. Nothing where there is none,
/// or it is the whole topic.
fn question_gone_on_with<'a>(state: &'a ConversationState, message: &Cues) -> &'a [String] {
    if !message.asks_more() {
        return &[];
    }
    let asked = state.since.iter().map(|earlier| cues(earlier)).enumerate();
    let last = asked.rev().find(|(_, earlier)| !earlier.asks_more());
    match last {
        Some((place, earlier)) if place > 0 && earlier.stands_alone() => &state.since[place..],
        _ => &[],
    }
}

fn alone(message: &str, weight: f64) -> QueryVariant {
    QueryVariant {
        alone: true,
        ..in_topic(message.to_owned(), weight)
    }
}

fn in_topic(text: String, weight: f64) -> QueryVariant {
    QueryVariant {
        keywords: keywords(&text),
        text,
        weight,
        alone: false,
    }
}

fn continuity_log_odds(
    topic: &[String],
    message: &Cues,
    similarity: Option<f32>,
    weights: &ContinuityWeights,
) -> f64 {
    /// Half way between what messages that continue a topic and messages that do not have on average.
    const UNKNOWN_SIMILARITY: f64 = 0.28;
    let similarity = similarity
        .filter(|cosine| cosine.is_finite())
        .map_or(UNKNOWN_SIMILARITY, |cosine| f64::from(cosine).clamp(-1.0, 1.0));
    let shared = message.content.intersection(&content_of(topic)).count();
    // "Does it run on Linux?" names something, to say more of what was said.
    let names_something_new = !message.impersonal && names_something_new(topic, message);
    let when = |seen: bool, weight: f64| if seen { weight } else { 0.0 };
    weights.base
        + when(message.personal, weights.personal_pronoun)
        + when(message.impersonal, weights.impersonal_pronoun)
        + when(message.pointing, weights.pointing_word)
        + when(message.adding, weights.adding_word)
        + when(message.going_on, weights.going_on)
        + when(message.is_elliptic(), weights.elliptic)
        + weights.similarity * similarity
        + weights.shared_word * shared.min(MAX_SHARED) as f64
        + when(names_something_new, weights.new_name)
        + weights.own_word * message.content.len().min(MAX_OWN) as f64
}

fn logistic(log_odds: f64) -> f64 {
    1.0 / (1.0 + (-log_odds).exp())
}

/// One line with single spaces, cut to a length that fits into a topic.
fn as_line(message: &str) -> String {
    let line = message
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    match line.char_indices().nth(MAX_MESSAGE_CHARS) {
        Some((end, _)) => line[..end].trim_end().to_owned(),
        None => line,
    }
}

/// The messages with one more at their end, and nothing twice. One that says nothing about the topic is
/// not taken in.
fn with_message(messages: &[String], line: &str, cues: &Cues) -> Vec<String> {
    if !cues.says_something() {
        return messages.to_vec();
    }
    within_budget(&appended(messages, line))
}

fn joined(messages: &[String], line: &str) -> String {
    within_budget(&appended(messages, line)).join(" ")
}

fn appended(messages: &[String], line: &str) -> Vec<String> {
    let lower = line.to_lowercase();
    let mut messages: Vec<String> = messages
        .iter()
        .filter(|earlier| earlier.to_lowercase() != lower)
        .cloned()
        .collect();
    messages.push(line.to_owned());
    messages
}

/// Keeps the first message, which mostly names the subject, and of the others the newest that fit.
fn within_budget(messages: &[String]) -> Vec<String> {
    let Some((first, others)) = messages.split_first() else {
        return Vec::new();
    };
    let mut left = MAX_TOPIC_CHARS.saturating_sub(first.chars().count());
    let mut kept: Vec<String> = others
        .iter()
        .rev()
        .map_while(|message| {
            left = left.checked_sub(message.chars().count() + 1)?;
            Some(message.clone())
        })
        .collect();
    kept.push(first.clone());
    kept.reverse();
    kept
}

#[cfg(test)]
mod tests;
