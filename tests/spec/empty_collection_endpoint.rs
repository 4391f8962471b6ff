//! Requirement: Empty Collection Endpoint

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::support::{Server, Setup, documents, plain, vector};

const ALL: &str = "/collections/test-collection/documents/all";

#[tokio::test]
async fn empty_collection_with_documents() {
    let server = plain().await;
    server
        .post(
            "/collections",
            json!({"name": "test-collection", "metadata": {"kept": true}}),
        )
        .await
        .ok();
    server
        .add("test-collection", documents(100, |n| json!({"n": n})))
        .await;
    let emptied = server.delete(ALL).await.ok();
    assert_eq!(
        emptied,
        json!({"status": "emptied", "collection": "test-collection", "count_deleted": 100})
    );
    let collection = server.get("/collections/test-collection").await.ok();
    assert_eq!(
        collection,
        json!({"name": "test-collection", "count": 0, "metadata": {"kept": true}})
    );
    let left = server.get("/collections/test-collection/documents").await.ok();
    assert_eq!(left, json!({"documents": [], "count": 0, "total": 0}));
}

#[tokio::test]
async fn empty_already_empty_collection() {
    let server = plain().await;
    server.create("test-collection").await;
    let emptied = server.delete(ALL).await.ok();
    assert_eq!(
        emptied,
        json!({"status": "emptied", "collection": "test-collection", "count_deleted": 0})
    );
}

#[tokio::test]
async fn empty_non_existent_collection() {
    let server = plain().await;
    let detail = server
        .delete("/collections/missing-collection/documents/all")
        .await
        .refused(404);
    assert_eq!(detail, "Collection 'missing-collection' not found");
}

#[tokio::test]
async fn empty_large_collection() {
    let server = plain().await;
    server.create("large-collection").await;
    for part in 0..5 {
        let documents: Vec<Value> = (0..10_000)
            .map(|n| {
                let n = part * 10_000 + n;
                json!({"id": format!("d{n}"), "text": format!("text {n}"), "metadata": {"n": n % 100}, "embedding": vector(n)})
            })
            .collect();
        server.add("large-collection", documents).await;
    }
    let emptied = server
        .delete("/collections/large-collection/documents/all")
        .await
        .ok();
    assert_eq!(emptied["count_deleted"], 50_000);
    assert_eq!(server.get("/collections/large-collection").await.ok()["count"], 0);
}

/// The second fault strikes when all documents are already gone.
#[tokio::test]
async fn empty_operation_is_transactional() {
    for fault in [
        "AFTER DELETE ON collections WHEN old.name = 'c'",
        "AFTER INSERT ON collections WHEN new.name = 'c'",
    ] {
        let server = Setup::serve_embedded().arg("--no-embeddings").start().await;
        server.create("c").await;
        server.add("c", documents(300, |n| json!({"n": n}))).await;
        // FAIL keeps the changes that were made so far, unlike ABORT: only a rollback undoes them.
        let trigger = format!("CREATE TRIGGER fault {fault} BEGIN SELECT RAISE(FAIL, 'injected'); END");
        let server = with_schema_change(server, &trigger).await;
        let refused = server.delete("/collections/c/documents/all").await;
        assert_eq!(refused.status, 500, "{fault}: {refused:?}");
        assert_eq!(all_ways_to_count(&server).await, [300; 3], "{fault}");
        let server = server.restarted().await;
        assert_eq!(all_ways_to_count(&server).await, [300; 3], "{fault}");
        let server = with_schema_change(server, "DROP TRIGGER fault").await;
        let emptied = server.delete("/collections/c/documents/all").await.ok();
        assert_eq!(emptied["count_deleted"], 300);
        assert_eq!(all_ways_to_count(&server).await, [0; 3], "{fault}");
    }
}

/// Restarts the server; the statement runs while nobody else has the database open.
async fn with_schema_change(server: Server, statement: &str) -> Server {
    let setup = server.setup().clone();
    assert!(server.stop().0.success());
    let database = rusqlite::Connection::open(setup.data_dir().join("ragstone.db")).unwrap();
    database.execute_batch(statement).unwrap();
    drop(database);
    setup.start().await
}

