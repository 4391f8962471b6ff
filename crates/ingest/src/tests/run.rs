//! Runs against a real store.

use std::path::Path;
use std::sync::Arc;

use ragstone_core::collection::CollectionName;
use ragstone_core::document::{Document, DocumentId, Metadata};
use ragstone_core::filter::Filter;
use ragstone_core::model::Embedder;
use ragstone_core::storage::{DocumentBatch, Page, Selection, StoredDocument};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::WordModel;
use crate::ledger::Ledger;
use crate::walk::{WalkOptions, Walker};
use crate::{
    Content, Earlier, FileKind, IngestTarget, Ingestion, Input, InputOptions, Progress, ReadOptions, Report,
};
use ragstone_core::models::Models;
use ragstone_search::testing::{Parts, parts};

pub(super) struct Bench {
    pub(super) parts: Parts,
    pub(super) model: Arc<WordModel>,
}

impl Bench {
    pub(super) async fn new() -> Self {
        let model = WordModel::new("1");
        let parts = parts(Models::new(vec![model.clone()], None));
        let bench = Self { parts, model };
        bench.create("c").await;
        bench
    }

    pub(super) async fn create(&self, name: &str) {
        self.create_with(name, json!({"embedding_model": "words"})).await;
    }

    async fn create_with(&self, name: &str, metadata: Value) {
        let name = CollectionName::parse(name).unwrap();
        let metadata = metadata.as_object().unwrap().clone();
        self.parts
            .service
            .store
            .create_collection(&name, metadata)
            .await
            .unwrap();
    }

    pub(super) fn ingestion(&self) -> Ingestion {
        Ingestion {
            service: self.parts.service.clone(),
            records: self.parts.store.clone(),
            ledger: Ledger::new(self.parts.store.clone()),
            read: ReadOptions::default(),
            attempts: 2,
        }
    }

    pub(super) async fn ingest(&self, collection: &str, inputs: Vec<Input>) -> Report {
        let collection = CollectionName::parse(collection).unwrap();
        let ingestion = self.ingestion();
        let prepared = ingestion
            .check(&IngestTarget {
                collection,
                chunk_tokens: Some(20),
            })
            .await
            .unwrap();
        let (sender, receiver) = mpsc::channel(inputs.len().max(1));
        for input in inputs {
            sender.send(input).await.unwrap();
        }
        drop(sender);
        let progress = Arc::new(Progress::default());
        ingestion
            .run(prepared, receiver, Arc::clone(&progress))
            .await
            .unwrap();
        progress.snapshot()
    }

    /// Puts a document into the collection that is not of any source.
    async fn add_by_hand(&self, collection: &str, id: &str) {
        let name = CollectionName::parse(collection).unwrap();
        let document = Document {
            id: DocumentId::parse(id).unwrap(),
            text: "by hand".to_owned(),
            metadata: Metadata::new(),
        };
        let vector = vec![1.0; self.model.info().identity.dimensions];
        let batch = DocumentBatch {
            documents: vec![StoredDocument { document, vector }],
            model: None,
        };
        self.parts.service.store.upsert(&name, batch).await.unwrap();
    }

    pub(super) async fn documents(&self, collection: &str) -> Vec<(String, String)> {
        let name = CollectionName::parse(collection).unwrap();
        let page = Page {
            limit: 10_000,
            offset: 0,
        };
        let page = self
            .parts
            .service
            .store
            .documents(&name, &Filter::everything(), page)
            .await
            .unwrap();
        let mut documents: Vec<_> = page
            .documents
            .into_iter()
            .map(|d| (d.id.to_string(), d.text))
            .collect();
        documents.sort();
        documents
    }
}

pub(super) fn text(source: &str, text: &str) -> Input {
    let kind = FileKind::of_path(Path::new(source)).unwrap();
    Input {
        source: source.into(),
        kind,
        content: Content::Memory(text.as_bytes().to_vec()),
        options: InputOptions::default(),
    }
}

