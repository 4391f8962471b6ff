//! The standard health answer, filled in.

use jiff::Timestamp;
use ragstone_core::Metadata;
use ragstone_core::provider::{CallError, Health, HealthStatus};
use tokio::time::Instant;

/// A service that lives but did not do what it was asked with our credentials. What it told of itself
/// stays. A refusal for another reason than the credentials is none of theirs.
pub(super) fn without_admission(mut health: Health, error: &CallError) -> Health {
    let (status, message) = match error.status() {
        Some(401) => (
            HealthStatus::Unhealthy,
            format!(
                "service '{}' does not accept the credentials: correct 'auth' (status 401)",
                error.service()
            ),
        ),
        Some(403) => (
            HealthStatus::Unhealthy,
            format!(
                "service '{}' denies access with these credentials: correct 'auth' or what they may do (status 403)",
                error.service()
            ),
        ),
        Some(_) => return health,
        None => (HealthStatus::Degraded, error.to_string()),
    };
    health.details.insert("error".into(), message.clone().into());
    Health {
        status,
        message,
        ..health
    }
}

/// Measures how long a health check takes, and turns its outcome into the standard answer.
pub(super) struct HealthCheck {
    started: Instant,
}

impl HealthCheck {
    pub(super) fn start() -> Self {
        Self {
            started: Instant::now(),
        }
    }

    pub(super) fn answered(self, status: HealthStatus, message: &str, details: Metadata) -> Health {
        Health {
            status,
            message: message.to_owned(),
            timestamp: Timestamp::now().to_string(),
            latency_ms: self.started.elapsed().as_secs_f64() * 1e3,
            details,
        }
    }

    pub(super) fn failed(self, error: &CallError) -> Health {
        let mut details = Metadata::new();
        details.insert("error".into(), error.to_string().into());
        self.answered(HealthStatus::Unhealthy, &error.to_string(), details)
    }
}
