//! Parts for tests: a store in a temporary folder, and models that need no files.
#![allow(clippy::unwrap_used, reason = "only tests use this module")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use ragstone_core::backend::Backend;
use ragstone_core::model::{
    EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, ModelInfo, Reranker, Role, Scored,
};
use ragstone_core::models::Models;
use ragstone_core::service::Service;
use ragstone_core::storage::Storage;
use ragstone_store::{SqliteStore, StoreOptions};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{QueryVectors, StorageBackend};

const DIMENSIONS: usize = 64;

/// Texts with the same words are near each other. Counts how often it is asked.
pub struct WordEmbedder {
    info: ModelInfo,
    pub calls: AtomicUsize,
}

impl WordEmbedder {
    pub fn new(id: &str) -> Arc<Self> {
        Self::with_version(id, "1")
    }

    pub fn with_version(id: &str, version: &str) -> Arc<Self> {
        let identity = ModelIdentity {
            id: id.to_owned(),
            version: version.to_owned(),
            dimensions: DIMENSIONS,
        };
        Arc::new(Self {
            info: ModelInfo {
                identity,
                name: format!("words/{id}"),
                max_tokens: None,
            },
            calls: AtomicUsize::new(0),
        })
    }

    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }
}

fn word_vector(text: &str) -> Vec<f32> {
    let mut vector = vec![0.01; DIMENSIONS];
    for word in text
        .to_lowercase()
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
    {
        let hash = word.bytes().fold(7usize, |hash, byte| {
            hash.wrapping_mul(31).wrapping_add(byte.into())
        });
        vector[hash % DIMENSIONS] += 1.0;
    }
    vector
}

#[async_trait]
impl Embedder for WordEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, _: Role) -> Result<Vec<Embedding>, ModelError> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let embed = |input| match input {
            EmbedInput::Text(text) => Embedding {
                vector: word_vector(&text),
                tokens: 1,
                truncated: false,
            },
            EmbedInput::Tokens(_) => unreachable!("tests send texts"),
        };
        Ok(inputs.into_iter().map(embed).collect())
    }
}

/// The longer the text, the better; a text with `fail` in it fails.
pub struct LengthReranker;

#[async_trait]
impl Reranker for LengthReranker {
    fn name(&self) -> &str {
        "length"
    }

    async fn score(&self, _: &str, texts: Vec<String>, _: Option<usize>) -> Result<Scored, ModelError> {
        if texts.iter().any(|text| text.contains("fail")) {
            return Err(ModelError::Failed("the model failed".to_owned()));
        }
        Ok(Scored {
            scores: texts.iter().map(|text| text.len() as f32).collect(),
            tokens: texts.len(),
        })
    }
}

pub struct Parts {
    pub service: Service,
    pub store: Arc<SqliteStore>,
    _folder: TempDir,
}

pub fn parts(models: Models) -> Parts {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(SqliteStore::open(folder.path(), StoreOptions::default()).unwrap());
    let service = Service {
        store: Arc::clone(&store) as Arc<dyn Storage>,
        models: Arc::new(models),
    };
    Parts {
        service,
        store,
        _folder: folder,
    }
}

impl Parts {
    /// A backend with a cache of its own.
    pub fn backend(&self) -> StorageBackend {
        StorageBackend::new(self.service.clone(), QueryVectors::default())
    }

    /// A collection with documents `0`, `1`, … of these texts, all in section `s`.
    pub async fn collection(&self, name: &str, metadata: Value, texts: &[&str]) {
        let name = ragstone_core::CollectionName::parse(name).unwrap();
        let metadata = metadata.as_object().unwrap().clone();
        self.service
            .store
            .create_collection(&name, metadata)
            .await
            .unwrap();
        if texts.is_empty() {
            return;
        }
        let raw = texts
            .iter()
            .enumerate()
            .map(|(n, text)| json!({"id": n.to_string(), "text": text, "metadata": {"section": "s"}}));
        let raw = serde_json::from_value(raw.collect()).unwrap();
        let documents = ragstone_core::document::check_documents(raw).unwrap();
        self.backend().add_documents(&name, documents).await.unwrap();
    }
}
