//! The kinds of backend, and the registry they are found in.
//!
//! A kind of backend is one [`ProviderKind`]: its id, its description, its capabilities, the schema of
//! its connection, and a function that connects. Adding one takes a file with such a value and a line
//! in [`Registry::built_in`]. Kinds that live in other crates are added with [`Registry::register`].

use std::collections::BTreeMap;
use std::sync::Arc;

use ragstone_core::Metadata;
use ragstone_core::backend::{Backend, Capability};
use ragstone_core::storage::Storage;
use serde::Serialize;
use serde_json::Value;

use crate::config::{Environment, ServiceConfig};
use crate::error::ConfigError;
use crate::http::AddressRule;
use crate::{chroma, ragstone};

/// The surroundings of a connection.
pub struct ConnectContext<'a> {
    /// The name of the service, for errors and logs.
    pub service: &'a str,
    /// [`AddressRule::Foreign`] for a connection that a client of the API brought.
    pub addresses: AddressRule,
    pub environment: Environment<'a>,
}

/// A connected service.
pub enum Connected {
    /// It embeds and reranks itself.
    Backend(Arc<dyn Backend>),
    /// It stores and searches vectors; the models of this process embed and rerank for it.
    Storage(Arc<dyn Storage>),
}

type Connect = dyn Fn(&Metadata, ConnectContext) -> Result<Connected, ConfigError> + Send + Sync;

/// One kind of backend.
#[derive(Clone)]
pub struct ProviderKind {
    pub description: ProviderDescription,
    /// JSON Schema of its connection, with titles, descriptions, defaults and examples for a form.
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
    /// `connect` checks the connection against the schema and sends nothing yet.
    pub fn new(
        description: ProviderDescription,
        schema: Value,
        connect: impl Fn(&Metadata, ConnectContext) -> Result<Connected, ConfigError> + Send + Sync + 'static,
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
        registry.register(ragstone::kind());
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

    /// Connects a configured service. Nothing is sent yet. An unknown kind, or a connection that does not
    /// fit its schema, is an error that names the field.
    pub fn connect(&self, config: &ServiceConfig, context: ConnectContext) -> Result<Connected, ConfigError> {
        let kind = self.kind(&config.provider).ok_or_else(|| ConfigError::Unknown {
            kind: "provider",
            given: config.provider.clone(),
            known: self.0.keys().copied().collect::<Vec<_>>().join(", "),
        })?;
        (kind.connect)(&config.connection, context)
    }
}
