//! A ChromaDB server, over its own API.
//!
//! Chroma stores scalars only, knows few operators, counts no matches and embeds on the client's
//! side. What it lacks is made up for here, in these ways:
//!
//! * Metadata that Chroma cannot hold goes into one reserved key as JSON, and documents that have
//!   any carry a flag (`codec`).
//! * A filter becomes the narrowest condition that Chroma understands and that no matching document
//!   fails (`narrow`); what comes back is then judged by [`Filter::matches`]. A page and its total
//!   are made by going through all candidates; a search asks for more until enough of them match,
//!   or searches among the ids that do (`search`).
//! * Texts are embedded by the model that the collection's metadata names.
//!
//! What remains different: a write of more documents than Chroma takes at once is not all or
//! nothing, and pages read while others write may show parts of both states. Replacing a document and
//! merging metadata read before they write, in turns within this process (`turns`); what another
//! process, or another service over the same database, writes in between may be lost, or stay beside
//! what replaces it.

mod api;
mod codec;
mod naming;
mod narrow;
mod read;
mod search;
mod store;
mod turns;
mod write;

use std::sync::Arc;

use async_trait::async_trait;
use futures::{StreamExt, TryStreamExt};
use ragstone_core::document::{Added, NewDocument};
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{Embedder, Role};
use ragstone_core::provider::{
    Capability, Health, HealthStatus, ProviderAnswer, ProviderError, ProviderQuery, RagProvider, Reranked,
    list_models,
};
use ragstone_core::storage::{DocumentPage, MetadataUpdate, Page, Selection};
use ragstone_core::{Collection, CollectionName, Filter, Metadata};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::health::{HealthCheck, without_admission};
use super::{ConnectContext, Embedders, ProviderDescription, ProviderKind, rerank};
use crate::config::{AuthConfig, Endpoint, RetryConfig, read_connection, whole_number};
use crate::error::{ConfigError, both};
use api::{ChromaApi, Tenancy};
use naming::Naming;
pub use store::ChromaStore;
use turns::Turns;
use write::Prepared;

const CAPABILITIES: &[Capability] = &[
    Capability::Collections,
    Capability::Search,
    Capability::Embeddings,
    Capability::MetadataFiltering,
];

