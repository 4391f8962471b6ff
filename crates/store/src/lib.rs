//! The stores: [`PostgresStore`] for several processes over one database, and the embedded one,
//! [`SqliteStore`], which all the rest is about. SQLite in one file is the truth there, and what is
//! held in memory is derived from it and can be rebuilt at any time.
//!
//! * `writer`: one thread owns the connection that writes and commits whatever is queued at once.
//! * `readers`: read-only connections; a read sees file and memory in one state.
//! * `index`: per collection an immutable snapshot of metadata bitmaps, posting lists and vectors.
//! * `load`: builds the snapshots when the store opens.
//! * `backup`: a copy of the file while it is written to, and the way back.
//! * `search`: filter, rank, fuse, fetch; `siblings`: what stands around the hits.
//!
//! A document's text, metadata, words and vector change in one transaction. What is deleted is
//! overwritten within its page at once; pages that became free, and earlier copies of pages in the
//! write-ahead log, are given back when the writer tidies up: as soon as the store is idle for a
//! moment, on [`SqliteStore::flush`] and on [`SqliteStore::close`]. From then on deleted text is in
//! no file.

mod error;
mod postgres;
mod ranking;
mod sqlite;

pub use error::Error;
pub use postgres::{
    PostgresInspection, PostgresOptions, PostgresStore, PostgresThresholds, PostgresUrl, inspect_postgres,
};
pub use sqlite::{
    BackedUp, IndexScope, InspectedCollection, Inspection, Occupied, SqliteStore, StoreOptions, backup,
    check_access, has_database, inspect, restore,
};
