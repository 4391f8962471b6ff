//! Requirement: Base RAG Provider Interface

use serde_json::json;

use crate::support::{Setup, fixtures, plain};

#[tokio::test]
async fn provider_initialization_with_schema() {
    let server = plain().await;
    let schema = server.get("/api/providers/chromadb-wrapper/schema").await.ok();
    assert!(
        schema["properties"]["url"].is_object() && schema["properties"]["auth"].is_object(),
        "{schema}"
    );
    let test = "/api/providers/chromadb-wrapper/test";
    let detail = server
        .post(test, json!({"config": {"url": 5}}))
        .await
        .refused(400);
    assert!(detail.contains("url"), "{detail}");
    let health = server
        .post(test, json!({"config": {"url": server.url("")}}))
        .await
        .ok();
    assert_eq!(health["status"], "healthy", "{health}");
}

#[tokio::test]
async fn provider_capabilities_declaration() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    let services = server.get("/api/services").await.ok();
    let local = &services["services"][0];
    assert_eq!(
        (&local["name"], &local["provider"]),
        (&json!("local"), &json!("local"))
    );
    for capability in ["collections", "search", "embeddings", "metadata_filtering"] {
        assert!(
            local["capabilities"]
                .as_array()
                .unwrap()
                .contains(&json!(capability)),
            "{local}"
        );
    }
    // Capabilities that need models are declared only by services with models.
    let server = plain().await;
    let services = server.get("/api/services").await.ok();
    assert_eq!(
        services["services"][0]["capabilities"],
        json!(["collections", "search", "metadata_filtering", "keyword_search"])
    );
    let providers = server.get("/api/providers").await.ok();
    let local = providers["providers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|kind| kind["id"] == "local");
    assert!(
        local.unwrap()["capabilities"]
            .as_array()
            .unwrap()
            .contains(&json!("rerank"))
    );
}

#[tokio::test]
async fn health_check_with_details() {
    let far = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .start()
        .await;
    far.create("c").await;
    let yaml = format!(
        "services: {{far: {{provider: chromadb-wrapper, url: {:?}}}}}",
        far.url("")
    );
    let server = Setup::without_models().config(&yaml).start().await;
    server.create("a").await;
    server.create("b").await;
    let services = server.get("/api/services").await.ok();
    for (service, collections) in services["services"].as_array().unwrap().iter().zip([2, 1]) {
        let health = &service["health"];
        assert_eq!(health["status"], "healthy", "{health}");
        assert!(health["timestamp"].as_str().unwrap().ends_with('Z'), "{health}");
        assert!(
            health["latency_ms"].as_f64().unwrap() >= 0.0 && health["message"].is_string(),
            "{health}"
        );
        assert_eq!(health["details"]["collections_count"], collections, "{health}");
        assert!(
            health["details"]["storage_bytes"].as_u64().unwrap() > 0,
            "{health}"
        );
    }
    // The models that a user interface can offer.
    assert_eq!(
        services["services"][1]["health"]["details"]["embedding_models"][0]["id"],
        "tiny"
    );
    let (_, _) = far.stop();
    let down = server.get("/api/services").await.ok();
    let health = &down["services"][1]["health"];
    assert_eq!(health["status"], "unhealthy", "{health}");
    assert!(health["details"]["error"].is_string(), "{health}");
}
