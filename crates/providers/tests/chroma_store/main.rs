//! ChromaDB as storage, against a real server: its answers equal those of the embedded store.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;
mod races;
mod service;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::chroma::ChromaServer;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{
    DocumentBatch, ExportRange, MetadataUpdate, Page, Selection, Storage, StorageError, StorageQuery,
    StoredDocument, VectorPrecision,
};
use ragstone_core::vector::normalise;
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use ragstone_providers::chroma::ChromaStorage;
use ragstone_store::{SqliteStore, StoreOptions};
use serde_json::{Value, json};

const ALL: Page = Page {
    limit: usize::MAX,
    offset: 0,
};

fn name(text: &str) -> CollectionName {
    CollectionName::parse(text).unwrap()
}

fn object(value: Value) -> Metadata {
    value.as_object().unwrap().clone()
}

fn store(server: &ChromaServer) -> ChromaStorage {
    ChromaStorage::connect(&server.store_url(), None).unwrap()
}

/// Two stores that are told the same.
struct Pair {
    chroma: ChromaStorage,
    sqlite: SqliteStore,
    docs: CollectionName,
}

impl Pair {
    async fn new(server: &ChromaServer, directory: &std::path::Path, docs: &str) -> Self {
        let pair = Self {
            chroma: store(server),
            sqlite: SqliteStore::open(directory, StoreOptions::default()).unwrap(),
            docs: name(docs),
        };
        for store in pair.both() {
            store
                .create_collection(&pair.docs, Metadata::new())
                .await
                .unwrap();
        }
        pair
    }

    fn both(&self) -> [&dyn Storage; 2] {
        [&self.chroma, &self.sqlite]
    }

    async fn upsert(&self, documents: Vec<StoredDocument>, model: Option<ModelIdentity>) {
        for store in self.both() {
            let (documents, model) = (documents.clone(), model.clone());
            store
                .upsert(&self.docs, DocumentBatch { documents, model })
                .await
                .unwrap();
        }
    }

    async fn agree_on_documents(&self, filter: &Value, page: Page) {
        let parsed = Filter::parse(filter).unwrap();
        let [chroma, sqlite] = self.both();
        let found = chroma.documents(&self.docs, &parsed, page).await.unwrap();
        let expected = sqlite.documents(&self.docs, &parsed, page).await.unwrap();
        assert_eq!(found, expected, "{filter}");
    }

    async fn agree_on_search(&self, request: &StorageQuery) {
        let mut answers = Vec::new();
        for store in self.both() {
            let outcome = store.search(&self.docs, request.clone()).await.unwrap();
            let collection = store.collection(&self.docs).await.unwrap();
            assert_eq!((outcome.metadata, 40), (collection.metadata, collection.count));
            answers.push(outcome.hits);
        }
        let ids = |at: usize| {
            answers[at]
                .iter()
                .map(|hit| hit.document.id.as_str())
                .collect::<Vec<_>>()
        };
        assert_eq!(ids(0), ids(1), "{request:?}");
        for (found, expected) in answers[0].iter().zip(&answers[1]) {
            assert_eq!(found.document, expected.document);
            match (found.distance, expected.distance) {
                (Some(found), Some(expected)) => assert!((found - expected).abs() < 1e-5),
                (found, expected) => assert_eq!(found, expected),
            }
            let score = |rank: Option<ragstone_core::fusion::Rank>| rank.map_or(0.0, |rank| rank.score);
            for (a, b) in [
                (found.ranks.dense, expected.ranks.dense),
                (found.ranks.keyword, expected.ranks.keyword),
                (found.ranks.fused, expected.ranks.fused),
            ] {
                assert_eq!(a.map(|stage| stage.rank), b.map(|stage| stage.rank));
                assert!((score(a) - score(b)).abs() < 1e-5, "{a:?} {b:?}");
            }
        }
    }
}

const WORDS: [&str; 6] = ["mirror", "dome", "rain", "ZX-4417", "telescopes", "opens at dusk"];

