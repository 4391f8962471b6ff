//! The work that a request costs: reads of the store, and texts that are embedded.

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures};

async fn started() -> Server {
    let server = Setup::serve_embedded()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    let documents =
        (0..20).map(|n| json!({"id": format!("d{n}"), "text": format!("fox and dog number {n}")}));
    server.add("c", documents.collect::<Vec<Value>>()).await;
    server
}

async fn counted(server: &Server, counter: &str) -> u64 {
    let metrics = server.get("/metrics").await.text;
    metrics
        .lines()
        .filter_map(|line| line.strip_prefix(counter)?.trim().parse::<u64>().ok())
        .sum()
}

const READS: &str = "ragstone_store_reads_total ";

/// How often answering a request reads the store.
async fn reads(server: &Server, path: &str, body: Value) -> u64 {
    let before = counted(server, READS).await;
    server.post(path, body).await.ok();
    counted(server, READS).await - before
}

#[tokio::test]
async fn a_text_query_reads_the_store_twice() {
    let server = started().await;
    for (mode, most) in [("dense", 2), ("keyword", 1), ("hybrid", 2)] {
        let body = json!({"query": "which animal?", "mode": mode, "top_k": 5});
        let reads = reads(&server, "/collections/c/query", body).await;
        assert!((1..=most).contains(&reads), "{mode}: {reads}");
    }
}

#[tokio::test]
async fn a_message_of_a_conversation_reads_the_store_five_times_at_most() {
    let server = started().await;
    let say = |message: &str| {
        json!({
            "user_message": message, "conversation_id": "chat",
            "collections": [{"service": "local", "name": "c"}],
        })
    };
    for message in [
        "Which animal jumps over the dog?",
        "And number 3?",
        "How long does it sleep?",
        "What about the fox?",
        "Thanks!",
    ] {
        let reads = reads(&server, "/api/rag/collect", say(message)).await;
        assert!((1..=5).contains(&reads), "{message}: {reads}");
    }
}
