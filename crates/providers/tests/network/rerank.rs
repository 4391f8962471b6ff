//! Cross-encoder reranking by a service, and what happens when it cannot.

use ragstone_core::provider::{ProviderAnswer, ProviderQuery};
use ragstone_core::{CollectionName, Metadata};
use serde_json::{Value, json};

use crate::common::server::{Reply, Seen, TestServer, refusing_url};
use crate::common::{connect, service};

fn documents() -> Vec<Metadata> {
    [
        json!({"id": "a", "text": "short", "metadata": {"deep": [1]}, "distance": 0.1}),
        json!({"text": "the longest text of all of them", "score": 0.5}),
        json!({"id": "c", "text": "middle length", "anything": null}),
    ]
    .into_iter()
    .map(|d| d.as_object().unwrap().clone())
    .collect()
}

fn provider(url: &str) -> std::sync::Arc<dyn ragstone_core::provider::RagProvider> {
    connect(
        json!({"provider": "chromadb-wrapper", "url": url, "auth": {"type": "bearer", "token": "tok-en-1"},
        "retry": {"maxAttempts": 2, "delayMs": 1}}),
    )
}

#[tokio::test]
async fn successful_reranking_call() {
    let server = service::start(true).await;
    let outcome = provider(&server.url).rerank("q", documents(), None).await;
    assert_eq!(outcome.warning, None);
    let ranks: Vec<&Value> = outcome.documents.iter().map(|d| &d["original_rank"]).collect();
    assert_eq!(ranks, [2, 3, 1]);
    assert_eq!(outcome.documents[0]["rerank_score"], 31.0);
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
    assert_eq!(sent["documents"][0], json!({"id": "a", "text": "short"}));
    assert!(sent.get("top_k").is_none());
}

#[tokio::test]
async fn reranking_preserves_document_structure() {
    let server = service::start(true).await;
    let outcome = provider(&server.url).rerank("q", documents(), None).await;
    let mut last = outcome.documents[2].clone();
    last.remove("rerank_score");
    last.remove("original_rank");
    assert_eq!(last, documents()[0]);
}

#[tokio::test]
async fn generate_fallback_document_ids() {
    let server = service::start(true).await;
    let outcome = provider(&server.url).rerank("q", documents(), None).await;
    let sent = server.seen()[1].json();
    assert!(!sent["documents"][1]["id"].as_str().unwrap().is_empty());
    assert!(
        outcome.documents[0].get("id").is_none(),
        "the document itself stays as it was"
    );
}

#[tokio::test]
async fn optional_top_k_parameter() {
    let server = service::start(true).await;
    let outcome = provider(&server.url).rerank("q", documents(), Some(2)).await;
    assert_eq!(outcome.documents.len(), 2);
    assert_eq!(server.seen()[1].json()["top_k"], 2);
}

/// A server of other make may not know `top_k`.
#[tokio::test]
async fn more_documents_than_were_asked_for_are_cut() {
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
    let outcome = provider(&server.url).rerank("q", documents(), Some(2)).await;
    assert_eq!(outcome.warning, None);
    let ranks: Vec<&Value> = outcome.documents.iter().map(|d| &d["original_rank"]).collect();
    assert_eq!(ranks, [3, 2]);
}

/// Answers searches as if nothing but the query were asked for.
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

fn asking(text: Option<&str>, rerank: bool) -> ProviderQuery {
    ProviderQuery {
        text: text.map(str::to_owned),
        vector: text.is_none().then(|| vec![1.0]),
        top_k: 3,
        max_distance: Some(0.5),
        options: json!({ "rerank": rerank }).as_object().unwrap().clone(),
        ..ProviderQuery::default()
    }
}

