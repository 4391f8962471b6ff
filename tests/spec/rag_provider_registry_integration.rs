//! Requirement: RAG Provider Registry Integration

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{Server, Setup, ids, plain};

/// Providers of a kind register under its id: the id can be discovered, its schema read, and services
/// of that kind added, each of which is then discoverable itself.
#[tokio::test]
async fn rag_provider_registration() {
    let server = plain().await;
    assert_eq!(
        services(&server).await,
        [("local".to_owned(), "local".to_owned())]
    );
    let providers = server.get("/api/providers").await.ok();
    let ids: BTreeSet<String> = ids(&providers["providers"])
        .into_iter()
        .map(str::to_owned)
        .collect();
    assert_eq!(
        ids,
        ["local", "chromadb-wrapper", "chromadb"]
            .map(str::to_owned)
            .into()
    );
    server.get("/api/providers/nonesuch/schema").await.refused(404);

    // A service of each kind; whether it answers does not matter for being registered.
    let mut expected = vec![("local".to_owned(), "local".to_owned())];
    let mut yaml = "services:\n".to_owned();
    for id in ids.iter().filter(|id| *id != "local") {
        let schema = server.get(&format!("/api/providers/{id}/schema")).await.ok();
        assert!(schema["properties"]["url"].is_object(), "{schema}");
        yaml.push_str(&format!(
            "  my-{id}: {{provider: {id}, url: \"http://127.0.0.1:9\"}}\n"
        ));
        expected.push((format!("my-{id}"), id.clone()));
    }
    let server = Setup::without_models().config(&yaml).start().await;
    assert_eq!(services(&server).await, expected);
}

/// Name and provider of every service that can be discovered.
async fn services(server: &Server) -> Vec<(String, String)> {
    let listed = server.get("/api/services").await.ok();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let services = listed["services"].as_array().expect("services").iter();
    services
        .map(|service| (text(&service["name"]), text(&service["provider"])))
        .collect()
}

#[tokio::test]
async fn rag_provider_discovery() {
    let server = plain().await;
    let providers = server.get("/api/providers").await.ok();
    for provider in providers["providers"].as_array().unwrap() {
        for field in ["id", "display_name", "description"] {
            assert!(
                provider[field].as_str().is_some_and(|text| !text.is_empty()),
                "{provider}"
            );
        }
        let capabilities = provider["capabilities"].as_array().unwrap();
        for needed in ["collections", "search", "metadata_filtering"] {
            assert!(capabilities.contains(&json!(needed)), "{provider}");
        }
    }
}

#[tokio::test]
async fn rag_provider_selection() {
    let far = plain().await;
    let yaml = format!(
        "services: {{far: {{provider: chromadb-wrapper, url: {:?}}}}}",
        far.url("")
    );
    let server = Setup::without_models().config(&yaml).start().await;
    server
        .post("/api/collections", json!({"service": "far", "name": "c"}))
        .await
        .ok();
    far.get("/collections/c").await.ok();
    server.get("/collections/c").await.refused(404);
    let finished = Setup::without_models()
        .config("services: {far: {provider: nonesuch}}")
        .run();
    let message = finished.failed_with(78);
    assert!(
        message.contains("nonesuch") && message.contains("chromadb-wrapper"),
        "{message}"
    );
}
