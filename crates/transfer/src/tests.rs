use std::path::Path;
use std::sync::Arc;

use ragstone_core::model::ModelIdentity;
use ragstone_core::models::Models;
use ragstone_core::service::Service;
use ragstone_core::storage::{DocumentBatch, Selection, Storage, StorageError, StoredDocument};
use ragstone_core::{Document, DocumentId, Metadata};
use ragstone_search::{QueryVectors, StorageBackend};
use ragstone_store::{SqliteStore, StoreOptions};
use serde_json::json;

use super::*;

mod faulty;

use faulty::Faulty;

fn name(text: &str) -> CollectionName {
    CollectionName::parse(text).unwrap()
}

fn store(directory: &Path) -> Arc<SqliteStore> {
    Arc::new(SqliteStore::open(directory, StoreOptions::default()).unwrap())
}

fn backend(store: Arc<SqliteStore>) -> StorageBackend {
    let service = Service {
        store,
        models: Arc::new(Models::default()),
    };
    StorageBackend::new(service, QueryVectors::default())
}

/// More than one batch, of two models and none, with all kinds of metadata.
async fn filled(directory: &Path, documents: usize) -> StorageBackend {
    let store = store(directory);
    let metadata = json!({"embedding_model": "m", "nested": {"a": [1, null]}});
    store
        .create_collection(&name("docs"), metadata.as_object().unwrap().clone())
        .await
        .unwrap();
    for (part, from) in (0..documents).step_by(700).enumerate() {
        let documents = (from..(from + 700).min(documents)).map(|n| StoredDocument {
            document: Document {
                id: DocumentId::parse(format!("d{n}")).unwrap(),
                text: format!("line {n}\nand \"more\" ✓"),
                metadata: json!({"n": n, "third": n as f64 / 3.0, "big": u64::MAX, "tags": ["x", null]})
                    .as_object()
                    .unwrap()
                    .clone(),
            },
            vector: vec![1.0 / 3.0, n as f32 * 0.7, -1e-7],
        });
        let model = (part > 0).then(|| ModelIdentity {
            id: "m".into(),
            version: part.to_string(),
            dimensions: 3,
        });
        let documents = documents.collect();
        store
            .upsert(&name("docs"), DocumentBatch { documents, model })
            .await
            .unwrap();
    }
    backend(store)
}

async fn export(source_of: &dyn Backend, path: &Path) -> Result<Sum, TransferError> {
    let docs = name("docs");
    let head = Head::of(&source_of.collection(&docs).await?);
    let mut source = BackendSource::new(source_of, &docs);
    let (file, _) = ExportFile::begin(path, &head, &mut source).await?;
    export_file(source, file, &TransferProgress::default()).await
}

async fn import(path: &Path, source_of: &dyn Backend) -> Result<Transferred, TransferError> {
    let mut source = FileSource::open(path)?;
    let head = source.head.clone();
    transfer(
        &mut source,
        &head,
        source_of,
        &name("docs"),
        &TransferProgress::default(),
    )
    .await
}

#[tokio::test]
async fn export_import_export_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let from = filled(&at("from"), 2500).await;
    let sum = export(&from, &at("one")).await.unwrap();
    assert_eq!(sum.documents, 2500);
    let to = backend(store(&at("to")));
    let moved = import(&at("one"), &to).await.unwrap();
    assert_eq!((moved.sum, moved.already_there), (sum, 0));
    export(&to, &at("two")).await.unwrap();
    let (one, two) = (
        std::fs::read(at("one")).unwrap(),
        std::fs::read(at("two")).unwrap(),
    );
    assert!(one == two, "the two exports differ");
    assert!(!at("one.part").exists() && !at("one.part.json").exists());
    let again = import(&at("one"), &to).await.unwrap();
    assert_eq!(again.already_there, 2500, "a second import has nothing to do");
}

#[tokio::test]
async fn an_import_that_broke_off_goes_on_without_loss_or_doubles() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let from = filled(&at("from"), 3500).await;
    export(&from, &at("file")).await.unwrap();
    let to = backend(store(&at("to")));
    let broken = import(&at("file"), &Faulty::failing_after(&to, 100, 2)).await;
    assert!(matches!(
        broken,
        Err(TransferError::Backend(BackendError::Storage(
            StorageError::Failed(_)
        )))
    ));
    assert_eq!(to.collection(&name("docs")).await.unwrap().count, 2000);
    let moved = import(&at("file"), &to).await.unwrap();
    assert_eq!((moved.already_there, moved.sum.documents), (2000, 3500));
}

