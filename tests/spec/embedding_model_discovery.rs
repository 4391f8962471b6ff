//! Requirement: Embedding Model Discovery

use serde_json::json;

use crate::support::{Setup, fixtures, plain};

#[tokio::test]
async fn health_check_includes_embedding_models() {
    let (bert, dense) = (fixtures::model("bert"), fixtures::model("bert-dense"));
    let server = Setup::serve()
        .embeddings(&[("small", &bert), ("other", &dense)])
        .start()
        .await;
    let health = server.get("/health").await.ok();
    let mut models = health["embedding_models"].as_array().unwrap().clone();
    models.sort_by_key(|model| model["id"].as_str().unwrap().to_owned());
    let other = &models[0];
    assert_eq!(
        (&other["id"], &other["status"]),
        (&json!("other"), &json!("loaded"))
    );
    assert_eq!(
        models[1],
        json!({"id": "small", "name": bert.display().to_string(), "status": "loaded", "dimensions": fixtures::DIMENSIONS})
    );
    assert_eq!(models.len(), 2);
}

#[tokio::test]
async fn health_check_without_embedding_models() {
    let server = plain().await;
    let health = server.get("/health").await.ok();
    let mut keys: Vec<&str> = health.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    // Only other engines than the embedded one declare this.
    keys.retain(|key| *key != "store");
    assert_eq!(
        keys,
        [
            "collections_count",
            "status",
            "storage_bytes",
            "timestamp",
            "version"
        ]
    );
}

#[tokio::test]
async fn node_js_provider_detects_embedding_capabilities() {
    let service = Setup::serve()
        .embeddings(&[("small", &fixtures::model("bert"))])
        .start()
        .await;
    let yaml = format!(
        "services: {{far: {{provider: chromadb-wrapper, url: {:?}}}}}",
        service.url("")
    );
    let gateway = Setup::without_models().config(&yaml).start().await;
    let services = gateway.get("/api/services").await.ok();
    let details = |n: usize| &services["services"][n]["health"]["details"];
    let models = service.get("/health").await.ok()["embedding_models"].clone();
    assert_eq!(details(1)["embedding_models"], models);
    assert_eq!(
        details(0).get("embedding_models"),
        None,
        "this server has none: {services}"
    );
}
