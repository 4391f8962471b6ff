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
    /// Each names its own key.
    #[error("{}", listed(.0))]
    Several(Vec<ConfigError>),
}

fn listed(errors: &[ConfigError]) -> String {
    let messages: Vec<String> = errors.iter().map(ToString::to_string).collect();
    messages.join("; ")
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
            Self::Unknown { kind, given, known } => Self::Field {
                field: longer(kind.to_owned()),
                message: format!("unknown {kind} '{given}'; known are: {known}"),
            },
            Self::Several(errors) => {
                Self::Several(errors.into_iter().map(|error| error.under(prefix)).collect())
            }
            other => other,
        }
    }

    /// The same for a connection that somebody brings to be tried: variables are not looked up for it.
    #[must_use]
    pub fn of_a_tried_connection(self) -> Self {
        match self {
            Self::MissingVariable { field, variable } => Self::Field {
                field,
                message: format!(
                    "'${{{variable}}}' is not looked up while a connection is tried: give the value itself"
                ),
            },
            Self::Several(errors) => {
                Self::Several(errors.into_iter().map(Self::of_a_tried_connection).collect())
            }
            other => other,
        }
    }

    /// What is wrong, one by one.
    pub fn each(&self) -> Vec<&Self> {
        match self {
            Self::Several(errors) => errors.iter().flat_map(Self::each).collect(),
            one => vec![one],
        }
    }

    /// The key at fault and what is wrong with it, where it is one key.
    pub fn by_field(&self) -> Option<(&str, String)> {
        let (Self::Field { field, .. } | Self::MissingVariable { field, .. }) = self else {
            return None;
        };
        let message = self.to_string();
        let message = message.strip_prefix(&format!("{field}: ")).unwrap_or(&message);
        Some((field, message.to_owned()))
    }

    /// One error out of what may be none, one or several.
    pub(crate) fn all(mut errors: Vec<Self>) -> Option<Self> {
        match errors.len() {
            0 | 1 => errors.pop(),
            _ => Some(Self::Several(errors)),
        }
    }

    fn into_each(self) -> Vec<Self> {
        match self {
            Self::Several(errors) => errors,
            one => vec![one],
        }
    }
}

/// Both, or what is wrong with either.
pub(crate) fn both<A, B>(
    a: Result<A, ConfigError>,
    b: Result<B, ConfigError>,
) -> Result<(A, B), ConfigError> {
    match (a, b) {
        (Ok(a), Ok(b)) => Ok((a, b)),
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => Err(error),
        (Err(a), Err(b)) => Err(ConfigError::Several([a.into_each(), b.into_each()].concat())),
    }
}
