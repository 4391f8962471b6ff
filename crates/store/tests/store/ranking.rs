//! Rankings worked out by hand.

use std::collections::BTreeSet;
use std::sync::Arc;

use ragstone_core::fusion::{FusionWeights, Rank};
use ragstone_core::storage::{SearchHit, StorageQuery};
use ragstone_core::{CollectionName, Filter, Metadata};
use serde_json::json;

use crate::common::*;

on_every_store!(
    keyword_scores_are_those_of_bm25,
    words_that_occur_very_often_are_counted_to_the_end,
    hybrid_fuses_the_ranks_of_both,
    a_filter_means_the_same_in_every_mode,
    an_empty_collection_and_a_large_limit_are_no_errors,
);

/// Four documents of 3, 1, 2 and 2 words: 8 in all, 2 on average.
async fn filled(home: &Home) -> (Arc<dyn Subject>, CollectionName) {
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let documents = vec![
        stored("a", "wing wing flutter", json!({"even": true}), &[1.0, 0.0]),
        stored("b", "wing", json!({"even": false}), &[0.8, 0.6]),
        stored("c", "boundary layer", json!({"even": true}), &[0.6, 0.8]),
        stored("d", "flutter boundary", json!({"even": false}), &[0.0, 1.0]),
    ];
    store.upsert(&docs, batch(documents)).await.unwrap();
    (store, docs)
}

async fn hits(store: &Arc<dyn Subject>, docs: &CollectionName, request: StorageQuery) -> Vec<SearchHit> {
    store
        .search(docs, StorageQuery { limit: 10, ..request })
        .await
        .unwrap()
        .hits
}

fn ids(hits: &[SearchHit]) -> Vec<&str> {
    hits.iter().map(|hit| hit.document.id.as_str()).collect()
}

async fn keyword_scores_are_those_of_bm25(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = filled(&home).await;
    let request = StorageQuery {
        text: Some("wing flutter".into()),
        ..StorageQuery::default()
    };
    let hits = hits(&store, &docs, request).await;
    assert_eq!(ids(&hits), ["a", "b", "d"]);
    // Both words are in two of four documents: idf = ln(1 + 2.5 / 2.5) = ln 2.
    let idf = 2f64.ln();
    // k1 = 1.2 and b = 0.75; a has 3 words, 1.5 times the average: 1.2 (0.25 + 0.75 · 1.5) = 1.65.
    let a = idf * (2.0 * 2.2 / (2.0 + 1.65)) + idf * (2.2 / (1.0 + 1.65));
    // b has one word, half the average: 1.2 (0.25 + 0.75 · 0.5) = 0.75; d has two, which
    // is the average: 1.2, and 2.2 / (1 + 1.2) = 1.
    let b = idf * (2.2 / 1.75);
    let d = idf;
    for (place, (hit, expected)) in hits.iter().zip([a, b, d]).enumerate() {
        let Rank { rank, score } = hit.ranks.keyword.unwrap();
        assert_eq!(rank, place + 1);
        assert!((score - expected).abs() < 1e-5, "{score} {expected}");
        assert_eq!((hit.ranks.dense, hit.ranks.fused), (None, None));
    }
}

/// Postgres keeps no more than 255 positions of a word.
async fn words_that_occur_very_often_are_counted_to_the_end(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    const COUNTS: [usize; 6] = [63, 64, 260, 999, 5000, 70_000];
    const LENGTH: usize = 70_001;
    let text = |count: usize| "zebra ".repeat(count) + &"lion ".repeat(LENGTH - count);
    let documents = COUNTS
        .iter()
        .enumerate()
        .map(|(n, count)| stored(&format!("d{n}"), &text(*count), json!({}), &[1.0, n as f32]));
    store.upsert(&docs, batch(documents.collect())).await.unwrap();
    let request = StorageQuery {
        text: Some("zebra".into()),
        ..StorageQuery::default()
    };
    let hits = hits(&store, &docs, request).await;
    assert_eq!(ids(&hits), ["d5", "d4", "d3", "d2", "d1", "d0"]);
    // The word is in all six documents, and all have the same length.
    let idf = (1.0f64 + 0.5 / 6.5).ln();
    for (hit, count) in hits.iter().zip(COUNTS.iter().rev()) {
        let count = *count as f64;
        let (score, expected) = (
            hit.ranks.keyword.unwrap().score,
            idf * count * 2.2 / (count + 1.2),
        );
        assert!((score - expected).abs() < 1e-6, "{score} {expected} for {count}");
    }
}

