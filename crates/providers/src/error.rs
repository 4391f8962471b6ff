//! What can be wrong with a configuration.

/// A configuration that cannot be used. The message names the key at fault and never shows a secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("{field}: {message}")]
    Field { field: String, message: String },
    #[error("{field}: the environment variable '{variable}' is not set")]
    MissingVariable { field: String, variable: String },
    #[error("Unknown {kind} '{given}'; known are: {known}")]
    Unknown {
        kind: &'static str,
        given: String,
        known: String,
    },
    #[error("provider '{provider}' needs an apiKey")]
    MissingKey { provider: String },
    #[error("provider '{provider}' is of type '{provider_type}', which offers no {lacking}")]
    NotOffered {
        provider: String,
        provider_type: String,
        lacking: &'static str,
    },
    #[error("the HTTP client cannot be set up: {0}")]
    Client(String),
}

impl ConfigError {
    pub fn field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field {
            field: field.into(),
            message: message.into(),
        }
    }

    /// Puts the error under a longer path, such as `services.chroma.url` for `url`.
    #[must_use]
    pub fn under(self, prefix: &str) -> Self {
        let longer = |field: String| format!("{prefix}.{field}");
        match self {
            Self::Field { field, message } => Self::Field {
                field: longer(field),
                message,
            },
            Self::MissingVariable { field, variable } => Self::MissingVariable {
                field: longer(field),
                variable,
            },
            other => other,
        }
    }
}
