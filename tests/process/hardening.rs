//! Clients and surroundings that must not stop, fill or stall the server.

use std::process::Stdio;
use std::time::Duration;

use reqwest::Method;
use serde_json::json;

use crate::support::port::unused_port;
use crate::support::raw::RawClient;
use crate::support::{Setup, documents, fixtures, plain};

/// `/dev/full` refuses every write, as a full disk does.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_stderr_that_cannot_be_written_stops_nothing() {
    let port = unused_port();
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    for stderr in [Stdio::from(full()), closed_pipe()] {
        let setup = Setup::command(&["serve", "--no-embeddings", "--port", &port.to_string()]);
        let mut child = setup
            .build()
            .env("RAGSTONE_LOG", "debug")
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        let url = format!("http://127.0.0.1:{port}");
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        while client.get(format!("{url}/livez")).send().await.is_err() {
            assert!(child.try_wait().unwrap().is_none(), "the server ended");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        for _ in 0..20 {
            let answer = client
                .get(format!("{url}/collections/none"))
                .send()
                .await
                .unwrap();
            assert_eq!(answer.status(), 404);
        }
        assert!(child.try_wait().unwrap().is_none(), "the server ended");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // A fatal error keeps its exit code.
    let setup = Setup::command(&["serve"]);
    let mut command = setup.build();
    command.stderr(Stdio::from(full())).stdout(Stdio::null());
    let ended = command.status().unwrap();
    assert_eq!(ended.code(), Some(78));
}

/// A pipe whose reader is gone.
fn closed_pipe() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    Stdio::from(writer)
}

/// Every new label value would take memory for as long as the server runs.
#[tokio::test]
async fn invented_methods_share_one_label() {
    let server = plain().await;
    for n in 0..50 {
        let method = Method::from_bytes(format!("INVENTED{n}").as_bytes()).unwrap();
        server
            .send(server.request(method, "/collections"))
            .await
            .refused(405);
    }
    let metrics = server.get("/metrics").await.text;
    assert!(!metrics.contains("INVENTED"), "{metrics}");
    let counted = metrics
        .lines()
        .find(|line| line.starts_with("ragstone_http_requests_total") && line.contains("method=\"other\""))
        .unwrap();
    assert!(counted.ends_with(" 50"), "{counted}");
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_disconnected() {
    let server = Setup::without_models()
        .config("server: {limits: {writeSeconds: 1}}")
        .env("RAGSTONE_LOG", "debug")
        .start()
        .await;
    server.create("c").await;
    // More than the buffers of the system hold.
    for n in 0..8 {
        let text = "word ".repeat(1_000_000);
        let document = json!({"id": format!("d{n}"), "text": text, "embedding": [1.0]});
        server.add("c", vec![document]).await;
    }
    let mut client = RawClient::connect(server.address).await;
    client
        .send("GET /collections/c/documents HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await;
    let line = server.wait_for_log("a connection ended early");
    assert!(line.contains("timed out"), "{line}");
    server.get("/livez").await.ok();
}

/// Memory is reserved for bytes that arrive, not for those that are announced.
#[tokio::test]
async fn connections_that_send_only_headers_hold_up_nobody() {
    let server = plain().await;
    server.create("c").await;
    let mut waiting = Vec::new();
    // Together they announce as much as all large bodies may take.
    for _ in 0..8 {
        let mut client = RawClient::connect(server.address).await;
        client
            .send(
                "POST /collections/c/documents HTTP/1.1\r\nhost: localhost\r\ncontent-length: 67107840\r\n\r\n",
            )
            .await;
        waiting.push(client);
    }
    // Their headers are read before those of later connections.
    server.get("/livez").await.ok();
    for _ in 0..3 {
        server.add("c", documents(1, |_| json!({}))).await;
    }
}

/// Without a chat provider the body is not even read.
#[tokio::test]
async fn chat_without_a_provider_parses_nothing() {
    let server = plain().await;
    let answer = server
        .send_text(Method::POST, "/v1/chat/completions", "{ not json")
        .await;
    assert!(answer.refused(503).contains("chat.providerID"));
}

#[cfg(unix)]
#[tokio::test]
async fn files_with_documents_are_for_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;

    let server = Setup::serve_embedded().arg("--no-embeddings").start().await;
    server.create("c").await;
    server.add("c", documents(3, |_| json!({}))).await;
    let data = server.setup().data_dir();
    assert_eq!(mode(&data), 0o700);
    for file in std::fs::read_dir(&data).unwrap() {
        let path = file.unwrap().path();
        let allowed = if path.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(mode(&path), allowed, "{}", path.display());
    }
    let folder = server.setup().folder().to_owned();
    let setup = server.setup().clone();
    let (status, log) = server.stop();
    assert!(status.success(), "{log}");
    let (backup, export) = (folder.join("backup.db"), folder.join("c.jsonl"));
    for args in [
        vec!["backup".into(), backup.clone().into_os_string()],
        vec!["export".into(), "c".into(), export.clone().into_os_string()],
    ] {
        let command = args.into_iter().fold(Setup::command(&[]), Setup::arg);
        let ended = command.arg("--data-dir").arg(&data).run();
        ended.succeeded();
    }
    assert_eq!((mode(&backup), mode(&export)), (0o600, 0o600));
    drop(setup);
}

#[tokio::test]
async fn health_shows_paths_of_models_only_with_a_key() {
    let model = fixtures::model("bert");
    let cross_encoder = fixtures::model("cross-bert");
    let server = Setup::serve()
        .embeddings(&[("tiny", &model)])
        .arg("--cross-encoder-path")
        .arg(&cross_encoder)
        .env("RAGSTONE_API_KEYS", "key")
        .start()
        .await;
    let parent = model.parent().unwrap().to_str().unwrap().to_owned();
    let open = server.get("/health").await;
    assert!(!open.text.contains(&parent), "{}", open.text);
    assert_eq!(open.ok()["embedding_models"][0]["id"], "tiny");
    assert_eq!(open.ok()["cross_encoder"]["model"], "cross-bert");
    let request = server.request(Method::GET, "/health").bearer_auth("key");
    let with_key = server.send(request).await;
    assert!(with_key.text.contains(&parent), "{}", with_key.text);
}
