//! Searching a collection of a storage engine: embed, rank, check the model, rerank.
//!
//! The storage engine is read twice for a text: once for the collection's model, once for all queries.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use futures::future::join_all;
use ragstone_core::backend::BackendError;
use ragstone_core::collection::{Collection, CollectionName, EMBEDDING_PROVIDER};
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{Embedder, ModelIdentity, ModelInfo};
use ragstone_core::models::check_query_model;
use ragstone_core::search::{SearchMode, SearchQuery, SearchResponse, StageTime};
use ragstone_core::siblings::{Gathering, SIBLING_BYTES};
use ragstone_core::storage::{SearchHits, SiblingsRequest, StorageError, StorageQuery};
use serde_json::Value;

use super::StorageBackend;
use crate::rerank::{self, RERANK_FACTOR, rerank_depth};

/// Logged as the connection of a collection that names no embedding provider.
const THIS_PROCESS: &str = "local";

/// A query ready for the storage engine.
struct PreparedQuery {
    query: StorageQuery,
    /// The model of the query's vector, where this process made it.
    model: Option<ModelIdentity>,
    warning: Option<String>,
    embedding: Option<StageTime>,
    reused_vector: bool,
}

impl StorageBackend {
    pub(super) async fn search_collections(
        &self,
        names: &[CollectionName],
        queries: &[SearchQuery],
    ) -> Vec<Result<Vec<SearchResponse>, BackendError>> {
        let reused = ReusedVectors::default();
        let searches = names
            .iter()
            .map(|name| self.search_collection(name, queries, &reused));
        let responses = join_all(searches).await;
        reused.log();
        responses
    }

    async fn search_collection(
        &self,
        name: &CollectionName,
        queries: &[SearchQuery],
        reused: &ReusedVectors,
    ) -> Result<Vec<SearchResponse>, BackendError> {
        let needs_model = |query: &SearchQuery| query.mode.uses_vectors() && query.vector.is_none();
        let collection = if queries.iter().any(needs_model) {
            Some(self.service.store.collection(name).await?)
        } else {
            None
        };
        let embedder = match &collection {
            Some(collection) => Some(self.service.models.for_collection(collection)?.as_ref()),
            None => None,
        };
        let prepared = join_all(queries.iter().map(|query| self.prepare(query, embedder))).await;
        let prepared = prepared.into_iter().collect::<Result<Vec<_>, _>>()?;
        if let (Some(collection), Some(embedder)) = (&collection, embedder) {
            let hits = prepared.iter().filter(|prepared| prepared.reused_vector).count();
            reused.note(collection, embedder, hits);
        }
        let searches = prepared.iter().map(|prepared| prepared.query.clone()).collect();
        let found = match self.service.store.search_many(name, searches).await {
            Ok(found) => found,
            Err(error) => return Err(self.explain(name, &prepared, error).await),
        };
        let mut responses = Vec::with_capacity(queries.len());
        for ((query, prepared), found) in queries.iter().zip(prepared).zip(found) {
            responses.push(self.respond(name, query, prepared, found).await?);
        }
        Ok(responses)
    }

    async fn prepare(
        &self,
        query: &SearchQuery,
        embedder: Option<&dyn Embedder>,
    ) -> Result<PreparedQuery, BackendError> {
        let mut prepared = PreparedQuery {
            query: storage_query(query),
            model: None,
            warning: None,
            embedding: None,
            reused_vector: false,
        };
        if !query.mode.uses_vectors() {
            return Ok(prepared);
        }
        if let Some(vector) = &query.vector {
            prepared.query.vector = Some(vector.values.clone());
            prepared.model = vector.model.clone();
        } else if let Some(embedder) = embedder {
            let start = Instant::now();
            let text = query.text.as_deref().unwrap_or_default();
            let cached = self.vectors.get(embedder, text).await?;
            prepared.embedding = Some(StageTime::new("embed", start.elapsed()));
            prepared.reused_vector = cached.reused;
            prepared.query.vector = Some(cached.embedding.vector.clone());
            prepared.model = Some(embedder.info().identity.clone());
            prepared.warning = cached
                .embedding
                .truncated
                .then(|| truncated_query(embedder.info()));
        }
        Ok(prepared)
    }

