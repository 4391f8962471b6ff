//! API keys: every route but three wants one.

use reqwest::Method;
use serde_json::json;

use super::common::documented;
use crate::support::{Server, Setup, plain};

const OPEN: [&str; 3] = ["/livez", "/readyz", "/health"];

async fn with_keys() -> Server {
    Setup::without_models()
        .env("RAGSTONE_API_KEYS", "first-key, second-key")
        .start()
        .await
}

#[tokio::test]
async fn every_route_but_the_probes_wants_a_key() {
    let routes = documented(&plain().await).await;
    let server = with_keys().await;
    let undocumented = ["/openapi.json", "/docs", "/nothing"].map(|path| (Method::GET, path.to_owned()));
    for (method, path) in routes.into_iter().chain(undocumented) {
        let answer = server.send(server.request(method.clone(), &path)).await;
        if OPEN.contains(&path.as_str()) {
            assert_eq!(answer.status, 200, "{method} {path}");
        } else {
            let detail = answer.refused(401);
            assert!(
                detail.contains("Authorization: Bearer") && detail.contains("X-API-Key"),
                "{detail}"
            );
            assert_eq!(answer.header("www-authenticate"), "Bearer");
        }
    }
}

#[tokio::test]
async fn both_headers_and_every_key_open() {
    let server = with_keys().await;
    for key in ["first-key", "second-key"] {
        for (header, value) in [
            ("authorization", format!("Bearer {key}")),
            ("authorization", format!("bearer {key}")),
            ("x-api-key", key.to_owned()),
        ] {
            let answer = server
                .send(server.request(Method::GET, "/collections").header(header, &value))
                .await;
            assert_eq!(answer.ok(), json!({"collections": []}), "{header}: {value}");
        }
    }
}

#[tokio::test]
async fn wrong_keys_do_not_open() {
    let server = with_keys().await;
    for (header, value) in [
        ("authorization", "Bearer wrong"),
        ("authorization", "Bearer first-ke"),
        ("authorization", "Bearer first-keyy"),
        ("authorization", "Bearer FIRST-KEY"),
        ("authorization", "Bearer first-key, second-key"),
        ("authorization", "Bearer"),
        ("authorization", "Bearer "),
        ("authorization", "first-key"),
        ("authorization", "Basic Zmlyc3Qta2V5"),
        ("x-api-key", "wrong"),
        ("x-api-key", ""),
        ("x-api-key", "Bearer first-key"),
        ("cookie", "first-key"),
    ] {
        server
            .send(server.request(Method::GET, "/collections").header(header, value))
            .await
            .refused(401);
    }
    server
        .get("/collections?api_key=first-key&x-api-key=first-key")
        .await
        .refused(401);
}

#[tokio::test]
async fn a_refused_request_changes_nothing() {
    let server = with_keys().await;
    server
        .post("/collections", json!({"name": "c"}))
        .await
        .refused(401);
    let list = server
        .request(Method::GET, "/collections")
        .header("x-api-key", "first-key");
    assert_eq!(server.send(list).await.ok(), json!({"collections": []}));
}

#[tokio::test]
async fn keys_are_never_written_to_the_log() {
    let server = Setup::without_models()
        .env("RAGSTONE_API_KEYS", "canary-key-5921")
        .env("RAGSTONE_LOG", "trace")
        .start()
        .await;
    let request = |key: &str| {
        server
            .request(Method::GET, "/collections")
            .header("authorization", format!("Bearer {key}"))
    };
    server.send(request("canary-key-5921")).await.ok();
    server.send(request("wrong-canary-5921")).await.refused(401);
    let (_, log) = server.stop();
    assert!(log.contains("/collections"), "the log is a talkative one: {log}");
    assert!(!log.contains("canary"), "{log}");
}

#[tokio::test]
async fn keys_come_from_the_configuration_file_too() {
    let server = Setup::without_models()
        .config("server: {apiKeys: ['${KEY_OF_MINE}', plain-key]}")
        .env("KEY_OF_MINE", "from-environment")
        .start()
        .await;
    server.get("/collections").await.refused(401);
    for key in ["from-environment", "plain-key"] {
        server
            .send(
                server
                    .request(Method::GET, "/collections")
                    .header("x-api-key", key),
            )
            .await
            .ok();
    }
    server
        .send(
            server
                .request(Method::GET, "/collections")
                .header("x-api-key", "${KEY_OF_MINE}"),
        )
        .await
        .refused(401);
}

/// Without keys, a page of another site that is open on this machine must not use the service.
#[tokio::test]
async fn without_keys_other_sites_are_refused() {
    let open = plain().await;
    let create = |server: &Server, header: &str, value: &str| {
        server
            .request(Method::POST, "/collections")
            .header(header, value)
            .body(r#"{"name": "c"}"#)
    };
    for (header, value) in [
        ("origin", "https://evil.example"),
        ("origin", "null"),
        ("host", "evil.example:5006"),
    ] {
        let answer = open.send(create(&open, header, value)).await;
        assert!(
            answer.refused(403).contains("RAGSTONE_API_KEYS"),
            "{header}: {value}"
        );
    }
    assert_eq!(open.get("/collections").await.ok(), json!({"collections": []}));
    let answer = open.send(create(&open, "origin", "http://localhost:3000")).await;
    answer.ok();
    // With a key, the key decides.
    let closed = with_keys().await;
    let request = create(&closed, "origin", "https://ours.example").header("x-api-key", "first-key");
    closed.send(request.header("host", "rag.ours.example")).await.ok();
}
