//! Adding documents: with the vectors they bring, or embedded by the collection's model.

use ragstone_core::backend::BackendError;
use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::document::{Added, Document, DocumentId, NewDocument};
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{EmbedInput, Role};
use ragstone_core::models::{embed_all, model_mismatch};
use ragstone_core::service::Service;
use ragstone_core::storage::{DocumentBatch, StoredDocument};

const NEEDS_EMBEDDINGS: &str = "All documents must include pre-computed embeddings";

/// Stores all of the documents or none of them.
pub(crate) async fn add(
    service: &Service,
    name: &CollectionName,
    documents: Vec<NewDocument>,
) -> Result<Added, BackendError> {
    let collection = service.store.collection(name).await?;
    let with_vector = documents.iter().filter(|new| new.embedding.is_some()).count();
    let (batch, truncated) = if with_vector == documents.len() {
        (precomputed(service, &collection, documents)?, Vec::new())
    } else if with_vector == 0 {
        embed(service, &collection, documents).await?
    } else {
        let index = documents
            .iter()
            .position(|new| new.embedding.is_none())
            .unwrap_or_default();
        return Err(InvalidInput::new(format!(
            "{NEEDS_EMBEDDINGS}, or none of them: {with_vector} of {} have one, the document at index {index} has not",
            documents.len()
        ))
        .into());
    };
    let ids = batch
        .documents
        .iter()
        .map(|stored| stored.document.id.clone())
        .collect();
    service.store.upsert(name, batch).await?;
    Ok(Added { ids, truncated })
}

fn precomputed(
    service: &Service,
    collection: &Collection,
    documents: Vec<NewDocument>,
) -> Result<DocumentBatch, BackendError> {
    // An empty collection takes any width, but not one that its own model could never add to or search.
    let model = service.models.for_collection(collection).ok();
    let of_model = model.map(|embedder| embedder.info().identity.dimensions);
    let mut expected = collection.dimensions.or(of_model);
    let mut stored = Vec::with_capacity(documents.len());
    for (index, new) in documents.into_iter().enumerate() {
        let vector = new.embedding.unwrap_or_default();
        let width = *expected.get_or_insert(vector.len());
        if vector.len() != width {
            let whose = if collection.dimensions.is_some() {
                format!("collection '{}' has", collection.name)
            } else if let Some(model) = model {
                let id = &model.info().identity.id;
                format!("model '{id}' of collection '{}' makes", collection.name)
            } else {
                "the documents before it have".to_owned()
            };
            return Err(InvalidInput::new(format!(
                "Embedding dimension mismatch: the document at index {index} has {} dimensions, {whose} {width}",
                vector.len()
            ))
            .into());
        }
        stored.push(StoredDocument {
            document: new.document,
            vector,
        });
    }
    Ok(DocumentBatch {
        documents: stored,
        model: None,
    })
}

async fn embed(
    service: &Service,
    collection: &Collection,
    documents: Vec<NewDocument>,
) -> Result<(DocumentBatch, Vec<DocumentId>), BackendError> {
    let embedder = service
        .models
        .for_collection(collection)
        .map_err(|error| match error {
            BackendError::NoModel {
                collection,
                available,
            } => InvalidInput::new(format!(
                "{NEEDS_EMBEDDINGS}: collection '{collection}' has no embedding_model in metadata. Available models: \
                 {available}"
            ))
            .into(),
            other => other,
        })?;
    let model = embedder.info().identity.clone();
    if let Some(stored) = collection.dimensions.filter(|stored| *stored != model.dimensions) {
        return Err(InvalidInput::new(format!(
            "Embedding dimension mismatch: collection '{}' holds vectors of {stored} dimensions, its model '{}' makes {}",
            collection.name, model.id, model.dimensions
        ))
        .into());
    }
    let made_by = service.store.vector_models(&collection.name).await?;
    if let Some(mismatch) = model_mismatch(&collection.name, &made_by, &model) {
        return Err(InvalidInput::new(mismatch.to_string()).into());
    }
    let inputs = documents
        .iter()
        .map(|new| EmbedInput::Text(new.document.text.clone()))
        .collect();
    let embeddings = embed_all(embedder.as_ref(), inputs, Role::Passage).await?;
    let mut truncated = Vec::new();
    let mut stored = Vec::with_capacity(documents.len());
    for (new, embedding) in documents.into_iter().zip(embeddings) {
        let document: Document = new.document;
        if embedding.truncated {
            truncated.push(document.id.clone());
        }
        stored.push(StoredDocument {
            document,
            vector: embedding.vector,
        });
    }
    Ok((
        DocumentBatch {
            documents: stored,
            model: Some(model),
        },
        truncated,
    ))
}
