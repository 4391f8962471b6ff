//! Opening what is there: copies taken while writing, damaged files, directories that do not do.

use ragstone_core::storage::{Storage, StorageQuery};
use ragstone_core::{Filter, Metadata};
use ragstone_store::{Error, SqliteStore, StoreOptions};
use serde_json::json;

use crate::common::*;

fn refusal(directory: &std::path::Path) -> Error {
    match SqliteStore::open(directory, StoreOptions::default()) {
        Ok(_) => panic!("opened"),
        Err(error) => error,
    }
}

/// What a power cut leaves is the files as they were: acknowledged writes must be in them.
#[tokio::test]
async fn the_files_as_they_are_at_any_moment_hold_all_acknowledged_writes() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let mut noise = Noise(8);
    for round in 0..6u64 {
        let documents = (0..50).map(|n| {
            let text = format!("round{round} number{n}");
            stored(
                &format!("d{round}-{n}"),
                &text,
                json!({"round": round}),
                &noise.vector(12),
            )
        });
        store.upsert(&docs, batch(documents.collect())).await.unwrap();
        if round == 4 {
            assert_eq!(store.empty(&docs).await.unwrap(), 250);
        }
        let copy = tempfile::tempdir().unwrap();
        for file in ["ragstone.db", "ragstone.db-wal"] {
            std::fs::copy(directory.path().join(file), copy.path().join(file)).unwrap();
        }
        let recovered = open(copy.path());
        let expected = store.documents(&docs, &Filter::everything(), ALL).await.unwrap();
        let found = recovered
            .documents(&docs, &Filter::everything(), ALL)
            .await
            .unwrap();
        assert_eq!(found, expected);
        let request = StorageQuery {
            vector: Some(noise.vector(12)),
            text: Some(format!("round{round}")),
            limit: 5,
            ..StorageQuery::default()
        };
        let expected = store.search(&docs, request.clone()).await.unwrap().hits;
        assert_eq!(recovered.search(&docs, request).await.unwrap().hits, expected);
        assert_eq!(recovered.integrity_check().await.unwrap(), Vec::<String>::new());
    }
}

#[test]
fn a_file_that_is_no_database_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join("ragstone.db"),
        "not a database ".repeat(1000),
    )
    .unwrap();
    assert!(matches!(refusal(directory.path()), Error::Damaged(_)));
}

#[tokio::test]
async fn a_truncated_database_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    {
        let store = open(directory.path());
        let docs = name("docs");
        store.create_collection(&docs, Metadata::new()).await.unwrap();
        let documents =
            (0..200).map(|n| stored(&format!("d{n}"), &"word ".repeat(200), json!({}), &[1.0; 8]));
        store.upsert(&docs, batch(documents.collect())).await.unwrap();
        store.close().await.unwrap();
    }
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(directory.path().join("ragstone.db"))
        .unwrap();
    file.set_len(64 * 1024).unwrap();
    assert!(matches!(refusal(directory.path()), Error::Damaged(_)));
}

#[test]
fn a_newer_schema_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()));
    let database = directory.path().join("ragstone.db");
    let mut bytes = std::fs::read(&database).unwrap();
    // The header field that SQLite calls user_version.
    bytes[60..64].copy_from_slice(&999u32.to_be_bytes());
    std::fs::write(&database, &bytes).unwrap();
    assert!(matches!(
        refusal(directory.path()),
        Error::NewerSchema { found: 999, .. }
    ));
}

#[test]
fn a_path_that_is_no_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = refusal(&file);
    assert!(matches!(error, Error::Directory { .. }));
    assert!(error.to_string().contains("cannot use ") && error.to_string().contains("/file"));
}
