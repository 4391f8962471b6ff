//! Requirement: Cross-Encoder Reranking Endpoint

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures, plain};

async fn with_cross_encoder() -> Server {
    Setup::without_models()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await
}

fn documents(count: usize) -> Value {
    let texts = [
        "The quick brown fox jumps over the lazy dog.",
        "Numbers such as 3.14159 occur.",
        "Zürich",
        "vectors",
    ];
    (0..count)
        .map(|n| json!({"id": format!("d{n}"), "text": format!("{} {n}", texts[n % 4])}))
        .collect()
}

fn scores(answer: &Value) -> Vec<f64> {
    answer["reranked"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["score"].as_f64().expect("a number"))
        .collect()
}

/// The scores are those of the reference implementation for the same files.
#[tokio::test]
async fn successful_reranking_request() {
    let server = with_cross_encoder().await;
    for (pair, expected) in fixtures::reference_scores("cross-bert")
        .into_iter()
        .filter(|(pair, _)| pair[0] != "")
    {
        let body = json!({"query": pair[0], "documents": [{"id": "x", "text": pair[1]}]});
        let answer = server.post("/rerank", body).await.ok();
        let difference = (scores(&answer)[0] - expected).abs();
        assert!(difference <= 1e-3, "{pair}: {answer}, expected {expected}");
    }
    let answer = server
        .post(
            "/rerank",
            json!({"query": "which animal jumps?", "documents": documents(6)}),
        )
        .await
        .ok();
    let scores = scores(&answer);
    assert_eq!(scores.len(), 6);
    assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    assert!(
        scores.first() > scores.last(),
        "the model tells texts apart: {scores:?}"
    );
}

#[tokio::test]
async fn apply_top_k_limit() {
    let server = with_cross_encoder().await;
    let all = server
        .post("/rerank", json!({"query": "q", "documents": documents(10)}))
        .await
        .ok();
    let top = server
        .post(
            "/rerank",
            json!({"query": "q", "documents": documents(10), "top_k": 3}),
        )
        .await
        .ok();
    assert_eq!(all["reranked"].as_array().unwrap().len(), 10);
    assert_eq!(
        top["reranked"].as_array().unwrap()[..],
        all["reranked"].as_array().unwrap()[..3]
    );
    let many = server
        .post(
            "/rerank",
            json!({"query": "q", "documents": documents(2), "top_k": 50}),
        )
        .await
        .ok();
    assert_eq!(many["reranked"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn rerank_request_without_cross_encoder_loaded() {
    let server = plain().await;
    let detail = server
        .post("/rerank", json!({"query": "q", "documents": documents(1)}))
        .await
        .refused(503);
    assert_eq!(
        detail,
        "Cross-encoder not loaded. Start server with --cross-encoder flag."
    );
}

#[tokio::test]
async fn rerank_with_missing_query() {
    let server = with_cross_encoder().await;
    let detail = server
        .post("/rerank", json!({"documents": documents(1)}))
        .await
        .refused(400);
    assert!(
        detail.contains("'query'") && detail.contains("required"),
        "{detail}"
    );
}

#[tokio::test]
async fn rerank_with_missing_documents() {
    let server = with_cross_encoder().await;
    let detail = server.post("/rerank", json!({"query": "q"})).await.refused(400);
    assert!(
        detail.contains("'documents'") && detail.contains("required"),
        "{detail}"
    );
}

#[tokio::test]
async fn rerank_with_empty_documents_array() {
    let server = with_cross_encoder().await;
    let answer = server
        .post("/rerank", json!({"query": "q", "documents": []}))
        .await
        .ok();
    assert_eq!(answer, json!({"reranked": []}));
}

#[tokio::test]
async fn rerank_response_format() {
    let server = with_cross_encoder().await;
    let answer = server
        .post("/rerank", json!({"query": "fox", "documents": documents(5)}))
        .await
        .ok();
    assert_eq!(
        answer.as_object().unwrap().keys().collect::<Vec<_>>(),
        ["reranked"]
    );
    let mut ranks = Vec::new();
    for item in answer["reranked"].as_array().unwrap() {
        let mut keys: Vec<&String> = item.as_object().unwrap().keys().collect();
        keys.sort();
        assert_eq!(keys, ["id", "original_rank", "score"]);
        let rank = item["original_rank"].as_u64().unwrap();
        assert_eq!(
            item["id"],
            format!("d{}", rank - 1),
            "the rank is the place in the request, from 1"
        );
        assert!(item["score"].is_f64());
        ranks.push(rank);
    }
    assert!(scores(&answer).is_sorted_by(|a, b| a >= b));
    ranks.sort_unstable();
    assert_eq!(ranks, [1, 2, 3, 4, 5]);
}

/// A model whose weights are not numbers cannot score; the answer and the log say so.
#[tokio::test]
async fn cross_encoder_scoring_error() {
    let setup = Setup::without_models();
    let broken = fixtures::with_weights_that_overflow(
        "cross-bert",
        "bert.encoder.layer.1.output.LayerNorm.weight",
        setup.folder(),
    );
    let server = setup.arg("--cross-encoder-path").arg(broken).start().await;
    let detail = server
        .post("/rerank", json!({"query": "q", "documents": documents(1)}))
        .await
        .refused(500);
    assert!(
        detail.contains("finite") || detail.contains("NaN") || detail.contains("number"),
        "{detail}"
    );
    server.wait_for_log(&detail);
}
