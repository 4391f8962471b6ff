//! The client of our own API: searches, servers of the original make, jobs.

use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::fusion::{FusionWeights, Rank};
use ragstone_core::search::{QueryVector, SearchMode, SearchQuery};
use ragstone_core::siblings::Expand;
use ragstone_core::storage::VectorPrecision;
use ragstone_core::{CollectionName, DocumentId};
use ragstone_providers::ragstone::{
    ContentEncoding, IngestDocument, IngestRequest, JobState, RagstoneClient,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::server::{Reply, Seen, TestServer};

fn name(text: &str) -> CollectionName {
    CollectionName::parse(text).unwrap()
}

fn client(server: &TestServer) -> RagstoneClient {
    RagstoneClient::at(&server.url, None, "--url").unwrap()
}

fn about(text: &str) -> SearchQuery {
    SearchQuery {
        text: Some(text.to_owned()),
        ..SearchQuery::default()
    }
}

#[tokio::test]
async fn a_query_and_its_answer_keep_every_field() {
    let server = TestServer::start(|_, _| {
        Reply::json(json!({
            "results": [{
                "id": "a", "text": "t", "metadata": {"n": 1}, "distance": 0.25, "score": 0.875, "keyword_score": 3.5,
                "rerank_score": 0.75, "original_rank": 2, "siblings": [{"id": "s", "text": "u", "metadata": {}}],
                "explain": {"dense": {"rank": 3, "score": 0.875}, "keyword": {"rank": 1, "score": 3.5},
                    "fused": {"rank": 2, "score": 0.03}, "rerank": {"rank": 1, "score": 0.75}},
                "unknown": {"ignored": true},
            }],
            "collection_metadata": {"m": [1]}, "reranked": true, "warnings": ["w"], "timings_ms": {"dense": 1.5},
        }))
    })
    .await;
    let query = SearchQuery {
        vector: Some(QueryVector::from_client(vec![0.5, 1.0])),
        top_k: 4,
        filter: ragstone_core::Filter::parse(&json!({"n": {"$gt": 0}})).unwrap(),
        ids: Some(vec![DocumentId::parse("a").unwrap()]),
        max_distance: Some(0.5),
        mode: SearchMode::Hybrid,
        weights: FusionWeights {
            dense: 2.0,
            keyword: 1.0,
        },
        rerank: true,
        expand: Some(Expand {
            field: "section".to_owned(),
            max_chars: Some(9),
        }),
        ..about("words")
    };
    let response = client(&server).search(&name("docs"), query).await.unwrap();
    let sent = &server.seen()[0];
    assert_eq!(sent.path(), "/collections/docs/query");
    let expected = json!({
        "query": "words", "query_embedding": [0.5, 1.0], "top_k": 4, "where": {"n": {"$gt": 0}}, "ids": ["a"],
        "max_distance": 0.5, "mode": "hybrid", "weights": {"dense": 2.0, "keyword": 1.0}, "rerank": true,
        "expand": {"field": "section", "max_chars": 9}, "explain": true,
    });
    assert_eq!(sent.json(), expected);

    let hit = &response.hits[0];
    let rank = |rank, score| Some(Rank { rank, score });
    assert_eq!(hit.document.id.as_str(), "a");
    assert_eq!(hit.document.metadata["n"], 1);
    assert_eq!(hit.distance, Some(0.25));
    let ranks = (hit.ranks.dense, hit.ranks.keyword, hit.ranks.fused);
    assert_eq!(ranks, (rank(3, 0.875), rank(1, 3.5), rank(2, 0.03)));
    let reranked = hit.rerank.unwrap();
    assert_eq!((reranked.score, reranked.original_rank), (0.75, 2));
    assert_eq!(hit.siblings.as_ref().unwrap()[0].text, "u");
    assert_eq!(response.collection_metadata["m"], json!([1]));
    assert!(response.reranked);
    assert_eq!(response.warnings, ["w"]);
    assert_eq!(response.timings[0].stage, "dense");
    assert_eq!(response.timings[0].took.as_micros(), 1500);
}

/// Only `POST /query` with the collection in its body, and results without ids.
fn original_make(seen: &Seen) -> Reply {
    match (seen.method.as_str(), seen.path()) {
        ("POST", "/query") => match seen.json()["collection"].as_str() {
            None => Reply::status(400, json!({"detail": "collection is required"})),
            Some("missing") => Reply::status(404, json!({"detail": "Collection missing does not exist"})),
            Some(_) => Reply::json(json!({"results": [
                {"text": "near", "distance": 0.125, "metadata": {"page": 1}},
                {"text": "far", "distance": 0.5, "metadata": null},
            ]})),
        },
        _ => Reply::status(404, json!({"detail": "Not Found"})),
    }
}

#[tokio::test]
async fn a_server_of_the_original_make_can_be_searched() {
    let server = TestServer::start(|seen, _| original_make(seen)).await;
    let client = client(&server);
    let docs = name("docs");
    let first = client.search(&docs, about("q")).await.unwrap();
    let texts: Vec<&str> = first.hits.iter().map(|hit| hit.document.text.as_str()).collect();
    assert_eq!(texts, ["near", "far"]);
    assert_eq!(first.hits[0].distance, Some(0.125));
    assert_eq!(first.hits[0].ranks.dense.unwrap().rank, 1);
    let ids = |hits: &[ragstone_core::search::SearchHit]| -> Vec<String> {
        hits.iter().map(|hit| hit.document.id.to_string()).collect()
    };
    assert!(ids(&first.hits)[0].starts_with("doc_"), "{:?}", ids(&first.hits));
    assert_ne!(ids(&first.hits)[0], ids(&first.hits)[1]);

    let again = client.search(&docs, about("another")).await.unwrap();
    assert_eq!(ids(&again.hits), ids(&first.hits), "ids are stable");
    let paths: Vec<String> = server.seen().iter().map(|seen| seen.path().to_owned()).collect();
    assert_eq!(
        paths,
        ["/collections/docs/query", "/query", "/query"],
        "the kind is remembered"
    );

    let several = client.search_many(&[docs, name("other")], &[about("q")]).await;
    assert!(several.iter().all(Result::is_ok), "{several:?}");
}

#[tokio::test]
async fn several_collections_of_a_server_of_the_original_make_are_searched_one_by_one() {
    let server = TestServer::start(|seen, _| original_make(seen)).await;
    let names = [name("docs"), name("missing"), name("other")];
    let responses = client(&server).search_many(&names, &[about("q")]).await;
    let statuses: Vec<Option<u16>> = responses
        .iter()
        .map(|responses| match responses {
            Ok(_) => None,
            Err(BackendError::Call(error)) => error.status(),
            Err(other) => panic!("{other}"),
        })
        .collect();
    assert_eq!(statuses, [None, Some(404), None]);
}

#[tokio::test]
async fn a_missing_collection_is_not_taken_for_an_unknown_route() {
    let server =
        TestServer::start(|_, _| Reply::status(404, json!({"detail": "Collection 'docs' not found"}))).await;
    let error = client(&server)
        .search(&name("docs"), about("q"))
        .await
        .unwrap_err();
    assert!(matches!(error, BackendError::CollectionNotFound(_)), "{error}");
    assert_eq!(server.seen().len(), 1);

    // Nor is a server without any route for queries.
    let server = TestServer::start(|_, _| Reply::status(404, json!({"detail": "Not Found"}))).await;
    let error = client(&server)
        .search(&name("docs"), about("q"))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, BackendError::Call(error) if error.status() == Some(404)),
        "{error}"
    );
}

