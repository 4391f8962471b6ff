//! Documents leave a store and enter another one as they were.

use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{Cursor, DocumentBatch, ExportRange, ExportedDocument, Selection, StorageError};
use ragstone_core::{CollectionName, DocumentId, Metadata};
use serde_json::json;

use crate::common::*;

on_every_store!(
    what_is_imported_is_exported_again_to_the_last_bit,
    pages_go_on_where_the_last_one_ended_whatever_is_written_meanwhile,
    what_cannot_be_imported_changes_nothing,
    what_made_the_vectors_of_documents_is_known,
);

async fn exported(store: &dyn Subject, docs: &CollectionName, limit: usize) -> Vec<ExportedDocument> {
    let mut all = Vec::new();
    let mut after = None;
    loop {
        let page = store.export(docs, ExportRange { after, limit }).await.unwrap();
        assert!(page.documents.len() <= limit);
        all.extend(page.documents);
        after = page.last;
        if !page.more {
            return all;
        }
    }
}

fn ids(documents: &[ExportedDocument]) -> Vec<&str> {
    documents.iter().map(|moved| moved.document.id.as_str()).collect()
}

/// Three models, two of them versions of one, and odd vectors.
async fn fill(store: &dyn Subject, docs: &CollectionName) {
    let model = |version: &str| ModelIdentity {
        id: "m".into(),
        version: version.into(),
        dimensions: 7,
    };
    let mut noise = Noise(8);
    for (part, model) in [None, Some(model("1")), Some(model("2"))].into_iter().enumerate() {
        let documents = (0..5)
            .map(|n| {
                let scale = [1.0, 1e-30, 1e30, 0.1, 7.0][n];
                let vector: Vec<f32> = noise.vector(7).iter().map(|x| x * scale).collect();
                let fields = json!({"n": n, "tags": ["a", null, 0.1], "deep": {"x": [1]}});
                stored(&format!("{part}-{n}"), &format!("text {n} ✓"), fields, &vector)
            })
            .collect();
        store
            .upsert(docs, DocumentBatch { documents, model })
            .await
            .unwrap();
    }
}

async fn what_is_imported_is_exported_again_to_the_last_bit(engine: Engine) {
    let (from, to) = (Home::new(engine).await, Home::new(engine).await);
    let (from, docs) = (from.open().await, name("docs"));
    from.create_collection(&docs, Metadata::new()).await.unwrap();
    fill(&*from, &docs).await;
    let before = exported(&*from, &docs, 4).await;
    assert_eq!(before.len(), 15);
    assert!(before.iter().any(|moved| (moved.norm - 1.0).abs() > 0.5));
    let models: Vec<Option<&str>> = before
        .iter()
        .map(|moved| moved.model.as_ref().map(|model| model.version.as_str()))
        .collect();
    assert_eq!((models[0], models[5], models[14]), (None, Some("1"), Some("2")));
    let target = to.open().await;
    target.create_collection(&docs, Metadata::new()).await.unwrap();
    for part in before.chunks(4) {
        target.import(&docs, part.to_vec()).await.unwrap();
    }
    // Again, as after an interruption: nothing is there twice and all keep their places.
    target.import(&docs, before[3..9].to_vec()).await.unwrap();
    assert_eq!(exported(&*target, &docs, 100).await, before);
    target.shut().await;
    drop(target);
    assert_eq!(exported(&*to.open().await, &docs, 1).await, before);
}

async fn pages_go_on_where_the_last_one_ended_whatever_is_written_meanwhile(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = (home.open().await, name("docs"));
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let page = |after, limit| store.export(&docs, ExportRange { after, limit });
    let none = page(None, 3).await.unwrap();
    assert_eq!((none.documents.len(), none.last, none.more), (0, None, false));
    let one = |n: usize| stored(&format!("d{n}"), "text", json!({}), &[1.0, n as f32]);
    store
        .upsert(&docs, batch((0..10).map(one).collect()))
        .await
        .unwrap();
    let first = page(None, 4).await.unwrap();
    assert_eq!(ids(&first.documents), ["d0", "d1", "d2", "d3"]);
    let gone = ["d2", "d3", "d4"].map(id).to_vec();
    store.delete_documents(&docs, Selection::Ids(gone)).await.unwrap();
    // A replaced document keeps its place, one that was deleted comes back at the end.
    store
        .upsert(&docs, batch(vec![one(0), one(7), one(2)]))
        .await
        .unwrap();
    let second = page(first.last, 4).await.unwrap();
    assert_eq!(ids(&second.documents), ["d5", "d6", "d7", "d8"]);
    let third = page(second.last, 4).await.unwrap();
    assert_eq!((ids(&third.documents), third.more), (vec!["d9", "d2"], false));
    let beyond = page(Some(Cursor(i64::MAX)), 4).await.unwrap();
    assert_eq!((beyond.documents.len(), beyond.more), (0, false));
    let exact = page(second.last, 2).await.unwrap();
    assert_eq!((exact.documents.len(), exact.more), (2, false));
}

async fn what_cannot_be_imported_changes_nothing(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = (home.open().await, name("docs"));
    let moved = |document_id: &str, vector: &[f32]| ExportedDocument {
        document: stored(document_id, "text", json!({}), vector).document,
        vector: vector.to_vec(),
        norm: 1.0,
        model: None,
    };
    let nowhere = store.import(&docs, vec![moved("a", &[1.0, 0.0])]).await;
    assert!(matches!(nowhere, Err(StorageError::CollectionNotFound(_))));
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let uneven = vec![moved("a", &[1.0, 0.0]), moved("b", &[1.0])];
    assert!(matches!(
        store.import(&docs, uneven).await,
        Err(StorageError::DimensionMismatch { .. })
    ));
    assert_eq!(store.collection(&docs).await.unwrap().count, 0);
}

async fn what_made_the_vectors_of_documents_is_known(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = (home.open().await, name("docs"));
    let ids = ["2-0", "none", "0-1", "1-4"].map(|id| DocumentId::parse(id).unwrap());
    let missing = store.models_by_id(&docs, &ids).await;
    assert!(
        matches!(missing, Err(StorageError::CollectionNotFound(_))),
        "{missing:?}"
    );
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    assert_eq!(store.models_by_id(&docs, &ids).await.unwrap(), []);
    fill(store.as_ref(), &docs).await;
    let mut found: Vec<(String, Option<String>)> = store
        .models_by_id(&docs, &ids)
        .await
        .unwrap()
        .into_iter()
        .map(|(id, model)| (id.to_string(), model.map(|model| model.version)))
        .collect();
    found.sort();
    let of = |id: &str, version: Option<&str>| (id.to_owned(), version.map(str::to_owned));
    assert_eq!(
        found,
        [of("0-1", None), of("1-4", Some("1")), of("2-0", Some("2"))]
    );
}
