//! Collections and documents through the `Storage` trait.

use crate::common::*;
use ragstone_core::storage::{MetadataUpdate, Page, Selection, StorageError, StorageQuery};
use ragstone_core::{Collection, CollectionName, Filter, Metadata};
use serde_json::json;

on_every_store!(
    collections_are_created_listed_changed_and_deleted,
    internal_collections_work_and_are_not_listed,
    documents_keep_their_order_through_replacement_and_reopening,
    deleting_counts_what_was_there,
    a_vector_of_another_width_changes_nothing,
    search_ranks_by_meaning_by_word_and_by_both,
);

fn ids(page: &ragstone_core::storage::DocumentPage) -> Vec<&str> {
    page.documents.iter().map(|d| d.id.as_str()).collect()
}

fn filter(value: serde_json::Value) -> Filter {
    Filter::parse(&value).unwrap()
}

async fn collections_are_created_listed_changed_and_deleted(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store
        .create_collection(&docs, metadata(json!({"a": 1, "b": 2})))
        .await
        .unwrap();
    store
        .create_collection(&name("archive"), Metadata::new())
        .await
        .unwrap();
    assert!(matches!(
        store.create_collection(&docs, Metadata::new()).await,
        Err(StorageError::CollectionExists(n)) if n == docs
    ));
    let names: Vec<_> = store
        .collections()
        .await
        .unwrap()
        .into_iter()
        .map(|c| c.name)
        .collect();
    assert_eq!(names, [name("archive"), name("docs")]);

    let merged = store
        .update_metadata(&docs, metadata(json!({"b": 3})), MetadataUpdate::Merge)
        .await
        .unwrap();
    assert_eq!(merged, metadata(json!({"a": 1, "b": 3})));
    let replaced = store
        .update_metadata(&docs, metadata(json!({"c": 4})), MetadataUpdate::Replace)
        .await
        .unwrap();
    assert_eq!(replaced, metadata(json!({"c": 4})));
    assert_eq!(
        store.collection(&docs).await.unwrap(),
        Collection {
            name: docs.clone(),
            count: 0,
            metadata: replaced,
            dimensions: None
        }
    );
    store.delete_collection(&docs).await.unwrap();
    assert!(matches!(
        store.collection(&docs).await,
        Err(StorageError::CollectionNotFound(_))
    ));
    assert!(matches!(
        store.delete_collection(&docs).await,
        Err(StorageError::CollectionNotFound(_))
    ));
    assert_eq!(store.health().await.unwrap().collections, 1);
}

async fn internal_collections_work_and_are_not_listed(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let memory = CollectionName::internal("knowledge");
    store.create_collection(&memory, Metadata::new()).await.unwrap();
    store
        .upsert(&memory, batch(vec![stored("a", "hello", json!({}), &[1.0, 0.0])]))
        .await
        .unwrap();
    assert_eq!(store.collection(&memory).await.unwrap().count, 1);
    assert_eq!(store.collections().await.unwrap(), []);
    assert_eq!(store.health().await.unwrap().collections, 0);
}

async fn documents_keep_their_order_through_replacement_and_reopening(engine: Engine) {
    let home = Home::new(engine).await;
    let docs = name("docs");
    let everything = Filter::everything();
    {
        let store = home.open().await;
        store.create_collection(&docs, Metadata::new()).await.unwrap();
        for document in ["c", "a", "b"] {
            store
                .upsert(
                    &docs,
                    batch(vec![stored(document, "first", json!({"n": 1}), &[1.0, 1.0])]),
                )
                .await
                .unwrap();
        }
        store
            .upsert(
                &docs,
                batch(vec![stored("a", "second", json!({"n": 2}), &[0.0, 2.0])]),
            )
            .await
            .unwrap();
        store.shut().await;
    }
    let store = home.open().await;
    let page = store.documents(&docs, &everything, ALL).await.unwrap();
    assert_eq!(ids(&page), ["c", "a", "b"]);
    assert_eq!(page.documents[1].text, "second");
    let second = Page { limit: 1, offset: 1 };
    let page = store.documents(&docs, &everything, second).await.unwrap();
    assert_eq!((ids(&page), page.total), (vec!["a"], 3));
    let page = store
        .documents(&docs, &filter(json!({"n": 2})), ALL)
        .await
        .unwrap();
    assert_eq!((ids(&page), page.total), (vec!["a"], 1));
    let none = Page { limit: 0, offset: 0 };
    let page = store.documents(&docs, &everything, none).await.unwrap();
    assert_eq!((page.documents.len(), page.total), (0, 3));
    assert_eq!(
        store.metadata_values(&docs, "n").await.unwrap(),
        [json!(1), json!(2)]
    );
    assert_eq!(store.collection(&docs).await.unwrap().dimensions, Some(2));
}