#[tokio::test]
async fn words_other_than_the_text_are_sent_where_they_can_be() {
    let server = TestServer::start(|_, _| Reply::json(json!({"results": []}))).await;
    let client = client(&server);
    let vector = || Some(QueryVector::from_client(vec![1.0]));
    for (mode, vector, sent) in [
        (SearchMode::Keyword, None, "words"),
        (SearchMode::Hybrid, vector(), "words"),
        (SearchMode::Hybrid, None, "text"),
        (SearchMode::Dense, None, "text"),
    ] {
        let query = SearchQuery {
            keywords: Some("words".to_owned()),
            mode,
            vector,
            ..about("text")
        };
        client.search(&name("docs"), query).await.unwrap();
        assert_eq!(server.seen().last().unwrap().json()["query"], sent, "{mode:?}");
    }
}

/// Every failure of a read is retried, a plain 500 and a 503 with a reason included.
#[tokio::test]
async fn failed_reads_are_retried_and_failed_writes_are_not() {
    for (status, body) in [
        (500, json!({"detail": "boom"})),
        (503, json!({"detail": "model not loaded"})),
        (502, json!({})),
        (429, json!({})),
    ] {
        let server = TestServer::start(move |seen, before| match (seen.path(), before) {
            ("/health", _) => Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x"}})),
            (_, 0 | 1) => Reply::status(status, body.clone()),
            ("/rerank", _) => Reply::json(json!({"reranked": [{"id": "0", "score": 1}]})),
            ("/collections", _) => Reply::json(json!({"collections": []})),
            _ => Reply::json(json!({"results": []})),
        })
        .await;
        let client = quick_client(&server);
        client.search(&name("docs"), about("q")).await.unwrap();
        assert_eq!(server.seen().len(), 3, "{status}");
    }
    for read in ["rerank", "list"] {
        let server = TestServer::start(move |seen, before| match seen.path() {
            "/health" => Reply::json(json!({"status": "healthy", "cross_encoder": {"model": "x"}})),
            _ if before < 2 => Reply::status(500, json!({"detail": "boom"})),
            "/rerank" => Reply::json(json!({"reranked": [{"id": "0", "score": 1}]})),
            _ => Reply::json(json!({"collections": []})),
        })
        .await;
        let client = quick_client(&server);
        match read {
            "rerank" => assert_eq!(
                client.rerank("q", vec!["t".to_owned()], 1).await.unwrap().len(),
                1
            ),
            _ => assert!(client.collections().await.unwrap().is_empty()),
        }
        assert_eq!(server.seen().len(), 3, "{read}");
    }
    let server = TestServer::start(|_, _| Reply::status(500, json!({"detail": "boom"}))).await;
    let client = quick_client(&server);
    client.delete_collection(&name("docs")).await.unwrap_err();
    client.import(&name("docs"), Vec::new()).await.unwrap_err();
    assert_eq!(server.seen().len(), 2, "each was sent once");
}

