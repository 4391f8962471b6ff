//! Rows: what is kept of them, and when they are embedded again.

use std::io::{Cursor, Write};
use std::sync::Arc;
use std::time::Duration;

use ragstone_core::CollectionName;
use ragstone_core::document::DocumentId;
use ragstone_core::filter::Filter;
use ragstone_core::storage::Page;
use serde_json::{Value, json};

use super::WordModel;
use super::run::{Bench, counts, text};
use crate::{Content, Earlier, Input};
use ragstone_core::models::Models;

fn streamed(rows: &str) -> Input {
    Input {
        content: Content::Stream(Box::new(Cursor::new(rows.as_bytes().to_vec()))),
        ..text("stdin.jsonl", "")
    }
}

fn part(rows: &str, lines: u64) -> Input {
    let earlier = Earlier {
        lines,
        ..Earlier::default()
    };
    Input {
        content: Content::Part(rows.as_bytes().to_vec(), earlier),
        ..text("parts.jsonl", "")
    }
}

impl Bench {
    pub(super) async fn metadata(&self, id: &str) -> Value {
        let name = CollectionName::parse("c").unwrap();
        let id = DocumentId::parse(id).unwrap();
        let found = self.parts.service.store.document(&name, &id).await.unwrap();
        Value::Object(found.unwrap().metadata)
    }
}

#[tokio::test]
async fn rows_of_streams_and_parts_are_embedded_again_by_another_version() {
    let mut bench = Bench::new().await;
    let first = "{\"id\":\"a\",\"text\":\"one\"}\n";
    let second = "{\"id\":\"b\",\"text\":\"two\"}\n";
    let third = "{\"id\":\"c\",\"text\":\"three\"}\n";
    let inputs = || vec![streamed(first), part(first, 0), part(second, 1)];
    bench.ingest("c", inputs()).await;
    bench.ingest("c", vec![streamed(third)]).await;
    let again = bench.ingest("c", inputs()).await;
    assert_eq!(counts(&again), (0, 0, 3, 0, 0));

    let newer = WordModel::new("2");
    bench.parts.service.models = Arc::new(Models::new(vec![newer.clone()], None));
    let report = bench.ingest("c", inputs()).await;
    assert_eq!((counts(&report), newer.embedded()), ((0, 3, 0, 0, 0), 2));
    assert_eq!(counts(&bench.ingest("c", inputs()).await), (0, 0, 3, 0, 0));
    // Rows of an earlier stream still have vectors of the former version.
    let report = bench.ingest("c", vec![streamed(third)]).await;
    assert_eq!((counts(&report), newer.embedded()), ((0, 1, 0, 0, 0), 1));
    assert_eq!(
        counts(&bench.ingest("c", vec![streamed(third)]).await),
        (0, 0, 1, 0, 0)
    );
}

#[tokio::test]
async fn a_row_with_too_much_metadata_fails_alone() {
    let bench = Bench::new().await;
    let rows = [
        json!({"id": "good", "text": "one", "note": "n".repeat(60_000)}),
        json!({"id": "bad", "text": "two", "note": "n".repeat(70_000)}),
        json!({"id": "long", "text": "t ".repeat(70_000)}),
        json!({"id": "i".repeat(513), "text": "three"}),
        json!({"id": "often", "text": "t ".repeat(40_000), "note": "n".repeat(60_000)}),
    ];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let report = bench.ingest("c", vec![text("x.jsonl", &lines)]).await;
    assert_eq!(counts(&report), (2, 0, 0, 0, 3));
    let problems: Vec<&str> = report.errors.iter().map(|error| error.error.as_str()).collect();
    assert!(
        problems[0].starts_with("line 2: its metadata has 70"),
        "{problems:?}"
    );
    assert_eq!(
        problems[1],
        "line 4: its 'id' has 513 bytes; at most 512 are allowed"
    );
    assert!(
        problems[2].starts_with("line 5: ") && problems[2].contains("each of its 2000 chunks"),
        "{problems:?}"
    );
    let table = format!("id,text,note\n1,short,{}\n2,short,note\n", "n".repeat(70_000));
    let report = bench.ingest("c", vec![text("x.csv", &table)]).await;
    assert_eq!(counts(&report), (1, 0, 0, 0, 1));
}

