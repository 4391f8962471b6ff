//! Any server that speaks the service routes of Ragstone, Ragstone itself included.

mod search;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ragstone_core::collection::shorten;
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::provider::{
    CallError, Capability, Health, HealthStatus, ProviderAnswer, ProviderError, ProviderQuery, RagProvider,
    Reranked,
};
use ragstone_core::storage::{DocumentPage, MetadataUpdate, Page, Selection};
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter, Metadata};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::filter_json::filter_to_json;
use super::health::{HealthCheck, without_admission};
use super::{ConnectContext, ProviderDescription, ProviderKind, rerank};
use crate::config::{AuthConfig, Endpoint, RetryConfig, read_connection, whole_number};
use crate::error::ConfigError;
use crate::http::{Breaking, Call, Repeat, ServiceClient};

const CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
    Capability::Rerank,
    Capability::KeywordSearch,
];

/// What the service routes give in one page at most.
const PAGE: usize = 1000;
/// Texts that the service embeds take it time: a slow model reads about so many bytes in a second.
const BYTES_PER_SECOND: usize = 1 << 10;
/// No server of ours works longer on one request, unless it is configured to.
const LONGEST_ADD: Duration = Duration::from_secs(600);

/// What of a service's account of itself is shown. Something else may answer at its address, and what that
/// tells is not for everybody who may ask how a service is.
const FACTS: [&str; 6] = [
    "version",
    "collections_count",
    "storage_bytes",
    "store",
    "embedding_models",
    "cross_encoder",
];

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Connection {
    /// Where the service listens.
    #[schemars(title = "URL", url, example = "http://localhost:5006")]
    url: String,
    /// How to sign in, where the service asks for it.
    #[schemars(title = "Sign-in")]
    #[serde(default)]
    auth: Option<AuthConfig>,
    /// How long an operation may take altogether, retries included, in milliseconds; where documents are
    /// added or deleted, each request of it. Where the service embeds what is added it has a second more
    /// for each KB of text, up to ten minutes.
    #[schemars(title = "Timeout (ms)", range(min = 1, max = 3600000), example = 30000)]
    #[serde(default = "default_timeout", deserialize_with = "whole_number")]
    timeout_ms: u64,
    /// When a call is sent again.
    #[schemars(title = "Retries")]
    #[serde(default)]
    retry: RetryConfig,
}

fn default_timeout() -> u64 {
    30_000
}

pub(super) fn kind() -> ProviderKind {
    ProviderKind::new(
        ProviderDescription {
            id: "chromadb-wrapper",
            display_name: "Ragstone service",
            description: "A server that speaks the service routes of Ragstone, and embeds, searches and reranks itself.",
            capabilities: CAPABILITIES,
        },
        schemars::schema_for!(Connection).into(),
        connect,
    )
}

fn connect(connection: &Metadata, context: ConnectContext) -> Result<Arc<dyn RagProvider>, ConfigError> {
    let connection = read_connection::<Connection>(connection)?;
    let endpoint = Endpoint {
        service: context.service,
        url: &connection.url,
        auth: connection.auth.as_ref(),
        timeout_ms: connection.timeout_ms,
        retry: &connection.retry,
        addresses: context.addresses,
    };
    Ok(Arc::new(Wrapper {
        client: endpoint.client(context.environment)?,
        timeout: Duration::from_millis(connection.timeout_ms),
    }))
}

#[derive(Debug)]
struct Wrapper {
    client: ServiceClient,
    timeout: Duration,
}

#[derive(Deserialize)]
struct CollectionBody {
    name: String,
    count: u64,
    #[serde(default)]
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct CollectionsBody {
    collections: Vec<CollectionBody>,
}

#[derive(Deserialize)]
struct MetadataBody {
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Deserialize)]
struct DocumentBody {
    id: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    metadata: Option<Metadata>,
}

#[derive(Deserialize)]
struct DocumentsBody {
    documents: Vec<DocumentBody>,
    total: u64,
}

#[derive(Deserialize)]
struct AddedBody {
    ids: Vec<String>,
    #[serde(default)]
    truncated: Vec<String>,
}

#[derive(Deserialize)]
struct CountBody {
    count: u64,
}

