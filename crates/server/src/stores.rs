//! The store that the settings name, opened.

use std::sync::Arc;

use anyhow::Context;
use ragstone_core::records::Records;
use ragstone_core::storage::{Storage, StorageError};
use ragstone_providers::chroma::ChromaStorage;
use ragstone_store::{Held, PostgresOptions, PostgresStore, SqliteStore, StoreOptions};
use secrecy::SecretString;

use crate::config::{self, ConfigError, StoreLocation};

#[derive(Clone)]
pub(crate) enum OpenStore {
    Embedded(Arc<SqliteStore>),
    Postgres(Arc<PostgresStore>),
    /// ChromaDB has no transactions, so records are kept in a store of this process.
    Chroma {
        store: Arc<ChromaStorage>,
        records: Arc<SqliteStore>,
    },
}

impl OpenStore {
    pub(crate) async fn open(location: &StoreLocation) -> anyhow::Result<Self> {
        Self::open_holding(location, Held::Everything).await
    }

    /// What an embedded store holds in memory is for the process that opens it to say.
    pub(crate) async fn open_holding(location: &StoreLocation, held: Held) -> anyhow::Result<Self> {
        match location {
            StoreLocation::Embedded(directory) => Ok(Self::Embedded(open_embedded(directory, held)?)),
            StoreLocation::Postgres(url) => {
                let store = PostgresStore::open(url, PostgresOptions::default())
                    .await
                    .with_context(|| format!("the store {url} cannot be opened"))?;
                Ok(Self::Postgres(Arc::new(store)))
            }
            StoreLocation::Chroma { url, data_dir } => {
                let store = connect_chroma(url)?;
                let records = open_embedded(data_dir, held)?;
                match store.health().await {
                    Ok(_) => {}
                    Err(error @ StorageError::Unavailable { .. }) => tracing::warn!(
                        url,
                        error = format!("{:#}", anyhow::Error::from(error)),
                        "the store does not answer yet, and is asked again as requests come"
                    ),
                    // What answers otherwise is no ChromaDB, or has no such database, and never will.
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

    /// Where the vectors of records are: beside them, because a process that has records of its own would
    /// take those of others for left over.
    pub(crate) fn vectors_of_records(&self) -> Arc<dyn Storage> {
        match self {
            Self::Embedded(_) | Self::Postgres(_) => self.store(),
            Self::Chroma { records, .. } => Arc::clone(records) as _,
        }
    }

    /// Finishes the writes that were accepted, and lets go.
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

fn open_embedded(directory: &std::path::Path, held: Held) -> anyhow::Result<Arc<SqliteStore>> {
    let options = StoreOptions {
        held,
        ..StoreOptions::default()
    };
    let store = SqliteStore::open(directory, options)
        .with_context(|| format!("the store in {} cannot be opened", directory.display()))?;
    Ok(Arc::new(store))
}

/// The token, where the server wants one, comes from the environment and never from a flag, which
/// every user of the machine could read.
pub(crate) fn connect_chroma(url: &str) -> Result<ChromaStorage, ConfigError> {
    let token = config::process_env("RAGSTONE_CHROMA_TOKEN").map(SecretString::from);
    ChromaStorage::connect(url, token).map_err(|error| ConfigError(error.to_string()))
}