pub(super) fn counts(report: &Report) -> (u64, u64, u64, u64, u64) {
    let d = &report.documents;
    (d.added, d.changed, d.unchanged, d.removed, d.failed)
}

#[tokio::test]
async fn only_what_changed_is_embedded() {
    let bench = Bench::new().await;
    let before = "# A\n\none\n\n# B\n\ntwo\n\n# C\n\nthree\n";
    let report = bench
        .ingest("c", vec![text("a.md", before), text("b.md", "other")])
        .await;
    assert_eq!((counts(&report), bench.model.embedded()), ((2, 0, 0, 0, 0), 4));

    let report = bench
        .ingest("c", vec![text("a.md", before), text("b.md", "other")])
        .await;
    assert_eq!((counts(&report), bench.model.embedded()), ((0, 0, 2, 0, 0), 0));

    // B changes, C goes, D comes.
    let after = "# A\n\none\n\n# B\n\ntwo and more\n\n# D\n\nfour\n";
    let report = bench
        .ingest("c", vec![text("a.md", after), text("b.md", "other")])
        .await;
    assert_eq!((counts(&report), bench.model.embedded()), ((0, 1, 1, 0, 0), 2));
    let chunks = &report.chunks;
    assert_eq!(
        (chunks.added, chunks.changed, chunks.unchanged, chunks.removed),
        (1, 1, 2, 1)
    );
    let ids: Vec<String> = bench.documents("c").await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["a.md#a:0", "a.md#b:0", "a.md#d:0", "b.md:0"]);
}

#[tokio::test]
async fn a_manifest_is_believed_only_while_the_documents_are_there() {
    let bench = Bench::new().await;
    let inputs = || vec![text("a.txt", "one"), text("b.txt", "two")];
    bench.ingest("c", inputs()).await;
    let name = CollectionName::parse("c").unwrap();
    bench.parts.service.store.empty(&name).await.unwrap();
    let report = bench.ingest("c", inputs()).await;
    assert_eq!(counts(&report), (2, 0, 0, 0, 0));
    assert_eq!(bench.documents("c").await.len(), 2);
    // The vectors were still known.
    assert_eq!((bench.model.embedded(), report.chunks.reused), (2, 2));
}

#[tokio::test]
async fn the_same_content_is_embedded_once_and_documents_are_never_merged() {
    let bench = Bench::new().await;
    bench.create("d").await;
    let same: Vec<Input> = (0..700)
        .map(|n| text(&format!("{n}.txt"), "the same everywhere"))
        .collect();
    let report = bench.ingest("c", same).await;
    assert_eq!((counts(&report), bench.model.embedded()), ((700, 0, 0, 0, 0), 1));
    assert_eq!((report.chunks.embedded, report.chunks.reused), (1, 699));
    assert_eq!(bench.documents("c").await.len(), 700);
    bench
        .ingest("d", vec![text("x.txt", "the same everywhere")])
        .await;
    assert_eq!((bench.documents("d").await.len(), bench.model.embedded()), (1, 0));
}

#[tokio::test]
async fn another_version_of_the_model_embeds_everything_again() {
    let mut bench = Bench::new().await;
    bench.ingest("c", vec![text("a.txt", "one")]).await;
    let newer = WordModel::new("2");
    bench.parts.service.models = Arc::new(Models::new(vec![newer.clone()], None));
    let report = bench.ingest("c", vec![text("a.txt", "one")]).await;
    assert_eq!((counts(&report), newer.embedded()), ((0, 1, 0, 0, 0), 1));
    assert_eq!(
        bench
            .ingest("c", vec![text("a.txt", "one")])
            .await
            .documents
            .unchanged,
        1
    );
}

