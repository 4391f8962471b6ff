//! The `services` section, and the settings that all kinds of service share.

use std::time::Duration;

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{JsonType, ValidationError};
use ragstone_core::Metadata;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::auth::AuthConfig;
use super::secret::Environment;
use crate::error::{ConfigError, both};
use crate::http::{AddressRule, Auth, ClientSettings, NamedHost, Policy, ServiceClient};

/// One entry of `services`: the kind of backend, and its connection as that kind's schema has it.
#[derive(Clone, Deserialize)]
pub struct ServiceConfig {
    /// The id of a registered kind of backend.
    pub provider: String,
    #[serde(flatten, deserialize_with = "as_in_the_schema")]
    pub connection: Metadata,
}

/// Maps the spellings that the configuration file may use, such as `timeout_ms` or `api-key`, to those of
/// the schema.
fn as_in_the_schema<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Metadata, D::Error> {
    let mut connection = Metadata::deserialize(deserializer)?;
    rename(&mut connection, "timeout_ms", "timeoutMs");
    if let Some(Value::Object(retry)) = connection.get_mut("retry") {
        rename(retry, "max_attempts", "maxAttempts");
        rename(retry, "delay_ms", "delayMs");
    }
    if let Some(kind) = connection.get_mut("auth").and_then(|auth| auth.get_mut("type"))
        && matches!(kind.as_str(), Some("apiKey" | "api-key" | "header"))
    {
        *kind = "api_key".into();
    }
    Ok(connection)
}

/// A field in both spellings keeps both, and the schema refuses one of them.
fn rename(fields: &mut Metadata, from: &str, to: &str) {
    if !fields.contains_key(to)
        && let Some(value) = fields.remove(from)
    {
        fields.insert(to.to_owned(), value);
    }
}

/// Reads a whole number in every form that JSON Schema accepts: `30000` and `30000.0`.
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
    /// The host and port of its URL, if it has one.
    pub fn host(&self) -> Option<NamedHost> {
        NamedHost::of_url(self.connection.get("url")?.as_str()?.trim())
    }
}

/// Shows only the names of the connection's fields, because their values may be secrets.
impl std::fmt::Debug for ServiceConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceConfig")
            .field("provider", &self.provider)
            .field("connection", &self.connection.keys().collect::<Vec<_>>())
            .finish()
    }
}

/// Retries of a call.
#[derive(Debug, Clone, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct RetryConfig {
    /// Maximum number of attempts.
    #[schemars(title = "Attempts", range(min = 1, max = 10))]
    #[serde(deserialize_with = "whole_number")]
    pub max_attempts: u32,
    /// Delay before the second attempt in milliseconds; it doubles with every further one.
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

/// Connection settings of a service reached over HTTP.
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
        let (mut settings, auth) = both(settings, auth)?;
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
}

/// Reads a connection into the structure of its kind. The error lists every field that violates the
/// schema, and shows no value, because it may be a secret.
pub fn read_connection<T: DeserializeOwned + JsonSchema>(connection: &Metadata) -> Result<T, ConfigError> {
    let connection = Value::Object(connection.clone());
    let schema: Value = schemars::schema_for!(T).into();
    let validator = jsonschema::options()
        .should_validate_formats(true)
        .build(&schema)
        .map_err(|error| ConfigError::field("connection", error.to_string()))?;
    let mut faults = Vec::new();
    for error in validator.iter_errors(&connection) {
        faults_of(&error, &mut faults);
    }
    if let Some(error) = ConfigError::all(faults) {
        return Err(error);
    }
    serde_path_to_error::deserialize(&connection)
        .map_err(|error| ConfigError::field(error.path().to_string(), error.inner().to_string()))
}

/// Puts one violation of the schema into words, field by field.
fn faults_of(error: &ValidationError<'_>, faults: &mut Vec<ConfigError>) {
    let path = error.instance_path().as_str();
    let parent = path.trim_start_matches('/').replace('/', ".");
    let member = |name: &str| match parent.as_str() {
        "" => name.to_owned(),
        parent => format!("{parent}.{name}"),
    };
    match error.kind() {
        ValidationErrorKind::Required { property } => {
            let field = member(property.as_str().unwrap_or_default());
            faults.push(ConfigError::field(field, "is required"));
        }
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            for name in unexpected {
                faults.push(ConfigError::field(member(name), "is not a known field"));
            }
        }
        ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context } => {
            // The alternative that was meant has the right type, and the right tag if it is tagged.
            let tag = format!("{path}/type");
            let is_other = |error: &ValidationError<'_>| match error.kind() {
                ValidationErrorKind::Type { .. } => error.instance_path().as_str() == path,
                _ => error.instance_path().as_str() == tag,
            };
            match context.iter().find(|errors| !errors.iter().any(is_other)) {
                Some(errors) => errors.iter().for_each(|error| faults_of(error, faults)),
                None => faults.extend(no_alternative(context, &member("type"), &parent)),
            }
        }
        ValidationErrorKind::Type { kind } => {
            let message = format!("must be {}", types(kind));
            faults.push(ConfigError::field(parent, message));
        }
        _ => faults.push(ConfigError::field(parent, error.masked().to_string())),
    }
}