/// Vectors at angles that are all different, so that no ranking has ties.
fn document(n: usize) -> StoredDocument {
    let angle = n as f32 * 0.07;
    let metadata = match n % 5 {
        0 => json!({"n": n, "s": "even", "tags": ["a", n]}),
        1 => json!({"n": n as f64 + 0.5, "b": true, "none": null}),
        2 => json!({"n": n, "deep": {"x": [1, {"y": null}]}, "": "odd", "$k": 1}),
        3 => json!({"n": u64::MAX, "s": "odd", "ragstone:norm": "mine"}),
        _ => json!({}),
    };
    StoredDocument {
        document: Document {
            id: DocumentId::parse(format!("d{n}")).unwrap(),
            text: format!("{} {} number {n}", WORDS[n % 6], WORDS[n * n % 6]),
            metadata: object(metadata),
        },
        vector: vec![3.0 * angle.cos(), 3.0 * angle.sin(), 0.5],
    }
}

/// One server for all of it: starting one takes longer than everything else.
#[tokio::test]
async fn chromadb_as_a_store() {
    let mut server = ChromaServer::start().await;
    answers_are_those_of_the_embedded_store(&server).await;
    collections_of_any_name_come_and_go(&server).await;
    an_emptied_collection_takes_another_width(&server).await;
    documents_are_moved_in_and_out(&server).await;
    what_it_cannot_do_is_declared_or_refused(&server).await;
    a_filled_collection_is_replaced_whole(&server).await;
    a_search_sees_the_collection_as_it_is_now(&server).await;
    nothing_is_overlooked_after_many_deletions(&server).await;
    races::a_collection_is_searched_while_it_gets_its_first_documents(&server).await;
    races::what_is_deleted_meanwhile_is_found_whole_or_not_at_all(&server).await;
    races::collections_come_and_go_beside_readers(&server).await;
    it_goes_away_and_comes_back(&mut server).await;
    it_goes_away_under_load_and_loses_nothing(&mut server).await;
}

async fn answers_are_those_of_the_embedded_store(server: &ChromaServer) {
    let directory = tempfile::tempdir().unwrap();
    let pair = Pair::new(server, directory.path(), "d").await;
    pair.upsert((0..25).map(document).collect(), None).await;
    pair.upsert((25..45).map(document).collect(), None).await;
    // Some are replaced, with fewer and other fields, and some go.
    let mut replaced: Vec<StoredDocument> = [3, 7].into_iter().map(document).collect();
    replaced[0].document.metadata = object(json!({"other": [1, 2]}));
    replaced[1].document.text = "nothing of the kind".into();
    pair.upsert(replaced, None).await;
    let gone = |id: &str| DocumentId::parse(id).unwrap();
    for store in pair.both() {
        let ids = vec![gone("d10"), gone("missing"), gone("d10"), gone("d11")];
        assert_eq!(
            store
                .delete_documents(&pair.docs, Selection::Ids(ids))
                .await
                .unwrap(),
            2
        );
        let odd = Filter::parse(&json!({"n": {"$in": [20, 25, 30]}})).unwrap();
        let matching = Selection::Matching(odd);
        assert_eq!(store.delete_documents(&pair.docs, matching).await.unwrap(), 3);
    }
    let filters = [
        json!({}),
        json!({"s": "even"}),
        json!({"tags": "a"}),
        json!({"tags": {"$contains": 15}}),
        json!({"n": {"$gte": 7, "$lt": 30}}),
        json!({"n": 6.5}),
        json!({"n": u64::MAX}),
        json!({"s": {"$ne": "even"}}),
        json!({"s": {"$contains": "ve"}}),
        json!({"none": null}),
        json!({"none": {"$exists": true}}),
        json!({"$not": {"n": {"$exists": true}}}),
        json!({"": "odd"}),
        json!({"ragstone:norm": "mine"}),
        json!({"$or": [{"b": true}, {"other": 2}]}),
        json!({"s": {"$nin": ["even", "odd"]}}),
        json!({"s": {"$in": []}}),
    ];
    for filter in &filters {
        pair.agree_on_documents(filter, ALL).await;
        pair.agree_on_documents(filter, Page { limit: 3, offset: 2 })
            .await;
    }
    for field in [
        "n",
        "s",
        "tags",
        "none",
        "b",
        "",
        "other",
        "deep",
        "missing",
        "ragstone:norm",
    ] {
        let found = pair.chroma.metadata_values(&pair.docs, field).await.unwrap();
        let expected = pair.sqlite.metadata_values(&pair.docs, field).await.unwrap();
        assert_eq!(found, expected, "{field}");
    }
    for id in ["d3", "d10", "d44"] {
        let found = pair.chroma.document(&pair.docs, &gone(id)).await.unwrap();
        assert_eq!(found, pair.sqlite.document(&pair.docs, &gone(id)).await.unwrap());
    }
    let few: Vec<_> = ["d44", "d3", "nobody", "d10", "d21"].map(gone).to_vec();
    for filter in &filters[..6] {
        for (vector, text) in [
            (Some(vec![1.0, 0.8, 0.2]), None),
            (None, Some("dome in the rain")),
            (None, Some("ZX-4417")),
            (None, Some("unheard")),
            (Some(vec![-1.0, 0.3, 0.0]), Some("mirrors and a telescope")),
        ] {
            for (max_distance, ids) in [
                (None, None),
                (Some(0.6), None),
                (None, Some(&few)),
                (Some(0.6), Some(&few)),
            ] {
                let request = StorageQuery {
                    ids: ids.cloned(),
                    vector: vector.clone(),
                    text: text.map(str::to_owned),
                    filter: Filter::parse(filter).unwrap(),
                    limit: 7,
                    max_distance,
                    ..StorageQuery::default()
                };
                pair.agree_on_search(&request).await;
            }
        }
    }
    let wide = StorageQuery {
        vector: Some(vec![1.0]),
        limit: 3,
        ..StorageQuery::default()
    };
    for store in pair.both() {
        let refused = store.search(&pair.docs, wide.clone()).await;
        assert!(matches!(
            refused,
            Err(StorageError::DimensionMismatch { expected: 3, .. })
        ));
        assert_eq!(store.empty(&pair.docs).await.unwrap(), 40);
        assert_eq!(store.empty(&pair.docs).await.unwrap(), 0);
        assert_eq!(store.collection(&pair.docs).await.unwrap().dimensions, None);
    }
}

