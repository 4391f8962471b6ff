//! An operation of many calls has one deadline.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::call::CallError;
use ragstone_core::document::NewDocument;
use ragstone_core::storage::{Page, Storage, StorageError, StorageQuery};
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use ragstone_providers::http::within;

use crate::common::server::{Reply, Seen, TestServer};
use crate::common::{backend, storage};

/// Far longer than the deadline: only what never ends takes it.
const LONG: Duration = Duration::from_secs(60);

fn config(provider: &str, server: &TestServer) -> Value {
    json!({"provider": provider, "url": server.url, "timeoutMs": 1500, "retry": {"maxAttempts": 1}})
}

fn ragstone(server: &TestServer) -> Arc<dyn Backend> {
    backend(config("chromadb-wrapper", server))
}

fn chroma(server: &TestServer) -> Arc<dyn Storage> {
    storage(config("chromadb", server))
}

fn assert_deadline<T>(outcome: Result<T, BackendError>) {
    let error = outcome.err().expect("there is no end to read to");
    assert!(
        matches!(&error, BackendError::Call(CallError::DeadlineExceeded { after, .. }) if after.as_millis() == 1500),
        "{error}"
    );
}

fn collection(n: usize) -> Value {
    json!({"id": format!("id-{n}"), "name": format!("name-{n}"), "metadata": {}, "dimension": 3})
}

/// Whatever page is asked for, it is full.
fn endless(seen: &Seen) -> Reply {
    let asked = seen.json();
    match asked["limit"].as_u64() {
        Some(limit) => {
            let ids: Vec<String> = (0..limit).map(|n| n.to_string()).collect();
            let nothing = vec![Value::Null; ids.len()];
            Reply::json(json!({"ids": ids, "metadatas": nothing, "documents": nothing}))
        }
        None if seen.path().ends_with("/documents") => {
            let documents: Vec<Value> = (0..1000).map(|n| json!({"id": n.to_string()})).collect();
            Reply::json(json!({"documents": documents, "total": u64::MAX}))
        }
        None if seen.path().ends_with("/count") => Reply::json(json!(1_000_000_000_u64)),
        None => Reply::json(collection(0)),
    }
}

#[tokio::test]
async fn pages_without_end_cost_the_deadline_and_no_more() {
    let server = TestServer::start(|seen, _| endless(seen)).await;
    let name = CollectionName::parse("name-0").unwrap();
    let all = Filter::default();
    let page = Page {
        limit: 1_000_000_000,
        offset: 0,
    };
    let client = ragstone(&server);
    let read = tokio::time::timeout(LONG, client.documents(&name, &all, page));
    assert_deadline(read.await.expect("an end"));
    let chroma = chroma(&server);
    let read = tokio::time::timeout(LONG, chroma.documents(&name, &all, page));
    assert_deadline(read.await.expect("an end").map_err(BackendError::from));
    let read = tokio::time::timeout(LONG, chroma.metadata_values(&name, "field"));
    assert_deadline(read.await.expect("an end").map_err(BackendError::from));
    let words = StorageQuery {
        text: Some("word".to_owned()),
        limit: 1,
        ..StorageQuery::default()
    };
    let read = tokio::time::timeout(LONG, chroma.search(&name, words)).await;
    assert!(
        matches!(read.expect("an end"), Err(StorageError::Unsupported(_))),
        "a collection of a billion documents is not read"
    );
    // A service that answers every call is none that fails.
    for _ in 0..6 {
        chroma.collection(&name).await.unwrap();
    }
}

/// Whoever asks many services waits for none as long as it may take, and a service that hangs is left
/// alone all the same.
#[tokio::test]
async fn a_caller_with_less_patience_finds_a_service_out() {
    let server = TestServer::start(|_, _| Reply::Hang).await;
    let provider =
        backend(json!({"provider": "chromadb-wrapper", "url": server.url, "retry": {"maxAttempts": 1}}));
    let patience = Duration::from_millis(200);
    for _ in 0..5 {
        let listed = tokio::time::timeout(LONG, within(patience, provider.collections()));
        let error = listed.await.expect("an end").unwrap_err();
        assert!(
            matches!(&error, BackendError::Call(CallError::DeadlineExceeded { after, .. }) if *after == patience),
            "{error}"
        );
    }
    let error = provider.collections().await.unwrap_err();
    assert!(
        matches!(error, BackendError::Call(CallError::CircuitOpen { .. })),
        "{error}"
    );
}

/// One operation after another, and the patience is for all of them.
#[tokio::test]
async fn patience_is_for_all_operations_together() {
    let server = TestServer::start(|_, _| Reply::Hang).await;
    let provider = ragstone(&server);
    let all = within(Duration::from_millis(200), async {
        provider.collections().await.unwrap_err();
        // What is left no time does not count against the service.
        for _ in 0..10 {
            provider.collections().await.unwrap_err();
        }
    });
    tokio::time::timeout(LONG, all).await.expect("an end");
    let asked = tokio::time::timeout(LONG, within(Duration::from_millis(200), provider.collections()));
    let error = asked.await.expect("an end").unwrap_err();
    assert!(
        matches!(error, BackendError::Call(CallError::DeadlineExceeded { .. })),
        "{error}"
    );
}

/// Each count is held back until another one is asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn collections_are_counted_at_the_same_time() {
    let counting = (Mutex::new(0_usize), Condvar::new());
    let server = TestServer::start(move |seen, _| {
        if !seen.path().ends_with("/count") {
            return Reply::json((0..12).map(collection).collect());
        }
        let (asked, changed) = &counting;
        let mut asked = asked.lock().unwrap();
        *asked += 1;
        changed.notify_all();
        let (asked, _) = changed
            .wait_timeout_while(asked, LONG, |asked| *asked < 2)
            .unwrap();
        Reply::json(json!(*asked))
    })
    .await;
    let listed = chroma(&server).collections().await.unwrap();
    let names: Vec<&str> = listed.iter().map(|collection| collection.name.as_str()).collect();
    assert_eq!(names.len(), 12);
    assert!(names.is_sorted(), "{names:?}");
}

/// The service takes three times its deadline to embed a long text, which is less than such a text is
/// given. It never answers anything else.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn what_a_service_has_to_embed_has_time_by_its_length() {
    let server = TestServer::start(|seen, _| {
        let document = &seen.json()["documents"][0];
        let is_short = document["text"].as_str().is_none_or(|text| text.len() < 1000);
        if is_short || !document["embedding"].is_null() {
            return Reply::Hang;
        }
        std::thread::sleep(Duration::from_millis(900));
        Reply::json(json!({"ids": ["a"]}))
    })
    .await;
    let provider = backend(json!({
        "provider": "chromadb-wrapper", "url": server.url, "timeoutMs": 300, "retry": {"maxAttempts": 1},
    }));
    let name = CollectionName::parse("c").unwrap();
    let add = |text: String, embedding| {
        let document = Document {
            id: DocumentId::parse("a").unwrap(),
            text,
            metadata: Metadata::new(),
        };
        provider.add_documents(&name, vec![NewDocument { document, embedding }])
    };
    let long = "x".repeat(60 << 10);
    assert_eq!(add(long.clone(), None).await.unwrap().ids.len(), 1);
    for (text, embedding) in [("short".to_owned(), None), (long, Some(vec![1.0]))] {
        let error = add(text, embedding).await.unwrap_err();
        assert!(
            matches!(error, BackendError::Call(CallError::DeadlineExceeded { .. })),
            "{error}"
        );
    }
}
