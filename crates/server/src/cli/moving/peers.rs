//! Where collections are: in a store that this process opens, or with a server.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use clap::Args;
use ragstone_core::provider::CallError;
use ragstone_core::store::{KeptVectors, MovedDocument, MovedPage, MovedRange, Place, Store, StoreError};
use ragstone_core::{Collection, CollectionName, Metadata};
use ragstone_providers::http::{Call, Repeat, ServiceClient};
use ragstone_rag::moving::{DocumentLine, Peer, StorePeer, read_documents};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::remote::{RemoteArgs, refusal, server_url};
use crate::config::{self, Flags, Layers, StoreLocation};
use crate::stores::{OpenStore, connect_chroma};

/// The store of this machine, unless a server is named.
#[derive(Args)]
pub(super) struct PeerArgs {
    /// A running server, instead of the store itself
    #[arg(long, value_name = "URL", conflicts_with_all = ["data_dir", "store"], value_parser = server_url)]
    url: Option<String>,
    /// Where the embedded store keeps its file [default: ragstone-data; env: RAGSTONE_DATA_DIR]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Which store [default: the data directory; env: RAGSTONE_STORE]
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Configuration file [env: RAGSTONE_CONFIG]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl PeerArgs {
    pub(super) async fn open(&self) -> anyhow::Result<OpenPeer> {
        if let Some(url) = &self.url {
            return server(url);
        }
        let env = &config::process_env;
        let flags = Flags {
            data_dir: self.data_dir.clone(),
            store: self.store.clone(),
            // Nothing listens here, so nothing needs a key.
            allow_no_key: true,
            ..Flags::default()
        };
        let file = config::read_file(self.config.as_deref(), env)?;
        let settings = config::build(Layers { flags, env, file })?;
        store(&settings.store).await
    }
}

/// A place as `copy` names it: the address of a server or of a store, or a data directory.
pub(super) async fn open(place: &str) -> anyhow::Result<OpenPeer> {
    match place.split_once("://") {
        Some(("http" | "https", _)) => server(place),
        // Collections are all that is moved, so no directory is needed for what they are not.
        Some(_) => store(&config::parse_store(place, PathBuf::new())?).await,
        None => store(&StoreLocation::Embedded(place.into())).await,
    }
}

/// An opened place, which is to be closed.
pub(super) struct OpenPeer {
    peer: Box<dyn Peer>,
    store: Option<OpenStore>,
    /// Tells it apart from others.
    origin: String,
}

impl OpenPeer {
    pub(super) fn peer(&self) -> &dyn Peer {
        &*self.peer
    }

    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    pub(super) async fn close(&self) -> anyhow::Result<()> {
        match &self.store {
            Some(store) => Ok(store.close().await?),
            None => Ok(()),
        }
    }
}

fn server(url: &str) -> anyhow::Result<OpenPeer> {
    Ok(OpenPeer {
        peer: Box::new(Server(RemoteArgs::at(url.to_owned()).client()?)),
        store: None,
        origin: url.to_owned(),
    })
}

async fn store(location: &StoreLocation) -> anyhow::Result<OpenPeer> {
    let origin = location.to_string();
    if let StoreLocation::Chroma { url, .. } = location {
        let store: Arc<dyn Store> = Arc::new(connect_chroma(url)?);
        return Ok(OpenPeer {
            peer: Box::new(StorePeer(store)),
            store: None,
            origin,
        });
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
        origin,
    })
}

/// A running Ragstone.
struct Server(ServiceClient);

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
    fn read(self) -> Result<Collection, StoreError> {
        Ok(Collection {
            name: CollectionName::parse(self.name).map_err(|error| StoreError::Failed(error.into()))?,
            count: self.count,
            metadata: self.metadata,
            dimensions: None,
        })
    }
}

#[async_trait]
impl Peer for Server {
    async fn collections(&self) -> Result<Vec<Collection>, StoreError> {
        let list: ListAnswer = self
            .0
            .call_json(Call::get("collections"))
            .await
            .map_err(explain)?;
        list.collections.into_iter().map(CollectionAnswer::read).collect()
    }

    async fn collection(&self, name: &CollectionName) -> Result<Collection, StoreError> {
        let call = Call::get(format!("collections/{name}"));
        let mut collection = match self.0.call_json::<CollectionAnswer>(call).await {
            Ok(answer) => answer.read()?,
            Err(error) if error.status() == Some(404) => {
                return Err(StoreError::CollectionNotFound(name.clone()));
            }
            Err(error) => return Err(explain(error)),
        };
        if collection.count > 0 {
            let first = MovedRange {
                after: None,
                limit: 1,
            };
            let page = self.export(name, first).await?;
            collection.dimensions = page.documents.first().map(|moved| moved.vector.len());
        }
        Ok(collection)
    }

    async fn create_collection(&self, name: &CollectionName, metadata: Metadata) -> Result<(), StoreError> {
        let call = Call::post("collections")
            .json(&json!({"name": name.as_str(), "metadata": metadata}))
            .repeat(Repeat::IfUnprocessed);
        self.0.call(call).await.map(|_| ()).map_err(explain)
    }

    async fn export(&self, name: &CollectionName, range: MovedRange) -> Result<MovedPage, StoreError> {
        let mut call =
            Call::get(format!("collections/{name}/export")).query("limit", range.limit.to_string());
        if let Some(Place(after)) = range.after {
            call = call.query("after", after.to_string());
        }
        let page: PageAnswer = self.0.call_json(call).await.map_err(explain)?;
        Ok(MovedPage {
            documents: read_documents(page.documents).map_err(|error| StoreError::Failed(error.into()))?,
            last: page.last.map(Place),
            more: page.more,
        })
    }

    async fn vectors(&self) -> Result<KeptVectors, StoreError> {
        let health: Value = self.0.call_json(Call::get("health")).await.map_err(explain)?;
        Ok(match health.pointer("/store/rounds_vectors") {
            Some(Value::Bool(true)) => KeptVectors::Rounded,
            _ => KeptVectors::Exactly,
        })
    }

    async fn import(&self, name: &CollectionName, documents: Vec<MovedDocument>) -> Result<(), StoreError> {
        let body = ImportBody {
            documents: documents.iter().map(DocumentLine::from).collect(),
        };
        let call = Call::post(format!("collections/{name}/import")).json(&body);
        self.0.call(call).await.map(|_| ()).map_err(explain)
    }
}

/// What the server said, or why it said nothing. Calls were repeated already where that may help.
fn explain(error: CallError) -> StoreError {
    match error {
        CallError::Answered(answer) if answer.status == 503 => StoreError::Unavailable {
            retry_after: answer.retry_after.unwrap_or(Duration::from_secs(1)),
            message: answer.message().unwrap_or_default(),
        },
        CallError::Answered(answer) => StoreError::Unsupported(refusal(&answer)),
        other => StoreError::Failed(Box::new(other)),
    }
}