/// Documents of `c` by its count, by listing and by search.
async fn all_ways_to_count(server: &Server) -> [u64; 3] {
    let collection = server.get("/collections/c").await.ok();
    let page = server.get("/collections/c/documents?limit=1000").await.ok();
    let search = json!({"query_embedding": vector(1), "top_k": 1000});
    let hits = server.post("/collections/c/query", search).await.ok();
    [
        collection["count"].as_u64().unwrap(),
        page["documents"].as_array().unwrap().len() as u64,
        hits["results"].as_array().unwrap().len() as u64,
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_readers_see_all_documents_or_none() {
    let server = Arc::new(plain().await);
    server.create("c").await;
    let done = Arc::new(AtomicBool::new(false));
    let watchers: Vec<_> = (0..4)
        .map(|_| {
            let (server, done) = (Arc::clone(&server), Arc::clone(&done));
            tokio::spawn(async move {
                while !done.load(Ordering::Relaxed) {
                    let page = server.get("/collections/c/documents?limit=1000").await.ok();
                    let total = page["total"].as_u64().unwrap();
                    assert!(total == 0 || total == 300, "{total} documents seen");
                    assert_eq!(page["documents"].as_array().unwrap().len() as u64, total);
                    let search = json!({"query_embedding": vector(1), "top_k": 1000});
                    let found = server.post("/collections/c/query", search).await.ok();
                    let found = found["results"].as_array().unwrap().len();
                    assert!(found == 0 || found == 300, "{found} documents found");
                }
            })
        })
        .collect();
    for _ in 0..20 {
        server.add("c", documents(300, |n| json!({"n": n}))).await;
        let emptied = server.delete("/collections/c/documents/all").await.ok();
        assert_eq!(emptied["count_deleted"], 300);
    }
    done.store(true, Ordering::Relaxed);
    for watcher in watchers {
        watcher.await.expect("every read saw all documents or none");
    }
}

#[tokio::test]
async fn metadata_preserved_after_empty() {
    let server = plain().await;
    let metadata =
        json!({"display_name": "Test", "description": "Docs", "query_profile": {"a": [1, {"b": null}]}});
    server
        .post("/collections", json!({"name": "c", "metadata": metadata}))
        .await
        .ok();
    server.add("c", documents(10, |_| json!({}))).await;
    server.delete("/collections/c/documents/all").await.ok();
    assert_eq!(server.get("/collections/c").await.ok()["metadata"], metadata);
    server.add("c", documents(2, |_| json!({}))).await;
    let found = server
        .post("/collections/c/query", json!({"query_embedding": vector(0)}))
        .await
        .ok();
    assert_eq!(found["collection_metadata"], metadata);
    assert_eq!(server.get("/collections/c").await.ok()["count"], 2);
}

#[tokio::test]
async fn empty_through_node_js_middleware() {
    let service = plain().await;
    service.create("test-collection").await;
    service
        .add("test-collection", documents(7, |n| json!({"n": n})))
        .await;
    let yaml = format!(
        "services: {{chroma_wrapper: {{provider: chromadb-wrapper, url: {:?}}}}}",
        service.url("")
    );
    let gateway = Setup::without_models().config(&yaml).start().await;
    let emptied = gateway
        .delete(&format!("/api{ALL}?service=chroma_wrapper"))
        .await
        .ok();
    assert_eq!(
        emptied,
        json!({"status": "emptied", "collection": "test-collection", "count_deleted": 7})
    );
    assert_eq!(service.get("/collections/test-collection").await.ok()["count"], 0);
    assert_eq!(
        gateway
            .delete("/api/collections/missing/documents/all?service=chroma_wrapper")
            .await
            .refused(404),
        service
            .delete("/collections/missing/documents/all")
            .await
            .refused(404)
    );
}
