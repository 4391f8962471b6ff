//! The two ends of a transfer: a store that this process opens, or a server.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::call::CallError;
use ragstone_core::models::Models;
use ragstone_core::service::Service;
use ragstone_core::storage::Storage;
use ragstone_search::{QueryVectors, StorageBackend};
use ragstone_store::{has_database, inspect_postgres};
use ragstone_transfer::TransferError;

use super::super::remote::{KEY, RemoteArgs, refusal, server_url};
use crate::config::{self, StoreArgs, StoreLocation};
use crate::stores::{OpenStore, connect_chroma};

/// The store of this machine, unless a server is named.
#[derive(Args)]
pub(super) struct EndpointArgs {
    /// A running server, instead of the store itself
    #[arg(long, value_name = "URL", conflicts_with_all = ["data_dir", "store"], value_parser = server_url)]
    url: Option<String>,
    #[command(flatten)]
    store: StoreArgs,
}

impl EndpointArgs {
    pub(super) async fn open(&self, access: Access) -> anyhow::Result<Endpoint> {
        if let Some(url) = &self.url {
            return server(url, vec![KEY]);
        }
        store(&self.store.settings()?.store, access).await
    }
}

/// A store that is read must exist; one that is written is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

impl Access {
    /// Where `copy`, which may speak to two servers, finds the key of one.
    fn key(self) -> &'static str {
        match self {
            Self::Read => "RAGSTONE_FROM_API_KEY",
            Self::Write => "RAGSTONE_TO_API_KEY",
        }
    }
}

/// A place as `copy` names it: the address of a server or of a store, or a data directory.
pub(super) async fn open(place: &str, access: Access) -> anyhow::Result<Endpoint> {
    match place.split_once("://") {
        Some(("http" | "https", _)) => server(place, vec![access.key(), KEY]),
        // Collections are all that is moved, so no directory is needed for what they are not.
        Some(_) => store(&config::parse_store(place, PathBuf::new())?, access).await,
        None => store(&StoreLocation::Embedded(place.into()), access).await,
    }
}

/// Whether two places are one, as far as their names tell.
pub(super) fn are_same(one: &str, other: &str) -> bool {
    let directory = |place: &str| {
        let path = match place.split_once("://") {
            Some(("sqlite", path)) => path,
            Some(_) => return None,
            None => place,
        };
        Path::new(path).canonicalize().ok()
    };
    let address = |place: &str| place.trim_end_matches('/').to_owned();
    address(one) == address(other) || directory(one).is_some_and(|one| directory(other) == Some(one))
}

/// An opened end of a transfer, which must be closed.
pub(super) struct Endpoint {
    backend: Arc<dyn Backend>,
    store: Option<OpenStore>,
    server: Option<Server>,
}

struct Server {
    url: String,
    /// The environment variables that may hold its key.
    keys: Vec<&'static str>,
}

impl Endpoint {
    pub(super) fn backend(&self) -> &dyn Backend {
        self.backend.as_ref()
    }

    pub(super) async fn close(&self) -> anyhow::Result<()> {
        match &self.store {
            Some(store) => Ok(store.close().await?),
            None => Ok(()),
        }
    }

    /// Says what the server said, or that nothing answers at its address, where the error is about it.
    pub(super) fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let Some(Server { url, keys }) = &self.server else {
            return error;
        };
        match failed_call(&error).filter(|call| call.service() == url) {
            Some(CallError::Answered(answer)) => anyhow::anyhow!(refusal(answer, keys)),
            Some(CallError::Unreachable { reason, .. }) => {
                anyhow::anyhow!("no server answers at {url}: {reason}")
            }
            _ => error,
        }
    }
}

/// The failed call to a server that an error is about.
fn failed_call(error: &anyhow::Error) -> Option<&CallError> {
    error.chain().find_map(|cause| {
        let backend = match cause.downcast_ref() {
            Some(TransferError::Backend(error)) => Some(error),
            _ => cause.downcast_ref::<BackendError>(),
        };
        match backend {
            Some(BackendError::Call(call)) => Some(call),
            _ => cause.downcast_ref(),
        }
    })
}

fn server(url: &str, keys: Vec<&'static str>) -> anyhow::Result<Endpoint> {
    let client = RemoteArgs::at(url.to_owned()).client_with(&keys)?;
    Ok(Endpoint {
        backend: Arc::new(client),
        store: None,
        server: Some(Server {
            url: url.to_owned(),
            keys,
        }),
    })
}

/// Collections are moved with their vectors, so no model is needed.
fn backend(store: Arc<dyn Storage>) -> Arc<dyn Backend> {
    let models = Arc::new(Models::default());
    Arc::new(StorageBackend::new(
        Service { store, models },
        QueryVectors::default(),
    ))
}

async fn store(location: &StoreLocation, access: Access) -> anyhow::Result<Endpoint> {
    if let StoreLocation::Chroma { url, .. } = location {
        let store = connect_chroma(url)?;
        store
            .health()
            .await
            .with_context(|| format!("the store {url} cannot be used"))?;
        return Ok(Endpoint {
            backend: backend(Arc::new(store)),
            store: None,
            server: None,
        });
    }
    if access == Access::Read && !is_there(location).await? {
        anyhow::bail!("there is no store at {location}");
    }
    let store = OpenStore::open(location).await.map_err(|error| {
        let in_use = matches!(error.downcast_ref(), Some(ragstone_store::Error::InUse(_)));
        if in_use {
            error.context("a server has the store open: name the server instead, by its http:// address")
        } else {
            error
        }
    })?;
    Ok(Endpoint {
        backend: backend(store.store()),
        store: Some(store),
        server: None,
    })
}

async fn is_there(location: &StoreLocation) -> anyhow::Result<bool> {
    Ok(match location {
        StoreLocation::Embedded(directory) => has_database(directory),
        StoreLocation::Postgres(url) => {
            let found = inspect_postgres(url).await;
            found
                .with_context(|| format!("the store {url} cannot be opened"))?
                .schema
                > 0
        }
        StoreLocation::Chroma { .. } => true,
    })
}
