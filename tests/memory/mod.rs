//! Agent memory, retrieval, chat and the doctor, with providers that are local stubs.

mod chat;
mod chat_tools;
mod crash;
mod doctor;
mod routes;
mod secrets;
pub mod stub;

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{Server, Setup};
use stub::Stub;

/// A configuration in which everything goes to the stub.
pub fn config(stub: &Stub) -> String {
    config_with(stub, "{enabled: true}")
}

pub fn config_with(stub: &Stub, rag: &str) -> String {
    format!(
        "providers:\n  stub: {{type: openai, apiKey: \"{key}\", baseUrl: \"{url}\"}}\n\
         embedding: {{providerID: stub, model: stub-embed, dimensions: {width}, rag: {rag}}}\n\
         chat: {{providerID: stub, model: stub-chat}}\n",
        key = stub::KEY,
        url = stub.url(),
        width = stub::WIDTH,
    )
}

pub fn setup(stub: &Stub) -> Setup {
    Setup::without_models().config(&config(stub))
}

/// Waits until the status of memory is as it should be.
pub async fn until_status(server: &Server, holds: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..12_000 {
        let status = server.get("/memory/status").await.ok();
        if holds(&status) {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the status never became as expected; the log:\n{}", server.log());
}

pub async fn until_embedded(server: &Server, count: u64) {
    until_status(server, |status| {
        status["queued"] == 0 && status["embedded"] == count
    })
    .await;
}

pub async fn save_knowledge(server: &Server, key: &str, content: &str) {
    let saved = server
        .put(&format!("/memory/knowledge/{key}"), json!({"content": content}))
        .await
        .ok();
    assert_eq!(saved, json!({"id": key, "collection": "knowledge"}));
}