async fn collections_of_any_name_come_and_go(server: &ChromaServer) {
    let store = store(server);
    let metadata = object(json!({"a": 1, "deep": {"x": null}, "list": [1, "b"]}));
    let names = ["x", "a..b", "ends-", "ragstone--x", "plain"];
    for text in names {
        let created = store
            .create_collection(&name(text), metadata.clone())
            .await
            .unwrap();
        assert_eq!((created.name.as_str(), &created.metadata), (text, &metadata));
        let again = store.create_collection(&name(text), Metadata::new()).await;
        assert!(matches!(again, Err(StorageError::CollectionExists(_))), "{text}");
    }
    let internal = CollectionName::internal("memory.knowledge");
    store.create_collection(&internal, Metadata::new()).await.unwrap();
    assert_eq!(store.collection(&internal).await.unwrap().name, internal);
    let listed = store.collections().await.unwrap();
    let listed: Vec<&str> = listed.iter().map(|collection| collection.name.as_str()).collect();
    assert_eq!(listed, ["a..b", "d", "ends-", "plain", "ragstone--x", "x"]);
    assert_eq!(store.health().await.unwrap().collections, 6);
    let merged = object(json!({"a": [2], "more": true}));
    let now = store
        .update_metadata(&name("x"), merged, MetadataUpdate::Merge)
        .await
        .unwrap();
    assert_eq!(
        Value::Object(now.clone()),
        json!({"a": [2], "deep": {"x": null}, "list": [1, "b"], "more": true})
    );
    assert_eq!(store.collection(&name("x")).await.unwrap().metadata, now);
    let replaced = store
        .update_metadata(&name("x"), Metadata::new(), MetadataUpdate::Replace)
        .await;
    assert_eq!(replaced.unwrap(), Metadata::new());
    for text in names {
        store.delete_collection(&name(text)).await.unwrap();
        let gone = store.collection(&name(text)).await;
        assert!(matches!(gone, Err(StorageError::CollectionNotFound(_))), "{text}");
    }
    let missing = store.delete_collection(&name("x")).await;
    assert!(matches!(missing, Err(StorageError::CollectionNotFound(_))));
}

async fn an_emptied_collection_takes_another_width(server: &ChromaServer) {
    let (store, docs) = (store(server), name("widths"));
    let metadata = object(json!({"keep": "me"}));
    store.create_collection(&docs, metadata.clone()).await.unwrap();
    let batch = |vector: Vec<f32>| DocumentBatch {
        documents: vec![StoredDocument {
            vector,
            ..document(1)
        }],
        model: None,
    };
    store.upsert(&docs, batch(vec![1.0, 2.0])).await.unwrap();
    let other = store.upsert(&docs, batch(vec![1.0, 2.0, 3.0])).await;
    assert!(matches!(
        other,
        Err(StorageError::DimensionMismatch { expected: 2, .. })
    ));
    store.empty(&docs).await.unwrap();
    store.upsert(&docs, batch(vec![1.0, 2.0, 3.0])).await.unwrap();
    let collection = store.collection(&docs).await.unwrap();
    assert_eq!((collection.count, collection.dimensions), (1, Some(3)));
    assert_eq!(collection.metadata, metadata);
    store.delete_collection(&docs).await.unwrap();
}

