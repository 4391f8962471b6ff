//! The stores: [`SqliteStore`], embedded in one file, and [`PostgresStore`] for several processes over
//! one database.
//!
//! In the embedded store a document's text, metadata, words and vector change in one transaction.
//! Deleted data is overwritten within its page when its row is removed. Free pages and old copies of
//! pages in the write-ahead log go when the writer tidies up: as soon as the store is idle, after ten
//! seconds under load, on [`SqliteStore::flush`] and on [`SqliteStore::close`]. After that no file
//! contains deleted text. Rows of documents that are deleted in bulk are removed in the background; only
//! while that is going on may deleted text remain longer.

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
