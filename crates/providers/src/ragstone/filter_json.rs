//! Filters as JSON.

use ragstone_core::Filter;
use ragstone_core::Metadata;
use ragstone_core::filter::{Comparison, Scalar, Test};
use serde_json::{Value, json};

/// JSON that [`Filter::parse`] reads as an equivalent filter. Conditions are joined into one object where
/// their keys allow, so that the filter does not get deeper.
pub fn filter_to_json(filter: &Filter) -> Value {
    Value::Object(object(filter))
}

fn object(filter: &Filter) -> Metadata {
    match filter {
        Filter::All(parts) => parts.iter().map(object).reduce(both).unwrap_or_default(),
        Filter::Any(parts) if parts.is_empty() => on("never", "$in", json!([])),
        Filter::Any(parts) => list("$or", parts.iter().map(object).collect()),
        Filter::Not(part) => negated(part),
        Filter::Field { name, test } => {
            let (operator, operand) = condition(test);
            on(name, operator, operand)
        }
    }
}

fn negated(filter: &Filter) -> Metadata {
    if let Filter::Field { name, test } = filter {
        match condition(test) {
            ("$eq", operand) => return on(name, "$ne", operand),
            ("$in", operand) => return on(name, "$nin", operand),
            ("$exists", _) => return on(name, "$exists", json!(false)),
            _ => {}
        }
    }
    Metadata::from_iter([("$not".to_owned(), Value::Object(object(filter)))])
}

fn condition(test: &Test) -> (&'static str, Value) {
    match test {
        Test::OneOf(values) => match values.as_slice() {
            [one] => ("$eq", one.to_json()),
            several => ("$in", several.iter().map(Scalar::to_json).collect()),
        },
        Test::Compare(comparison, operand) => (operator(*comparison), operand.to_json()),
        Test::Contains(operand) => ("$contains", operand.to_json()),
        Test::Exists => ("$exists", json!(true)),
    }
}

fn operator(comparison: Comparison) -> &'static str {
    match comparison {
        Comparison::Greater => "$gt",
        Comparison::GreaterOrEqual => "$gte",
        Comparison::Less => "$lt",
        Comparison::LessOrEqual => "$lte",
    }
}

fn on(field: &str, operator: &str, operand: Value) -> Metadata {
    let condition = Metadata::from_iter([(operator.to_owned(), operand)]);
    Metadata::from_iter([(field.to_owned(), Value::Object(condition))])
}

fn list(operator: &str, parts: Vec<Metadata>) -> Metadata {
    let parts = parts.into_iter().map(Value::Object).collect();
    Metadata::from_iter([(operator.to_owned(), Value::Array(parts))])
}

/// One object with the conditions of both, or `$and` of the two where they share a key.
fn both(left: Metadata, right: Metadata) -> Metadata {
    let mut joined = left.clone();
    for (key, value) in &right {
        match (joined.get_mut(key), value) {
            (None, _) => {
                joined.insert(key.clone(), value.clone());
            }
            (Some(Value::Object(there)), Value::Object(new))
                if !key.starts_with('$') && new.keys().all(|operator| !there.contains_key(operator)) =>
            {
                there.extend(new.clone());
            }
            (Some(Value::Array(there)), Value::Array(new)) if key == "$and" => {
                there.extend(new.iter().cloned());
            }
            _ => return list("$and", vec![left, right]),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scalar() -> impl Strategy<Value = Value> {
        prop_oneof![
            Just(json!(null)),
            any::<bool>().prop_map(Value::from),
            (-2..3_i64).prop_map(Value::from),
            Just(json!(1.5)),
            "[ab]{0,2}".prop_map(Value::from),
        ]
    }

    fn condition() -> impl Strategy<Value = Value> {
        let ordered = prop_oneof![
            (-2..3_i64).prop_map(Value::from),
            "[ab]{0,2}".prop_map(Value::from)
        ];
        let compared = (prop::sample::select(vec!["$gt", "$gte", "$lt", "$lte"]), ordered);
        prop_oneof![
            scalar(),
            (prop::sample::select(vec!["$eq", "$ne", "$contains"]), scalar())
                .prop_map(|(o, v)| json!({o: v})),
            (
                prop::sample::select(vec!["$in", "$nin"]),
                prop::collection::vec(scalar(), 0..3)
            )
                .prop_map(|(o, v)| json!({o: v})),
            compared.prop_map(|(o, v)| json!({o: v})),
            any::<bool>().prop_map(|b| json!({"$exists": b})),
            (-2..3_i64, -2..3_i64).prop_map(|(a, b)| json!({"$gt": a, "$lt": b})),
        ]
    }

    fn filter() -> impl Strategy<Value = Value> {
        let fields = prop::collection::btree_map("[fg]", condition(), 0..3).prop_map(|m| json!(m));
        fields.prop_recursive(4, 24, 3, |inner| {
            let several = prop::collection::vec(inner.clone(), 1..3);
            prop_oneof![
                several.clone().prop_map(|parts| json!({"$and": parts})),
                several.clone().prop_map(|parts| json!({"$or": parts})),
                (several, condition()).prop_map(|(parts, c)| json!({"$or": parts, "f": c})),
                inner.prop_map(|part| json!({"$not": part})),
            ]
        })
    }

    fn metadata() -> impl Strategy<Value = Metadata> {
        let value = prop_oneof![
            scalar(),
            prop::collection::vec(scalar(), 0..3).prop_map(Value::from),
            Just(json!({"x": 1})),
        ];
        prop::collection::btree_map("[fg]", value, 0..3).prop_map(|m| m.into_iter().collect())
    }

    proptest! {
        #[test]
        fn a_filter_keeps_its_meaning_through_json(json in filter(), metadata in prop::collection::vec(metadata(), 1..8)) {
            let filter = Filter::parse(&json).unwrap();
            let back = Filter::parse(&filter_to_json(&filter)).unwrap();
            for metadata in &metadata {
                prop_assert_eq!(filter.matches(metadata), back.matches(metadata), "{} → {}", json, filter_to_json(&filter));
            }
        }
    }

    #[test]
    fn a_filter_at_the_depth_limit_stays_within_it() {
        let deep = (1..31).fold(
            json!({"f": {"$gt": 1, "$lt": 5}, "g": 1}),
            |inner, _| json!({"$not": inner}),
        );
        let filter = Filter::parse(&deep).unwrap();
        assert!(Filter::parse(&filter_to_json(&filter)).is_ok());
    }
}