#[derive(Deserialize)]
struct EmptiedBody {
    count_deleted: u64,
}

#[derive(Deserialize)]
struct ValuesBody {
    values: Vec<Value>,
}

impl Wrapper {
    fn path(name: &CollectionName, rest: &str) -> String {
        format!("collections/{name}{rest}")
    }

    fn read_collection(&self, body: CollectionBody) -> Result<Collection, ProviderError> {
        let name = CollectionName::parse(body.name).map_err(|e| self.client.bad_answer(e.to_string()))?;
        Ok(Collection {
            name,
            count: body.count,
            metadata: body.metadata.unwrap_or_default(),
            dimensions: None,
        })
    }

    /// What the service tells everybody about itself.
    async fn own_account(&self) -> Result<Metadata, CallError> {
        let call = Call::get("health").breaking(Breaking::Ignored);
        self.client.call_json_to_show(call).await
    }

    /// How the service says it is.
    async fn own_health(&self) -> Health {
        let check = HealthCheck::start();
        let mut account = match self.own_account().await {
            Ok(account) => account,
            Err(error) => return check.failed(&error),
        };
        let (status, message) = match account.remove("status").as_ref().and_then(Value::as_str) {
            Some("healthy") => (HealthStatus::Healthy, "the service is healthy"),
            Some("degraded") => (HealthStatus::Degraded, "the service says it is degraded"),
            Some("unhealthy") => (HealthStatus::Unhealthy, "the service says it is unhealthy"),
            Some(_) | None => (HealthStatus::Degraded, "the service does not say how it is"),
        };
        account.retain(|fact, _| FACTS.contains(&fact.as_str()));
        check.answered(status, message, account)
    }

    /// How long adding documents may take. All of them go into one request, so that all are stored or
    /// none, and the service answers when it has embedded the last.
    fn patience(&self, documents: &[NewDocument]) -> Duration {
        let unembedded = documents.iter().filter(|new| new.embedding.is_none());
        let bytes: usize = unembedded.map(|new| new.document.text.len()).sum();
        let embedding = Duration::from_secs((bytes / BYTES_PER_SECOND) as u64);
        self.timeout
            .saturating_add(embedding)
            .min(LONGEST_ADD.max(self.timeout))
    }

    fn read_id(&self, id: String) -> Result<DocumentId, ProviderError> {
        DocumentId::parse(id).map_err(|e| self.client.bad_answer(e.to_string()).into())
    }

    fn read_document(&self, body: DocumentBody) -> Result<Document, ProviderError> {
        Ok(Document {
            id: self.read_id(body.id)?,
            text: body.text.unwrap_or_default(),
            metadata: body.metadata.unwrap_or_default(),
        })
    }
}

