//! What is saved survives, and is embedded once.

use std::collections::HashMap;
use std::time::Duration;

use futures::StreamExt;
use serde_json::json;

use super::stub::{Behaviour, Stub};
use super::{setup, until_embedded, until_status};
use crate::support::Server;

#[tokio::test]
async fn killed_with_a_full_buffer_everything_is_embedded_once_after_the_restart() {
    const ENTRIES: usize = 600;
    // The provider hangs, so that everything that is saved stays in the buffer.
    let hanging = Behaviour {
        delay: Duration::from_secs(3600),
        ..Behaviour::default()
    };
    let stub = Stub::behaving(hanging).await;
    let server = setup(&stub).start().await;
    let saves = futures::stream::iter(0..ENTRIES).map(|n| {
        let server = &server;
        async move {
            let body = json!({"session_key": "s", "content": format!("observation number {n}")});
            server.post("/memory/observations", body).await.ok()["id"].clone()
        }
    });
    let mut ids: Vec<String> = saves
        .buffer_unordered(32)
        .map(|id| id.as_str().expect("an id").to_owned())
        .collect()
        .await;
    let status = server.get("/memory/status").await.ok();
    assert_eq!(
        (&status["queued"], &status["embedded"]),
        (&json!(ENTRIES), &json!(0)),
        "{status}"
    );
    let setup = server.kill();
    let asked_before = stub.embed_calls().len();
    stub.behave(Behaviour::default());

    let server = Server::start(setup).await;
    until_embedded(&server, ENTRIES as u64).await;
    let mut times: HashMap<String, usize> = HashMap::new();
    for text in stub.embed_calls().split_off(asked_before).concat() {
        *times.entry(text).or_default() += 1;
    }
    assert_eq!(times.len(), ENTRIES);
    assert!(times.values().all(|times| *times == 1), "{times:?}");
    // Each is there, under the id it was given.
    let mut found = Vec::new();
    let mut route = "/memory/observations?limit=1000".to_owned();
    loop {
        let page = server.get(&route).await.ok();
        for record in page["records"].as_array().unwrap() {
            assert_eq!(record["embedding"], "embedded");
            found.push(record["id"].as_str().unwrap().to_owned());
        }
        let Some(next) = page["next"].as_str() else { break };
        route = format!("/memory/observations?limit=1000&after={next}");
    }
    ids.sort_unstable();
    found.sort_unstable();
    assert_eq!(found, ids);
}

/// The stub answers on another thread while this one waits for a process to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_drains_the_buffer() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    for n in 0..20 {
        super::save_knowledge(&server, &format!("k{n}"), &format!("text {n}")).await;
    }
    let server = server.restarted().await;
    let status = until_status(&server, |status| status["queued"] == 0).await;
    assert_eq!(status["embedded"], 20);
    assert_eq!(stub.embed_calls().concat().len(), 20);
}
