use std::sync::Mutex;

use async_trait::async_trait;
use ragstone_core::call::{CallError, ErrorAnswer};
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use ragstone_core::records::RecordRange;
use serde_json::{Value, json};

use super::*;
use crate::testing::{Parts, WordEmbedder, parts};

const START: Millis = 1_700_000_000_000;
const HOUR: Millis = 3_600_000;
/// Refers back in several ways: the model of these tests knows no likeness but shared words.
const FOLLOW_UP: &str = "Does that also integrate with OpenShift AI?";

/// Says what it is told to, and keeps what it was asked.
struct ScriptedChat {
    says: Says,
    asked: Mutex<Vec<ChatRequest>>,
}

enum Says {
    Text(&'static str),
    Failure,
    Status(u16),
    Nothing,
}

#[async_trait]
impl ChatModel for ScriptedChat {
    fn provider(&self) -> &str {
        "scripted"
    }

    fn model(&self) -> &str {
        "m"
    }

    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        self.asked.lock().unwrap().push(request);
        match self.says {
            Says::Text(text) => Ok(json!({"choices": [{"message": {"role": "assistant", "content": text}}]})),
            Says::Failure => Err(CallError::BadAnswer {
                service: "scripted".into(),
                reason: "broken".into(),
            }
            .into()),
            Says::Status(status) => Err(CallError::Answered(Box::new(ErrorAnswer {
                service: "scripted".into(),
                status,
                content_type: None,
                body: br#"{"error": {"message": "table x"}}"#.to_vec(),
                retry_after: None,
            }))
            .into()),
            Says::Nothing => std::future::pending().await,
        }
    }

    async fn stream(&self, _: ChatRequest) -> Result<ChatStream, ChatError> {
        unreachable!("topics are not streamed")
    }
}

fn chat(says: Says) -> Arc<ScriptedChat> {
    Arc::new(ScriptedChat {
        says,
        asked: Mutex::default(),
    })
}

fn conversations(parts: &Parts, chat: Option<Arc<ScriptedChat>>) -> Conversations {
    Conversations {
        records: Arc::clone(&parts.store) as Arc<dyn Records>,
        models: Arc::clone(&parts.service.models),
        vectors: QueryVectors::default(),
        chat: chat.map(|chat| Arc::new(TopicModel::new(chat))),
        ttl: Duration::from_secs(3600),
    }
}

fn with_model() -> Parts {
    parts(Models::new(vec![WordEmbedder::new("words")], None))
}

fn id(text: &str) -> ConversationId {
    ConversationId::parse(text).unwrap()
}

async fn stored(parts: &Parts) -> usize {
    let range = RecordRange {
        limit: 1000,
        ..RecordRange::default()
    };
    parts.store.list(KIND, range).await.unwrap().len()
}

#[test]
fn ids_have_a_size() {
    for bad in ["", "  ", &"x".repeat(257)] {
        assert!(ConversationId::parse(bad).is_err());
    }
    assert!(ConversationId::parse("ä/b c").is_ok());
}

#[tokio::test]
async fn pronoun_resolution_via_topic_context() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    let first = advance(&conversations, &id("a"), "What is InstructLab?", START)
        .await
        .unwrap();
    assert_eq!(first.strategy.name(), "first message (raw query)");
    assert_eq!(first.query_text(), "What is InstructLab?");
    let second = advance(&conversations, &id("a"), FOLLOW_UP, START + 1)
        .await
        .unwrap();
    assert_eq!(second.strategy.name(), "follow-up (contextualized topic)");
    assert!(
        second.query_text().contains("InstructLab") && second.query_text().contains("OpenShift"),
        "{second:?}"
    );
    let kept = read(&conversations, &id("a"), START + 2).await.unwrap().unwrap();
    assert_eq!(Some(kept.topic), second.topic);
    assert_eq!(kept.turns.len(), 2);
    assert_eq!(
        (kept.created_at, kept.updated_at, kept.expires_at),
        (START, START + 1, START + 1 + HOUR)
    );
    let other = advance(&conversations, &id("b"), "And it?", START).await.unwrap();
    assert_eq!(other.query_text(), "And it?", "conversations are apart");
}

