//! The database file: opening, locking and migration.
//!
//! `collections.version` grows with every transaction that touches the collection; it ties a read
//! transaction to the in-memory snapshot of the same state. Emptying a collection gives it another
//! id. Document rowids are never used twice and ascend in the order of insertion. Each collection
//! that has documents has one `vec0` table, named after its id, whose rowids are those of the
//! documents. A document whose rowid is in `deleted_documents` does not exist; `deleted_collections`
//! lists ids whose documents do not exist.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use crate::error::{Error, Result};

pub(crate) const DATABASE_FILE: &str = "ragstone.db";
pub(crate) const LOCK_FILE: &str = "ragstone.lock";
pub(crate) const RESERVE_FILE: &str = "ragstone.reserve";

/// One entry per schema version, applied in order; `user_version` counts those applied. Entries
/// that have been released are never edited.
pub(crate) const MIGRATIONS: &[&str] = &[
    "
CREATE TABLE collections (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL UNIQUE,
    metadata TEXT NOT NULL,
    dimensions INTEGER,
    version INTEGER NOT NULL
) STRICT;

CREATE TABLE models (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    version TEXT NOT NULL,
    dimensions INTEGER NOT NULL,
    UNIQUE (id, version, dimensions)
) STRICT;

-- The text comes last: reading the other columns never walks through its pages.
CREATE TABLE documents (
    rowid INTEGER PRIMARY KEY AUTOINCREMENT,
    collection INTEGER NOT NULL,
    id TEXT NOT NULL,
    model INTEGER,
    norm REAL NOT NULL,
    metadata TEXT NOT NULL,
    terms BLOB NOT NULL,
    text TEXT NOT NULL,
    UNIQUE (collection, id)
) STRICT;

CREATE TABLE records (
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    grp TEXT NOT NULL,
    value BLOB NOT NULL,
    version INTEGER NOT NULL,
    due INTEGER,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX records_by_group ON records (kind, grp, key) WHERE grp <> '';
CREATE INDEX records_by_due ON records (kind, due) WHERE due IS NOT NULL;

-- Record versions come from one clock, so that a record written again never gets an old one back.
CREATE TABLE record_clock (now INTEGER NOT NULL) STRICT;
INSERT INTO record_clock VALUES (0);
",
    "
-- Rows of documents that are deleted, and not yet removed: sets of up to 256 rowids.
CREATE TABLE deleted_documents (
    collection INTEGER NOT NULL,
    first INTEGER NOT NULL,
    rowids BLOB NOT NULL,
    PRIMARY KEY (collection, first)
) STRICT, WITHOUT ROWID;
-- Ids of collections that were emptied or deleted, whose rows are not yet removed.
CREATE TABLE deleted_collections (id INTEGER PRIMARY KEY) STRICT;
",
];

/// A locked data directory. The operating system releases the lock when the process ends.
pub(crate) struct DataDirectory {
    path: PathBuf,
    _lock: File,
}

impl DataDirectory {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let directory = |reason| Error::Directory {
            path: path.to_owned(),
            reason,
        };
        std::fs::create_dir_all(path).map_err(directory)?;
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(path.join(LOCK_FILE))
            .map_err(directory)?;
        match lock.try_lock() {
            Ok(()) => Ok(Self {
                path: path.to_owned(),
                _lock: lock,
            }),
            Err(TryLockError::WouldBlock) => Err(Error::InUse(path.to_owned())),
            Err(TryLockError::Error(source)) => Err(directory(source)),
        }
    }

    pub(crate) fn database(&self) -> PathBuf {
        self.path.join(DATABASE_FILE)
    }

    pub(crate) fn reserve(&self) -> PathBuf {
        self.path.join(RESERVE_FILE)
    }

    /// Size of the database and its log on disk.
    pub(crate) fn storage_bytes(&self) -> u64 {
        ["", "-wal"]
            .iter()
            .filter_map(|suffix| std::fs::metadata(self.path.join(format!("{DATABASE_FILE}{suffix}"))).ok())
            .map(|file| file.len())
            .sum()
    }
}

/// Opens the only connection that writes, and migrates the schema.
pub(crate) fn open_writer(path: &Path) -> Result<Connection> {
    crate::sqlite::vec_extension::register();
    let mut connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    // auto_vacuum must be set before the first table is created. Fast secure_delete overwrites deleted
    // data within pages, but not pages that become free: these go when the writer tidies up.
    // Overwriting them as well made emptying 50,000 documents three times as slow.
    connection.execute_batch(
        "PRAGMA auto_vacuum = INCREMENTAL;
         PRAGMA journal_mode = WAL;
         PRAGMA synchronous = FULL;
         PRAGMA secure_delete = FAST;
         PRAGMA foreign_keys = OFF;
         PRAGMA wal_autocheckpoint = 16000;
         PRAGMA cache_size = -32000;
         PRAGMA temp_store = MEMORY;",
    )?;
    // There is no other writer, and a reader that uses the log must not block this one.
    connection.busy_timeout(std::time::Duration::ZERO)?;
    connection.set_prepared_statement_cache_capacity(128);
    migrate(&mut connection)?;
    Ok(connection)
}

pub(crate) fn open_reader(path: &Path) -> Result<Connection> {
    let connection = Connection::open_with_flags(
        path,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )?;
    connection.execute_batch("PRAGMA query_only = ON; PRAGMA cache_size = -4000;")?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

fn migrate(connection: &mut Connection) -> Result<()> {
    let known = MIGRATIONS.len() as i64;
    let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    if found > known {
        return Err(Error::NewerSchema { found, known });
    }
    for (done, migration) in MIGRATIONS
        .iter()
        .enumerate()
        .skip(usize::try_from(found).unwrap_or(0))
    {
        let transaction = connection.transaction()?;
        transaction.execute_batch(migration)?;
        transaction.pragma_update(None, "user_version", done as i64 + 1)?;
        transaction.commit()?;
    }
    Ok(())
}

/// The name of a collection's vector table. It contains only a number, so it is safe inside SQL text.
pub(crate) fn vector_table(collection: i64) -> String {
    format!("vectors_{collection}")
}