#[async_trait]
impl RagProvider for Wrapper {
    fn capabilities(&self) -> &'static [Capability] {
        CAPABILITIES
    }

    async fn health(&self) -> Health {
        // Whoever has no key may know that it lives, so a second call finds out whether the key is right.
        let with_key = Call::get("query").breaking(Breaking::Ignored);
        let (health, admitted) = futures::join!(self.own_health(), self.client.call(with_key));
        match admitted {
            Err(error) if health.status != HealthStatus::Unhealthy => without_admission(health, &error),
            _ => health,
        }
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, ProviderError> {
        let call = Call::post("collections")
            .json(&json!({"name": name.as_str(), "metadata": metadata}))
            .repeat(Repeat::IfUnprocessed);
        let body: MetadataBody = self.client.call_json(call).await?;
        Ok(body.metadata)
    }

    async fn collections(&self) -> Result<Vec<Collection>, ProviderError> {
        let body: CollectionsBody = self.client.call_json(Call::get("collections")).await?;
        let mut collections = Vec::with_capacity(body.collections.len());
        for listed in body.collections {
            let name = shorten(&listed.name);
            match self.read_collection(listed) {
                Ok(collection) => collections.push(collection),
                Err(error) => {
                    let service = self.client.service();
                    tracing::warn!(service, name, %error, "a collection is left out");
                }
            }
        }
        collections.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(collections)
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, ProviderError> {
        let body = self.client.call_json(Call::get(Self::path(name, ""))).await?;
        self.read_collection(body)
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, ProviderError> {
        let merge = match update {
            MetadataUpdate::Replace => "false",
            MetadataUpdate::Merge => "true",
        };
        let call = Call::put(Self::path(name, "/metadata"))
            .query("merge", merge)
            .json(&json!({"metadata": metadata}));
        let body: MetadataBody = self.client.call_json(call).await?;
        Ok(body.metadata)
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), ProviderError> {
        let call = Call::delete(Self::path(name, "")).repeat(Repeat::IfUnprocessed);
        self.client.call(call).await?;
        Ok(())
    }

    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, ProviderError> {
        let patience = self.patience(&documents);
        // Ids are always sent, so that adding twice is adding once.
        let documents: Vec<Value> = documents
            .into_iter()
            .map(|NewDocument { document, embedding }| {
                let mut sent = json!({
                    "id": document.id.as_str(), "text": document.text, "metadata": document.metadata,
                });
                if let Some(embedding) = embedding {
                    sent["embedding"] = embedding.into();
                }
                sent
            })
            .collect();
        let call = Call::post(Self::path(name, "/documents"))
            .json(&json!({"documents": documents}))
            .patience(patience);
        let body: AddedBody = self.client.call_json(call).await?;
        if body.ids.len() != documents.len() {
            let reason = format!("{} ids for {} documents", body.ids.len(), documents.len());
            return Err(self.client.bad_answer(reason).into());
        }
        let read = |ids: Vec<String>| {
            ids.into_iter()
                .map(|id| self.read_id(id))
                .collect::<Result<_, ProviderError>>()
        };
        Ok(Added {
            ids: read(body.ids)?,
            truncated: read(body.truncated)?,
        })
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, ProviderError> {
        let mut documents = Vec::new();
        loop {
            let missing = page.limit - documents.len();
            let limit = missing.min(PAGE);
            let offset = page.offset + documents.len() as u64;
            let mut call = Call::get(Self::path(name, "/documents"))
                .query("limit", limit.to_string())
                .query("offset", offset.to_string());
            if !filter.is_everything() {
                call = call.query("where", filter_to_json(filter).to_string());
            }
            let body: DocumentsBody = self.client.call_json(call).await?;
            let got = body.documents.len();
            if got > limit {
                return Err(self
                    .client
                    .bad_answer("more documents than were asked for")
                    .into());
            }
            for document in body.documents {
                documents.push(self.read_document(document)?);
            }
            if got < limit || documents.len() >= page.limit {
                return Ok(DocumentPage {
                    documents,
                    total: body.total,
                });
            }
        }
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, ProviderError> {
        let body = match selection {
            Selection::Ids(ids) => json!({"ids": ids.iter().map(DocumentId::as_str).collect::<Vec<_>>()}),
            Selection::Matching(filter) => json!({"where": filter_to_json(&filter)}),
        };
        // Deleting again would delete nothing, and the count would be wrong.
        let call = Call::delete(Self::path(name, "/documents"))
            .json(&body)
            .repeat(Repeat::IfUnprocessed);
        let body: CountBody = self.client.call_json(call).await?;
        Ok(body.count)
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, ProviderError> {
        let call = Call::delete(Self::path(name, "/documents/all")).repeat(Repeat::IfUnprocessed);
        let body: EmptiedBody = self.client.call_json(call).await?;
        Ok(body.count_deleted)
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, ProviderError> {
        let call = Call::get(Self::path(name, "/metadata-values")).query("field", field);
        let body: ValuesBody = self.client.call_json(call).await?;
        Ok(body.values)
    }

    async fn search(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        self.search_one(name, query).await
    }

    async fn search_several(
        &self,
        names: &[CollectionName],
        query: ProviderQuery,
    ) -> Vec<Result<ProviderAnswer, ProviderError>> {
        self.search_at_once(names, query).await
    }

    async fn rerank(&self, query: &str, documents: Vec<Metadata>, top_k: Option<usize>) -> Reranked {
        let account = self.own_account().await;
        rerank::rerank(&self.client, account, query, documents, top_k).await
    }
}
