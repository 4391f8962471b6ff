//! Cross-encoder reranking by a service, and its failures.

use ragstone_core::CollectionName;
use ragstone_core::backend::{Backend, BackendError, RankedText};
use ragstone_core::search::{QueryVector, RerankedFrom, SearchQuery, SearchResponse};
use serde_json::{Value, json};

use crate::common::server::{Reply, Seen, TestServer, refusing_url};
use crate::common::{backend, service};

const TEXTS: [&str; 3] = ["short", "the longest text of all of them", "middle length"];

fn texts() -> Vec<String> {
    TEXTS.map(str::to_owned).to_vec()
}

fn connected(url: &str) -> std::sync::Arc<dyn Backend> {
    backend(
        json!({"provider": "chromadb-wrapper", "url": url, "auth": {"type": "bearer", "token": "tok-en-1"},
        "retry": {"maxAttempts": 2, "delayMs": 1}}),
    )
}

fn indices(ranked: &[RankedText]) -> Vec<usize> {
    ranked.iter().map(|text| text.index).collect()
}

#[tokio::test]
async fn successful_reranking_call() {
    let server = service::start(true).await;
    let ranked = connected(&server.url).rerank("q", texts(), 3).await.unwrap();
    assert_eq!(indices(&ranked), [1, 2, 0]);
    assert_eq!(ranked[0].score, 31.0);
    let seen = server.seen();
    assert_eq!(
        seen.iter().map(Seen::path).collect::<Vec<_>>(),
        ["/health", "/rerank"]
    );
    assert!(
        seen.iter()
            .all(|s| s.header("authorization") == Some("Bearer tok-en-1"))
    );
    let sent = seen[1].json();
    assert_eq!(sent["query"], "q");
    assert_eq!(sent["documents"][2]["text"], "middle length");
    assert!(sent.get("top_k").is_none());
}

#[tokio::test]
async fn generate_fallback_document_ids() {
    let server = service::start(true).await;
    let same = vec!["same".to_owned(); 3];
    let ranked = connected(&server.url).rerank("q", same, 3).await.unwrap();
    let sent = server.seen()[1].json();
    let ids: std::collections::HashSet<&str> = sent["documents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|document| document["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids.len(), 3, "{sent}");
    assert_eq!(indices(&ranked).len(), 3);
}

#[tokio::test]
async fn optional_top_k_parameter() {
    let server = service::start(true).await;
    let ranked = connected(&server.url).rerank("q", texts(), 2).await.unwrap();
    assert_eq!(indices(&ranked), [1, 2]);
    assert_eq!(server.seen()[1].json()["top_k"], 2);
}

/// A server of other make may not know `top_k`.
#[tokio::test]
async fn more_documents_than_requested_are_cut() {
    let server = TestServer::start(|seen, _| match seen.path() {
        "/health" => Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x"}})),
        _ => {
            let sent = seen.json()["documents"].as_array().unwrap().clone();
            let ranked: Vec<Value> = sent
                .iter()
                .rev()
                .enumerate()
                .map(|(rank, document)| json!({"id": document["id"], "score": 9 - rank}))
                .collect();
            Reply::json(json!({ "reranked": ranked }))
        }
    })
    .await;
    let ranked = connected(&server.url).rerank("q", texts(), 2).await.unwrap();
    assert_eq!(indices(&ranked), [2, 1]);
}

/// Answers searches as if nothing but the query had been given.
async fn heedless(cross_encoder: bool) -> TestServer {
    TestServer::start(move |seen, _| match seen.path() {
        "/health" if cross_encoder => {
            Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x"}}))
        }
        "/health" => Reply::json(json!({"status": "healthy"})),
        "/rerank" => {
            let sent = seen.json()["documents"].as_array().unwrap().clone();
            let by_length = |d: &Value| json!({"id": d["id"], "score": d["text"].as_str().unwrap().len()});
            let mut ranked: Vec<Value> = sent.iter().map(by_length).collect();
            ranked.sort_by_key(|entry| std::cmp::Reverse(entry["score"].as_u64()));
            Reply::json(json!({ "reranked": ranked }))
        }
        path => {
            let hit = |id: &str, distance: f64| json!({"id": id, "text": id, "distance": distance, "collection": "c"});
            let hits = [hit("a", 0.1), hit("bb", 0.2), hit("cccc", 0.3), hit("ddd", 0.4), hit("eeeee", 0.9)];
            assert!(path.ends_with("/query"), "{path}");
            Reply::json(json!({"results": hits, "collection_metadata": {}}))
        }
    })
    .await
}

fn asking(text: Option<&str>, rerank: bool) -> SearchQuery {
    SearchQuery {
        text: text.map(str::to_owned),
        vector: text.is_none().then(|| QueryVector::from_client(vec![1.0])),
        top_k: 3,
        max_distance: Some(0.5),
        rerank,
        ..SearchQuery::default()
    }
}

