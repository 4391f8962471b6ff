use std::collections::BTreeMap;

use ragstone_core::provider::ProviderQuery;
use serde_json::json;

use super::*;
use crate::Models;
use crate::test_parts::{LengthReranker, Parts, WordEmbedder, parts};

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
    Gateway::new(&parts.service, config)
}

#[tokio::test(flavor = "multi_thread")]
async fn this_process_passes_the_suite_of_all_backends() {
    let parts = with_models();
    let local = LocalProvider::new(parts.service.clone());
    ragstone_providers::testing::check_provider(&local, Some("words")).await;
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
async fn reranking_keeps_every_field() {
    let parts = with_models();
    let local = LocalProvider::new(parts.service.clone());
    let document = |text: &str| {
        json!({"text": text, "more": {"a": [1]}})
            .as_object()
            .unwrap()
            .clone()
    };
    let documents = vec![document("a"), document("ccc"), document("bb")];
    let reranked = local.rerank("q", documents.clone(), Some(2)).await;
    assert_eq!(reranked.warning, None);
    assert_eq!(
        serde_json::to_value(&reranked.documents).unwrap(),
        json!([
            {"text": "ccc", "more": {"a": [1]}, "rerank_score": 3.0, "original_rank": 2},
            {"text": "bb", "more": {"a": [1]}, "rerank_score": 2.0, "original_rank": 3},
        ])
    );
}

#[tokio::test]
async fn reranking_that_fails_changes_nothing() {
    let document = |text: &str| json!({"text": text}).as_object().unwrap().clone();
    let documents = vec![document("a"), document("fail")];
    for parts in [with_models(), parts(Models::default())] {
        let local = LocalProvider::new(parts.service.clone());
        let unchanged = local.rerank("q", documents.clone(), Some(1)).await;
        assert_eq!(unchanged.documents, documents);
        assert!(unchanged.warning.is_some());
    }
}

#[tokio::test]
async fn scores_are_written_with_the_digits_they_have() {
    let parts = with_models();
    parts
        .collection("c", json!({"embedding_model": "words"}), &["one two", "three"])
        .await;
    let local = LocalProvider::new(parts.service.clone());
    let query = ProviderQuery {
        text: Some("one".to_owned()),
        top_k: 2,
        ..ProviderQuery::default()
    };
    let name = ragstone_core::CollectionName::parse("c").unwrap();
    for hit in local.search(&name, query).await.unwrap().hits {
        let (distance, score) = (hit.distance.unwrap(), hit.score.unwrap());
        assert_eq!(score.to_string(), (1.0 - distance / 2.0).to_string());
    }
}