async fn hybrid_fuses_the_ranks_of_both(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = filled(&home).await;
    let request = StorageQuery {
        vector: Some(vec![0.0, 1.0]),
        text: Some("wing flutter".into()),
        ..StorageQuery::default()
    };
    // By meaning d, c, b, a; by word a, b, d. Sums of 1 / (60 + rank):
    // d 1/61 + 1/63, a 1/64 + 1/61, b 1/63 + 1/62, c 1/62.
    let fused = hits(&store, &docs, request.clone()).await;
    assert_eq!(ids(&fused), ["d", "a", "b", "c"]);
    let best = &fused[0];
    assert_eq!(best.distance, Some(0.0));
    assert_eq!(best.ranks.dense, Some(Rank { rank: 1, score: 1.0 }));
    assert_eq!(best.ranks.keyword.unwrap().rank, 3);
    let score = best.ranks.fused.unwrap().score;
    assert!((score - (1.0 / 61.0 + 1.0 / 63.0)).abs() < 1e-12);
    // Found by word only or not, every hit has its distance.
    let distances: Vec<f32> = fused.iter().map(|hit| hit.distance.unwrap()).collect();
    for (distance, expected) in distances.iter().zip([0.0, 1.0, 0.4, 0.2]) {
        assert!((distance - expected).abs() < 1e-6);
    }

    let by_word = StorageQuery {
        weights: FusionWeights {
            dense: 0.1,
            keyword: 1.0,
        },
        ..request.clone()
    };
    assert_eq!(ids(&hits(&store, &docs, by_word).await), ["a", "b", "d", "c"]);
    // a is the best by word, but too far away.
    let near = StorageQuery {
        max_distance: Some(0.5),
        ..request
    };
    assert_eq!(ids(&hits(&store, &docs, near).await), ["d", "b", "c"]);
}

async fn a_filter_means_the_same_in_every_mode(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = filled(&home).await;
    let modes = [
        (Some(vec![1.0, 1.0]), None),
        (None, Some("wing flutter boundary".to_owned())),
        (Some(vec![1.0, 1.0]), Some("wing flutter boundary".to_owned())),
    ];
    for (filter, expected) in [
        (json!({"even": true}), vec!["a", "c"]),
        (json!({"even": {"$ne": true}}), vec!["b", "d"]),
        (json!({"odd": {"$exists": true}}), vec![]),
        (json!({}), vec!["a", "b", "c", "d"]),
    ] {
        for (vector, text) in &modes {
            let request = StorageQuery {
                vector: vector.clone(),
                text: text.clone(),
                filter: Filter::parse(&filter).unwrap(),
                ..StorageQuery::default()
            };
            let hits = hits(&store, &docs, request).await;
            let found: BTreeSet<&str> = ids(&hits).into_iter().collect();
            assert!(
                found.iter().copied().eq(expected.iter().copied()),
                "{filter} {found:?}"
            );
        }
    }
}

async fn an_empty_collection_and_a_large_limit_are_no_errors(engine: Engine) {
    let home = Home::new(engine).await;
    let (store, docs) = filled(&home).await;
    let request = StorageQuery {
        vector: Some(vec![1.0, 0.0]),
        text: Some("wing".into()),
        limit: 100_000,
        ..StorageQuery::default()
    };
    assert_eq!(store.search(&docs, request.clone()).await.unwrap().hits.len(), 4);
    let none = StorageQuery {
        limit: 0,
        ..request.clone()
    };
    assert_eq!(store.search(&docs, none).await.unwrap().hits, []);
    store.empty(&docs).await.unwrap();
    let outcome = store.search(&docs, request).await.unwrap();
    let collection = store.collection(&docs).await.unwrap();
    assert_eq!((outcome.hits.len(), collection.count), (0, 0));
}
