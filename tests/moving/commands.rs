use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use super::{document, fill, ragstone, text};
use crate::support::{Setup, fixtures};

#[tokio::test]
async fn export_import_and_export_again_gives_the_same_bytes_with_and_without_a_server() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 2300).await;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (url, data) = (server.url(""), server.setup().data_dir());
    let exported = ragstone(&["export", "docs", text(&at("served.jsonl")), "--url", &url]).await;
    let line = exported.succeeded();
    assert!(line.contains("docs: exported 2300 documents"), "{line}");

    // The store is locked while the server runs, and the error says what to do.
    let beside = ragstone(&["export", "docs", text(&at("no")), "--data-dir", text(&data)]).await;
    let refusal = beside.failed_with(1);
    assert!(refusal.contains("in use by another"), "{refusal}");
    assert!(refusal.contains("name the server"), "{refusal}");
    assert!(!at("no").exists());

    let target = Setup::without_models().start().await;
    let imported = ragstone(&["import", text(&at("served.jsonl")), "--url", &target.url("")]).await;
    let line = imported.succeeded();
    assert!(line.contains("docs: imported 2300 documents"), "{line}");
    let shown = target.get("/collections/docs").await.ok();
    assert_eq!(shown, server.get("/collections/docs").await.ok());

    let target_data = target.setup().data_dir();
    let _keep = target.setup().clone();
    target.stop();
    let direct_file = at("direct.jsonl");
    let direct = [
        "export",
        "docs",
        text(&direct_file),
        "--data-dir",
        text(&target_data),
    ];
    ragstone(&direct).await.succeeded();
    let bytes = std::fs::read(at("served.jsonl")).unwrap();
    assert!(
        bytes == std::fs::read(at("direct.jsonl")).unwrap(),
        "the exports differ"
    );

    let piped = ragstone(&["export", "docs", "-", "--data-dir", text(&target_data)]).await;
    assert!(
        piped.succeeded().as_bytes() == bytes,
        "the pipe differs from the file"
    );
    let lines: Vec<Value> = piped
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!((lines.len(), &lines[0]["collection"]), (2302, &json!("docs")));
    assert_eq!(
        (&lines[0]["dimensions"], &lines[2301]["end"]["documents"]),
        (&json!(4), &json!(2300))
    );
    assert_eq!(lines[8]["metadata"], document(7)["metadata"]);
}

#[tokio::test]
async fn what_is_no_file_is_not_replaced_by_an_export() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 5).await;
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let refused = ragstone(&["export", "docs", text(&socket), "--url", &server.url("")]).await;
    assert!(refused.failed_with(1).contains("not a file"), "{refused:?}");
    assert!(!std::fs::metadata(&socket).unwrap().is_file());
}

#[tokio::test]
async fn an_import_can_be_renamed_piped_and_repeated_and_leaves_other_collections_alone() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 5).await;
    let url = server.url("");
    let exported = ragstone(&["export", "docs", "-", "--url", &url]).await;
    let export = exported.succeeded().to_owned();
    let import = |args: &'static [&'static str]| {
        let setup = Setup::command(&["import", "-", "--url", &url]);
        let setup = args.iter().fold(setup, |setup, arg| setup.arg(*arg));
        let mut command = setup.build();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let written = child.stdin.take().unwrap().write_all(export.as_bytes());
        written.unwrap();
        child.wait_with_output().unwrap()
    };
    let renamed = import(&["--collection", "copy"]);
    assert!(renamed.status.success(), "{renamed:?}");
    let again = import(&["--collection", "copy"]);
    let said = String::from_utf8(again.stdout).unwrap();
    assert!(said.contains("5 of them by an earlier run"), "{said}");
    assert_eq!(server.get("/collections/copy").await.ok()["count"], 5);

    // Documents before the damaged line are removed with the new collection.
    let damaged = export.replace("Document 4", "Document 5");
    let import_damaged = Setup::command(&["import", "-", "--collection", "damaged", "--url", &url]);
    let mut child = import_damaged.build();
    let child = child.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.unwrap();
    let written = child.stdin.take().unwrap().write_all(damaged.as_bytes());
    written.unwrap();
    let refused = child.wait_with_output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(
        said.contains("the source is damaged") && said.contains("Nothing of it was kept"),
        "{said}"
    );
    server.get("/collections/damaged").await.refused(404);

    server.create("other").await;
    server.add("other", vec![document(1)]).await;
    let refused = import(&["--collection", "other"]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(said.contains("name a collection that is not there"), "{said}");
    assert_eq!(server.get("/collections/other").await.ok()["count"], 1);
    let missing = ragstone(&["export", "nothing", "-", "--url", &url]).await;
    assert!(
        missing.failed_with(1).contains("'nothing' not found"),
        "{missing:?}"
    );
}

