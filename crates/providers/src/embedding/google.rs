//! Google Gemini's embeddings API.

use async_trait::async_trait;
use ragstone_core::model::{CallLimits, EmbedInput, Embedder, Embedding, ModelError, ModelInfo, Role};
use serde::Deserialize;
use serde_json::{Value, json};

use super::batches;
use super::vectors;
use crate::error::ConfigError;
use crate::http::{Call, ServiceClient};
use crate::model_name::in_google_path;

/// A batch holds at most 100 requests.
const LIMITS: CallLimits = CallLimits {
    texts: 100,
    bytes: 1 << 20,
};

#[derive(Debug)]
pub(super) struct GoogleEmbedder {
    client: ServiceClient,
    info: ModelInfo,
    /// The name in the form of the API, `models/…`.
    model: String,
}

#[derive(Deserialize)]
struct GoogleEmbeddings {
    embeddings: Vec<Values>,
}

#[derive(Deserialize)]
struct Values {
    values: Vec<f32>,
}

impl GoogleEmbedder {
    pub(super) fn new(client: ServiceClient, info: ModelInfo) -> Result<Self, ConfigError> {
        let model = in_google_path(&info.name).map_err(|expected| ConfigError::field("model", expected))?;
        Ok(Self { client, info, model })
    }

    async fn embed_batch(&self, texts: &[String], role: Role) -> Result<Vec<Embedding>, ModelError> {
        let task = match role {
            Role::Query => "RETRIEVAL_QUERY",
            Role::Passage => "RETRIEVAL_DOCUMENT",
        };
        let requests: Vec<Value> = texts
            .iter()
            .map(|text| {
                json!({
                    "model": self.model,
                    "content": {"parts": [{"text": text}]},
                    "taskType": task,
                    "outputDimensionality": self.info.identity.dimensions,
                })
            })
            .collect();
        let call =
            Call::post(format!("{}:batchEmbedContents", self.model)).json(&json!({"requests": requests}));
        let answer: GoogleEmbeddings = self.client.call_json(call).await.map_err(vectors::model_error)?;
        // The answer has the order of the requests and no token counts.
        let values = answer.embeddings.into_iter().map(|e| e.values).collect();
        vectors::finish(values, texts, 0, &self.info)
            .map_err(|reason| vectors::model_error(self.client.bad_answer(reason)))
    }
}

#[async_trait]
impl Embedder for GoogleEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        let texts = batches::into_texts(inputs, self.client.service())?;
        let mut embeddings = Vec::with_capacity(texts.len());
        for batch in batches::split(&texts, LIMITS) {
            embeddings.extend(self.embed_batch(batch, role).await?);
        }
        Ok(embeddings)
    }

    fn limits(&self) -> CallLimits {
        LIMITS
    }
}
