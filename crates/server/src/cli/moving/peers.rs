//! Where collections are: in a store that this process opens, or with a server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use clap::Args;
use ragstone_core::provider::CallError;
use ragstone_core::storage::{
    ExportPage, ExportRange, ExportedDocument, Place, Storage, StorageError, VectorPrecision,
};
use ragstone_core::{Collection, CollectionName, Metadata};
use ragstone_providers::http::{Call, Repeat, ServiceClient};
use ragstone_rag::moving::{DocumentLine, Peer, StorePeer, read_documents};
use ragstone_store::{has_database, inspect_postgres};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::remote::{KEY, RemoteArgs, refusal, server_url};
use crate::config::{self, StoreArgs, StoreLocation};
use crate::stores::{OpenStore, connect_chroma};

/// The store of this machine, unless a server is named.
#[derive(Args)]
pub(super) struct PeerArgs {
    /// A running server, instead of the store itself
    #[arg(long, value_name = "URL", conflicts_with_all = ["data_dir", "store"], value_parser = server_url)]
    url: Option<String>,
    #[command(flatten)]
    store: StoreArgs,
}

impl PeerArgs {
    pub(super) async fn open(&self, access: Access) -> anyhow::Result<OpenPeer> {
        if let Some(url) = &self.url {
            return server(url, vec![KEY]);
        }
        store(&self.store.settings()?.store, access).await
    }
}

/// What is read must be there; what is written may be made.
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
pub(super) async fn open(place: &str, access: Access) -> anyhow::Result<OpenPeer> {
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

/// An opened place, which is to be closed.
pub(super) struct OpenPeer {
    peer: Box<dyn Peer>,
    store: Option<OpenStore>,
}

impl OpenPeer {
    pub(super) fn peer(&self) -> &dyn Peer {
        &*self.peer
    }

    pub(super) async fn close(&self) -> anyhow::Result<()> {
        match &self.store {
            Some(store) => Ok(store.close().await?),
            None => Ok(()),
        }
    }
}

fn server(url: &str, keys: Vec<&'static str>) -> anyhow::Result<OpenPeer> {
    let client = RemoteArgs::at(url.to_owned()).client_with(&keys)?;
    let url = url.to_owned();
    Ok(OpenPeer {
        peer: Box::new(Server { client, url, keys }),
        store: None,
    })
}

async fn store(location: &StoreLocation, access: Access) -> anyhow::Result<OpenPeer> {
    if let StoreLocation::Chroma { url, .. } = location {
        let store = connect_chroma(url)?;
        store
            .health()
            .await
            .with_context(|| format!("the store {url} cannot be used"))?;
        return Ok(OpenPeer {
            peer: Box::new(StorePeer(Arc::new(store))),
            store: None,
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
    Ok(OpenPeer {
        peer: Box::new(StorePeer(store.store())),
        store: Some(store),
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

/// A running Ragstone.
struct Server {
    client: ServiceClient,
    url: String,
    /// Where its key was looked for.
    keys: Vec<&'static str>,
}

#[derive(Deserialize)]
struct CollectionAnswer {
    name: String,
    count: u64,
    #[serde(default)]
    metadata: Metadata,
}

#[derive(Deserialize)]
struct ListAnswer {
    collections: Vec<CollectionAnswer>,
}

#[derive(Deserialize)]
struct PageAnswer {
    documents: Vec<DocumentLine<'static>>,
    last: Option<i64>,
    more: bool,
}

#[derive(Serialize)]
struct ImportBody<'a> {
    documents: Vec<DocumentLine<'a>>,
}

impl CollectionAnswer {
    fn read(self) -> Result<Collection, StorageError> {
        Ok(Collection {
            name: CollectionName::parse(self.name).map_err(|error| StorageError::Failed(error.into()))?,
            count: self.count,
            metadata: self.metadata,
            dimensions: None,
        })
    }
}

#[async_trait]
impl Peer for Server {
    async fn collections(&self) -> Result<Vec<Collection>, StorageError> {
        let list: ListAnswer = self
            .client
            .call_json(Call::get("collections"))
            .await
            .map_err(|error| self.explain(error))?;
        list.collections.into_iter().map(CollectionAnswer::read).collect()
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StorageError> {
        let call = Call::get(format!("collections/{name}"));
        let mut collection = match self.client.call_json::<CollectionAnswer>(call).await {
            Ok(answer) => answer.read()?,
            Err(error) if error.status() == Some(404) => {
                return Err(StorageError::CollectionNotFound(name.clone()));
            }
            Err(error) => return Err(self.explain(error)),
        };
        if collection.count > 0 {
            let first = ExportRange {
                after: None,
                limit: 1,
            };
            let page = self.export(name, first).await?;
            collection.dimensions = page.documents.first().map(|moved| moved.vector.len());
        }
        Ok(collection)
    }

    async fn create_collection(&self, name: &CollectionName, metadata: Metadata) -> Result<(), StorageError> {
        let call = Call::post("collections")
            .json(&json!({"name": name.as_str(), "metadata": metadata}))
            .repeat(Repeat::IfUnprocessed);
        self.client
            .call(call)
            .await
            .map(|_| ())
            .map_err(|error| self.explain(error))
    }

    async fn delete_collection(&self, name: &CollectionName) -> Result<(), StorageError> {
        let call = Call::delete(format!("collections/{name}"));
        let deleted = self.client.call(call).await;
        deleted.map(|_| ()).map_err(|error| self.explain(error))
    }

    async fn export(&self, name: &CollectionName, range: ExportRange) -> Result<ExportPage, StorageError> {
        let mut call =
            Call::get(format!("collections/{name}/export")).query("limit", range.limit.to_string());
        if let Some(Place(after)) = range.after {
            call = call.query("after", after.to_string());
        }
        let page: PageAnswer = self
            .client
            .call_json(call)
            .await
            .map_err(|error| self.explain(error))?;
        Ok(ExportPage {
            documents: read_documents(page.documents).map_err(|error| StorageError::Failed(error.into()))?,
            last: page.last.map(Place),
            more: page.more,
        })
    }

    async fn vectors(&self) -> Result<VectorPrecision, StorageError> {
        let health: Value = self
            .client
            .call_json(Call::get("health"))
            .await
            .map_err(|error| self.explain(error))?;
        Ok(match health.pointer("/store/rounds_vectors") {
            Some(Value::Bool(true)) => VectorPrecision::Rounded,
            _ => VectorPrecision::Exact,
        })
    }

    async fn import(
        &self,
        name: &CollectionName,
        documents: Vec<ExportedDocument>,
    ) -> Result<(), StorageError> {
        let body = ImportBody {
            documents: documents.iter().map(DocumentLine::from).collect(),
        };
        let call = Call::post(format!("collections/{name}/import")).json(&body);
        self.client
            .call(call)
            .await
            .map(|_| ())
            .map_err(|error| self.explain(error))
    }
}

impl Server {
    /// What the server said, or why it said nothing. Calls were repeated already where that may help.
    fn explain(&self, error: CallError) -> StorageError {
        match error {
            CallError::Answered(answer) if answer.status == 503 => StorageError::Unavailable {
                retry_after: answer.retry_after.unwrap_or(Duration::from_secs(1)),
                message: answer.message().unwrap_or_default(),
            },
            CallError::Answered(answer) => StorageError::Unsupported(refusal(&answer, &self.keys)),
            CallError::Unreachable { reason, .. } => {
                StorageError::Unsupported(format!("no server answers at {}: {reason}", self.url))
            }
            other => StorageError::Unsupported(format!("{}: {other}", self.url)),
        }
    }
}
