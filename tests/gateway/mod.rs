//! `/api`: many services behind one interface, and questions asked in conversations.

mod collect;
mod conformance;
mod conversations;
mod dead_services;
mod providers;
mod routes;
mod secrets;

use serde_json::{Value, json};

use crate::support::port::unused_port;
use crate::support::{Server, Setup, fixtures};

/// A server with another real server as its service `far`.
pub struct Pair {
    pub near: Server,
    pub far: Server,
}

/// Both have the model `tiny`.
pub async fn pair() -> Pair {
    let far = with_model(Setup::serve()).start().await;
    let near = with_model(Setup::serve())
        .config(&services(&[("far", &far.url(""))]))
        .start()
        .await;
    Pair { near, far }
}

pub fn with_model(setup: Setup) -> Setup {
    setup.embeddings(&[("tiny", &fixtures::model("bert"))])
}

/// A configuration with these services, by name and address. None is asked twice.
pub fn services(services: &[(&str, &str)]) -> String {
    let lines = services.iter().map(|(name, url)| {
        format!("  {name}: {{provider: chromadb-wrapper, url: {url:?}, timeoutMs: 20000, retry: {{maxAttempts: 1, delayMs: 0}}}}\n")
    });
    format!("services:\n{}", lines.collect::<String>())
}

/// An address where nothing listens.
pub fn nobody() -> String {
    format!("http://127.0.0.1:{}", unused_port())
}

pub async fn create(server: &Server, service: &str, name: &str, metadata: Value) {
    let mut metadata = metadata;
    metadata["embedding_model"] = "tiny".into();
    server
        .post(
            "/api/collections",
            json!({"service": service, "name": name, "metadata": metadata}),
        )
        .await
        .ok();
}

pub async fn add(server: &Server, service: &str, name: &str, texts: &[&str]) {
    let documents: Vec<Value> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| json!({"id": format!("{name}-{n}"), "text": text, "metadata": {"section_id": format!("s{}", n / 2), "n": n}}))
        .collect();
    let path = format!("/api/collections/{name}/documents");
    server
        .post(&path, json!({"service": service, "documents": documents}))
        .await
        .ok();
}
