//! ChromaDB passes the conformance suite of all backends, with the models of this process.

#![allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, dead_code)]

#[path = "../../providers/tests/common/chroma.rs"]
mod chroma;
#[path = "../../../xtask/src/port.rs"]
mod port;
#[path = "../../providers/tests/common/signal.rs"]
mod signal;

use std::sync::Arc;

use chroma::ChromaServer;
use ragstone_core::models::Models;
use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::AddressRule;
use ragstone_providers::registry::{ConnectContext, Registry};
use ragstone_search::QueryVectors;
use ragstone_search::testing::WordEmbedder;
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn chromadb_conforms() {
    let server = ChromaServer::start().await;
    let connection = json!({"url": server.url()});
    let config = ServiceConfig {
        provider: "chromadb".to_owned(),
        connection: connection.as_object().unwrap().clone(),
    };
    let context = ConnectContext {
        service: "chroma",
        addresses: AddressRule::Configured,
        environment: &|_| None,
    };
    let connected = Registry::built_in().connect(&config, context).unwrap();
    let models = Arc::new(Models::new(vec![WordEmbedder::new("words")], None));
    let backend = ragstone_search::gateway::backend(connected, &models, &QueryVectors::default());
    ragstone_providers::testing::check_backend(backend.as_ref(), Some("words")).await;
}
