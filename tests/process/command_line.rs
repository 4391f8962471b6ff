//! Help, exit codes, and what goes to which stream.

use std::process::Stdio;

use reqwest::Method;
use serde_json::json;

use crate::support::{Setup, fixtures, vector};

#[test]
fn usage_errors_end_with_2() {
    for args in [
        &["serve", "--no-such-flag"][..],
        &["no-such-command"],
        &["serve", "--port", "many"],
        &["serve", "--port", "70000"],
        &["serve", "--log-format", "xml"],
        &["serve", "--no-embeddings", "--embeddings-config", "x.yml"],
        &["models", "pull"],
        &["completions", "no-such-shell"],
        &["query", "c", "text", "--mode", "fuzzy"],
        &["query", "c", "text", "--where", "{"],
        &["query", "c", "text", "--where", r#"{"a": {"$no": 1}}"#],
        &["query", "c", "text", "-k", "0"],
        &["query", "c", "text", "--url", "notaurl"],
        &["query", "c", " "],
        &["query", "not/valid", "text"],
        &[
            "query",
            "c",
            "text",
            "--url",
            "http://127.0.0.1:1",
            "--data-dir",
            "x",
        ],
        &[],
    ] {
        let ended = Setup::command(args).run();
        let log = ended.failed_with(2);
        assert!(log.contains("Usage") || log.contains("--help"), "{args:?}: {log}");
        assert_eq!(ended.stdout, "", "{args:?}");
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    let help = Setup::command(&["--help"]).run();
    for command in ["serve", "quickstart", "models", "completions"] {
        assert!(help.succeeded().contains(command), "{help:?}");
    }
    assert_eq!(help.stderr, "");
    let version = Setup::command(&["--version"]).run();
    assert_eq!(
        version.succeeded().trim(),
        format!("ragstone {}", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn help_of_serve_names_every_flag_of_the_contract() {
    let help = Setup::command(&["serve", "--help"]).run();
    for flag in [
        "--host",
        "--port",
        "--data-dir",
        "--store",
        "--config",
        "--embeddings-config",
        "--cross-encoder",
        "--cross-encoder-path",
        "--download-models",
        "--list-reranker-models",
        "--no-embeddings",
    ] {
        assert!(
            help.succeeded().contains(flag),
            "{flag} is not in: {}",
            help.stdout
        );
    }
    for variable in [
        "EMBEDDINGS_CONFIG",
        "CROSS_ENCODER_MODEL",
        "CROSS_ENCODER_PATH",
        "RAGSTONE_PORT",
    ] {
        assert!(
            help.stdout.contains(variable),
            "{variable} is not in: {}",
            help.stdout
        );
    }
}

#[test]
fn completions_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = Setup::command(&["completions", shell]).run();
        assert!(script.succeeded().contains("quickstart"), "{shell}");
    }
}

/// The list is the result of the command, so nothing else is on stdout, and nothing is started.
#[test]
fn the_list_of_rerankers_is_a_result() {
    let list = Setup::serve().arg("--list-reranker-models").run();
    insta::assert_snapshot!("list_reranker_models", list.succeeded());
    assert_eq!(list.stderr, "");
}

#[test]
fn a_flag_of_serve_without_serve_gets_a_hint() {
    let ended = Setup::command(&["--list-reranker-models"]).run();
    assert!(
        ended
            .failed_with(2)
            .contains("ragstone serve --list-reranker-models"),
        "{ended:?}"
    );
    let other = Setup::command(&["--no-such-flag"]).run();
    assert!(
        !other.failed_with(2).contains("flag of `ragstone serve`"),
        "{other:?}"
    );
}

/// As `ingest` does, with the models of the store's collections.
#[tokio::test]
async fn a_data_directory_is_searched_without_a_server() {
    let setup = Setup::serve_embedded().embeddings(&[("tiny", &fixtures::model("bert"))]);
    let models = setup.folder().join("embeddings.yml");
    let server = setup.start().await;
    let created = json!({"name": "c", "embedding_model": "tiny"});
    server.post("/collections", created).await.ok();
    let texts = json!({"documents": [{"id": "a", "text": "a fox"}, {"id": "b", "text": "two crows"}]});
    server.post("/collections/c/documents", texts).await.ok();
    let data = server.setup().data_dir();
    let query = |args: &[&str]| {
        let setup = Setup::command(&["query", "c", "crows"])
            .arg("--data-dir")
            .arg(&data);
        args.iter().fold(setup, |setup, arg| setup.arg(arg))
    };
    // A variable does not turn the search away from the server.
    let through_server = Setup::command(&[
        "query",
        "c",
        "crows",
        "--mode",
        "keyword",
        "--url",
        &server.url(""),
    ])
    .env("RAGSTONE_DATA_DIR", "/nowhere");
    let locked = query(&["--mode", "keyword"]);
    let (through_server, locked) = tokio::task::spawn_blocking(move || (through_server.run(), locked.run()))
        .await
        .unwrap();
    assert!(through_server.succeeded().contains("two crows"));
    assert!(
        locked.failed_with(1).contains("a server has the store open"),
        "{locked:?}"
    );
    let kept = server.setup().clone();
    let (status, log) = server.stop();
    assert!(status.success(), "{log}");
    let keyword = query(&["--mode", "keyword"])
        .env("RAGSTONE_URL", "http://127.0.0.1:9")
        .run();
    let found: serde_json::Value = serde_json::from_str(keyword.succeeded()).unwrap();
    assert_eq!(found["results"][0]["id"], "b", "{found}");
    assert_eq!(found["results"].as_array().unwrap().len(), 1, "{found}");
    let dense = query(&["--embeddings-config", models.to_str().unwrap()]).run();
    let found: serde_json::Value = serde_json::from_str(dense.succeeded()).unwrap();
    assert_eq!(found["results"].as_array().unwrap().len(), 2, "{found}");
    assert!(found["results"][0]["distance"].is_number(), "{found}");
    let missing = Setup::command(&["query", "none", "crows", "--mode", "keyword"])
        .arg("--data-dir")
        .arg(&data)
        .run();
    assert!(missing.failed_with(1).contains("'none'"), "{missing:?}");
    let mistyped = Setup::command(&["query", "c", "crows", "--mode", "keyword", "--data-dir", "dta"]);
    let ended = mistyped.run();
    assert!(
        ended.failed_with(1).contains("there is no store in dta"),
        "{ended:?}"
    );
    assert!(!mistyped.folder().join("dta").exists(), "nothing is created");
    drop(kept);
}

#[tokio::test]
async fn a_query_says_which_key_is_missing_and_ends_quietly_when_nobody_reads_on() {
    let server = Setup::without_models()
        .env("RAGSTONE_API_KEYS", "key")
        .start()
        .await;
    let documents = json!({"documents": [{"id": "a", "text": "a fox", "embedding": vector(1)}]});
    for (path, body) in [
        ("/collections", json!({"name": "c"})),
        ("/collections/c/documents", documents),
    ] {
        let request = server.request(Method::POST, path).bearer_auth("key");
        server.send(request.json(&body)).await.ok();
    }
    let query = Setup::command(&["query", "c", "fox", "--mode", "keyword", "--url", &server.url("")]);
    let (without, wrong) = (query.clone(), query.clone().env("RAGSTONE_API_KEY", "other"));
    let right = query.env("RAGSTONE_API_KEY", "key");
    tokio::task::spawn_blocking(move || {
        let log = without.run();
        assert!(log.failed_with(1).contains("set RAGSTONE_API_KEY"), "{log:?}");
        let log = wrong.run();
        assert!(log.failed_with(1).contains("refuses the API key"), "{log:?}");
        assert!(right.run().succeeded().contains("a fox"));
        let mut child = right
            .build()
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        assert!(ended.status.success(), "{ended:?}");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
    })
    .await
    .unwrap();
    for command in ["query", "ingest", "export", "import", "copy"] {
        let help = Setup::command(&[command, "--help"]).run();
        assert!(help.succeeded().contains("RAGSTONE_API_KEY"), "{command}");
    }
}
