//! The embedded store: SQLite with sqlite-vec, one writer, in-memory indexes
