//! What the gateway relies on from a RAG backend, wherever it runs.

use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value;

use crate::collection::{Collection, CollectionName};
use crate::document::{Added, Document, DocumentId, Metadata, NewDocument};
use crate::error::InvalidInput;
use crate::filter::Filter;
use crate::model::{ModelError, ModelIdentity};
use crate::storage::{DocumentPage, MetadataUpdate, Page, Selection, StorageError};

/// A RAG backend: this process, another server of our own routes, or a database of another kind.
///
/// Callers rely on this, whichever backend is behind it:
/// * Filters mean what [`Filter::matches`] says, and are applied before any limit. `total` is true.
/// * Documents come back as they were added: text, metadata of any JSON shape, order of insertion
///   where the backend keeps one.
/// * What a backend lacks is emulated with the same results or refused as
///   [`ProviderError::Unsupported`]; never is an answer silently different.
/// * Every operation ends within the deadline configured for the service, but for adding, deleting and
///   emptying, which take as long as there are documents: of those, each request has the deadline, and
///   one that a backend embeds texts for has more, by their length.
///   Dropping the future cancels it.
#[async_trait]
pub trait RagProvider: Send + Sync {
    /// What can be asked of this kind of backend. What one service of it can do is told by its health
    /// ([`Health::capabilities`]).
    fn capabilities(&self) -> &'static [Capability];

    /// Never fails: a backend that is down is an [`HealthStatus::Unhealthy`] answer.
    async fn health(&self) -> Health;

    /// Returns the metadata as stored.
    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, ProviderError>;

    /// All collections, by name.
    async fn collections(&self) -> Result<Vec<Collection>, ProviderError>;

    async fn collection(&self, name: &CollectionName) -> Result<Collection, ProviderError>;

    /// Returns the metadata as it now stands.
    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, ProviderError>;

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), ProviderError>;

    /// Adds documents, replacing those whose id exists. Those without a vector are embedded by the
    /// collection's model: either none has a vector or all have.
    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, ProviderError>;

    /// One page of the documents that match, and how many match in all.
    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, ProviderError>;

    /// Returns how many were really there.
    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, ProviderError>;

    /// Deletes every document, keeps the collection and its metadata, and returns how many there were.
    async fn empty(&self, name: &CollectionName) -> Result<u64, ProviderError>;

    /// The distinct scalars of a field: null, false, true, numbers ascending, then strings ascending.
    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, ProviderError>;

    /// The best documents that match the filter, however few match.
    async fn search(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError>;

    /// Searches several collections for the same: an answer for each, in their order, each with its own
    /// best. A backend that can be asked for all of them in one call, and so embeds the query once, is.
    async fn search_several(
        &self,
        names: &[CollectionName],
        query: ProviderQuery,
    ) -> Vec<Result<ProviderAnswer, ProviderError>> {
        let searches = names.iter().map(|name| self.search(name, query.clone()));
        futures::future::join_all(searches).await
    }

    /// Orders documents by the backend's cross-encoder, best first, and cuts them to `top_k`.
    ///
    /// A document is any JSON object with a `text`; all its fields are kept, and `rerank_score` and
    /// `original_rank` (from 1) are added. Never fails: where there is no cross-encoder, or it cannot
    /// be asked, the documents come back unchanged, and the warning that was logged with them.
    async fn rerank(&self, query: &str, documents: Vec<Metadata>, top_k: Option<usize>) -> Reranked;
}

/// One kind of operation a backend offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Capability {
    Collections,
    Search,
    Embeddings,
    MetadataFiltering,
    Rerank,
    /// Ranking by words, alone or together with meaning.
    KeywordSearch,
}

