//! Credentials of services appear nowhere: not in answers, not in errors, not in the log.

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
            "  {name}: {{provider: chromadb-wrapper, url: {url:?}, timeoutMs: 2000, retry: {{maxAttempts: 1}}, auth: {auth}}}\n"
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
