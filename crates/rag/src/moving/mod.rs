//! Moving collections: out of a store into a file, out of a file into a store, and from one store
//! to another, with vectors and all, to the last bit.
//!
//! Moving is bringing a target to hold what a source holds, in the same order. What the target has
//! already must be the beginning of that; then the rest is added. So a move that broke off goes on
//! by being started again, needs no notes of where it was, and can neither lose nor double anything.
//! In the end what the target holds is read back and compared.

mod file;
mod format;
#[cfg(test)]
mod tests;
mod transfer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use ragstone_core::store::{KeptVectors, MovedDocument, MovedPage, MovedRange, Place, Store, StoreError};
use ragstone_core::{Collection, CollectionName, Metadata};

pub use file::{ExportFile, FileSource, export_file, export_to, verify_file};
pub use format::{DocumentLine, Head, Sum, read_documents};
pub use transfer::{Moved, transfer};

use crate::error::ServiceError;

/// Documents that are moved at once.
pub const BATCH: usize = 1000;

/// A holder of collections: a store of this process, or a server.
#[async_trait]
pub trait Peer: Send + Sync {
    /// By name.
    async fn collections(&self) -> Result<Vec<Collection>, StoreError>;

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StoreError>;

    async fn create_collection(&self, name: &CollectionName, metadata: Metadata) -> Result<(), StoreError>;

    /// As [`Store::export`].
    async fn export(&self, name: &CollectionName, range: MovedRange) -> Result<MovedPage, StoreError>;

    /// How vectors come back from it.
    async fn vectors(&self) -> Result<KeptVectors, StoreError>;

    /// As [`Store::import`].
    async fn import(&self, name: &CollectionName, documents: Vec<MovedDocument>) -> Result<(), StoreError>;
}

/// A store of this process.
pub struct StorePeer(pub Arc<dyn Store>);

#[async_trait]
impl Peer for StorePeer {
    async fn collections(&self) -> Result<Vec<Collection>, StoreError> {
        self.0.collections().await
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StoreError> {
        self.0.collection(name).await
    }

    async fn create_collection(&self, name: &CollectionName, metadata: Metadata) -> Result<(), StoreError> {
        self.0.create_collection(name, metadata).await.map(|_| ())
    }

    async fn export(&self, name: &CollectionName, range: MovedRange) -> Result<MovedPage, StoreError> {
        self.0.export(name, range).await
    }

    async fn vectors(&self) -> Result<KeptVectors, StoreError> {
        let engine = self.0.health().await?.engine;
        Ok(engine.map_or(KeptVectors::Exactly, |engine| engine.vectors))
    }

    async fn import(&self, name: &CollectionName, documents: Vec<MovedDocument>) -> Result<(), StoreError> {
        self.0.import(name, documents).await
    }
}

/// Documents in order, a batch at a time.
#[async_trait]
pub trait Source: Send {
    /// None after the last.
    async fn next(&mut self) -> Result<Vec<MovedDocument>, ServiceError>;

    /// What the source itself says of all its documents, once they have been read.
    fn claim(&self) -> Option<&Sum> {
        None
    }
}

/// The documents of a collection, where it is.
pub struct PeerSource<'a> {
    peer: &'a dyn Peer,
    name: &'a CollectionName,
    /// The place of the last document that was read.
    last: Option<Place>,
    ended: bool,
}

impl<'a> PeerSource<'a> {
    pub fn new(peer: &'a dyn Peer, name: &'a CollectionName) -> Self {
        Self::behind(peer, name, None)
    }

    pub fn behind(peer: &'a dyn Peer, name: &'a CollectionName, last: Option<Place>) -> Self {
        Self {
            peer,
            name,
            last,
            ended: false,
        }
    }

    /// The place of the last document that was read.
    pub fn last(&self) -> Option<Place> {
        self.last
    }
}

#[async_trait]
impl Source for PeerSource<'_> {
    async fn next(&mut self) -> Result<Vec<MovedDocument>, ServiceError> {
        if self.ended {
            return Ok(Vec::new());
        }
        let range = MovedRange {
            after: self.last,
            limit: BATCH,
        };
        let page = transfer::patiently(|| self.peer.export(self.name, range)).await?;
        self.ended = !page.more;
        self.last = page.last.or(self.last);
        Ok(page.documents)
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
