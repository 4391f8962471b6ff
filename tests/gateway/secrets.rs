//! Credentials of services appear nowhere: not in answers, not in errors, not in the log.

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use serde_json::json;

use super::{nobody, with_model};
use crate::support::{Server, Setup};

const CANARY: &str = "canary-8f3a-token";

#[tokio::test]
async fn credentials_are_shown_nowhere() {
    let far = with_model(Setup::serve())
        .env("RAGSTONE_API_KEYS", CANARY)
        .start()
        .await;
    let service = |name: &str, url: &str, auth: &str| {
        format!(
            "  {name}: {{provider: chromadb-wrapper, url: {url:?}, timeoutMs: 20000, retry: {{maxAttempts: 1}}, auth: {auth}}}\n"
        )
    };
    let yaml = format!(
        "services:\n{}{}{}{}",
        service("right", &far.url(""), "{type: bearer, token: '${FAR_TOKEN}'}"),
        service(
            "wrong",
            &far.url(""),
            &format!("{{type: basic, username: ann, password: wrong-{CANARY}}}")
        ),
        service("dead", &nobody(), &format!("{{type: api_key, key: {CANARY}}}")),
        service(
            "header",
            &far.url(""),
            &format!("{{type: api_key, key: {CANARY}}}")
        ),
    );
    let near = with_model(Setup::serve())
        .config(&yaml)
        .env("FAR_TOKEN", CANARY)
        .env("RAGSTONE_LOG", "trace")
        .start()
        .await;
    let seen = ask_everything(&near).await;
    assert!(
        seen.contains("\"healthy\"") && seen.contains("\"unhealthy\""),
        "the services were reached, or not: {seen}"
    );
    let (_, log) = near.stop();
    for (place, text) in [("an answer", seen), ("the log", log)] {
        let line = text
            .lines()
            .find(|line| line.contains(CANARY) || line.contains("canary-8f3a"));
        assert_eq!(line, None, "in {place}");
    }
}

/// A service that repeats its credentials in JSON.
async fn echoing() -> String {
    let echo = async |headers: HeaderMap| {
        let sent = headers
            .get("authorization")
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default();
        let body = json!({"detail": format!("you sent {sent}"), "status": "healthy", sent: [sent]});
        (
            StatusCode::BAD_REQUEST,
            [(CONTENT_TYPE, "application/json")],
            body.to_string(),
        )
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(echo)).await });
    url
}

#[tokio::test]
async fn credentials_that_a_service_repeats_are_not_shown() {
    let url = echoing().await;
    for key in [r#"p"ss\wd/longer"#, "canary-5e/KEY-0", "k/7"] {
        let yaml = format!(
            "services:\n  echo: {{provider: chromadb-wrapper, url: {url:?}, retry: {{maxAttempts: 1}}, auth: {{type: bearer, token: '{key}'}}}}\n"
        );
        let near = Setup::without_models()
            .config(&yaml)
            .env("RAGSTONE_LOG", "trace")
            .start()
            .await;
        let config = json!({"url": url, "auth": {"type": "bearer", "token": key}});
        let tried = json!({"config": config});
        let query = json!({"service": "echo", "query": "q"});
        let passed_on = near.get("/api/collections/c?service=echo").await;
        assert_eq!(passed_on.json()["detail"], "you sent Bearer ***");
        let answers = [
            passed_on,
            near.get("/api/services").await,
            near.get("/api/collections").await,
            near.post("/api/collections/c/query", query).await,
            near.post("/api/providers/chromadb-wrapper/test", tried).await,
        ];
        let as_json = json!(key).to_string();
        let shows = |text: &str| text.contains(key) || text.contains(as_json.trim_matches('"'));
        for answer in answers {
            assert!(!shows(&answer.json().to_string()), "{}", answer.text);
        }
        let (_, log) = near.stop();
        assert_eq!(log.lines().find(|line| shows(line)), None);
    }
}

/// The answers of every route to every service, line by line.
async fn ask_everything(near: &Server) -> String {
    let mut seen = String::new();
    for path in [
        "/api/services",
        "/api/collections",
        "/api/providers",
        "/metrics",
        "/openapi.json",
    ] {
        seen += &near.get(path).await.text;
        seen.push('\n');
    }
    for service in ["right", "wrong", "dead", "header"] {
        let body = json!({"service": service, "name": "c", "embedding_model": "tiny"});
        let target = json!([{"service": service, "name": "c"}]);
        for answer in [
            near.post("/api/collections", body).await,
            near.get(&format!("/api/collections/c?service={service}")).await,
            near.post(
                "/api/collections/c/query",
                json!({"service": service, "query": "q"}),
            )
            .await,
            near.post(
                "/api/rag/collect",
                json!({"user_message": "m", "collections": target, "rerank": true}),
            )
            .await,
        ] {
            seen += &answer.text;
            seen.push('\n');
        }
    }
    let config =
        json!({"url": nobody(), "auth": {"type": "bearer", "token": CANARY}, "retry": {"maxAttempts": 1}});
    seen += &near
        .post(
            "/api/providers/chromadb-wrapper/test",
            json!({ "config": config }),
        )
        .await
        .text;
    let misspelt = json!({"url": nobody(), "auth": {"type": "bearer", "tokne": CANARY, "token": [CANARY]}});
    seen += &near
        .post(
            "/api/providers/chromadb-wrapper/test",
            json!({ "config": misspelt }),
        )
        .await
        .text;
    seen
}
