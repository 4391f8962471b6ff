//! One interface over many RAG backends.
//!
//! A [`Gateway`] is a list of named services. The one called [`LOCAL`] is this process and is always
//! there; the others come from the configuration. What is asked of one service goes straight to its
//! [`RagProvider`]; what is asked of all is asked at the same time, and one that does not answer is
//! reported without keeping the others back.

mod local;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use ragstone_core::collection::{Collection, shorten};
use ragstone_core::provider::{Health, HealthStatus, ProviderError, RagProvider};
use ragstone_providers::ConfigError;
use ragstone_providers::config::{Environment, ServiceConfig};
use ragstone_providers::http::{AddressRule, NamedHost, within};
use ragstone_providers::rag::{ConnectContext, Embedders, Registry};

pub use local::LocalProvider;
pub(crate) use local::document_json;

use crate::Service;

/// The name of the service that is this process, and of its kind.
pub const LOCAL: &str = "local";

/// A backend under the name that clients know it by.
#[derive(Clone)]
pub struct NamedService {
    pub name: String,
    /// The id of its kind in the registry.
    pub provider: String,
    pub backend: Arc<dyn RagProvider>,
}

impl NamedService {
    /// Whether queries for it are embedded by models of this process. Such a service is given the
    /// vector, so that several collections share it; any other is given the text.
    pub fn embeds_here(&self) -> bool {
        matches!(self.provider.as_str(), LOCAL | "chromadb")
    }
}

/// A service of this name does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Service \"{0}\" not found")]
pub struct UnknownService(pub String);

#[derive(Clone)]
pub struct Gateway {
    /// This process first, the others by name.
    services: Arc<[NamedService]>,
    registry: Arc<Registry>,
    embedders: Embedders,
    reachable_hosts: Vec<NamedHost>,
}

/// What a gateway is made of, besides the service of this process.
pub struct GatewayConfig<'a> {
    pub services: &'a BTreeMap<String, ServiceConfig>,
    /// Hosts with a private address that clients may try a connection to, besides those of the
    /// configured services.
    pub reachable_hosts: Vec<NamedHost>,
    pub environment: Environment<'a>,
}

impl Gateway {
    /// Connects the configured services. Nothing is sent yet; a service that is down is noticed when
    /// it is asked.
    pub fn new(service: &Service, config: GatewayConfig<'_>) -> Result<Self, ConfigError> {
        let local = LocalProvider::new(service.clone());
        let mut registry = Registry::built_in();
        registry.register(local::kind(local.clone()));
        let embedders: Embedders = Arc::new(
            service
                .models
                .embedders()
                .map(|embedder| (embedder.info().identity.id.clone(), Arc::clone(embedder)))
                .collect(),
        );
        let mut services = vec![NamedService {
            name: LOCAL.to_owned(),
            provider: LOCAL.to_owned(),
            backend: Arc::new(local),
        }];
        for (name, connection) in config.services {
            check_service_name(name)?;
            let context = ConnectContext {
                service: name,
                embedders: Arc::clone(&embedders),
                addresses: AddressRule::Configured,
                environment: config.environment,
            };
            services.push(NamedService {
                name: name.clone(),
                provider: connection.provider.clone(),
                backend: registry
                    .connect(connection, context)
                    .map_err(|error| error.under(&format!("services.{name}")))?,
            });
        }
        Ok(Self {
            services: services.into(),
            registry: Arc::new(registry),
            embedders,
            reachable_hosts: config
                .services
                .values()
                .filter_map(ServiceConfig::host)
                .chain(config.reachable_hosts)
                .collect(),
        })
    }

    /// This process.
    pub fn local(&self) -> Arc<dyn RagProvider> {
        Arc::clone(&self.services[0].backend)
    }

    pub fn services(&self) -> &[NamedService] {
        &self.services
    }

    pub fn service(&self, name: &str) -> Result<&NamedService, UnknownService> {
        self.services
            .iter()
            .find(|service| service.name == name)
            .ok_or_else(|| UnknownService(name.to_owned()))
    }

    /// The kinds of backend that a service can be of.
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Connects to a backend as a client describes it and asks how it is.
    ///
    /// The description comes from outside: private addresses are only for the hosts and ports that the
    /// operator has named, and `${NAME}` is no way to learn a variable of this process.
    pub async fn try_connection(&self, config: &ServiceConfig) -> Result<Health, ConfigError> {
        let backend = self.registry.connect(
            config,
            ConnectContext {
                service: &config.provider,
                embedders: Arc::clone(&self.embedders),
                addresses: AddressRule::Foreign {
                    allowed: self.reachable_hosts.clone(),
                },
                environment: &|_| None,
            },
        );
        let backend = backend.map_err(ConfigError::of_a_tried_connection)?;
        Ok(backend.health().await)
    }
}

/// A name stands in addresses, logs and metrics as it is.
/// Whether a service of the configuration may have this name.
pub fn check_service_name(name: &str) -> Result<(), ConfigError> {
    if name == LOCAL {
        let message = "this name belongs to the service in this process; choose another";
        return Err(ConfigError::field(format!("services.{LOCAL}"), message));
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if (1..=64).contains(&name.len()) && name.chars().all(plain) {
        return Ok(());
    }
    Err(ConfigError::field(
        format!("services.{}", shorten(name)),
        "the name of a service must have 1 to 64 characters, all of them letters, digits, '.', '_' or '-'",
    ))
}

/// The collections of one service, or why they are not known.
pub struct ServiceCollections<'a> {
    pub service: &'a NamedService,
    pub collections: Result<Vec<Collection>, ProviderError>,
}

impl ServiceCollections<'_> {
    pub fn status(&self) -> HealthStatus {
        match self.collections {
            Ok(_) => HealthStatus::Healthy,
            Err(_) => HealthStatus::Unhealthy,
        }
    }
}

/// Whoever asks all services waits no longer for any of them, whatever its own deadline is.
const PATIENCE_WITH_ALL: Duration = Duration::from_secs(5);

/// Asks every service at once.
pub async fn all_collections(gateway: &Gateway) -> Vec<ServiceCollections<'_>> {
    let lists = join_all(gateway.services().iter().map(collections_of));
    within(PATIENCE_WITH_ALL, lists).await
}

/// Asks one service.
pub async fn collections_of(service: &NamedService) -> ServiceCollections<'_> {
    let collections = service.backend.collections().await;
    if let Err(error) = &collections {
        tracing::warn!(service = %service.name, %error, "the collections of a service cannot be listed");
    }
    ServiceCollections { service, collections }
}

/// The health of every service, asked at once.
pub async fn all_health(gateway: &Gateway) -> Vec<(&NamedService, Health)> {
    let services = gateway.services();
    let health = join_all(services.iter().map(|service| service.backend.health()));
    let health = within(PATIENCE_WITH_ALL, health).await;
    services.iter().zip(health).collect()
}

#[cfg(test)]
mod tests;
