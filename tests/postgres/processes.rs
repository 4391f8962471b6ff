//! Two processes over one database.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};

use super::{setup, start};
use crate::memory::stub::{self, Behaviour, Stub};
use crate::support::postgres::new_database;
use crate::support::{Server, Setup, documents, ids, vector};

/// Number of polls, every 20 ms. Work of a dead process is taken over when its lease ends, after 10 seconds
/// (jobs) or 20 (memory).
const POLLS: usize = 6000;

async fn total(server: &Server) -> Value {
    server.get("/collections/c/documents?limit=0").await.ok()["total"].clone()
}

async fn until(server: &Server, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..POLLS {
        let answer = server.get(path).await.ok();
        if holds(&answer) {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("{path} never becomes as expected; the log:\n{}", server.log());
}

#[tokio::test]
async fn what_one_writes_the_other_has_at_once() {
    let url = new_database();
    let (one, other) = tokio::join!(start(&url), start(&url));
    one.create("c").await;
    one.add("c", documents(20, |n| json!({"n": n}))).await;
    assert_eq!(total(&other).await, 20);
    let found = other
        .post(
            "/collections/c/query",
            json!({"query_embedding": vector(7), "top_k": 1}),
        )
        .await
        .ok();
    assert_eq!(ids(&found["results"]), ["d7"]);
    other
        .delete_with("/collections/c/documents", json!({"ids": ["d7"]}))
        .await
        .ok();
    let found = one.find("c", json!({"n": {"$gte": 6, "$lte": 8}})).await.ok();
    assert_eq!(ids(&found["documents"]), ["d6", "d8"]);
    one.delete("/collections/c").await.ok();
    assert_eq!(other.get("/collections/c").await.status, 404);

    // The same content is embedded once by both processes together.
    let chunk = json!({"chunk_id": "1", "content": "the same", "content_hash": "h", "metadata": {}});
    let body = json!({"knowledgebase_id": "kb", "model_id": "small", "chunks": [chunk]});
    let first = one.post("/embeddings", body.clone()).await;
    let second = other.post("/embeddings", body).await;
    assert_eq!((first.status, second.status), (200, 200), "{first:?} {second:?}");
    assert_eq!(
        second.json()["skipped"].as_array().map(Vec::len),
        Some(1),
        "{second:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_finished_by_the_other_when_one_is_killed_in_the_middle() {
    let url = new_database();
    let stub = Stub::behaving(Behaviour {
        delay: Duration::from_millis(50),
        ..Behaviour::default()
    })
    .await;
    let start = || {
        let providers = format!(
            "providers: {{stub: {{type: openai, apiKey: {:?}, baseUrl: {:?}}}}}",
            stub::KEY,
            stub.url()
        );
        let setup = Setup::serve_embedded().config(&providers);
        let model = format!(
            "embeddings: [{{id: remote, provider: stub, model: stub-embed, dimensions: {}}}]",
            stub::WIDTH
        );
        let models = setup.file("embeddings.yml", &model);
        let setup = setup.arg("--embeddings-config").arg(models);
        setup.env("RAGSTONE_STORE", &url).start()
    };
    let one = start().await;
    one.post("/collections", json!({"name": "c", "embedding_model": "remote"}))
        .await
        .ok();
    let rows: String = (0..12_000)
        .map(|n| format!("{{\"id\":\"r{n}\",\"text\":\"row number {n}\"}}\n"))
        .collect();
    let body =
        json!({"documents": [{"name": "rows.jsonl", "content": rows}, {"name": "a.md", "content": "# A"}]});
    let job = one.post("/collections/c/ingest", body).await.ok();
    while total(&one).await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    // The job goes no further, however long the other server takes to start.
    stub.hold();
    let other = start().await;
    let path = format!("/jobs/{}", job["id"].as_str().unwrap());
    assert_eq!(
        other.get(&path).await.ok()["state"],
        "running",
        "while the first works on it"
    );
    one.kill();
    stub.behave(Behaviour::default());
    stub.release();
    other.wait_for_log("ingestion job started");
    let ended = until(&other, &path, |job| job["state"] != "running").await;
    assert_eq!(
        (&ended["state"], &ended["documents"]["failed"]),
        (&json!("done"), &json!(0)),
        "{ended}"
    );
    assert_eq!(total(&other).await, 12_001);
}

#[tokio::test]
async fn memory_is_embedded_by_exactly_one_and_by_another_when_that_is_killed() {
    let url = new_database();
    let memory = |url: &str| setup(url).config("embedding: {provider: in-process, model: small}");
    let (one, other) = tokio::join!(memory(&url).start(), memory(&url).start());
    const ENTRIES: usize = 60;
    for n in 0..ENTRIES {
        let body = json!({"session_key": "s", "content": format!("observation number {n}")});
        let server = if n % 2 == 0 { &one } else { &other };
        server.post("/memory/observations", body).await.ok();
    }
    one.kill();
    until(&other, "/memory/status", |status| status["queued"] == 0).await;
    let body = json!({"query": "observation number 7", "limit": ENTRIES, "collections": ["observation"], "max_distance": 0});
    let found = other.post("/rag/retrieve", body).await.ok();
    let found: BTreeSet<String> = found["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| result["content"].to_string())
        .collect();
    assert_eq!(found.len(), ENTRIES, "{found:?}");
}
