//! The embedded store: SQLite in one file, with the indexes in memory.
//!
//! The file is the truth. Everything in memory is derived from it and can be rebuilt at any time.
//!
//! * `writer`: one thread owns the connection that writes, and commits queued writes together.
//! * `readers`: read-only connections. A read sees file and memory in one state.
//! * `index`: per collection an immutable snapshot of metadata bitmaps, posting lists and vectors.
//! * `load`: builds the snapshots when the store opens.
//! * `backup`: copies the file while it is being written to, and restores it.
//! * `search`: filter, rank, fuse, fetch. `siblings`: the documents around the hits.

mod backup;
mod export;
mod faults;
mod index;
mod inspect;
mod load;
mod published;
mod readers;
mod records;
mod reserve;
mod schema;
mod search;
mod siblings;
mod store;
mod terms;
mod vec_extension;
mod writer;

pub use backup::{BackedUp, Occupied, backup, restore};
pub use index::scope::IndexScope;
pub use inspect::{InspectedCollection, Inspection, check_access, has_database, inspect};
pub use store::{SqliteStore, StoreOptions};
