//! Agent memory: entries that an agent saves, their vectors, and retrieval.
//!
//! * [`entry`]: the four kinds of entry and their rules.
//! * [`Memory`]: the source stores. A save is durable when it returns. If embedding is configured, the
//!   same write makes the entry due for it.
//! * [`Buffer`]: the background worker that embeds due entries, in batches.
//! * [`Rag`]: searches the vectors and resolves their entries from the source stores.
//!
//! The database is the only queue. Hints in memory only wake the worker; a process that dies loses
//! hints and nothing else.

mod batch;
mod buffer;
pub mod chat;
mod circuit;
pub mod entry;
mod rag;
mod reconcile;
mod removal;
mod source;
mod stored;
#[cfg(test)]
mod tests;

pub use buffer::{Buffer, BufferOptions};
pub use entry::{MemoryEntry, MemoryKind};
pub use rag::{Rag, RagDefaults, Retrieval, Retrieved, RetrievedItem, check_collections};
pub use reconcile::MODEL_VERSION;
pub use source::{EntryPage, Memory, MemoryStatus, PageRequest};
pub use stored::{EmbeddingState, StoredEntry};

pub use ragstone_lease::Ownership;
