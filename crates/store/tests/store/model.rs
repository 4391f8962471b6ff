//! Random operations on the store and on a simple model of it: both must always agree.

use std::collections::BTreeMap;

use proptest::prelude::*;
use ragstone_core::analysis::{analyze_document, analyze_query};
use ragstone_core::filter::Scalar;
use ragstone_core::storage::{
    MetadataUpdate, Page, Selection, Storage, StorageError, StorageQuery, StoredDocument,
};
use ragstone_core::{Filter, Metadata};
use ragstone_store::{IndexScope, SqliteStore, StoreOptions};
use serde_json::{Value, json};

use crate::common::*;
use crate::generators::{FIELDS, any_filter, any_metadata};

const DIMENSIONS: usize = 6;

#[derive(Debug, Clone)]
enum Operation {
    Create(usize),
    Drop(usize),
    SetMetadata(usize, i64, MetadataUpdate),
    Upsert(usize, Vec<StoredDocument>),
    DeleteIds(usize, Vec<u8>),
    DeleteMatching(usize, Value),
    Empty(usize),
    Reopen,
}

#[derive(Default)]
struct Model {
    collections: BTreeMap<usize, (Metadata, Vec<StoredDocument>)>,
}

fn collection_name(number: usize) -> ragstone_core::CollectionName {
    name(["first", "second"][number])
}

fn document_id(number: u8) -> String {
    format!("document {number}")
}

fn any_documents() -> impl Strategy<Value = Vec<StoredDocument>> {
    let word = prop::sample::select(vec![
        "wing", "wings", "engine", "ZX-4417", "the", "lift", "drag", "boundary",
    ]);
    let text = prop::collection::vec(word, 1..8).prop_map(|words| words.join(" "));
    let vector = prop::collection::vec(-1.0f32..1.0, DIMENSIONS)
        .prop_filter("a direction", |v| v.iter().any(|x| x.abs() > 0.01));
    prop::collection::btree_map(0..24u8, (text, any_metadata(), vector), 1..10).prop_map(|documents| {
        documents
            .into_iter()
            .map(|(number, (text, fields, vector))| stored(&document_id(number), &text, fields, &vector))
            .collect()
    })
}

fn any_operation() -> impl Strategy<Value = Operation> {
    let collection = 0..2usize;
    prop_oneof![
        2 => collection.clone().prop_map(Operation::Create),
        1 => collection.clone().prop_map(Operation::Drop),
        1 => (collection.clone(), any::<i64>(), any::<bool>()).prop_map(|(c, n, merge)| {
            let update = if merge { MetadataUpdate::Merge } else { MetadataUpdate::Replace };
            Operation::SetMetadata(c, n, update)
        }),
        8 => (collection.clone(), any_documents()).prop_map(|(c, d)| Operation::Upsert(c, d)),
        3 => (collection.clone(), prop::collection::vec(0..24u8, 0..6)).prop_map(|(c, i)| Operation::DeleteIds(c, i)),
        2 => (collection.clone(), any_filter()).prop_map(|(c, f)| Operation::DeleteMatching(c, f)),
        1 => collection.prop_map(Operation::Empty),
        1 => Just(Operation::Reopen),
    ]
}

impl Model {
    /// Does the same to the model, and says what the store should have answered.
    fn apply(&mut self, operation: &Operation) -> Option<u64> {
        match operation {
            Operation::Create(c) => {
                if self.collections.contains_key(c) {
                    return None;
                }
                self.collections.insert(*c, Default::default());
                Some(0)
            }
            Operation::Drop(c) => self.collections.remove(c).map(|_| 0),
            Operation::SetMetadata(c, n, update) => {
                let (metadata, _) = self.collections.get_mut(c)?;
                if *update == MetadataUpdate::Replace {
                    metadata.clear();
                }
                metadata.insert(format!("key {}", n.rem_euclid(3)), (*n).into());
                Some(0)
            }
            Operation::Upsert(c, documents) => {
                let (_, existing) = self.collections.get_mut(c)?;
                for new in documents {
                    match existing.iter_mut().find(|old| old.document.id == new.document.id) {
                        Some(old) => *old = new.clone(),
                        None => existing.push(new.clone()),
                    }
                }
                Some(0)
            }
            Operation::DeleteIds(c, numbers) => self.retain(*c, |stored| {
                !numbers
                    .iter()
                    .any(|n| document_id(*n) == stored.document.id.as_str())
            }),
            Operation::DeleteMatching(c, filter) => {
                let filter = Filter::parse(filter).unwrap();
                self.retain(*c, |stored| !filter.matches(&stored.document.metadata))
            }
            Operation::Empty(c) => self.retain(*c, |_| false),
            Operation::Reopen => Some(0),
        }
    }

