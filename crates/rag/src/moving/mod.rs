//! Moving collections: out of a store into a file, out of a file into a store, and from one store
//! to another, with vectors and all, to the last bit.
//!
//! Moving is bringing a target to hold what a source holds, in the same order. What the target has
//! already must be the beginning of that; then the rest is added. So a move that broke off goes on
//! by being started again, needs no notes of where it was, and can neither lose nor double anything.
//! In the end what the target holds is read back and compared.

mod export;
mod file;
mod format;
#[cfg(test)]
mod tests;
mod transfer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::{
    Cursor, ExportPage, ExportRange, ExportedDocument, Storage, StorageError, VectorPrecision,
};
use ragstone_core::{Collection, CollectionName, Metadata};

pub use export::{Begun, ExportFile, export_file, export_to};
pub use file::{FileSource, verify_file};
pub use format::{Claim, DocumentLine, Head, Sum, read_documents};
pub use transfer::{Moved, transfer};

use crate::error::ServiceError;

/// Documents that are moved at once.
pub const BATCH: usize = 1000;

/// A holder of collections: a store of this process, or a server.
#[async_trait]
pub trait Peer: Send + Sync {
    /// By name.
    async fn collections(&self) -> Result<Vec<Collection>, StorageError>;

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError>;

    async fn create_collection(&self, name: &CollectionName, metadata: Metadata) -> Result<(), StorageError>;

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError>;

    /// As [`Storage::export`].
    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError>;

    /// How vectors come back from it.
    async fn vectors(&self) -> Result<VectorPrecision, StorageError>;

    /// As [`Storage::import`].
    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError>;
}

/// A store of this process.
pub struct StorePeer(pub Arc<dyn Storage>);

#[async_trait]
impl Peer for StorePeer {
    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        self.0.collections().await
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        self.0.collection(name).await
    }

    async fn create_collection(&self, name: &CollectionName, metadata: Metadata) -> Result<(), StorageError> {
        self.0.create_collection(name, metadata).await.map(|_| ())
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        self.0.delete_collection(name).await
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        self.0.export(name, range).await
    }

    async fn vectors(&self) -> Result<VectorPrecision, StorageError> {
        let engine = self.0.health().await?.engine;
        Ok(engine.map_or(VectorPrecision::Exact, |engine| engine.vectors))
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        self.0.import(name, documents).await
    }
}

/// Documents in order, a batch at a time.
#[async_trait]
pub trait Source: Send {
    /// None after the last.
    async fn next(&mut self) -> Result<Vec<ExportedDocument>, ServiceError>;

    /// What the source itself says of all its documents, once they have been read.
    fn claim(&self) -> Option<&Claim> {
        None
    }
}

/// The documents of a collection, where it is.
pub struct PeerSource<'a> {
    peer: &'a dyn Peer,
    name: &'a CollectionName,
    /// The place of the last document that was read.
    last: Option<Cursor>,
    ended: bool,
    /// How often it had grown when its end was reached.
    grown: u32,
}

/// After so many times a collection that keeps growing is taken as it was then.
const GROWTH: u32 = 3;

impl<'a> PeerSource<'a> {
    pub fn new(peer: &'a dyn Peer, name: &'a CollectionName) -> Self {
        Self::behind(peer, name, None)
    }

    pub fn behind(peer: &'a dyn Peer, name: &'a CollectionName, last: Option<Cursor>) -> Self {
        Self {
            peer,
            name,
            last,
            ended: false,
            grown: 0,
        }
    }

    /// The place of the last document that was read.
    pub fn last(&self) -> Option<Cursor> {
        self.last
    }

    async fn up_to(&mut self, limit: usize) -> Result<Vec<ExportedDocument>, ServiceError> {
        if self.ended {
            return Ok(Vec::new());
        }
        let range = ExportRange {
            after: self.last,
            limit,
        };
        let page = transfer::patiently(|| self.peer.export(self.name, range)).await?;
        self.ended = !page.more;
        self.last = page.last.or(self.last);
        Ok(page.documents)
    }

    /// The next documents, none only if the `read` ones are all that there are. Fails where
    /// documents were taken away meanwhile: what was read is no state that the collection was in.
    async fn next_or_grown(&mut self, read: u64) -> Result<Vec<ExportedDocument>, ServiceError> {
        let page = self.next().await?;
        if !page.is_empty() || self.grown == GROWTH {
            return Ok(page);
        }
        let now = transfer::patiently(|| self.peer.collection(self.name))
            .await?
            .count;
        if now == read {
            return Ok(page);
        }
        self.ended = false;
        self.grown += 1;
        let more = self.next().await?;
        if now < read || more.is_empty() {
            return Err(InvalidInput::new(format!(
                "collection '{}' was changed meanwhile: {read} documents were read, and it has {now} now. Start the \
                 same command again",
                self.name
            ))
            .into());
        }
        Ok(more)
    }
}

#[async_trait]
impl Source for PeerSource<'_> {
    async fn next(&mut self) -> Result<Vec<ExportedDocument>, ServiceError> {
        self.up_to(BATCH).await
    }
}

/// How many documents are done, for whoever shows it.
#[derive(Debug, Clone, Default)]
pub struct Progress(Arc<AtomicU64>);

impl Progress {
    pub fn documents(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, documents: usize) {
        self.0.fetch_add(documents as u64, Ordering::Relaxed);
    }
}
