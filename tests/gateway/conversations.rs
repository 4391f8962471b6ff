//! `/api/conversations`: the topic that the server keeps itself.

use serde_json::{Value, json};

use super::with_model;
use crate::support::{Answer, Server, Setup};

async fn say(server: &Server, id: &str, message: &str) -> Value {
    let collections = json!([{"service": "local", "name": "c"}]);
    let body = json!({"user_message": message, "conversation_id": id, "collections": collections});
    server.post("/api/rag/collect", body).await.ok()
}

async fn show(server: &Server, id: &str) -> Answer {
    server.get(&format!("/api/conversations/{id}")).await
}

async fn started(setup: Setup) -> Server {
    let server = with_model(setup).start().await;
    super::create(&server, "local", "c", json!({})).await;
    super::add(
        &server,
        "local",
        "c",
        &[
            "InstructLab tunes models",
            "OpenShift AI serves models",
            "tulips in winter",
        ],
    )
    .await;
    server
}

#[tokio::test]
async fn the_topic_is_kept_over_a_restart() {
    let server = started(Setup::serve()).await;
    let first = say(&server, "chat 1", "What is InstructLab?").await;
    assert_eq!(first["strategy"], "first message (raw query)");
    assert_eq!(first["query_text"], "What is InstructLab?");
    let server = server.restarted().await;
    let second = say(&server, "chat 1", "Does it work with that other thing?").await;
    assert_eq!(second["strategy"], "follow-up (contextualized topic)");
    assert!(
        second["topic"].as_str().unwrap().contains("InstructLab"),
        "{second}"
    );
    assert_eq!(second["results"].as_array().unwrap().len(), 3, "{second}");
    let kept = show(&server, "chat%201").await.ok();
    assert_eq!(
        (&kept["conversation_id"], &kept["topic"]),
        (&json!("chat 1"), &second["topic"])
    );
    let said: Vec<&str> = kept["turns"]
        .as_array()
        .unwrap()
        .iter()
        .map(|turn| turn["message"].as_str().unwrap())
        .collect();
    assert_eq!(
        said,
        ["What is InstructLab?", "Does it work with that other thing?"]
    );
    for time in ["created_at", "updated_at", "expires_at"] {
        assert!(kept[time].as_str().unwrap().ends_with('Z'), "{kept}");
    }
}

/// What the client says about the topic does not count where the server keeps it.
#[tokio::test]
async fn the_server_supplies_the_topic() {
    let server = started(Setup::serve()).await;
    let body = json!({"user_message": "What is InstructLab?", "conversation_id": "a", "current_topic": "tulips", "topic": "tulips in winter",
        "collections": [{"service": "local", "name": "c"}]});
    let answer = server.post("/api/rag/collect", body).await.ok();
    assert_eq!(answer["query_text"], "What is InstructLab?");
}

#[tokio::test]
async fn a_conversation_can_be_deleted() {
    let server = started(Setup::serve()).await;
    assert_eq!(
        show(&server, "a").await.refused(404),
        "Conversation 'a' not found"
    );
    say(&server, "a", "What is InstructLab?").await;
    let deleted = server.delete("/api/conversations/a").await.ok();
    assert_eq!(deleted, json!({"status": "deleted", "conversation_id": "a"}));
    show(&server, "a").await.refused(404);
    server.delete("/api/conversations/a").await.refused(404);
    assert_eq!(
        say(&server, "a", "Does it?").await["strategy"],
        "first message (raw query)"
    );
}

#[tokio::test]
async fn a_conversation_expires_and_is_swept_from_the_store() {
    let server = started(Setup::serve().config("conversations: {ttl_seconds: 1}")).await;
    say(&server, "a", "What is InstructLab?").await;
    server.wait_for_log("expired conversations deleted");
    show(&server, "a").await.refused(404);
    assert_eq!(
        say(&server, "a", "Does it?").await["strategy"],
        "first message (raw query)"
    );
}

/// What is told of a hit belongs to what is told as searched for, also after a change of subject.
#[tokio::test]
async fn distances_are_those_to_the_text_that_was_searched_for() {
    let server = started(Setup::serve()).await;
    say(&server, "a", "What is InstructLab?").await;
    for message in ["tulips in winter", "And for how long?", "thanks"] {
        let answer = say(&server, "a", message).await;
        let texts: Vec<&Value> = answer["queries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|query| &query["text"])
            .collect();
        assert!(texts.contains(&&answer["query_text"]), "{answer}");
        let body = json!({"query": answer["query_text"], "top_k": 5});
        let alone = server.post("/collections/c/query", body).await.ok();
        for hit in answer["results"].as_array().unwrap() {
            let alone = alone["results"]
                .as_array()
                .unwrap()
                .iter()
                .find(|alone| alone["id"] == hit["id"]);
            let difference = hit["distance"].as_f64().unwrap() - alone.unwrap()["distance"].as_f64().unwrap();
            assert!(difference.abs() < 1e-5, "{hit} {alone:?}");
        }
    }
    let kept = show(&server, "a").await.ok();
    assert!(
        kept["topic"].as_str().unwrap().ends_with("And for how long?"),
        "{kept}"
    );
}
