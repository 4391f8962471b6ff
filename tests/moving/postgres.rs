//! Copies to Postgres and back.

use super::{fill, ragstone, text};
use crate::support::Setup;
use crate::support::postgres::new_database;

#[tokio::test]
async fn collections_are_copied_there_exported_imported_and_copied_back() {
    let source = Setup::serve_embedded().arg("--no-embeddings").start().await;
    fill(&source, "moved", 1300).await;
    let (from, store) = (source.url(""), new_database());
    let there = ragstone(&["copy", "--from", &from, "--to", &store]).await;
    assert!(there.succeeded().contains("moved: copied 1300"), "{there:?}");
    let again = ragstone(&["copy", "--from", &from, "--to", &store]).await;
    let said = again.succeeded();
    assert!(said.contains("1300 of them by an earlier run"), "{said}");

    let folder = tempfile::tempdir().unwrap();
    let exported = |name: &str| folder.path().join(name);
    let (first, second, third) = (exported("1.jsonl"), exported("2.jsonl"), exported("3.jsonl"));
    let export = ["export", "moved", text(&first), "--store", &store];
    ragstone(&export).await.succeeded();
    let other = new_database();
    ragstone(&["import", text(&first), "--store", &other])
        .await
        .succeeded();
    let export = ["export", "moved", text(&second), "--store", &other];
    ragstone(&export).await.succeeded();
    let back = folder.path().join("data");
    ragstone(&["copy", "--from", &other, "--to", text(&back)])
        .await
        .succeeded();
    let export = ["export", "moved", text(&third), "--data-dir", text(&back)];
    ragstone(&export).await.succeeded();

    let bytes = |path| std::fs::read(path).unwrap();
    let whole = bytes(&first);
    assert_eq!(whole.iter().filter(|byte| **byte == b'\n').count(), 1301 + 1);
    assert!(whole == bytes(&second), "another database gives other bytes");
    assert!(whole == bytes(&third), "the embedded store gives other bytes");
}
