use std::io::Write;
use std::process::Stdio;

use serde_json::{Value, json};

use super::{Desk, counts, report};

fn handbook(desk: &Desk) {
    desk.write(
        "docs/a.md",
        "# Dome\n\nOpens at dusk.\n\n## Rain\n\nClose it at once.\n",
    );
    desk.write("docs/sub/b.txt", "Plain text about mirrors.");
    desk.write(
        "docs/rows.jsonl",
        "{\"id\":\"r1\",\"text\":\"a row\"}\n{\"id\":\"r2\",\"text\":\"another\"}\n",
    );
    desk.write("docs/picture.png", [0u8; 16]);
    desk.write("docs/.hidden.md", "not this");
}

#[tokio::test]
async fn a_folder_is_ingested_and_only_changes_the_second_time() {
    let desk = Desk::new();
    handbook(&desk);
    let first = desk.here(&["docs"]);
    assert_eq!(first.code, Some(0), "{first:?}");
    assert_eq!(counts(&report(&first)), [4, 0, 0, 0, 0]);
    assert_eq!(report(&first)["skipped"], 1);
    let again = report(&desk.here(&["docs"]));
    assert_eq!(
        (counts(&again), &again["chunks"]["embedded"]),
        ([0, 0, 4, 0, 0], &json!(0))
    );

    desk.write(
        "docs/a.md",
        "# Dome\n\nOpens at dusk.\n\n## Rain\n\nClose it within a minute.\n",
    );
    desk.remove("docs/sub/b.txt");
    let changed = report(&desk.here(&["docs"]));
    assert_eq!(
        (counts(&changed), &changed["chunks"]["embedded"]),
        ([0, 1, 2, 0, 0], &json!(1))
    );
    assert_eq!(counts(&report(&desk.here(&["docs", "--prune"]))), [0, 0, 3, 1, 0]);

    let server = desk.server().start().await;
    let documents = server.get("/collections/c/documents").await.ok();
    let mut ids: Vec<&str> = crate::support::ids(&documents["documents"]);
    ids.sort_unstable();
    assert_eq!(
        ids,
        ["a.md#dome:0", "a.md#rain:0", "rows.jsonl#r1:0", "rows.jsonl#r2:0"]
    );
    let rain = server.find("c", json!({"section_id": "a.md#rain"})).await.ok();
    let rows = server.find("c", json!({"row_id": "r2"})).await.ok();
    assert_eq!(rows["documents"][0]["metadata"]["title"], "rows");
    let metadata = &rain["documents"][0]["metadata"];
    assert_eq!(metadata["section_path"], json!(["Dome", "Rain"]));
    assert_eq!(
        (&metadata["title"], &metadata["doc_type"]),
        (&json!("Dome"), &json!("paragraph"))
    );
    // The collection was made with the model, so it can be searched at once.
    let found = server
        .post(
            "/collections/c/query",
            json!({"query": "rain", "expand": "chapter_id"}),
        )
        .await
        .ok();
    assert!(!found["results"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn a_server_that_has_the_store_open_is_named_as_the_way() {
    let desk = Desk::new();
    handbook(&desk);
    let server = desk.server().start().await;
    let refused = desk.here(&["docs"]);
    assert!(refused.failed_with(1).contains("give --url"), "{refused:?}");

    let url = server.url("");
    let sent = desk.command(&["docs", "--url", &url]).run();
    assert_eq!(sent.code, Some(0), "{sent:?}");
    assert_eq!(counts(&report(&sent)), [4, 0, 0, 0, 0]);
    desk.remove("docs/sub/b.txt");
    let again = desk.command(&["docs", "--prune"]).env("RAGSTONE_URL", &url).run();
    assert_eq!(counts(&report(&again)), [0, 0, 3, 1, 0]);
    let documents = server.get("/collections/c/documents").await.ok();
    assert_eq!(documents["total"], 4);
    // A model that is not there makes no collection.
    let arguments = [
        "ingest",
        "docs",
        "--url",
        &url,
        "--model",
        "smal",
        "--collection",
        "d",
    ];
    let typo = arguments
        .iter()
        .fold(desk.setup.clone(), |setup, argument| setup.arg(*argument))
        .run();
    let refused = typo.failed_with(1);
    assert!(
        refused.contains("'smal'") && refused.contains("small"),
        "{refused}"
    );
    server.get("/collections/d").await.refused(404);
}

#[tokio::test]
async fn rows_come_from_standard_input() {
    let desk = Desk::new();
    let rows = "{\"id\":\"a\",\"text\":\"one\"}\nbroken\n{\"id\":\"b\",\"text\":\"two\"}\n";
    let run = |setup: crate::support::Setup| {
        let mut command = setup.build();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(rows.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let local = desk
        .command(&["-", "--source", "feed"])
        .arg("--data-dir")
        .arg(desk.setup.data_dir());
    let output = run(local.arg("--embeddings-config").arg(&desk.embeddings));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (counts(&answer), output.status.code()),
        ([2, 0, 0, 0, 1], Some(1))
    );
    assert!(
        answer["errors"][0]["error"]
            .as_str()
            .unwrap()
            .starts_with("line 2:"),
        "{answer}"
    );
    assert_eq!(answer["errors"][0]["source"], "feed");
    let server = desk.server().start().await;
    let output = run(desk.command(&["-", "--source", "feed", "--url", &server.url("")]));
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(counts(&answer), [0, 0, 2, 0, 1]);
}

#[test]
fn a_dry_run_shows_the_chunks_and_stores_nothing() {
    let desk = Desk::new();
    handbook(&desk);
    let shown = desk.here(&["docs/**/*.md", "docs/rows.jsonl", "--dry-run"]);
    let ids: Vec<Value> = shown
        .stdout
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].clone())
        .collect();
    assert_eq!(
        ids,
        ["a.md#dome:0", "a.md#rain:0", "rows.jsonl#r1:0", "rows.jsonl#r2:0"]
    );
    assert!(!desk.setup.data_dir().exists());
    desk.write("broken.jsonl", "{\"text\":\"fine\"}\nbroken\n");
    let shown = desk.here(&["broken.jsonl", "--dry-run"]);
    assert!(shown.stdout.contains("fine"), "{shown:?}");
    let failed = shown.failed_with(1);
    assert!(
        failed.contains("line 2") && !failed.contains("ingested"),
        "{failed}"
    );
}

#[test]
fn files_that_cannot_be_read_are_listed_and_the_others_ingested() {
    let desk = Desk::new();
    desk.write("docs/good.md", "fine");
    desk.write("docs/bad.pdf", "no pdf");
    desk.write("docs/binary.txt", [0u8; 64]);
    let finished = desk.here(&["docs"]);
    assert_eq!(counts(&report(&finished)), [1, 0, 0, 0, 2]);
    assert!(
        finished
            .failed_with(1)
            .contains("binary.txt: it is a binary file"),
        "{finished:?}"
    );
}

#[test]
fn files_of_unsupported_types_in_folders_are_skipped() {
    let desk = Desk::new();
    desk.write("docs/good.md", "fine");
    desk.write("docs/table.dat", [0u8; 64]);
    desk.write("docs/core", [0u8; 64]);
    desk.write("docs/notes.conf", "text of an unknown type");
    let finished = desk.here(&["docs"]);
    let answer = report(&finished);
    assert_eq!((counts(&answer), finished.code), ([2, 0, 0, 0, 0], Some(0)));
    assert_eq!(answer["skipped"], 2);
    let named = desk.here(&["docs/table.dat"]);
    assert!(named.failed_with(1).contains("it is a binary file"), "{named:?}");
}

#[tokio::test]
async fn a_data_directory_is_used_instead_of_the_server_in_the_environment() {
    let desk = Desk::new();
    desk.write("a.md", "text");
    let local = |setup: crate::support::Setup| setup.arg("--embeddings-config").arg(&desk.embeddings).run();
    let explicit = desk
        .command(&["a.md"])
        .arg("--data-dir")
        .arg(desk.setup.data_dir())
        .env("RAGSTONE_URL", "http://127.0.0.1:1");
    assert_eq!(counts(&report(&local(explicit))), [1, 0, 0, 0, 0]);
    let empty = desk
        .command(&["a.md"])
        .env("RAGSTONE_URL", "")
        .env("RAGSTONE_DATA_DIR", desk.setup.data_dir().display().to_string());
    assert_eq!(counts(&report(&local(empty))), [0, 0, 1, 0, 0]);
    let wrong = desk.command(&["a.md"]).env("RAGSTONE_URL", "nowhere").run();
    assert!(wrong.failed_with(2).contains("RAGSTONE_URL"), "{wrong:?}");
}

#[tokio::test]
async fn metadata_comes_from_flags_files_beside_and_the_documents() {
    let desk = Desk::new();
    desk.write("docs/a.md", "---\nstatus: draft\n---\n# Dome\n\nOpens at dusk.\n");
    desk.write("docs/b.txt", "plain");
    desk.write(
        "docs/b.txt.metadata.json",
        "{\"author\": \"Ada\", \"year\": 1843}",
    );
    desk.write(
        "docs/weather.csv",
        "day,temp_max\n2024-01-01,31.5\n2024-01-02,9\n",
    );
    let server = desk.server().start().await;
    let url = server.url("");
    let flags = [
        "docs",
        "--metadata",
        "team=dome",
        "--metadata",
        "year=2024",
        "--url",
        &url,
    ];
    let sent = report(&desk.command(&flags).run());
    assert_eq!(counts(&sent), [4, 0, 0, 0, 0], "{sent}");
    let total = async |filter: Value| server.find("c", filter).await.ok()["total"].clone();
    assert_eq!(total(json!({"team": "dome"})).await, 4);
    assert_eq!(total(json!({"year": {"$gte": 2000}})).await, 3);
    assert_eq!(
        total(json!({"author": "Ada", "year": 1843, "source": "b.txt"})).await,
        1
    );
    assert_eq!(total(json!({"status": "draft"})).await, 1);
    assert_eq!(total(json!({"temp_max": {"$gt": 30}})).await, 1);
    let as_text = ["docs/weather.csv", "--csv-types", "text", "--url", &url];
    assert_eq!(counts(&report(&desk.command(&as_text).run())), [0, 2, 0, 0, 0]);
    assert_eq!(total(json!({"temp_max": "9"})).await, 1);
    desk.write("docs/b.txt.metadata.json", "[]");
    let broken = desk.command(&["docs", "--url", &url]).run();
    assert!(
        broken.failed_with(1).contains("b.txt.metadata.json"),
        "{broken:?}"
    );
    let wrong = desk.here(&["docs", "--metadata", "team"]);
    assert!(wrong.failed_with(2).contains("KEY=VALUE"), "{wrong:?}");
}

#[tokio::test]
async fn several_first_ingestions_at_once_share_the_new_collection() {
    let desk = Desk::new();
    let server = desk.server().start().await;
    let url = server.url("");
    for n in 0..4 {
        desk.write(&format!("{n}.md"), format!("document {n}"));
    }
    for round in 0..3 {
        let collection = format!("new{round}");
        let clients: Vec<_> = (0..4)
            .map(|n| {
                let file = desk.path(&format!("{n}.md")).display().to_string();
                let args = ["ingest", &file, "--json", "--url", &url, "-c", &collection];
                let setup = args.iter().fold(desk.setup.clone(), |setup, arg| setup.arg(*arg));
                let mut command = setup.build();
                command
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped())
                    .spawn()
                    .unwrap()
            })
            .collect();
        for client in clients {
            let output = client.wait_with_output().unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        let found = server
            .get(&format!("/collections/{collection}/documents"))
            .await
            .ok();
        assert_eq!(found["total"], 4);
    }
}

#[test]
fn wrong_arguments_are_refused_in_a_sentence() {
    let desk = Desk::new();
    desk.write("a.md", "text");
    let missing = desk.here(&["none.md", "a.md"]);
    assert!(
        missing.failed_with(1).contains("none.md: No such file"),
        "{missing:?}"
    );
    assert_eq!(counts(&report(&missing)), [1, 0, 0, 0, 1]);
    assert!(
        desk.here(&["a.md", "--chunk-tokens", "100000"])
            .failed_with(1)
            .contains("chunk_tokens must be from 16")
    );
    let refused = desk.here(&["a.md", "--model", "none"]);
    assert!(refused.failed_with(1).contains("'none'"), "{refused:?}");
    assert!(
        desk.here(&["a.md", "--include", "["])
            .failed_with(2)
            .contains("is not a file pattern")
    );
    assert!(
        desk.here(&["-", "--prune"])
            .failed_with(2)
            .contains("--prune needs paths")
    );
    assert_eq!(desk.here(&[]).code, Some(2));
}

#[tokio::test]
async fn the_store_can_be_named() {
    let desk = Desk::new();
    handbook(&desk);
    let store = format!("sqlite://{}", desk.path("elsewhere").display());
    let ingest = desk.command(&["docs", "--store", &store]);
    let done = ingest.arg("--embeddings-config").arg(&desk.embeddings).run();
    assert_eq!(counts(&report(&done)), [4, 0, 0, 0, 0]);
    assert!(desk.path("elsewhere/ragstone.db").exists() && !desk.setup.data_dir().exists());
}

#[tokio::test]
async fn a_line_that_is_too_long_costs_only_itself() {
    let desk = Desk::new();
    let long = format!("{{\"id\":\"b\",\"text\":\"{}\"}}", "x".repeat(45 << 20));
    let row = |id: &str| format!("{{\"id\":\"{id}\",\"text\":\"row {id}\"}}");
    desk.write("rows.jsonl", format!("{}\n{long}\n{}\n", row("a"), row("c")));
    let server = desk.server().start().await;
    let sent = report(&desk.command(&["rows.jsonl", "--url", &server.url("")]).run());
    assert_eq!(counts(&sent), [2, 0, 0, 0, 1], "{sent}");
    assert_eq!(
        sent["errors"][0]["error"],
        format!("line 2: it has more than {} bytes", 16 << 20)
    );
}

#[tokio::test]
async fn an_empty_collection_without_a_model_gets_the_one_that_is_named() {
    let desk = Desk::new();
    desk.write("a.md", "# Dome\n\nOpens at dusk.\n");
    let server = desk.server().start().await;
    let created = json!({"name": "c", "metadata": {"owner": "us"}});
    server.post("/collections", created).await.ok();
    let url = server.url("");
    let typo = desk.command(&["a.md", "--url", &url, "--model", "smal"]).run();
    assert!(typo.failed_with(1).contains("'smal'"), "{typo:?}");
    let sent = desk.command(&["a.md", "--url", &url, "--model", "small"]).run();
    assert_eq!(counts(&report(&sent)), [1, 0, 0, 0, 0], "{sent:?}");
    assert_eq!(
        server.get("/collections/c").await.ok()["metadata"],
        json!({"owner": "us", "embedding_model": "small"})
    );
}

#[tokio::test]
async fn a_path_that_is_not_there_makes_no_collection() {
    let desk = Desk::new();
    let mistyped = desk.here(&["dcos"]);
    assert_eq!(counts(&report(&mistyped)), [0, 0, 0, 0, 1], "{mistyped:?}");
    assert_eq!(mistyped.code, Some(1));
    let server = desk.server().start().await;
    let sent = desk.command(&["dcos", "--url", &server.url("")]).run();
    assert_eq!(sent.code, Some(1), "{sent:?}");
    server.get("/collections/c").await.refused(404);
}

#[tokio::test]
async fn a_pattern_whose_files_were_found_before_is_not_called_empty() {
    let desk = Desk::new();
    desk.write("docs/a.md", "# Dome\n\nOpens at dusk.\n");
    let found = desk.here(&["docs", "docs/*.md"]);
    assert!(!found.stderr.contains("no file matches"), "{found:?}");
    let none = desk.here(&["docs", "docs/*.txt"]);
    assert!(none.stderr.contains("no file matches"), "{none:?}");
}
