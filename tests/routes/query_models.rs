//! Search with models: texts embedded by the service, results reordered by a cross-encoder.

use serde_json::{Value, json};

use crate::support::{Setup, fixtures, ids};

#[tokio::test]
async fn a_cross_encoder_reorders_a_larger_candidate_set() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    let words = [
        "fox", "dog", "vectors", "passage", "Zürich", "numbers", "question", "angle",
    ];
    let documents: Vec<Value> = (0..32)
        .map(|n| json!({"id": format!("d{n}"), "text": format!("{} and {} number {n}", words[n % 8], words[n / 4])}))
        .collect();
    let texts: Vec<Value> = documents
        .iter()
        .map(|document| json!({"id": document["id"], "text": document["text"]}))
        .collect();
    server.add("c", documents).await;

    let body = json!({"query": "which animal jumps?", "top_k": 5, "rerank": true, "explain": true});
    let answer = server.post("/collections/c/query", body).await.ok();
    assert_eq!(answer["reranked"], true);
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 5);
    // All 32 fit into the candidate set, so the order is that of reranking everything.
    let all = server
        .post(
            "/rerank",
            json!({"query": "which animal jumps?", "documents": texts, "top_k": 5}),
        )
        .await
        .ok();
    assert_eq!(ids(&answer["results"]), ids(&all["reranked"]));
    let unranked = server
        .post(
            "/collections/c/query",
            json!({"query": "which animal jumps?", "top_k": 32}),
        )
        .await
        .ok();
    let before = ids(&unranked["results"]);
    for (place, (result, reranked)) in results
        .iter()
        .zip(all["reranked"].as_array().unwrap())
        .enumerate()
    {
        let difference = result["rerank_score"].as_f64().unwrap() - reranked["score"].as_f64().unwrap();
        assert!(difference.abs() < 1e-5, "{result} {reranked}");
        let rank = result["original_rank"].as_u64().unwrap() as usize;
        assert_eq!(
            before[rank - 1],
            result["id"].as_str().unwrap(),
            "where it stood before"
        );
        assert_eq!(result["explain"]["rerank"]["rank"], place + 1);
        assert!(result["distance"].is_f64());
    }
}

#[tokio::test]
async fn a_query_needs_the_collections_model_only_for_vectors() {
    // By its directory, which the second server is told.
    let setup = Setup::serve_embedded();
    let data = setup.data_dir();
    let server = setup
        .clone()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    server
        .add("c", vec![json!({"id": "a", "text": "a fox in the garden"})])
        .await;
    let (_, _) = server.stop();
    // The same data without the model: by word it goes on, by meaning it says what is missing.
    let setup = Setup::command(&["serve", "--port", "0", "--no-embeddings"])
        .arg("--data-dir")
        .arg(data);
    let server = setup.start().await;
    let by_word = server
        .post(
            "/collections/c/query",
            json!({"query": "garden", "mode": "keyword"}),
        )
        .await
        .ok();
    assert_eq!(ids(&by_word["results"]), ["a"]);
    for mode in ["dense", "hybrid"] {
        let detail = server
            .post("/collections/c/query", json!({"query": "garden", "mode": mode}))
            .await
            .refused(503);
        assert_eq!(
            detail,
            "Embedding model 'tiny' not loaded. Available models: none"
        );
    }
}

