//! Conversations whose topic this server keeps.
//!
//! A conversation is one durable record: what the user said, and the topic that follows from it. It
//! is read, carried on and written back under its version, so that two messages at once, also through
//! two processes, both count. One that nobody carries on expires; it is gone for readers at that
//! moment, and a sweep deletes it from the store soon after.

mod topic;
mod wording;

use std::sync::Arc;
use std::time::Duration;

use ragstone_core::conversation::ConversationState;
use ragstone_core::error::InvalidInput;
use ragstone_core::models::Models;
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange, Records};
use ragstone_core::storage::StorageError;
use serde::{Deserialize, Serialize};

pub use wording::TopicModel;

use crate::plan::Plan;
use crate::vectors::QueryVectors;

const KIND: &str = "conversation";
const MAX_ID_BYTES: usize = 256;
/// What was said longer ago is forgotten.
const MAX_TURNS: usize = 50;
/// More of a message than this is not kept.
const MAX_MESSAGE_CHARS: usize = 4000;
/// How often a message is tried again when another one of the same conversation came between.
const MAX_CONFLICTS: usize = 100;
/// How long a sweep has for what it has taken.
const SWEEP_LEASE: Duration = Duration::from_secs(60);
const SWEEP_BATCH: usize = 256;

pub const DEFAULT_TTL: Duration = Duration::from_secs(24 * 60 * 60);

/// What names a conversation: any non-empty text of up to 256 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversationId(String);

impl ConversationId {
    pub fn parse(id: impl Into<String>) -> Result<Self, InvalidInput> {
        let id = id.into();
        if id.trim().is_empty() || id.len() > MAX_ID_BYTES {
            return Err(InvalidInput::new(format!(
                "'conversation_id' must have 1 to {MAX_ID_BYTES} bytes, and not only spaces"
            )));
        }
        Ok(Self(id))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A conversation as it is stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    pub topic: String,
    /// The oldest first.
    pub turns: Vec<Turn>,
    pub created_at: Millis,
    pub updated_at: Millis,
    pub expires_at: Millis,
    /// What the method that needs no chat model remembers.
    #[serde(default)]
    state: ConversationState,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    pub message: String,
    pub at: Millis,
}

/// The parts that conversations work with.
#[derive(Clone)]
pub struct Conversations {
    pub records: Arc<dyn Records>,
    pub models: Arc<Models>,
    pub vectors: QueryVectors,
    /// What words the topic; without one, or when it fails, a method that needs no model does.
    pub chat: Option<Arc<TopicModel>>,
    /// How long a conversation is kept after its last message.
    pub ttl: Duration,
}

/// The clock that records are due by.
pub fn now() -> Millis {
    jiff::Timestamp::now().as_millisecond()
}

/// The conversation, unless there is none or it has expired.
pub async fn read(
    conversations: &Conversations,
    id: &ConversationId,
    now: Millis,
) -> Result<Option<Conversation>, StorageError> {
    Ok(load(conversations, id, now).await?.1)
}

/// Returns whether there was one.
pub async fn delete(
    conversations: &Conversations,
    id: &ConversationId,
    now: Millis,
) -> Result<bool, StorageError> {
    let known = load(conversations, id, now).await?.1.is_some();
    let applied = conversations
        .records
        .apply(vec![removal(id.as_str(), Expect::Anything)])
        .await?;
    Ok(known && matches!(applied.first(), Some(Applied::Done { .. })))
}

/// What to search for, and the conversation as it will be once the message counts as said.
pub struct Step {
    pub plan: Plan,
    id: ConversationId,
    message: String,
    expect: Expect,
    next: Conversation,
}

/// Decides what to search for. Nothing is remembered yet: a message that could not be searched for is
/// sent again, and would then have been said twice.
pub async fn plan(
    conversations: &Conversations,
    id: &ConversationId,
    message: &str,
    now: Millis,
) -> Result<Step, StorageError> {
    plan_by(conversations, conversations.chat.as_deref(), id, message, now).await
}

async fn plan_by(
    conversations: &Conversations,
    chat: Option<&TopicModel>,
    id: &ConversationId,
    message: &str,
    now: Millis,
) -> Result<Step, StorageError> {
    let (expect, conversation) = load(conversations, id, now).await?;
    let (plan, state) = topic::decide(conversations, chat, conversation.as_ref(), message).await;
    let next = Conversation {
        topic: plan.topic.clone().unwrap_or_default(),
        state,
        ..carried_on(conversation, message, now, conversations.ttl)
    };
    Ok(Step {
        plan,
        id: id.clone(),
        message: message.to_owned(),
        expect,
        next,
    })
}

/// Takes in what the user said. The new topic is durable when this returns. Where another message came
/// between, the topic is that of both.
pub async fn keep(conversations: &Conversations, step: Step, now: Millis) -> Result<(), StorageError> {
    let mut step = step;
    for _ in 0..MAX_CONFLICTS {
        let change = RecordChange::Put {
            kind: KIND.to_owned(),
            key: step.id.0.clone(),
            group: String::new(),
            value: serde_json::to_vec(&step.next).map_err(|error| StorageError::Failed(error.into()))?,
            run_at: Some(step.next.expires_at),
            expect: step.expect,
        };
        if let [Applied::Done { .. }] = conversations.records.apply(vec![change]).await?[..] {
            return Ok(());
        }
        // The user has waited for the chat model once.
        step = plan_by(conversations, None, &step.id, &step.message, now).await?;
    }
    Err(StorageError::Unavailable {
        message: "Too many messages of this conversation at once: try again later".to_owned(),
        retry_after: Duration::from_secs(1),
    })
}

/// Plans for a message and takes it in, whatever is found.
pub async fn advance(
    conversations: &Conversations,
    id: &ConversationId,
    message: &str,
    now: Millis,
) -> Result<Plan, StorageError> {
    let step = plan(conversations, id, message, now).await?;
    let decided = step.plan.clone();
    keep(conversations, step, now).await?;
    Ok(decided)
}

/// Deletes what has expired, and returns how many there were.
pub async fn sweep(records: &dyn Records, now: Millis) -> Result<usize, StorageError> {
    let lease = now.saturating_add(millis(SWEEP_LEASE));
    let mut deleted = 0;
    loop {
        let expired = records.claim(KIND, SWEEP_BATCH, now, lease).await?;
        if expired.is_empty() {
            return Ok(deleted);
        }
        // One that was carried on in the meantime has another version and stays.
        let removals = expired
            .iter()
            .map(|record| removal(&record.key, Expect::Version(record.version)))
            .collect();
        let applied = records.apply(removals).await?;
        deleted += applied
            .iter()
            .filter(|applied| matches!(applied, Applied::Done { .. }))
            .count();
    }
}

/// Sweeps for ever, every so often.
pub async fn keep_sweeping(records: Arc<dyn Records>, every: Duration) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match sweep(records.as_ref(), now()).await {
            Ok(0) => {}
            Ok(deleted) => tracing::info!(deleted, "expired conversations deleted"),
            Err(error) => tracing::warn!(%error, "expired conversations could not be deleted"),
        }
    }
}

