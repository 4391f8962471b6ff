//! Requirement: Cross-Encoder Health Reporting

use serde_json::json;

use crate::support::{Setup, fixtures, vector};

#[tokio::test]
async fn health_check_with_both_models_loaded() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await;
    let health = server.get("/health").await.ok();
    assert_eq!(health["status"], "healthy");
    assert_eq!(health["cross_encoder"]["status"], "loaded");
    assert!(
        health["cross_encoder"]["model"]
            .as_str()
            .unwrap()
            .ends_with("cross-bert"),
        "{health}"
    );
    assert_eq!(health["embedding_models"].as_array().unwrap().len(), 1);
    assert_eq!(health["embedding_models"][0]["id"], "tiny");
}

#[tokio::test]
async fn health_check_with_only_cross_encoder() {
    let server = Setup::without_models()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await;
    let health = server.get("/health").await.ok();
    assert_eq!(health["cross_encoder"]["status"], "loaded");
    assert!(
        health.get("embedding_models").is_none(),
        "absent, not null: {health}"
    );
    let body = json!({"query": "q", "documents": [{"id": "a", "text": "t"}]});
    assert_eq!(server.post("/rerank", body).await.ok()["reranked"][0]["id"], "a");
}

#[tokio::test]
async fn health_check_with_only_embedding_models() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    let health = server.get("/health").await.ok();
    assert_eq!(health["embedding_models"][0]["status"], "loaded");
    assert!(
        health.get("cross_encoder").is_none(),
        "absent, not null: {health}"
    );
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    server
        .add("c", vec![json!({"text": "documents are handled"})])
        .await;
    server
        .post("/rerank", json!({"query": "q", "documents": []}))
        .await
        .refused(503);
    // A vector of another width than the model's has no place in this collection.
    let wrong = json!({"documents": [{"text": "t", "embedding": vector(1)}]});
    server.post("/collections/c/documents", wrong).await.refused(400);
}