fn quick_client(server: &TestServer) -> RagstoneClient {
    let policy = crate::common::quick();
    let timeout = policy.deadline;
    RagstoneClient::new(crate::common::client(&server.url, policy), timeout)
}

#[derive(Deserialize)]
struct Chunks {
    chunks: Value,
}

#[tokio::test]
async fn jobs_are_submitted_followed_and_cancelled() {
    let server = TestServer::start(|seen, _| match (seen.method.as_str(), seen.path()) {
        ("POST", "/collections/docs/ingest") => Reply::json(json!({"id": "j1", "state": "queued"})),
        ("GET", "/jobs/j1") => {
            Reply::json(json!({"id": "j1", "state": "running", "collection": "docs", "chunks": {"added": 7}}))
        }
        ("DELETE", "/jobs/j1") => Reply::json(json!({"id": "j1", "state": "cancelled"})),
        ("GET", "/health") => Reply::json(json!({"status": "healthy", "store": {"rounds_vectors": true},
            "embedding_models": [{"id": "m", "name": "M"}, {"id": "n"}]})),
        _ => Reply::status(404, json!({})),
    })
    .await;
    let client = client(&server);
    let request = IngestRequest {
        documents: vec![IngestDocument {
            name: "a.md".to_owned(),
            media_type: "text/markdown",
            encoding: ContentEncoding::Base64,
            content: "IyBB".to_owned(),
        }],
        chunk_tokens: None,
    };
    let id = client.ingest(&name("docs"), &request).await.unwrap();
    let sent = server.seen()[0].json();
    assert_eq!(
        sent,
        json!({"documents": [{"name": "a.md", "media_type": "text/markdown", "encoding": "base64", "content": "IyBB"}]})
    );
    let job = client.job::<Chunks>(&id).await.unwrap();
    assert_eq!((job.state, job.error), (JobState::Running, None));
    assert_eq!(job.report.chunks["added"], 7);
    client.cancel_job(&id).await.unwrap();
    assert_eq!(client.embedding_models().await.unwrap(), ["m", "n"]);
    assert_eq!(client.vector_precision().await.unwrap(), VectorPrecision::Rounded);
}
