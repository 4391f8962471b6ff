//! The calls of the command line: ingestion jobs, loaded models, and queries whose answer is printed.

use ragstone_core::CollectionName;
use ragstone_core::call::CallError;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::RagstoneClient;
use crate::http::{Call, Repeat};

/// A file to ingest.
#[derive(Debug, Clone, Serialize)]
pub struct IngestDocument {
    /// The name that the file's documents are stored under.
    pub name: String,
    pub media_type: &'static str,
    pub encoding: ContentEncoding,
    pub content: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ContentEncoding {
    Utf8,
    Base64,
}

#[derive(Debug, Clone, Serialize)]
pub struct IngestRequest {
    pub documents: Vec<IngestDocument>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk_tokens: Option<usize>,
}

/// A job, with the report of its progress as the caller reads it.
#[derive(Debug, Clone, Deserialize)]
pub struct RemoteJob<R> {
    pub id: String,
    pub state: JobState,
    /// Why the job as a whole failed, or is waiting.
    #[serde(default)]
    pub error: Option<String>,
    #[serde(flatten)]
    pub report: R,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    Queued,
    Running,
    Done,
    Failed,
    Cancelled,
}

/// A page of the sources that were ingested into a collection, as the caller reads them.
#[derive(Debug, Clone, Deserialize)]
pub struct SourcePage<S> {
    pub sources: Vec<S>,
    /// The `after` of the next page, if there are more.
    pub next: Option<String>,
}

/// The documents and chunks that went with their sources.
#[derive(Debug, Clone, Copy, Deserialize)]
pub struct RemovedSources {
    pub documents: u64,
    pub chunks: u64,
}

#[derive(Serialize)]
struct SourcesToRemove<'a> {
    sources: &'a [String],
}

#[derive(Deserialize)]
struct JobId {
    id: String,
}

#[derive(Deserialize)]
struct LoadedModels {
    #[serde(default)]
    embedding_models: Vec<RemoteModel>,
}

#[derive(Deserialize)]
struct RemoteModel {
    id: String,
}

impl RagstoneClient {
    /// The ids of the embedding models that the server has loaded, its default first.
    pub async fn embedding_models(&self) -> Result<Vec<String>, CallError> {
        let health: LoadedModels = self.client.call_json(Call::get("health")).await?;
        Ok(health
            .embedding_models
            .into_iter()
            .map(|model| model.id)
            .collect())
    }

    /// Submits documents for ingestion and returns the id of the job. `request` is an [`IngestRequest`], or
    /// a body of the same shape with further fields. Ingesting the same documents again changes nothing,
    /// so the call is retried.
    pub async fn ingest(&self, name: &CollectionName, request: &impl Serialize) -> Result<String, CallError> {
        let call = Call::post(Self::path(name, "/ingest"))
            .json(request)
            .repeat(Repeat::Freely);
        let job: JobId = self.client.call_json(call).await?;
        Ok(job.id)
    }

    pub async fn job<R: DeserializeOwned>(&self, id: &str) -> Result<RemoteJob<R>, CallError> {
        self.client.call_json(Call::get(format!("jobs/{id}"))).await
    }

    /// Cancels a job. Documents that it has stored stay.
    pub async fn cancel_job(&self, id: &str) -> Result<(), CallError> {
        self.client.call(Call::delete(format!("jobs/{id}"))).await?;
        Ok(())
    }

    /// One page of the sources of a collection. A server of an older version answers with 404.
    pub async fn sources<S: DeserializeOwned>(
        &self,
        name: &CollectionName,
        after: Option<&str>,
    ) -> Result<SourcePage<S>, CallError> {
        let mut call = Call::get(Self::path(name, "/sources"));
        if let Some(after) = after {
            call = call.query("after", after);
        }
        self.client.call_json(call).await
    }

    /// Removes all documents of these sources.
    pub async fn remove_sources(
        &self,
        name: &CollectionName,
        sources: &[String],
    ) -> Result<RemovedSources, CallError> {
        let call = Call::delete(Self::path(name, "/sources")).json(&SourcesToRemove { sources });
        self.client.call_json(call).await
    }

    /// The answer to a query exactly as the server gives it.
    pub async fn query_json(&self, name: &CollectionName, body: &impl Serialize) -> Result<Value, CallError> {
        let call = Call::post(Self::path(name, "/query"))
            .json(body)
            .repeat(Repeat::Read);
        self.client.call_json(call).await
    }
}