/// The real model, on questions whose answers share few words with them.
#[tokio::test]
async fn the_default_model_finds_by_meaning() {
    tokio::task::spawn_blocking(fixtures::default_model)
        .await
        .unwrap();
    let server = Setup::serve()
        .embeddings(&[("minilm", "sentence-transformers/all-MiniLM-L6-v2".as_ref())])
        .start()
        .await;
    let model = &server.get("/health").await.ok()["embedding_models"][0];
    assert_eq!(
        (&model["id"], &model["dimensions"]),
        (&json!("minilm"), &json!(384))
    );
    server
        .post("/collections", json!({"name": "c", "embedding_model": "minilm"}))
        .await
        .ok();
    let texts = [
        ("retention", "Log files are removed after thirty days."),
        (
            "cake",
            "Whisk the eggs with sugar until the batter is pale, then fold in the flour.",
        ),
        (
            "orbit",
            "The satellite circles the planet once every ninety minutes.",
        ),
        (
            "refund",
            "Customers get their money back when they return the goods within two weeks.",
        ),
        ("dog", "The puppy barked at the mail carrier all morning."),
    ];
    server
        .add(
            "c",
            texts.map(|(id, text)| json!({"id": id, "text": text})).to_vec(),
        )
        .await;
    for (question, expected) in [
        ("How long do we keep diagnostic output?", "retention"),
        ("recipe for a dessert", "cake"),
        ("spacecraft going around the Earth", "orbit"),
        ("Can I send the product back and be reimbursed?", "refund"),
        ("noisy pet animals", "dog"),
    ] {
        let answer = server
            .post("/collections/c/query", json!({"query": question, "top_k": 5}))
            .await
            .ok();
        assert_eq!(ids(&answer["results"])[0], expected, "{question}");
        let distances: Vec<f64> = answer["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|r| r["distance"].as_f64().unwrap())
            .collect();
        assert!(
            distances.is_sorted() && distances[0] < distances[4] - 0.1,
            "{distances:?}"
        );
    }
}

/// Also where both models make vectors of one width.
#[tokio::test]
async fn a_collection_keeps_to_the_model_that_made_its_vectors() {
    let setup = Setup::serve_embedded();
    let (one, other) = (fixtures::model("bert"), fixtures::model("bert-gelu-new"));
    let server = setup
        .clone()
        .embeddings(&[("one", &one), ("other", &other)])
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "one"}))
        .await
        .ok();
    server.add("c", vec![json!({"id": "a", "text": "the fox"})]).await;
    let query = json!({"query": "fox"});
    let answer = server.post("/collections/c/query", query.clone()).await.ok();
    assert!(answer.get("warnings").is_none(), "{answer}");
    let metadata = json!({"metadata": {"embedding_model": "other"}});
    server.put("/collections/c/metadata", metadata).await.ok();
    let more = json!({"documents": [{"id": "b", "text": "the dog"}]});
    let collect = json!({"user_message": "fox", "collections": [{"service": "local", "name": "c"}]});
    for (path, body) in [
        ("/collections/c/query", query.clone()),
        ("/collections/c/documents", more.clone()),
        ("/api/rag/collect", collect.clone()),
    ] {
        let detail = server.post(path, body).await.refused(400);
        assert!(
            detail.contains("has vectors of model 'one'") && detail.contains("again"),
            "{path}: {detail}"
        );
    }
    // What needs no model is as before, and so is an empty collection.
    let words = json!({"query": "fox", "mode": "keyword"});
    server.post("/collections/c/query", words).await.ok();
    server.delete("/collections/c/documents/all").await.ok();
    server.post("/collections/c/documents", more.clone()).await.ok();
    let metadata = json!({"metadata": {"embedding_model": "one"}});
    server.put("/collections/c/metadata", metadata).await.ok();
    let (_, _) = server.stop();

    // The same name for another model is another version of it.
    let server = setup.embeddings(&[("one", &one), ("other", &one)]).start().await;
    let metadata = json!({"metadata": {"embedding_model": "other"}});
    server.put("/collections/c/metadata", metadata).await.ok();
    for (path, body) in [("/collections/c/query", query), ("/api/rag/collect", collect)] {
        let answer = server.post(path, body).await.ok();
        let warning = answer["warnings"][0].as_str().unwrap_or_default();
        assert!(warning.contains("of model 'other', and version"), "{answer}");
    }
    let detail = server.post("/collections/c/documents", more).await.refused(400);
    assert!(detail.contains("of model 'other', and version"), "{detail}");
}

#[tokio::test]
async fn a_query_that_is_too_long_for_the_model_is_told_so() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "tiny"}))
        .await
        .ok();
    server.add("c", vec![json!({"id": "a", "text": "the fox"})]).await;
    let long = json!({"query": "fox ".repeat(2000)});
    let answer = server.post("/collections/c/query", long).await.ok();
    let warning = answer["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("longer than what model 'tiny' reads"),
        "{warning}"
    );
}
