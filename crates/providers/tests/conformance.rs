//! Every RAG backend passes the same suite: the one over the service routes against a service in
//! memory, and the one for ChromaDB against a real server.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::chroma::ChromaServer;
use common::{MODEL, connect, embedders, service, try_connect};
use ragstone_core::document::NewDocument;
use ragstone_core::provider::{HealthStatus, ProviderError, ProviderQuery, RagProvider};
use ragstone_core::storage::Page;
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use ragstone_providers::testing::{check_provider, status};
use serde_json::{Value, json};

#[tokio::test]
async fn the_wrapper_conforms() {
    let server = service::start(true).await;
    let provider = connect(json!({"provider": "chromadb-wrapper", "url": server.url}));
    check_provider(&*provider, Some(MODEL)).await;
}

fn provider(server: &ChromaServer) -> Arc<dyn RagProvider> {
    connect(json!({"provider": "chromadb", "url": server.url(), "retry": {"maxAttempts": 1}}))
}

fn name(text: &str) -> CollectionName {
    CollectionName::parse(text).unwrap()
}

fn documents(count: usize, metadata: impl Fn(usize) -> Value) -> Vec<NewDocument> {
    (0..count)
        .map(|i| NewDocument {
            document: Document {
                id: DocumentId::parse(format!("d{i}")).unwrap(),
                text: format!("text {i}"),
                metadata: metadata(i).as_object().unwrap().clone(),
            },
            embedding: Some(vec![1.0, i as f32, 3.0, 4.0]),
        })
        .collect()
}

/// One server for all of it: starting one takes longer than everything else.
#[tokio::test]
async fn chromadb_conforms() {
    let server = ChromaServer::start().await;
    let provider = provider(&server);
    check_provider(&*provider, Some(MODEL)).await;
    more_documents_than_one_batch_takes(&*provider).await;
    documents_of_other_clients_are_filtered_alike(&server, &*provider).await;
    collections_that_cannot_be_searched_or_named_are_refused(&server, &*provider).await;
    odd_items_of_other_clients_are_left_out(&server, &*provider).await;
    numbers_that_other_clients_change_are_seen(&server, &*provider).await;
    vectors_keep_their_length_where_it_counts(&server, &*provider).await;
    a_collection_is_searched_while_it_gets_its_first_documents(&*provider).await;
    a_missing_database_is_an_unhealthy_service(&server).await;
    a_missing_database_is_the_services_fault(&server).await;
}

async fn more_documents_than_one_batch_takes(provider: &dyn RagProvider) {
    let name = name("large");
    provider.create_collection(&name, Metadata::new()).await.unwrap();
    let added = provider
        .add_documents(&name, documents(6000, |i| json!({"third": i % 3, "l": [i % 2]})))
        .await;
    assert_eq!(added.unwrap().ids.len(), 6000);
    let filter = Filter::parse(&json!({"third": {"$ne": 1}, "l": 0})).unwrap();
    let page = Page {
        limit: 2,
        offset: 1998,
    };
    let page = provider.documents(&name, &filter, page).await.unwrap();
    let ids: Vec<&str> = page.documents.iter().map(|d| d.id.as_str()).collect();
    assert_eq!((ids.as_slice(), page.total), (&["d5994", "d5996"][..], 2000));
    assert_eq!(provider.empty(&name).await.unwrap(), 6000);
    provider.delete_collection(&name).await.unwrap();
}

/// ChromaDB knows the width of a collection before it has its first documents, and fails meanwhile.
async fn a_collection_is_searched_while_it_gets_its_first_documents(provider: &dyn RagProvider) {
    for round in 0..4 {
        let name = name(&format!("first{round}"));
        provider.create_collection(&name, Metadata::new()).await.unwrap();
        let done = AtomicBool::new(false);
        let write = async {
            let added = provider
                .add_documents(&name, documents(2000, |i| json!({"n": i})))
                .await;
            done.store(true, Ordering::Relaxed);
            added.unwrap();
        };
        let search = async {
            let mut answers = 0;
            while !done.load(Ordering::Relaxed) {
                let query = ProviderQuery {
                    vector: Some(vec![1.0, 2.0, 3.0, 4.0]),
                    top_k: 5,
                    ..ProviderQuery::default()
                };
                let outcome = provider.search(&name, query).await;
                outcome.unwrap_or_else(|error| panic!("after {answers} answers: {error:?}"));
                answers += 1;
            }
            assert!(answers > 0);
        };
        tokio::join!(write, search);
        provider.delete_collection(&name).await.unwrap();
    }
}

