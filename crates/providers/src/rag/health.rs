//! The standard health answer, filled in.

use jiff::Timestamp;
use ragstone_core::Metadata;
use ragstone_core::provider::{CallError, Health, HealthStatus};
use tokio::time::Instant;

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
