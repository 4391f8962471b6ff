//! The database stops and restarts under load.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::support::postgres::Engine;
use crate::support::{Setup, ids, vector};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_told_to_come_back_and_nothing_acknowledged_is_lost() {
    let engine = tokio::task::spawn_blocking(Engine::start).await.unwrap();
    let server = Setup::serve_embedded()
        .arg("--no-embeddings")
        .env("RAGSTONE_STORE", engine.url())
        .start()
        .await;
    let server = Arc::new(server);
    server.create("c").await;
    let stop = Arc::new(AtomicBool::new(false));
    let writers: Vec<_> = (0..4)
        .map(|writer| {
            let (server, stop) = (server.clone(), stop.clone());
            tokio::spawn(async move {
                let (mut acknowledged, mut refused) = (Vec::new(), 0);
                for n in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let id = format!("w{writer}-{n}");
                    let document = json!({"id": id, "text": "text", "embedding": vector(n)});
                    let answer = server
                        .post("/collections/c/documents", json!({"documents": [document]}))
                        .await;
                    match answer.status {
                        200 => acknowledged.push(id),
                        503 => {
                            assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
                            refused += 1;
                            tokio::time::sleep(Duration::from_millis(10)).await;
                        }
                        _ => panic!("{answer:?}"),
                    }
                    let found = server
                        .post(
                            "/collections/c/query",
                            json!({"query_embedding": vector(1), "top_k": 1}),
                        )
                        .await;
                    assert!([200, 503].contains(&found.status), "{found:?}");
                }
                (acknowledged, refused)
            })
        })
        .collect();

    let engine = Arc::new(engine);
    for _ in 0..2 {
        wait_for(&server, 200).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        let stopping = engine.clone();
        tokio::task::spawn_blocking(move || stopping.stop())
            .await
            .unwrap();
        wait_for(&server, 503).await;
        assert_eq!(server.get("/livez").await.status, 200);
        assert_eq!(server.get("/health").await.ok()["status"], "degraded");
        let starting = engine.clone();
        tokio::task::spawn_blocking(move || starting.start_again())
            .await
            .unwrap();
        wait_for(&server, 200).await;
    }
    stop.store(true, Ordering::Relaxed);
    let mut acknowledged = BTreeSet::new();
    let mut refused = 0;
    for writer in writers {
        let (ids, times) = writer.await.unwrap();
        acknowledged.extend(ids);
        refused += times;
    }
    assert!(refused > 0 && !acknowledged.is_empty());
    let mut there = BTreeSet::new();
    let total = loop {
        let path = format!("/collections/c/documents?limit=100&offset={}", there.len());
        let page = server.get(&path).await.ok();
        let found = ids(&page["documents"]);
        if found.is_empty() {
            break page["total"].clone();
        }
        there.extend(found.into_iter().map(str::to_owned));
    };
    let lost: Vec<&String> = acknowledged.difference(&there).collect();
    assert_eq!(lost, Vec::<&String>::new());
    assert_eq!(total, there.len());
    // The log never contains the password.
    let log = server.log();
    assert!(!log.contains("postgres:postgres@"), "{log}");
}

/// Waits until `/readyz` answers with this status.
async fn wait_for(server: &crate::support::Server, status: u16) {
    for _ in 0..2400 {
        let probe = server.get("/readyz").await;
        if probe.status == status {
            assert_eq!(probe.headers.contains_key("retry-after"), status == 503);
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("/readyz does not answer {status}; the log:\n{}", server.log());
}
