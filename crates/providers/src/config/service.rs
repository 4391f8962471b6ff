//! The `services` section, and what all kinds of service have in common.

use std::collections::BTreeMap;
use std::time::Duration;

use ragstone_core::Metadata;
use ragstone_core::error::in_plain_words;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::auth::AuthConfig;
use super::secret::Environment;
use crate::error::{ConfigError, Faults, both};
use crate::http::{AddressRule, Auth, ClientSettings, NamedHost, Policy, ServiceClient};

/// One entry of `services`: the kind of backend, and its connection as that kind's schema has it.
#[derive(Clone, Deserialize)]
pub struct ServiceConfig {
    /// The id of a registered kind of backend.
    pub provider: String,
    #[serde(flatten, deserialize_with = "as_in_the_schema")]
    pub connection: Metadata,
}

/// The configuration file may say `timeout_ms` for `timeoutMs`, and may name a sign-in otherwise than the
/// schema does. What the schema describes is one spelling, to which everybody else is held.
fn as_in_the_schema<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metadata, D::Error> {
    let mut connection = Metadata::deserialize(deserializer)?;
    rename(&mut connection, "timeout_ms", "timeoutMs");
    if let Some(Value::Object(retry)) = connection.get_mut("retry") {
        rename(retry, "max_attempts", "maxAttempts");
        rename(retry, "delay_ms", "delayMs");
    }
    if let Some(kind) = connection.get_mut("auth").and_then(|auth| auth.get_mut("type"))
        && matches!(kind.as_str(), Some("apiKey" | "header"))
    {
        *kind = "api_key".into();
    }
    Ok(connection)
}

/// A field that is there in both spellings stays in both, and is then unknown in one of them.
fn rename(fields: &mut Metadata, from: &str, to: &str) {
    if !fields.contains_key(to)
        && let Some(value) = fields.remove(from)
    {
        fields.insert(to.to_owned(), value);
    }
}

/// A whole number in any form that JSON Schema takes for one: `30000`, and `30000.0` as well.
pub(crate) fn whole_number<'de, D, N>(deserializer: D) -> Result<N, D::Error>
where
    D: Deserializer<'de>,
    N: TryFrom<u64>,
{
    use serde::de::{Error, Unexpected, Visitor};

    struct Whole;

    impl Visitor<'_> for Whole {
        type Value = u64;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a whole number, zero or more")
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<u64, E> {
            Ok(number)
        }

        fn visit_i64<E: Error>(self, number: i64) -> Result<u64, E> {
            u64::try_from(number).map_err(|_| E::invalid_value(Unexpected::Signed(number), &self))
        }

        fn visit_f64<E: Error>(self, number: f64) -> Result<u64, E> {
            if number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number) {
                Ok(number as u64)
            } else {
                Err(E::invalid_value(Unexpected::Float(number), &self))
            }
        }
    }

    let number = deserializer.deserialize_u64(Whole)?;
    N::try_from(number).map_err(|_| D::Error::invalid_value(Unexpected::Unsigned(number), &Whole))
}

impl ServiceConfig {
    /// The host and port that its address names, where it has one.
    pub fn host(&self) -> Option<NamedHost> {
        NamedHost::of_url(self.connection.get("url")?.as_str()?.trim())
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

/// When a call is sent again.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RetryConfig {
    /// How often a call is sent at most.
    #[schemars(title = "Attempts", range(min = 1, max = 10))]
    #[serde(deserialize_with = "whole_number")]
    pub max_attempts: u32,
    /// The wait before the second attempt, in milliseconds; it doubles from one to the next.
    #[schemars(title = "Delay (ms)", range(max = 60000))]
    #[serde(deserialize_with = "whole_number")]
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
        let settings = ClientSettings::new(self.service, self.url, "url");
        let auth = self.auth.map_or(Ok(Auth::None), |auth| auth.resolve(env));
        let ((mut settings, ()), auth) = both(both(settings, self.check_limits()), auth)?;
        settings.auth = auth;
        settings.addresses = self.addresses.clone();
        settings.policy = Policy {
            deadline: Duration::from_millis(self.timeout_ms),
            max_attempts: self.retry.max_attempts,
            first_delay: Duration::from_millis(self.retry.delay_ms),
            ..Policy::default()
        };
        ServiceClient::new(settings)
    }

    fn check_limits(&self) -> Result<(), ConfigError> {
        let limits = [
            (
                (1..=3_600_000).contains(&self.timeout_ms),
                "timeoutMs",
                "must be between 1 and 3600000",
            ),
            (
                (1..=10).contains(&self.retry.max_attempts),
                "retry.maxAttempts",
                "must be between 1 and 10",
            ),
            (
                self.retry.delay_ms <= 60_000,
                "retry.delayMs",
                "must be at most 60000",
            ),
        ];
        let broken = limits.into_iter().filter(|(kept, ..)| !kept);
        let errors = broken.map(|(_, field, message)| ConfigError::field(field, message));
        ConfigError::all(errors.collect()).map_or(Ok(()), Err)
    }
}

/// So many fields of a connection are reported at most.
const MAX_FAULTS: usize = 16;

