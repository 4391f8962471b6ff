//! The calls of Chroma's API (version 2) that the adapter uses.

use std::time::Duration;

use ragstone_core::call::CallError;
use ragstone_core::storage::StorageError;
use ragstone_core::{Collection, CollectionName, Metadata};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::codec;
use super::naming::Naming;
use crate::error::{ConfigError, both};
use crate::http::{Breaking, Call, Repeat, ServiceClient};

/// A key that no document has: "its value is not this" holds for all of them.
const NEVER: &str = "ragstone:never";
/// Deleting 50,000 documents took ChromaDB longer than the timeout of other calls (20 s).
const EMPTY_TIMEOUT: Duration = Duration::from_secs(600);
const COLLECTIONS_PER_PAGE: usize = 500;
/// The distance function of every collection that Ragstone creates.
pub(super) const COSINE: &str = "cosine";

pub(super) struct ChromaApi {
    client: ServiceClient,
    /// The path of the database, with a slash at its end.
    root: String,
    naming: Naming,
    checks: OnceCell<PreFlight>,
}

/// The limits that a server reports.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct PreFlight {
    pub(super) max_batch_size: usize,
    #[serde(default)]
    pub(super) supports_base64_encoding: bool,
}

/// A collection as Chroma describes it, which is without its count.
#[derive(Debug, Clone)]
pub(super) struct CollectionRecord {
    pub(super) id: String,
    pub(super) described: Collection,
    /// The distance function of its index.
    pub(super) space: String,
}

#[derive(Deserialize)]
struct ChromaCollection {
    id: String,
    name: String,
    #[serde(default)]
    metadata: Option<Metadata>,
    #[serde(default)]
    dimension: Option<usize>,
    #[serde(default)]
    configuration_json: Value,
}

/// Columns of records; columns that were not requested are absent.
#[derive(Debug, Deserialize)]
pub(super) struct ChromaRecords {
    pub(super) ids: Vec<String>,
    #[serde(default)]
    pub(super) metadatas: Option<Vec<Option<Metadata>>>,
    #[serde(default)]
    pub(super) documents: Option<Vec<Option<String>>>,
    #[serde(default)]
    pub(super) embeddings: Option<Vec<Option<Vec<f32>>>>,
}

/// As [`ChromaRecords`], with one list per query.
#[derive(Debug, Deserialize)]
pub(super) struct ChromaHits {
    pub(super) ids: Vec<Vec<String>>,
    #[serde(default)]
    pub(super) metadatas: Option<Vec<Vec<Option<Metadata>>>>,
    #[serde(default)]
    pub(super) documents: Option<Vec<Vec<Option<String>>>>,
    #[serde(default)]
    pub(super) distances: Option<Vec<Vec<Option<f32>>>>,
}

/// The names that [`Tenancy::check`] accepts, apart from the length. They become part of a path.
pub(super) const TENANCY_PATTERN: &str = r"^\.?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?$";

/// The tenant and database of the collections.
#[derive(Debug)]
pub(super) struct Tenancy {
    pub(super) tenant: String,
    pub(super) database: String,
}

impl Tenancy {
    pub(super) fn check(tenant: &str, database: &str) -> Result<Self, ConfigError> {
        let check = |field: &str, name: &str| {
            let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if name.len() < 3 || !name.chars().all(plain) || name.contains("..") {
                let message =
                    "must have at least 3 characters, all of them letters, digits, '-', '_' or single '.'";
                return Err(ConfigError::field(field, message));
            }
            Ok(name.to_owned())
        };
        let (tenant, database) = both(check("tenant", tenant), check("database", database))?;
        Ok(Self { tenant, database })
    }
}

#[derive(Deserialize)]
struct Deleted {
    deleted: Option<u64>,
}

impl ChromaApi {
    pub(super) fn new(client: ServiceClient, tenancy: &Tenancy, naming: Naming) -> Self {
        let Tenancy { tenant, database } = tenancy;
        Self {
            client,
            root: format!("api/v2/tenants/{tenant}/databases/{database}/"),
            naming,
            checks: OnceCell::new(),
        }
    }

    pub(super) fn service(&self) -> &str {
        self.client.service()
    }

    pub(super) fn bad_answer(&self, reason: impl Into<String>) -> StorageError {
        self.client.bad_answer(reason).into()
    }

    pub(super) async fn version(&self) -> Result<String, CallError> {
        let call = health_check(Call::get("api/v2/version"));
        self.client.call_json_to_show(call).await
    }

    /// How many collections the database has. Chroma reports none for a database that does not exist, so
    /// that is checked first.
    pub(super) async fn count_collections(&self) -> Result<u64, CallError> {
        let database = Call::get(self.root.trim_end_matches('/'));
        self.client.call(health_check(database)).await?;
        let call = Call::get(format!("{}collections_count", self.root));
        self.client.call_json(health_check(call)).await
    }

