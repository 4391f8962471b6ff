//! Names for backends.
//!
//! A [`Gateway`] is a list of named backends. The one called [`LOCAL`] is this process and always
//! exists; the others come from the configuration. Questions to all backends are asked at the same
//! time, and a backend that does not answer is reported without delaying the others.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use ragstone_core::backend::{Backend, BackendError, Health, HealthStatus};
use ragstone_core::collection::{Collection, shorten};
use ragstone_core::models::Models;
use ragstone_core::service::Service;
use ragstone_providers::ConfigError;
use ragstone_providers::config::{Environment, ServiceConfig};
use ragstone_providers::http::{AddressRule, NamedHost, within};
use ragstone_providers::registry::{ConnectContext, Connected, ProviderDescription, ProviderKind, Registry};
use serde_json::json;

use crate::storage_backend::{self, StorageBackend};
use crate::vectors::QueryVectors;

/// The name of the service that is this process, and of its kind.
pub const LOCAL: &str = "local";

/// A backend under the name that clients know it by.
#[derive(Clone)]
pub struct NamedBackend {
    pub name: String,
    /// The id of its kind in the registry.
    pub provider: String,
    pub backend: Arc<dyn Backend>,
}

impl NamedBackend {
    /// The backend of this process.
    pub fn local(backend: StorageBackend) -> Self {
        Self {
            name: LOCAL.to_owned(),
            provider: LOCAL.to_owned(),
            backend: Arc::new(backend),
        }
    }
}

/// A service of this name does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("Service \"{0}\" not found")]
pub struct UnknownService(pub String);

#[derive(Clone)]
pub struct Gateway {
    /// This process first, the others by name.
    services: Arc<[NamedBackend]>,
    registry: Arc<Registry>,
    local: StorageBackend,
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
    pub fn new(local: StorageBackend, config: GatewayConfig<'_>) -> Result<Self, ConfigError> {
        let mut registry = Registry::built_in();
        registry.register(local_kind(local.clone()));
        let mut services = vec![NamedBackend::local(local.clone())];
        for (name, connection) in config.services {
            check_service_name(name)?;
            let context = ConnectContext {
                service: name,
                addresses: AddressRule::Configured,
                environment: config.environment,
            };
            services.push(NamedBackend {
                name: name.clone(),
                provider: connection.provider.clone(),
                backend: registry
                    .connect(connection, context)
                    .map(|connected| backend(connected, &local.service().models, local.vectors()))
                    .map_err(|error| error.under(&format!("services.{name}")))?,
            });
        }
        Ok(Self {
            services: services.into(),
            registry: Arc::new(registry),
            local,
            reachable_hosts: config
                .services
                .values()
                .filter_map(ServiceConfig::host)
                .chain(config.reachable_hosts)
                .collect(),
        })
    }

    /// This process.
    pub fn local(&self) -> &NamedBackend {
        &self.services[0]
    }

    pub fn services(&self) -> &[NamedBackend] {
        &self.services
    }

    pub fn service(&self, name: &str) -> Result<&NamedBackend, UnknownService> {
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
        let connected = self.registry.connect(
            config,
            ConnectContext {
                service: &config.provider,
                addresses: AddressRule::Foreign {
                    allowed: self.reachable_hosts.clone(),
                },
                environment: &|_| None,
            },
        );
        let connected = connected.map_err(ConfigError::of_a_tried_connection)?;
        let (models, vectors) = (&self.local.service().models, self.local.vectors());
        Ok(backend(connected, models, vectors).health().await)
    }
}

/// The backend of a connected service. A storage engine behind the network is served with these models.
pub fn backend(connected: Connected, models: &Arc<Models>, vectors: &QueryVectors) -> Arc<dyn Backend> {
    match connected {
        Connected::Backend(backend) => backend,
        Connected::Storage(store) => {
            let models = Arc::clone(models);
            let service = Service { store, models };
            Arc::new(StorageBackend::of_service(service, vectors.clone()))
        }
    }
}

/// The kind of which there is exactly one backend. It has nothing to configure.
fn local_kind(local: StorageBackend) -> ProviderKind {
    ProviderKind::new(
        ProviderDescription {
            id: LOCAL,
            display_name: "This server",
            description: "The collections and models of this process",
            capabilities: storage_backend::CAPABILITIES,
        },
        json!({"type": "object", "properties": {}, "additionalProperties": false}),
        move |connection, _| match connection.keys().next() {
            None => Ok(Connected::Backend(Arc::new(local.clone()))),
            Some(field) => Err(ConfigError::field(field, "this server has nothing to configure")),
        },
    )
}

/// Checks the name of a configured service, which stands in addresses, logs and metrics.
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
    pub service: &'a NamedBackend,
    pub collections: Result<Vec<Collection>, BackendError>,
}

impl ServiceCollections<'_> {
    pub fn status(&self) -> HealthStatus {
        match self.collections {
            Ok(_) => HealthStatus::Healthy,
            Err(_) => HealthStatus::Unhealthy,
        }
    }
}

/// Timeout for questions to all services, whatever their own timeouts are.
const ALL_SERVICES_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks every service at once.
pub async fn all_collections(gateway: &Gateway) -> Vec<ServiceCollections<'_>> {
    let lists = join_all(gateway.services().iter().map(collections_of));
    within(ALL_SERVICES_TIMEOUT, lists).await
}

/// Asks one service.
pub async fn collections_of(service: &NamedBackend) -> ServiceCollections<'_> {
    let collections = service.backend.collections().await;
    if let Err(error) = &collections {
        tracing::warn!(service = %service.name, %error, "the collections of a service cannot be listed");
    }
    ServiceCollections { service, collections }
}

/// The health of every service, asked at once.
pub async fn all_health(gateway: &Gateway) -> Vec<(&NamedBackend, Health)> {
    let services = gateway.services();
    let health = join_all(services.iter().map(|service| service.backend.health()));
    let health = within(ALL_SERVICES_TIMEOUT, health).await;
    services.iter().zip(health).collect()
}

#[cfg(test)]
mod tests;