/// How many collections are counted at the same time.
const COUNTS_AT_ONCE: usize = 16;

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Connection {
    /// Where the ChromaDB server listens.
    #[schemars(title = "URL", url, example = "http://localhost:8000")]
    url: String,
    /// The tenant whose collections are served.
    #[schemars(title = "Tenant", length(min = 3), regex(pattern = api::TENANCY_PATTERN))]
    #[serde(default = "default_tenant")]
    tenant: String,
    /// The database whose collections are served.
    #[schemars(title = "Database", length(min = 3), regex(pattern = api::TENANCY_PATTERN))]
    #[serde(default = "default_database")]
    database: String,
    /// How to sign in, where the server asks for it.
    #[schemars(title = "Sign-in")]
    #[serde(default)]
    auth: Option<AuthConfig>,
    /// How long an operation may take altogether, retries included, in milliseconds; where documents are
    /// added or deleted, each request of it.
    #[schemars(title = "Timeout (ms)", range(min = 1, max = 3600000), example = 30000)]
    #[serde(default = "default_timeout", deserialize_with = "whole_number")]
    timeout_ms: u64,
    /// When a call is sent again.
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

pub(super) fn kind() -> ProviderKind {
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
    let tenancy = Tenancy::check(&connection.tenant, &connection.database);
    let client = endpoint.client(context.environment);
    let (tenancy, client) = both(tenancy, client)?;
    Ok(Arc::new(ChromaService {
        chroma: Chroma {
            api: ChromaApi::new(client, &tenancy, Naming::AsTheyAre),
            embedders: context.embedders,
        },
        metadata_turns: Turns::new(),
        document_turns: Turns::new(),
    }))
}

/// A ChromaDB server as a service of the gateway. All requests share one, and so its turns.
struct ChromaService {
    chroma: Chroma,
    metadata_turns: Turns,
    document_turns: Turns,
}

/// What the service and the store have in common.
struct Chroma {
    api: ChromaApi,
    embedders: Embedders,
}

impl Chroma {
    fn available_models(&self) -> Vec<String> {
        self.embedders.keys().cloned().collect()
    }

    /// The model that embeds a collection's documents and queries.
    fn embedder(
        &self,
        collection: &api::CollectionRecord,
        role: Role,
    ) -> Result<&Arc<dyn Embedder>, ProviderError> {
        let model = collection.described.embedding_model().ok_or_else(|| {
            let start = match role {
                Role::Query => "Collection",
                Role::Passage => "All documents must include pre-computed embeddings: collection",
            };
            InvalidInput::new(format!(
                "{start} '{}' has no embedding_model in metadata. Available models: {}",
                collection.described.name,
                list_models(&self.available_models())
            ))
        })?;
        self.embedders
            .get(model)
            .ok_or_else(|| ProviderError::ModelNotLoaded {
                model: model.to_owned(),
                available: self.available_models(),
            })
    }

    /// One that vanishes meanwhile is no longer there to be counted.
    async fn counted(&self, record: api::CollectionRecord) -> Result<Option<Collection>, ProviderError> {
        match self.api.count(&record).await {
            Ok(count) => Ok(Some(Collection {
                count,
                ..record.described
            })),
            Err(ProviderError::CollectionNotFound(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn change_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, ProviderError> {
        let record = self.api.collection(name).await?;
        let metadata = match update {
            MetadataUpdate::Replace => metadata,
            MetadataUpdate::Merge => {
                let mut merged = record.described.metadata.clone();
                merged.extend(metadata);
                merged
            }
        };
        self.api.replace_metadata(&record, &metadata).await?;
        Ok(metadata)
    }

    fn model_list(&self) -> Value {
        self.embedders
            .values()
            .map(|embedder| {
                let info = embedder.info();
                json!({
                    "id": info.identity.id, "name": info.name, "status": "loaded",
                    "dimensions": info.identity.dimensions,
                })
            })
            .collect()
    }
}

#[async_trait]
impl RagProvider for ChromaService {
    fn capabilities(&self) -> &'static [Capability] {
        CAPABILITIES
    }

    async fn health(&self) -> Health {
        let check = HealthCheck::start();
        let version = match self.chroma.api.version().await {
            Ok(version) => version,
            Err(error) => return check.failed(&error),
        };
        let mut details = Metadata::new();
        details.insert("version".into(), version.into());
        if !self.chroma.embedders.is_empty() {
            details.insert("embedding_models".into(), self.chroma.model_list());
        }
        match self.chroma.api.count_collections().await {
            Ok(count) => {
                details.insert("collections_count".into(), count.into());
                check.answered(HealthStatus::Healthy, "the server is healthy", details)
            }
            // It lives, but not with this tenant or database; one that is not there is of no use at all.
            Err(error) => {
                details.insert("error".into(), error.to_string().into());
                let status = match error.status() {
                    Some(404) => HealthStatus::Unhealthy,
                    _ => HealthStatus::Degraded,
                };
                let health = check.answered(status, &error.to_string(), details);
                without_admission(health, &error)
            }
        }
    }

    async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: Metadata,
    ) -> Result<Metadata, ProviderError> {
        Ok(self
            .chroma
            .api
            .create_collection(name, &metadata)
            .await?
            .described
            .metadata)
    }

    async fn collections(&self) -> Result<Vec<Collection>, ProviderError> {
        let records = self.chroma.api.collections().await?;
        // A loop, not a closure, which the compiler does not find general enough for this trait.
        let mut counts = Vec::with_capacity(records.len());
        for record in records {
            counts.push(self.chroma.counted(record));
        }
        let mut collections: Vec<Collection> = futures::stream::iter(counts)
            .buffer_unordered(COUNTS_AT_ONCE)
            .try_filter_map(async |collection| Ok(collection))
            .try_collect()
            .await?;
        collections.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(collections)
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, ProviderError> {
        let record = self.chroma.api.collection(name).await?;
        let count = self.chroma.api.count(&record).await?;
        Ok(Collection {
            count,
            ..record.described
        })
    }

    async fn update_metadata(
        &self,
        name: &CollectionName,
        metadata: Metadata,
        update: MetadataUpdate,
    ) -> Result<Metadata, ProviderError> {
        let _turn = self.metadata_turns.take(name).await;
        self.chroma.change_metadata(name, metadata, update).await
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), ProviderError> {
        self.chroma.api.delete_collection(name).await
    }

    async fn add_documents(
        &self,
        name: &CollectionName,
        documents: Vec<NewDocument>,
    ) -> Result<Added, ProviderError> {
        // Embedding may take long, and changes nothing yet.
        let Prepared {
            record,
            rows,
            truncated,
        } = self.chroma.prepare(name, documents).await?;
        let _turn = self.document_turns.take(name).await;
        self.chroma.store(&record, &rows, None).await?;
        Ok(Added {
            ids: rows.into_iter().map(|row| row.document.id).collect(),
            truncated,
        })
    }

    async fn documents(
        &self,
        name: &CollectionName,
        filter: &Filter,
        page: Page,
    ) -> Result<DocumentPage, ProviderError> {
        self.chroma.page(name, filter, page).await
    }

    async fn delete_documents(
        &self,
        name: &CollectionName,
        selection: Selection,
    ) -> Result<u64, ProviderError> {
        let _turn = self.document_turns.take(name).await;
        self.chroma.delete(name, selection).await
    }

    async fn empty(&self, name: &CollectionName) -> Result<u64, ProviderError> {
        let _turn = self.document_turns.take(name).await;
        let record = self.chroma.api.collection(name).await?;
        self.chroma.api.delete_all(&record).await
    }

    async fn metadata_values(&self, name: &CollectionName, field: &str) -> Result<Vec<Value>, ProviderError> {
        self.chroma.values(name, field).await
    }

    async fn search(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        self.chroma.find(name, query).await
    }

    async fn rerank(&self, _: &str, documents: Vec<Metadata>, _: Option<usize>) -> Reranked {
        rerank::unchanged(
            self.chroma.api.service(),
            documents,
            "ChromaDB has no cross-encoder",
        )
    }
}
