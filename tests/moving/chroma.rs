use std::time::Duration;

use serde_json::json;

use super::{document, fill, ragstone, text};
use crate::memory::stub::Stub;
use crate::memory::{config, save_knowledge, until_embedded};
use crate::support::chroma::ChromaServer;
use crate::support::port::unused_port;
use crate::support::{Server, Setup};

/// One server for all tests, since starting it takes longer than everything else.
#[tokio::test]
async fn a_service_over_chromadb() {
    let mut chroma = ChromaServer::start().await;
    let setup = Setup::without_models().arg("--store").arg(chroma.store_url());
    let server = setup.start().await;
    routes_behave_as_they_do(&server).await;
    names_and_numbers_that_chromadb_cannot_take_are_kept(&server).await;
    let server = records_are_kept_here(server).await;
    collections_are_copied_there_and_back(&server, &chroma).await;
    what_one_process_remembers_another_leaves_alone(&chroma).await;
    an_engine_that_hangs_keeps_nobody_waiting(&server, &chroma).await;
    an_engine_that_goes_away_is_said_and_its_return_noticed(&server, &mut chroma).await;
}

async fn routes_behave_as_they_do(server: &Server) {
    fill(server, "c", 12).await;
    let shown = server.get("/collections/c").await.ok();
    assert_eq!(
        (&shown["count"], &shown["metadata"]["limits"]),
        (&json!(12), &json!({"a": [1, null]}))
    );
    let found = server
        .find("c", json!({"tags": 7, "deep": {"$exists": true}}))
        .await
        .ok();
    assert_eq!(
        (&found["total"], &found["documents"][0]),
        (&json!(1), &shown_document(7))
    );
    for mode in ["dense", "keyword", "hybrid"] {
        let mut query = json!({"mode": mode, "top_k": 2, "where": {"n": {"$gte": 3}}});
        if mode != "keyword" {
            query["query_embedding"] = document(5)["embedding"].clone();
        }
        if mode != "dense" {
            query["query"] = json!("Document 5");
        }
        let hits = server.post("/collections/c/query", query).await.ok();
        assert_eq!(hits["results"][0]["id"], "d5", "{mode}: {hits}");
    }
    server
        .post("/collections", json!({"name": "c"}))
        .await
        .refused(409);
    server.get("/collections/none").await.refused(404);
    let health = server.get("/health").await.ok();
    assert_eq!(
        (&health["status"], &health["store"]["engine"]),
        (&json!("healthy"), &json!("chromadb"))
    );
    assert!(!health["store"]["limitations"].as_array().unwrap().is_empty());
    server.get("/readyz").await.ok();
}

async fn names_and_numbers_that_chromadb_cannot_take_are_kept(server: &Server) {
    fill(server, "127.0.0.1", 3).await;
    let listed = server.get("/collections").await.ok();
    assert!(listed.to_string().contains("\"127.0.0.1\""), "{listed}");
    for size in [1e20, 1e-40] {
        let vector: Vec<f64> = [0.1, 2.0 * 0.37, 0.0, 3.0].iter().map(|x| x * size).collect();
        let query = json!({"query_embedding": vector, "top_k": 3});
        let hits = server.post("/collections/127.0.0.1/query", query).await.ok();
        let hit = &hits["results"][0];
        assert_eq!(hit["id"], "d2", "{size}: {hits}");
        assert!(hit["distance"].as_f64().unwrap() < 0.001, "{size}: {hits}");
    }
    server.delete("/collections/127.0.0.1").await.ok();
    let services = server.get("/api/services").await.ok();
    let store = &services["services"][0]["health"]["details"]["store"];
    assert_eq!(store["engine"], "chromadb", "{services}");
    assert!(!store["limitations"].as_array().unwrap().is_empty());
}