#[tokio::test]
async fn a_damaged_file_is_refused_whole() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 1500).await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file.jsonl");
    let url = server.url("");
    ragstone(&["export", "docs", text(&file), "--url", &url])
        .await
        .succeeded();
    let whole = std::fs::read_to_string(&file).unwrap();
    for (damaged, expected) in [
        (whole[..whole.len() / 2].to_owned(), "is not a whole export"),
        (
            whole.replace("Document 1400:", "Document 1401:"),
            "the source is damaged",
        ),
        (whole.replace("{\"id\":\"d1400\"", "{\"id\":1400"), "line 1402: "),
    ] {
        std::fs::write(&file, damaged).unwrap();
        let refused = ragstone(&["import", text(&file), "--collection", "copy", "--url", &url]).await;
        let said = refused.failed_with(1);
        assert!(said.contains(expected), "{expected}: {said}");
        server.get("/collections/copy").await.refused(404);
    }
}

#[tokio::test]
async fn a_copy_brings_all_collections_and_goes_on_where_it_was() {
    let server = Setup::without_models().start().await;
    fill(&server, "first", 1200).await;
    fill(&server, "second", 3).await;
    server.create("empty").await;
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("data");
    let url = server.url("");
    let only = [
        "copy",
        "--from",
        &url,
        "--to",
        text(&target),
        "--collection",
        "second",
    ];
    ragstone(&only).await.succeeded();
    // The next run copies only the new document.
    server.add("second", vec![document(3)]).await;
    let all = ragstone(&["copy", "--from", &url, "--to", text(&target)]).await;
    let said = all.succeeded();
    for part in [
        "empty: copied 0",
        "first: copied 1200",
        "second: copied 4",
        "3 of them by an earlier run",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let sqlite = format!("sqlite://{}", text(&target));
    let back = Setup::without_models().start().await;
    ragstone(&["copy", "--from", &sqlite, "--to", &back.url("")])
        .await
        .succeeded();
    assert_eq!(
        back.get("/collections").await.ok(),
        server.get("/collections").await.ok()
    );
    let bad = ragstone(&["copy", "--from", "ftp://u:hunter2@h/x", "--to", &url]).await;
    let said = bad.failed_with(78);
    assert!(
        said.contains("is not a store") && !said.contains("hunter2"),
        "{said}"
    );
    // A URL without a scheme.
    let bad = Setup::command(&["serve", "--no-embeddings", "--store", "u:hunter2@h/x"]).run();
    let said = bad.failed_with(78);
    assert!(
        said.contains("is not a store") && !said.contains("hunter2"),
        "{said}"
    );
}

#[tokio::test]
async fn a_file_with_an_id_twice_is_refused_and_leaves_nothing() {
    let desk = Setup::command(&[]);
    let lines = [
        json!({"ragstone_export": 1, "collection": "twice", "dimensions": 2}),
        json!({"id": "1", "text": "a", "embedding": [3, 4]}),
        json!({"id": "1", "text": "b", "embedding": [1, 0]}),
        json!({"end": {"documents": 2}}),
    ];
    let lines = lines.map(|line| format!("{line}\n")).concat();
    let path = desk.file("twice.jsonl", &lines);
    let server = Setup::without_models().start().await;
    let refused = ragstone(&["import", text(&path), "--url", &server.url("")]).await;
    let said = refused.failed_with(1);
    assert!(
        said.contains("line 3") && said.contains("the same id: \"1\""),
        "{said}"
    );
    assert_eq!(
        server.get("/collections").await.ok()["collections"],
        json!([]),
        "nothing is left"
    );
}

/// The collection keeps its model, so that a text query still works.
#[tokio::test]
async fn text_queries_work_after_a_move() {
    let setup = || Setup::serve().embeddings(&[("tiny", &fixtures::model("bert"))]);
    let server = setup().start().await;
    let create = json!({"name": "docs", "embedding_model": "tiny"});
    server.post("/collections", create).await.ok();
    let texts = ["a quick brown fox", "numbers such as 42", "the lazy dog"];
    let documents = texts.iter().map(|text| json!({"id": text, "text": text}));
    server.add("docs", documents.collect()).await;
    let target = setup().start().await;
    let (from, to) = (server.url(""), target.url(""));
    ragstone(&["copy", "--from", &from, "--to", &to])
        .await
        .succeeded();
    for mode in ["dense", "keyword", "hybrid"] {
        let query = json!({"query": "quick fox", "mode": mode, "top_k": 3});
        let path = "/collections/docs/query";
        let (before, after) = (
            server.post(path, query.clone()).await,
            target.post(path, query).await,
        );
        assert_eq!(before.ok()["results"], after.ok()["results"], "{mode}");
    }
    let page = target.get("/collections/docs/export").await.ok();
    assert_eq!(page["documents"][0]["model"]["id"], "tiny");
}

#[tokio::test]
async fn what_is_read_must_be_there_and_is_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for place in ["nowhere", "sqlite://nowhere"] {
        let place = place.replace("nowhere", text(&at("nowhere")));
        let copied = ragstone(&["copy", "--from", &place, "--to", text(&at("target"))]).await;
        let said = copied.failed_with(1);
        assert!(
            said.contains("there is no store at") && said.contains("nowhere"),
            "{said}"
        );
    }
    let exported = ragstone(&[
        "export",
        "c",
        text(&at("file")),
        "--data-dir",
        text(&at("nowhere")),
    ])
    .await;
    assert!(
        exported.failed_with(1).contains("there is no store at"),
        "{exported:?}"
    );
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let server = Setup::without_models().start().await;
    let url = server.url("");
    let target = at("target");
    let copy = ["copy", "--from", &url, "--to", text(&target)];
    let missing = ragstone(&[&copy[..], &["--collection", "none"]].concat()).await;
    assert!(missing.failed_with(1).contains("'none' not found"), "{missing:?}");
    let nothing = ragstone(&copy).await;
    assert!(
        nothing.succeeded().contains("no collections to copy"),
        "{nothing:?}"
    );
    assert!(!target.exists());
    let slashed = format!("{url}/");
    for (from, to) in [(text(folder.path()), text(&at("."))), (&url, &slashed)] {
        let same = ragstone(&["copy", "--from", from, "--to", to]).await;
        assert!(same.failed_with(1).contains("are the same place"), "{same:?}");
    }
    let gone = server.url("");
    server.stop();
    let away = ragstone(&["export", "c", "-", "--url", &gone]).await;
    let said = away.failed_with(1);
    assert!(said.contains(&format!("no server answers at {gone}")), "{said}");
}

