//! Requirement: RAG Wrapper Document Storage with Pre-computed Embeddings

use serde_json::{Value, json};

use crate::support::{Server, plain, vector};

async fn server() -> Server {
    let server = plain().await;
    server.create("c").await;
    server
}

/// Sends documents that must be refused, and checks that nothing was stored.
async fn refused(server: &Server, documents: Value) -> String {
    let before = server.get("/collections/c").await.ok();
    let detail = server
        .post("/collections/c/documents", json!({ "documents": documents }))
        .await
        .refused(400);
    assert_eq!(server.get("/collections/c").await.ok(), before);
    detail
}

#[tokio::test]
async fn add_documents_with_pre_computed_embeddings() {
    let server = server().await;
    let documents = json!([
        {"id": "a", "text": "first", "metadata": {"n": 1}, "embedding": vector(1)},
        {"id": "b", "text": "second", "metadata": {}, "embedding": vector(2)},
    ]);
    let added = server
        .post("/collections/c/documents", json!({ "documents": documents }))
        .await
        .ok();
    assert_eq!(
        added,
        json!({"status": "added", "collection": "c", "count": 2, "ids": ["a", "b"]})
    );
    let search = json!({"query_embedding": vector(2), "top_k": 1});
    let found = server.post("/collections/c/query", search).await.ok();
    assert_eq!(found["results"][0]["id"], "b");
    assert!(
        found["results"][0]["distance"].as_f64().unwrap().abs() < 1e-5,
        "{found}"
    );
}

#[tokio::test]
async fn add_documents_without_embeddings() {
    let server = server().await;
    let detail = refused(&server, json!([{"text": "a"}, {"text": "b"}])).await;
    assert_eq!(
        detail,
        "All documents must include pre-computed embeddings: collection 'c' has no embedding_model in metadata. \
         Available models: none"
    );
    let detail = refused(
        &server,
        json!([{"text": "a", "embedding": [1, 2]}, {"text": "b"}]),
    )
    .await;
    assert!(
        detail.starts_with("All documents must include pre-computed embeddings"),
        "{detail}"
    );
    assert!(detail.contains("index 1"), "{detail}");
}

#[tokio::test]
async fn add_documents_with_invalid_embedding_format() {
    let server = server().await;
    let wrong = [
        json!("0.1, 0.2"),
        json!(7),
        json!(true),
        json!({"0": 1}),
        json!([1, "2"]),
        json!([1, null]),
        json!([[1]]),
    ];
    for embedding in wrong {
        let detail = refused(
            &server,
            json!([{"text": "a", "embedding": [1, 2]}, {"text": "b", "embedding": embedding}]),
        )
        .await;
        assert_eq!(
            detail, "Document at index 1: 'embedding' must be an array of finite numbers",
            "{embedding}"
        );
    }
}

#[tokio::test]
async fn add_documents_with_mismatched_embedding_dimensions() {
    let server = server().await;
    let detail = refused(
        &server,
        json!([{"text": "a", "embedding": [1, 2]}, {"text": "b", "embedding": [1, 2, 3]}]),
    )
    .await;
    assert!(
        detail.contains("dimension mismatch") && detail.contains("index 1"),
        "{detail}"
    );
    server
        .add("c", vec![json!({"text": "a", "embedding": [1, 2]})])
        .await;
    let detail = refused(&server, json!([{"text": "a", "embedding": [1, 2, 3]}])).await;
    assert!(
        detail.contains("dimension mismatch") && detail.contains("'c'"),
        "{detail}"
    );
}

#[tokio::test]
async fn empty_documents_array() {
    let server = server().await;
    assert_eq!(refused(&server, json!([])).await, "Documents array is required");
    for body in [json!({}), json!({"documents": null})] {
        let detail = server.post("/collections/c/documents", body).await.refused(400);
        assert_eq!(detail, "Documents array is required");
    }
}