/// Reads a connection into its kind's own structure, and says what was wrong with it. Whatever is wrong
/// is replaced by a stand-in, so that what else is wrong is found as well; where that leads nowhere, there
/// is only the error.
pub fn read_connection<T: DeserializeOwned>(connection: &Metadata) -> Result<(T, Faults), ConfigError> {
    let mut mended = Value::Object(connection.clone());
    let mut faults: Vec<(String, String)> = Vec::new();
    // How often a field was reported, and so what was tried with it already.
    let mut tried: BTreeMap<String, usize> = BTreeMap::new();
    let as_errors = |faults: Vec<(String, String)>| -> Vec<ConfigError> {
        faults
            .into_iter()
            .map(|(field, message)| ConfigError::field(field, message))
            .collect()
    };
    loop {
        let error = match serde_path_to_error::deserialize(&mended) {
            Ok(read) => return Ok((read, Faults(as_errors(faults)))),
            Err(error) => error,
        };
        let field = field_at_fault(&error);
        let attempt = tried.entry(field.clone()).or_default();
        if *attempt == 0 {
            faults.push((field.clone(), in_plain_words(&error.inner().to_string())));
        }
        *attempt += 1;
        if faults.len() >= MAX_FAULTS || !put_right(&mut mended, &field, *attempt) {
            let errors = as_errors(faults);
            return Err(ConfigError::all(errors)
                .unwrap_or_else(|| ConfigError::field("connection", "cannot be read")));
        }
    }
}

/// Leaves a faulty field out, or, where it is then missing, puts a text in its place, or leaves out what
/// it is a part of. Returns whether there was something left to try.
fn put_right(connection: &mut Value, field: &str, attempt: usize) -> bool {
    let (parent, name) = field.rsplit_once('.').unwrap_or(("", field));
    let pointer = |path: &str| {
        let steps = path.split('.').filter(|step| !step.is_empty());
        steps.map(|step| format!("/{step}")).collect::<String>()
    };
    let Some(object) = connection
        .pointer_mut(&pointer(parent))
        .and_then(Value::as_object_mut)
    else {
        return false;
    };
    match attempt {
        1 if object.contains_key(name) => {
            object.remove(name);
        }
        1 | 2 => {
            object.insert(name.to_owned(), "-".into());
        }
        3 if !parent.is_empty() => {
            return put_right(connection, parent, 1);
        }
        _ => return false,
    }
    true
}

fn field_at_fault(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    let message = error.inner().to_string();
    let path = error.path().to_string();
    let parent = Some(path).filter(|path| path != ".");
    // serde reports a missing or unknown field at the object that should or should not have it.
    let named = ["missing field `", "unknown field `"]
        .iter()
        .find_map(|start| message.strip_prefix(start)?.split('`').next());
    match (parent, named) {
        (Some(parent), Some(name)) if !parent.ends_with(name) => format!("{parent}.{name}"),
        (Some(parent), _) => parent,
        (None, Some(name)) => name.to_owned(),
        (None, None) => "connection".to_owned(),
    }
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
        let (_, faults) = read_connection::<Example>(&connection).unwrap();
        faults.and(Ok(())).unwrap_err().to_string()
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
    fn the_configuration_file_may_spell_in_another_way() {
        let config: ServiceConfig = serde_saphyr::from_str(
            "{provider: p, url: u, timeout_ms: 5, auth: {type: header, key: k}, retry: {max_attempts: 2, delayMs: 1}}",
        )
        .unwrap();
        assert_eq!(
            Value::Object(config.connection),
            json!({"url": "u", "timeoutMs": 5, "auth": {"type": "api_key", "key": "k"},
                "retry": {"maxAttempts": 2, "delayMs": 1}})
        );
        let twice: ServiceConfig =
            serde_json::from_value(json!({"provider": "p", "timeout_ms": 5, "timeoutMs": 6})).unwrap();
        assert_eq!(
            Value::Object(twice.connection),
            json!({"timeout_ms": 5, "timeoutMs": 6})
        );
    }

    #[test]
    fn whole_numbers_are_whole_in_any_form() {
        let read = |attempts: Value| {
            serde_json::from_value::<RetryConfig>(json!({"maxAttempts": attempts, "delayMs": 1.0}))
        };
        assert_eq!(read(json!(3.0)).unwrap().max_attempts, 3);
        for wrong in [
            json!(2.5),
            json!(-1),
            json!(-1.0),
            json!(1e300),
            json!(u64::MAX),
            json!("3"),
        ] {
            let message = read(wrong).unwrap_err().to_string();
            assert!(message.contains("a whole number"), "{message}");
        }
    }

    #[test]
    fn all_that_is_wrong_is_said_in_plain_words() {
        let message = refusal(json!({
            "url": 7, "urk": 1, "retry": {"maxAttempts": "x", "delayMs": -1}, "auth": {"type": "bearer", "token": 123},
        }));
        for part in [
            "url: invalid type",
            "urk: unknown field",
            "retry.maxAttempts: invalid type",
            "retry.delayMs: invalid value",
            "auth.token: must be a string",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
        for (connection, part) in [
            (json!({"url": "u", "auth": 3}), "auth: invalid type"),
            (json!({"url": "u", "auth": {}}), "auth.type: missing field"),
            (
                json!({"url": "u", "retry": 3}),
                "retry: invalid type: integer `3`, expected an object",
            ),
            (
                json!({"url": "u", "auth": {"type": "none", "token": "t"}}),
                "auth.token: unknown field",
            ),
        ] {
            let message = refusal(connection);
            assert!(message.contains(part), "{message}");
            assert!(
                !message.contains("Config") && !message.contains("struct"),
                "{message}"
            );
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
