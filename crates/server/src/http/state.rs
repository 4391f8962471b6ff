//! What every handler works with.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;
use ragstone_core::service::Service;
use ragstone_ingest::jobs::Jobs;
use ragstone_ingest::ledger::Ledger;
use ragstone_search::conversations::Conversations;
use ragstone_search::gateway::Gateway;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::auth::ApiKeys;
use super::error::ApiError;
use crate::agent::Agent;

/// Cloned several times for every request, once per layer around it, so a clone must cost next to nothing.
#[derive(Clone)]
pub struct AppState(Arc<Shared>);

pub struct Shared {
    pub service: Service,
    pub agent: Agent,
    pub gateway: Gateway,
    pub conversations: Conversations,
    pub ledger: Ledger,
    pub jobs: Jobs,
    pub limits: Limits,
    pub body_budget: BodyBudget,
    pub keys: ApiKeys,
    /// No other machine can reach the address that is listened on.
    pub only_this_machine: bool,
    pub metrics: PrometheusHandle,
    pub stopping: Stopping,
}

impl AppState {
    pub fn new(shared: Shared) -> Self {
        Self(Arc::new(shared))
    }
}

impl std::ops::Deref for AppState {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// What one request may ask for.
#[derive(Debug, Clone)]
pub struct Limits {
    /// The largest body of an ordinary request.
    pub body_bytes: usize,
    /// The largest body of a request that adds documents.
    pub add_bytes: usize,
    pub add_documents: usize,
    /// Documents of a request that reranks.
    pub rerank_documents: usize,
    pub top_k: usize,
    /// Ingestion jobs that are not finished.
    pub open_jobs: usize,
    /// How long a body may take to arrive.
    pub body_timeout: Duration,
    /// How long a request may take in all.
    pub request_timeout: Duration,
    /// How long a client may take to send its headers, and an idle connection is kept.
    pub header_timeout: Duration,
    /// How long accepted requests may take to finish after the signal to stop.
    pub shutdown_timeout: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 2 * 1024 * 1024,
            add_bytes: 64 * 1024 * 1024,
            add_documents: 10_000,
            rerank_documents: 10_000,
            top_k: 1_000,
            open_jobs: 1_000,
            body_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(600),
            header_timeout: Duration::from_secs(15),
            shutdown_timeout: Duration::from_secs(30),
        }
    }
}

/// Memory that large bodies share, counted in KiB.
#[derive(Clone)]
pub struct BodyBudget {
    kib: Arc<Semaphore>,
    total_kib: u32,
}

impl BodyBudget {
    const WAIT: Duration = Duration::from_secs(10);

    /// Enough for `bodies` bodies of the largest size at once.
    pub fn for_bodies(bodies: usize, bytes: usize) -> Self {
        let total_kib = u32::try_from(bodies.saturating_mul(bytes) / 1024)
            .unwrap_or(u32::MAX)
            .max(1);
        Self {
            kib: Arc::new(Semaphore::new(total_kib as usize)),
            total_kib,
        }
    }

    pub async fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let kib = u32::try_from(bytes / 1024 + 1)
            .unwrap_or(u32::MAX)
            .min(self.total_kib);
        let permit = tokio::time::timeout(Self::WAIT, Arc::clone(&self.kib).acquire_many_owned(kib)).await;
        match permit {
            Ok(Ok(permit)) => Ok(permit),
            _ => Err(ApiError::busy(
                "Too many large requests at once: try again later",
                Duration::from_secs(2),
            )),
        }
    }
}

/// Set once the server has been told to stop.
#[derive(Clone, Default)]
pub struct Stopping(Arc<AtomicBool>);

impl Stopping {
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