#[tokio::test]
async fn what_a_server_does_not_heed_is_done_here() {
    let server = heedless(true).await;
    let provider = provider(&server.url);
    let name = CollectionName::parse("c").unwrap();
    let ids = |answer: &ProviderAnswer| -> Vec<String> {
        answer
            .hits
            .iter()
            .map(|hit| hit.document.id.to_string())
            .collect()
    };
    let plain = provider.search(&name, asking(Some("q"), false)).await.unwrap();
    assert_eq!(ids(&plain), ["a", "bb", "cccc"]);
    assert!(!plain.extra.contains_key("reranked"));

    let reranked = provider.search(&name, asking(Some("q"), true)).await.unwrap();
    assert_eq!(
        ids(&reranked),
        ["cccc", "ddd", "bb"],
        "those within the distance, then the best"
    );
    assert_eq!(reranked.extra["reranked"], true);
    assert_eq!(reranked.hits[0].extra["rerank_score"], 4.0);
    assert_eq!(reranked.hits[0].extra["original_rank"], 3);
    assert!(reranked.warnings.is_empty(), "{:?}", reranked.warnings);

    let names = [name.clone(), CollectionName::parse("d").unwrap()];
    let several = provider.search_several(&names, asking(Some("q"), false)).await;
    assert_eq!(ids(several[0].as_ref().unwrap()), ["a", "bb", "cccc"]);
}

#[tokio::test]
async fn a_search_that_cannot_be_reranked_says_so() {
    let name = CollectionName::parse("c").unwrap();
    for (cross_encoder, text, reason) in [(false, Some("q"), "cross-encoder"), (true, None, "'query'")] {
        let server = heedless(cross_encoder).await;
        let answer = provider(&server.url)
            .search(&name, asking(text, true))
            .await
            .unwrap();
        assert_eq!(answer.hits.len(), 3);
        assert_eq!(answer.extra["reranked"], false);
        assert!(answer.warnings[0].contains(reason), "{:?}", answer.warnings);
    }
}

#[tokio::test]
async fn health_check_shows_no_cross_encoder() {
    let server = service::start(false).await;
    let outcome = provider(&server.url).rerank("q", documents(), Some(1)).await;
    assert_eq!(outcome.documents, documents());
    assert!(outcome.warning.unwrap().contains("cross-encoder"));
    assert_eq!(server.seen().len(), 1, "only the health was asked for");
}

#[tokio::test]
async fn rag_service_unreachable() {
    let outcome = provider(&refusing_url().await)
        .rerank("q", documents(), Some(1))
        .await;
    assert_eq!(outcome.documents, documents());
    assert!(outcome.warning.unwrap().contains("cannot be reached"));
}

#[tokio::test]
async fn rerank_endpoint_returns_error() {
    let wrong = |body: Value| move || Reply::json(body.clone());
    let replies: Vec<Box<dyn Fn() -> Reply + Send + Sync>> = vec![
        Box::new(|| Reply::status(503, json!({"detail": "Cross-encoder not loaded."}))),
        Box::new(|| Reply::status(500, json!({"detail": "boom"}))),
        Box::new(|| Reply::CutShort),
        Box::new(wrong(json!({"nothing": 1}))),
        Box::new(wrong(json!({"reranked": [{"id": "a", "score": 1}]}))),
        Box::new(wrong(
            json!({"reranked": [{"id": "a", "score": 1}, {"id": "a", "score": 1}, {"id": "c", "score": 1}]}),
        )),
    ];
    for reply in replies {
        let server = TestServer::start(move |seen, _| match seen.path() {
            "/health" => {
                Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x", "status": "loaded"}}))
            }
            _ => reply(),
        })
        .await;
        let outcome = provider(&server.url).rerank("q", documents(), None).await;
        assert_eq!(outcome.documents, documents());
        assert!(outcome.warning.is_some());
    }
}

#[tokio::test]
async fn what_a_service_says_of_its_failure_is_not_repeated() {
    for broken in ["/health", "/rerank"] {
        let server = TestServer::start(move |seen, _| {
            if seen.path() == broken {
                Reply::status(500, json!({"detail": "table x of db at 10.1"}))
            } else {
                Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x"}}))
            }
        })
        .await;
        let outcome = provider(&server.url).rerank("q", documents(), None).await;
        assert_eq!(outcome.documents, documents());
        let warning = outcome.warning.unwrap();
        assert!(
            warning.contains("status 500") && !warning.contains("table"),
            "{warning}"
        );
    }
}

#[tokio::test]
async fn a_service_that_calls_itself_unhealthy_is_not_asked() {
    let server = TestServer::start(|_, _| {
        Reply::json(json!({"status": "unhealthy", "cross_encoder": {"model": "x"}}))
    })
    .await;
    let outcome = provider(&server.url).rerank("q", documents(), None).await;
    assert!(outcome.warning.unwrap().contains("unhealthy"));
    assert_eq!(server.seen().len(), 1, "only the health was asked for");
}
