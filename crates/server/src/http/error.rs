//! Every error a client sees: a status and one sentence it can act on.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use ragstone_core::backend::BackendError;
use ragstone_core::call::{CallError, ErrorAnswer};
use ragstone_core::document::Metadata;
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{ModelError, RemoteFault};
use ragstone_core::storage::StorageError;
use ragstone_ingest::jobs::JobError;
use ragstone_providers::ConfigError;
use ragstone_search::gateway::UnknownService;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of every answer that is not a success.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[schema(example = json!({"detail": "Collection 'manuals' not found"}))]
pub struct ErrorBody {
    /// One sentence that says what to change.
    pub detail: String,
    /// The same by field, where fields of a connection are wrong.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    pub errors: Vec<FieldError>,
}

#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct FieldError {
    /// With the names of what it is in before it: `auth.token`.
    pub field: String,
    pub message: String,
}

/// The detail of an error, left with the response for layers that say it in another form too.
#[derive(Debug, Clone)]
pub(super) struct Explained(pub(super) String);

#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    detail: String,
    errors: Vec<FieldError>,
    retry_after: Option<Duration>,
    /// The answer of another service, to be passed on as it is.
    passed_on: Option<Box<ErrorAnswer>>,
}

impl ApiError {
    fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
            errors: Vec::new(),
            retry_after: None,
            passed_on: None,
        }
    }

    /// The sentence alone, for an answer that reports the error of a part.
    pub fn into_detail(self) -> String {
        self.detail
    }

    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub fn unauthorized() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "A valid API key is required: send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'",
        )
    }

    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    pub fn route_not_found() -> Self {
        Self::not_found("Not Found")
    }

    pub fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed")
    }

    pub fn too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("The request body is larger than the limit of {limit} bytes: send it in smaller parts"),
        )
    }

    pub fn unsupported_encoding(encoding: &HeaderValue) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("A request body with Content-Encoding {encoding:?} is not understood: send it as it is"),
        )
    }

    pub fn foreign_site() -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            "Without API keys this server answers only what this machine asks for itself, \
             not for another site: use localhost in the address, or set RAGSTONE_API_KEYS and send a key",
        )
    }

    pub fn timeout() -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            "The request body did not arrive in time",
        )
    }

    pub fn no_service() -> Self {
        Self::bad_request("Service name is required")
    }

    /// What was asked for needs a configuration that is not there.
    pub fn not_configured(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
    }

    pub fn bad_gateway(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, detail)
    }

    pub fn busy(detail: impl Into<String>, retry_after: Duration) -> Self {
        Self {
            retry_after: Some(retry_after),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, detail)
        }
    }

    /// The status is that of the first; the sentence names every one.
    pub(super) fn none_searched(failures: Vec<(String, Self)>) -> Self {
        let mut failures = failures.into_iter();
        let Some((collection, first)) = failures.next() else {
            return Self::bad_request("There is no collection to search");
        };
        let others: Vec<_> = failures.collect();
        if others.is_empty() {
            return first;
        }
        let mut detail = format!("No collection could be searched. {collection}: {}", first.detail);
        for (collection, other) in others {
            detail.push_str(&format!("; {collection}: {}", other.detail));
        }
        Self { detail, ..first }
    }

    /// What a service answered, as it is where that is an error like ours. What says it in another form,
    /// such as ChromaDB's, is said in ours; a page, or a text, is not shown at all.
    fn of_a_service(status: StatusCode, answer: Box<ErrorAnswer>) -> Self {
        let retry_after = answer.retry_after;
        let message = answer.message();
        let is_like_ours = serde_json::from_slice::<Metadata>(&answer.body)
            .is_ok_and(|body| body.contains_key("detail") || message.is_none());
        let error = if is_like_ours {
            Self {
                passed_on: Some(answer),
                ..Self::new(status, message.unwrap_or_default())
            }
        } else {
            let nothing_said = || {
                let ErrorAnswer { service, status, .. } = &*answer;
                format!("Service '{service}' answered with status {status}")
            };
            Self::new(status, message.unwrap_or_else(nothing_said))
        };
        Self { retry_after, ..error }
    }

    /// A failure of ours whose reason a client may see.
    pub fn failed(detail: impl Into<String>) -> Self {
        let detail = detail.into();
        tracing::error!(%detail, "request failed");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }

    /// A failure of ours whose reason belongs in the log only.
    pub fn internal(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut reason = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            reason.push_str(": ");
            reason.push_str(&inner.to_string());
            source = inner.source();
        }
        tracing::error!(%reason, "request failed");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "The server could not do this; its log says why, under the id in the X-Request-Id header",
        )
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = match self.passed_on {
            Some(answer) => {
                // The body is JSON, whatever the service calls it.
                let content_type = answer
                    .content_type
                    .as_deref()
                    .filter(|kind| is_json(kind))
                    .and_then(|kind| HeaderValue::from_str(kind).ok());
                let content_type = content_type.unwrap_or(HeaderValue::from_static("application/json"));
                (self.status, [(header::CONTENT_TYPE, content_type)], answer.body).into_response()
            }
            None => {
                let explained = Explained(self.detail.clone());
                let body = ErrorBody {
                    detail: self.detail,
                    errors: self.errors,
                };
                (self.status, Extension(explained), Json(body)).into_response()
            }
        };
        if let Some(delay) = self.retry_after {
            let seconds = delay.as_secs().max(1);
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<InvalidInput> for ApiError {
    fn from(error: InvalidInput) -> Self {
        Self::bad_request(error.message())
    }
}

impl From<StorageError> for ApiError {
    fn from(error: StorageError) -> Self {
        match &error {
            StorageError::CollectionNotFound(_) => Self::not_found(error.to_string()),
            StorageError::CollectionExists(_) => Self::new(StatusCode::CONFLICT, error.to_string()),
            StorageError::DimensionMismatch { .. } | StorageError::Unsupported(_) => {
                Self::bad_request(error.to_string())
            }
            StorageError::Unavailable { message, retry_after } => Self::busy(message.clone(), *retry_after),
            StorageError::Call(call) => call.clone().into(),
            StorageError::Failed(_) => Self::internal(&error),
        }
    }
}

impl From<ModelError> for ApiError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Overloaded { retry_after } => Self {
                retry_after: Some(retry_after),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, error.to_string())
            },
            ModelError::InvalidInput(message) => Self::bad_request(message),
            ModelError::Unavailable(message) => Self::busy(message, Duration::from_secs(5)),
            ModelError::Failed(message) => Self::failed(message),
            ModelError::Remote(failure) => {
                let detail = capitalised(&failure.to_string());
                match failure.fault {
                    RemoteFault::Busy { retry_after } => Self::busy(detail, retry_after),
                    RemoteFault::Refused { .. } => Self::bad_request(detail),
                    RemoteFault::Down => Self {
                        retry_after: Some(DEFAULT_RETRY),
                        ..Self::bad_gateway(detail)
                    },
                    RemoteFault::Misconfigured { .. } | RemoteFault::BadAnswer | RemoteFault::OtherModel => {
                        Self::bad_gateway(detail)
                    }
                }
            }
        }
    }
}