#[tokio::test]
async fn one_bad_file_does_not_stop_the_rest() {
    let bench = Bench::new().await;
    let binary = text("x.txt", "\0\0");
    // It is there when the folder is looked through, and gone when its turn comes.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("gone.md"), "# Gone").unwrap();
    let walker = Walker::new(&[folder.path().display().to_string()], &WalkOptions::default()).unwrap();
    let found = walker.walk().files.remove(0);
    std::fs::remove_file(&found.path).unwrap();
    let vanished = Input {
        content: Content::File(found.path),
        ..text("gone.md", "")
    };
    let refused = text("refused.txt", "this is unembeddable");
    let report = bench
        .ingest(
            "c",
            vec![
                text("a.txt", "one"),
                binary,
                vanished,
                refused,
                text("b.txt", "two"),
            ],
        )
        .await;
    assert_eq!(counts(&report), (2, 0, 0, 0, 3));
    let mut errors: Vec<String> = report
        .errors
        .iter()
        .map(|e| format!("{}: {}", e.source, e.error))
        .collect();
    errors.sort();
    assert_eq!(
        errors,
        [
            "gone.md: it is no longer there",
            "refused.txt: the model could not embed a part of it",
            "x.txt: it is a binary file, not text"
        ]
    );
    let ids: Vec<String> = bench.documents("c").await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids, ["a.txt:0", "b.txt:0"]);
}

#[tokio::test]
async fn rows_are_compared_one_by_one() {
    let bench = Bench::new().await;
    let rows = |range: std::ops::Range<usize>, changed: usize| {
        let line = |n| {
            let word = if n == changed { "changed" } else { "row" };
            format!("{{\"id\":\"r{n}\",\"text\":\"{word} {n}\"}}\n")
        };
        text("x.jsonl", &range.map(line).collect::<String>())
    };
    let report = bench.ingest("c", vec![rows(0..1000, usize::MAX)]).await;
    assert_eq!(
        (counts(&report), bench.model.embedded()),
        ((1000, 0, 0, 0, 0), 1000)
    );
    let report = bench.ingest("c", vec![rows(0..1000, usize::MAX)]).await;
    assert_eq!((counts(&report), bench.model.embedded()), ((0, 0, 1000, 0, 0), 0));
    // 10 rows go, 5 come, one changes.
    let report = bench.ingest("c", vec![rows(10..1005, 500)]).await;
    assert_eq!((counts(&report), bench.model.embedded()), ((5, 1, 989, 10, 0), 6));
    assert_eq!(bench.documents("c").await.len(), 995);
    let same_id_twice = text(
        "y.jsonl",
        "{\"id\":\"a\",\"text\":\"x\"}\n{\"id\":\"a\",\"text\":\"y\"}\n{\"text\":1}\n",
    );
    let report = bench.ingest("c", vec![same_id_twice]).await;
    assert_eq!(counts(&report), (1, 0, 0, 0, 2));
    let part = Input {
        content: Content::Part(
            b"{\"id\":\"r7000\",\"text\":\"new\"}".to_vec(),
            Earlier::default(),
        ),
        ..rows(0..0, 0)
    };
    let report = bench.ingest("c", vec![part]).await;
    assert_eq!(counts(&report), (1, 0, 0, 0, 0));
}

/// However many chunks a row had, and whatever else has an id like theirs.
#[tokio::test]
async fn a_row_that_becomes_shorter_leaves_nothing_behind() {
    let bench = Bench::new().await;
    let row = |words: usize| {
        let long: Vec<String> = (0..words).map(|n| format!("word{n}")).collect();
        let line = json!({"id": "r", "text": long.join(" ")});
        text(
            "x.jsonl",
            &format!("{line}\n{{\"id\":\"other\",\"text\":\"short\"}}\n"),
        )
    };
    let report = bench.ingest("c", vec![row(700)]).await;
    let chunks = report.chunks.added;
    assert!(chunks > 30, "{chunks}");
    bench.add_by_hand("c", "x.jsonl#r:2").await;
    let report = bench.ingest("c", vec![row(5)]).await;
    assert_eq!(counts(&report), (0, 1, 1, 0, 0));
    let left: Vec<String> = bench.documents("c").await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(left, ["x.jsonl#other:0", "x.jsonl#r:0", "x.jsonl#r:2"]);
}