#[tokio::test]
async fn fields_that_a_server_ignores_are_applied_here() {
    let server = heedless(true).await;
    let backend = connected(&server.url);
    let name = CollectionName::parse("c").unwrap();
    let ids = |response: &SearchResponse| -> Vec<String> {
        let hits = response.hits.iter();
        hits.map(|hit| hit.document.id.to_string()).collect()
    };
    let plain = backend.search(&name, asking(Some("q"), false)).await.unwrap();
    assert_eq!(ids(&plain), ["a", "bb", "cccc"]);
    assert!(!plain.reranked);
    let ranks = plain.hits.iter().map(|hit| hit.ranks.dense.unwrap().rank);
    assert!(ranks.eq(1..=3), "{plain:?}");

    let reranked = backend.search(&name, asking(Some("q"), true)).await.unwrap();
    assert_eq!(
        ids(&reranked),
        ["cccc", "ddd", "bb"],
        "those within the distance, then the best"
    );
    assert!(reranked.reranked);
    let from = RerankedFrom {
        score: 4.0,
        original_rank: 3,
    };
    assert_eq!(reranked.hits[0].rerank, Some(from));
    assert_eq!(reranked.hits[0].ranks.dense.unwrap().rank, 3);
    assert!(reranked.warnings.is_empty(), "{:?}", reranked.warnings);

    let names = [name.clone(), CollectionName::parse("d").unwrap()];
    let several = backend.search_many(&names, &[asking(Some("q"), false)]).await;
    assert_eq!(ids(&several[0].as_ref().unwrap()[0]), ["a", "bb", "cccc"]);
}

#[tokio::test]
async fn a_search_that_cannot_be_reranked_has_a_warning() {
    let name = CollectionName::parse("c").unwrap();
    for (cross_encoder, text, reason) in [(false, Some("q"), "cross-encoder"), (true, None, "'query'")] {
        let server = heedless(cross_encoder).await;
        let response = connected(&server.url)
            .search(&name, asking(text, true))
            .await
            .unwrap();
        assert_eq!(response.hits.len(), 3);
        assert!(!response.reranked);
        assert!(response.warnings[0].contains(reason), "{:?}", response.warnings);
    }
}

#[tokio::test]
async fn health_check_shows_no_cross_encoder() {
    let server = service::start(false).await;
    let error = connected(&server.url).rerank("q", texts(), 1).await.unwrap_err();
    assert!(matches!(error, BackendError::NoReranker), "{error}");
    assert_eq!(server.seen().len(), 1, "only the health was requested");
}

#[tokio::test]
async fn rag_service_unreachable() {
    let backend = connected(&refusing_url().await);
    let error = backend.rerank("q", texts(), 1).await.unwrap_err();
    assert!(error.public().contains("cannot be reached"), "{error}");
}

#[tokio::test]
async fn rerank_endpoint_returns_error() {
    let wrong = |body: Value| move || Reply::json(body.clone());
    let entry = |id: &str| json!({"id": id, "score": 1});
    let replies: Vec<Box<dyn Fn() -> Reply + Send + Sync>> = vec![
        Box::new(|| Reply::status(503, json!({"detail": "Cross-encoder not loaded."}))),
        Box::new(|| Reply::status(500, json!({"detail": "boom"}))),
        Box::new(|| Reply::CutShort),
        Box::new(wrong(json!({"nothing": 1}))),
        Box::new(wrong(json!({"reranked": [entry("0")]}))),
        Box::new(wrong(json!({"reranked": [entry("0"), entry("0"), entry("2")]}))),
        Box::new(wrong(json!({"reranked": [entry("0"), entry("1"), entry("3")]}))),
    ];
    for reply in replies {
        let server = TestServer::start(move |seen, _| match seen.path() {
            "/health" => {
                Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x", "status": "loaded"}}))
            }
            _ => reply(),
        })
        .await;
        let error = connected(&server.url).rerank("q", texts(), 3).await.unwrap_err();
        assert!(matches!(error, BackendError::Call(_)), "{error}");
    }
}

#[tokio::test]
async fn the_details_of_a_failure_are_not_public() {
    for broken in ["/health", "/rerank"] {
        let server = TestServer::start(move |seen, _| {
            if seen.path() == broken {
                Reply::status(500, json!({"detail": "table x of db at 10.1"}))
            } else {
                Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x"}}))
            }
        })
        .await;
        let error = connected(&server.url).rerank("q", texts(), 3).await.unwrap_err();
        let shown = error.public();
        assert!(
            shown.contains("status 500") && !shown.contains("table"),
            "{shown}"
        );
        assert!(error.to_string().contains("table x"), "the log has them: {error}");
    }
}

#[tokio::test]
async fn an_unhealthy_service_is_not_asked() {
    let server = TestServer::start(|_, _| {
        Reply::json(json!({"status": "unhealthy", "cross_encoder": {"model": "x"}}))
    })
    .await;
    let error = connected(&server.url).rerank("q", texts(), 3).await.unwrap_err();
    assert!(error.public().contains("unhealthy"), "{error}");
    assert_eq!(server.seen().len(), 1, "only the health was requested");
}