impl From<JobError> for ApiError {
    fn from(error: JobError) -> Self {
        match error {
            JobError::TooManyJobs { .. } => Self {
                retry_after: Some(Duration::from_secs(5)),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, capitalised(&error.to_string()))
            },
            JobError::Backend(error) => error.into(),
        }
    }
}

/// For a connection that a client brings.
impl From<ConfigError> for ApiError {
    fn from(error: ConfigError) -> Self {
        let by_field = error.each().into_iter().filter_map(ConfigError::by_field);
        Self {
            errors: by_field
                .map(|(field, message)| FieldError {
                    field: field.to_owned(),
                    message,
                })
                .collect(),
            ..Self::bad_request(error.to_string())
        }
    }
}

impl From<UnknownService> for ApiError {
    fn from(error: UnknownService) -> Self {
        Self::not_found(error.to_string())
    }
}

impl From<BackendError> for ApiError {
    fn from(error: BackendError) -> Self {
        match error {
            BackendError::CollectionNotFound(_) => Self::not_found(error.to_string()),
            BackendError::CollectionExists(_) => Self::new(StatusCode::CONFLICT, error.to_string()),
            BackendError::Invalid(invalid) => invalid.into(),
            BackendError::Unsupported(message) => Self::bad_request(message),
            BackendError::NoModel { .. } => Self::bad_request(error.to_string()),
            BackendError::ModelNotLoaded { .. } | BackendError::NoReranker => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
            BackendError::Model(error) => error.into(),
            BackendError::Storage(error) => error.into(),
            BackendError::Call(error) => error.into(),
        }
    }
}

/// When to come again, where a service that is not available does not say.
const DEFAULT_RETRY: Duration = Duration::from_secs(5);

/// A 4xx is the client's to mend, so it passes on, and so does a 503 that gives its reason;
/// anything else that is no answer is the service's fault.
impl From<CallError> for ApiError {
    fn from(error: CallError) -> Self {
        let service = error.service();
        match error.status() {
            // The client asked for it, but it is the operator who can mend it.
            Some(401 | 403) => tracing::warn!(service, %error, "a service does not take our credentials"),
            Some(400..500) => tracing::debug!(service, %error, "a service refused what it was asked"),
            Some(_) if error.is_considered() => {
                tracing::debug!(service, %error, "a service cannot do what it was asked");
            }
            _ => tracing::warn!(service, %error, "a service gave no usable answer"),
        }
        let status = match &error {
            CallError::DeadlineExceeded { .. } => StatusCode::GATEWAY_TIMEOUT,
            _ => StatusCode::BAD_GATEWAY,
        };
        match error {
            CallError::Answered(answer) => match StatusCode::from_u16(answer.status) {
                Ok(status) if status.is_client_error() || answer.is_considered() => {
                    Self::of_a_service(status, answer)
                }
                // Not now is no failure: the client is told to come again, as the service would have.
                Ok(status) if status == StatusCode::SERVICE_UNAVAILABLE => Self::busy(
                    format!(
                        "Service '{}' answered with status 503: it cannot do this at the moment",
                        answer.service
                    ),
                    answer.retry_after.unwrap_or(DEFAULT_RETRY),
                ),
                // What another server says about its failure is for the log.
                _ => Self::new(
                    StatusCode::BAD_GATEWAY,
                    format!(
                        "Service '{}' answered with status {}",
                        answer.service, answer.status
                    ),
                ),
            },
            CallError::CircuitOpen { retry_after, .. } => Self {
                retry_after: Some(retry_after),
                ..Self::new(status, capitalised(&error.to_string()))
            },
            _ => Self::new(status, capitalised(&error.to_string())),
        }
    }
}

fn is_json(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or_default().trim();
    kind.eq_ignore_ascii_case("application/json") || kind.to_ascii_lowercase().ends_with("+json")
}

fn capitalised(sentence: &str) -> String {
    let mut chars = sentence.chars();
    match chars.next() {
        Some(first) => first.to_uppercase().chain(chars).collect(),
        None => String::new(),
    }
}
