//! Opening the store of the settings.

use std::sync::Arc;

use anyhow::Context;
use ragstone_core::records::Records;
use ragstone_core::storage::{Storage, StorageError};
use ragstone_providers::chroma::ChromaStorage;
use ragstone_store::{IndexScope, PostgresOptions, PostgresStore, SqliteStore, StoreOptions};
use secrecy::SecretString;

use crate::config::{self, ConfigError, StoreLocation};

#[derive(Clone)]
pub(crate) enum OpenStore {
    Embedded(Arc<SqliteStore>),
    Postgres(Arc<PostgresStore>),
    /// ChromaDB has no transactions, so records are stored in an embedded store.
    Chroma {
        store: Arc<ChromaStorage>,
        records: Arc<SqliteStore>,
    },
}

impl OpenStore {
    pub(crate) async fn open(location: &StoreLocation) -> anyhow::Result<Self> {
        Self::open_with_scope(location, IndexScope::Everything).await
    }

    /// `scope` limits the index that an embedded store keeps in memory.
    pub(crate) async fn open_with_scope(location: &StoreLocation, scope: IndexScope) -> anyhow::Result<Self> {
        match location {
            StoreLocation::Embedded(directory) => Ok(Self::Embedded(open_embedded(directory, scope)?)),
            StoreLocation::Postgres(url) => {
                let store = PostgresStore::open(url, PostgresOptions::default())
                    .await
                    .with_context(|| format!("the store {url} cannot be opened"))?;
                Ok(Self::Postgres(Arc::new(store)))
            }
            StoreLocation::Chroma { url, data_dir } => {
                let store = connect_chroma(url)?;
                let records = open_embedded(data_dir, scope)?;
                match store.health().await {
                    Ok(_) => {}
                    Err(error @ StorageError::Unavailable { .. }) => tracing::warn!(
                        url,
                        error = format!("{:#}", anyhow::Error::from(error)),
                        "the store does not answer yet; requests will try again"
                    ),
                    // Any other answer means that this is not a ChromaDB server, or lacks the database.
                    Err(error) => {
                        return Err(error).with_context(|| format!("the store {url} cannot be used"));
                    }
                }
                Ok(Self::Chroma {
                    store: Arc::new(store),
                    records,
                })
            }
        }
    }

    pub(crate) fn store(&self) -> Arc<dyn Storage> {
        match self {
            Self::Embedded(store) => Arc::clone(store) as _,
            Self::Postgres(store) => Arc::clone(store) as _,
            Self::Chroma { store, .. } => Arc::clone(store) as _,
        }
    }

    pub(crate) fn records(&self) -> Arc<dyn Records> {
        match self {
            Self::Embedded(store) => Arc::clone(store) as _,
            Self::Postgres(store) => Arc::clone(store) as _,
            Self::Chroma { records, .. } => Arc::clone(records) as _,
        }
    }

    /// The store of the vectors of records. They are beside the records, because a process with records of
    /// its own would take the vectors of others for left over.
    pub(crate) fn vectors_of_records(&self) -> Arc<dyn Storage> {
        match self {
            Self::Embedded(_) | Self::Postgres(_) => self.store(),
            Self::Chroma { records, .. } => Arc::clone(records) as _,
        }
    }

    /// Finishes accepted writes and closes the store.
    pub(crate) async fn close(&self) -> Result<(), StorageError> {
        match self {
            Self::Embedded(store) | Self::Chroma { records: store, .. } => store.close().await,
            Self::Postgres(store) => {
                store.close();
                Ok(())
            }
        }
    }
}

fn open_embedded(directory: &std::path::Path, scope: IndexScope) -> anyhow::Result<Arc<SqliteStore>> {
    let options = StoreOptions {
        index_scope: scope,
        ..StoreOptions::default()
    };
    let store = owner_only(|| SqliteStore::open(directory, options))
        .with_context(|| format!("the store in {} cannot be opened", directory.display()))?;
    Ok(Arc::new(store))
}

/// The token, if the server requires one, comes from the environment: other users can read flags.
pub(crate) fn connect_chroma(url: &str) -> Result<ChromaStorage, ConfigError> {
    let token = config::process_env("RAGSTONE_CHROMA_TOKEN").map(SecretString::from);
    ChromaStorage::connect(url, token).map_err(|error| ConfigError(error.to_string()))
}

/// Runs `create` so that files and directories it creates are readable by their owner only. Files of
/// SQLite that are created later get the permissions of the database.
fn owner_only<T>(create: impl FnOnce() -> T) -> T {
    #[cfg(unix)]
    {
        let before = rustix::process::umask(OTHERS);
        let created = create();
        rustix::process::umask(before);
        created
    }
    #[cfg(not(unix))]
    create()
}

/// The same for the rest of the process. Not for processes that download models, which users may share.
pub(crate) fn restrict_to_owner() {
    #[cfg(unix)]
    rustix::process::umask(OTHERS);
}

/// Permissions of the group and of all others.
#[cfg(unix)]
const OTHERS: rustix::fs::Mode = rustix::fs::Mode::from_raw_mode(0o077);
