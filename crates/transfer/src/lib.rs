//! Export, import and copy of collections, with vectors, to the last bit.
//!
//! A transfer makes a target hold the documents of a source, in the same order. Documents that the target
//! already has must be the first documents of the source; the rest is added. A transfer that was
//! interrupted is therefore resumed by starting it again, keeps no state of its own, and neither loses
//! nor duplicates documents. At the end the target is read back and compared.

mod export;
mod file;
mod format;
#[cfg(test)]
mod tests;
mod transfer;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::{Cursor, ExportRange, ExportedDocument};
use ragstone_core::{Collection, CollectionName};

pub use export::{Begun, ExportFile, export_file, export_to};
pub use file::{FileSource, verify_file};
pub use format::{ExportClaim, Head, Sum};
pub use ragstone_core::document_line::{DocumentLine, read_documents};
pub use transfer::{Transferred, transfer};

/// Documents transferred at once.
pub const BATCH: usize = 1000;

#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("{what}")]
    File { what: String, source: std::io::Error },
}

impl From<InvalidInput> for TransferError {
    fn from(error: InvalidInput) -> Self {
        Self::Backend(error.into())
    }
}

/// A collection with the width of its vectors, which a server reports only with its documents.
pub async fn describe(backend: &dyn Backend, name: &CollectionName) -> Result<Collection, BackendError> {
    let mut collection = backend.collection(name).await?;
    if collection.dimensions.is_none() && collection.count > 0 {
        let first = ExportRange {
            after: None,
            limit: 1,
        };
        let page = backend.export(name, first).await?;
        collection.dimensions = page.documents.first().map(|exported| exported.vector.len());
    }
    Ok(collection)
}

/// Documents in order, a batch at a time.
#[async_trait]
pub trait DocumentSource: Send {
    /// None after the last.
    async fn next(&mut self) -> Result<Vec<ExportedDocument>, TransferError>;

    /// What the source itself says of all its documents, once they have been read.
    fn claim(&self) -> Option<&ExportClaim> {
        None
    }
}

/// The documents of a collection, where it is.
pub struct BackendSource<'a> {
    backend: &'a dyn Backend,
    name: &'a CollectionName,
    /// The place of the last document that was read.
    last: Option<Cursor>,
    ended: bool,
    /// How often it had grown when its end was reached.
    grown: u32,
}

/// After so many times a collection that keeps growing is taken as it was then.
const MAX_GROWTH: u32 = 3;

impl<'a> BackendSource<'a> {
    pub fn new(backend: &'a dyn Backend, name: &'a CollectionName) -> Self {
        Self::after(backend, name, None)
    }

    pub fn after(backend: &'a dyn Backend, name: &'a CollectionName, last: Option<Cursor>) -> Self {
        Self {
            backend,
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

    async fn up_to(&mut self, limit: usize) -> Result<Vec<ExportedDocument>, TransferError> {
        if self.ended {
            return Ok(Vec::new());
        }
        let range = ExportRange {
            after: self.last,
            limit,
        };
        let page = transfer::with_retry(|| self.backend.export(self.name, range)).await?;
        self.ended = !page.more;
        self.last = page.last.or(self.last);
        Ok(page.documents)
    }

    /// The next documents, none only if the `read` ones are all that there are. Fails where
    /// documents were taken away meanwhile: what was read is no state that the collection was in.
    async fn next_or_grown(&mut self, read: u64) -> Result<Vec<ExportedDocument>, TransferError> {
        let page = self.next().await?;
        if !page.is_empty() || self.grown == MAX_GROWTH {
            return Ok(page);
        }
        let now = transfer::with_retry(|| self.backend.collection(self.name))
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
impl DocumentSource for BackendSource<'_> {
    async fn next(&mut self) -> Result<Vec<ExportedDocument>, TransferError> {
        self.up_to(BATCH).await
    }
}

/// How many documents are done, for whoever shows it.
#[derive(Debug, Clone, Default)]
pub struct TransferProgress(Arc<AtomicU64>);

impl TransferProgress {
    pub fn documents(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self, documents: usize) {
        self.0.fetch_add(documents as u64, Ordering::Relaxed);
    }
}
