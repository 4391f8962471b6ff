//! The vectors of one query text, each made once however many collections share its model.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ragstone_core::collection::{Collection, EMBEDDING_PROVIDER};
use ragstone_core::model::ModelIdentity;
use serde_json::Value;
use tokio::sync::OnceCell;

use crate::error::ServiceError;
use crate::models::{Models, embed_query};

/// The connection of a model when a collection does not say which.
const THIS_PROCESS: &str = "local";

/// Lives as long as one request: the key does not have the text in it.
pub(super) struct QueryVectors<'a> {
    models: &'a Models,
    text: &'a str,
    cells: Mutex<BTreeMap<String, Cached>>,
}

#[derive(Default)]
struct Cached {
    vector: Arc<OnceCell<Vec<f32>>>,
    hits: u64,
}

impl<'a> QueryVectors<'a> {
    pub(super) fn new(models: &'a Models, text: &'a str) -> Self {
        Self {
            models,
            text,
            cells: Mutex::default(),
        }
    }

    /// The vector of the text for a collection, and the model that made it. Whoever comes while it is
    /// being made waits for it.
    pub(super) async fn get(
        &self,
        collection: &Collection,
    ) -> Result<(Vec<f32>, ModelIdentity), ServiceError> {
        let embedder = self.models.for_collection(collection)?;
        let model = embedder.info().identity.clone();
        let cell = self.cell(cache_key(collection, &model.id));
        let vector = cell
            .get_or_try_init(|| async {
                let embedding = embed_query(embedder.as_ref(), self.text).await?;
                Ok::<_, ServiceError>(embedding.vector)
            })
            .await?;
        Ok((vector.clone(), model))
    }

    fn cell(&self, key: String) -> Arc<OnceCell<Vec<f32>>> {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        match cells.get_mut(&key) {
            Some(cached) => {
                cached.hits += 1;
                Arc::clone(&cached.vector)
            }
            None => Arc::clone(&cells.entry(key).or_default().vector),
        }
    }

    /// Logs how often each vector was used again, and returns how often in all.
    pub(super) fn report_hits(&self) -> u64 {
        let cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, cached) in cells.iter().filter(|(_, cached)| cached.hits > 0) {
            tracing::info!(key, hits = cached.hits, "embedding cache hit");
        }
        cells.values().map(|cached| cached.hits).sum()
    }
}

/// `connectionId:model`.
fn cache_key(collection: &Collection, model: &str) -> String {
    let connection = collection
        .metadata
        .get(EMBEDDING_PROVIDER)
        .and_then(Value::as_str);
    format!(
        "{}:{model}",
        connection.filter(|id| !id.is_empty()).unwrap_or(THIS_PROCESS)
    )
}
