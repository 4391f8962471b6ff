//! Keys and tokens in a configuration.

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Deserializer};

use crate::error::ConfigError;

/// Looks up `${NAME}`.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Looks up a variable of this process.
pub fn process_environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// A key or token as configured, possibly `${NAME}`. Variables are looked up on use, so that a missing one
/// is an error only of the service that needs it.
#[derive(Debug, Clone)]
pub struct Secret(SecretString);

impl Secret {
    pub fn new(text: impl Into<String>) -> Self {
        Self(SecretString::from(text.into()))
    }

    /// The value; `None` if it is empty. `field` is its name in error messages.
    pub fn resolve(&self, field: &str, env: Environment) -> Result<Option<SecretString>, ConfigError> {
        let text = interpolate(self.0.expose_secret(), field, env)?;
        if !text.is_empty() && text.trim().is_empty() {
            return Err(ConfigError::field(field, "contains only blanks"));
        }
        Ok((!text.is_empty()).then(|| SecretString::from(text)))
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The derived error for a number or a list would show the value.
        let value = serde_json::Value::deserialize(deserializer)?;
        let text = value.as_str().map(Self::new);
        text.ok_or_else(|| serde::de::Error::custom("must be a string"))
    }
}

impl schemars::JsonSchema for Secret {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Secret".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        // At least one character that is not blank.
        schemars::json_schema!({
            "type": "string", "format": "password", "writeOnly": true, "minLength": 1, "pattern": r"\S",
        })
    }
}

/// Replaces every `${NAME}` by the value of the variable. The error names a variable that is not set.
pub fn interpolate(text: &str, field: &str, env: Environment) -> Result<String, ConfigError> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("${") {
        let (name, after) = after
            .split_once('}')
            .ok_or_else(|| ConfigError::field(field, "'${' without a closing '}'"))?;
        let value = env(name).ok_or_else(|| ConfigError::MissingVariable {
            field: field.to_owned(),
            variable: name.to_owned(),
        })?;
        out.push_str(before);
        out.push_str(&value);
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(name: &str) -> Option<String> {
        (name == "KEY").then(|| "k-1".to_owned())
    }

    #[test]
    fn variables_are_put_in() {
        assert_eq!(interpolate("${KEY}", "f", &env).unwrap(), "k-1");
        assert_eq!(interpolate("a ${KEY}b$c", "f", &env).unwrap(), "a k-1b$c");
        assert_eq!(interpolate("plain", "f", &env).unwrap(), "plain");
    }

    #[test]
    fn a_missing_variable_is_named() {
        let error = Secret::new("${NOPE}")
            .resolve("providers.x.apiKey", &env)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "providers.x.apiKey: the environment variable 'NOPE' is not set"
        );
        assert!(interpolate("${KEY", "f", &env).is_err());
    }

    #[test]
    fn a_secret_of_another_type_is_refused_without_showing_it() {
        let error = serde_json::from_str::<Secret>("31337").unwrap_err().to_string();
        assert!(
            error.contains("must be a string") && !error.contains("31337"),
            "{error}"
        );
    }
}
