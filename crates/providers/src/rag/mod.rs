//! RAG backends, and the registry they are found in.
//!
//! A kind of backend is one [`ProviderKind`]: its id, what it is called, what it can do, the schema
//! of its connection, and a function that connects. Adding one is a file with such a value in it and
//! a line in [`Registry::built_in`]; kinds that live in other crates are added with
//! [`Registry::register`].

mod chroma;
mod filter_json;
mod health;
mod operations;
mod rerank;
mod wrapper;

use std::collections::BTreeMap;
use std::sync::Arc;

use ragstone_core::Metadata;
use ragstone_core::model::Embedder;
use ragstone_core::provider::{Capability, RagProvider};
use serde::Serialize;
use serde_json::Value;

pub use chroma::ChromaStore;
pub use filter_json::filter_to_json;

use crate::config::{Environment, ServiceConfig};
use crate::error::ConfigError;
use crate::http::AddressRule;
use operations::Operations;

/// The models that backends without embeddings of their own are served by, under the ids that
/// collections name them by.
pub type Embedders = Arc<BTreeMap<String, Arc<dyn Embedder>>>;

/// What a backend gets besides its own configuration.
pub struct ConnectContext<'a> {
    /// The name of the service, for errors and logs.
    pub service: &'a str,
    pub embedders: Embedders,
    /// [`AddressRule::Foreign`] for a connection that a client of the API brought.
    pub addresses: AddressRule,
    pub environment: Environment<'a>,
}

type Connect = dyn Fn(&Metadata, ConnectContext) -> Result<Arc<dyn RagProvider>, ConfigError> + Send + Sync;

/// One kind of backend.
#[derive(Clone)]
pub struct ProviderKind {
    pub description: ProviderDescription,
    /// The JSON Schema of its connection, with titles, descriptions, defaults and examples for a form.
    pub schema: Value,
    connect: Arc<Connect>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProviderDescription {
    pub id: &'static str,
    pub display_name: &'static str,
    pub description: &'static str,
    pub capabilities: &'static [Capability],
}

impl ProviderKind {
    /// `connect` checks the connection against the schema and opens nothing yet.
    pub fn new(
        description: ProviderDescription,
        schema: Value,
        connect: impl Fn(&Metadata, ConnectContext) -> Result<Arc<dyn RagProvider>, ConfigError>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        Self {
            description,
            schema,
            connect: Arc::new(connect),
        }
    }
}

/// All kinds of backend, by id.
#[derive(Clone, Default)]
pub struct Registry(BTreeMap<&'static str, ProviderKind>);

impl Registry {
    /// The kinds of this crate.
    pub fn built_in() -> Self {
        let mut registry = Self::default();
        registry.register(wrapper::kind());
        registry.register(chroma::kind());
        registry
    }

    /// Adds a kind, or replaces the one of the same id.
    pub fn register(&mut self, kind: ProviderKind) {
        self.0.insert(kind.description.id, kind);
    }

    pub fn kinds(&self) -> impl Iterator<Item = &ProviderKind> {
        self.0.values()
    }

    pub fn kind(&self, id: &str) -> Option<&ProviderKind> {
        self.0.get(id)
    }

    /// Makes a backend from the configuration of a service. Nothing is sent yet; an unknown kind, or
    /// a connection that does not fit its schema, is an error that names the field.
    pub fn connect(
        &self,
        config: &ServiceConfig,
        context: ConnectContext,
    ) -> Result<Arc<dyn RagProvider>, ConfigError> {
        let kind = self.kind(&config.provider).ok_or_else(|| ConfigError::Unknown {
            kind: "provider",
            given: config.provider.clone(),
            known: self.0.keys().copied().collect::<Vec<_>>().join(", "),
        })?;
        let backend = (kind.connect)(&config.connection, context)?;
        Ok(Arc::new(Operations(backend)))
    }
}