async fn raw(server: &ChromaServer, path: &str, body: Value) -> Value {
    let url = format!(
        "{}/api/v2/tenants/default_tenant/databases/default_database/collections{path}",
        server.url()
    );
    let answer = reqwest::Client::new().post(url).json(&body).send().await.unwrap();
    assert!(answer.status().is_success(), "{}", answer.text().await.unwrap());
    answer.json().await.unwrap()
}

async fn documents_of_other_clients_are_filtered_alike(server: &ChromaServer, provider: &dyn RagProvider) {
    let created = raw(
        server,
        "",
        json!({"name": "foreign", "configuration": {"hnsw": {"space": "cosine"}}}),
    )
    .await;
    let id = created["id"].as_str().unwrap();
    let metadatas =
        json!([{"l": ["a", "b"]}, {"l": [1, 2]}, {"l": [1.0, 2.5]}, {"l": 1}, {"l": [true]}, null]);
    let body = json!({"ids": ["p", "q", "r", "s", "t", "u"], "embeddings": vec![[1.0, 2.0]; 6], "metadatas": metadatas});
    raw(server, &format!("/{id}/upsert"), body).await;
    let everything = Page { limit: 10, offset: 0 };
    for (filter, expected) in [
        (json!({"l": "a"}), vec!["p"]),
        (json!({"l": 1}), vec!["q", "r", "s"]),
        (json!({"l": {"$gt": 1}}), vec!["q", "r"]),
        (json!({"l": true}), vec!["t"]),
        (json!({"l": {"$exists": false}}), vec!["u"]),
        (json!({"l": {"$nin": [1, "a"]}}), vec!["t", "u"]),
    ] {
        let parsed = Filter::parse(&filter).unwrap();
        let page = provider
            .documents(&name("foreign"), &parsed, everything)
            .await
            .unwrap();
        let ids: Vec<&str> = page.documents.iter().map(|d| d.id.as_str()).collect();
        assert_eq!(ids, expected, "{filter}");
    }
}

async fn collections_that_cannot_be_searched_or_named_are_refused(
    server: &ChromaServer,
    provider: &dyn RagProvider,
) {
    let created = raw(server, "", json!({"name": "euclid"})).await;
    let id = created["id"].as_str().unwrap();
    raw(
        server,
        &format!("/{id}/upsert"),
        json!({"ids": ["a"], "embeddings": [[1.0, 2.0]]}),
    )
    .await;
    let query = ProviderQuery {
        vector: Some(vec![1.0, 2.0]),
        top_k: 1,
        ..ProviderQuery::default()
    };
    let refusal = provider.search(&name("euclid"), query).await.unwrap_err();
    assert!(
        matches!(&refusal, ProviderError::Unsupported(m) if m.contains("'l2'")),
        "{refusal}"
    );
    for bad in ["ab", "abc-", "x"] {
        let refusal = provider
            .create_collection(&name(bad), Metadata::new())
            .await
            .unwrap_err();
        assert_eq!(status(&refusal), 400, "{refusal}");
        assert_eq!(status(&provider.collection(&name(bad)).await.unwrap_err()), 404);
    }
}

async fn a_missing_database_is_an_unhealthy_service(server: &ChromaServer) {
    let config = json!({"provider": "chromadb", "url": server.url(), "database": "nowhere"});
    let health = try_connect(config, embedders()).unwrap().health().await;
    assert_eq!(health.status, HealthStatus::Unhealthy, "{health:?}");
}

const COLLECTIONS: &str = "api/v2/tenants/default_tenant/databases/default_database/collections";

/// A collection that another client makes, and its id.
async fn foreign(server: &ChromaServer, name: &str, metadata: Value) -> String {
    let configuration = json!({"hnsw": {"space": "cosine"}});
    let body = json!({"name": name, "metadata": metadata, "configuration": configuration});
    raw(server, "", body).await["id"].as_str().unwrap().to_owned()
}

