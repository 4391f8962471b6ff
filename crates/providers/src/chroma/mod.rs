//! Storage in a ChromaDB server, over Chroma's own HTTP API.
//!
//! Chroma stores scalars only, has few filter operators, does not count matches and ranks no words. The
//! adapter emulates the rest:
//!
//! * Metadata that Chroma cannot hold goes into one reserved key as JSON, beside a flag (`codec`). The
//!   length and the model of a vector go into reserved keys, too.
//! * A filter becomes the narrowest Chroma condition that every matching document satisfies (`narrow`).
//!   The results are then checked with [`ragstone_core::Filter::matches`]. A page and its total are made
//!   by going through all candidates; a search asks for more until enough of them match, or searches
//!   among the matching ids (`dense`).
//! * Words are ranked here (`keyword`).
//!
//! Chroma has no transactions. Operations that read before they write are serialised within this process
//! (`locks`). [`LIMITATIONS`] lists the remaining differences.

mod api;
mod codec;
mod dense;
mod keyword;
mod locks;
mod lookup;
mod naming;
mod narrow;
mod read;
mod search;
mod storage;
mod write;

use std::sync::Arc;
use std::time::Duration;

use ragstone_core::backend::Capability;
use ragstone_core::call::CallError;
use ragstone_core::storage::{Engine, StorageError, VectorPrecision};
use ragstone_core::{CollectionName, Metadata};
use schemars::JsonSchema;
use secrecy::SecretString;
use serde::Deserialize;
use tokio::sync::MutexGuard;

use crate::config::{AuthConfig, Endpoint, RetryConfig, read_connection, whole_number};
use crate::error::{ConfigError, both};
use crate::http::{Auth, ClientSettings, Policy, ServiceClient, operation};
use crate::registry::{ConnectContext, Connected, ProviderDescription, ProviderKind};
use api::{ChromaApi, Tenancy};
use locks::CollectionLocks;
use lookup::RecordCache;
use naming::Naming;

const CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
    Capability::KeywordSearch,
];

const LIMITATIONS: &[&str] = &[
    "Dense search is approximate: ChromaDB finds neighbours through an HNSW graph",
    "Keyword and hybrid search read all texts of a collection, and are refused beyond 10000 documents",
    "A write of more documents than fit into one request to ChromaDB (5461, or 16 MB, or 500 that are replaced) is not all or nothing",
    "Operations of several requests (filtered pages, filtered deletes, values) may see parts of two states while others write",
    "Two processes that replace the same document concurrently may leave metadata of both",
    "When two processes merge metadata into a collection concurrently, one of the merges may be lost",
    "Documents equally far from a query come in any order, not in insertion order",
    "An export during which documents are deleted may leave others out",
    "Vectors come back with their last bits rounded",
    "The size of ChromaDB's data is unknown: storage_bytes is 0",
    "An emptied collection whose vectors change width is recreated in two requests: a failure in between, or what another process adds, is lost with it",
    "Jobs, agent memory, conversations and the embedding ledger are kept in the data directory of this process",
];

const ENGINE: Engine = Engine {
    name: "chromadb",
    limitations: LIMITATIONS,
    vectors: VectorPrecision::Rounded,
};

/// Size limit of an answer: a page of vectors is larger than the answers of other services.
const MAX_ANSWER_BYTES: u64 = 256 << 20;
/// Timeout of a request of the default store.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
const RETRY_SOON: Duration = Duration::from_secs(1);

/// Collections in a ChromaDB server.
pub struct ChromaStorage {
    api: ChromaApi,
    purpose: Purpose,
    metadata_locks: CollectionLocks,
    document_locks: CollectionLocks,
    records: RecordCache,
}

/// The use that a ChromaDB server is put to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// It keeps the collections of this process, under any name. That it fails is a failure of this
    /// process.
    DefaultStore,
    /// It belongs to somebody else and may have other clients: collections keep their names and
    /// settings, an operation has one deadline, and its errors are passed on.
    Service,
}

