//! The `services` section, and what all kinds of service have in common.

use std::time::Duration;

use ragstone_core::Metadata;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::secret::{Environment, Secret};
use crate::error::ConfigError;
use crate::http::{AddressRule, Auth, ClientSettings, Policy, ServiceClient};

/// One entry of `services`: the kind of backend, and its connection as that kind's schema has it.
#[derive(Clone, Deserialize)]
pub struct ServiceConfig {
    /// The id of a registered kind of backend.
    pub provider: String,
    #[serde(flatten)]
    pub connection: Metadata,
}

impl ServiceConfig {
    /// The host that its address names, where it has one.
    pub fn host(&self) -> Option<String> {
        let url = reqwest::Url::parse(self.connection.get("url")?.as_str()?).ok()?;
        url.host_str().map(str::to_owned)
    }
}

/// The connection may hold keys, so only the names of its fields are shown.
impl std::fmt::Debug for ServiceConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceConfig")
            .field("provider", &self.provider)
            .field("connection", &self.connection.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// How to sign in to the service.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum AuthConfig {
    /// No credentials.
    None,
    /// `Authorization: Bearer TOKEN`
    Bearer { token: Secret },
    /// User name and password.
    Basic { username: String, password: Secret },
    /// A key in a header of its own.
    #[serde(alias = "apiKey", alias = "header")]
    ApiKey {
        #[serde(default = "default_key_header")]
        header: String,
        key: Secret,
    },
}

fn default_key_header() -> String {
    "X-API-Key".to_owned()
}

/// When a call is sent again.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RetryConfig {
    /// How often a call is sent at most.
    #[schemars(title = "Attempts", range(min = 1, max = 10))]
    #[serde(alias = "max_attempts")]
    pub max_attempts: u32,
    /// The wait before the second attempt, in milliseconds; it doubles from one to the next.
    #[schemars(title = "Delay (ms)", range(max = 60000))]
    #[serde(alias = "delay_ms")]
    pub delay_ms: u64,
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            max_attempts: 3,
            delay_ms: 500,
        }
    }
}

/// What is needed to reach any service over HTTP.
#[derive(Debug)]
pub struct Endpoint<'a> {
    pub service: &'a str,
    pub url: &'a str,
    pub auth: Option<&'a AuthConfig>,
    pub timeout_ms: u64,
    pub retry: &'a RetryConfig,
    pub addresses: AddressRule,
}

impl Endpoint<'_> {
    pub fn client(&self, env: Environment) -> Result<ServiceClient, ConfigError> {
        let mut settings = ClientSettings::new(self.service, self.url, "url")?;
        if !(1..=3_600_000).contains(&self.timeout_ms) {
            return Err(ConfigError::field("timeoutMs", "must be between 1 and 3600000"));
        }
        if !(1..=10).contains(&self.retry.max_attempts) {
            return Err(ConfigError::field(
                "retry.maxAttempts",
                "must be between 1 and 10",
            ));
        }
        if self.retry.delay_ms > 60_000 {
            return Err(ConfigError::field("retry.delayMs", "must be at most 60000"));
        }
        settings.auth = self.auth.map_or(Ok(Auth::None), |auth| auth.resolve(env))?;
        settings.addresses = self.addresses.clone();
        settings.policy = Policy {
            deadline: Duration::from_millis(self.timeout_ms),
            max_attempts: self.retry.max_attempts,
            first_delay: Duration::from_millis(self.retry.delay_ms),
            ..Policy::default()
        };
        ServiceClient::new(settings)
    }
}

impl AuthConfig {
    fn resolve(&self, env: Environment) -> Result<Auth, ConfigError> {
        let required = |secret: &Secret, field: &str| {
            secret
                .resolve(field, env)?
                .ok_or_else(|| ConfigError::field(field, "must not be empty"))
        };
        Ok(match self {
            Self::None => Auth::None,
            Self::Bearer { token } => Auth::Bearer(required(token, "auth.token")?),
            Self::Basic { username, password } => Auth::Basic {
                username: username.clone(),
                password: required(password, "auth.password")?,
            },
            Self::ApiKey { header, key } => Auth::Header {
                name: header.clone(),
                key: required(key, "auth.key")?,
            },
        })
    }
}

/// Reads a connection into its kind's own structure. An error names the field.
pub fn read_connection<T: DeserializeOwned>(connection: &Metadata) -> Result<T, ConfigError> {
    serde_path_to_error::deserialize(&Value::Object(connection.clone())).map_err(|error| {
        let message = error.inner().to_string();
        let path = error.path().to_string();
        let parent = Some(path).filter(|path| path != ".");
        // serde reports a missing or unknown field at the object that should or should not have it.
        let named = ["missing field `", "unknown field `"]
            .iter()
            .find_map(|start| message.strip_prefix(start)?.split('`').next());
        let field = match (parent, named) {
            (Some(parent), Some(name)) if !parent.ends_with(name) => format!("{parent}.{name}"),
            (Some(parent), _) => parent,
            (None, Some(name)) => name.to_owned(),
            (None, None) => "connection".to_owned(),
        };
        ConfigError::field(field, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Example {
        #[allow(dead_code)]
        url: String,
        #[allow(dead_code)]
        auth: Option<AuthConfig>,
        #[allow(dead_code)]
        #[serde(default)]
        retry: RetryConfig,
    }

    fn refusal(connection: Value) -> String {
        let Value::Object(connection) = connection else {
            unreachable!("tests give objects")
        };
        read_connection::<Example>(&connection).unwrap_err().to_string()
    }

    #[test]
    fn errors_come_by_field() {
        for (connection, start) in [
            (json!({}), "url: missing field"),
            (json!({"url": 3}), "url: invalid type"),
            (json!({"url": "u", "urk": 1}), "urk: unknown field"),
            (
                json!({"url": "u", "retry": {"maxAttempts": "x"}}),
                "retry.maxAttempts: invalid type",
            ),
            (
                json!({"url": "u", "retry": {"often": 1}}),
                "retry.often: unknown field",
            ),
            (
                json!({"url": "u", "auth": {"type": "bearer"}}),
                "auth.token: missing field",
            ),
            (
                json!({"url": "u", "auth": {"type": "magic"}}),
                "auth.type: unknown variant",
            ),
        ] {
            let message = refusal(connection);
            assert!(message.starts_with(start), "{message}");
        }
    }

    #[test]
    fn the_limits_of_an_endpoint_are_checked_by_field() {
        let retry = RetryConfig {
            max_attempts: 0,
            delay_ms: 0,
        };
        let endpoint = Endpoint {
            service: "s",
            url: "http://localhost",
            auth: None,
            timeout_ms: 1,
            retry: &retry,
            addresses: AddressRule::Configured,
        };
        let error = endpoint.client(&|_| None).unwrap_err().to_string();
        assert!(error.starts_with("retry.maxAttempts"), "{error}");
    }
}