/// Probes have their own deadline, and after a few failures requests fail at once.
async fn an_engine_that_hangs_keeps_nobody_waiting(server: &Server, chroma: &ChromaServer) {
    // Without deadlines, no answer would ever come.
    const SOON: Duration = Duration::from_secs(120);
    let soon = |path: &'static str| async move {
        let answer = tokio::time::timeout(SOON, server.get(path)).await;
        answer.unwrap_or_else(|_| panic!("{path} keeps its caller waiting"))
    };
    chroma.pause();
    for _ in 0..2 {
        soon("/readyz").await.refused(503);
        assert_eq!(soon("/health").await.ok()["status"], "degraded");
    }
    let refused = soon("/collections/c").await;
    refused.refused(503);
    assert!(refused.header("retry-after").parse::<u64>().unwrap() >= 1);
    chroma.resume();
    for attempt in 0.. {
        let ready = server.get("/readyz").await.status == 200;
        if ready && server.get("/collections/c").await.status == 200 {
            break;
        }
        assert!(attempt < 1200, "the service does not resume");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn shown_document(n: usize) -> serde_json::Value {
    let mut shown = document(n);
    shown.as_object_mut().unwrap().remove("embedding");
    shown
}

/// Agent memory is stored in the embedded database and survives a restart.
async fn records_are_kept_here(server: Server) -> Server {
    let saved = server
        .put("/memory/knowledge/k", json!({"content": "kept"}))
        .await;
    assert!(saved.status < 300, "{saved:?}");
    let server = server.restarted().await;
    let read = server.get("/memory/knowledge/k").await.ok();
    assert_eq!(read["content"], "kept");
    assert!(server.setup().data_dir().join("ragstone.db").exists());
    server
}

/// Each process has its own memory and vectors.
async fn what_one_process_remembers_another_leaves_alone(chroma: &ChromaServer) {
    let stub = Stub::start().await;
    let start = || {
        let setup = Setup::serve_embedded()
            .arg("--no-embeddings")
            .config(&config(&stub));
        let setup = setup.arg("--store").arg(chroma.store_url());
        async move { setup.start().await }
    };
    let first = start().await;
    save_knowledge(&first, "tea", "tea is at four").await;
    until_embedded(&first, 1).await;
    let second = start().await;
    save_knowledge(&second, "fuel", "fuel is in the shed").await;
    until_embedded(&second, 1).await;
    for (server, key) in [(first, "tea"), (second, "fuel")] {
        // A restart cleans up orphaned vectors, but not those of other processes.
        let server = server.restarted().await;
        let found = server
            .post("/rag/retrieve", json!({"query": "when is tea?"}))
            .await
            .ok();
        let found = found["results"].as_array().unwrap();
        let ids: Vec<&str> = found.iter().filter_map(|hit| hit["id"].as_str()).collect();
        assert_eq!(ids, [key], "{found:?}");
    }
}

async fn collections_are_copied_there_and_back(server: &Server, chroma: &ChromaServer) {
    let source = Setup::without_models().start().await;
    fill(&source, "moved", 1300).await;
    let (store, from) = (chroma.store_url(), source.url(""));
    let there = ragstone(&["copy", "--from", &from, "--to", &store]).await;
    assert!(there.succeeded().contains("moved: copied 1300"), "{there:?}");
    let again = ragstone(&["copy", "--from", &from, "--to", &server.url("")]).await;
    assert!(
        again.succeeded().contains("1300 of them by an earlier run"),
        "{again:?}"
    );
    let folder = tempfile::tempdir().unwrap();
    let back = folder.path().join("data");
    let named = [
        "copy",
        "--from",
        &store,
        "--to",
        text(&back),
        "--collection",
        "moved",
    ];
    ragstone(&named).await.succeeded();
    let file = folder.path().join("moved.jsonl");
    ragstone(&["export", "moved", text(&file), "--data-dir", text(&back)])
        .await
        .succeeded();
    let lines = std::fs::read_to_string(&file).unwrap();
    let line: serde_json::Value = serde_json::from_str(lines.lines().nth(8).unwrap()).unwrap();
    assert_eq!(
        (&line["id"], &line["metadata"]),
        (&json!("d7"), &document(7)["metadata"])
    );
    let backup = Setup::command(&["backup", "file"]).env("RAGSTONE_STORE", &store);
    let refused = tokio::task::spawn_blocking(move || backup.run()).await.unwrap();
    let said = refused.failed_with(78);
    assert!(said.contains("is not an embedded one"), "{said}");
}

async fn an_engine_that_goes_away_is_said_and_its_return_noticed(server: &Server, chroma: &mut ChromaServer) {
    chroma.stop();
    for _ in 0..7 {
        let body = json!({"documents": [document(99)]});
        for answer in [
            server.post("/collections/c/documents", body).await,
            server.get("/collections/c").await,
            server.get("/readyz").await,
        ] {
            answer.refused(503);
            assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 1);
        }
    }
    assert_eq!(server.get("/health").await.ok()["status"], "degraded");
    server.get("/livez").await.ok();
    chroma.restart().await;
    for attempt in 0.. {
        let ready = server.get("/readyz").await.status == 200;
        if ready && server.get("/collections/c").await.status == 200 {
            break;
        }
        assert!(attempt < 1200, "the service does not resume");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    server.add("c", vec![document(99)]).await;
    assert_eq!(server.get("/collections/c").await.ok()["count"], 13);
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named() {
    let store = format!("chroma://127.0.0.1:{}", unused_port());
    let server = Setup::serve_embedded()
        .arg("--no-embeddings")
        .arg("--store")
        .arg(&store)
        .start()
        .await;
    let log = server.wait_for_log("the store does not answer yet");
    assert!(log.contains(&store), "{log}");
    let exported = ragstone(&["export", "c", "-", "--store", &store]).await;
    let said = exported.failed_with(1);
    assert!(
        said.contains(&format!("the store {store} cannot be used")),
        "{said}"
    );
}

/// Waiting would not help.
#[tokio::test]
async fn what_is_no_chromadb_is_refused_at_the_start() {
    let other = Setup::without_models().start().await;
    let store = other.url("").replace("http://", "chroma://");
    let store = store.trim_end_matches('/');
    let serve = ["serve", "--no-embeddings", "--port", "0", "--store", store];
    let refused = ragstone(&serve).await;
    let said = refused.failed_with(1);
    assert!(
        said.contains(&format!("the store {store} cannot be used")),
        "{said}"
    );
}
