//! No byte of a deleted text remains in any file, and its space is freed.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Server, plain, vector};

/// A document with a unique word in text, id and metadata.
fn secret(word: &str) -> Value {
    json!({
        "id": format!("id-{word}"), "text": format!("before {word} after"), "embedding": vector(1),
        "metadata": {"note": format!("meta {word}"), format!("key-{word}"): [format!("element-{word}")]},
    })
}

/// All bytes of all files below a folder, in lower case.
fn all_bytes(folder: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the data directory").flatten() {
        if entry.path().is_dir() {
            bytes.extend(all_bytes(&entry.path()));
        } else {
            bytes.extend(std::fs::read(entry.path()).expect("a file").to_ascii_lowercase());
        }
    }
    bytes
}

fn occurrences(folder: &Path, word: &str) -> usize {
    let bytes = all_bytes(folder);
    bytes
        .windows(word.len())
        .filter(|window| *window == word.as_bytes())
        .count()
}

async fn server_with(word: &str) -> Server {
    let server = plain().await;
    server.create("c").await;
    // Deleted rows share pages with other rows.
    let others = (0..200).map(|n| json!({"id": format!("other{n}"), "text": format!("ordinary text {n}"), "metadata": {"note": n}, "embedding": vector(n)}));
    server.add("c", others.collect()).await;
    server.add("c", vec![secret(word)]).await;
    let server = server.restarted().await;
    assert!(
        occurrences(&server.setup().data_dir(), word) > 0,
        "the word is in the files while the document is there"
    );
    server
}

async fn assert_gone(server: Server, word: &str, documents: usize) {
    assert_eq!(
        server.get("/collections").await.ok()["collections"][0]["count"]
            .as_u64()
            .unwrap_or(0),
        documents as u64
    );
    let setup = server.setup().clone();
    let (status, log) = server.stop();
    assert!(status.success(), "{log}");
    assert!(!log.contains(word), "the log does not keep it either");
    assert_eq!(
        occurrences(&setup.data_dir(), word),
        0,
        "{word} is still in the files"
    );
}

#[tokio::test]
async fn deleted_by_id() {
    let server = server_with("zqxjonea").await;
    server
        .delete_with("/collections/c/documents", json!(["id-zqxjonea"]))
        .await
        .ok();
    assert_gone(server, "zqxjonea", 200).await;
}

#[tokio::test]
async fn deleted_by_filter() {
    let server = server_with("zqxjtwob").await;
    let deleted = server
        .delete_with(
            "/collections/c/documents",
            json!({"where": {"note": "meta zqxjtwob"}}),
        )
        .await
        .ok();
    assert_eq!(deleted["count"], 1);
    assert_gone(server, "zqxjtwob", 200).await;
}

#[tokio::test]
async fn replaced() {
    let server = server_with("zqxjthreec").await;
    // The id stays, so only its text and metadata are new.
    let bytes = {
        server.add("c", vec![json!({"id": "id-zqxjthreec", "text": "harmless", "metadata": {}, "embedding": vector(2)})]).await;
        let setup = server.setup().clone();
        server.stop();
        all_bytes(&setup.data_dir())
    };
    for kept in [
        "before zqxjthreec",
        "meta zqxjthreec",
        "key-zqxjthreec",
        "element-zqxjthreec",
    ] {
        assert!(
            !bytes.windows(kept.len()).any(|window| window == kept.as_bytes()),
            "{kept} is still in the files"
        );
    }
}

#[tokio::test]
async fn emptied() {
    let server = server_with("zqxjfourd").await;
    server.delete("/collections/c/documents/all").await.ok();
    assert_gone(server, "zqxjfourd", 0).await;
}

#[tokio::test]
async fn collection_deleted() {
    let server = server_with("zqxjfivee").await;
    server
        .put(
            "/collections/c/metadata",
            json!({"metadata": {"about": "zqxjfivee"}}),
        )
        .await
        .ok();
    server.delete("/collections/c").await.ok();
    assert_gone(server, "zqxjfivee", 0).await;
}

/// A vector can reveal its text.
#[tokio::test]
async fn vectors_are_gone_too() {
    let server = plain().await;
    server.create("c").await;
    // A vector of length 1 with unique values, so that it is recognizable if it is scaled.
    let [a, b] = [0.28_f32, 0.96_f32];
    let found = |data: &Path| {
        let mut bytes = Vec::new();
        for entry in std::fs::read_dir(data)
            .unwrap()
            .flatten()
            .filter(|entry| entry.path().is_file())
        {
            bytes.extend(std::fs::read(entry.path()).unwrap());
        }
        // Normalization may change the last bit.
        let number = |at: &[u8]| at.try_into().map_or(f32::NAN, f32::from_le_bytes);
        let is_it =
            |pair: &&[u8]| (number(&pair[..4]) - a).abs() < 1e-6 && (number(&pair[4..]) - b).abs() < 1e-6;
        bytes.windows(8).filter(is_it).count()
    };
    let others = (0..50).map(|n| json!({"text": "t", "embedding": [n as f32 + 1.0, 3.0]}));
    server.add("c", others.collect()).await;
    server
        .add(
            "c",
            vec![json!({"id": "secret", "text": "t", "embedding": [a, b]})],
        )
        .await;
    let server = server.restarted().await;
    let setup = server.setup().clone();
    let data = setup.data_dir();
    assert!(
        found(&data) > 0,
        "the vector is in the files while the document is there"
    );
    server
        .delete_with("/collections/c/documents", json!(["secret"]))
        .await
        .ok();
    let (status, _) = server.stop();
    assert!(status.success());
    assert_eq!(found(&data), 0, "the vector is still in the files");
}

#[tokio::test]
async fn emptying_gives_the_space_back() {
    let server = plain().await;
    server.create("c").await;
    let bytes = async |server: &Server| {
        server.get("/health").await.ok()["storage_bytes"]
            .as_u64()
            .unwrap()
    };
    let server = server.restarted().await;
    let empty = bytes(&server).await;
    for part in 0..4 {
        let documents = (0..2000).map(|n| json!({"id": format!("{part}-{n}"), "text": "many words ".repeat(50), "embedding": vec![0.5; 128]}));
        server.add("c", documents.collect()).await;
    }
    let server = server.restarted().await;
    let full = bytes(&server).await;
    assert!(full > empty + 5_000_000, "{empty} {full}");
    assert_eq!(
        server.delete("/collections/c/documents/all").await.ok()["count_deleted"],
        8000
    );
    let server = server.restarted().await;
    let after = bytes(&server).await;
    assert!(
        after < empty + (full - empty) / 10,
        "{empty} bytes at first, {full} full, {after} after emptying"
    );
}
