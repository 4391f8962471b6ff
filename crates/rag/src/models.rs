//! The models that are loaded, and which of them a collection uses.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{
    EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, RemoteFault, Reranker, Role,
};

use crate::Service;
use crate::error::ServiceError;

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

    pub fn embedder(&self, id: &str) -> Result<&Arc<dyn Embedder>, ServiceError> {
        self.embedders
            .get(id)
            .ok_or_else(|| ServiceError::ModelNotLoaded {
                model: id.to_owned(),
                available: self.available(),
            })
    }

    /// The model that a collection's metadata names.
    pub fn for_collection(&self, collection: &Collection) -> Result<&Arc<dyn Embedder>, ServiceError> {
        match collection.embedding_model() {
            Some(id) => self.embedder(id),
            None => Err(ServiceError::NoModel {
                collection: collection.name.clone(),
                available: self.available(),
            }),
        }
    }

    pub fn reranker(&self) -> Result<&Arc<dyn Reranker>, ServiceError> {
        self.reranker.as_ref().ok_or(ServiceError::NoReranker)
    }
}

/// Embeds any number of texts, slice by slice.
pub async fn embed_all(
    embedder: &dyn Embedder,
    inputs: Vec<EmbedInput>,
    role: Role,
) -> Result<Vec<Embedding>, ServiceError> {
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

/// No model of an API is too small for a question of so many bytes.
const SHORT_QUERY: usize = 1000;

/// Embeds one query text. Where a provider refuses one that cannot be at fault, its configuration is.
pub async fn embed_query(embedder: &dyn Embedder, text: &str) -> Result<Embedding, ServiceError> {
    let embedded = embedder.embed(vec![text.to_owned().into()], Role::Query).await;
    let embeddings = embedded.map_err(|mut error| {
        if let ModelError::Remote(failure) = &mut error
            && let RemoteFault::Refused { status } = failure.fault
            && text.len() <= SHORT_QUERY
        {
            failure.fault = RemoteFault::Misconfigured { status };
        }
        error
    })?;
    embeddings
        .into_iter()
        .next()
        .ok_or_else(|| ModelError::Failed("the model gave no vector for the query".into()).into())
}

/// Whether vectors of this model can be compared with those of a collection: not where another model
/// made any of them, and with a warning where another version of it did.
pub(crate) async fn check_comparable(
    service: &Service,
    collection: &CollectionName,
    model: &ModelIdentity,
) -> Result<Option<String>, ServiceError> {
    match other_maker(service, collection, model).await? {
        Some(other) if !other.is_a_version() => Err(InvalidInput::new(other.to_string()).into()),
        other => Ok(other.map(|version| version.to_string())),
    }
}

/// The model that made vectors of a collection, where it is not this one. Vectors of two models, or
/// of two versions of one, cannot be compared.
pub(crate) async fn other_maker(
    service: &Service,
    collection: &CollectionName,
    model: &ModelIdentity,
) -> Result<Option<OtherMaker>, ServiceError> {
    let made_by = service.store.vector_models(collection).await?;
    let another = made_by.iter().find(|other| other.id != model.id);
    let other = another.or_else(|| made_by.iter().find(|other| other.version != model.version));
    Ok(other.map(|other| OtherMaker {
        collection: collection.clone(),
        other: other.clone(),
        model: model.clone(),
    }))
}

pub(crate) struct OtherMaker {
    collection: CollectionName,
    other: ModelIdentity,
    model: ModelIdentity,
}

impl OtherMaker {
    /// The same model by name, in another version.
    pub(crate) fn is_a_version(&self) -> bool {
        self.other.id == self.model.id
    }
}

const ANEW: &str = "in a new collection, in this one once it is emptied, or by ingesting them again";

impl fmt::Display for OtherMaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            collection,
            other,
            model,
        } = self;
        if self.is_a_version() {
            write!(
                f,
                "Collection '{collection}' has vectors of version '{}' of model '{}', and version '{}' is loaded: \
                 distances between the two mean little. Load the former version, or embed the documents anew: {ANEW}",
                other.version, model.id, model.version
            )
        } else {
            write!(
                f,
                "Collection '{collection}' has vectors of model '{}', and its embedding_model is '{}': vectors of \
                 two models cannot be compared. Name '{}' as its embedding_model again, or embed the documents \
                 anew: {ANEW}",
                other.id, model.id, other.id
            )
        }
    }
}