#[tokio::test]
async fn a_conversation_expires_and_begins_anew() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    advance(&conversations, &id("a"), "What is InstructLab?", START)
        .await
        .unwrap();
    assert!(
        read(&conversations, &id("a"), START + HOUR - 1)
            .await
            .unwrap()
            .is_some()
    );
    assert!(
        read(&conversations, &id("a"), START + HOUR)
            .await
            .unwrap()
            .is_none()
    );
    assert!(!delete(&conversations, &id("a"), START + HOUR).await.unwrap());
    advance(&conversations, &id("b"), "What is InstructLab?", START)
        .await
        .unwrap();
    let late = advance(&conversations, &id("b"), "Does it?", START + HOUR)
        .await
        .unwrap();
    assert_eq!(late.query_text(), "Does it?");
}

#[tokio::test]
async fn a_sweep_deletes_what_has_expired_and_nothing_else() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    for n in 0..5 {
        advance(
            &conversations,
            &id(&format!("old{n}")),
            "What is InstructLab?",
            START,
        )
        .await
        .unwrap();
    }
    advance(&conversations, &id("old0"), "Does it run?", START + HOUR / 2)
        .await
        .unwrap();
    let records: &dyn Records = parts.store.as_ref();
    assert_eq!(sweep(records, START + HOUR - 1).await.unwrap(), 0);
    assert_eq!(sweep(records, START + HOUR).await.unwrap(), 4);
    assert_eq!(stored(&parts).await, 1);
    assert!(
        read(&conversations, &id("old0"), START + HOUR)
            .await
            .unwrap()
            .is_some()
    );
}

#[tokio::test]
async fn a_deleted_conversation_is_gone() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    assert!(!delete(&conversations, &id("a"), START).await.unwrap());
    advance(&conversations, &id("a"), "What is InstructLab?", START)
        .await
        .unwrap();
    assert!(delete(&conversations, &id("a"), START).await.unwrap());
    assert_eq!(stored(&parts).await, 0);
    let anew = advance(&conversations, &id("a"), "Does it?", START)
        .await
        .unwrap();
    assert_eq!(anew.query_text(), "Does it?");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_at_the_same_time_all_count() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    let said = (0..6).map(|n| {
        let conversations = conversations.clone();
        tokio::spawn(async move {
            advance(
                &conversations,
                &id("a"),
                &format!("And apples number {n}?"),
                START,
            )
            .await
        })
    });
    for plan in futures::future::join_all(said).await {
        plan.unwrap().unwrap();
    }
    assert_eq!(
        read(&conversations, &id("a"), START)
            .await
            .unwrap()
            .unwrap()
            .turns
            .len(),
        6
    );
}

#[tokio::test]
async fn a_long_conversation_stays_bounded() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    let long = "very long words ".repeat(1000);
    for n in 0..MAX_TURNS + 3 {
        advance(&conversations, &id("a"), &format!("{n} {long}"), START)
            .await
            .unwrap();
    }
    let kept = read(&conversations, &id("a"), START).await.unwrap().unwrap();
    assert_eq!(kept.turns.len(), MAX_TURNS);
    assert!(
        kept.turns[0].message.starts_with("3 "),
        "the oldest are forgotten"
    );
    assert!(
        kept.turns
            .iter()
            .all(|turn| turn.message.chars().count() <= MAX_MESSAGE_CHARS)
    );
}

#[tokio::test]
async fn a_chat_model_words_the_topic_of_a_follow_up() {
    let parts = with_model();
    let model = chat(Says::Text(
        "\n \"InstructLab and OpenShift AI integration\" \nI hope this helps!",
    ));
    let conversations = conversations(&parts, Some(Arc::clone(&model)));
    advance(&conversations, &id("a"), "What is InstructLab?", START)
        .await
        .unwrap();
    assert!(
        model.asked.lock().unwrap().is_empty(),
        "a first message needs no topic"
    );
    let plan = advance(&conversations, &id("a"), FOLLOW_UP, START).await.unwrap();
    assert_eq!(plan.query_text(), "InstructLab and OpenShift AI integration");
    assert_eq!(plan.queries.len(), 1);
    assert_eq!(plan.strategy.name(), "follow-up (contextualized topic)");
    let asked = model.asked.lock().unwrap().pop().unwrap();
    let given: Value = serde_json::from_str(&asked.last_user_text().unwrap()).unwrap();
    assert_eq!(given["topic"], "What is InstructLab?");
    assert_eq!(given["last_messages"], json!(["What is InstructLab?"]));
    assert_eq!(given["new_message"], FOLLOW_UP);
}

