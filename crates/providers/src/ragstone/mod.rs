//! The client of our own HTTP API.
//!
//! The gateway, `copy`, `ingest --url` and `query` all use it. It also speaks to servers of the original
//! make, which have fewer routes and fields.

mod commands;
mod filter_json;
mod rerank;
mod search;
mod wire;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use async_trait::async_trait;
use futures::future::join_all;
use ragstone_core::backend::{Backend, BackendError, Capability, Health, HealthStatus, RankedText};
use ragstone_core::call::CallError;
use ragstone_core::collection::shorten;
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::document_line::{DocumentLine, read_documents};
use ragstone_core::error::InvalidInput;
use ragstone_core::search::{SearchQuery, SearchResponse};
use ragstone_core::storage::{
    Cursor, DocumentPage, ExportPage, ExportRange, ExportedDocument, MetadataUpdate, Page, Selection,
    VectorPrecision,
};
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use reqwest::Url;
use schemars::JsonSchema;
use secrecy::SecretString;
use serde::Deserialize;
use serde_json::Value;

pub use commands::{
    ContentEncoding, IngestDocument, IngestRequest, JobState, RemoteJob, RemovedSources, SourcePage,
};
pub use filter_json::filter_to_json;

use crate::config::{AuthConfig, Endpoint, RetryConfig, read_connection, whole_number};
use crate::error::ConfigError;
use crate::health::{HealthCheck, with_failed_request};
use crate::http::{Auth, Breaking, Call, ClientSettings, Policy, Repeat, ServiceClient, operation};
use crate::registry::{ConnectContext, Connected, ProviderDescription, ProviderKind};
use wire::{
    AddedBody, CollectionBody, CollectionList, CountBody, DeletionBody, DocumentBody, DocumentList,
    EmptiedBody, ExportBody, ImportBody, MetadataBody, NewCollection, NewDocumentBody, NewDocuments,
    ValuesBody,
};

const CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
    Capability::Rerank,
    Capability::KeywordSearch,
];

/// The largest page that the documents route returns.
const PAGE: usize = 1000;
/// Embedding speed of a slow model, in bytes of text. It extends the timeout of adding texts.
const BYTES_PER_SECOND: usize = 1 << 10;
/// By default a server works on one request no longer than this.
const MAX_ADD_TIMEOUT: Duration = Duration::from_secs(600);

/// The facts of a service's health report that are shown. Anything may answer at its address, and
/// whatever else it tells is not for everybody who may ask for its health.
const FACTS: [&str; 6] = [
    "version",
    "collections_count",
    "storage_bytes",
    "store",
    "embedding_models",
    "cross_encoder",
];

/// A client of a server with our HTTP API.
#[derive(Debug)]
pub struct RagstoneClient {
    client: ServiceClient,
    timeout: Duration,
    /// The server has no query route per collection: one of the original make.
    only_query_route: AtomicBool,
}

impl RagstoneClient {
    /// `timeout` is the deadline of the client's calls.
    pub fn new(client: ServiceClient, timeout: Duration) -> Self {
        Self {
            client,
            timeout,
            only_query_route: AtomicBool::new(false),
        }
    }

    /// A client of the server at `url`, which also names it in errors. `field` is the setting that the URL
    /// comes from.
    pub fn at(url: &str, key: Option<SecretString>, field: &str) -> Result<Self, ConfigError> {
        let mut settings = ClientSettings::new(url, url, field)?;
        if let Some(key) = key {
            settings.auth = Auth::Bearer(key);
        }
        let timeout = Policy::default().deadline;
        Ok(Self::new(ServiceClient::new(settings)?, timeout))
    }

    fn path(name: &CollectionName, rest: &str) -> String {
        format!("collections/{name}{rest}")
    }

    fn read_collection(&self, body: CollectionBody) -> Result<Collection, BackendError> {
        let name = CollectionName::parse(body.name).map_err(|e| self.client.bad_answer(e.to_string()))?;
        Ok(Collection {
            name,
            count: body.count,
            metadata: body.metadata.unwrap_or_default(),
            dimensions: None,
        })
    }

    fn read_id(&self, id: String) -> Result<DocumentId, BackendError> {
        DocumentId::parse(id).map_err(|e| self.client.bad_answer(e.to_string()).into())
    }