impl ChromaStorage {
    /// Connects to `chroma://HOST:PORT[/TENANT/DATABASE]`, or `chromas://` over TLS, as the default
    /// store. Nothing is sent yet, so the server may start later.
    pub fn connect(url: &str, token: Option<SecretString>) -> Result<Self, ConfigError> {
        let problem = |message: &str| ConfigError::field("store", message);
        let (scheme, rest) = match url.split_once("://") {
            Some(("chroma", rest)) => ("http", rest),
            Some(("chromas", rest)) => ("https", rest),
            _ => return Err(problem("must be chroma://HOST:PORT or chromas://HOST:PORT")),
        };
        if rest.contains('@') {
            return Err(problem(
                "must not contain credentials: set the token in RAGSTONE_CHROMA_TOKEN",
            ));
        }
        let mut parts = rest.split('/').filter(|part| !part.is_empty());
        let host = parts.next().ok_or_else(|| problem("must name a host"))?;
        let tenancy = match (parts.next(), parts.next(), parts.next()) {
            (None, ..) => Tenancy::check(&default_tenant(), &default_database())?,
            (Some(tenant), Some(database), None) => Tenancy::check(tenant, database)?,
            _ => return Err(problem("must have nothing after the host, or /TENANT/DATABASE")),
        };
        let mut settings = ClientSettings::new("chromadb", &format!("{scheme}://{host}"), "store")?;
        if let Some(token) = token {
            settings.auth = Auth::Bearer(token);
        }
        settings.policy = Policy {
            deadline: REQUEST_TIMEOUT,
            max_attempts: 2,
            first_delay: Duration::from_millis(200),
            max_answer_bytes: MAX_ANSWER_BYTES,
            failures_to_open: 3,
            cooldown: Duration::from_secs(2),
            ..Policy::default()
        };
        let client = ServiceClient::new(settings)?;
        Ok(Self::new(client, &tenancy, Purpose::DefaultStore))
    }

    fn new(client: ServiceClient, tenancy: &Tenancy, purpose: Purpose) -> Self {
        let naming = match purpose {
            Purpose::DefaultStore => Naming::Wrapped,
            Purpose::Service => Naming::AsTheyAre,
        };
        Self {
            api: ChromaApi::new(client, tenancy, naming),
            purpose,
            metadata_locks: CollectionLocks::new(),
            document_locks: CollectionLocks::new(),
            records: RecordCache::default(),
        }
    }

    /// Runs an operation and reports its errors as the purpose requires. The requests of a service's
    /// operation share one deadline.
    async fn run<T>(&self, work: impl Future<Output = Result<T, StorageError>>) -> Result<T, StorageError> {
        let outcome = match self.purpose {
            Purpose::DefaultStore => work.await,
            Purpose::Service => operation(work).await,
        };
        outcome.map_err(|error| self.error(error))
    }

    fn error(&self, error: StorageError) -> StorageError {
        match (self.purpose, error) {
            (Purpose::DefaultStore, StorageError::Call(error)) => default_store_error(error),
            (_, error) => error,
        }
    }

    /// Keeps other writers of this process away from the collection until the guard is dropped. A writer
    /// may be waiting for a server that hangs, so the default store gives up after the timeout of a
    /// request.
    async fn lock<'a>(
        &self,
        locks: &'a CollectionLocks,
        name: &CollectionName,
    ) -> Result<MutexGuard<'a, ()>, StorageError> {
        let lock = locks.lock(name);
        if self.purpose == Purpose::Service {
            return Ok(lock.await);
        }
        tokio::time::timeout(REQUEST_TIMEOUT, lock)
            .await
            .map_err(|_| StorageError::Unavailable {
                message: format!(
                    "Another write to collection '{name}' has been running for {} s; try again soon",
                    REQUEST_TIMEOUT.as_secs()
                ),
                retry_after: RETRY_SOON,
            })
    }
}

