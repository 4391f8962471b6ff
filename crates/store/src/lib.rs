//! The embedded store: SQLite in one file is the truth, and what is held in memory is derived from
//! it and can be rebuilt at any time.
//!
//! * `writer`: one thread owns the connection that writes and commits whatever is queued at once.
//! * `readers`: read-only connections; a read sees file and memory in one state.
//! * `index`: per collection an immutable snapshot of metadata bitmaps, posting lists and vectors.
//! * `load`: builds the snapshots when the store opens.
//! * `search`: filter, rank, fuse, fetch.
//!
//! A document's text, metadata, words and vector change in one transaction. Deleted content is
//! overwritten in the database file when its transaction commits; earlier copies of its pages can
//! remain in the write-ahead log until that is emptied, which happens as soon as the store is idle
//! for a moment, on [`SqliteStore::flush`] and on [`SqliteStore::close`].

mod error;
mod index;
mod load;
mod published;
mod readers;
mod records;
mod schema;
mod search;
mod store;
mod terms;
mod vec_extension;
mod writer;

pub use error::Error;
pub use store::{SqliteStore, StoreOptions};
