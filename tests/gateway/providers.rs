//! What can be connected: `/api/providers` and `/api/services`.

use serde_json::{Value, json};

use super::{Pair, nobody, pair, services};
use crate::support::{Setup, plain};

#[tokio::test]
async fn every_kind_has_a_schema_that_a_form_can_be_drawn_from() {
    let server = plain().await;
    let providers = server.get("/api/providers").await.ok();
    for provider in providers["providers"].as_array().unwrap() {
        let id = provider["id"].as_str().unwrap();
        let schema = server.get(&format!("/api/providers/{id}/schema")).await.ok();
        assert_eq!(schema["type"], "object", "{id}");
        for (name, field) in schema["properties"].as_object().unwrap() {
            assert!(
                field["title"].is_string() && field["description"].is_string(),
                "{id}.{name}: {field}"
            );
        }
    }
    let schema = server.get("/api/providers/chromadb-wrapper/schema").await.ok();
    assert_eq!(schema["required"], json!(["url"]));
    assert!(schema["properties"]["timeoutMs"]["default"].is_u64(), "{schema}");
    assert_eq!(
        server.get("/api/providers/x/schema").await.refused(404),
        "Provider \"x\" not found"
    );
    server
        .post("/api/providers/x/test", json!({"config": {}}))
        .await
        .refused(404);
}

async fn tried(server: &crate::support::Server, id: &str, config: Value) -> crate::support::Answer {
    server
        .post(&format!("/api/providers/{id}/test"), json!({ "config": config }))
        .await
}

#[tokio::test]
async fn a_connection_is_tried_before_it_is_used() {
    let Pair { near, far } = pair().await;
    let health = tried(&near, "chromadb-wrapper", json!({"url": far.url("")}))
        .await
        .ok();
    assert_eq!(health["status"], "healthy", "{health}");
    assert!(
        health["message"].is_string() && health["latency_ms"].is_f64(),
        "{health}"
    );
    assert!(health["timestamp"].as_str().unwrap().ends_with('Z'), "{health}");
    assert_eq!(health["details"]["embedding_models"][0]["id"], "tiny");
    let dead = json!({"url": nobody(), "retry": {"maxAttempts": 1}, "timeoutMs": 2000});
    assert_eq!(
        tried(&near, "chromadb-wrapper", dead).await.ok()["status"],
        "unhealthy"
    );
    assert_eq!(tried(&near, "local", json!({})).await.ok()["status"], "healthy");
}