#[tokio::test]
async fn rows_of_two_files_may_have_the_same_ids() {
    let bench = Bench::new().await;
    let files = || {
        ["x", "y"].map(|name| {
            let rows = format!("id,text\n1,first of {name}\n2,second of {name}\n");
            text(&format!("{name}.csv"), &rows)
        })
    };
    let report = bench.ingest("c", files().into()).await;
    assert_eq!(counts(&report), (4, 0, 0, 0, 0));
    let report = bench.ingest("c", files().into()).await;
    assert_eq!(counts(&report), (0, 0, 4, 0, 0));
    let documents = bench.documents("c").await;
    assert_eq!(
        documents[3],
        ("y.csv#2:0".to_owned(), "second of y".to_owned()),
        "{documents:?}"
    );
}

#[tokio::test]
async fn an_empty_document_is_new_once() {
    let bench = Bench::new().await;
    let report = bench.ingest("c", vec![text("empty.md", " \n")]).await;
    assert_eq!(counts(&report), (1, 0, 0, 0, 0));
    assert_eq!(report.warnings[0].error, "it has no text");
    let report = bench.ingest("c", vec![text("empty.md", " \n")]).await;
    assert_eq!(counts(&report), (0, 0, 1, 0, 0));
}

#[tokio::test]
async fn rows_without_text_are_no_documents_and_are_told_of() {
    let bench = Bench::new().await;
    for (source, rows) in [
        ("a.csv", "id,text\n1,\n2,some\n3, \n"),
        (
            "a.jsonl",
            "{\"text\":\"\"}\n{\"text\":\"other\"}\n{\"text\":null}\n",
        ),
    ] {
        let input = || Input {
            kind: FileKind::of_path(std::path::Path::new(source)).unwrap(),
            ..text(source, rows)
        };
        let report = bench.ingest("c", vec![input()]).await;
        assert_eq!(counts(&report), (1, 0, 0, 0, 0), "{source}");
        assert_eq!(
            report.warnings[0].error,
            "2 of its rows have no text and are left out"
        );
        let again = bench.ingest("c", vec![input()]).await;
        assert_eq!(counts(&again), (0, 0, 1, 0, 0), "{source}");
    }
}

#[tokio::test]
async fn what_failed_counts_as_read() {
    let bench = Bench::new().await;
    let binary = Input {
        content: Content::Memory(vec![0; 50]),
        ..text("b.txt", "")
    };
    let report = bench.ingest("c", vec![binary, text("a.txt", "0123456789")]).await;
    assert_eq!((report.bytes, report.documents.failed), (60, 1));
    assert_eq!(report.failed_bytes, 50);
}

#[tokio::test]
async fn a_run_that_is_dropped_is_continued_by_the_next() {
    let bench = Bench::new().await;
    let inputs = || {
        (0..2000)
            .map(|n| text(&format!("{n}.txt"), &format!("text number {n}")))
            .collect::<Vec<_>>()
    };
    for patience in [5, 20, 60] {
        let run = bench.ingest("c", inputs());
        let _ = tokio::time::timeout(std::time::Duration::from_millis(patience), run).await;
    }
    let report = bench.ingest("c", inputs()).await;
    assert_eq!(report.documents.added + report.documents.unchanged, 2000);
    let documents = bench.documents("c").await;
    assert_eq!(documents.len(), 2000);
    assert!(
        documents
            .iter()
            .all(|(id, text)| id.starts_with(&format!("{}.txt", &text[12..])))
    );
    bench.model.embedded();
    assert_eq!(bench.ingest("c", inputs()).await.documents.unchanged, 2000);
    assert_eq!(bench.model.embedded(), 0);
}