    /// Requested once.
    pub(super) async fn pre_flight(&self) -> Result<&PreFlight, StorageError> {
        let asked = self
            .checks
            .get_or_try_init(|| self.client.call_json(Call::get("api/v2/pre-flight-checks")))
            .await?;
        Ok(asked)
    }

    pub(super) async fn create_collection(
        &self,
        name: &CollectionName,
        metadata: &Metadata,
    ) -> Result<CollectionRecord, StorageError> {
        let chroma_name = self.naming.chroma_name(name).map_err(StorageError::Unsupported)?;
        let call = Call::post(format!("{}collections", self.root))
            .json(&json!({
                "name": chroma_name,
                "metadata": codec::encode_some(metadata),
                "configuration": {"hnsw": {"space": COSINE}},
            }))
            .repeat(Repeat::IfUnprocessed);
        match self.client.call_json(call).await {
            Ok(body) => self.read(body),
            Err(error) if error.status() == Some(409) => Err(StorageError::CollectionExists(name.clone())),
            Err(error) => {
                if error.status() == Some(400) {
                    self.check_database(|call| call).await?;
                }
                Err(error.into())
            }
        }
    }

    /// All collections whose names are valid here.
    pub(super) async fn collections(&self) -> Result<Vec<CollectionRecord>, StorageError> {
        self.all_collections(|call| call).await
    }

    /// [`ChromaApi::collections`] as a health check, which also runs while the circuit is open.
    pub(super) async fn probe(&self, timeout: Duration) -> Result<Vec<CollectionRecord>, StorageError> {
        self.all_collections(|call| health_check(call).patience(timeout))
            .await
    }

    async fn all_collections(
        &self,
        how: impl Fn(Call) -> Call,
    ) -> Result<Vec<CollectionRecord>, StorageError> {
        let mut found = Vec::new();
        let mut offset = 0;
        loop {
            let call = Call::get(format!("{}collections", self.root))
                .query("limit", COLLECTIONS_PER_PAGE.to_string())
                .query("offset", offset.to_string());
            let page: Vec<ChromaCollection> = self.client.call_json(how(call)).await?;
            let got = page.len();
            for body in page {
                let name = body.name.clone();
                if self.naming.our_name(&name).is_none() {
                    tracing::warn!(
                        service = self.service(),
                        name,
                        "skipping a collection with an unusable name"
                    );
                    continue;
                }
                match self.read(body) {
                    Ok(record) => found.push(record),
                    Err(error) => {
                        tracing::warn!(service = self.service(), name, %error, "skipping an unusable collection");
                    }
                }
            }
            if got < COLLECTIONS_PER_PAGE {
                if offset + got == 0 {
                    self.check_database(how).await?;
                }
                return Ok(found);
            }
            offset += got;
        }
    }

    pub(super) async fn collection(&self, name: &CollectionName) -> Result<CollectionRecord, StorageError> {
        let call = Call::get(format!("{}collections/{}", self.root, self.existing(name)?));
        match self.client.call_json(call).await {
            Ok(body) => self.read(body),
            Err(error) => Err(self.missing(error, name).await),
        }
    }

    /// Chroma treats a database that does not exist like an empty one. That is a fault of the
    /// configuration and not of the request, so it is reported as an unusable answer.
    async fn check_database(&self, how: impl Fn(Call) -> Call) -> Result<(), StorageError> {
        let database = how(Call::get(self.root.trim_end_matches('/')));
        match self.client.call(database).await {
            Err(error) if error.status() == Some(404) => {
                Err(self.bad_answer("the database does not exist: correct its 'tenant' or 'database'"))
            }
            // Any other outcome says nothing about the call that is being explained.
            _ => Ok(()),
        }
    }

    /// The error of a failed call for a collection by name.
    async fn missing(&self, error: CallError, name: &CollectionName) -> StorageError {
        match not_found(error, name) {
            missing @ StorageError::CollectionNotFound(_) => {
                let checked = self.check_database(|call| call).await;
                checked.err().unwrap_or(missing)
            }
            other => other,
        }
    }

    pub(super) async fn replace_metadata(
        &self,
        record: &CollectionRecord,
        metadata: &Metadata,
    ) -> Result<(), StorageError> {
        let call = Call::put(format!("{}collections/{}", self.root, record.id))
            .json(&json!({"new_metadata": codec::encode_some(metadata)}));
        self.send(record, call).await
    }

