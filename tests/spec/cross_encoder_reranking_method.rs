//! Requirement: Cross-Encoder Reranking Method, seen through the gateway.

use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};

use crate::support::{Server, Setup, documents, fixtures, ids};

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
    (in_front_of(&far.url("")).await, far)
}

async fn in_front_of(url: &str) -> Server {
    in_front_of_with_timeout(url, 60_000).await
}

async fn in_front_of_with_timeout(url: &str, milliseconds: u32) -> Server {
    let yaml = format!(
        "services: {{far: {{provider: chromadb-wrapper, url: {url:?}, timeoutMs: {milliseconds}, retry: {{maxAttempts: 1}}}}}}"
    );
    Setup::without_models().config(&yaml).start().await
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
    near.wait_for_log("reranking failed");
}

/// The search is answered, and only then does the connection fail.
#[tokio::test]
async fn rag_service_unreachable() {
    for (health, timeout) in [(HealthCheck::Cut, 60_000), (HealthCheck::Hangs, 5_000)] {
        let (url, sent) = service(health, StatusCode::OK).await;
        let near = in_front_of_with_timeout(&url, timeout).await;
        let answer = collect_two(&near).await;
        assert_eq!(
            ids(&answer["results"]),
            ["same", "same", "other", "other"],
            "{health:?}: {answer}"
        );
        assert_eq!(answer["results"][0]["metadata"], json!({"n": 1}));
        assert!(answer["results"][0].get("rerank_score").is_none(), "{answer}");
        assert_eq!(answer["reranked"], false);
        let warnings = answer["warnings"].as_array().unwrap();
        assert!(
            warnings
                .iter()
                .any(|warning| warning.as_str().unwrap().contains("far")),
            "{health:?}: {answer}"
        );
        let line = near.wait_for_log("reranking failed");
        assert!(line.contains("far"), "{line}");
        assert_eq!(sent.lock().unwrap().len(), 0, "nothing is sent to /rerank");
    }
}

#[tokio::test]
async fn a_service_that_is_gone_leaves_the_documents_of_others_as_they_are() {
    let (near, far) = reranking(with_cross_encoder()).await;
    drop(far);
    near.create("here").await;
    near.add("here", documents(3, |n| json!({"n": n}))).await;
    let collections = json!([{"service": "far", "name": "c"}, {"service": "local", "name": "here"}]);
    let body =
        json!({"user_message": "number 2", "mode": "keyword", "collections": collections, "rerank": true});
    let answer = near.post("/api/rag/collect", body).await.ok();
    assert_eq!(answer["reranked"], false);
    assert_eq!(ids(&answer["results"])[0], "d2", "{answer}");
    assert_eq!(ids(&answer["results"]).len(), 3, "{answer}");
    assert!(
        answer["warnings"][0].as_str().unwrap().contains("far"),
        "{answer}"
    );
}

#[derive(Debug, Clone, Copy)]
enum HealthCheck {
    Healthy,
    /// The connection ends within the answer.
    Cut,
    /// No answer ever comes.
    Hangs,
}

impl HealthCheck {
    async fn answer(self) -> Response {
        match self {
            Self::Healthy => {
                let cross_encoder = json!({"model": "m", "status": "loaded"});
                Json(json!({"status": "healthy", "cross_encoder": cross_encoder})).into_response()
            }
            Self::Cut => {
                let broken = futures::stream::once(async { Err::<String, _>(std::io::Error::other("cut")) });
                Body::from_stream(broken).into_response()
            }
            Self::Hangs => std::future::pending().await,
        }
    }
}

/// A service whose collections all have the same two documents, and which answers calls of /rerank with
/// this status. The bodies of these calls are kept.
async fn service(health: HealthCheck, status: StatusCode) -> (String, Arc<Mutex<Vec<Value>>>) {
    let sent: Arc<Mutex<Vec<Value>>> = Arc::default();
    let kept = Arc::clone(&sent);
    let reranked = move |Json(body): Json<Value>| async move {
        let entry = |(rank, document): (usize, &Value)| json!({"id": document["id"], "score": rank, "original_rank": rank + 1});
        let documents = body["documents"].as_array().cloned().unwrap_or_default();
        let answer: Vec<Value> = documents.iter().enumerate().map(entry).rev().collect();
        kept.lock().unwrap().push(body);
        if status == StatusCode::OK {
            Json(json!({"reranked": answer})).into_response()
        } else {
            (status, Json(json!({"detail": "the model is on fire"}))).into_response()
        }
    };
    let hits = || json!([{"id": "same", "text": "one", "metadata": {"n": 1}, "distance": 0.1}, {"id": "other", "text": "two", "metadata": {}, "distance": 0.2}]);
    let router = Router::new()
        .route("/health", get(move || health.answer()))
        .route(
            "/collections/{name}/query",
            post(move |Path(_): Path<String>| async move {
                Json(json!({"results": hits(), "collection_metadata": {}}))
            }),
        )
        .route("/rerank", post(reranked));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    (format!("http://{address}"), sent)
}

async fn collect_two(near: &Server) -> Value {
    let collections = json!([{"service": "far", "name": "a"}, {"service": "far", "name": "b"}]);
    let body = json!({"user_message": "which?", "collections": collections, "rerank": true, "top_k": 4});
    near.post("/api/rag/collect", body).await.ok()
}

/// Documents of two collections may have the same id.
#[tokio::test]
async fn generate_fallback_document_ids() {
    let (url, sent) = service(HealthCheck::Healthy, StatusCode::OK).await;
    let near = in_front_of(&url).await;
    let answer = collect_two(&near).await;
    assert_eq!(answer["reranked"], true, "{answer}");
    let call = sent.lock().unwrap()[0].clone();
    assert_eq!(call["query"], "which?");
    let mut made = ids(&call["documents"]);
    made.sort_unstable();
    made.dedup();
    assert_eq!(made.len(), 4, "one id for each document: {call}");
    assert!(made.iter().all(|id| !id.is_empty()), "{call}");
    let texts: Vec<&str> = call["documents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|document| document["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, ["one", "one", "two", "two"]);
    // The stub reverses the order; the results have their original ids.
    assert_eq!(ids(&answer["results"]), ["other", "other", "same", "same"]);
    assert_eq!(answer["results"][3]["collection"], "a");
}

#[tokio::test]
async fn rerank_endpoint_returns_error() {
    for status in [
        StatusCode::SERVICE_UNAVAILABLE,
        StatusCode::INTERNAL_SERVER_ERROR,
        StatusCode::NOT_FOUND,
    ] {
        let (url, sent) = service(HealthCheck::Healthy, status).await;
        let near = in_front_of(&url).await;
        let answer = collect_two(&near).await;
        assert_eq!(sent.lock().unwrap().len(), 1, "it was asked");
        assert_eq!(answer["reranked"], false);
        assert_eq!(
            ids(&answer["results"]),
            ["same", "same", "other", "other"],
            "{answer}"
        );
        assert!(answer["results"][0].get("rerank_score").is_none());
        let line = near.wait_for_log("reranking failed");
        assert!(line.contains(&status.as_u16().to_string()), "{line}");
        let warned = answer["warnings"].as_array().unwrap();
        assert!(
            warned
                .iter()
                .any(|warning| warning.as_str().unwrap().contains(&status.as_u16().to_string())),
            "{answer}"
        );
    }
}