#[tokio::test]
async fn an_export_that_broke_off_leaves_no_file_and_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let from = filled(&at("from"), 3500).await;
    let whole = export(&from, &at("whole")).await.unwrap();
    assert!(
        export(&Faulty::failing_after(&from, 2, 0), &at("file"))
            .await
            .is_err()
    );
    assert!(!at("file").exists() && at("file.part").exists());
    // Something after what was noted, as a crash may leave it.
    let mut part = std::fs::File::options()
        .append(true)
        .open(at("file.part"))
        .unwrap();
    std::io::Write::write_all(&mut part, b"{\"id\": \"half").unwrap();
    assert_eq!(begun(&from, &at("other")).await, Begun::New);
    let goes_on = begun(&from, &at("file")).await;
    assert!(
        matches!(goes_on, Begun::Resumed { documents: 1000.. }),
        "{goes_on:?}"
    );
    assert_eq!(export(&from, &at("file")).await.unwrap(), whole);
    assert_eq!(
        std::fs::read(at("file")).unwrap(),
        std::fs::read(at("whole")).unwrap()
    );
}

async fn begun(source_of: &dyn Backend, path: &Path) -> Begun {
    let docs = name("docs");
    let head = Head::of(&source_of.collection(&docs).await.unwrap());
    let mut source = BackendSource::new(source_of, &docs);
    ExportFile::begin(path, &head, &mut source).await.unwrap().1
}

#[tokio::test]
async fn an_export_of_what_has_changed_since_starts_over() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let docs = name("docs");
    let from = filled(&at("from"), 3500).await;
    let first = ExportRange {
        after: None,
        limit: 3,
    };
    let first = from.export(&docs, first).await.unwrap().documents;
    let mut changed = first[1].clone();
    changed.document.text = "another text in the same place".into();
    for change in ["replaced", "deleted", "made anew"] {
        let file = at(change);
        assert!(export(&Faulty::failing_after(&from, 2, 0), &file).await.is_err());
        match change {
            "replaced" => from.import(&docs, vec![changed.clone()]).await.unwrap(),
            "deleted" => {
                let gone = Selection::Ids(vec![first[2].document.id.clone()]);
                from.service().store.delete_documents(&docs, gone).await.unwrap();
            }
            _ => {
                let metadata = from.collection(&docs).await.unwrap().metadata;
                from.delete_collection(&docs).await.unwrap();
                from.create_collection(&docs, metadata).await.unwrap();
                from.import(&docs, first.clone()).await.unwrap();
            }
        }
        assert_eq!(begun(&from, &file).await, Begun::Restarted, "{change}");
        let sum = export(&from, &file).await.unwrap();
        assert_eq!(sum, export(&from, &at("whole")).await.unwrap(), "{change}");
        assert_eq!(sum.documents, from.collection(&docs).await.unwrap().count);
    }
}

/// What is added while an export reads belongs to it; after a deletion it is of no state at all.
#[tokio::test]
async fn an_export_has_as_many_documents_as_its_collection() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let docs = name("docs");
    let from = filled(&at("from"), 10).await;
    let more = filled(&at("more"), 12).await;
    let range = ExportRange {
        after: None,
        limit: 12,
    };
    let more = more.export(&docs, range).await.unwrap().documents;
    let mut source = BackendSource::new(&from, &docs);
    assert_eq!(source.next_or_grown(0).await.unwrap().len(), 10);
    from.import(&docs, more[10..].to_vec()).await.unwrap();
    assert_eq!(source.next_or_grown(10).await.unwrap().len(), 2);
    assert!(source.next_or_grown(12).await.unwrap().is_empty());
    let gone = Selection::Ids(vec![more[0].document.id.clone()]);
    from.service().store.delete_documents(&docs, gone).await.unwrap();
    let refusal = source.next_or_grown(12).await.unwrap_err().to_string();
    assert!(
        refusal.contains("12 documents were read, and it has 11 now"),
        "{refusal}"
    );
}

#[tokio::test]
async fn a_target_may_round_vectors_if_it_says_so_and_only_a_little() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let from = filled(&at("from"), 1500).await;
    let sum = export(&from, &at("file")).await.unwrap();
    let to = backend(store(&at("to")));
    let broken = Faulty::failing_after(&to, 100, 1);
    let broken = Faulty::rounding(&broken, 1e-7);
    assert!(import(&at("file"), &broken).await.is_err());
    let rounding = Faulty::rounding(&to, 1e-7);
    let moved = import(&at("file"), &rounding).await.unwrap();
    assert_eq!((moved.sum, moved.already_there), (sum, 1000));
    let elsewhere = backend(store(&at("elsewhere")));
    let worse = Faulty::rounding(&elsewhere, 1e-3);
    let refusal = import(&at("file"), &worse).await.unwrap_err().to_string();
    assert!(refusal.contains("number 1, \"d0\", is not the same"), "{refusal}");
}

#[tokio::test]
async fn what_is_there_and_different_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let from = filled(&at("from"), 10).await;
    export(&from, &at("file")).await.unwrap();
    let more = filled(&at("more"), 11).await;
    let refusal = import(&at("file"), &more).await.unwrap_err().to_string();
    assert!(refusal.contains("more than the 10 documents"), "{refusal}");
    let other = filled(&at("other"), 5).await;
    let page = ExportRange {
        after: None,
        limit: 3,
    };
    let mut changed = other.export(&name("docs"), page).await.unwrap().documents;
    changed[2].document.text.push('!');
    other.import(&name("docs"), changed).await.unwrap();
    let refusal = import(&at("file"), &other).await.unwrap_err().to_string();
    assert!(refusal.contains("number 3, \"d2\", is not the same"), "{refusal}");
    assert_eq!(other.collection(&name("docs")).await.unwrap().count, 5);
    let named = backend(store(&at("named")));
    named
        .create_collection(&name("docs"), Metadata::new())
        .await
        .unwrap();
    let refusal = import(&at("file"), &named).await.unwrap_err().to_string();
    assert!(refusal.contains("other metadata"), "{refusal}");
}

