//! Requirement: Cross-Encoder Reranking Method, seen through the gateway.

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures, ids};

const TEXTS: [&str; 6] = [
    "The quick brown fox jumps over the lazy dog.",
    "Numbers such as 3.14159 occur.",
    "Zürich is a city.",
    "vectors have an angle",
    "a question about vectors",
    "a passage about the fox",
];

/// A server with models as the service `far` of a server without any.
async fn reranking(far: Setup) -> (Server, Server) {
    let far = far
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    far.post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    let documents: Vec<Value> = TEXTS
        .iter()
        .enumerate()
        .map(|(n, text)| json!({"id": format!("d{n}"), "text": text, "metadata": {"n": n, "tags": ["a"]}}))
        .collect();
    far.add("c", documents).await;
    let yaml = format!(
        "services: {{far: {{provider: chromadb-wrapper, url: {:?}, timeoutMs: 2000, retry: {{maxAttempts: 1}}}}}}",
        far.url("")
    );
    let near = Setup::without_models().config(&yaml).start().await;
    (near, far)
}

fn with_cross_encoder() -> Setup {
    Setup::serve()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
}

async fn collect(near: &Server, top_k: usize) -> Value {
    let collections = json!([{"service": "far", "name": "c"}]);
    let body = json!({"user_message": "which animal jumps?", "collections": collections, "rerank": true, "top_k": top_k});
    near.post("/api/rag/collect", body).await.ok()
}

async fn expected(far: &Server, top_k: usize) -> Value {
    let documents: Vec<Value> = TEXTS
        .iter()
        .enumerate()
        .map(|(n, text)| json!({"id": format!("d{n}"), "text": text}))
        .collect();
    far.post(
        "/rerank",
        json!({"query": "which animal jumps?", "documents": documents, "top_k": top_k}),
    )
    .await
    .ok()
}

#[tokio::test]
async fn successful_reranking_call() {
    let (near, far) = reranking(with_cross_encoder()).await;
    let answer = collect(&near, 6).await;
    assert_eq!(answer["reranked"], true, "{answer}");
    assert_eq!(ids(&answer["results"]), ids(&expected(&far, 6).await["reranked"]));
    assert!(
        answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .all(|hit| hit["rerank_score"].is_number()),
        "{answer}"
    );
}

#[tokio::test]
async fn optional_top_k_parameter() {
    let (near, far) = reranking(with_cross_encoder()).await;
    let answer = collect(&near, 2).await;
    assert_eq!(ids(&answer["results"]), ids(&expected(&far, 2).await["reranked"]));
}

#[tokio::test]
async fn reranking_preserves_document_structure() {
    let (near, _far) = reranking(with_cross_encoder()).await;
    let answer = collect(&near, 6).await;
    for hit in answer["results"].as_array().unwrap() {
        let n = hit["metadata"]["n"].as_u64().unwrap() as usize;
        assert_eq!(
            (&hit["text"], &hit["metadata"]["tags"]),
            (&json!(TEXTS[n]), &json!(["a"]))
        );
        assert_eq!(hit["id"], format!("d{n}"));
        assert!(
            hit["distance"].is_number() && hit["original_rank"].is_u64(),
            "{hit}"
        );
    }
}

#[tokio::test]
async fn health_check_shows_no_cross_encoder() {
    let (near, far) = reranking(Setup::serve()).await;
    let answer = collect(&near, 6).await;
    assert_eq!(answer["reranked"], false);
    let unchanged = far
        .post(
            "/collections/c/query",
            json!({"query": "which animal jumps?", "top_k": 6}),
        )
        .await
        .ok();
    assert_eq!(ids(&answer["results"]), ids(&unchanged["results"]));
    assert!(
        answer["warnings"]
            .as_array()
            .unwrap()
            .iter()
            .any(|warning| warning.as_str().unwrap().contains("cross-encoder")),
        "{answer}"
    );
    near.wait_for_log("documents are not reranked");
}

#[tokio::test]
async fn rag_service_unreachable() {
    let (near, far) = reranking(with_cross_encoder()).await;
    drop(far);
    let answer = collect(&near, 6).await;
    assert_eq!(
        (&answer["reranked"], &answer["results"]),
        (&json!(false), &json!([]))
    );
    assert!(
        answer["warnings"][0].as_str().unwrap().contains("far"),
        "{answer}"
    );
}
