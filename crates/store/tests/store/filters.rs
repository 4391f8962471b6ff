//! Filters mean in a store what `Filter::matches` says, for values that engines like to see
//! differently too.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use ragstone_core::filter::Scalar;
use ragstone_core::{Filter, Metadata};
use serde_json::{Value, json};

use crate::common::*;
use crate::generators::{FIELDS, any_filter, any_metadata};

on_every_store!(
    generated_filters_find_what_they_mean,
    odd_values_are_told_apart,
    odd_texts_come_back_as_they_were,
);

/// Compares, for every filter, the documents that are found with those that should be.
async fn compare(store: &dyn Subject, documents: &[Metadata], filters: &[Value]) {
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let stored = documents
        .iter()
        .enumerate()
        .map(|(n, fields)| {
            stored(
                &format!("d{n}"),
                "text",
                Value::Object(fields.clone()),
                &[1.0, n as f32],
            )
        })
        .collect();
    store.upsert(&docs, batch(stored)).await.unwrap();
    for json in filters {
        let filter = Filter::parse(json).unwrap();
        let expected: Vec<&Metadata> = documents.iter().filter(|fields| filter.matches(fields)).collect();
        let page = store.documents(&docs, &filter, ALL).await.unwrap();
        let found: Vec<&Metadata> = page.documents.iter().map(|document| &document.metadata).collect();
        assert_eq!(found, expected, "{json}");
        assert_eq!(page.total, expected.len() as u64);
    }
}

async fn generated_filters_find_what_they_mean(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let mut runner = TestRunner::deterministic();
    let mut draw = |strategy: BoxedStrategy<Value>, count: usize| -> Vec<Value> {
        (0..count)
            .map(|_| strategy.new_tree(&mut runner).unwrap().current())
            .collect()
    };
    let documents: Vec<Metadata> = draw(any_metadata().boxed(), 60)
        .into_iter()
        .map(metadata)
        .collect();
    let filters = draw(any_filter().boxed(), 300);
    compare(&*store, &documents, &filters).await;
}

fn odd_scalars() -> Vec<Value> {
    vec![
        json!(null),
        json!(false),
        json!(true),
        json!(0),
        json!(-0.0),
        json!(1),
        json!(1.0),
        json!(0.1),
        json!(1e300),
        json!(-1e300),
        json!(5e-324),
        json!(9_007_199_254_740_993_i64),
        json!(9_007_199_254_740_992.0),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(9_223_372_036_854_775_808_u64),
        json!(9_223_372_036_854_775_808.0),
        json!(1e23),
        json!(""),
        json!("1"),
        json!("null"),
        json!("a"),
        json!("A"),
        json!("ä"),
        json!("a%"),
        json!("a_"),
        json!("\\"),
        json!("'; DROP TABLE documents; --"),
        json!("\""),
        json!("\0"),
        json!("a\0b"),
        json!("\u{1}"),
        json!("\u{2}"),
        json!("\u{10ffff}"),
        json!("\u{e000}"),
        json!("👍"),
    ]
}

async fn odd_values_are_told_apart(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let scalars = odd_scalars();
    let mut documents: Vec<Metadata> = Vec::new();
    for scalar in &scalars {
        documents.push(metadata(json!({"x": scalar})));
        documents.push(metadata(json!({"x": [scalar, "other"], "": scalar})));
    }
    documents.extend([
        metadata(json!({})),
        metadata(json!({"x": []})),
        metadata(json!({"x": [[]]})),
        metadata(json!({"x": {"y": 1}})),
        metadata(json!({"x.y": 1, "$x": 2, "=x": 3, "[x": 4, "x\0": 5, "'": 6})),
    ]);
    let mut filters = Vec::new();
    for scalar in &scalars {
        for operator in ["$eq", "$ne", "$contains"] {
            filters.push(json!({"x": {operator: scalar}}));
        }
        if scalar.is_number() || scalar.is_string() {
            for operator in ["$gt", "$gte", "$lt", "$lte"] {
                filters.push(json!({"x": {operator: scalar}}));
                filters.push(json!({"$not": {"x": {operator: scalar}}}));
            }
        }
    }
    filters.push(json!({"x": {"$in": scalars}}));
    filters.push(json!({"x": {"$nin": scalars}}));
    let many: Vec<Value> = (0..200).map(Value::from).collect();
    filters.push(json!({"x": {"$in": many}}));
    for field in ["x", "", "x.y", "=x", "[x", "x\0", "'", "nobody"] {
        filters.push(json!({field: {"$exists": true}}));
        filters.push(json!({field: {"$exists": false}}));
        filters.push(json!({field: 5}));
    }
    compare(&*store, &documents, &filters).await;

    let expected: BTreeSet<Scalar> = scalars
        .iter()
        .chain([&json!("other")])
        .filter_map(Scalar::from_json)
        .collect();
    let expected: Vec<Value> = expected.iter().map(Scalar::to_json).collect();
    assert_eq!(store.metadata_values(&name("docs"), "x").await.unwrap(), expected);
    assert_eq!(
        store.metadata_values(&name("docs"), "x\0").await.unwrap(),
        [json!(5)]
    );
    assert_eq!(
        store.metadata_values(&name("docs"), FIELDS[0]).await.unwrap(),
        Vec::<Value>::new()
    );
}

async fn odd_texts_come_back_as_they_were(engine: Engine) {
    let home = Home::new(engine).await;
    let store = home.open().await;
    let docs = name("docs");
    store.create_collection(&docs, Metadata::new()).await.unwrap();
    let texts = [
        "\0",
        "a\0b\u{1}c\u{2}\u{3}",
        "'\\' \"%s\" $1 {}",
        "it's o'clock",
        "👍 漢字かな",
    ];
    let documents = texts
        .iter()
        .map(|text| stored(text, text, json!({*text: text}), &[1.0, 2.0]))
        .collect();
    store.upsert(&docs, batch(documents)).await.unwrap();
    for text in texts {
        let found = store.document(&docs, &id(text)).await.unwrap().unwrap();
        assert_eq!((found.id.as_str(), found.text.as_str()), (text, text));
        assert_eq!(found.metadata, metadata(json!({text: text})));
        let request = ragstone_core::storage::StorageQuery {
            text: Some("O'Clock 漢字".into()),
            limit: 10,
            ..Default::default()
        };
        let hits = store.search(&docs, request).await.unwrap().hits;
        assert_eq!(hits.len(), 2);
    }
}