    fn read_document(&self, body: DocumentBody) -> Result<Document, BackendError> {
        Ok(Document {
            id: self.read_id(body.id)?,
            text: body.text.unwrap_or_default(),
            metadata: body.metadata.unwrap_or_default(),
        })
    }

    /// The service's health report, which needs no key.
    async fn report(&self) -> Result<Metadata, CallError> {
        let call = Call::get("health")
            .breaking(Breaking::Ignored)
            .repeat(Repeat::Freely);
        self.client.call_json_to_show(call).await
    }

    async fn reported_health(&self) -> Health {
        let check = HealthCheck::start();
        let mut report = match self.report().await {
            Ok(report) => report,
            Err(error) => return check.failed(&error),
        };
        let (status, message) = match report.remove("status").as_ref().and_then(Value::as_str) {
            Some("healthy") => (HealthStatus::Healthy, "the service is healthy"),
            Some("degraded") => (HealthStatus::Degraded, "the service reports that it is degraded"),
            Some("unhealthy") => (
                HealthStatus::Unhealthy,
                "the service reports that it is unhealthy",
            ),
            Some(_) | None => (HealthStatus::Degraded, "the service does not report its status"),
        };
        report.retain(|fact, _| FACTS.contains(&fact.as_str()));
        check.answered(status, message, report)
    }

    /// The timeout of adding documents. All of them go into one request, so that all are stored or none,
    /// and the service answers once it has embedded the last.
    fn add_timeout(&self, documents: &[NewDocument]) -> Duration {
        let unembedded = documents.iter().filter(|new| new.embedding.is_none());
        let bytes: usize = unembedded.map(|new| new.document.text.len()).sum();
        let embedding = Duration::from_secs((bytes / BYTES_PER_SECOND) as u64);
        self.timeout
            .saturating_add(embedding)
            .min(MAX_ADD_TIMEOUT.max(self.timeout))
    }

    async fn page(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, BackendError> {
        let mut documents = Vec::new();
        loop {
            let limit = (page.limit - documents.len()).min(PAGE);
            let offset = page.offset + documents.len() as u64;
            let mut call = Call::get(Self::path(name, "/documents"))
                .query("limit", limit.to_string())
                .query("offset", offset.to_string());
            if !filter.is_everything() {
                call = call.query("where", filter_to_json(filter).to_string());
            }
            let body: DocumentList = self.json(name, call).await?;
            let received = body.documents.len();
            if received > limit {
                return Err(self.client.bad_answer("more documents than requested").into());
            }
            for document in body.documents {
                documents.push(self.read_document(document)?);
            }
            if received < limit || documents.len() >= page.limit {
                return Ok(DocumentPage {
                    documents,
                    total: body.total,
                });
            }
        }
    }

    /// Calls a route of a collection.
    async fn json<T: serde::de::DeserializeOwned>(
        &self,
        name: &CollectionName,
        call: Call,
    ) -> Result<T, BackendError> {
        let answer = self.client.call_json(call).await;
        answer.map_err(|error| collection_error(error, name))
    }
}

/// The refusals of our own server have their own variants. Others are passed on as they are.
fn collection_error(error: CallError, name: &CollectionName) -> BackendError {
    let message = match &error {
        CallError::Answered(answer) => answer.message(),
        _ => None,
    };
    let typed = [
        (404, BackendError::CollectionNotFound(name.clone())),
        (409, BackendError::CollectionExists(name.clone())),
    ];
    typed
        .into_iter()
        .find(|(status, typed)| error.status() == Some(*status) && message == Some(typed.to_string()))
        .map_or_else(|| error.into(), |(_, typed)| typed)
}

/// Encodes an id as one segment of a path.
fn path_segment(id: &DocumentId) -> Result<String, InvalidInput> {
    let encoded = Url::parse("http://host/").ok().and_then(|mut url| {
        url.path_segments_mut().ok()?.push(id.as_str());
        url.path().strip_prefix('/').map(str::to_owned)
    });
    encoded
        .filter(|segment| !segment.is_empty())
        .ok_or_else(|| InvalidInput::new(format!("document id '{id}' cannot be part of a URL path")))
}

#[async_trait]
impl Backend for RagstoneClient {
    fn capabilities(&self) -> &'static [Capability] {
        CAPABILITIES
    }