/// A call that failed, as a failure of this process: one that may succeed later is
/// [`StorageError::Unavailable`].
fn default_store_error(error: CallError) -> StorageError {
    tracing::warn!(%error, "the ChromaDB server gave no usable answer");
    let unavailable = |retry_after| StorageError::Unavailable {
        message: "The ChromaDB server that keeps the documents does not answer; try again soon".to_owned(),
        retry_after,
    };
    match &error {
        CallError::Unreachable { .. } | CallError::DeadlineExceeded { .. } => unavailable(RETRY_SOON),
        CallError::CircuitOpen { retry_after, .. } => unavailable(*retry_after),
        CallError::Answered(answer) => match answer.status {
            429 | 502..=504 => unavailable(answer.retry_after.unwrap_or(RETRY_SOON)),
            status @ (401 | 403) => StorageError::Failed(
                format!("ChromaDB answered with status {status}: set its token in RAGSTONE_CHROMA_TOKEN")
                    .into(),
            ),
            413 => StorageError::Unsupported(
                "A document is too large for ChromaDB: a request to it may have 40 MB".to_owned(),
            ),
            _ => StorageError::Failed(Box::new(error)),
        },
        _ => StorageError::Failed(Box::new(error)),
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Connection {
    /// Address of the ChromaDB server.
    #[schemars(title = "URL", url, example = "http://localhost:8000")]
    url: String,
    /// Tenant of the collections.
    #[schemars(title = "Tenant", length(min = 3), regex(pattern = api::TENANCY_PATTERN))]
    #[serde(default = "default_tenant")]
    tenant: String,
    /// Database of the collections.
    #[schemars(title = "Database", length(min = 3), regex(pattern = api::TENANCY_PATTERN))]
    #[serde(default = "default_database")]
    database: String,
    /// Credentials, where the server requires them.
    #[schemars(title = "Sign-in")]
    #[serde(default)]
    auth: Option<AuthConfig>,
    /// Timeout of an operation in milliseconds, retries included. Adding and deleting documents have it
    /// for each request.
    #[schemars(title = "Timeout (ms)", range(min = 1, max = 3600000), example = 30000)]
    #[serde(default = "default_timeout", deserialize_with = "whole_number")]
    timeout_ms: u64,
    /// Retries of failed requests.
    #[schemars(title = "Retries")]
    #[serde(default)]
    retry: RetryConfig,
}

fn default_tenant() -> String {
    "default_tenant".to_owned()
}

fn default_database() -> String {
    "default_database".to_owned()
}

fn default_timeout() -> u64 {
    30_000
}

pub(crate) fn kind() -> ProviderKind {
    ProviderKind::new(
        ProviderDescription {
            id: "chromadb",
            display_name: "ChromaDB",
            description: "A ChromaDB server. Texts are embedded by the models of this process.",
            capabilities: CAPABILITIES,
        },
        schemars::schema_for!(Connection).into(),
        connect,
    )
}

fn connect(connection: &Metadata, context: ConnectContext) -> Result<Connected, ConfigError> {
    let connection = read_connection::<Connection>(connection)?;
    let endpoint = Endpoint {
        service: context.service,
        url: &connection.url,
        auth: connection.auth.as_ref(),
        timeout_ms: connection.timeout_ms,
        retry: &connection.retry,
        addresses: context.addresses,
    };
    let tenancy = Tenancy::check(&connection.tenant, &connection.database);
    let client = endpoint.client(context.environment);
    let (tenancy, client) = both(tenancy, client)?;
    let storage = ChromaStorage::new(client, &tenancy, Purpose::Service);
    Ok(Connected::Storage(Arc::new(storage)))
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use ragstone_core::call::ErrorAnswer;

    use super::*;

    #[test]
    fn a_refused_token_names_its_variable() {
        let answer = ErrorAnswer {
            service: "chromadb".into(),
            status: 401,
            content_type: None,
            body: Vec::new(),
            retry_after: None,
        };
        let error = default_store_error(CallError::Answered(Box::new(answer)));
        let reason = error.source().map(ToString::to_string).unwrap_or_default();
        assert!(reason.contains("RAGSTONE_CHROMA_TOKEN"), "{reason}");
    }

    #[test]
    fn credentials_in_an_address_are_refused() {
        let refused = ChromaStorage::connect("chroma://ann:hunter2@host:8000", None);
        let message = refused.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(message.contains("RAGSTONE_CHROMA_TOKEN"), "{message}");
        assert!(!message.contains("hunter2"), "{message}");
    }
}
