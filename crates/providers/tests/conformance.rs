//! The client of our own API passes the conformance suite, against a service in memory.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{MODEL, backend, service};
use ragstone_providers::testing::check_backend;
use serde_json::json;

#[tokio::test]
async fn the_ragstone_client_conforms() {
    let server = service::start(true).await;
    let backend = backend(json!({"provider": "chromadb-wrapper", "url": server.url}));
    check_backend(&*backend, Some(MODEL)).await;
}
