//! Search quality, measured against relevance judgements.
//!
//! Evaluation calls the functions that serve requests: [`Backend::search`] for the search modes,
//! [`crate::conversations`] and [`crate::fanout`] for questions in conversations.

mod conversations;
mod dialogues;
mod folder;
mod modes;

use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::collection::{CollectionName, EMBEDDING_MODEL};
use ragstone_core::document::{Metadata, NewDocument};

pub use conversations::{Group, MeasureRow, QueryWording, evaluate_conversations};
pub use dialogues::{Dialogue, DialogueTurn, Half, read_dialogues};
pub use folder::{Benchmark, Corpus, JudgedQuery, read_benchmark, read_corpus};
pub use modes::{DEPTH, Latency, ModeResult, Ranking, Setting, evaluate_mode};

use crate::storage_backend::StorageBackend;

/// Documents added in one write.
const BATCH: usize = 500;

/// Makes a collection of the documents, embedded by the default model.
pub async fn load(
    backend: &StorageBackend,
    name: &CollectionName,
    corpus: Corpus,
) -> Result<(), BackendError> {
    let mut metadata = Metadata::new();
    if let Some(embedder) = backend.service().models.default_embedder() {
        let id = embedder.info().identity.id.as_str();
        metadata.insert(EMBEDDING_MODEL.to_owned(), id.into());
    }
    backend.create_collection(name, metadata).await?;
    let mut documents = corpus.documents.into_iter();
    loop {
        let slice: Vec<NewDocument> = documents.by_ref().take(BATCH).collect();
        if slice.is_empty() {
            return Ok(());
        }
        backend.add_documents(name, slice).await?;
    }
}

#[cfg(test)]
mod tests;
