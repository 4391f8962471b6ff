//! What can go wrong in the embedded store.

use std::path::PathBuf;
use std::time::Duration;

use ragstone_core::CollectionName;
use ragstone_core::store::StoreError;
use rusqlite::ErrorCode;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the data directory {0} is in use by another Ragstone process")]
    InUse(PathBuf),
    #[error("cannot use the data directory {path}: {source}")]
    Directory { path: PathBuf, source: std::io::Error },
    #[error(
        "the database has schema {found}, written by a newer Ragstone; this one knows schemas up to {known}"
    )]
    NewerSchema { found: i64, known: i64 },
    #[error("{path} cannot be written: {source}")]
    Backup { path: PathBuf, source: std::io::Error },
    #[error("there is no database in {0} to back up")]
    NothingToBackUp(PathBuf),
    #[error("{path} is not a backup that can be restored: {reason}")]
    NotABackup { path: PathBuf, reason: String },
    #[error("{0} holds data; say --force to replace it with the backup")]
    NotEmpty(PathBuf),
    #[error("the database is damaged: {0}")]
    Damaged(String),
    #[error("Collection '{0}' not found")]
    CollectionNotFound(CollectionName),
    #[error("Collection '{0}' already exists")]
    CollectionExists(CollectionName),
    #[error("Embedding dimension mismatch: collection '{collection}' has {expected}, not {actual}")]
    DimensionMismatch {
        collection: CollectionName,
        expected: usize,
        actual: usize,
    },
    #[error("too many writes are waiting")]
    QueueFull,
    #[error("the store is shutting down")]
    Closed,
    #[error("the disk is full")]
    DiskFull,
    #[error("a long read still needs the write-ahead log")]
    LogInUse,
    #[error("the write was rolled back: {0}")]
    RolledBack(String),
    #[error("a worker of the store stopped: {0}")]
    Worker(String),
    #[error(transparent)]
    Sqlite(rusqlite::Error),
    #[error("stored metadata cannot be read")]
    Json(#[from] serde_json::Error),
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

impl From<rusqlite::Error> for Error {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Self::DiskFull,
            Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Self::Damaged(error.to_string()),
            _ => Self::Sqlite(error),
        }
    }
}

impl From<Error> for StoreError {
    fn from(error: Error) -> Self {
        let later = |message: &str, seconds| Self::Unavailable {
            message: message.to_owned(),
            retry_after: Duration::from_secs(seconds),
        };
        match error {
            Error::CollectionNotFound(name) => Self::CollectionNotFound(name),
            Error::CollectionExists(name) => Self::CollectionExists(name),
            Error::DimensionMismatch {
                collection,
                expected,
                actual,
            } => Self::DimensionMismatch {
                collection,
                expected,
                actual,
            },
            Error::QueueFull => later("The store has too many writes waiting; try again soon", 1),
            Error::Closed => later("The store is shutting down", 5),
            Error::LogInUse => later("A long read still needs the write-ahead log; try again soon", 1),
            Error::DiskFull => later("The disk that holds the data directory is full", 30),
            other => Self::Failed(Box::new(other)),
        }
    }
}