    /// A width mismatch of a vector that this process made is better explained by the models.
    async fn explain(
        &self,
        name: &CollectionName,
        prepared: &[PreparedQuery],
        error: StorageError,
    ) -> BackendError {
        let StorageError::DimensionMismatch {
            collection,
            expected,
            actual,
        } = error
        else {
            return error.into();
        };
        if let Some(model) = prepared.iter().find_map(|prepared| prepared.model.as_ref())
            && let Ok(made_by) = self.service.store.vector_models(name).await
            && let Err(mismatch) = check_query_model(name, &made_by, model)
        {
            return mismatch.into();
        }
        InvalidInput::new(format!(
            "Embedding dimension mismatch: the query's vector has {actual} dimensions, collection '{collection}' has \
             {expected}"
        ))
        .into()
    }

    async fn respond(
        &self,
        name: &CollectionName,
        query: &SearchQuery,
        prepared: PreparedQuery,
        found: SearchHits,
    ) -> Result<SearchResponse, BackendError> {
        let mut response = SearchResponse {
            hits: found.hits,
            collection_metadata: found.metadata,
            warnings: Vec::from_iter(prepared.warning),
            reranked: false,
            timings: Vec::from_iter(prepared.embedding),
        };
        response.timings.extend(found.timings);
        if let Some(model) = &prepared.model
            && let Some(warning) = check_query_model(name, &found.models, model)?
        {
            response.warn(warning);
        }
        if query.rerank {
            let text = query.text.as_deref().unwrap_or_default();
            rerank::rerank_response(self, text, &mut response).await;
        }
        response.hits.truncate(query.top_k);
        if let Some(expand) = &query.expand {
            let mut gathering = Gathering::new(expand, SIBLING_BYTES);
            for hit in &mut response.hits {
                if let Some(siblings) = &mut hit.siblings {
                    *siblings = gathering.within(siblings, &hit.document);
                }
            }
            if gathering.cut || found.siblings_truncated {
                response.warn(siblings_truncated());
            }
        }
        Ok(response)
    }
}

fn storage_query(query: &SearchQuery) -> StorageQuery {
    let words = query.words().filter(|_| query.mode.uses_words());
    StorageQuery {
        vector: None,
        text: words.map(str::to_owned),
        filter: query.filter.clone(),
        ids: query.ids.clone(),
        limit: if query.rerank {
            rerank_depth(query.top_k)
        } else {
            query.top_k
        },
        max_distance: query.max_distance.filter(|_| query.mode != SearchMode::Keyword),
        weights: query.weights,
        siblings: query.expand.as_ref().map(|expand| SiblingsRequest {
            expand: expand.clone(),
            // The reranker chooses among more hits than are returned.
            max_bytes: SIBLING_BYTES * if query.rerank { RERANK_FACTOR } else { 1 },
        }),
    }
}

/// How often a vector was reused in one request, by connection and model.
#[derive(Default)]
struct ReusedVectors(Mutex<BTreeMap<String, usize>>);

impl ReusedVectors {
    fn note(&self, collection: &Collection, embedder: &dyn Embedder, hits: usize) {
        if hits == 0 {
            return;
        }
        let connection = collection
            .metadata
            .get(EMBEDDING_PROVIDER)
            .and_then(Value::as_str);
        let connection = connection.filter(|id| !id.is_empty()).unwrap_or(THIS_PROCESS);
        let key = format!("{connection}:{}", embedder.info().identity.id);
        let mut reused = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *reused.entry(key).or_default() += hits;
    }

    fn log(self) {
        for (key, hits) in self.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
            tracing::info!(key, hits, "embedding cache hit");
        }
    }
}

fn truncated_query(model: &ModelInfo) -> String {
    let limit = model
        .max_tokens
        .map_or_else(String::new, |tokens| format!(" {tokens} tokens"));
    format!(
        "The query is longer than what model '{}' reads{limit}: only its beginning was searched for",
        model.identity.id
    )
}

pub(crate) fn siblings_truncated() -> String {
    format!(
        "Some siblings were left out: those of one response have at most {} MB. Ask for fewer results, or set \
         'max_chars' of 'expand'",
        SIBLING_BYTES >> 20
    )
}