#[tokio::test]
async fn vectors_of_text_that_is_gone_are_forgotten() {
    let bench = Bench::new().await;
    bench.ingest("c", vec![text("a.txt", "a secret")]).await;
    bench.ingest("c", vec![text("a.txt", "nothing to see")]).await;
    bench.model.embedded();
    bench.ingest("c", vec![text("b.txt", "a secret")]).await;
    assert_eq!(bench.model.embedded(), 1);
}

#[tokio::test]
async fn removing_a_source_removes_its_documents_and_nothing_else() {
    let bench = Bench::new().await;
    bench
        .ingest("c", vec![text("a.txt", "one"), text("b.txt", "two")])
        .await;
    let (ingestion, name) = (bench.ingestion(), CollectionName::parse("c").unwrap());
    let ingested = ingestion.sources(&name).await.unwrap();
    let sources: Vec<&str> = ingested.iter().map(|i| i.source.as_str()).collect();
    assert_eq!(sources, ["a.txt", "b.txt"]);
    let progress = Progress::default();
    ingestion.remove_source(&name, "a.txt", &progress).await.unwrap();
    assert_eq!(progress.snapshot().documents.removed, 1);
    assert_eq!(bench.documents("c").await.len(), 1);
    bench
        .parts
        .service
        .store
        .delete_documents(&name, Selection::Matching(Filter::everything()))
        .await
        .unwrap();
}

#[tokio::test]
async fn what_does_not_fit_together_is_refused_before_anything_is_read() {
    let bench = Bench::new().await;
    let check = async |name: &str, tokens: Option<usize>| {
        let target = IngestTarget {
            collection: CollectionName::parse(name).unwrap(),
            chunk_tokens: tokens,
        };
        bench
            .ingestion()
            .check(&target)
            .await
            .err()
            .map(|error| error.to_string())
    };
    assert_eq!(check("none", None).await.unwrap(), "Collection 'none' not found");
    assert!(
        check("c", Some(4000))
            .await
            .unwrap()
            .contains("chunk_tokens must be from 16 to 40")
    );
    assert_eq!(check("c", None).await, None);
    bench.create_with("plain", json!({})).await;
    assert!(
        check("plain", None)
            .await
            .unwrap()
            .contains("has no embedding_model")
    );
}

#[tokio::test]
async fn headings_that_read_like_counted_ones_lose_nothing() {
    let bench = Bench::new().await;
    let file = || {
        text(
            "a.md",
            "# Doc\n\n## Install\n\nfirst\n\n## Install\n\nSECOND\n\n## Install 2\n\nTHIRD\n",
        )
    };
    bench
        .ingest("c", vec![file(), text("a.md#doc", "another file")])
        .await;
    assert_eq!(bench.documents("c").await.len(), 5);
    assert_eq!(counts(&bench.ingest("c", vec![file()]).await), (0, 0, 1, 0, 0));
}

#[tokio::test]
async fn sources_are_listed_while_they_have_documents() {
    let bench = Bench::new().await;
    let name = CollectionName::parse("c").unwrap();
    let from = |origin: &str, input: Input| Input {
        options: InputOptions {
            origin: Some(origin.to_owned()),
            ..InputOptions::default()
        },
        ..input
    };
    let inputs = vec![
        from("here:/a.txt", text("a.txt", "one")),
        from("here:/empty.txt", text("empty.txt", "")),
        text("sent.txt", "two"),
    ];
    bench.ingest("c", inputs).await;
    let listed = async || -> Vec<(String, Option<String>, bool)> {
        let sources = bench.ingestion().sources(&name).await.unwrap();
        sources
            .into_iter()
            .map(|s| (s.source, s.origin, s.empty))
            .collect()
    };
    let origin = |path: &str| Some(format!("here:/{path}"));
    assert_eq!(
        listed().await,
        [
            ("a.txt".into(), origin("a.txt"), false),
            ("empty.txt".into(), origin("empty.txt"), true),
            ("sent.txt".into(), None, false),
        ]
    );
    // A file that was moved is at its new path from now on.
    bench
        .ingest("c", vec![from("here:/b/a.txt", text("a.txt", "one"))])
        .await;
    assert_eq!(listed().await[0].1, origin("b/a.txt"));
    bench.parts.service.store.empty(&name).await.unwrap();
    assert_eq!(listed().await, [("empty.txt".into(), origin("empty.txt"), true)]);
}

