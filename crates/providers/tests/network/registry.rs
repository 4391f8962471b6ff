//! The registry of RAG backends: found, described, checked, connected.

use ragstone_core::backend::{Capability, HealthStatus};
use ragstone_providers::config::ServiceConfig;
use ragstone_providers::http::{AddressRule, NamedHost};
use ragstone_providers::registry::{ConnectContext, Connected, ProviderDescription, ProviderKind, Registry};
use serde_json::{Value, json};

use crate::common::server::{Reply, TestServer, refusing_url};
use crate::common::{backend, connect, health_of, service};

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
    let description = ProviderDescription {
        id: "other-database",
        display_name: "Another database",
        description: "A kind that another crate adds.",
        capabilities: &[Capability::Search],
    };
    let mut registry = Registry::built_in();
    registry.register(ProviderKind::new(description, json!({}), |_, context| {
        assert_eq!(context.service, "mine");
        connect(json!({"provider": "chromadb", "url": "http://localhost:1"}))
    }));
    let ids: Vec<&str> = registry.kinds().map(|kind| kind.description.id).collect();
    assert_eq!(ids, ["chromadb", "chromadb-wrapper", "other-database"]);
    let config: ServiceConfig = serde_json::from_value(json!({"provider": "other-database"})).unwrap();
    let context = ConnectContext {
        service: "mine",
        addresses: AddressRule::Configured,
        environment: &|_| None,
    };
    let connected = registry.connect(&config, context).unwrap();
    assert!(matches!(connected, Connected::Storage(_)));
}

#[test]
fn rag_provider_selection() {
    let refusal = connect(json!({"provider": "pinecone", "url": "http://h"}))
        .err()
        .unwrap();
    assert_eq!(
        refusal.to_string(),
        "Unknown provider 'pinecone'; known are: chromadb, chromadb-wrapper"
    );
    assert!(connect(json!({"provider": "chromadb", "url": "http://localhost:1"})).is_ok());
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
            let refusal = connect(config).err().unwrap().to_string();
            assert!(refusal.starts_with(&format!("{field}:")), "{refusal}");
        }
    }
    let config = json!({"provider": "chromadb", "url": "http://h", "tenant": "../x", "database": "x"});
    let refusal = connect(config).err().unwrap();
    let mut fields: Vec<&str> = refusal
        .each()
        .into_iter()
        .filter_map(|error| Some(error.by_field()?.0))
        .collect();
    fields.sort_unstable();
    assert_eq!(fields, ["database", "tenant"]);
}

/// What the schema forbids is refused, and what it allows is taken.
#[test]
fn the_schema_says_what_is_taken() {
    let registry = Registry::built_in();
    let schema = &registry.kind("chromadb").unwrap().schema;
    for name in ["tenant", "database"] {
        assert_eq!(schema["properties"][name]["minLength"], 3);
        let pattern = schema["properties"][name]["pattern"].as_str().unwrap();
        assert!(pattern.starts_with('^') && pattern.ends_with('$'), "{pattern}");
    }
    let tried = |connection: Value| {
        let config = ServiceConfig {
            provider: "chromadb".to_owned(),
            connection: connection.as_object().unwrap().clone(),
        };
        let context = ConnectContext {
            service: "test",
            addresses: AddressRule::Configured,
            environment: &|_| None,
        };
        registry
            .connect(&config, context)
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    for (connection, field) in [
        (json!({"url": "http://h", "timeout_ms": 1}), "timeout_ms"),
        (
            json!({"url": "http://h", "retry": {"max_attempts": 1}}),
            "retry.max_attempts",
        ),
        (
            json!({"url": "http://h", "auth": {"type": "header", "key": "k"}}),
            "auth.type",
        ),
        (
            json!({"url": "http://h", "auth": {"type": "apiKey", "key": "k"}}),
            "auth.type",
        ),
        (
            json!({"url": "http://h", "auth": {"type": "bearer", "token": ""}}),
            "auth.token",
        ),
        (json!({"url": "http://h", "timeoutMs": 1.5}), "timeoutMs"),
    ] {
        let refusal = tried(connection).unwrap_err();
        assert!(refusal.starts_with(&format!("{field}:")), "{refusal}");
    }
    let whole = json!({"url": "http://h", "timeoutMs": 30000.0, "retry": {"maxAttempts": 3.0, "delayMs": 0.0},
        "auth": {"type": "api_key", "key": "k"}, "tenant": ".a-b.c_d"});
    tried(whole).unwrap();
}

#[test]
fn provider_capabilities_declaration() {
    let registry = Registry::built_in();
    let capabilities = registry.kind("chromadb").unwrap().description.capabilities;
    for offered in [Capability::MetadataFiltering, Capability::KeywordSearch] {
        assert!(capabilities.contains(&offered), "{capabilities:?}");
    }
    assert!(!capabilities.contains(&Capability::Rerank));
    let client = backend(json!({"provider": "chromadb-wrapper", "url": "http://localhost:1"}));
    assert!(client.capabilities().contains(&Capability::Rerank));
}

#[tokio::test]
async fn health_check_with_details() {
    let server = service::start(true).await;
    let health = health_of(json!({"provider": "chromadb-wrapper", "url": server.url})).await;
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
            let health = health_of(json!({"provider": provider, "url": server.url})).await;
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
        let health = health_of(config).await;
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
    let connect = |allowed: Vec<NamedHost>| {
        let context = ConnectContext {
            service: "test",
            addresses: AddressRule::Foreign { allowed },
            environment: &|_| None,
        };
        Registry::built_in().connect(&config, context)
    };
    let refusal = connect(Vec::new()).err().unwrap().to_string();
    assert!(
        refusal.starts_with("url:") && refusal.contains("private"),
        "{refusal}"
    );
    let named = |url: &str| vec![NamedHost::of_url(url).unwrap()];
    let Connected::Backend(allowed) = connect(named(&server.url)).unwrap() else {
        panic!("it is a backend")
    };
    assert_eq!(allowed.health().await.status, HealthStatus::Healthy);
    let other_port = connect(named("http://127.0.0.1:1")).err().unwrap().to_string();
    assert!(other_port.starts_with("url:"), "{other_port}");
}

/// Whatever answers at an address, only what a service tells of itself is shown.
#[tokio::test]
async fn only_the_facts_of_a_service_are_details() {
    let server = TestServer::start(|_, _| {
        Reply::json(
            json!({"status": "healthy", "version": "1", "cross_encoder": {"model": "x"},
            "cluster_secret": "s", "nodes": [{"address": "10.0.0.1"}]}),
        )
    })
    .await;
    let health = health_of(json!({"provider": "chromadb-wrapper", "url": server.url})).await;
    let shown: Vec<&String> = health.details.keys().collect();
    assert_eq!(shown, ["cross_encoder", "version"], "{health:?}");
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
        let health = health_of(json!({"provider": "chromadb-wrapper", "url": server.url})).await;
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
    let client = backend(json!({"provider": "chromadb-wrapper", "url": server.url}));
    let listed = client.collections().await.unwrap();
    let names: Vec<&str> = listed.iter().map(|collection| collection.name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
}