#[tokio::test]
async fn a_collection_that_cannot_be_copied_does_not_keep_the_others() {
    let server = Setup::without_models().start().await;
    for name in ["a", "b", "c"] {
        fill(&server, name, 3).await;
    }
    let target = Setup::without_models().start().await;
    target.create("b").await;
    let copied = ragstone(&["copy", "--from", &server.url(""), "--to", &target.url("")]).await;
    let said = copied.failed_with(1);
    assert!(
        said.contains("b: not copied: collection 'b' is there and has other metadata"),
        "{said}"
    );
    assert!(said.contains("1 of 3 collections were not copied: b"), "{said}");
    assert_eq!(target.get("/collections/c").await.ok()["count"], 3);
}

#[tokio::test]
async fn a_copy_knows_the_keys_of_both_servers_and_says_where_they_come_from() {
    let keyed = |key: &str| Setup::without_models().env("RAGSTONE_API_KEYS", key);
    let (from, to) = tokio::join!(keyed("from-key").start(), keyed("to-key").start());
    let copy = |keys: &[(&str, &str)]| {
        let setup = Setup::command(&["copy", "--from", &from.url(""), "--to", &to.url("")]);
        let setup = keys
            .iter()
            .fold(setup, |setup, (name, key)| setup.env(name, *key));
        setup.run()
    };
    let lacking = copy(&[("RAGSTONE_TO_API_KEY", "to-key")]);
    let said = lacking.failed_with(1);
    assert!(
        said.contains("RAGSTONE_FROM_API_KEY or RAGSTONE_API_KEY"),
        "{said}"
    );
    let both = copy(&[
        ("RAGSTONE_API_KEY", "from-key"),
        ("RAGSTONE_TO_API_KEY", "to-key"),
    ]);
    assert!(both.succeeded().contains("no collections"), "{both:?}");
    let exported = ragstone(&["export", "c", "-", "--url", &from.url("")]).await;
    assert!(
        exported.failed_with(1).contains("RAGSTONE_API_KEY"),
        "{exported:?}"
    );
}