#[tokio::test]
async fn without_a_usable_answer_of_the_chat_model_the_words_decide() {
    for says in [Says::Failure, Says::Text("  \n "), Says::Nothing] {
        let parts = with_model();
        let conversations = conversations(&parts, Some(chat(says)));
        advance(&conversations, &id("a"), "What is InstructLab?", START)
            .await
            .unwrap();
        // The clock stands still and jumps to the next timer whenever nothing else is to be done.
        tokio::time::pause();
        let plan = advance(&conversations, &id("a"), FOLLOW_UP, START).await.unwrap();
        tokio::time::resume();
        assert!(plan.query_text().contains("InstructLab"), "{plan:?}");
        assert!(plan.warnings[0].contains("'scripted'"), "{plan:?}");
    }
}

#[tokio::test]
async fn what_a_chat_provider_says_of_its_own_failure_is_not_shown() {
    for (status, shown) in [(500, false), (400, true)] {
        let parts = with_model();
        let conversations = conversations(&parts, Some(chat(Says::Status(status))));
        advance(&conversations, &id("a"), "What is InstructLab?", START)
            .await
            .unwrap();
        let plan = advance(&conversations, &id("a"), FOLLOW_UP, START).await.unwrap();
        let warning = &plan.warnings[0];
        assert!(warning.contains(&format!("status {status}")), "{warning}");
        assert_eq!(warning.contains("table x"), shown, "{warning}");
    }
}

#[tokio::test]
async fn what_is_no_topic_leaves_the_words_to_decide() {
    let essay: &'static str = "Budgets of training vary from team to team. ".repeat(400).leak();
    let lines: &'static str = "A training budget:\n\nit depends on the team\n".repeat(40).leak();
    for said in [
        "```\n```",
        "---\n**",
        essay,
        lines,
        "I am sorry, I cannot help with that.",
        "I’m sorry, but I can’t assist with this request.",
        "I cannot help with that.",
        "As an AI language model, I have no topics.",
    ] {
        let parts = with_model();
        let conversations = conversations(&parts, Some(chat(Says::Text(said))));
        advance(&conversations, &id("a"), "What is InstructLab?", START)
            .await
            .unwrap();
        let plan = advance(&conversations, &id("a"), FOLLOW_UP, START).await.unwrap();
        let built_in = "What is InstructLab? Does that also integrate with OpenShift AI?";
        assert_eq!(plan.topic.as_deref(), Some(built_in), "{said}");
        assert!(plan.queries.len() > 1, "{plan:?}");
        assert!(plan.warnings[0].contains("'scripted'"), "{plan:?}");
    }
}

/// Otherwise every message waits, also where two come at once.
#[tokio::test]
async fn a_chat_model_that_does_not_answer_is_left_alone_for_a_while() {
    let parts = with_model();
    let model = chat(Says::Nothing);
    let conversations = conversations(&parts, Some(Arc::clone(&model)));
    let asked = || model.asked.lock().unwrap().len();
    let a = id("a");
    let say = |message: &'static str| advance(&conversations, &a, message, START);
    say("What is InstructLab?").await.unwrap();
    tokio::time::pause();
    for _ in 0..3 {
        let plan = say(FOLLOW_UP).await.unwrap();
        assert!(plan.warnings[0].contains("'scripted'"), "{plan:?}");
    }
    assert_eq!(asked(), 1);
    tokio::time::advance(Duration::from_secs(31)).await;
    say(FOLLOW_UP).await.unwrap();
    assert_eq!(asked(), 2);
}

#[tokio::test]
async fn messages_that_come_between_do_not_ask_the_chat_model_again() {
    let parts = with_model();
    let model = chat(Says::Text("prices of maps"));
    let conversations = conversations(&parts, Some(Arc::clone(&model)));
    let a = id("a");
    let message = |text: &'static str| plan(&conversations, &a, text, START);
    keep(&conversations, message("What is it?").await.unwrap(), START)
        .await
        .unwrap();
    let (one, other) = (
        message(FOLLOW_UP).await.unwrap(),
        message("And maps?").await.unwrap(),
    );
    keep(&conversations, one, START).await.unwrap();
    keep(&conversations, other, START).await.unwrap();
    assert_eq!(model.asked.lock().unwrap().len(), 2);
    let kept = read(&conversations, &id("a"), START).await.unwrap().unwrap();
    assert_eq!(kept.turns.len(), 3);
}