    fn retain(&mut self, collection: usize, keep: impl Fn(&StoredDocument) -> bool) -> Option<u64> {
        let (_, documents) = self.collections.get_mut(&collection)?;
        let before = documents.len();
        documents.retain(keep);
        Some((before - documents.len()) as u64)
    }
}

async fn apply(store: &dyn Subject, operation: &Operation) -> Option<u64> {
    let answer = match operation {
        Operation::Create(c) => store
            .create_collection(&collection_name(*c), Metadata::new())
            .await
            .map(|_| 0),
        Operation::Drop(c) => store.delete_collection(&collection_name(*c)).await.map(|()| 0),
        Operation::SetMetadata(c, n, update) => {
            let fields = metadata(json!({format!("key {}", n.rem_euclid(3)): n}));
            store
                .update_metadata(&collection_name(*c), fields, *update)
                .await
                .map(|_| 0)
        }
        Operation::Upsert(c, documents) => store
            .upsert(&collection_name(*c), batch(documents.clone()))
            .await
            .map(|()| 0),
        Operation::DeleteIds(c, numbers) => {
            let ids = numbers.iter().map(|n| id(&document_id(*n))).collect();
            store
                .delete_documents(&collection_name(*c), Selection::Ids(ids))
                .await
        }
        Operation::DeleteMatching(c, filter) => {
            let filter = Filter::parse(filter).unwrap();
            store
                .delete_documents(&collection_name(*c), Selection::Matching(filter))
                .await
        }
        Operation::Empty(c) => store.empty(&collection_name(*c)).await,
        Operation::Reopen => Ok(0),
    };
    match answer {
        Ok(count) => Some(count),
        Err(StorageError::CollectionNotFound(_) | StorageError::CollectionExists(_)) => None,
        Err(other) => panic!("{operation:?}: {other:?}"),
    }
}

/// Asks the store all there is to ask, and compares.
async fn compare(store: &dyn Subject, model: &Model, filter: &Filter, query: &[f32], text: &str) {
    assert_eq!(store.collections().await.unwrap().len(), model.collections.len());
    for (number, (expected_metadata, documents)) in &model.collections {
        let docs = collection_name(*number);
        let collection = store.collection(&docs).await.unwrap();
        assert_eq!(collection.metadata, *expected_metadata);
        assert_eq!(collection.count, documents.len() as u64);
        assert_eq!(
            collection.dimensions,
            (!documents.is_empty()).then_some(DIMENSIONS)
        );

        for filter in [&Filter::everything(), filter] {
            let matching: Vec<&StoredDocument> = documents
                .iter()
                .filter(|s| filter.matches(&s.document.metadata))
                .collect();
            let page = store.documents(&docs, filter, ALL).await.unwrap();
            assert_eq!(page.total, matching.len() as u64);
            assert!(
                page.documents.iter().eq(matching.iter().map(|s| &s.document)),
                "{filter:?}"
            );
            let middle = Page { limit: 2, offset: 1 };
            let page = store.documents(&docs, filter, middle).await.unwrap();
            assert!(
                page.documents
                    .iter()
                    .eq(matching.iter().skip(1).take(2).map(|s| &s.document))
            );
            compare_dense(store, &docs, filter, &matching, query).await;
            compare_keyword(store, &docs, filter, documents, &matching, text).await;
        }
        for field in FIELDS {
            let mut values: Vec<_> = documents
                .iter()
                .filter_map(|s| s.document.metadata.get(field))
                .flat_map(|value| match value {
                    Value::Array(elements) => elements.clone(),
                    other => vec![other.clone()],
                })
                .filter_map(|value| Scalar::from_json(&value))
                .collect();
            values.sort();
            values.dedup();
            let expected: Vec<Value> = values.iter().map(Scalar::to_json).collect();
            assert_eq!(store.metadata_values(&docs, field).await.unwrap(), expected);
        }
    }
}

