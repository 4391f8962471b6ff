//! External Embedding Service Contract Requirements: the suggested test cases, by name.

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures, plain};

async fn two_models() -> Server {
    let (bert, dense) = (fixtures::model("bert"), fixtures::model("bert-dense"));
    Setup::serve()
        .embeddings(&[("first", &bert), ("second", &dense)])
        .start()
        .await
}

fn chunk(id: &str, content: &str, hash: &str) -> Value {
    json!({"chunk_id": id, "content": content, "content_hash": hash, "metadata": {"page": 1}})
}

async fn embed(server: &Server, base: &str, chunks: Vec<Value>) -> Value {
    server
        .post("/embeddings", json!({"knowledgebase_id": base, "chunks": chunks}))
        .await
        .ok()
}

fn list<'a>(answer: &'a Value, name: &str) -> &'a [Value] {
    answer[name]
        .as_array()
        .unwrap_or_else(|| panic!("no {name}: {answer}"))
}

async fn refusal(server: &Server, body: Value) -> String {
    server.post("/embeddings", body).await.refused(400)
}

// Validation

#[tokio::test]
async fn missing_knowledgebase_id_returns_a_validation_error() {
    let server = plain().await;
    let chunks = json!([chunk("c", "text", "h")]);
    for body in [
        json!({"chunks": chunks}),
        json!({"chunks": chunks, "knowledgebase_id": ""}),
        json!({"chunks": chunks, "knowledgebase_id": null}),
        json!({}),
    ] {
        assert_eq!(refusal(&server, body).await, "knowledgebase_id is required");
    }
}

async fn refuses_a_chunk_without(field: &str) {
    let server = plain().await;
    for wrong in [None, Some(json!(null)), Some(json!(""))] {
        let mut bad = chunk("c", "text", "h");
        match wrong {
            Some(value) => bad[field] = value,
            None => drop(bad.as_object_mut().unwrap().remove(field)),
        }
        let body = json!({"knowledgebase_id": "kb", "chunks": [chunk("good", "text", "h0"), bad]});
        let detail = refusal(&server, body).await;
        assert_eq!(detail, format!("{field} is required (chunk at index 1)"));
    }
}

#[tokio::test]
async fn chunk_missing_chunk_id_returns_a_validation_error() {
    refuses_a_chunk_without("chunk_id").await;
}

#[tokio::test]
async fn chunk_missing_content_returns_a_validation_error() {
    refuses_a_chunk_without("content").await;
}

#[tokio::test]
async fn chunk_missing_content_hash_returns_a_validation_error() {
    refuses_a_chunk_without("content_hash").await;
}

#[tokio::test]
async fn a_request_without_chunks_is_refused() {
    let server = plain().await;
    assert_eq!(
        refusal(&server, json!({"knowledgebase_id": "kb"})).await,
        "chunks is required"
    );
}

#[tokio::test]
async fn a_refused_request_embeds_nothing() {
    let server = two_models().await;
    let bad = json!({"knowledgebase_id": "kb", "chunks": [chunk("a", "text", "h"), {"chunk_id": "b"}]});
    refusal(&server, bad).await;
    assert_eq!(
        list(
            &embed(&server, "kb", vec![chunk("a", "text", "h")]).await,
            "embeddings"
        )
        .len(),
        1
    );
}

#[tokio::test]
async fn empty_chunk_list_returns_an_empty_embedding_list() {
    let server = two_models().await;
    assert_eq!(
        embed(&server, "kb", vec![]).await,
        json!({"embeddings": [], "skipped": []})
    );
}

// Model selection

#[tokio::test]
async fn no_model_id_uses_the_default_model() {
    let server = two_models().await;
    let answer = embed(&server, "kb", vec![chunk("c", "text", "h")]).await;
    assert_eq!(answer["embeddings"][0]["model_id"], "first");
}

#[tokio::test]
async fn missing_default_model_and_no_request_model_id_returns_a_validation_error() {
    let server = plain().await;
    let body = json!({"knowledgebase_id": "kb", "chunks": [chunk("c", "text", "h")]});
    assert_eq!(refusal(&server, body).await, "model id is required");
}

#[tokio::test]
async fn request_model_id_overrides_the_default_model() {
    let server = two_models().await;
    let ask = async |model: &str| {
        let body = json!({"knowledgebase_id": "kb", "chunks": [chunk("c", "text", "h")], "model_id": model});
        server.post("/embeddings", body).await
    };
    let answer = ask("second").await.ok();
    assert_eq!(answer["embeddings"][0]["model_id"], "second");
    // Another model is another embedding of the same content.
    assert_eq!(list(&ask("first").await.ok(), "embeddings").len(), 1);
    let detail = ask("third").await.refused(503);
    assert_eq!(
        detail,
        "Embedding model 'third' not loaded. Available models: first, second"
    );
}

// Deduplication

#[tokio::test]
async fn existing_embedding_is_skipped_and_not_returned() {
    let server = two_models().await;
    let first = embed(&server, "kb", vec![chunk("a", "text", "h")]).await;
    let id = first["embeddings"][0]["embedding_id"].clone();
    // Also after a restart, and under another chunk id: the ledger is durable and knows content.
    let server = server.restarted().await;
    let again = embed(
        &server,
        "kb",
        vec![chunk("b", "text", "h"), chunk("c", "new", "h2")],
    )
    .await;
    assert_eq!(again["skipped"], json!([{"chunk_id": "b", "embedding_id": id}]));
    assert_eq!(list(&again, "embeddings").len(), 1);
    assert_eq!(again["embeddings"][0]["chunk_id"], "c");
}