async fn documents_are_moved_in_and_out(server: &ChromaServer) {
    let directory = tempfile::tempdir().unwrap();
    let pair = Pair::new(server, directory.path(), "moved").await;
    let model = |version: &str| ModelIdentity {
        id: "m".into(),
        version: version.into(),
        dimensions: 3,
    };
    pair.upsert((0..30).map(document).collect(), None).await;
    pair.upsert((30..50).map(document).collect(), Some(model("1")))
        .await;
    pair.upsert((45..70).map(document).collect(), Some(model("2")))
        .await;
    let (mut found, mut expected) = (Vec::new(), Vec::new());
    for (store, all) in [(pair.both()[0], &mut found), (pair.both()[1], &mut expected)] {
        let mut after = None;
        loop {
            let range = ExportRange { after, limit: 16 };
            let page = store.export(&pair.docs, range).await.unwrap();
            after = page.last;
            all.extend(page.documents);
            if !page.more {
                break;
            }
        }
    }
    assert_eq!(found.len(), 70);
    for (found, expected) in found.iter().zip(&expected) {
        let close = found
            .vector
            .iter()
            .zip(&expected.vector)
            .all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(close, "{found:?} {expected:?}");
        assert_eq!(
            (&found.document, &found.model),
            (&expected.document, &expected.model)
        );
        assert_eq!(found.norm, expected.norm);
    }
    let mut ids: Vec<DocumentId> = found.iter().map(|moved| moved.document.id.clone()).collect();
    ids.push(DocumentId::parse("not there").unwrap());
    for store in pair.both() {
        let made_by = store.models_by_id(&pair.docs, &ids).await.unwrap();
        assert_eq!(made_by.len(), 70);
        for (id, model) in made_by {
            let moved = expected.iter().find(|moved| moved.document.id == id);
            assert_eq!(moved.unwrap().model, model, "{id}");
        }
    }
}

async fn what_it_cannot_do_is_declared_or_refused(server: &ChromaServer) {
    let (store, docs) = (store(server), name("large"));
    let engine = store.health().await.unwrap().engine.unwrap();
    assert_eq!(
        (engine.name, engine.vectors),
        ("chromadb", VectorPrecision::Rounded)
    );
    assert!(
        engine
            .limitations
            .iter()
            .any(|line| line.contains("10000 documents"))
    );
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let small = |n: usize| StoredDocument {
        document: Document {
            id: DocumentId::parse(format!("d{n}")).unwrap(),
            text: "t".into(),
            metadata: Metadata::new(),
        },
        vector: vec![1.0, n as f32],
    };
    let documents = (0..10_001).map(small).collect();
    let batch = DocumentBatch {
        documents,
        model: None,
    };
    store.upsert(&docs, batch).await.unwrap();
    let request = |vector: Option<Vec<f32>>, text: Option<&str>| StorageQuery {
        vector,
        text: text.map(str::to_owned),
        limit: 3,
        ..StorageQuery::default()
    };
    for request in [request(None, Some("t")), request(Some(vec![1.0, 1.0]), Some("t"))] {
        let refused = store.search(&docs, request).await;
        assert!(
            matches!(&refused, Err(StorageError::Unsupported(message)) if message.contains("use mode dense")),
            "{refused:?}"
        );
    }
    let dense = store
        .search(&docs, request(Some(vec![1.0, 1.0]), None))
        .await
        .unwrap();
    assert_eq!(dense.hits.len(), 3);
    store.delete_collection(&docs).await.unwrap();
    for bad in [
        "chroma://",
        "chroma://h:1/only",
        "http://h:1",
        "chroma://u:hunter2@h:1",
    ] {
        let refusal = ChromaStorage::connect(bad, None).err().unwrap().to_string();
        assert!(!refusal.contains("hunter2"), "{refusal}");
    }
}

/// Of no particular direction; the same for the same seed.
fn noise(seed: u64, width: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).skip(8).take(width).collect()
}