#[tokio::test]
async fn what_a_chat_model_thinks_is_not_what_it_says() {
    for (said, topic) in [
        (
            "<think>\nThe user asks…\n</think>\n\nprices of maps",
            "prices of maps",
        ),
        ("The user asks…\n</think>prices of maps", "prices of maps"),
        ("Here is the query:\n\nprices of maps", "prices of maps"),
        ("prices of maps:", "prices of maps:"),
        ("```\nprices of maps\n```", "prices of maps"),
        (
            "Here is the query:\n```text\nprices of maps\n```",
            "prices of maps",
        ),
        ("```prices of maps```", "prices of maps"),
        ("~~~\nprices of maps\n~~~", "prices of maps"),
        ("---\nprices of maps", "prices of maps"),
        ("I cannot log in", "I cannot log in"),
        ("Sorry board game rules", "Sorry board game rules"),
        (
            "<think>no end\nin sight",
            "What is InstructLab? Does that also integrate with OpenShift AI?",
        ),
    ] {
        let parts = with_model();
        let conversations = conversations(&parts, Some(chat(Says::Text(said))));
        advance(&conversations, &id("a"), "What is InstructLab?", START)
            .await
            .unwrap();
        let plan = advance(&conversations, &id("a"), FOLLOW_UP, START).await.unwrap();
        assert_eq!(plan.topic.as_deref(), Some(topic));
    }
}

#[tokio::test]
async fn a_message_counts_once_it_is_kept() {
    let parts = with_model();
    let conversations = conversations(&parts, None);
    let step = plan(&conversations, &id("a"), "What is InstructLab?", START)
        .await
        .unwrap();
    assert!(read(&conversations, &id("a"), START).await.unwrap().is_none());
    keep(&conversations, step, START).await.unwrap();
    assert_eq!(
        read(&conversations, &id("a"), START)
            .await
            .unwrap()
            .unwrap()
            .turns
            .len(),
        1
    );
}

#[tokio::test]
async fn a_record_that_cannot_be_read_begins_anew() {
    let parts = with_model();
    let put = RecordChange::Put {
        kind: KIND.to_owned(),
        key: "a".to_owned(),
        group: String::new(),
        value: b"not JSON".to_vec(),
        run_at: None,
        expect: Expect::Anything,
    };
    parts.store.apply(vec![put]).await.unwrap();
    let conversations = conversations(&parts, None);
    assert!(read(&conversations, &id("a"), START).await.unwrap().is_none());
    let plan = advance(&conversations, &id("a"), "What is it?", START)
        .await
        .unwrap();
    assert_eq!(plan.query_text(), "What is it?");
    assert!(read(&conversations, &id("a"), START).await.unwrap().is_some());
}

/// Message and topic are compared, searched for and measured, with one vector each.
#[tokio::test]
async fn a_message_embeds_no_text_twice() {
    let words = WordEmbedder::new("words");
    let parts = parts(Models::new(vec![words.clone()], None));
    let metadata = serde_json::json!({"embedding_model": "words"});
    parts
        .collection(
            "c",
            metadata,
            &["red apples ripen late", "a wall of stone", "apple pie"],
        )
        .await;
    let backend = parts.backend();
    let conversations = Conversations {
        vectors: backend.vectors().clone(),
        ..conversations(&parts, None)
    };
    let local = crate::gateway::NamedBackend::local(backend);
    let target = crate::fanout::Target {
        service: local.clone(),
        name: ragstone_core::CollectionName::parse("c").unwrap(),
    };
    let id = ConversationId::parse("chat").unwrap();
    for message in [
        "When do red apples ripen?",
        "And in winter?",
        "How is a stone wall made?",
        "Is it high?",
    ] {
        let before = words.texts().len();
        let plan = advance(&conversations, &id, message, now()).await.unwrap();
        let mode = crate::fanout::ModeChoice::Best;
        let targets = vec![target.clone()];
        let query = crate::fanout::FanoutQuery::for_plan(&plan, targets, 3, mode, local.clone());
        let response = crate::fanout::search(&query).await;
        assert!(response.failures.is_empty(), "{:?}", response.failures);
        let embedded = words.texts()[before..].to_vec();
        let unique: std::collections::HashSet<&String> = embedded.iter().collect();
        assert_eq!(unique.len(), embedded.len(), "{message}: {embedded:?}");
    }
}
