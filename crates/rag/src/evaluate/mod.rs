//! How well search finds what people judged to be relevant.
//!
//! Everything here asks the same functions that serve requests: [`crate::search`] for the modes of
//! search, [`crate::conversations`] and [`crate::collect`] for questions in conversations. What is
//! measured is therefore what a client gets.

mod conversations;
mod dialogues;
mod folder;
mod modes;
mod remembered;

use ragstone_core::collection::{CollectionName, EMBEDDING_MODEL};
use ragstone_core::document::{Metadata, NewDocument};

pub use conversations::{Group, Row, Wording, evaluate_conversations};
pub use dialogues::{Dialogue, DialogueTurn, Half, read_dialogues};
pub use folder::{Benchmark, Corpus, JudgedQuery, read_benchmark, read_corpus};
pub use modes::{DEPTH, Latency, ModeResult, Ranking, Setting, evaluate_mode};
pub use remembered::Remembered;

use crate::Service;
use crate::error::ServiceError;

/// So many documents are added in one write.
const SLICE: usize = 500;

/// Makes a collection of the documents, embedded by the default model.
pub async fn load(service: &Service, name: &CollectionName, corpus: Corpus) -> Result<(), ServiceError> {
    let mut metadata = Metadata::new();
    if let Some(embedder) = service.models.default_embedder() {
        let id = embedder.info().identity.id.as_str();
        metadata.insert(EMBEDDING_MODEL.to_owned(), id.into());
    }
    service.store.create_collection(name, metadata).await?;
    let mut documents = corpus.documents.into_iter();
    loop {
        let slice: Vec<NewDocument> = documents.by_ref().take(SLICE).collect();
        if slice.is_empty() {
            return Ok(());
        }
        crate::documents::add(service, name, slice).await?;
    }
}

#[cfg(test)]
mod tests;