    pub(super) async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        let path = format!("{}collections/{}", self.root, self.existing(name)?);
        let call = Call::delete(path).repeat(Repeat::IfUnprocessed);
        match self.client.call(call).await {
            Ok(_) => Ok(()),
            Err(error) => Err(self.missing(error, name).await),
        }
    }

    pub(super) async fn count(&self, record: &CollectionRecord) -> Result<u64, StorageError> {
        let call = Call::get(self.path(record, "count"));
        self.client
            .call_json(call)
            .await
            .map_err(|error| not_found(error, &record.described.name))
    }

    pub(super) async fn upsert(
        &self,
        record: &CollectionRecord,
        records: &Value,
        patience: Option<Duration>,
    ) -> Result<(), StorageError> {
        let mut call = Call::post(self.path(record, "upsert")).json(records);
        if let Some(patience) = patience {
            call = call.patience(patience);
        }
        self.send(record, call).await
    }

    pub(super) async fn get(
        &self,
        record: &CollectionRecord,
        request: &Value,
    ) -> Result<ChromaRecords, StorageError> {
        let call = Call::post(self.path(record, "get"))
            .json(request)
            .repeat(Repeat::Read);
        let records: ChromaRecords = self
            .client
            .call_json(call)
            .await
            .map_err(|error| not_found(error, &record.described.name))?;
        let count = records.ids.len();
        let uneven = records.metadatas.as_ref().is_some_and(|m| m.len() != count)
            || records.documents.as_ref().is_some_and(|d| d.len() != count)
            || records.embeddings.as_ref().is_some_and(|e| e.len() != count);
        if uneven {
            return Err(self.bad_answer("its columns have different lengths"));
        }
        Ok(records)
    }

    pub(super) async fn query(
        &self,
        record: &CollectionRecord,
        request: &Value,
    ) -> Result<ChromaHits, StorageError> {
        // A query that loses a race with a writer fails with 500; the caller retries it.
        let call = Call::post(self.path(record, "query"))
            .json(request)
            .breaking(Breaking::ByOutages);
        self.client
            .call_json(call)
            .await
            .map_err(|error| not_found(error, &record.described.name))
    }

    pub(super) async fn delete_ids(
        &self,
        record: &CollectionRecord,
        ids: &[String],
    ) -> Result<(), StorageError> {
        let call = Call::post(self.path(record, "delete")).json(&json!({"ids": ids}));
        self.send(record, call).await
    }

    /// Deletes all documents in one request, so that either all are gone or none.
    pub(super) async fn delete_all(&self, record: &CollectionRecord) -> Result<u64, StorageError> {
        let before = self.count(record).await?;
        if before == 0 {
            return Ok(0);
        }
        let call = Call::post(self.path(record, "delete"))
            .json(&json!({"where": {NEVER: {"$ne": ""}}}))
            .repeat(Repeat::IfUnprocessed)
            .patience(EMPTY_TIMEOUT);
        let answer: Deleted = self
            .client
            .call_json(call)
            .await
            .map_err(|error| not_found(error, &record.described.name))?;
        Ok(answer.deleted.unwrap_or(before))
    }

    async fn send(&self, record: &CollectionRecord, call: Call) -> Result<(), StorageError> {
        self.client
            .call(call)
            .await
            .map(|_| ())
            .map_err(|error| not_found(error, &record.described.name))
    }

    /// Chroma's name for a collection. A collection whose name Chroma does not allow cannot exist.
    fn existing(&self, name: &CollectionName) -> Result<String, StorageError> {
        self.naming
            .chroma_name(name)
            .map_err(|_| StorageError::CollectionNotFound(name.clone()))
    }

    fn path(&self, record: &CollectionRecord, operation: &str) -> String {
        format!("{}collections/{}/{operation}", self.root, record.id)
    }

    fn read(&self, body: ChromaCollection) -> Result<CollectionRecord, StorageError> {
        // The id becomes part of paths.
        if !body.id.chars().all(|c| c.is_ascii_alphanumeric() || c == '-') {
            return Err(self.bad_answer("a collection id is not a UUID"));
        }
        let name = self
            .naming
            .our_name(&body.name)
            .ok_or_else(|| self.bad_answer("a collection has another name than was requested"))?;
        let space = body
            .configuration_json
            .pointer("/hnsw/space")
            .or_else(|| body.configuration_json.pointer("/spann/space"))
            .and_then(Value::as_str)
            .unwrap_or("l2")
            .to_owned();
        Ok(CollectionRecord {
            id: body.id,
            described: Collection {
                name,
                count: 0,
                metadata: codec::decode(body.metadata).map_err(|e| self.bad_answer(e))?,
                dimensions: body.dimension,
            },
            space,
        })
    }
}

/// A request that finds out whether the server works. It runs while the circuit is open, and an error
/// status is the result rather than a reason to retry.
fn health_check(call: Call) -> Call {
    call.breaking(Breaking::Ignored).repeat(Repeat::Freely)
}

fn not_found(error: CallError, name: &CollectionName) -> StorageError {
    let CallError::Answered(answer) = &error else {
        return error.into();
    };
    let message = answer.message().unwrap_or_default();
    let of_collection = match answer.status {
        // A tenant or database that does not exist is a 404 with another message.
        404 => message.starts_with("Collection") || message.contains("Collection ["),
        // The collection is being deleted.
        412 => message.contains("Missing metadata segment"),
        _ => false,
    };
    if of_collection {
        StorageError::CollectionNotFound(name.clone())
    } else {
        error.into()
    }
}