fn cosine_distance(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| {
        x.iter()
            .zip(y)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum::<f64>()
    };
    1.0 - dot(a, b) / (dot(a, a).sqrt() * dot(b, b).sqrt())
}

async fn compare_dense(
    store: &dyn Subject,
    docs: &ragstone_core::CollectionName,
    filter: &Filter,
    matching: &[&StoredDocument],
    query: &[f32],
) {
    let request = StorageQuery {
        vector: Some(query.to_vec()),
        filter: filter.clone(),
        limit: 5,
        ..StorageQuery::default()
    };
    let hits = store.search(docs, request).await.unwrap().hits;
    let mut expected: Vec<f64> = matching
        .iter()
        .map(|s| cosine_distance(&s.vector, query))
        .collect();
    expected.sort_by(f64::total_cmp);
    expected.truncate(5);
    assert_eq!(hits.len(), expected.len());
    for (hit, nearest) in hits.iter().zip(expected) {
        let found = matching.iter().find(|s| s.document == hit.document).unwrap();
        let distance = f64::from(hit.distance.unwrap());
        assert!((distance - nearest).abs() < 1e-5);
        assert!((distance - cosine_distance(&found.vector, query)).abs() < 1e-5);
    }
}

async fn compare_keyword(
    store: &dyn Subject,
    docs: &ragstone_core::CollectionName,
    filter: &Filter,
    documents: &[StoredDocument],
    matching: &[&StoredDocument],
    text: &str,
) {
    let request = StorageQuery {
        text: Some(text.to_owned()),
        filter: filter.clone(),
        limit: 50,
        ..StorageQuery::default()
    };
    let hits = store.search(docs, request).await.unwrap().hits;
    let analysed: Vec<_> = documents
        .iter()
        .map(|s| analyze_document(&s.document.text))
        .collect();
    let average = analysed.iter().map(|a| f64::from(a.length)).sum::<f64>() / analysed.len().max(1) as f64;
    let score = |stored: &StoredDocument| -> f64 {
        let own = analyze_document(&stored.document.text);
        let part = |term: &ragstone_core::analysis::QueryTerm| {
            let having = analysed
                .iter()
                .filter(|a| a.counts.contains_key(&term.text))
                .count() as f64;
            let idf = (1.0 + (analysed.len() as f64 - having + 0.5) / (having + 0.5)).ln();
            let count = f64::from(own.counts.get(&term.text).copied().unwrap_or(0));
            let length = f64::from(own.length) / average.max(1.0);
            f64::from(term.weight) * idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * length))
        };
        analyze_query(text).iter().map(part).sum()
    };
    let mut expected: Vec<f64> = matching.iter().map(|s| score(s)).filter(|s| *s > 0.0).collect();
    expected.sort_by(|a, b| b.total_cmp(a));
    assert_eq!(hits.len(), expected.len());
    for (hit, best) in hits.iter().zip(expected) {
        let stage = hit.ranks.keyword.unwrap();
        let found = matching.iter().find(|s| s.document == hit.document).unwrap();
        assert!((stage.score - best).abs() < 1e-4, "{} {best}", stage.score);
        assert!((stage.score - score(found)).abs() < 1e-4);
        assert_eq!(hit.distance, None);
    }
}

async fn agrees(engine: Engine, operations: &[Operation], filters: &[Value], query: &[f32]) {
    let home = Home::new(engine).await;
    let mut store = home.open().await;
    let mut model = Model::default();
    for (operation, filter) in operations.iter().zip(filters) {
        if matches!(operation, Operation::Reopen) {
            store.shut().await;
            drop(store);
            store = home.open().await;
        }
        assert_eq!(
            apply(&*store, operation).await,
            model.apply(operation),
            "{operation:?}"
        );
        let filter = Filter::parse(filter).unwrap();
        compare(&*store, &model, &filter, query, "lifting wing zx-4417").await;
    }
    store.examine().await;
}