/// The fault where a value is none of the alternatives: an unknown tag, or no object at all.
fn no_alternative(context: &[Vec<ValidationError<'_>>], tag: &str, field: &str) -> Option<ConfigError> {
    let errors = || context.iter().flatten();
    let tags: Vec<String> = errors()
        .filter_map(|error| match error.kind() {
            ValidationErrorKind::Constant { expected_value } => Some(expected_value.as_str()?.to_owned()),
            _ => None,
        })
        .collect();
    if !tags.is_empty() {
        return Some(ConfigError::field(
            tag,
            format!("must be one of: {}", tags.join(", ")),
        ));
    }
    let kinds = errors().find_map(|error| match error.kind() {
        ValidationErrorKind::Type { kind } => Some(types(kind)),
        _ => None,
    });
    Some(ConfigError::field(field, format!("must be {}", kinds?)))
}

fn types(kind: &TypeKind) -> String {
    let types: Vec<JsonType> = match kind {
        TypeKind::Single(one) => vec![*one],
        TypeKind::Multiple(several) => several.iter().collect(),
    };
    let names: Vec<&str> = types
        .into_iter()
        .filter(|one| *one != JsonType::Null)
        .map(|one| match one {
            JsonType::String => "a string",
            JsonType::Integer => "a whole number",
            JsonType::Number => "a number",
            JsonType::Boolean => "true or false",
            JsonType::Array => "a list",
            JsonType::Object => "an object",
            JsonType::Null => "null",
        })
        .collect();
    names.join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, Deserialize, JsonSchema)]
    #[serde(rename_all = "camelCase", deny_unknown_fields)]
    struct Example {
        #[allow(dead_code)]
        #[schemars(url)]
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
    fn errors_name_their_field() {
        let url = "http://localhost";
        for (connection, expected) in [
            (json!({}), "url: is required"),
            (json!({"url": 3}), "url: must be a string"),
            (json!({"url": "no address"}), "url: value is not a \"uri\""),
            (json!({"url": url, "urk": 1}), "urk: is not a known field"),
            (
                json!({"url": url, "retry": {"maxAttempts": "x"}}),
                "retry.maxAttempts: must be a whole number",
            ),
            (
                json!({"url": url, "retry": {"maxAttempts": 99}}),
                "retry.maxAttempts: value is greater than the maximum of 10",
            ),
            (
                json!({"url": url, "retry": {"often": 1}}),
                "retry.often: is not a known field",
            ),
            (json!({"url": url, "retry": 3}), "retry: must be an object"),
            (json!({"url": url, "auth": 3}), "auth: must be an object"),
            (json!({"url": url, "auth": {}}), "auth.type: is required"),
            (
                json!({"url": url, "auth": {"type": "magic"}}),
                "auth.type: must be one of: none, bearer, basic, api_key",
            ),
            (
                json!({"url": url, "auth": {"type": "bearer"}}),
                "auth.token: is required",
            ),
            (
                json!({"url": url, "auth": {"type": "none", "token": "t"}}),
                "auth.token: is not a known field",
            ),
        ] {
            assert_eq!(refusal(connection), expected);
        }
    }

    #[test]
    fn the_configuration_file_may_spell_in_another_way() {
        for sign_in in ["header", "apiKey", "api-key", "api_key"] {
            let config: ServiceConfig = serde_saphyr::from_str(&format!(
                "{{provider: p, url: u, timeout_ms: 5, auth: {{type: {sign_in}, key: k}}, retry: {{max_attempts: 2, delayMs: 1}}}}",
            ))
            .unwrap();
            assert_eq!(
                Value::Object(config.connection),
                json!({"url": "u", "timeoutMs": 5, "auth": {"type": "api_key", "key": "k"},
                    "retry": {"maxAttempts": 2, "delayMs": 1}})
            );
        }
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
    fn all_faults_are_listed_and_no_secret_is_shown() {
        let message = refusal(json!({
            "url": 7, "urk": 1, "retry": {"maxAttempts": "x", "delayMs": -1},
            "auth": {"type": "bearer", "token": ["canary"]},
        }));
        for part in [
            "url: must be a string",
            "urk: is not a known field",
            "retry.maxAttempts: must be a whole number",
            "retry.delayMs: value is less than the minimum of 0",
            "auth.token: must be a string",
        ] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(!message.contains("canary"), "{message}");
    }
}
