//! The suite that every backend must pass, over the network against another real server.

use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::AddressRule;
use ragstone_providers::registry::{ConnectContext, Connected, Registry};
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
        addresses: AddressRule::Configured,
        environment: &|_| None,
    };
    let connected = Registry::built_in()
        .connect(&config, context)
        .expect("the configuration fits");
    let Connected::Backend(backend) = connected else {
        panic!("a server with our API is a backend")
    };
    ragstone_providers::testing::check_backend(backend.as_ref(), Some("tiny")).await;
}
