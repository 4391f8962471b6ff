//! Errors of the stores.

use std::path::PathBuf;
use std::time::Duration;

use deadpool_postgres::{HookError, PoolError, TimeoutType};
use ragstone_core::collection::shorten;
use ragstone_core::storage::StorageError;
use ragstone_core::{CollectionName, DocumentId};
use rusqlite::ErrorCode;
use tokio_postgres::error::SqlState;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the data directory {0} is in use by another Ragstone process")]
    InUse(PathBuf),
    #[error("cannot use {path}: {reason}")]
    Directory { path: PathBuf, reason: std::io::Error },
    #[error(
        "the database has schema {found}, written by a newer Ragstone; this version supports schemas up to {known}"
    )]
    NewerSchema { found: i64, known: i64 },
    #[error("{path} cannot be written: {source}")]
    Backup { path: PathBuf, source: std::io::Error },
    #[error("{path} cannot be written as a backup: {reason}")]
    BackupPlace { path: PathBuf, reason: String },
    #[error("no database to back up in {0}")]
    NothingToBackUp(PathBuf),
    #[error("{path} is not a backup that can be restored: {reason}")]
    NotABackup { path: PathBuf, reason: String },
    #[error("{0} contains data; use --force to replace it with the backup")]
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
    #[error(
        "'where' is too expensive for this collection: use fewer '$contains' and range conditions, or fields with \
         fewer distinct values"
    )]
    ExpensiveFilter,
    #[error("the caller is gone")]
    Cancelled,
    #[error("the disk is full")]
    DiskFull,
    #[error("a long read is still using the write-ahead log")]
    LogInUse,
    #[error("the write was rolled back: {0}")]
    RolledBack(String),
    #[error("a worker thread of the store stopped: {0}")]
    Worker(String),
    #[error(transparent)]
    Sqlite(rusqlite::Error),
    #[error("invalid database URL: {0}")]
    DatabaseUrl(String),
    #[error(
        "the database lacks the extension pgvector, or its user may not create or use it: install pgvector, then run \
         CREATE EXTENSION vector in this database as its owner"
    )]
    NoVectorExtension(#[source] Option<Box<Error>>),
    #[error(
        "the database encoding is {0}, which cannot store all characters: create one with CREATE DATABASE ... \
         ENCODING 'UTF8' TEMPLATE template0"
    )]
    DatabaseEncoding(String),
    #[error(
        "the database user {user} may not create and drop tables in the schema 'ragstone': use its owner, or run \
         GRANT {owner} TO {user}"
    )]
    MissingRights { user: String, owner: String },
    #[error("the collection was replaced several times while it was searched")]
    Conflict,
    #[error("all connections to the database are busy")]
    DatabaseBusy,
    #[error("the database did not answer in time")]
    DatabaseTimeout,
    #[error("the database cannot be reached: {0}")]
    DatabaseUnreachable(String),
    #[error("the database is read-only")]
    DatabaseReadOnly,
    #[error(
        "document {:?} has more different words than Postgres can index: split it into smaller ones",
        shorten(.0.as_str())
    )]
    TooManyWords(DocumentId),
    #[error("{}", with_reason(.0))]
    Postgres(tokio_postgres::Error),
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

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        if is_unreachable(&error) {
            Self::DatabaseUnreachable(with_reason(&error))
        } else if error.code() == Some(&SqlState::QUERY_CANCELED) {
            Self::DatabaseTimeout
        } else if error.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION) {
            Self::DatabaseReadOnly
        } else if matches!(error.code(), Some(&SqlState::DISK_FULL)) {
            Self::DiskFull
        } else {
            Self::Postgres(error)
        }
    }
}

impl From<PoolError> for Error {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Timeout(TimeoutType::Wait) => Self::DatabaseBusy,
            PoolError::Timeout(_) => Self::DatabaseTimeout,
            PoolError::Backend(error) | PoolError::PostCreateHook(HookError::Backend(error)) => error.into(),
            PoolError::Closed => Self::Closed,
            other => Self::DatabaseUnreachable(other.to_string()),
        }
    }
}

/// Whether a connection broke or was refused, or the server is starting, stopping or out of resources. A
/// rejected password or an unknown database counts too, because both may be temporary.
fn is_unreachable(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        None => {
            let io = |error: &(dyn std::error::Error + 'static)| error.is::<std::io::Error>();
            error.is_closed() || std::error::Error::source(error).is_some_and(io)
        }
        Some(code) => {
            code.code().starts_with("08")
                || code.code().starts_with("28")
                || [
                    SqlState::INVALID_CATALOG_NAME,
                    SqlState::ADMIN_SHUTDOWN,
                    SqlState::CRASH_SHUTDOWN,
                    SqlState::CANNOT_CONNECT_NOW,
                    SqlState::TOO_MANY_CONNECTIONS,
                    SqlState::OUT_OF_MEMORY,
                    SqlState::IDLE_IN_TRANSACTION_SESSION_TIMEOUT,
                ]
                .contains(code)
        }
    }
}

/// The message of the server, or that of the driver with its cause. Neither contains a password.
fn with_reason(error: &tokio_postgres::Error) -> String {
    if let Some(said) = error.as_db_error() {
        return said.message().to_owned();
    }
    match std::error::Error::source(error) {
        Some(reason) => format!("{error}: {reason}"),
        None => error.to_string(),
    }
}

impl Error {
    /// Whether a full disk may be the cause. SQLite reports some of its failures otherwise.
    pub(crate) fn may_be_full_disk(&self) -> bool {
        match self {
            Self::DiskFull => true,
            Self::Sqlite(error) => matches!(
                error.sqlite_error_code(),
                Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen)
            ),
            _ => false,
        }
    }

    /// Whether a transaction was rolled back because it conflicted with another one: a deadlock, or a
    /// table that was dropped before it was read.
    pub(crate) fn is_conflict(&self) -> bool {
        let error = match self {
            Self::Conflict => return true,
            Self::Postgres(error) => error,
            _ => return false,
        };
        error.code().is_some_and(|code| {
            [
                SqlState::UNDEFINED_TABLE,
                SqlState::T_R_SERIALIZATION_FAILURE,
                SqlState::T_R_DEADLOCK_DETECTED,
            ]
            .contains(code)
        })
    }
}

impl From<Error> for StorageError {
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
            Error::LogInUse => later(
                "A long read is still using the write-ahead log; try again soon",
                1,
            ),
            Error::DiskFull => later("The disk that holds the data directory is full", 30),
            Error::Conflict => later("The collection is being replaced; try again soon", 1),
            Error::DatabaseBusy => later("All connections to the database are busy; try again soon", 1),
            Error::DatabaseTimeout => later("The database did not answer in time; try again soon", 2),
            Error::DatabaseUnreachable(reason) => {
                tracing::warn!(reason, "the database cannot be reached");
                later("The database cannot be reached; try again soon", 2)
            }
            Error::DatabaseReadOnly => later("The database is read-only for now and takes no writes", 5),
            Error::TooManyWords(_) | Error::ExpensiveFilter => Self::Unsupported(error.to_string()),
            other => Self::Failed(Box::new(other)),
        }
    }
}
