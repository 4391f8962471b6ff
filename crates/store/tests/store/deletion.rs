//! Deleting really deletes.

use std::path::Path;

use ragstone_core::Metadata;
use ragstone_core::storage::{Selection, Storage};
use serde_json::json;

use crate::common::*;

fn files_contain(directory: &Path, needle: &str) -> bool {
    std::fs::read_dir(directory).unwrap().any(|entry| {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        bytes
            .windows(needle.len())
            .any(|window| window == needle.as_bytes())
    })
}

fn documents(count: usize, secret_every: usize) -> ragstone_core::storage::DocumentBatch {
    let mut noise = Noise(5);
    batch(
        (0..count)
            .map(|n| {
                let secret = n % secret_every == 0;
                let word = if secret { "xyzzysecret" } else { "ordinary" };
                // Some longer than a page, so that overflow pages are covered too.
                let text = format!("{word} {}", "filler ".repeat(if n % 5 == 0 { 2000 } else { 10 }));
                let fields = json!({"secret": secret, "note": format!("{word}-note")});
                stored(&format!("{word}-{n}"), &text, fields, &noise.vector(16))
            })
            .collect(),
    )
}

#[tokio::test]
async fn deleted_text_is_in_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    store.upsert(&docs, documents(300, 3)).await.unwrap();
    store.flush().await.unwrap();
    assert!(files_contain(directory.path(), "xyzzysecret"));
    let secrets = ragstone_core::Filter::parse(&json!({"secret": true})).unwrap();
    let deleted = store
        .delete_documents(&docs, Selection::Matching(secrets))
        .await
        .unwrap();
    assert_eq!(deleted, 100);
    store.flush().await.unwrap();
    assert!(!files_contain(directory.path(), "xyzzysecret"));
    assert!(files_contain(directory.path(), "ordinary"));

    store.upsert(&docs, documents(300, 3)).await.unwrap();
    let plain = batch(
        (0..300)
            .step_by(3)
            .map(|n| stored(&format!("xyzzysecret-{n}"), "plain", json!({}), &[1.0; 16]))
            .collect(),
    );
    store.upsert(&docs, plain).await.unwrap();
    store.flush().await.unwrap();
    assert!(
        !files_contain(directory.path(), "xyzzysecret-note"),
        "what was replaced is gone as well"
    );
}

#[tokio::test]
async fn text_deleted_in_bulk_is_in_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    store.upsert(&docs, documents(3000, 3)).await.unwrap();
    store.flush().await.unwrap();
    let secrets = ragstone_core::Filter::parse(&json!({"secret": true})).unwrap();
    let deleted = store.delete_documents(&docs, Selection::Matching(secrets)).await;
    assert_eq!(deleted.unwrap(), 1000);
    store.flush().await.unwrap();
    assert!(!files_contain(directory.path(), "xyzzysecret"));
    assert!(files_contain(directory.path(), "ordinary"));
    assert_eq!(store.collection(&docs).await.unwrap().count, 2000);
    assert_eq!(store.integrity_check().await.unwrap(), Vec::<String>::new());
}

/// A second of writes every few milliseconds leaves no idle moment. Removal does not wait for one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_text_goes_while_others_write() {
    let directory = tempfile::tempdir().unwrap();
    let store = std::sync::Arc::new(open(directory.path()));
    let (docs, busy) = (name("docs"), name("busy"));
    for collection in [&docs, &busy] {
        store
            .create_collection(collection, Metadata::new())
            .await
            .unwrap();
    }
    store.upsert(&docs, documents(900, 3)).await.unwrap();
    let writing = tokio::spawn({
        let store = store.clone();
        async move {
            for n in 0.. {
                let document = stored(&format!("d{}", n % 50), "text", json!({}), &[1.0, 0.5]);
                if store.upsert(&busy, batch(vec![document])).await.is_err() {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        }
    });
    let secrets = ragstone_core::Filter::parse(&json!({"secret": true})).unwrap();
    let deleted = store.delete_documents(&docs, Selection::Matching(secrets)).await;
    assert_eq!(deleted.unwrap(), 300);
    // Ten seconds and what a slow machine adds; without the promise it would never happen.
    let start = std::time::Instant::now();
    while files_contain(directory.path(), "xyzzysecret") {
        assert!(start.elapsed().as_secs() < 120, "deleted text stays in the file");
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
    assert!(!writing.is_finished());
    writing.abort();
}

#[tokio::test]
async fn replacing_documents_again_and_again_does_not_grow_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let mut noise = Noise(9);
    let mut replace = async || {
        let all =
            (0..1143).map(|n| stored(&format!("d{n}"), "some text", json!({"n": n}), &noise.vector(384)));
        let all: Vec<_> = all.collect();
        for part in all.chunks(100) {
            store.upsert(&docs, batch(part.to_vec())).await.unwrap();
        }
        store.flush().await.unwrap();
        store.health().await.unwrap().storage_bytes
    };
    let first = replace().await;
    let mut last = first;
    for _ in 0..49 {
        last = replace().await;
    }
    assert!(
        last <= first + first / 10,
        "{first} bytes at first, {last} in the end"
    );
    // The same where documents are deleted and added again.
    for _ in 0..20 {
        for n in (0..1143).step_by(3) {
            let one = Selection::Ids(vec![id(&format!("d{n}"))]);
            store.delete_documents(&docs, one).await.unwrap();
        }
        last = replace().await;
    }
    assert!(last <= 2 * first, "{first} bytes at first, {last} in the end");
    assert_eq!(store.integrity_check().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn emptying_gives_the_space_back() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let (docs, other) = (name("docs"), name("other"));
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    store.create_collection(&other, Metadata::new()).await.unwrap();
    store.upsert(&other, documents(5, 1)).await.unwrap();
    store.flush().await.unwrap();
    let before = store.health().await.unwrap().storage_bytes;
    store.upsert(&docs, documents(1000, 7)).await.unwrap();
    store.flush().await.unwrap();
    assert!(store.health().await.unwrap().storage_bytes > before + 1_000_000);
    assert_eq!(store.empty(&docs).await.unwrap(), 1000);
    store.flush().await.unwrap();
    let after = store.health().await.unwrap().storage_bytes;
    assert!(
        after <= before + 64 * 1024,
        "{before} bytes before, {after} after"
    );
    assert_eq!(store.collection(&other).await.unwrap().count, 5);
    assert_eq!(store.integrity_check().await.unwrap(), Vec::<String>::new());
}
