//! Servers to test against: one that answers as told, well or badly, and one that is a small RAG
//! service.

#![allow(dead_code, unreachable_pub)]

pub mod chroma;
#[path = "../../../../xtask/src/port.rs"]
pub mod port;
pub mod server;
pub mod service;
pub mod signal;

use std::sync::Arc;
use std::time::Duration;

use ragstone_core::backend::{Backend, Health};
use ragstone_core::storage::Storage;
use ragstone_providers::ConfigError;
use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::{AddressRule, ClientSettings, Policy, ServiceClient};
use ragstone_providers::registry::{ConnectContext, Connected, Registry};
use serde_json::Value;

/// The key that must never be seen where it is not sent.
pub const CANARY: &str = "canary-4f1d-key";

/// Quick to give up and to try again, so that tests are quick too.
pub fn quick() -> Policy {
    Policy {
        deadline: Duration::from_secs(60),
        first_delay: Duration::from_millis(1),
        max_answer_bytes: 1 << 20,
        ..Policy::default()
    }
}

pub fn client(url: &str, policy: Policy) -> ServiceClient {
    let mut settings = ClientSettings::new("far", url, "url").unwrap();
    settings.policy = policy;
    ServiceClient::new(settings).unwrap()
}

pub fn connect(config: Value) -> Result<Connected, ConfigError> {
    let config: ServiceConfig = serde_json::from_value(config).unwrap();
    Registry::built_in().connect(
        &config,
        ConnectContext {
            service: "far",
            addresses: AddressRule::Configured,
            environment: &|_| None,
        },
    )
}

/// A service that is a backend of its own.
pub fn backend(config: Value) -> Arc<dyn Backend> {
    match connect(config).unwrap() {
        Connected::Backend(backend) => backend,
        Connected::Storage(_) => panic!("it is no backend"),
    }
}

/// A service that is storage.
pub fn storage(config: Value) -> Arc<dyn Storage> {
    match connect(config).unwrap() {
        Connected::Storage(storage) => storage,
        Connected::Backend(_) => panic!("it is no storage"),
    }
}

/// The health of a service of any kind.
pub async fn health_of(config: Value) -> Health {
    match connect(config).unwrap() {
        Connected::Backend(backend) => backend.health().await,
        Connected::Storage(storage) => storage.service_health().await.unwrap(),
    }
}

/// The id of the only model of the service in [`service`].
pub const MODEL: &str = "letters";

/// How often each letter occurs: enough of a meaning for a test.
pub fn letter_counts(text: &str) -> Vec<f32> {
    let mut counts = vec![0.01; 26];
    for letter in text.bytes().filter(u8::is_ascii_alphabetic) {
        counts[usize::from(letter.to_ascii_lowercase() - b'a')] += 1.0;
    }
    counts
}