/// A search as the gateway passes it on.
#[derive(Debug, Clone, Default)]
pub struct ProviderQuery {
    /// The text to search for; embedded by the collection's model where `vector` is not given.
    /// At least one of the two is there.
    pub text: Option<String>,
    pub vector: Option<Vec<f32>>,
    /// Which model made `vector`, where this process did.
    pub vector_by: Option<ModelIdentity>,
    pub top_k: usize,
    pub filter: Filter,
    /// Only these documents. A server of other make may not know how to, and answer with others too.
    pub among: Option<Vec<DocumentId>>,
    pub max_distance: Option<f32>,
    /// The other fields of the request (`mode`, `rerank`, `expand`, `explain`), as sent. A backend
    /// that cannot do what one of them asks refuses it by name, or says so in the warnings.
    pub options: Metadata,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ProviderAnswer {
    /// Best first.
    pub hits: Vec<ProviderHit>,
    pub collection_metadata: Metadata,
    /// What was asked for and left out, such as reranking without a cross-encoder.
    pub warnings: Vec<String>,
    /// Further fields of the backend's answer, to be passed on as they are.
    pub extra: Metadata,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ProviderHit {
    pub document: Document,
    /// Cosine distance, 0 to 2; `None` where the backend ranked by something else.
    pub distance: Option<f32>,
    pub score: Option<f64>,
    /// Further fields of the hit (`rerank_score`, `siblings`, …), to be passed on as they are.
    pub extra: Metadata,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Reranked {
    pub documents: Vec<Metadata>,
    /// Why the documents are unchanged; `None` when they were reranked.
    pub warning: Option<String>,
}

/// The standard health answer of a service.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Health {
    pub status: HealthStatus,
    pub message: String,
    /// RFC 3339, UTC.
    pub timestamp: String,
    pub latency_ms: f64,
    /// Facts of the service: `version`, `collections_count`, `storage_bytes`, `embedding_models`,
    /// `cross_encoder`, `error`; each where it is known.
    pub details: Metadata,
}

impl Health {
    /// What of these the service can do, as far as it tells: without a model it neither embeds nor
    /// reranks. Of one that does not answer nothing is known, and everything stays.
    pub fn capabilities(&self, of_its_kind: &[Capability]) -> Vec<Capability> {
        let has = |fact: &str| self.status == HealthStatus::Unhealthy || self.details.contains_key(fact);
        of_its_kind
            .iter()
            .copied()
            .filter(|capability| match capability {
                Capability::Embeddings => has("embedding_models"),
                Capability::Rerank => has("cross_encoder"),
                _ => true,
            })
            .collect()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthStatus {
    Healthy,
    /// It answers, but something of it does not work.
    Degraded,
    Unhealthy,
}

/// Why a backend did not do what was asked. Messages are fit for the person who asked and never
/// carry a secret.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    #[error("Collection '{0}' not found")]
    CollectionNotFound(CollectionName),
    #[error("Collection '{0}' already exists")]
    CollectionExists(CollectionName),
    /// What was asked for breaks a rule; nothing was sent.
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
    /// This kind of backend cannot do it.
    #[error("{0}")]
    Unsupported(String),
    #[error("Embedding model '{model}' not loaded. Available models: {}", list_models(.available))]
    ModelNotLoaded { model: String, available: Vec<String> },
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The backend is this process, and its store did not do it.
    #[error(transparent)]
    Storage(StorageError),
    #[error(transparent)]
    Call(#[from] CallError),
}

impl ProviderError {
    /// The message without what only the log may hold.
    pub fn public(&self) -> String {
        match self {
            Self::Call(error) => error.public(),
            other => other.to_string(),
        }
    }
}

/// Names models for a message, also when there are none.
pub fn list_models(available: &[String]) -> String {
    if available.is_empty() {
        "none".to_owned()
    } else {
        available.join(", ")
    }
}

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

    /// What the service says went wrong, where it says so in a shape we know.
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
            ProviderError::from(error).public()
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

    #[test]
    fn a_service_can_do_what_it_has_models_for() {
        let all = [Capability::Search, Capability::Embeddings, Capability::Rerank];
        let mut health = Health {
            status: HealthStatus::Healthy,
            message: String::new(),
            timestamp: String::new(),
            latency_ms: 0.0,
            details: Metadata::from_iter([("cross_encoder".to_owned(), Value::Null)]),
        };
        assert_eq!(
            health.capabilities(&all),
            [Capability::Search, Capability::Rerank]
        );
        health.status = HealthStatus::Unhealthy;
        assert_eq!(health.capabilities(&all), all);
    }

    #[test]
    fn capabilities_and_states_have_their_wire_names() {
        assert_eq!(
            serde_json::to_value([Capability::MetadataFiltering, Capability::KeywordSearch]).unwrap(),
            serde_json::json!(["metadata_filtering", "keyword_search"])
        );
        assert_eq!(serde_json::to_value(HealthStatus::Degraded).unwrap(), "degraded");
    }
}
