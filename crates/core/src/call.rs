//! Failed calls to services over the network.

use std::time::Duration;

use serde_json::Value;

/// Why a call over the network brought no usable answer. The messages name the service and never
/// carry a secret.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CallError {
    #[error("service '{service}' cannot be reached: {reason}")]
    Unreachable { service: String, reason: String },
    #[error("service '{service}' did not answer within {} ms", .after.as_millis())]
    DeadlineExceeded { service: String, after: Duration },
    /// It failed so often in a row that it is left alone for a while; nothing was sent.
    #[error("service '{service}' failed repeatedly and is not asked again for {} s", .retry_after.as_secs().max(1))]
    CircuitOpen { service: String, retry_after: Duration },
    #[error("the answer of service '{service}' is larger than {limit} bytes")]
    TooLarge { service: String, limit: u64 },
    #[error("service '{service}' gave an answer that cannot be used: {reason}")]
    BadAnswer { service: String, reason: String },
    /// It answered with a status other than success, after the retries that were worth making.
    #[error("service '{}' answered with status {}{}", .0.service, .0.status, .0.reason())]
    Answered(Box<ErrorAnswer>),
}

/// An answer with a 3xx, 4xx or 5xx status, so that a gateway can pass a 4xx on unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorAnswer {
    pub service: String,
    pub status: u16,
    pub content_type: Option<String>,
    pub body: Vec<u8>,
    pub retry_after: Option<Duration>,
}

/// A service may answer with a page; a message is a sentence or two.
const LONGEST_REASON: usize = 300;

impl ErrorAnswer {
    /// The message of the usual JSON error shapes, with a colon before it; empty where there is none.
    fn reason(&self) -> String {
        self.message()
            .map_or_else(String::new, |message| format!(": {message}"))
    }

    /// A 503 that gives its reason and no time to come again is no outage: the service has looked at
    /// the request and cannot do it as things stand, because a model is not loaded, for example.
    pub fn is_considered(&self) -> bool {
        let gives_its_reason = || {
            serde_json::from_slice::<Value>(&self.body)
                .is_ok_and(|body| body.get("detail").is_some_and(Value::is_string))
        };
        self.status == 503 && self.retry_after.is_none() && gives_its_reason()
    }

    /// It does not take our key. Google says so with a 400.
    pub fn refuses_our_key(&self) -> bool {
        let names_the_key = || {
            let body = self.said().unwrap_or_default();
            let reasons = body.pointer("/error/details").and_then(Value::as_array);
            let starts = |said: Option<&str>, word: &str| {
                said.is_some_and(|said| said.to_ascii_lowercase().starts_with(word))
            };
            starts(self.message().as_deref(), "api key")
                || reasons
                    .into_iter()
                    .flatten()
                    .any(|detail| starts(detail["reason"].as_str(), "api_key_"))
        };
        match self.status {
            401 | 403 => true,
            400 => names_the_key(),
            _ => false,
        }
    }

    /// The body as JSON; of a list, which Google makes of an error for a stream, the first element.
    fn said(&self) -> Option<Value> {
        match serde_json::from_slice(&self.body).ok()? {
            Value::Array(list) => list.into_iter().next(),
            said => Some(said),
        }
    }

    /// The error message of the service, if its body has one of the known shapes.
    pub fn message(&self) -> Option<String> {
        let body = self.said()?;
        let said = ["/detail", "/error/message", "/message", "/error"]
            .iter()
            .find_map(|path| body.pointer(path)?.as_str())?;
        Some(said.chars().take(LONGEST_REASON).collect())
    }
}

impl CallError {
    pub fn service(&self) -> &str {
        match self {
            Self::Unreachable { service, .. }
            | Self::DeadlineExceeded { service, .. }
            | Self::CircuitOpen { service, .. }
            | Self::TooLarge { service, .. }
            | Self::BadAnswer { service, .. } => service,
            Self::Answered(answer) => &answer.service,
        }
    }

    /// The message for whoever asked. What a service says of a failure of its own may tell of its
    /// insides, and is for the log.
    pub fn public(&self) -> String {
        match self {
            Self::Answered(answer) if answer.status >= 500 && !answer.is_considered() => {
                format!(
                    "service '{}' answered with status {}",
                    answer.service, answer.status
                )
            }
            other => other.to_string(),
        }
    }

    /// The service answers, and what it cannot do says nothing of what else it can.
    pub fn is_considered(&self) -> bool {
        matches!(self, Self::Answered(answer) if answer.is_considered())
    }

    /// The status the service answered with, if it answered.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Answered(answer) => Some(answer.status),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_answer_says_what_the_service_said() {
        let answer = |body: &str| {
            CallError::Answered(Box::new(ErrorAnswer {
                service: "s".into(),
                status: 400,
                content_type: None,
                body: body.into(),
                retry_after: None,
            }))
            .to_string()
        };
        assert_eq!(
            answer(r#"{"detail":"no field"}"#),
            "service 's' answered with status 400: no field"
        );
        assert_eq!(
            answer(r#"{"error":{"message":"bad"}}"#),
            "service 's' answered with status 400: bad"
        );
        assert_eq!(
            answer(r#"[{"error":{"message":"listed"}}]"#),
            "service 's' answered with status 400: listed"
        );
        assert_eq!(answer("<html>"), "service 's' answered with status 400");
        assert_eq!(answer("[]"), "service 's' answered with status 400");
    }

    #[test]
    fn what_a_service_says_of_its_own_failures_is_not_public() {
        let public = |status| {
            let error = CallError::Answered(Box::new(ErrorAnswer {
                service: "s".into(),
                status,
                content_type: None,
                body: br#"{"detail":"table x"}"#.to_vec(),
                retry_after: None,
            }));
            assert!(error.to_string().ends_with(": table x"), "{error}");
            error.public()
        };
        assert_eq!(public(500), "service 's' answered with status 500");
        assert_eq!(public(404), "service 's' answered with status 404: table x");
        assert_eq!(
            public(503),
            "service 's' answered with status 503: table x",
            "considered"
        );
    }

    #[test]
    fn a_503_with_a_reason_and_no_time_is_considered() {
        let considered = |status, body: &str, retry_after| {
            ErrorAnswer {
                service: "s".into(),
                status,
                content_type: None,
                body: body.into(),
                retry_after,
            }
            .is_considered()
        };
        let reason = r#"{"detail":"Embedding model 'ghost' not loaded"}"#;
        assert!(considered(503, reason, None));
        assert!(!considered(503, reason, Some(Duration::from_secs(1))));
        assert!(!considered(503, "<html>", None) && !considered(503, "{}", None));
        assert!(!considered(500, reason, None));
    }
}
