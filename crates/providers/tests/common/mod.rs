//! Servers to test against: one that answers as told, well or badly, and one that is a small RAG
//! service.

#![allow(dead_code, unreachable_pub)]

pub mod chroma;
#[path = "../../../../xtask/src/port.rs"]
pub mod port;
pub mod server;
pub mod service;
pub mod signal;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, ModelInfo, Role};
use ragstone_core::provider::RagProvider;
use ragstone_providers::ConfigError;
use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::{AddressRule, ClientSettings, Policy, ServiceClient};
use ragstone_providers::rag::{ConnectContext, Embedders, Registry};
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

pub fn try_connect(config: Value, embedders: Embedders) -> Result<Arc<dyn RagProvider>, ConfigError> {
    let config: ServiceConfig = serde_json::from_value(config).unwrap();
    Registry::built_in().connect(
        &config,
        ConnectContext {
            service: "far",
            embedders,
            addresses: AddressRule::Configured,
            environment: &|_| None,
        },
    )
}

pub fn connect(config: Value) -> Arc<dyn RagProvider> {
    try_connect(config, embedders()).unwrap()
}

pub const MODEL: &str = "letters";

/// One model under the id [`MODEL`].
pub fn embedders() -> Embedders {
    let model: Arc<dyn Embedder> = Arc::new(LetterCounts(ModelInfo {
        identity: ModelIdentity {
            id: MODEL.into(),
            version: "1".into(),
            dimensions: 26,
        },
        name: "letter counts".into(),
        max_tokens: None,
    }));
    Arc::new(BTreeMap::from([(MODEL.to_owned(), model)]))
}

/// How often each letter occurs: enough of a meaning for a test.
struct LetterCounts(ModelInfo);

pub fn letter_counts(text: &str) -> Vec<f32> {
    let mut counts = vec![0.01; 26];
    for letter in text.bytes().filter(u8::is_ascii_alphabetic) {
        counts[usize::from(letter.to_ascii_lowercase() - b'a')] += 1.0;
    }
    counts
}

#[async_trait]
impl Embedder for LetterCounts {
    fn info(&self) -> &ModelInfo {
        &self.0
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        Ok(inputs
            .iter()
            .map(|input| match input {
                EmbedInput::Text(text) => Embedding {
                    vector: letter_counts(text),
                    tokens: 1,
                    truncated: false,
                },
                EmbedInput::Tokens(_) => unreachable!("tests embed texts"),
            })
            .collect())
    }
}