#[tokio::test]
async fn a_configuration_that_does_not_fit_is_refused_by_field() {
    let server = plain().await;
    for (id, config, field) in [
        ("chromadb-wrapper", json!({}), "url"),
        ("chromadb-wrapper", json!({"url": 7}), "url"),
        ("chromadb-wrapper", json!({"url": "no address"}), "url"),
        (
            "chromadb-wrapper",
            json!({"url": "http://127.0.0.1", "timeoutMs": "x"}),
            "timeoutMs",
        ),
        (
            "chromadb-wrapper",
            json!({"url": "http://127.0.0.1", "tiemout": 1}),
            "tiemout",
        ),
        (
            "chromadb-wrapper",
            json!({"url": "http://127.0.0.1", "auth": {"type": "bearer"}}),
            "auth.token",
        ),
        (
            "chromadb-wrapper",
            json!({"url": "http://127.0.0.1", "auth": {"type": "bearer", "token": "${HOME}"}}),
            "auth.token: '${HOME}' is not looked up",
        ),
        (
            "chromadb",
            json!({"url": "http://127.0.0.1", "auth": {"type": "api_key", "header": "Host", "key": "k"}}),
            "auth.header",
        ),
        (
            "chromadb-wrapper",
            json!({"url": "http://127.0.0.1", "timeout_ms": 1}),
            "timeout_ms",
        ),
        (
            "chromadb-wrapper",
            json!({"url": "http://127.0.0.1", "auth": {"type": "bearer", "token": "two\nlines"}}),
            "auth.token: has characters",
        ),
        ("local", json!({"url": "http://127.0.0.1"}), "url"),
    ] {
        let detail = tried(&server, id, config).await.refused(400);
        assert!(detail.contains(field), "{detail}");
    }
    let several = json!({"url": "no address", "timeoutMs": "x", "retry": {"maxAttempts": 99}, "auth": {"type": "bearer", "token": 123}});
    let answer = tried(&server, "chromadb-wrapper", several).await;
    let mut fields: Vec<String> = answer.json()["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|error| error["field"].as_str().unwrap().to_owned())
        .collect();
    fields.sort_unstable();
    assert_eq!(fields, ["auth.token", "retry.maxAttempts", "timeoutMs", "url"]);
    let detail = answer.refused(400);
    assert!(detail.contains("auth.token: must be a string"), "{detail}");
    let detail = server
        .post("/api/providers/local/test", json!({}))
        .await
        .refused(400);
    assert_eq!(detail, "Field 'config' is required");
}

/// A server that others can reach does not reach into its own network for them.
#[tokio::test]
async fn private_addresses_are_for_those_who_are_on_the_machine() {
    let open = Setup::without_models()
        .arg("--host")
        .arg("0.0.0.0")
        .arg("--allow-no-key")
        .start()
        .await;
    let inside = json!({"url": nobody(), "retry": {"maxAttempts": 1}});
    let answer = tried(&open, "chromadb-wrapper", inside).await;
    assert!(
        answer.status == 400 || answer.json()["status"] == "unhealthy",
        "{answer:?}"
    );
    assert!(
        !answer.text.to_lowercase().contains("refused"),
        "nothing can be learned of ports inside: {answer:?}"
    );
}

/// What the configuration names is one port of a host: what else listens there is nobody's business.
#[tokio::test]
async fn of_a_private_host_only_the_port_that_is_configured_can_be_tried() {
    let (far, other) = (plain().await, plain().await);
    let open = Setup::without_models()
        .config(&services(&[("far", &far.url(""))]))
        .arg("--host")
        .arg("0.0.0.0")
        .arg("--allow-no-key")
        .start()
        .await;
    let named = tried(&open, "chromadb-wrapper", json!({"url": far.url("")})).await;
    assert_eq!(named.ok()["status"], "healthy");
    for url in [other.url(""), nobody()] {
        let detail = tried(&open, "chromadb-wrapper", json!({"url": url}))
            .await
            .refused(400);
        assert!(detail.contains("url: ") && detail.contains("private"), "{detail}");
    }
}

/// A proxy would look a name up where nobody checks what it leads to, and see the key.
#[tokio::test]
async fn a_connection_of_a_client_goes_through_no_proxy() {
    let proxy = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", proxy.local_addr().unwrap());
    let reached = tokio::spawn(async move { proxy.accept().await.map(|_| ()) });
    let server = Setup::without_models()
        .env("HTTP_PROXY", &address)
        .env("http_proxy", &address)
        .env("NO_PROXY", "")
        .env("no_proxy", "")
        .start()
        .await;
    let config = json!({"url": "http://rag.invalid", "timeoutMs": 5000, "retry": {"maxAttempts": 1},
        "auth": {"type": "bearer", "token": "canary-8f3a-token"}});
    let health = tried(&server, "chromadb-wrapper", config).await.ok();
    assert_eq!(health["status"], "unhealthy", "{health}");
    assert!(!reached.is_finished(), "{health}");
}

#[tokio::test]
async fn services_are_wrong_before_the_start_and_not_after_it() {
    for (yaml, named) in [
        (
            "services: {far: {provider: chromadb-wrapper}}",
            "services.far.url",
        ),
        (
            "services: {far: {provider: nonesuch, url: 'http://127.0.0.1'}}",
            "services.far.provider",
        ),
        (
            "services: {'far away': {provider: chromadb-wrapper, url: 'http://127.0.0.1'}}",
            "far away",
        ),
        (
            "services: {local: {provider: chromadb-wrapper, url: 'http://127.0.0.1'}}",
            "services.local",
        ),
        (
            "services: {far: {provider: chromadb-wrapper, url: 'http://127.0.0.1', auth: {type: bearer, token: '${NOT_SET_ANYWHERE}'}}}",
            "NOT_SET_ANYWHERE",
        ),
        (
            "services: {far: {provider: chromadb-wrapper, url: 'http://127.0.0.1', tiemout: 3}}",
            "tiemout",
        ),
        ("conversations: {ttlSeconds: 0}", "ttlSeconds"),
        (
            "services: {null: {provider: chromadb-wrapper, url: 'http://127.0.0.1'}}",
            "null is not a string: put it in quotes",
        ),
    ] {
        let finished = Setup::without_models().config(yaml).run();
        assert!(finished.failed_with(78).contains(named), "{finished:?}");
    }
}

#[tokio::test]
async fn wrong_credentials_are_not_healthy() {
    let far = Setup::without_models()
        .env("RAGSTONE_API_KEYS", "right-key-0123456789")
        .start()
        .await;
    let server = plain().await;
    for (key, status) in [
        ("right-key-0123456789", "healthy"),
        ("wrong-key-0123456789", "unhealthy"),
    ] {
        let config = json!({"url": far.url(""), "auth": {"type": "bearer", "token": key}});
        let health = tried(&server, "chromadb-wrapper", config).await.ok();
        assert_eq!(health["status"], status, "{health}");
        assert!(health["details"]["collections_count"].is_u64(), "{health}");
        assert_eq!(
            health["message"].as_str().unwrap().contains("credentials"),
            status == "unhealthy"
        );
    }
}
