//! Ingestion: getting documents in, once, cheaply and resumably.
//!
//! A document is read ([`read`], [`rows`]), split into chunks that know where they stand
//! ([`chunk`]), and compared with what the collection has of it ([`plan`]): only what changed is
//! embedded, and content that was embedded before, in whatever collection, takes its vector from the
//! ledger. [`run`] does all of that at once for many documents.
//!
//! The collection itself is the truth about what was ingested. A run that is broken off at any
//! moment is continued by making it again.

pub mod chunk;
mod edits;
mod embed;
mod front_matter;
pub mod kind;
mod manifest;
pub mod outline;
mod pieces;
pub mod plan;
mod prepare;
mod prune;
pub mod read;
pub mod report;
pub mod rows;
pub mod run;
pub mod size;
pub mod walk;

#[cfg(test)]
mod tests;

pub use chunk::{Chunk, Splitter};
pub use kind::{Kind, UNKNOWN_TYPE};
pub use prepare::{Content, Earlier, FileRows, Input, ROWS_STAY, chunks_of};
pub use prune::Ingested;
pub use read::{IsolatedReader, ReadOptions, Unreadable};
pub use report::{Progress, Report};
pub use run::{IngestTarget, Ingestion, Prepared, chunk_tokens};
