//! Requirement: Collection-Specific Embedding Model Retrieval

use serde_json::json;

use crate::support::{Server, Setup, fixtures, ids};

async fn with_two_models() -> Server {
    let (bert, mpnet) = (fixtures::model("bert"), fixtures::model("mpnet"));
    Setup::serve()
        .embeddings(&[("mxbai-large", &bert), ("second", &mpnet)])
        .start()
        .await
}

/// Each collection is embedded by the model its metadata names, documents and queries alike.
#[tokio::test]
async fn get_model_for_collection_with_valid_metadata() {
    let server = with_two_models().await;
    let texts = [
        "The quick brown fox jumps over the lazy dog.",
        "fox",
        "UPPER lower MiXeD",
        "Numbers such as 3.14159 occur.",
    ];
    for (collection, model) in [("first", "mxbai-large"), ("other", "second")] {
        server
            .post(
                "/collections",
                json!({"name": collection, "embedding_model": model}),
            )
            .await
            .ok();
        server
            .add(
                collection,
                texts.map(|text| json!({"id": text, "text": text})).to_vec(),
            )
            .await;
        for text in texts {
            let path = format!("/collections/{collection}/query");
            let by_text = server.post(&path, json!({"query": text, "top_k": 4})).await.ok();
            assert_eq!(ids(&by_text["results"])[0], text);
            assert!(
                by_text["results"][0]["distance"].as_f64().unwrap() < 1e-4,
                "{by_text}"
            );
            let vector = server
                .post("/embed", json!({"texts": [text], "model": model}))
                .await
                .ok();
            let by_vector = server
                .post(
                    &path,
                    json!({"query_embedding": vector["embeddings"][0], "top_k": 4}),
                )
                .await
                .ok();
            assert_eq!(
                ids(&by_vector["results"]),
                ids(&by_text["results"]),
                "the same model made the vectors"
            );
        }
    }
}

#[tokio::test]
async fn collection_missing_embedding_model_metadata() {
    let server = with_two_models().await;
    server.create("bare").await;
    let detail = server
        .post(
            "/collections/bare/documents",
            json!({"documents": [{"text": "t"}]}),
        )
        .await
        .refused(400);
    assert_eq!(
        detail,
        "All documents must include pre-computed embeddings: collection 'bare' has no embedding_model in metadata. \
         Available models: mxbai-large, second"
    );
    let detail = server
        .post("/collections/bare/query", json!({"query": "t"}))
        .await
        .refused(400);
    assert!(
        detail.contains("has no embedding_model in metadata. Available models: mxbai-large, second"),
        "{detail}"
    );
}

#[tokio::test]
async fn collection_references_non_loaded_model() {
    let server = with_two_models().await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "model-x"}))
        .await
        .ok();
    let expected = "Embedding model 'model-x' not loaded. Available models: mxbai-large, second";
    let detail = server
        .post("/collections/c/documents", json!({"documents": [{"text": "t"}]}))
        .await
        .refused(503);
    assert_eq!(detail, expected);
    assert_eq!(
        server
            .post("/collections/c/query", json!({"query": "t"}))
            .await
            .refused(503),
        expected
    );
    // The client's own vectors need no model.
    server
        .add("c", vec![json!({"text": "t", "embedding": [1, 2]})])
        .await;
}