#[tokio::test]
async fn titles_of_rows_are_cut_and_may_be_in_their_metadata() {
    let bench = Bench::new().await;
    let rows = [
        json!({"id": "a", "text": "one", "title": "ä".repeat(1000)}),
        json!({"id": "b", "text": "two", "metadata": {"title": "Own title", "lang": "en"}}),
        json!({"id": "c", "text": "three", "metadata": {"source": "mine", "position": "left"}}),
        json!({"id": "d", "text": "four", "doc_type": "letter"}),
        json!({"text": "five", "row_id": "mine"}),
    ];
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let report = bench.ingest("c", vec![text("x.jsonl", &lines)]).await;
    assert_eq!(counts(&report), (5, 0, 0, 0, 0));
    let cut = bench.metadata("x.jsonl#a:0").await;
    assert_eq!(cut["title"], "ä".repeat(256));
    assert_eq!(cut["section_path"], json!(["ä".repeat(256)]));
    let own = bench.metadata("x.jsonl#b:0").await;
    assert_eq!(
        (&own["title"], &own["section_path"], &own["lang"]),
        (&json!("Own title"), &json!(["Own title"]), &json!("en"))
    );
    assert_eq!(report.warnings.len(), 1, "{:?}", report.warnings);
    let warning = &report.warnings[0].error;
    assert!(warning.contains(": doc_type, position, source."), "{warning}");
}

#[tokio::test]
async fn an_id_that_comes_again_is_reported_with_its_line() {
    let bench = Bench::new().await;
    let row = "{\"id\":\"1\",\"text\":\"one\"}\n";
    let report = bench.ingest("c", vec![part(&format!("{row}\n{row}"), 10)]).await;
    assert_eq!(counts(&report), (1, 0, 0, 0, 1));
    assert_eq!(report.errors[0].error, "line 13: the id '1' comes more than once");
}

#[tokio::test]
async fn long_headings_are_cut_where_chunks_carry_them() {
    let bench = Bench::new().await;
    let heading = "long ".repeat(1000);
    let words = "word ".repeat(100);
    let page =
        format!("# {heading}\n\n{words}\n\n## {heading} one\n\n{words}\n\n## {heading} two\n\n{words}\n");
    bench.ingest("c", vec![text("x.md", &page)]).await;
    let name = CollectionName::parse("c").unwrap();
    let page = Page {
        limit: 1000,
        offset: 0,
    };
    let everything = Filter::everything();
    let found = bench
        .parts
        .service
        .store
        .documents(&name, &everything, page)
        .await;
    let documents = found.unwrap().documents;
    let mut sections: Vec<&str> = Vec::new();
    for document in &documents {
        let title = document.metadata["title"].as_str().unwrap();
        assert_eq!(title.len(), 512);
        for heading in document.metadata["section_path"].as_array().unwrap() {
            assert_eq!(heading.as_str().unwrap().len(), 512);
        }
        sections.push(document.metadata["section_id"].as_str().unwrap());
    }
    sections.sort_unstable();
    sections.dedup();
    assert_eq!(sections.len(), 3, "{sections:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_came_do_not_wait_for_the_end_of_the_stream() {
    let bench = Bench::new().await;
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(b"{\"id\":\"a\",\"text\":\"one\"}\n").unwrap();
    let input = Input {
        content: Content::Stream(Box::new(reader)),
        ..text("stdin.jsonl", "")
    };
    let until_stored = async {
        while bench.documents("c").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let stored = async {
        let stored = tokio::time::timeout(Duration::from_secs(60), until_stored).await;
        drop(writer);
        stored.is_ok()
    };
    let (report, stored) = tokio::join!(bench.ingest("c", vec![input]), stored);
    assert!(stored, "it was stored only at the end");
    assert_eq!(counts(&report), (1, 0, 0, 0, 0));
}
