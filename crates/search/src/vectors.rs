//! The cache of query vectors: each text is embedded once per model, however many collections and
//! requests need its vector.

use std::sync::Arc;
use std::time::Duration;

use moka::future::Cache;
use ragstone_core::model::{Embedder, Embedding, ModelError};
use ragstone_core::models::embed_queries;

/// Memory for the vectors and texts of past queries.
pub const DEFAULT_CACHE_BYTES: u64 = 16 << 20;
/// A model behind an API may change without changing its version.
const TIME_TO_LIVE: Duration = Duration::from_secs(600);
/// Estimated cost of an entry besides its text and its vector.
const ENTRY_BYTES: usize = 192;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    /// The model's id and version: another version makes other vectors.
    model: String,
    text: String,
}

impl Key {
    fn new(embedder: &dyn Embedder, text: &str) -> Self {
        let identity = &embedder.info().identity;
        Self {
            model: format!("{}:{}", identity.id, identity.version),
            text: text.to_owned(),
        }
    }
}

/// Shared by everything in a process that embeds queries. A clone is another handle to the same cache.
#[derive(Clone)]
pub struct QueryVectors {
    cache: Cache<Key, Arc<Embedding>>,
}

impl Default for QueryVectors {
    fn default() -> Self {
        Self::with_capacity(DEFAULT_CACHE_BYTES)
    }
}

/// A query's vector, and whether another caller had it made.
pub struct CachedVector {
    pub embedding: Arc<Embedding>,
    pub reused: bool,
}

impl QueryVectors {
    pub fn with_capacity(bytes: u64) -> Self {
        let weigh = |key: &Key, embedding: &Arc<Embedding>| {
            let bytes = key.text.len() + key.model.len() + 4 * embedding.vector.len() + ENTRY_BYTES;
            u32::try_from(bytes).unwrap_or(u32::MAX)
        };
        Self {
            cache: Cache::builder()
                .weigher(weigh)
                .max_capacity(bytes)
                .time_to_live(TIME_TO_LIVE)
                .build(),
        }
    }

    /// The vector of one text. Concurrent callers wait for the same computation.
    pub async fn get(&self, embedder: &dyn Embedder, text: &str) -> Result<CachedVector, ModelError> {
        let made = async {
            let mut embeddings = embed_queries(embedder, vec![text.to_owned()]).await?;
            embeddings
                .pop()
                .map(Arc::new)
                .ok_or_else(|| ModelError::Failed("the model returned no vector for the query".into()))
        };
        let entry = self
            .cache
            .entry(Key::new(embedder, text))
            .or_try_insert_with(made)
            .await
            .map_err(|error| ModelError::clone(&error))?;
        let reused = !entry.is_fresh();
        if reused {
            metrics::counter!("ragstone_embedding_cache_hits_total").increment(1);
        }
        Ok(CachedVector {
            embedding: entry.into_value(),
            reused,
        })
    }

    /// The vectors of several texts, in order. Texts that are not cached are embedded in one call.
    pub async fn get_many(
        &self,
        embedder: &dyn Embedder,
        texts: &[String],
    ) -> Result<Vec<Arc<Embedding>>, ModelError> {
        let mut found: Vec<Option<Arc<Embedding>>> = Vec::with_capacity(texts.len());
        let mut missing: Vec<String> = Vec::new();
        for text in texts {
            let known = self.cache.get(&Key::new(embedder, text)).await;
            if known.is_none() && !missing.contains(text) {
                missing.push(text.clone());
            }
            found.push(known);
        }
        let mut made = Vec::with_capacity(missing.len());
        if !missing.is_empty() {
            let embeddings = embed_queries(embedder, missing.clone()).await?;
            for (text, embedding) in missing.iter().zip(embeddings) {
                let embedding = Arc::new(embedding);
                let key = Key::new(embedder, text);
                self.cache.insert(key, Arc::clone(&embedding)).await;
                made.push(embedding);
            }
        }
        let new = |text: &String| {
            let index = missing.iter().position(|other| other == text)?;
            made.get(index).cloned()
        };
        found
            .into_iter()
            .zip(texts)
            .map(|(known, text)| known.or_else(|| new(text)))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| ModelError::Failed("the model returned too few vectors".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::WordEmbedder;

    #[tokio::test]
    async fn concurrent_callers_share_one_computation() {
        let words = WordEmbedder::new("words");
        let vectors = QueryVectors::default();
        let (a, b) = tokio::join!(
            vectors.get(words.as_ref(), "red apple"),
            vectors.get(words.as_ref(), "red apple")
        );
        assert_eq!(words.calls(), 1);
        assert_eq!(a.unwrap().embedding.vector, b.unwrap().embedding.vector);
    }

    #[tokio::test]
    async fn several_texts_are_embedded_in_one_call_and_only_where_missing() {
        let words = WordEmbedder::new("words");
        let vectors = QueryVectors::default();
        let texts = ["a", "b", "a"].map(str::to_owned);
        let made = vectors.get_many(words.as_ref(), &texts).await.unwrap();
        assert_eq!((made.len(), words.calls()), (3, 1));
        assert_eq!(made[0].vector, made[2].vector);
        vectors.get(words.as_ref(), "b").await.unwrap();
        assert_eq!(words.calls(), 1);
        vectors
            .get_many(words.as_ref(), &["b".to_owned(), "c".to_owned()])
            .await
            .unwrap();
        assert_eq!(words.calls(), 2);
    }

    #[tokio::test]
    async fn another_version_of_a_model_has_other_vectors() {
        let vectors = QueryVectors::default();
        let (old, new) = (
            WordEmbedder::with_version("words", "1"),
            WordEmbedder::with_version("words", "2"),
        );
        vectors.get(old.as_ref(), "a").await.unwrap();
        vectors.get(new.as_ref(), "a").await.unwrap();
        assert_eq!((old.calls(), new.calls()), (1, 1));
    }
}
