//! Requirement: RAG Provider Registry Integration

use serde_json::json;

use crate::support::{Setup, plain};

#[tokio::test]
async fn rag_provider_registration() {
    let server = plain().await;
    let providers = server.get("/api/providers").await.ok();
    let ids: Vec<&str> = providers["providers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|kind| kind["id"].as_str().unwrap())
        .collect();
    for id in ["local", "chromadb-wrapper", "chromadb"] {
        assert!(ids.contains(&id), "{ids:?}");
        server.get(&format!("/api/providers/{id}/schema")).await.ok();
    }
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