/// A store that indexes only a few fields writes the same, answers filters on these fields, and
/// refuses everything else.
async fn agrees_indexing_fields(operations: &[Operation], filters: &[Value], query: &[f32]) {
    const SCOPE: IndexScope = IndexScope::Fields {
        values: &["colour", "size"],
        presence: &["tags"],
    };
    let folder = tempfile::tempdir().unwrap();
    let open_indexing = |scope| {
        let options = StoreOptions {
            index_scope: scope,
            ..StoreOptions::default()
        };
        SqliteStore::open(folder.path(), options).unwrap()
    };
    let mut store = open_indexing(SCOPE);
    let mut model = Model::default();
    for (operation, filter) in operations.iter().zip(filters) {
        match operation {
            Operation::Reopen => {
                store.close().await.unwrap();
                drop(store);
                store = open_indexing(SCOPE);
            }
            Operation::DeleteMatching(c, filter) => {
                let selection = Selection::Matching(Filter::parse(filter).unwrap());
                match store.delete_documents(&collection_name(*c), selection).await {
                    Err(StorageError::Unsupported(_)) => {}
                    answer => assert_eq!(answer.ok(), model.apply(operation), "{operation:?}"),
                }
            }
            _ => assert_eq!(
                apply(&store, operation).await,
                model.apply(operation),
                "{operation:?}"
            ),
        }
        let filter = Filter::parse(filter).unwrap();
        for (number, (_, documents)) in &model.collections {
            let name = collection_name(*number);
            let page = Page {
                limit: 100,
                offset: 0,
            };
            if let Ok(page) = store.documents(&name, &filter, page).await {
                let expected = documents.iter().map(|stored| &stored.document);
                let expected: Vec<_> = expected.filter(|d| filter.matches(&d.metadata)).collect();
                assert_eq!(page.documents.iter().collect::<Vec<_>>(), expected, "{filter:?}");
            }
            let request = StorageQuery {
                vector: Some(query.to_vec()),
                limit: 3,
                ..StorageQuery::default()
            };
            let refused = store.search(&name, request).await;
            assert!(
                matches!(refused, Err(StorageError::Unsupported(_))),
                "{refused:?}"
            );
        }
    }
    for (number, (_, documents)) in &model.collections {
        let name = collection_name(*number);
        let known =
            ["tags", "colour"].map(|field| Filter::parse(&json!({field: {"$exists": true}})).unwrap());
        for filter in &known {
            let page = Page { limit: 0, offset: 0 };
            let total = store.documents(&name, filter, page).await.unwrap().total;
            let expected = documents
                .iter()
                .filter(|s| filter.matches(&s.document.metadata))
                .count();
            assert_eq!(total, expected as u64);
        }
        let other = Filter::parse(&json!({"tags": "red"})).unwrap();
        let page = Page { limit: 0, offset: 0 };
        let refused = store.documents(&name, &other, page).await;
        assert!(
            matches!(refused, Err(StorageError::Unsupported(_))),
            "{refused:?}"
        );
    }
    store.close().await.unwrap();
    drop(store);
    let store = open_indexing(IndexScope::Everything);
    for filter in filters.iter().take(3) {
        let filter = Filter::parse(filter).unwrap();
        compare(&store, &model, &filter, query, "lifting wing zx-4417").await;
    }
    store.examine().await;
}

fn run(future: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .unwrap()
        .block_on(future);
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn any_query() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(0.1f32..1.0, DIMENSIONS)
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn sqlite_agrees_with_a_simple_model(
        operations in prop::collection::vec(any_operation(), 1..30),
        filters in prop::collection::vec(any_filter(), 30),
        query in any_query(),
    ) {
        run(agrees(Engine::Sqlite, &operations, &filters, &query));
    }

    #[test]
    fn a_store_that_holds_only_some_fields_writes_the_same(
        operations in prop::collection::vec(any_operation(), 1..30),
        filters in prop::collection::vec(any_filter(), 30),
        query in any_query(),
    ) {
        run(agrees_indexing_fields(&operations, &filters, &query));
    }
}

proptest! {
    #![proptest_config(cases(8))]

    #[test]
    fn postgres_agrees_with_a_simple_model(
        operations in prop::collection::vec(any_operation(), 10..30),
        filters in prop::collection::vec(any_filter(), 30),
        query in any_query(),
    ) {
        run(agrees(Engine::Postgres, &operations, &filters, &query));
    }
}
