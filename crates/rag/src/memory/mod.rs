//! Agent memory: what an agent saves, how it comes to have vectors, and how it is found again.
//!
//! * [`entry`]: the four kinds of entry and the rules they obey.
//! * [`Memory`]: the source stores. A save is durable when it returns and, where embedding is
//!   configured, marks the entry due for it in the same write.
//! * [`Buffer`]: the background worker that embeds what is due, in batches.
//! * [`Rag`]: searches the vectors and resolves what they stand for from the source stores.
//!
//! The database is the only queue. What the worker is told in memory is a hint that there is
//! something to do; a process that dies loses hints and nothing else.

mod batch;
mod buffer;
mod circuit;
pub mod entry;
mod in_flight;
mod rag;
mod reconcile;
mod removal;
mod source;
mod stored;
#[cfg(test)]
mod tests;

use jiff::Timestamp;
use ragstone_core::records::Millis;

pub use buffer::{Buffer, BufferOptions, Ownership};
pub use entry::{Entry, Kind};
pub use rag::{Found, Rag, RagDefaults, Retrieval, Retrieved, check_collections};
pub use reconcile::MODEL_VERSION;
pub use source::{EntryPage, Memory, MemoryStatus, PageRequest};
pub use stored::{EmbeddingState, StoredEntry};

fn now() -> Millis {
    Timestamp::now().as_millisecond()
}