async fn deleting_counts_what_was_there(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let documents = (0..10)
        .map(|n| stored(&format!("d{n}"), "text", json!({"n": n}), &[1.0, n as f32]))
        .collect();
    store.upsert(&docs, batch(documents)).await.unwrap();
    let some = Selection::Ids(vec![id("d1"), id("d1"), id("nobody")]);
    assert_eq!(store.delete_documents(&docs, some).await.unwrap(), 1);
    let matching = Selection::Matching(filter(json!({"n": {"$lt": 5}})));
    assert_eq!(store.delete_documents(&docs, matching).await.unwrap(), 4);
    assert_eq!(store.collection(&docs).await.unwrap().count, 5);
    assert_eq!(store.document(&docs, &id("d1")).await.unwrap(), None);
    assert_eq!(store.empty(&docs).await.unwrap(), 5);
    let collection = store.collection(&docs).await.unwrap();
    assert_eq!((collection.count, collection.dimensions), (0, None));
    // An emptied collection takes vectors of another width.
    store
        .upsert(
            &docs,
            batch(vec![stored("x", "text", json!({}), &[1.0, 2.0, 3.0])]),
        )
        .await
        .unwrap();
    assert_eq!(store.collection(&docs).await.unwrap().dimensions, Some(3));
    store.examine().await;
}

async fn a_vector_of_another_width_changes_nothing(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    store
        .upsert(&docs, batch(vec![stored("a", "text", json!({}), &[1.0, 2.0])]))
        .await
        .unwrap();
    let wrong = batch(vec![stored("b", "text", json!({}), &[1.0, 2.0, 3.0])]);
    assert!(matches!(
        store.upsert(&docs, wrong).await,
        Err(StorageError::DimensionMismatch {
            expected: 2,
            actual: 3,
            ..
        })
    ));
    assert_eq!(store.collection(&docs).await.unwrap().count, 1);
    let request = StorageQuery {
        vector: Some(vec![1.0]),
        limit: 3,
        ..StorageQuery::default()
    };
    assert!(matches!(
        store.search(&docs, request).await,
        Err(StorageError::DimensionMismatch {
            expected: 2,
            actual: 1,
            ..
        })
    ));
}

async fn search_ranks_by_meaning_by_word_and_by_both(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store
        .create_collection(&docs, metadata(json!({"k": "v"})))
        .await
        .unwrap();
    let documents = vec![
        stored(
            "north",
            "part ZX-4417 for winter",
            json!({"kind": "a"}),
            &[0.0, 1.0],
        ),
        stored("east", "summer reading", json!({"kind": "b"}), &[1.0, 0.0]),
        stored("west", "winter winter tales", json!({"kind": "b"}), &[-1.0, 0.0]),
    ];
    store.upsert(&docs, batch(documents)).await.unwrap();
    let search = async |request: StorageQuery| {
        let outcome = store
            .search(&docs, StorageQuery { limit: 10, ..request })
            .await
            .unwrap();
        assert_eq!(outcome.metadata, metadata(json!({"k": "v"})));
        outcome
            .hits
            .into_iter()
            .map(|hit| (hit.document.id.as_str().to_owned(), hit.distance))
            .collect::<Vec<_>>()
    };
    let dense = search(StorageQuery {
        vector: Some(vec![3.0, 0.0]),
        ..StorageQuery::default()
    })
    .await;
    let expected = [("east", 0.0), ("north", 1.0), ("west", 2.0)];
    assert_eq!(dense, expected.map(|(id, d)| (id.to_owned(), Some(d))));
    let near = search(StorageQuery {
        vector: Some(vec![3.0, 0.0]),
        max_distance: Some(1.0),
        ..StorageQuery::default()
    })
    .await;
    assert_eq!(near.len(), 2);
    let keyword = search(StorageQuery {
        text: Some("zx-4417 winters".into()),
        ..StorageQuery::default()
    })
    .await;
    assert_eq!(keyword, [("north".to_owned(), None), ("west".to_owned(), None)]);
    let hybrid = search(StorageQuery {
        vector: Some(vec![3.0, 0.0]),
        text: Some("winter".into()),
        filter: filter(json!({"kind": "b"})),
        ..StorageQuery::default()
    })
    .await;
    assert_eq!(
        hybrid,
        [("west".to_owned(), Some(2.0)), ("east".to_owned(), Some(0.0))]
    );
}

#[tokio::test]
async fn a_data_directory_has_one_owner() {
    let directory = tempfile::tempdir().unwrap();
    let store = open(directory.path());
    let second = ragstone_store::SqliteStore::open(directory.path(), Default::default());
    assert!(second.err().unwrap().to_string().contains("in use by another"));
    drop(store);
    open(directory.path());
}
