//! The models loaded in this process, and which of them a collection uses.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::backend::BackendError;
use crate::collection::{Collection, CollectionName};
use crate::error::InvalidInput;
use crate::model::{EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, RemoteFault, Reranker, Role};

/// How many texts are handed to a model at once. Large requests go in slices of this size, so that
/// they take their turn in the model's queue instead of filling it.
const SLICE: usize = 256;

#[derive(Default)]
pub struct Models {
    embedders: BTreeMap<String, Arc<dyn Embedder>>,
    reranker: Option<Arc<dyn Reranker>>,
    /// Their ids in the order of the configuration.
    order: Vec<String>,
}

impl Models {
    /// The first embedder is the default model.
    pub fn new(embedders: Vec<Arc<dyn Embedder>>, reranker: Option<Arc<dyn Reranker>>) -> Self {
        let order: Vec<String> = embedders.iter().map(|e| e.info().identity.id.clone()).collect();
        let embedders = order.iter().cloned().zip(embedders).collect();
        Self {
            embedders,
            reranker,
            order,
        }
    }

    /// In the order of the configuration, so the default model first.
    pub fn embedders(&self) -> impl Iterator<Item = &Arc<dyn Embedder>> {
        self.order.iter().filter_map(|id| self.embedders.get(id))
    }

    pub fn default_embedder(&self) -> Option<&Arc<dyn Embedder>> {
        self.embedders().next()
    }

    /// A model by its id, or else by the name it was loaded from: the first in the configuration, where
    /// several entries have it.
    pub fn named(&self, name: &str) -> Option<&Arc<dyn Embedder>> {
        let loaded_from = || self.embedders().find(|e| e.info().name == name);
        self.embedders.get(name).or_else(loaded_from)
    }

    /// The ids, for messages: `a, b`, or `none`.
    pub fn available(&self) -> String {
        if self.embedders.is_empty() {
            return "none".to_owned();
        }
        self.embedders
            .keys()
            .map(String::as_str)
            .collect::<Vec<_>>()
            .join(", ")
    }

    pub fn embedder(&self, id: &str) -> Result<&Arc<dyn Embedder>, BackendError> {
        self.embedders
            .get(id)
            .ok_or_else(|| BackendError::ModelNotLoaded {
                model: id.to_owned(),
                available: self.available(),
            })
    }

    /// The model that a collection's metadata names.
    pub fn for_collection(&self, collection: &Collection) -> Result<&Arc<dyn Embedder>, BackendError> {
        match collection.embedding_model() {
            Some(id) => self.embedder(id),
            None => Err(BackendError::NoModel {
                collection: collection.name.clone(),
                available: self.available(),
            }),
        }
    }

    pub fn reranker(&self) -> Result<&Arc<dyn Reranker>, BackendError> {
        self.reranker.as_ref().ok_or(BackendError::NoReranker)
    }
}

/// Embeds any number of texts, slice by slice.
pub async fn embed_all(
    embedder: &dyn Embedder,
    inputs: Vec<EmbedInput>,
    role: Role,
) -> Result<Vec<Embedding>, BackendError> {
    let mut embeddings = Vec::with_capacity(inputs.len());
    let mut inputs = inputs.into_iter();
    loop {
        let slice: Vec<EmbedInput> = inputs.by_ref().take(SLICE).collect();
        if slice.is_empty() {
            return Ok(embeddings);
        }
        embeddings.extend(embedder.embed(slice, role).await?);
    }
}

/// Every model behind an API reads queries of this many bytes.
const SHORT_QUERY: usize = 1000;

/// Embeds query texts. A provider that refuses a text too short to be at fault is misconfigured.
pub async fn embed_queries(
    embedder: &dyn Embedder,
    texts: Vec<String>,
) -> Result<Vec<Embedding>, ModelError> {
    let count = texts.len();
    let are_short = texts.iter().all(|text| text.len() <= SHORT_QUERY);
    let inputs = texts.into_iter().map(EmbedInput::Text).collect();
    let embedded = embedder.embed(inputs, Role::Query).await;
    let embeddings = embedded.map_err(|mut error| {
        if let ModelError::Remote(failure) = &mut error
            && let RemoteFault::Refused { status } = failure.fault
            && are_short
        {
            failure.fault = RemoteFault::Misconfigured { status };
        }
        error
    })?;
    if embeddings.len() == count {
        Ok(embeddings)
    } else {
        Err(ModelError::Failed(
            "the model returned no vector for the query".into(),
        ))
    }
}

/// Compares the models that made a collection's vectors with the model of a query or of new documents.
/// Vectors of two models, or of two versions of one, cannot be compared.
pub fn model_mismatch(
    collection: &CollectionName,
    made_by: &[ModelIdentity],
    model: &ModelIdentity,
) -> Option<ModelMismatch> {
    let another = made_by.iter().find(|other| other.id != model.id);
    let other = another.or_else(|| made_by.iter().find(|other| other.version != model.version))?;
    Some(ModelMismatch {
        collection: collection.clone(),
        stored: other.clone(),
        loaded: model.clone(),
    })
}

/// Refuses a query whose vector comes from another model than the collection's vectors. Another
/// version of the same model is a warning.
pub fn check_query_model(
    collection: &CollectionName,
    made_by: &[ModelIdentity],
    model: &ModelIdentity,
) -> Result<Option<String>, InvalidInput> {
    match model_mismatch(collection, made_by, model) {
        Some(mismatch) if !mismatch.is_version_only() => Err(InvalidInput::new(mismatch.to_string())),
        mismatch => Ok(mismatch.map(|version| version.to_string())),
    }
}

/// A collection's vectors come from another model, or another version of the model, than is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelMismatch {
    collection: CollectionName,
    stored: ModelIdentity,
    loaded: ModelIdentity,
}

impl ModelMismatch {
    /// The same model by name, in another version.
    pub fn is_version_only(&self) -> bool {
        self.stored.id == self.loaded.id
    }
}

const HOW_TO_REEMBED: &str = "in a new collection, in this one after emptying it, or by ingesting them again";

impl fmt::Display for ModelMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            collection,
            stored,
            loaded,
        } = self;
        if self.is_version_only() {
            write!(
                f,
                "Collection '{collection}' has vectors of version '{}' of model '{}', and version '{}' is loaded: \
                 distances between the two mean little. Load the former version, or embed the documents again: \
                 {HOW_TO_REEMBED}",
                stored.version, loaded.id, loaded.version
            )
        } else {
            write!(
                f,
                "Collection '{collection}' has vectors of model '{}', and its embedding_model is '{}': vectors of \
                 two models cannot be compared. Set its embedding_model to '{}' again, or embed the documents \
                 again: {HOW_TO_REEMBED}",
                stored.id, loaded.id, stored.id
            )
        }
    }
}