async fn odd_items_of_other_clients_are_left_out(server: &ChromaServer, provider: &dyn RagProvider) {
    foreign(server, "undecodable", json!({"ragstone:json": "{no JSON"})).await;
    let id = foreign(server, "odd-items", json!({"fine": true})).await;
    let long = "x".repeat(600);
    let body = json!({
        "ids": ["a", long, "b", "c"], "embeddings": [[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3]],
        "documents": ["one", "odd", "two", "broken"],
        "metadatas": [{"f": 1}, {"f": 1}, {"f": 1}, {"ragstone:json": "{no JSON", "ragstone:encoded": true}],
    });
    raw(server, &format!("/{id}/upsert"), body).await;

    let listed = provider.collections().await.unwrap();
    let listed: Vec<&str> = listed.iter().map(|c| c.name.as_str()).collect();
    assert!(
        listed.contains(&"odd-items") && !listed.contains(&"undecodable"),
        "{listed:?}"
    );
    let odd = name("odd-items");
    let ids = |documents: &[Document]| {
        let ids = documents.iter().map(|d| d.id.as_str().to_owned());
        ids.collect::<Vec<_>>()
    };
    let everything = Page { limit: 10, offset: 0 };
    for filter in [json!({}), json!({"f": {"$exists": true}})] {
        let filter = Filter::parse(&filter).unwrap();
        let page = provider.documents(&odd, &filter, everything).await.unwrap();
        assert_eq!(ids(&page.documents), ["a", "b"], "{filter:?}");
    }
    let second = Page { limit: 2, offset: 2 };
    let page = provider.documents(&odd, &Filter::everything(), second).await;
    assert_eq!(ids(&page.unwrap().documents), ["b"], "pages count what is there");
    let query = ProviderQuery {
        vector: Some(vec![1.0, 0.1]),
        top_k: 2,
        ..ProviderQuery::default()
    };
    let hits = provider.search(&odd, query).await.unwrap().hits;
    let hits: Vec<Document> = hits.into_iter().map(|hit| hit.document).collect();
    assert_eq!(ids(&hits).len(), 2, "{hits:?}");
    assert_eq!(provider.metadata_values(&odd, "f").await.unwrap(), [1]);
}

async fn numbers_that_other_clients_change_are_seen(server: &ChromaServer, provider: &dyn RagProvider) {
    let changed = name("changed");
    provider
        .create_collection(&changed, Metadata::new())
        .await
        .unwrap();
    let third = json!({"n": 271.0 / 3.0});
    provider
        .add_documents(&changed, documents(1, |_| third.clone()))
        .await
        .unwrap();
    let metadata = async || {
        let page = Page { limit: 1, offset: 0 };
        let page = provider.documents(&changed, &Filter::everything(), page).await;
        Value::Object(page.unwrap().documents[0].metadata.clone())
    };
    assert_eq!(metadata().await, third, "to the last digit");
    let url = format!("{}/{COLLECTIONS}/changed", server.url());
    let described: Value = reqwest::get(url).await.unwrap().json().await.unwrap();
    let id = described["id"].as_str().unwrap();
    let body = json!({"ids": ["d0"], "metadatas": [{"n": 91.5}]});
    raw(server, &format!("/{id}/update"), body).await;
    assert_eq!(metadata().await, json!({"n": 91.5}));
}

async fn vectors_keep_their_length_where_it_counts(server: &ChromaServer, provider: &dyn RagProvider) {
    let created = raw(server, "", json!({"name": "lengths-count"})).await;
    let id = created["id"].as_str().unwrap();
    provider
        .add_documents(&name("lengths-count"), documents(1, |_| json!({})))
        .await
        .unwrap();
    let asked = json!({"ids": ["d0"], "include": ["embeddings"]});
    let found = raw(server, &format!("/{id}/get"), asked).await;
    assert_eq!(found["embeddings"], json!([[1.0, 0.0, 3.0, 4.0]]));
}

/// Chroma itself lists it as empty, and knows no collection in it.
async fn a_missing_database_is_the_services_fault(server: &ChromaServer) {
    let config = json!({"provider": "chromadb", "url": server.url(), "database": "nowhere"});
    let provider = try_connect(config, embedders()).unwrap();
    let any = name("any");
    let outcomes = [
        provider.collections().await.map(|_| ()),
        provider.collection(&any).await.map(|_| ()),
        provider.delete_collection(&any).await,
        provider
            .create_collection(&any, Metadata::new())
            .await
            .map(|_| ()),
        provider.metadata_values(&any, "f").await.map(|_| ()),
    ];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(status(&error), 502, "{error}");
        assert!(error.to_string().contains("'database'"), "{error}");
    }
}