fn numbered(ids: std::ops::Range<usize>, round: usize, width: usize) -> DocumentBatch {
    let documents = ids
        .map(|n| StoredDocument {
            document: Document {
                id: DocumentId::parse(format!("d{n}")).unwrap(),
                text: format!("text {round}"),
                metadata: object(json!({ format!("round{round}"): n })),
            },
            vector: noise((n * 31 + round) as u64 + 1, width),
        })
        .collect();
    DocumentBatch {
        documents,
        model: None,
    }
}

/// As many as one add may have. In one request that takes ChromaDB longer than a call may.
async fn a_filled_collection_is_replaced_whole(server: &ChromaServer) {
    const COUNT: usize = 10_000;
    let (store, docs) = (store(server), name("replaced"));
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    for round in 0..2 {
        let batch = numbered(0..COUNT, round, 64);
        store.upsert(&docs, batch).await.unwrap();
    }
    assert_eq!(store.collection(&docs).await.unwrap().count, COUNT as u64);
    let values = store.metadata_values(&docs, "round0").await.unwrap();
    assert!(values.is_empty(), "{} kept what was replaced", values.len());
    let values = store.metadata_values(&docs, "round1").await.unwrap();
    assert_eq!(values.len(), COUNT);
    store.delete_collection(&docs).await.unwrap();
}

/// ChromaDB's graph keeps what was deleted, and may lose the way to some that came later.
/// What one process remembers of a collection, another may have replaced.
async fn a_search_sees_the_collection_as_it_is_now(server: &ChromaServer) {
    let (store, other, docs) = (store(server), store(server), name("replaced"));
    let nearest = async |vector: Vec<f32>| {
        let request = StorageQuery {
            vector: Some(vector),
            limit: 5,
            ..StorageQuery::default()
        };
        let outcome = store.search(&docs, request).await?;
        Ok::<_, StorageError>((outcome.hits.len(), store.collection(&docs).await?.count))
    };
    other.create_collection(&docs, Metadata::new()).await.unwrap();
    assert_eq!(nearest(noise(1, 8)).await.unwrap(), (0, 0));
    other.upsert(&docs, numbered(0..3, 1, 8)).await.unwrap();
    assert_eq!(nearest(noise(1, 8)).await.unwrap(), (3, 3));
    other.delete_collection(&docs).await.unwrap();
    assert!(matches!(
        nearest(noise(1, 8)).await,
        Err(StorageError::CollectionNotFound(_))
    ));
    other.create_collection(&docs, Metadata::new()).await.unwrap();
    other.upsert(&docs, numbered(0..2, 2, 4)).await.unwrap();
    assert_eq!(nearest(noise(1, 4)).await.unwrap(), (2, 2));
    assert!(matches!(
        nearest(noise(1, 8)).await,
        Err(StorageError::DimensionMismatch { .. })
    ));
    store.delete_collection(&docs).await.unwrap();
}

async fn nothing_is_overlooked_after_many_deletions(server: &ChromaServer) {
    const COUNT: usize = 300;
    let store = store(server);
    for round in 0..6 {
        let docs = name(&format!("refilled{round}"));
        store.create_collection(&docs, Metadata::new()).await.unwrap();
        store.upsert(&docs, numbered(0..3000, round, 16)).await.unwrap();
        store.empty(&docs).await.unwrap();
        store
            .upsert(&docs, numbered(0..COUNT, round + 10, 16))
            .await
            .unwrap();
        let field = format!("round{}", round + 10);
        for (filter, expected) in [
            (json!({}), COUNT),
            (json!({ &field: {"$lt": 200} }), 200),
            (json!({ &field: {"$in": (0..30).collect::<Vec<_>>()} }), 30),
        ] {
            let request = StorageQuery {
                vector: Some(noise(5, 16)),
                filter: Filter::parse(&filter).unwrap(),
                limit: 1000,
                ..StorageQuery::default()
            };
            let hits = store.search(&docs, request).await.unwrap().hits;
            assert_eq!(hits.len(), expected, "round {round}: {filter}");
            assert!(hits.iter().map(|hit| hit.distance.unwrap()).is_sorted());
            for hit in &hits {
                let number: u64 = hit.document.id.as_str()[1..].parse().unwrap();
                let mut stored = noise(number * 31 + round as u64 + 11, 16);
                let mut query = noise(5, 16);
                normalise(&mut stored);
                normalise(&mut query);
                let cosine: f32 = query.iter().zip(&stored).map(|(a, b)| a * b).sum();
                assert!((hit.distance.unwrap() - (1.0 - cosine)).abs() < 1e-4, "{hit:?}");
            }
        }
        store.delete_collection(&docs).await.unwrap();
    }
}

