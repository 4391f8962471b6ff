//! ChromaDB as a service of the gateway, whose server has other clients, too.

use ragstone_core::backend::HealthStatus;
use ragstone_core::call::CallError;

use super::common::{health_of, storage};
use super::*;

fn service(server: &ChromaServer) -> Arc<dyn Storage> {
    storage(json!({"provider": "chromadb", "url": server.url(), "retry": {"maxAttempts": 1}}))
}

fn batch(count: usize, metadata: impl Fn(usize) -> Value) -> DocumentBatch {
    let documents = (0..count).map(|i| StoredDocument {
        document: Document {
            id: DocumentId::parse(format!("d{i}")).unwrap(),
            text: format!("text {i}"),
            metadata: object(metadata(i)),
        },
        vector: vec![1.0, i as f32, 3.0, 4.0],
    });
    DocumentBatch {
        documents: documents.collect(),
        model: None,
    }
}

fn near(vector: Vec<f32>, limit: usize) -> StorageQuery {
    StorageQuery {
        vector: Some(vector),
        limit,
        ..StorageQuery::default()
    }
}

/// One server for all of it: starting one takes longer than everything else.
#[tokio::test]
async fn chromadb_as_a_service() {
    let server = ChromaServer::start().await;
    let service = service(&server);
    let health = service.service_health().await.unwrap();
    assert_eq!(health.status, HealthStatus::Healthy, "{health:?}");
    assert_eq!(health.details["collections_count"], 0);
    assert!(health.details.contains_key("version"), "{health:?}");
    more_documents_than_one_batch_takes(&*service).await;
    documents_of_other_clients_are_filtered_alike(&server, &*service).await;
    documents_of_other_clients_are_ranked_by_words(&*service).await;
    documents_of_other_clients_are_exported(&server, &*service).await;
    collections_that_cannot_be_searched_or_named_are_refused(&server, &*service).await;
    collections_keep_their_width(&*service).await;
    odd_items_of_other_clients_are_left_out(&server, &*service).await;
    numbers_that_other_clients_change_are_seen(&server, &*service).await;
    vectors_keep_their_length_where_it_counts(&server, &*service).await;
    searches_report_the_models_at_both_ends(&*service).await;
    a_collection_is_searched_while_it_gets_its_first_documents(&*service).await;
    a_missing_database_is_an_unhealthy_service(&server).await;
    a_missing_database_is_the_services_fault(&server).await;
}

async fn more_documents_than_one_batch_takes(service: &dyn Storage) {
    let name = name("large");
    service.create_collection(&name, Metadata::new()).await.unwrap();
    let batch = batch(6000, |i| json!({"third": i % 3, "l": [i % 2]}));
    service.upsert(&name, batch).await.unwrap();
    let filter = Filter::parse(&json!({"third": {"$ne": 1}, "l": 0})).unwrap();
    let page = Page {
        limit: 2,
        offset: 1998,
    };
    let page = service.documents(&name, &filter, page).await.unwrap();
    let ids: Vec<&str> = page.documents.iter().map(|d| d.id.as_str()).collect();
    assert_eq!((ids.as_slice(), page.total), (&["d5994", "d5996"][..], 2000));
    assert_eq!(service.empty(&name).await.unwrap(), 6000);
    service.delete_collection(&name).await.unwrap();
}

