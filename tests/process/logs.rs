//! Logs go to stderr, carry request ids, and can be read by machines.

use reqwest::Method;
use serde_json::Value;

use crate::support::{Setup, plain};

#[tokio::test]
async fn the_start_is_told() {
    let log = plain().await.log();
    let line = log
        .lines()
        .find(|line| line.contains("listening on http://127.0.0.1:"))
        .expect("the address");
    assert!(line.contains(env!("CARGO_PKG_VERSION")), "{line}");
    assert!(!log.contains('\u{1b}'), "no colours outside a terminal");
}

#[tokio::test]
async fn json_logs_are_json_line_by_line() {
    let server = Setup::without_models()
        .arg("--log-format")
        .arg("json")
        .env("RAGSTONE_LOG", "debug")
        .start()
        .await;
    server
        .send(
            server
                .request(Method::GET, "/collections/missing")
                .header("x-request-id", "find-me"),
        )
        .await
        .refused(404);
    let (status, log) = server.stop();
    assert!(status.success());
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("not JSON: {line}")))
        .collect();
    assert!(
        lines
            .iter()
            .all(|line| line["level"].is_string() && line["timestamp"].is_string())
    );
    let answered = lines
        .iter()
        .find(|line| line.to_string().contains("find-me"))
        .expect("the request's line");
    assert!(answered.to_string().contains("404"), "{answered}");
}

#[test]
fn fatal_errors_are_json_in_a_json_log() {
    for (setup, part) in [
        (Setup::without_models().config("servr: {}"), "servr"),
        (
            Setup::command(&["serve", "--no-embeddings"]).env("RAGSTONE_PORT", "many"),
            "RAGSTONE_PORT is 'many'",
        ),
        (
            Setup::without_models()
                .env("RAGSTONE_LOG", "off")
                .config("servr: {}"),
            "servr",
        ),
    ] {
        let ended = setup.arg("--log-format").arg("json").run();
        let log = ended.failed_with(78);
        let line: Value = serde_json::from_str(log).unwrap_or_else(|_| panic!("not JSON: {log}"));
        assert_eq!(line["level"], "ERROR", "{line}");
        let message = line["message"].as_str().unwrap();
        assert!(
            message.starts_with("fatal: ") && message.contains(part),
            "{message}"
        );
    }
}

#[tokio::test]
async fn an_unknown_embedding_provider_is_named() {
    let server = Setup::without_models()
        .config("embedding: {provider: something}")
        .start()
        .await;
    let line = server.wait_for_log("agent memory is not embedded");
    assert!(
        line.contains("something") && line.contains("embedding.provider is unknown"),
        "{line}"
    );
}

#[tokio::test]
async fn request_ids_are_in_the_log() {
    let server = Setup::without_models().env("RAGSTONE_LOG", "debug").start().await;
    let id = server
        .get("/collections/missing")
        .await
        .header("x-request-id")
        .to_owned();
    let line = server.wait_for_log(&id);
    assert!(line.contains("/collections/missing"), "{line}");
}

#[tokio::test]
async fn the_level_can_be_set() {
    let server = Setup::without_models().env("RAGSTONE_LOG", "info").start().await;
    server.get("/collections").await.ok();
    let (_, log) = server.stop();
    assert!(!log.contains("answered"), "requests are not told at info: {log}");
}
