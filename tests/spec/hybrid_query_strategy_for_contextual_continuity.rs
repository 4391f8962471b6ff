//! Requirement: Hybrid Query Strategy for Contextual Continuity

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures};

const TEXTS: [&str; 4] = [
    "InstructLab tunes language models",
    "InstructLab and OpenShift AI integration",
    "tulips in winter",
    "a recipe for bread",
];

async fn server() -> Server {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    for name in ["a", "b", "c"] {
        server
            .post("/collections", json!({"name": name, "embedding_model": "tiny"}))
            .await
            .ok();
        let documents: Vec<Value> = TEXTS
            .iter()
            .enumerate()
            .map(|(n, text)| json!({"id": n.to_string(), "text": text}))
            .collect();
        server.add(name, documents).await;
    }
    server
}

async fn collect(server: &Server, mut body: Value) -> Value {
    body["collections"] = json!([{"service": "local", "name": "a"}]);
    server.post("/api/rag/collect", body).await.ok()
}

/// The distances are those of a search for this text.
async fn assert_searched_for(server: &Server, answer: &Value, text: &str) {
    assert_eq!(answer["query_text"], text);
    let direct = server
        .post("/collections/a/query", json!({"query": text, "top_k": 5}))
        .await
        .ok();
    let shape = |results: &Value| -> Vec<(Value, Value)> {
        results
            .as_array()
            .unwrap()
            .iter()
            .map(|hit| (hit["id"].clone(), hit["distance"].clone()))
            .collect()
    };
    assert_eq!(shape(&answer["results"]), shape(&direct["results"]));
}

#[tokio::test]
async fn first_message_query_strategy() {
    let server = server().await;
    let answer = collect(&server, json!({"user_message": "What is InstructLab?"})).await;
    assert_eq!(answer["strategy"], "first message (raw query)");
    assert_searched_for(&server, &answer, "What is InstructLab?").await;
    server.wait_for_log("first message (raw query)");
}

#[tokio::test]
async fn follow_up_message_query_strategy() {
    let server = server().await;
    let body =
        json!({"user_message": "And the other?", "current_topic": "InstructLab", "topic": "OpenShift AI"});
    let answer = collect(&server, body).await;
    assert_eq!(answer["strategy"], "follow-up (contextualized topic)");
    assert_eq!(answer["topic"], "OpenShift AI");
    assert_searched_for(&server, &answer, "OpenShift AI").await;
    server.wait_for_log("follow-up (contextualized topic)");
}

#[tokio::test]
async fn pronoun_resolution_via_topic_context() {
    let server = server().await;
    let topic = "InstructLab and OpenShift AI integration";
    let body = json!({"user_message": "Does it integrate with OpenShift AI?", "current_topic": "InstructLab", "topic": topic});
    let answer = collect(&server, body).await;
    assert_searched_for(&server, &answer, topic).await;
    assert_eq!(
        answer["results"][0]["id"], "1",
        "the text that says the same is nearest"
    );

    let conversation = |message: &str| json!({"user_message": message, "conversation_id": "chat"});
    collect(&server, conversation("What is InstructLab?")).await;
    let answer = collect(
        &server,
        conversation("Does it integrate with that OpenShift AI too?"),
    )
    .await;
    assert!(
        answer["topic"].as_str().unwrap().contains("InstructLab"),
        "{answer}"
    );
}

#[tokio::test]
async fn query_text_selection_logic() {
    let server = server().await;
    for current in [json!(null), json!(""), json!(" \t\n ")] {
        let body = json!({"user_message": "  bread? ", "current_topic": current, "topic": "tulips"});
        let answer = collect(&server, body).await;
        assert_eq!(
            (&answer["strategy"], &answer["query_text"]),
            (&json!("first message (raw query)"), &json!("  bread? "))
        );
    }
    let body =
        json!({"user_message": "bread?", "current_topic": "plants", "topic": "  tulips \n in   winter "});
    let answer = collect(&server, body).await;
    assert_searched_for(&server, &answer, "tulips in winter").await;
}

#[tokio::test]
async fn embedding_cache_efficiency() {
    let server = server().await;
    let collections: Value = ["a", "b", "c"]
        .iter()
        .map(|name| json!({"service": "local", "name": name}))
        .collect();
    server
        .post(
            "/api/rag/collect",
            json!({"user_message": "bread", "collections": collections}),
        )
        .await
        .ok();
    let metrics = server.get("/metrics").await.text;
    assert!(
        metrics
            .lines()
            .any(|line| line == "ragstone_embedding_cache_hits_total 2"),
        "{metrics}"
    );
    let line = server.wait_for_log("embedding cache hit");
    assert!(line.contains("local:tiny") && line.contains("hits=2"), "{line}");
}
