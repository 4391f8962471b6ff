//! What the tests of the store share.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use async_trait::async_trait;
use ragstone_core::records::Records;
use ragstone_core::storage::{DocumentBatch, Page, Storage, StoredDocument};
use ragstone_core::{CollectionName, Document, DocumentId, Metadata};
use ragstone_store::{PostgresOptions, PostgresStore, PostgresUrl, SqliteStore, StoreOptions};
use serde_json::Value;

/// Each of these functions takes an [`Engine`] and becomes one test per store.
macro_rules! on_every_store {
    ($($test:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(crate::common::Engine::Sqlite).await;
            })*
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(crate::common::Engine::Postgres).await;
            })*
        }
    };
}
pub(crate) use on_every_store;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Engine {
    Sqlite,
    Postgres,
}

/// A store of either kind, and what only tests ask of it.
#[async_trait]
pub(crate) trait Subject: Storage + Records {
    async fn shut(&self);

    /// Panics if the store says of itself that it is damaged.
    async fn examine(&self);
}

#[async_trait]
impl Subject for SqliteStore {
    async fn shut(&self) {
        self.close().await.unwrap();
    }

    async fn examine(&self) {
        assert_eq!(self.integrity_check().await.unwrap(), Vec::<String>::new());
    }
}

#[async_trait]
impl Subject for PostgresStore {
    async fn shut(&self) {
        self.close();
    }

    async fn examine(&self) {}
}

/// Where a store lives between one opening and the next; of its own for every test.
pub(crate) enum Home {
    Folder(tempfile::TempDir),
    Database(String),
}

impl Home {
    pub(crate) async fn new(engine: Engine) -> Self {
        match engine {
            Engine::Sqlite => Self::Folder(tempfile::tempdir().unwrap()),
            Engine::Postgres => Self::Database(new_database().await),
        }
    }

    pub(crate) async fn open(&self) -> Arc<dyn Subject> {
        match self {
            Self::Folder(folder) => {
                // Deleting two documents is a bulk delete, so that every test covers these.
                let options = StoreOptions {
                    immediate_deletes: 1,
                    ..StoreOptions::default()
                };
                Arc::new(SqliteStore::open(folder.path(), options).unwrap())
            }
            Self::Database(url) => Arc::new(open_postgres(url).await),
        }
    }
}

pub(crate) async fn open_postgres(url: &str) -> PostgresStore {
    let options = PostgresOptions {
        readers: 4,
        writers: 3,
        ..PostgresOptions::default()
    };
    PostgresStore::open(&PostgresUrl::parse(url).unwrap(), options)
        .await
        .unwrap()
}

/// Makes a database in the server of the tests, and gives its address.
pub(crate) async fn new_database() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let server = std::env::var("RAGSTONE_TEST_POSTGRES").expect(
        "RAGSTONE_TEST_POSTGRES names no server: run `cargo xtask test`, or `cargo xtask with-postgres cargo test …`",
    );
    let name = format!(
        "store_{}_{}",
        std::process::id(),
        NUMBER.fetch_add(1, Ordering::Relaxed)
    );
    let (client, connection) = tokio_postgres::connect(&server, tokio_postgres::NoTls)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    client
        .batch_execute(&format!("CREATE DATABASE {name}"))
        .await
        .unwrap();
    drop(client);
    connection.await.unwrap().unwrap();
    let (address, _) = server.rsplit_once('/').unwrap();
    format!("{address}/{name}")
}

pub(crate) fn open(directory: &std::path::Path) -> SqliteStore {
    SqliteStore::open(directory, StoreOptions::default()).unwrap()
}

pub(crate) fn name(name: &str) -> CollectionName {
    CollectionName::parse(name).unwrap()
}

pub(crate) fn id(id: &str) -> DocumentId {
    DocumentId::parse(id).unwrap()
}

pub(crate) fn metadata(value: Value) -> Metadata {
    match value {
        Value::Object(metadata) => metadata,
        other => panic!("metadata must be an object, not {other}"),
    }
}

pub(crate) fn stored(document_id: &str, text: &str, fields: Value, vector: &[f32]) -> StoredDocument {
    StoredDocument {
        document: Document {
            id: id(document_id),
            text: text.into(),
            metadata: metadata(fields),
        },
        vector: vector.to_vec(),
    }
}

pub(crate) fn batch(documents: Vec<StoredDocument>) -> DocumentBatch {
    DocumentBatch {
        documents,
        model: None,
    }
}

pub(crate) const ALL: Page = Page {
    limit: usize::MAX,
    offset: 0,
};

/// Numbers without pattern that are the same in every run.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vector(&mut self, dimensions: usize) -> Vec<f32> {
        (0..dimensions).map(|_| self.float()).collect()
    }
}