#[tokio::test]
async fn another_model_version_is_another_embedding() {
    let folder = tempfile::tempdir().unwrap();
    let model = fixtures::copy("bert", folder.path());
    let setup = Setup::serve().embeddings(&[("m", &model)]);
    let server = setup.clone().start().await;
    let before = embed(&server, "kb", vec![chunk("a", "text", "h")]).await;
    assert!(server.stop().0.success());
    let yaml = format!("embeddings:\n  - {{id: m, path: {model:?}, version: other}}\n");
    setup.file("embeddings.yml", &yaml);
    let server = setup.start().await;
    let after = embed(&server, "kb", vec![chunk("a", "text", "h")]).await;
    assert_eq!(after["embeddings"][0]["model_version"], "other");
    assert_ne!(before["embeddings"][0]["model_version"], "other");
    assert_ne!(
        before["embeddings"][0]["embedding_id"],
        after["embeddings"][0]["embedding_id"]
    );
}

#[tokio::test]
async fn two_chunks_with_identical_content_hash_result_in_a_single_embedding() {
    let server = two_models().await;
    let chunks = vec![
        chunk("a", "text", "h"),
        chunk("b", "text", "h"),
        chunk("c", "other", "h2"),
    ];
    let answer = embed(&server, "kb", chunks).await;
    let ids: Vec<&Value> = list(&answer, "embeddings")
        .iter()
        .map(|e| &e["chunk_id"])
        .collect();
    assert_eq!(ids, ["a", "c"]);
    let first = &answer["embeddings"][0]["embedding_id"];
    assert_eq!(
        answer["skipped"],
        json!([{"chunk_id": "b", "embedding_id": first}])
    );
}

#[tokio::test]
async fn same_content_hash_but_different_knowledgebase_id_results_in_separate_embeddings() {
    let server = two_models().await;
    let one = embed(&server, "kb1", vec![chunk("a", "text", "h")]).await;
    let two = embed(&server, "kb2", vec![chunk("a", "text", "h")]).await;
    assert_eq!(
        (list(&one, "embeddings").len(), list(&two, "embeddings").len()),
        (1, 1)
    );
    assert_ne!(
        one["embeddings"][0]["embedding_id"],
        two["embeddings"][0]["embedding_id"]
    );
}

#[tokio::test]
async fn concurrent_requests_embed_the_same_content_once() {
    let server = two_models().await;
    let asks = (0..16).map(|n| {
        let chunks = (0..4)
            .map(|c| chunk(&format!("{n}-{c}"), &format!("text {c}"), &format!("h{c}")))
            .collect();
        embed(&server, "kb", chunks)
    });
    let answers = futures::future::join_all(asks).await;
    let embedded: usize = answers
        .iter()
        .map(|answer| list(answer, "embeddings").len())
        .sum();
    let skipped: usize = answers.iter().map(|answer| list(answer, "skipped").len()).sum();
    assert_eq!((embedded, skipped), (4, 60));
}

// Output integrity

#[tokio::test]
async fn returned_list_includes_one_embedding_per_non_skipped_input_chunk() {
    let server = two_models().await;
    embed(
        &server,
        "kb",
        (0..10)
            .map(|n| chunk(&format!("x{n}"), &format!("text {n}"), &format!("h{n}")))
            .collect(),
    )
    .await;
    // 10 known, 20 new, of which 5 come twice.
    let chunks: Vec<Value> = (0..35)
        .map(|n| {
            chunk(
                &format!("c{n}"),
                &format!("text {}", n % 30),
                &format!("h{}", n % 30),
            )
        })
        .collect();
    let answer = embed(&server, "kb", chunks).await;
    assert_eq!(list(&answer, "embeddings").len(), 20);
    assert_eq!(list(&answer, "skipped").len(), 15);
}

#[tokio::test]
async fn each_embedding_includes_correct_identity_fields() {
    let server = two_models().await;
    let answer = embed(
        &server,
        "kb",
        vec![chunk("a", "text", "h1"), chunk("b", "more", "h2")],
    )
    .await;
    for (embedding, (id, hash)) in list(&answer, "embeddings").iter().zip([("a", "h1"), ("b", "h2")]) {
        let mut fields: Vec<&str> = embedding
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        fields.sort_unstable();
        let expected = [
            "chunk_id",
            "content_hash",
            "embedding_id",
            "knowledgebase_id",
            "model_id",
            "model_version",
            "vector",
            "vector_dimension",
        ];
        assert_eq!(fields, expected);
        assert_eq!(embedding["chunk_id"], id);
        assert_eq!(embedding["content_hash"], hash);
        assert_eq!(embedding["knowledgebase_id"], "kb");
        assert_eq!(embedding["model_id"], "first");
        assert!(!embedding["model_version"].as_str().unwrap().is_empty());
    }
}

#[tokio::test]
async fn embedding_vectors_have_the_dimension_specified_by_the_selected_model() {
    let server = two_models().await;
    let health = server.get("/health").await.ok();
    for model in list(&health, "embedding_models") {
        let body =
            json!({"knowledgebase_id": "kb", "chunks": [chunk("a", "text", "h")], "model_id": model["id"]});
        let answer = server.post("/embeddings", body).await.ok();
        let embedding = &answer["embeddings"][0];
        assert_eq!(embedding["vector_dimension"], model["dimensions"]);
        assert_eq!(
            list(embedding, "vector").len() as u64,
            model["dimensions"].as_u64().unwrap()
        );
    }
}