/// ChromaDB knows the width of a collection before it has its first documents, and fails meanwhile.
async fn a_collection_is_searched_while_it_gets_its_first_documents(service: &dyn Storage) {
    for round in 0..4 {
        let name = name(&format!("first{round}"));
        service.create_collection(&name, Metadata::new()).await.unwrap();
        let done = AtomicBool::new(false);
        let write = async {
            let added = service.upsert(&name, batch(2000, |i| json!({"n": i}))).await;
            done.store(true, Ordering::Relaxed);
            added.unwrap();
        };
        let search = async {
            let mut answers = 0;
            while !done.load(Ordering::Relaxed) {
                let outcome = service.search(&name, near(vec![1.0, 2.0, 3.0, 4.0], 5)).await;
                outcome.unwrap_or_else(|error| panic!("after {answers} answers: {error:?}"));
                answers += 1;
            }
            assert!(answers > 0);
        };
        tokio::join!(write, search);
        service.delete_collection(&name).await.unwrap();
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

async fn documents_of_other_clients_are_filtered_alike(server: &ChromaServer, service: &dyn Storage) {
    let created = raw(
        server,
        "",
        json!({"name": "foreign", "configuration": {"hnsw": {"space": "cosine"}}}),
    )
    .await;
    let id = created["id"].as_str().unwrap();
    let metadatas =
        json!([{"l": ["a", "b"]}, {"l": [1, 2]}, {"l": [1.0, 2.5]}, {"l": 1}, {"l": [true]}, null]);
    let body = json!({"ids": ["p", "q", "r", "s", "t", "u"], "embeddings": vec![[1.0, 2.0]; 6], "metadatas": metadatas,
        "documents": ["a", "b", "c", "a lighthouse", "e", "f"]});
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
        let page = service
            .documents(&name("foreign"), &parsed, everything)
            .await
            .unwrap();
        let ids: Vec<&str> = page.documents.iter().map(|d| d.id.as_str()).collect();
        assert_eq!(ids, expected, "{filter}");
    }
}

async fn collections_that_cannot_be_searched_or_named_are_refused(
    server: &ChromaServer,
    service: &dyn Storage,
) {
    let created = raw(server, "", json!({"name": "euclid"})).await;
    let id = created["id"].as_str().unwrap();
    raw(
        server,
        &format!("/{id}/upsert"),
        json!({"ids": ["a"], "embeddings": [[1.0, 2.0]]}),
    )
    .await;
    let query = near(vec![1.0, 2.0], 1);
    let refusal = service.search(&name("euclid"), query).await.unwrap_err();
    assert!(
        matches!(&refusal, StorageError::Unsupported(m) if m.contains("'l2'")),
        "{refusal}"
    );
    for bad in ["ab", "abc-", "x"] {
        let refusal = service
            .create_collection(&name(bad), Metadata::new())
            .await
            .unwrap_err();
        assert!(matches!(refusal, StorageError::Unsupported(_)), "{refusal}");
        let missing = service.collection(&name(bad)).await;
        assert!(
            matches!(missing, Err(StorageError::CollectionNotFound(_))),
            "{missing:?}"
        );
    }
}

async fn a_missing_database_is_an_unhealthy_service(server: &ChromaServer) {
    let config = json!({"provider": "chromadb", "url": server.url(), "database": "nowhere"});
    let health = health_of(config).await;
    assert_eq!(health.status, HealthStatus::Unhealthy, "{health:?}");
}

const COLLECTIONS: &str = "api/v2/tenants/default_tenant/databases/default_database/collections";

async fn id_of(server: &ChromaServer, name: &str) -> String {
    let url = format!("{}/{COLLECTIONS}/{name}", server.url());
    let described: Value = reqwest::get(url).await.unwrap().json().await.unwrap();
    described["id"].as_str().unwrap().to_owned()
}

/// A collection that another client makes, and its id.
async fn foreign(server: &ChromaServer, name: &str, metadata: Value) -> String {
    let configuration = json!({"hnsw": {"space": "cosine"}});
    let body = json!({"name": name, "metadata": metadata, "configuration": configuration});
    raw(server, "", body).await["id"].as_str().unwrap().to_owned()
}

async fn odd_items_of_other_clients_are_left_out(server: &ChromaServer, service: &dyn Storage) {
    foreign(server, "undecodable", json!({"ragstone:json": "{no JSON"})).await;
    let id = foreign(server, "odd-items", json!({"fine": true})).await;
    let long = "x".repeat(600);
    let body = json!({
        "ids": ["a", long, "b", "c"], "embeddings": [[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [1.0, 0.3]],
        "documents": ["one", "odd", "two", "broken"],
        "metadatas": [{"f": 1}, {"f": 1}, {"f": 1}, {"ragstone:json": "{no JSON", "ragstone:encoded": true}],
    });
    raw(server, &format!("/{id}/upsert"), body).await;

    let listed = service.collections().await.unwrap();
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
        let page = service.documents(&odd, &filter, everything).await.unwrap();
        assert_eq!(ids(&page.documents), ["a", "b"], "{filter:?}");
    }
    let second = Page { limit: 2, offset: 2 };
    let page = service.documents(&odd, &Filter::everything(), second).await;
    assert_eq!(ids(&page.unwrap().documents), ["b"], "pages count what is there");
    let hits = service.search(&odd, near(vec![1.0, 0.1], 2)).await.unwrap().hits;
    let hits: Vec<Document> = hits.into_iter().map(|hit| hit.document).collect();
    assert_eq!(ids(&hits).len(), 2, "{hits:?}");
    assert_eq!(service.metadata_values(&odd, "f").await.unwrap(), [1]);
}

async fn numbers_that_other_clients_change_are_seen(server: &ChromaServer, service: &dyn Storage) {
    let changed = name("changed");
    service
        .create_collection(&changed, Metadata::new())
        .await
        .unwrap();
    let third = json!({"n": 271.0 / 3.0});
    service
        .upsert(&changed, batch(1, |_| third.clone()))
        .await
        .unwrap();
    let metadata = async || {
        let page = Page { limit: 1, offset: 0 };
        let page = service.documents(&changed, &Filter::everything(), page).await;
        Value::Object(page.unwrap().documents[0].metadata.clone())
    };
    assert_eq!(metadata().await, third, "to the last digit");
    let id = id_of(server, "changed").await;
    let body = json!({"ids": ["d0"], "metadatas": [{"n": 91.5}]});
    raw(server, &format!("/{id}/update"), body).await;
    assert_eq!(metadata().await, json!({"n": 91.5}));
}

async fn vectors_keep_their_length_where_it_counts(server: &ChromaServer, service: &dyn Storage) {
    let created = raw(server, "", json!({"name": "lengths-count"})).await;
    let id = created["id"].as_str().unwrap();
    let docs = name("lengths-count");
    service.upsert(&docs, batch(1, |_| json!({}))).await.unwrap();
    let asked = json!({"ids": ["d0"], "include": ["embeddings"]});
    let found = raw(server, &format!("/{id}/get"), asked).await;
    assert_eq!(found["embeddings"], json!([[1.0, 0.0, 3.0, 4.0]]));
    // Exported and imported again it is still as long.
    let exported = service.export(&docs, FIRST_TEN).await.unwrap().documents;
    assert!((exported[0].norm - 26_f32.sqrt()).abs() < 1e-5, "{exported:?}");
    service.import(&docs, exported).await.unwrap();
    let asked = json!({"ids": ["d0"], "include": ["embeddings"]});
    let found = raw(server, &format!("/{id}/get"), asked).await;
    let length = found["embeddings"][0][3].as_f64().unwrap();
    assert!((length - 4.0).abs() < 1e-5, "{found}");
}

/// Recreating it would lose the settings of whoever made it.
async fn collections_keep_their_width(service: &dyn Storage) {
    let docs = name("keeps-its-width");
    service.create_collection(&docs, Metadata::new()).await.unwrap();
    service.upsert(&docs, batch(1, |_| json!({}))).await.unwrap();
    service.empty(&docs).await.unwrap();
    assert_eq!(service.collection(&docs).await.unwrap().dimensions, Some(4));
    let mut narrow = batch(1, |_| json!({}));
    narrow.documents[0].vector.truncate(2);
    let refused = service.upsert(&docs, narrow).await;
    assert!(
        matches!(
            refused,
            Err(StorageError::DimensionMismatch {
                expected: 4,
                actual: 2,
                ..
            })
        ),
        "{refused:?}"
    );
    service.delete_collection(&docs).await.unwrap();
}

async fn documents_of_other_clients_are_ranked_by_words(service: &dyn Storage) {
    let query = |vector, text: &str| StorageQuery {
        vector,
        text: Some(text.to_owned()),
        limit: 3,
        ..StorageQuery::default()
    };
    let docs = name("foreign");
    for vector in [None, Some(vec![1.0, 2.0])] {
        let hits = service
            .search(&docs, query(vector, "lighthouse"))
            .await
            .unwrap()
            .hits;
        assert_eq!(hits[0].document.id.as_str(), "s", "{hits:?}");
        assert!(hits[0].ranks.keyword.is_some(), "{hits:?}");
    }
}

const FIRST_TEN: ExportRange = ExportRange {
    after: None,
    limit: 10,
};

async fn documents_of_other_clients_are_exported(server: &ChromaServer, service: &dyn Storage) {
    let docs = name("foreign");
    let page = service.export(&docs, FIRST_TEN).await.unwrap();
    assert_eq!((page.documents.len(), page.more), (6, false));
    for exported in &page.documents {
        assert!((exported.norm - 5_f32.sqrt()).abs() < 1e-6, "{exported:?}");
        assert_eq!(exported.model, None);
    }
    // A vector that another client changes has no longer the length that was recorded.
    let ours = name("changed-vector");
    service.create_collection(&ours, Metadata::new()).await.unwrap();
    service.upsert(&ours, batch(1, |_| json!({}))).await.unwrap();
    let id = id_of(server, "changed-vector").await;
    let body = json!({"ids": ["d0"], "embeddings": [[3.0, 0.0, 4.0, 0.0]]});
    raw(server, &format!("/{id}/update"), body).await;
    let exported = service.export(&ours, FIRST_TEN).await.unwrap().documents;
    assert!((exported[0].norm - 5.0).abs() < 1e-5, "{exported:?}");
    assert!((exported[0].vector[0] - 0.6).abs() < 1e-5, "{exported:?}");
    service.delete_collection(&ours).await.unwrap();
}

async fn searches_report_the_models_at_both_ends(service: &dyn Storage) {
    let docs = name("two-models");
    service.create_collection(&docs, Metadata::new()).await.unwrap();
    let model = |version: &str| ModelIdentity {
        id: "m".into(),
        version: version.into(),
        dimensions: 4,
    };
    for (first, version) in [(0, "1"), (1, "2"), (2, "3")] {
        let mut written = batch(first + 1, |_| json!({}));
        written.documents.drain(..first);
        written.model = Some(model(version));
        service.upsert(&docs, written).await.unwrap();
    }
    let both = [model("1"), model("3")];
    assert_eq!(service.vector_models(&docs).await.unwrap(), both);
    let by_words = StorageQuery {
        text: Some("text".to_owned()),
        limit: 1,
        ..StorageQuery::default()
    };
    let queries = vec![near(vec![1.0, 2.0, 3.0, 4.0], 2), by_words];
    let answers = service.search_many(&docs, queries).await.unwrap();
    assert_eq!(
        (answers[0].hits.len(), answers[0].models.as_slice()),
        (2, &both[..])
    );
    assert_eq!(
        (answers[1].hits.len(), answers[1].models.as_slice()),
        (1, &[][..])
    );
    service.delete_collection(&docs).await.unwrap();
}

/// Chroma itself lists it as empty, and knows no collection in it.
async fn a_missing_database_is_the_services_fault(server: &ChromaServer) {
    let config = json!({"provider": "chromadb", "url": server.url(), "database": "nowhere"});
    let service = storage(config);
    let any = name("any");
    let outcomes = [
        service.collections().await.map(|_| ()),
        service.collection(&any).await.map(|_| ()),
        service.delete_collection(&any).await,
        service.create_collection(&any, Metadata::new()).await.map(|_| ()),
        service.metadata_values(&any, "f").await.map(|_| ()),
    ];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, StorageError::Call(CallError::BadAnswer { .. })),
            "{error}"
        );
        assert!(error.to_string().contains("'database'"), "{error}");
    }
}