    async fn health(&self) -> Health {
        // The health report needs no key, so a second call checks the key.
        let with_key = Call::get("query")
            .breaking(Breaking::Ignored)
            .repeat(Repeat::Freely);
        let checks = async { futures::join!(self.reported_health(), self.client.call(with_key)) };
        let (health, authenticated) = operation(checks).await;
        match authenticated {
            Err(error) if health.status != HealthStatus::Unhealthy => with_failed_request(health, &error),
            _ => health,
        }
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, BackendError> {
        let body = NewCollection {
            name: name.as_str(),
            metadata: &metadata,
        };
        let call = Call::post("collections")
            .json(&body)
            .repeat(Repeat::IfUnprocessed);
        let body: MetadataBody = self.json(name, call).await?;
        Ok(body.metadata)
    }

    async fn collections(&self) -> Result<Vec<Collection>, BackendError> {
        let body: CollectionList = self.client.call_json(Call::get("collections")).await?;
        let mut collections = Vec::with_capacity(body.collections.len());
        for listed in body.collections {
            let name = shorten(&listed.name);
            match self.read_collection(listed) {
                Ok(collection) => collections.push(collection),
                Err(error) => {
                    let service = self.client.service();
                    tracing::warn!(service, name, %error, "skipping an unusable collection");
                }
            }
        }
        collections.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(collections)
    }

    /// Without its dimensions, which the API does not report.
    async fn collection(&self, name: &CollectionName) -> Result<Collection, BackendError> {
        let body = self.json(name, Call::get(Self::path(name, ""))).await?;
        self.read_collection(body)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, BackendError> {
        let merge = match update {
            MetadataUpdate::Replace => "false",
            MetadataUpdate::Merge => "true",
        };
        let call = Call::put(Self::path(name, "/metadata"))
            .query("merge", merge)
            .json(&MetadataBody { metadata });
        let body: MetadataBody = self.json(name, call).await?;
        Ok(body.metadata)
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), BackendError> {
        let call = Call::delete(Self::path(name, "")).repeat(Repeat::IfUnprocessed);
        let deleted = self.client.call(call).await;
        deleted.map_err(|error| collection_error(error, name))?;
        Ok(())
    }

    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, BackendError> {
        // Ids are always sent, so that a retry adds nothing twice.
        let bodies = documents
            .iter()
            .map(|new| NewDocumentBody::new(&new.document, new.embedding.as_deref()));
        let body = NewDocuments {
            documents: bodies.collect(),
        };
        let call = Call::post(Self::path(name, "/documents"))
            .json(&body)
            .patience(self.add_timeout(&documents));
        let body: AddedBody = self.json(name, call).await?;
        if body.ids.len() != documents.len() {
            let reason = format!("{} ids for {} documents", body.ids.len(), documents.len());
            return Err(self.client.bad_answer(reason).into());
        }
        let read = |ids: Vec<String>| {
            ids.into_iter()
                .map(|id| self.read_id(id))
                .collect::<Result<_, BackendError>>()
        };
        Ok(Added {
            ids: read(body.ids)?,
            truncated: read(body.truncated)?,
        })
    }

    async fn document(
        &self,
        name: &CollectionName,
        id: &DocumentId,
    ) -> Result<Option<Document>, BackendError> {
        let path = Self::path(name, &format!("/documents/{}", path_segment(id)?));
        match self.client.call_json(Call::get(path)).await {
            Ok(body) => self.read_document(body).map(Some),
            Err(CallError::Answered(answer))
                if answer.status == 404 && answer.message().is_some_and(|m| m.starts_with("Document ")) =>
            {
                Ok(None)
            }
            Err(error) => Err(collection_error(error, name)),
        }
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, BackendError> {
        operation(self.page(name, filter, page)).await
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, BackendError> {
        let body = match &selection {
            Selection::Ids(ids) => DeletionBody::Ids {
                ids: ids.iter().map(DocumentId::as_str).collect(),
            },
            Selection::Matching(filter) => DeletionBody::Matching {
                filter: filter_to_json(filter),
            },
        };
        // A second attempt would delete nothing and return a wrong count.
        let call = Call::delete(Self::path(name, "/documents"))
            .json(&body)
            .repeat(Repeat::IfUnprocessed);
        let body: CountBody = self.json(name, call).await?;
        Ok(body.count)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, BackendError> {
        let call = Call::delete(Self::path(name, "/documents/all")).repeat(Repeat::IfUnprocessed);
        let body: EmptiedBody = self.json(name, call).await?;
        Ok(body.count_deleted)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, BackendError> {
        let call = Call::get(Self::path(name, "/metadata-values")).query("field", field);
        let body: ValuesBody = self.json(name, call).await?;
        Ok(body.values)
    }

    async fn search_many(
        &self,
        names: &[CollectionName],
        queries: &[SearchQuery],
    ) -> Vec<Result<Vec<SearchResponse>, BackendError>> {
        let searches = queries.iter().map(|query| self.search_together(names, query));
        let mut of_collections: Vec<Vec<_>> = names.iter().map(|_| Vec::new()).collect();
        for responses in operation(join_all(searches)).await {
            for (collection, response) in of_collections.iter_mut().zip(responses) {
                collection.push(response);
            }
        }
        of_collections
            .into_iter()
            .map(|responses| responses.into_iter().collect())
            .collect()
    }

    async fn rerank(
        &self,
        query: &str,
        texts: Vec<String>,
        top_k: usize,
    ) -> Result<Vec<RankedText>, BackendError> {
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        operation(self.rerank_texts(query, &texts, top_k)).await
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, BackendError> {
        let mut call = Call::get(Self::path(name, "/export")).query("limit", range.limit.to_string());
        if let Some(Cursor(after)) = range.after {
            call = call.query("after", after.to_string());
        }
        let page: ExportBody = self.json(name, call).await?;
        let documents = read_documents(page.documents);
        Ok(ExportPage {
            documents: documents.map_err(|error| self.client.bad_answer(error.to_string()))?,
            last: page.last.map(Cursor),
            more: page.more,
        })
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), BackendError> {
        let body = ImportBody {
            documents: documents.iter().map(DocumentLine::from).collect(),
        };
        let call = Call::post(Self::path(name, "/import")).json(&body);
        let imported = self.client.call(call).await;
        imported.map_err(|error| collection_error(error, name))?;
        Ok(())
    }

    async fn vector_precision(&self) -> Result<VectorPrecision, BackendError> {
        let report = self.report().await?;
        let store = report.get("store");
        Ok(match store.and_then(|store| store.get("rounds_vectors")) {
            Some(Value::Bool(true)) => VectorPrecision::Rounded,
            _ => VectorPrecision::Exact,
        })
    }
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Connection {
    /// Address of the service.
    #[schemars(title = "URL", url, example = "http://localhost:5006")]
    url: String,
    /// Credentials, where the service requires them.
    #[schemars(title = "Sign-in")]
    #[serde(default)]
    auth: Option<AuthConfig>,
    /// Timeout of an operation in milliseconds, retries included. Adding and deleting documents have it
    /// for each request, and texts that the service embeds extend it by a second per KB, up to ten minutes.
    #[schemars(title = "Timeout (ms)", range(min = 1, max = 3600000), example = 30000)]
    #[serde(default = "default_timeout", deserialize_with = "whole_number")]
    timeout_ms: u64,
    /// Retries of failed requests.
    #[schemars(title = "Retries")]
    #[serde(default)]
    retry: RetryConfig,
}

fn default_timeout() -> u64 {
    30_000
}

pub(crate) fn kind() -> ProviderKind {
    ProviderKind::new(
        ProviderDescription {
            id: "chromadb-wrapper",
            display_name: "Ragstone service",
            description: "A server with Ragstone's HTTP API, which embeds, searches and reranks itself.",
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
    let client = endpoint.client(context.environment)?;
    let timeout = Duration::from_millis(connection.timeout_ms);
    Ok(Connected::Backend(Arc::new(RagstoneClient::new(client, timeout))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_one_segment_of_a_path() {
        let segment = |id: &str| path_segment(&DocumentId::parse(id).unwrap());
        assert_eq!(segment("a/b?c=d e#%").unwrap(), "a%2Fb%3Fc=d%20e%23%25");
        assert!(segment(".").is_err() && segment("..").is_err());
    }
}
