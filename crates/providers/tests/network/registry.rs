//! The registry of RAG backends: found, described, checked, connected.

use ragstone_core::provider::{Capability, HealthStatus};
use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::AddressRule;
use ragstone_providers::rag::{ConnectContext, Registry};
use serde_json::{Value, json};

use crate::common::server::{Reply, TestServer, refusing_url};
use crate::common::{connect, embedders, service, try_connect};

#[test]
fn rag_provider_discovery() {
    let registry = Registry::built_in();
    let described: Vec<Value> = registry
        .kinds()
        .map(|k| serde_json::to_value(&k.description).unwrap())
        .collect();
    let ids: Vec<&str> = described.iter().map(|d| d["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["chromadb", "chromadb-wrapper"]);
    for description in &described {
        for field in ["display_name", "description"] {
            assert!(!description[field].as_str().unwrap().is_empty());
        }
    }
    let of_wrapper = json!([
        "collections",
        "search",
        "embeddings",
        "metadata_filtering",
        "rerank",
        "keyword_search"
    ]);
    assert_eq!(described[1]["capabilities"], of_wrapper);
}

#[test]
fn rag_provider_registration() {
    let mut registry = Registry::default();
    assert!(registry.kind("chromadb").is_none());
    registry.register(Registry::built_in().kind("chromadb").unwrap().clone());
    assert!(registry.kind("chromadb").is_some());
}

#[test]
fn rag_provider_selection() {
    let refusal = try_connect(json!({"provider": "pinecone", "url": "http://h"}), embedders())
        .err()
        .unwrap();
    assert_eq!(
        refusal.to_string(),
        "Unknown provider 'pinecone'; known are: chromadb, chromadb-wrapper"
    );
    assert!(
        try_connect(
            json!({"provider": "chromadb", "url": "http://localhost:1"}),
            embedders()
        )
        .is_ok()
    );
}

#[test]
fn provider_initialization_with_schema() {
    for kind in Registry::built_in().kinds() {
        let schema = &kind.schema;
        assert_eq!(schema["required"], json!(["url"]));
        assert_eq!(schema["additionalProperties"], false);
        let fields = schema["properties"].as_object().unwrap();
        for (name, field) in fields {
            assert!(field["title"].is_string(), "{name} has a label");
            assert!(field["description"].is_string(), "{name} has a description");
            // Without credentials means without them: there is nothing to fill in.
            let has_default = !matches!(name.as_str(), "url" | "auth");
            assert_eq!(
                field.get("default").is_some(),
                has_default,
                "{name} has a default"
            );
        }
        assert!(fields["url"]["examples"].is_array(), "a placeholder");
    }
    for (config, field) in [
        (json!({}), "url"),
        (json!({"url": "nonsense"}), "url"),
        (json!({"url": "http://user:pass@h"}), "url"),
        (json!({"url": "http://h", "timeoutMs": "soon"}), "timeoutMs"),
        (json!({"url": "http://h", "timeoutMs": 0}), "timeoutMs"),
        (
            json!({"url": "http://h", "retry": {"maxAttempts": 99}}),
            "retry.maxAttempts",
        ),
        (
            json!({"url": "http://h", "auth": {"type": "bearer"}}),
            "auth.token",
        ),
        (
            json!({"url": "http://h", "auth": {"type": "bearer", "token": "${UNSET}"}}),
            "auth.token",
        ),
        (json!({"url": "http://h", "colour": "red"}), "colour"),
    ] {
        for provider in ["chromadb", "chromadb-wrapper"] {
            let mut config = config.clone();
            config["provider"] = provider.into();
            let refusal = try_connect(config, embedders()).err().unwrap().to_string();
            assert!(refusal.starts_with(&format!("{field}:")), "{refusal}");
        }
    }
    let config = json!({"provider": "chromadb", "url": "http://h", "tenant": "../x"});
    assert!(
        try_connect(config, embedders())
            .err()
            .unwrap()
            .to_string()
            .starts_with("tenant:")
    );
}

#[tokio::test]
async fn provider_capabilities_declaration() {
    let capabilities = connect(json!({"provider": "chromadb", "url": "http://localhost:1"})).capabilities();
    assert!(
        capabilities.contains(&Capability::MetadataFiltering) && !capabilities.contains(&Capability::Rerank)
    );
    assert!(!capabilities.contains(&Capability::KeywordSearch));
}

#[tokio::test]
async fn health_check_with_details() {
    let server = service::start(true).await;
    let health = connect(json!({"provider": "chromadb-wrapper", "url": server.url}))
        .health()
        .await;
    assert_eq!(health.status, HealthStatus::Healthy);
    assert_eq!(health.details["collections_count"], 0);
    assert_eq!(health.details["storage_bytes"], 1);
    assert_eq!(health.details["cross_encoder"]["model"], "x");
    let wire = serde_json::to_value(&health).unwrap();
    assert!(
        ["status", "message", "timestamp", "latency_ms", "details"]
            .iter()
            .all(|f| wire.get(f).is_some())
    );

    // Whether it lives, a service tells everybody; the rest needs the right key.
    for (status, said) in [(401, "does not accept the credentials"), (403, "denies access")] {
        let server = TestServer::start(move |seen, _| match seen.path() {
            "/health" => Reply::json(json!({"status": "healthy", "collections_count": 3})),
            "/api/v2/version" => Reply::json(json!("1.0")),
            _ => Reply::status(status, json!({"detail": "no"})),
        })
        .await;
        for provider in ["chromadb-wrapper", "chromadb"] {
            let health = connect(json!({"provider": provider, "url": server.url}))
                .health()
                .await;
            assert_eq!(health.status, HealthStatus::Unhealthy, "{health:?}");
            assert!(health.message.contains(said), "{health:?}");
            if provider == "chromadb-wrapper" {
                assert_eq!(health.details["collections_count"], 3);
            }
        }
    }

    for (provider, url) in [
        ("chromadb", refusing_url().await),
        ("chromadb-wrapper", refusing_url().await),
    ] {
        let config = json!({"provider": provider, "url": url, "retry": {"maxAttempts": 1}});
        let health = connect(config).health().await;
        assert_eq!(health.status, HealthStatus::Unhealthy);
        assert!(
            health.details["error"]
                .as_str()
                .unwrap()
                .contains("cannot be reached"),
            "{health:?}"
        );
    }
}

#[tokio::test]
async fn a_connection_from_a_client_reaches_no_private_address_unless_it_is_configured() {
    let server = TestServer::start(|_, _| Reply::json(json!({"status": "healthy"}))).await;
    let config: ServiceConfig =
        serde_json::from_value(json!({"provider": "chromadb-wrapper", "url": server.url})).unwrap();
    let connect = |allowed_hosts: Vec<String>| {
        let context = ConnectContext {
            service: "test",
            embedders: embedders(),
            addresses: AddressRule::Foreign { allowed_hosts },
            environment: &|_| None,
        };
        Registry::built_in().connect(&config, context)
    };
    let refusal = connect(Vec::new()).err().unwrap().to_string();
    assert!(
        refusal.starts_with("url:") && refusal.contains("private"),
        "{refusal}"
    );
    let allowed = connect(vec!["127.0.0.1".into()]).unwrap();
    assert_eq!(allowed.health().await.status, HealthStatus::Healthy);
}

#[tokio::test]
async fn a_service_is_as_it_says() {
    for (said, status) in [
        ("healthy", HealthStatus::Healthy),
        ("degraded", HealthStatus::Degraded),
        ("unhealthy", HealthStatus::Unhealthy),
        ("fine", HealthStatus::Degraded),
    ] {
        let server =
            TestServer::start(move |_, _| Reply::json(json!({"status": said, "version": "7"}))).await;
        let health = connect(json!({"provider": "chromadb-wrapper", "url": server.url}))
            .health()
            .await;
        assert_eq!(health.status, status, "{health:?}");
        assert_eq!(health.details["version"], "7", "{health:?}");
    }
}

#[tokio::test]
async fn a_collection_that_cannot_be_named_here_is_left_out() {
    let server = TestServer::start(|_, _| {
        let named = |name: &str| json!({"name": name, "count": 1, "metadata": {}});
        Reply::json(json!({"collections": [named("b"), named("not / a name"), named("a")]}))
    })
    .await;
    let provider = connect(json!({"provider": "chromadb-wrapper", "url": server.url}));
    let listed = provider.collections().await.unwrap();
    let names: Vec<&str> = listed.iter().map(|collection| collection.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
}
