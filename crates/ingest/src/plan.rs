//! The changes that give a collection the chunks of a document.

use std::collections::{HashMap, HashSet};

use ragstone_core::collection::CollectionName;
use ragstone_core::document::{DocumentId, Metadata};
use ragstone_core::filter::{Filter, Scalar, Test};
use ragstone_core::storage::{Page, Storage, StorageError};
use serde_json::Value;

use super::chunk::{Chunk, keys};
use super::report::{ChunkCounts, DocumentCounts};

const PAGE: usize = 1000;

/// Metadata of chunks in the collection, by id.
pub type Existing = HashMap<DocumentId, Metadata>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkChange {
    Added,
    Changed,
}

#[derive(Debug, Default)]
pub struct ChunkPlan {
    pub store: Vec<(ChunkChange, Chunk)>,
    pub unchanged: u64,
    pub remove: Vec<DocumentId>,
    /// Hashes of content that no chunk of the document has after the changes.
    pub gone: Vec<String>,
}

impl ChunkPlan {
    /// Compares the chunks of a document with the collection. `outdated` chunks are stored again, because
    /// their vectors are of another model. An id of two chunks is an error.
    pub fn new(
        chunks: Vec<Chunk>,
        mut existing: Existing,
        outdated: &HashSet<DocumentId>,
    ) -> Result<Self, DocumentId> {
        let mut plan = Self::default();
        let staying: HashSet<String> = chunks.iter().map(|c| c.content_hash.clone()).collect();
        let mut gone = Vec::new();
        let mut planned = HashSet::with_capacity(chunks.len());
        for chunk in chunks {
            // The store would keep only one of two chunks with the same id.
            if !planned.insert(chunk.document.id.clone()) {
                return Err(chunk.document.id);
            }
            let is_current = !outdated.contains(&chunk.document.id);
            match existing.remove(&chunk.document.id) {
                None => plan.store.push((ChunkChange::Added, chunk)),
                Some(there) if is_current && there == chunk.document.metadata => {
                    plan.unchanged += 1;
                }
                Some(there) => {
                    gone.extend(hash_of(&there));
                    plan.store.push((ChunkChange::Changed, chunk));
                }
            }
        }
        for (id, there) in existing {
            gone.extend(hash_of(&there));
            plan.remove.push(id);
        }
        plan.remove.sort();
        gone.retain(|hash| !staying.contains(hash));
        gone.sort();
        gone.dedup();
        plan.gone = gone;
        Ok(plan)
    }

    pub fn counts(&self) -> ChunkCounts {
        let count = |wanted| self.store.iter().filter(|(change, _)| *change == wanted).count() as u64;
        ChunkCounts {
            added: count(ChunkChange::Added),
            changed: count(ChunkChange::Changed),
            unchanged: self.unchanged,
            removed: self.remove.len() as u64,
            ..ChunkCounts::default()
        }
    }

    /// Counts of the document itself.
    pub fn document(&self) -> DocumentCounts {
        let counts = self.counts();
        let was_there = counts.changed + counts.unchanged + counts.removed > 0;
        let touched = counts.added + counts.changed + counts.removed > 0;
        DocumentCounts {
            added: u64::from(touched && !was_there),
            changed: u64::from(touched && was_there),
            unchanged: u64::from(!touched),
            ..DocumentCounts::default()
        }
    }
}

fn hash_of(metadata: &Metadata) -> Option<String> {
    metadata
        .get(keys::CONTENT_HASH)
        .and_then(|hash| hash.as_str())
        .map(str::to_owned)
}

/// Chunks of a source. Documents that were added otherwise have no content hash.
pub fn of_source(source: &str) -> Filter {
    Filter::All(vec![
        Filter::equals(keys::SOURCE, Scalar::Text(source.into())),
        Filter::Field {
            name: keys::CONTENT_HASH.to_owned(),
            test: Test::Exists,
        },
    ])
}

/// Whether a document is a chunk of the source, see [`of_source`].
pub fn is_of_source(metadata: &Metadata, source: &str) -> bool {
    metadata.get(keys::SOURCE).and_then(Value::as_str) == Some(source)
        && metadata.contains_key(keys::CONTENT_HASH)
}

pub async fn count(store: &dyn Storage, name: &CollectionName, filter: &Filter) -> Result<u64, StorageError> {
    let page = Page { limit: 0, offset: 0 };
    Ok(store.documents(name, filter, page).await?.total)
}

/// Visits matching documents, page by page.
pub async fn each(
    store: &dyn Storage,
    name: &CollectionName,
    filter: &Filter,
    mut visit: impl FnMut(DocumentId, Metadata) + Send,
) -> Result<(), StorageError> {
    let mut offset = 0;
    loop {
        let page = store
            .documents(name, filter, Page { limit: PAGE, offset })
            .await?;
        let count = page.documents.len();
        for document in page.documents {
            visit(document.id, document.metadata);
        }
        offset += count as u64;
        if count < PAGE {
            return Ok(());
        }
    }
}
