//! Ingestion of documents, incremental and resumable.
//!
//! A document is read ([`read`], [`rows`]), split into chunks ([`chunk`]) and compared with the
//! collection ([`plan`]). Only changed chunks are embedded, and content that was embedded before, in
//! any collection, takes its vector from the ledger. [`run`] does this for many documents in a
//! pipeline.
//!
//! The collection itself is the truth about what was ingested. Repeating an interrupted run continues
//! it.

pub mod chunk;
mod edits;
mod embed;
mod front_matter;
pub mod jobs;
pub mod kind;
pub mod known;
pub mod ledger;
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
pub use kind::{FileKind, UNKNOWN_TYPE};
pub use known::KnownFiles;
pub use prepare::{Content, Earlier, FileRows, Input, InputOptions, ROWS_STAY, each_chunk};
pub use prune::IngestedSource;
pub use read::{DocumentReader, IsolatedReader, ReadOptions, Unreadable};
pub use report::{Progress, Report};
pub use run::{IngestTarget, Ingestion, PreparedTarget, chunk_tokens};
