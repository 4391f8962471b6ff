//! The suite that every backend must pass, over the network against another real server.

use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::AddressRule;
use ragstone_providers::rag::{ConnectContext, Embedders, Registry};
use serde_json::json;

use super::with_model;
use crate::support::Setup;

#[tokio::test]
async fn another_server_passes_the_suite_of_all_backends() {
    let server = with_model(Setup::serve()).start().await;
    let connection = json!({"url": server.url("")});
    let config = ServiceConfig {
        provider: "chromadb-wrapper".to_owned(),
        connection: connection.as_object().expect("an object").clone(),
    };
    let context = ConnectContext {
        service: "far",
        embedders: Embedders::default(),
        addresses: AddressRule::Configured,
        environment: &|_| None,
    };
    let provider = Registry::built_in()
        .connect(&config, context)
        .expect("the configuration fits");
    ragstone_providers::testing::check_provider(provider.as_ref(), Some("tiny")).await;
}