/// What is stored under an id, and what must still hold when it is written again. One that has
/// expired counts as absent, but its record is there until it is swept or written over.
async fn load(
    conversations: &Conversations,
    id: &ConversationId,
    now: Millis,
) -> Result<(Expect, Option<Conversation>), StorageError> {
    let found = conversations
        .records
        .get(KIND, std::slice::from_ref(&id.0))
        .await?;
    let Some(record) = found.into_iter().next() else {
        return Ok((Expect::Absent, None));
    };
    let conversation = parse(&record).filter(|conversation| conversation.expires_at > now);
    Ok((Expect::Version(record.version), conversation))
}

/// A record that cannot be read is from another version of the program; the conversation starts anew.
fn parse(record: &Record) -> Option<Conversation> {
    serde_json::from_slice(&record.value)
        .inspect_err(|error| tracing::warn!(%error, "a stored conversation cannot be read"))
        .ok()
}

/// The conversation with one more message in it, and the topic that was.
fn carried_on(before: Option<Conversation>, message: &str, now: Millis, ttl: Duration) -> Conversation {
    let mut next = before.unwrap_or_else(|| Conversation {
        topic: String::new(),
        turns: Vec::new(),
        created_at: now,
        updated_at: now,
        expires_at: now,
        state: ConversationState::default(),
    });
    next.turns.push(Turn {
        message: message.chars().take(MAX_MESSAGE_CHARS).collect(),
        at: now,
    });
    let forgotten = next.turns.len().saturating_sub(MAX_TURNS);
    next.turns.drain(..forgotten);
    next.updated_at = now;
    next.expires_at = now.saturating_add(millis(ttl));
    next
}

fn removal(key: &str, expect: Expect) -> RecordChange {
    RecordChange::Delete {
        kind: KIND.to_owned(),
        key: key.to_owned(),
        expect,
    }
}

fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(Millis::MAX)
}

#[cfg(test)]
mod tests;
