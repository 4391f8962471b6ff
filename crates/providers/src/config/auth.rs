//! Sign-in to a service.

use reqwest::header::HeaderValue;
use schemars::JsonSchema;
use secrecy::ExposeSecret;
use serde::Deserialize;
use serde_json::Value;

use super::secret::{Environment, Secret};
use crate::error::{ConfigError, both};
use crate::http::Auth;

/// A kind of sign-in.
#[derive(Debug, Clone, JsonSchema)]
#[schemars(tag = "type", rename_all = "snake_case", deny_unknown_fields, transform = describe_type)]
pub enum AuthConfig {
    /// No credentials.
    #[schemars(title = "None")]
    None,
    /// A token, sent as `Authorization: Bearer TOKEN`.
    #[schemars(title = "Bearer token")]
    Bearer {
        /// The token. In the configuration file it may be `${NAME}` for an environment variable of the server;
        /// a connection test looks up none.
        #[schemars(title = "Token", example = &"8d1f2c-token")]
        token: Secret,
    },
    /// User name and password.
    #[schemars(title = "User name and password")]
    Basic {
        /// The user name.
        #[schemars(title = "User name", example = &"ragstone")]
        username: String,
        /// The password. In the configuration file it may be `${NAME}` for an environment variable of the server;
        /// a connection test looks up none.
        #[schemars(title = "Password", example = &"8d1f2c-password")]
        password: Secret,
    },
    /// A key in a header of its own.
    #[schemars(title = "API key")]
    ApiKey {
        /// The header with the key.
        #[schemars(title = "Header", example = &"X-API-Key", default = "default_key_header")]
        header: String,
        /// The key. In the configuration file it may be `${NAME}` for an environment variable of the server;
        /// a connection test looks up none.
        #[schemars(title = "Key", example = &"8d1f2c-key")]
        key: Secret,
    },
}

/// Describes the tags, which the derive leaves without title and description.
fn describe_type(schema: &mut schemars::Schema) {
    let ways = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    for way in ways.into_iter().flatten() {
        if let Some(tag) = way.pointer_mut("/properties/type").and_then(Value::as_object_mut) {
            tag.insert("title".into(), "Kind of sign-in".into());
            tag.insert("description".into(), "The kind of sign-in.".into());
        }
    }
}

fn default_key_header() -> String {
    "X-API-Key".to_owned()
}

/// The fields of all kinds of sign-in. They are read together, because an error in a tagged enum would not
/// name the field.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, expecting = "expected an object with a 'type'")]
struct AuthFields {
    #[serde(rename = "type")]
    kind: AuthKind,
    token: Option<Secret>,
    username: Option<String>,
    password: Option<Secret>,
    header: Option<String>,
    key: Option<Secret>,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum AuthKind {
    None,
    Bearer,
    Basic,
    ApiKey,
}

impl<'de> Deserialize<'de> for AuthConfig {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::Error;
        let mut given = AuthFields::deserialize(deserializer)?;
        let missing = D::Error::missing_field;
        let auth = match given.kind {
            AuthKind::None => Self::None,
            AuthKind::Bearer => Self::Bearer {
                token: given.token.take().ok_or_else(|| missing("token"))?,
            },
            AuthKind::Basic => Self::Basic {
                username: given.username.take().ok_or_else(|| missing("username"))?,
                password: given.password.take().ok_or_else(|| missing("password"))?,
            },
            AuthKind::ApiKey => Self::ApiKey {
                header: given.header.take().unwrap_or_else(default_key_header),
                key: given.key.take().ok_or_else(|| missing("key"))?,
            },
        };
        let left_over = [
            ("token", given.token.is_some()),
            ("username", given.username.is_some()),
            ("password", given.password.is_some()),
            ("header", given.header.is_some()),
            ("key", given.key.is_some()),
        ];
        match left_over.iter().find(|(_, left)| *left) {
            Some((field, _)) => Err(D::Error::custom(format!(
                "unknown field `{field}` for this kind of sign-in"
            ))),
            None => Ok(auth),
        }
    }
}

impl AuthConfig {
    pub(super) fn resolve(&self, env: Environment) -> Result<Auth, ConfigError> {
        let required = |secret: &Secret, field: &str| {
            secret
                .resolve(field, env)?
                .ok_or_else(|| ConfigError::field(field, "must not be empty"))
        };
        // A secret that is not encoded must be a valid header value.
        let in_header = |secret: &Secret, field: &str| {
            let secret = required(secret, field)?;
            match HeaderValue::from_str(secret.expose_secret()) {
                Ok(_) => Ok(secret),
                Err(_) => Err(ConfigError::field(
                    field,
                    "has characters that cannot be sent in a header, such as a line break",
                )),
            }
        };
        Ok(match self {
            Self::None => Auth::None,
            Self::Bearer { token } => Auth::Bearer(in_header(token, "auth.token")?),
            Self::Basic { username, password } => Auth::Basic {
                username: username.clone(),
                password: required(password, "auth.password")?,
            },
            Self::ApiKey { header, key } => {
                let ((), key) = both(check_key_header(header), in_header(key, "auth.key"))?;
                Auth::Header {
                    name: header.clone(),
                    key,
                }
            }
        })
    }
}

/// Headers that control how a request is sent. A key in one of them would break the request or change its
/// destination.
const NOT_FOR_KEYS: [&str; 15] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "expect",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "via",
];

fn check_key_header(header: &str) -> Result<(), ConfigError> {
    if NOT_FOR_KEYS.contains(&header.trim().to_ascii_lowercase().as_str()) {
        let message = "this header controls how a request is sent and cannot carry a key: use X-API-Key";
        return Err(ConfigError::field("auth.header", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_key_goes_into_no_header_that_requests_are_sent_by() {
        for header in ["Host", "content-length", "Connection", "Transfer-Encoding", "TE"] {
            let auth = AuthConfig::ApiKey {
                header: header.to_owned(),
                key: Secret::new("k"),
            };
            let error = auth.resolve(&|_| None).unwrap_err().to_string();
            assert!(error.starts_with("auth.header: "), "{error}");
        }
    }

    #[test]
    fn what_does_not_fit_into_a_header_is_an_error_of_its_field() {
        let secret = || Secret::new("two\nlines");
        for (auth, field) in [
            (AuthConfig::Bearer { token: secret() }, "auth.token"),
            (
                AuthConfig::ApiKey {
                    header: default_key_header(),
                    key: secret(),
                },
                "auth.key",
            ),
        ] {
            let error = auth.resolve(&|_| None).unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("{field}: ")) && !error.contains("two"),
                "{error}"
            );
        }
        let encoded = AuthConfig::Basic {
            username: "u".into(),
            password: secret(),
        };
        assert!(encoded.resolve(&|_| None).is_ok());
    }

    #[test]
    fn every_part_of_signing_in_is_described() {
        let schema: Value = schemars::schema_for!(AuthConfig).into();
        for way in schema["oneOf"].as_array().unwrap() {
            assert!(
                way["title"].is_string() && way["description"].is_string(),
                "{way}"
            );
            for (name, field) in way["properties"].as_object().unwrap() {
                assert!(
                    field["title"].is_string() && field["description"].is_string(),
                    "{name}: {field}"
                );
                assert!(name == "type" || field["examples"].is_array(), "{name}: {field}");
            }
        }
        let of_key = schema["oneOf"].as_array().unwrap().last().unwrap();
        assert_eq!(of_key["required"], json!(["type", "key"]), "{of_key}");
        assert_eq!(of_key["properties"]["header"]["default"], "X-API-Key");
    }
}
