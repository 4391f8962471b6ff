use std::collections::BTreeMap;

use ragstone_core::models::Models;
use ragstone_core::search::SearchQuery;
use serde_json::json;

use super::*;
use crate::testing::{LengthReranker, Parts, WordEmbedder, parts};

fn with_models() -> Parts {
    parts(Models::new(
        vec![WordEmbedder::new("words")],
        Some(Arc::new(LengthReranker)),
    ))
}

fn gateway(parts: &Parts, services: &str) -> Result<Gateway, ConfigError> {
    let services: BTreeMap<String, ServiceConfig> = serde_json::from_str(services).unwrap();
    let config = GatewayConfig {
        services: &services,
        reachable_hosts: Vec::new(),
        environment: &|name| (name == "TOKEN").then(|| "canary-token".to_owned()),
    };
    Gateway::new(parts.backend(), config)
}

#[tokio::test(flavor = "multi_thread")]
async fn this_process_passes_the_suite_of_all_backends() {
    let parts = with_models();
    #[cfg(any())]
    ragstone_providers::testing::check_backend(&parts.backend(), Some("words")).await;
}

#[tokio::test]
async fn the_configured_services_stand_beside_this_process() {
    let parts = with_models();
    let gateway = gateway(
        &parts,
        r#"{"far": {"provider": "chromadb-wrapper", "url": "http://127.0.0.1:1", "auth": {"type": "bearer", "token": "${TOKEN}"}}}"#,
    )
    .unwrap();
    let names: Vec<&str> = gateway
        .services()
        .iter()
        .map(|service| service.name.as_str())
        .collect();
    assert_eq!(names, ["local", "far"]);
    let unknown = gateway.service("near").err().unwrap();
    assert_eq!(unknown.to_string(), "Service \"near\" not found");
    let ids: Vec<&str> = gateway
        .registry()
        .kinds()
        .map(|kind| kind.description.id)
        .collect();
    assert_eq!(ids, ["chromadb", "chromadb-wrapper", "local"]);
}

#[test]
fn a_wrong_service_is_named_with_its_field() {
    let parts = with_models();
    for (services, field) in [
        (r#"{"far": {"provider": "chromadb-wrapper"}}"#, "services.far.url"),
        (
            r#"{"far": {"provider": "chromadb-wrapper", "url": "http://h", "auth": {"type": "bearer", "token": "${NO}"}}}"#,
            "services.far.auth.token",
        ),
        (
            r#"{"far": {"provider": "nonesuch"}}"#,
            "services.far.provider: unknown provider 'nonesuch'; known are: chromadb, chromadb-wrapper, local",
        ),
        (
            r#"{"far away": {"provider": "local"}}"#,
            "services.far away: the name",
        ),
        (r#"{"": {"provider": "local"}}"#, "services.: the name"),
        (
            r#"{"local": {"provider": "chromadb-wrapper", "url": "http://h"}}"#,
            "services.local",
        ),
    ] {
        let message = gateway(&parts, services).err().unwrap().to_string();
        assert!(message.contains(field), "{message}");
    }
}

#[tokio::test]
async fn a_tried_connection_learns_nothing_of_this_process() {
    let parts = with_models();
    let gateway = gateway(&parts, "{}").unwrap();
    let config = |connection: serde_json::Value| ServiceConfig {
        provider: "chromadb-wrapper".to_owned(),
        connection: connection.as_object().unwrap().clone(),
    };
    let stolen = config(json!({"url": "http://8.8.8.8", "auth": {"type": "bearer", "token": "${TOKEN}"}}));
    let message = gateway.try_connection(&stolen).await.unwrap_err().to_string();
    assert!(
        message.contains("TOKEN") && !message.contains("canary"),
        "{message}"
    );
    // Refused by the address alone: whether anything listens there cannot be found out.
    let inside = config(json!({"url": "http://127.0.0.1:9", "retry": {"maxAttempts": 1}}));
    let refusal = match gateway.try_connection(&inside).await {
        Err(error) => error.to_string(),
        Ok(health) => {
            assert_eq!(health.status, HealthStatus::Unhealthy);
            health.message
        }
    };
    assert!(!refusal.contains("refused"), "{refusal}");
}

#[tokio::test]
async fn reranking_gives_places_and_scores_best_first() {
    let parts = with_models();
    let texts = ["a", "ccc", "bb"].map(str::to_owned).to_vec();
    let ranked = parts.backend().rerank("q", texts, 2).await.unwrap();
    let ranked: Vec<(usize, f32)> = ranked.iter().map(|text| (text.index, text.score)).collect();
    assert_eq!(ranked, [(1, 3.0), (2, 2.0)]);
}

/// Hits keep their order, and the response says why.
#[tokio::test]
async fn reranking_that_fails_changes_nothing() {
    for parts in [
        with_models(),
        parts(Models::new(vec![WordEmbedder::new("words")], None)),
    ] {
        parts
            .collection("c", json!({"embedding_model": "words"}), &["one", "one fail"])
            .await;
        let query = SearchQuery {
            text: Some("one".to_owned()),
            rerank: true,
            ..SearchQuery::default()
        };
        let name = ragstone_core::CollectionName::parse("c").unwrap();
        let response = parts.backend().search(&name, query).await.unwrap();
        assert!(!response.reranked);
        let ids: Vec<&str> = response.hits.iter().map(|hit| hit.document.id.as_str()).collect();
        assert_eq!(ids, ["0", "1"]);
        assert!(
            response.warnings[0].starts_with("Reranking was skipped: "),
            "{:?}",
            response.warnings
        );
    }
}
