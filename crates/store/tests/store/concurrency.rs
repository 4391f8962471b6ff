//! Many readers and writers at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::{join_all, try_join_all};
use ragstone_core::siblings::Expand;
use ragstone_core::storage::{Selection, SiblingsRequest, StorageError, StorageQuery, StoredDocument};
use ragstone_core::{Filter, Metadata};
use serde_json::json;

use crate::common::*;

on_every_store!(
    readers_see_the_state_before_or_after_a_write,
    one_failing_write_does_not_spoil_the_others,
);

/// A pair of documents that are only ever written together.
fn pair(number: usize, generation: u64) -> Vec<StoredDocument> {
    let angle = generation as f32;
    ["left", "right"]
        .map(|side| {
            let fields = json!({"generation": generation, "pair": number});
            stored(
                &format!("{side} {number}"),
                &format!("generation{generation}"),
                fields,
                &[angle.cos(), angle.sin()],
            )
        })
        .to_vec()
}

/// Whatever a search returns is one state: both sides of a pair, and of the same generation in
/// text, metadata and vector; and so are the siblings of each.
async fn check_search(store: &Arc<dyn Subject>, docs: &ragstone_core::CollectionName, number: usize) {
    let filter = Filter::parse(&json!({"pair": number})).unwrap();
    let request = StorageQuery {
        vector: Some(vec![1.0, 0.0]),
        filter: filter.clone(),
        limit: 10,
        siblings: Some(SiblingsRequest {
            expand: Expand {
                field: "pair".to_owned(),
                max_chars: None,
            },
            max_bytes: 10_000,
        }),
        ..StorageQuery::default()
    };
    let outcome = store.search(docs, request).await.unwrap();
    for hit in &outcome.hits {
        let siblings = hit.siblings.as_ref().unwrap();
        assert_eq!(siblings.len(), 2);
        assert!(siblings.iter().all(|sibling| sibling.text == hit.document.text));
    }
    assert!([0, 2].contains(&outcome.hits.len()));
    let generations: Vec<u64> = outcome
        .hits
        .iter()
        .map(|hit| {
            let generation = hit.document.metadata["generation"].as_u64().unwrap();
            assert_eq!(hit.document.text, format!("generation{generation}"));
            let distance = 1.0 - (generation as f32).cos();
            assert!((hit.distance.unwrap() - distance).abs() < 1e-4);
            generation
        })
        .collect();
    assert!(generations.windows(2).all(|both| both[0] == both[1]));
    let page = store.documents(docs, &filter, ALL).await.unwrap();
    assert_eq!(page.total, page.documents.len() as u64);
    assert!([0, 2].contains(&page.total));
}

async fn readers_see_the_state_before_or_after_a_write(engine: Engine) {
    const TASKS: usize = 32;
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let readers: Vec<_> = (0..TASKS)
        .map(|number| {
            let (store, docs, stop) = (store.clone(), docs.clone(), stop.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    check_search(&store, &docs, number).await;
                }
            })
        })
        .collect();
    let writers: Vec<_> = (0..TASKS)
        .map(|number| {
            let (store, docs) = (store.clone(), docs.clone());
            tokio::spawn(async move {
                for generation in 0..12 {
                    store
                        .upsert(&docs, batch(pair(number, generation)))
                        .await
                        .unwrap();
                    if generation % 4 == 3 {
                        let both = vec![id(&format!("left {number}")), id(&format!("right {number}"))];
                        let gone = store.delete_documents(&docs, Selection::Ids(both)).await.unwrap();
                        assert_eq!(gone, 2);
                    }
                }
                store.upsert(&docs, batch(pair(number, 99))).await.unwrap();
                // What is acknowledged is visible.
                let left = store
                    .document(&docs, &id(&format!("left {number}")))
                    .await
                    .unwrap();
                assert_eq!(left.unwrap().text, "generation99");
            })
        })
        .collect();
    try_join_all(writers).await.unwrap();
    stop.store(true, Ordering::Relaxed);
    try_join_all(readers).await.unwrap();
    assert_eq!(store.collection(&docs).await.unwrap().count, 2 * TASKS as u64);
    store.examine().await;
    store.shut().await;
    drop(store);
    let store = home.open().await;
    for number in 0..TASKS {
        check_search(&store, &docs, number).await;
    }
}

async fn one_failing_write_does_not_spoil_the_others(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    // The first document settles the width of the others, whichever of them arrive first.
    let first = batch(vec![stored("first", "text", json!({}), &[1.0, 2.0])]);
    store.upsert(&docs, first).await.unwrap();
    let (missing, width) = (name("missing"), [2, 3]);
    let writes = (0..40).map(|n| {
        let vector = vec![1.0; width[usize::from(n % 4 == 3)]];
        let documents = batch(vec![stored(&format!("d{n}"), "text", json!({}), &vector)]);
        store.upsert(if n % 5 == 4 { &missing } else { &docs }, documents)
    });
    let outcomes = join_all(writes).await;
    let done = outcomes.iter().filter(|o| o.is_ok()).count() as u64;
    for (n, outcome) in outcomes.iter().enumerate() {
        match outcome {
            Ok(()) => assert!(n % 4 != 3 && n % 5 != 4),
            Err(StorageError::CollectionNotFound(_)) => assert_eq!(n % 5, 4),
            Err(StorageError::DimensionMismatch { .. }) => assert_eq!(n % 4, 3),
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(store.collection(&docs).await.unwrap().count, 1 + done);
}