#[tokio::test]
async fn metadata_is_stored_with_every_chunk_and_the_document_takes_precedence() {
    let bench = Bench::new().await;
    let given = json!({"team": "dome", "lang": "en", "title": "Given", "source": "mine"});
    let with = |input: Input, given: &Value| Input {
        options: InputOptions {
            metadata: given.as_object().unwrap().clone(),
            ..InputOptions::default()
        },
        ..input
    };
    let page = "---\nlang: de\ntags: [a, b]\n---\n# One\n\ntext\n\n# Two\n\ntext\n";
    let inputs = |given: &Value| {
        vec![
            with(text("a.md", page), given),
            with(text("b.txt", "plain"), given),
            with(text("c.csv", "text,lang,size\nrow,fr,3\n"), given),
        ]
    };
    let report = bench.ingest("c", inputs(&given)).await;
    assert_eq!(counts(&report), (3, 0, 0, 0, 0));
    let warned: Vec<&str> = report
        .warnings
        .iter()
        .map(|warning| warning.source.as_str())
        .collect();
    assert_eq!(warned, ["a.md", "b.txt", "c.csv"], "'source' is replaced");
    for (id, title, lang) in [
        ("a.md#one:0", "Given", "de"),
        ("a.md#two:0", "Given", "de"),
        ("b.txt:0", "Given", "en"),
    ] {
        let stored = bench.metadata(id).await;
        assert_eq!(
            (&stored["title"], &stored["lang"]),
            (&json!(title), &json!(lang)),
            "{id}"
        );
        assert_eq!(stored["team"], "dome");
        assert_eq!(stored["source"].as_str(), id.split(['#', ':']).next());
    }
    assert_eq!(bench.metadata("a.md#two:0").await["tags"], json!(["a", "b"]));
    let key = &crate::chunk::content_hash("row")[..16];
    let row = bench.metadata(&format!("c.csv#{key}:0")).await;
    assert_eq!(
        (&row["team"], &row["lang"], &row["size"]),
        (&json!("dome"), &json!("fr"), &json!(3))
    );

    assert_eq!(counts(&bench.ingest("c", inputs(&given)).await), (0, 0, 3, 0, 0));
    let other = json!({"team": "mirror"});
    bench.model.embedded();
    assert_eq!(counts(&bench.ingest("c", inputs(&other)).await), (0, 3, 0, 0, 0));
    assert_eq!(bench.model.embedded(), 0, "the text is the same");
    assert_eq!(bench.metadata("b.txt:0").await["team"], "mirror");
    let large = json!({"note": "n".repeat(70_000)});
    let report = bench
        .ingest("c", vec![with(text("b.txt", "plain"), &large)])
        .await;
    assert_eq!(counts(&report), (0, 0, 0, 0, 1));
}

#[tokio::test]
async fn cells_of_csv_files_have_types_unless_they_are_to_be_text() {
    let bench = Bench::new().await;
    let rows = || text("w.csv", "id,text,temp_max\n1,a,31.5\n2,b,-4\n");
    bench.ingest("c", vec![rows()]).await;
    assert_eq!(bench.metadata("w.csv#2:0").await["temp_max"], json!(-4.0));
    let as_text = Input {
        options: InputOptions {
            csv_as_text: true,
            ..InputOptions::default()
        },
        ..rows()
    };
    assert_eq!(counts(&bench.ingest("c", vec![as_text]).await), (0, 2, 0, 0, 0));
    assert_eq!(bench.metadata("w.csv#2:0").await["temp_max"], "-4");
}