/// What writers were told is stored, and how many of them have been told that the server is away.
#[derive(Default)]
struct Writers {
    acknowledged: Mutex<Vec<String>>,
    refused: AtomicUsize,
    stop: AtomicBool,
}

impl Writers {
    /// One document after the other, until told to stop.
    async fn write(&self, store: &ChromaStorage, docs: &CollectionName, writer: usize) {
        let mut number = 0;
        while !self.stop.load(Ordering::Relaxed) {
            let mut written = document(number);
            let id = format!("w{writer}-{number}");
            written.document.id = DocumentId::parse(&id).unwrap();
            let batch = DocumentBatch {
                documents: vec![written],
                model: None,
            };
            match store.upsert(docs, batch).await {
                Ok(()) => {
                    self.acknowledged.lock().unwrap().push(id);
                    number += 1;
                }
                Err(StorageError::Unavailable { .. }) => {
                    self.refused.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                }
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    fn count(&self) -> usize {
        self.acknowledged.lock().unwrap().len()
    }

    /// Waits for something that certainly happens.
    async fn until(&self, holds: impl Fn(&Self) -> bool) {
        for _ in 0..2400 {
            if holds(self) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
        panic!("the writers do not get on: {} acknowledged", self.count());
    }
}

async fn it_goes_away_under_load_and_loses_nothing(server: &mut ChromaServer) {
    let (store, docs) = (Arc::new(store(server)), name("written"));
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let writers = Arc::new(Writers::default());
    let tasks: Vec<_> = (0..4)
        .map(|writer| {
            let (writers, store, docs) = (writers.clone(), store.clone(), docs.clone());
            tokio::spawn(async move { writers.write(&store, &docs, writer).await })
        })
        .collect();
    for _ in 0..2 {
        let before = writers.count();
        writers.until(|writers| writers.count() >= before + 40).await;
        let refused = writers.refused.load(Ordering::Relaxed);
        server.stop();
        writers
            .until(|writers| writers.refused.load(Ordering::Relaxed) >= refused + 4)
            .await;
        server.restart().await;
    }
    let before = writers.count();
    writers.until(|writers| writers.count() >= before + 40).await;
    writers.stop.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.unwrap();
    }
    let acknowledged = writers.acknowledged.lock().unwrap().clone();
    let ids: Vec<DocumentId> = acknowledged
        .iter()
        .map(|id| DocumentId::parse(id).unwrap())
        .collect();
    let there = store.documents_by_id(&docs, &ids).await.unwrap();
    assert_eq!(there.len(), acknowledged.len());
    let request = StorageQuery {
        vector: Some(vec![1.0, 0.0, 0.5]),
        limit: 10_000,
        ..StorageQuery::default()
    };
    let found: BTreeSet<String> = store
        .search(&docs, request)
        .await
        .unwrap()
        .hits
        .into_iter()
        .map(|hit| hit.document.id.into_string())
        .collect();
    let lost: Vec<&String> = acknowledged.iter().filter(|id| !found.contains(*id)).collect();
    assert!(lost.is_empty(), "not found any more: {lost:?}");
}

async fn it_goes_away_and_comes_back(server: &mut ChromaServer) {
    let (store, docs) = (store(server), name("staying"));
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let batch = || DocumentBatch {
        documents: vec![document(1)],
        model: None,
    };
    store.upsert(&docs, batch()).await.unwrap();
    server.stop();
    for _ in 0..8 {
        let away = store.upsert(&docs, batch()).await;
        assert!(matches!(away, Err(StorageError::Unavailable { .. })), "{away:?}");
        let away = store.health().await;
        assert!(matches!(away, Err(StorageError::Unavailable { .. })), "{away:?}");
    }
    server.restart().await;
    let mut answered = false;
    for _ in 0..1200 {
        if store.health().await.is_ok() && store.upsert(&docs, batch()).await.is_ok() {
            answered = true;
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
    }
    assert!(answered, "it does not come back by itself");
    assert_eq!(store.collection(&docs).await.unwrap().count, 1);
}
