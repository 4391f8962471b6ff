//! Building a [`Health`].

use jiff::Timestamp;
use ragstone_core::Metadata;
use ragstone_core::backend::{Health, HealthStatus};
use ragstone_core::call::CallError;
use tokio::time::Instant;

/// The health of a service that is up but did not answer an authenticated request. Facts it reported
/// stay. A refusal for a reason other than the credentials changes nothing.
pub(crate) fn with_failed_request(mut health: Health, error: &CallError) -> Health {
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

/// Times a health check and turns its outcome into a [`Health`].
pub(crate) struct HealthCheck {
    started: Instant,
}

impl HealthCheck {
    pub(crate) fn start() -> Self {
        Self {
            started: Instant::now(),
        }
    }

    pub(crate) fn answered(self, status: HealthStatus, message: &str, details: Metadata) -> Health {
        Health {
            status,
            message: message.to_owned(),
            timestamp: Timestamp::now().to_string(),
            latency_ms: self.started.elapsed().as_secs_f64() * 1e3,
            details,
        }
    }

    pub(crate) fn failed(self, error: &CallError) -> Health {
        let mut details = Metadata::new();
        details.insert("error".into(), error.to_string().into());
        self.answered(HealthStatus::Unhealthy, &error.to_string(), details)
    }
}