#[tokio::test]
async fn damaged_files_are_refused_with_the_line_at_fault() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let from = filled(&at("from"), 5).await;
    export(&from, &at("file")).await.unwrap();
    let text = std::fs::read_to_string(at("file")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let with = |at: usize, line: &str| {
        let mut lines = lines.clone();
        lines[at] = line;
        lines.join("\n")
    };
    let vector = lines[3].replace("\"norm\":", "\"norm\":-");
    let long = lines[3].replace("\"embedding\":[", "\"embedding\":[7,");
    let less: Vec<&str> = lines[..3].iter().chain(&lines[4..]).copied().collect();
    let cases = [
        (
            lines[..6].join("\n"),
            "last line, which counts the documents, is missing",
        ),
        (String::new(), "bad is empty"),
        (
            with(0, "{}"),
            "is not an export: its first line must be one such as",
        ),
        ("name,price\nx,1\n".to_owned(), "is not an export: its first line"),
        (
            format!("{}\n{}", lines.join("\n"), lines[1]),
            "there is more after the line that counts the documents",
        ),
        (
            with(6, "{\"end\": {\"documents\": \"5\"}}"),
            "line 7: the line that counts the documents must be one such as",
        ),
        (
            with(0, &lines[0].replace("export\":1", "export\":2")),
            "format version 2",
        ),
        (
            with(3, "{\"id\": 3}"),
            "line 4: not a document: invalid type: integer `3`, expected a string",
        ),
        (
            with(3, "{\"id\": \"3\"}"),
            "line 4: not a document: missing field `text`",
        ),
        (
            with(3, "nonsense"),
            "line 4: this is not JSON (expected ident at column 2)",
        ),
        (with(3, &vector), "line 4: 'norm' must be"),
        (
            with(3, &long),
            "line 4: an embedding beside a 'norm' must be of length one",
        ),
        (
            less.join("\n"),
            "the source is damaged: it says that it has 5 documents",
        ),
        (
            with(3, &lines[3].replace("line 2", "line 7")),
            "the source is damaged",
        ),
        (
            with(
                0,
                &lines[0].replace("\"collection\":\"docs\"", "\"collection\":\"dogs\""),
            ),
            "the source is damaged: it says that its first line has the checksum",
        ),
    ];
    for (number, (content, expected)) in cases.iter().enumerate() {
        std::fs::write(at("bad"), content).unwrap();
        let to = backend(store(&at(&format!("to{number}"))));
        let refusal = import(&at("bad"), &to).await.unwrap_err().to_string();
        assert!(refusal.contains(expected), "{expected}: {refusal}");
        // A collection that was made for it goes with it.
        assert!(to.collections().await.unwrap().is_empty(), "{expected}");
    }
    // What was there stays, and the message says what came to it.
    let there = filled(&at("there"), 2).await;
    std::fs::write(at("bad"), less.join("\n")).unwrap();
    let mut source = FileSource::open(&at("bad")).unwrap();
    let head = source.head.clone();
    let docs = name("docs");
    let moved = transfer(&mut source, &head, &there, &docs, &TransferProgress::default()).await;
    let refusal = moved.unwrap_err().to_string();
    assert!(
        refusal.contains("2 documents were stored in collection 'docs'"),
        "{refusal}"
    );
    assert_eq!(there.collection(&docs).await.unwrap().count, 4);
}

#[tokio::test]
async fn lines_of_ones_own_need_neither_lengths_nor_checksums() {
    let folder = tempfile::tempdir().unwrap();
    let at = |part: &str| folder.path().join(part);
    let lines = [
        json!({"ragstone_export": 1, "collection": "docs"}),
        json!({"id": "a", "text": "the \"end\"", "embedding": [3.0, 4.0]}),
        json!({"id": "b", "text": "", "metadata": {"end": {"documents": 1}}, "embedding": [1.0, 0.0]}),
        json!({"end": {"documents": 2}}),
    ];
    let text: Vec<String> = lines.iter().map(ToString::to_string).collect();
    std::fs::write(at("own"), text.join("\n")).unwrap();
    assert_eq!(verify_file(&at("own")).unwrap().documents, 2);
    let to = backend(store(&at("to")));
    assert_eq!(import(&at("own"), &to).await.unwrap().sum.documents, 2);
    std::fs::write(
        at("own"),
        text.join("\n").replace("\"documents\":2", "\"documents\":3"),
    )
    .unwrap();
    let refusal = verify_file(&at("own")).unwrap_err().to_string();
    assert!(
        refusal.contains("says that it has 3 documents, and has 2"),
        "{refusal}"
    );
}
