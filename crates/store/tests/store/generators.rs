//! Metadata and filters without pattern, of few fields and values, so that many of them meet.

use proptest::prelude::*;
use serde_json::{Value, json};

pub(crate) const FIELDS: [&str; 3] = ["colour", "size", "tags"];

pub(crate) fn any_scalar() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!(null)),
        any::<bool>().prop_map(Value::from),
        (-2..3i64).prop_map(Value::from),
        Just(json!(0.5)),
        Just(json!(1.0)),
        prop_oneof![Just(""), Just("red"), Just("dark red"), Just("blue")].prop_map(Value::from),
    ]
}

pub(crate) fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        4 => any_scalar(),
        2 => prop::collection::vec(any_scalar(), 0..4).prop_map(Value::from),
        1 => Just(json!({"nested": 1})),
        1 => Just(json!([["red"], 1])),
    ]
}

pub(crate) fn any_metadata() -> impl Strategy<Value = Value> {
    prop::collection::btree_map(prop::sample::select(&FIELDS[..]), any_value(), 0..4)
        .prop_map(|fields| Value::Object(fields.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()))
}

pub(crate) fn any_filter() -> impl Strategy<Value = Value> {
    let field = prop::sample::select(&FIELDS[..]);
    let ordered = prop_oneof![
        (-2..3i64).prop_map(Value::from),
        Just(json!("blue")),
        Just(json!("red"))
    ];
    let leaf =
        (field, any_scalar(), ordered, 0..9usize).prop_map(|(field, scalar, ordered, kind)| match kind {
            0 => json!({field: scalar}),
            1 => json!({field: {"$ne": scalar}}),
            2 => json!({field: {"$gt": ordered}}),
            3 => json!({field: {"$lte": ordered}}),
            4 => json!({field: {"$in": [scalar, ordered]}}),
            5 => json!({field: {"$nin": [scalar, ordered]}}),
            6 => json!({field: {"$contains": scalar}}),
            7 => json!({field: {"$exists": true}}),
            _ => json!({field: {"$gte": ordered, "$ne": scalar}}),
        });
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| json!({"$and": parts})),
            prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| json!({"$or": parts})),
            inner.prop_map(|part| json!({"$not": part})),
        ]
    })
}
