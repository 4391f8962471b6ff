//! Pre-filtering: the narrowest Chroma condition that every matching document satisfies.
//!
//! Chroma's operators differ from ours: `$eq` does not look into lists, strings have no order, and
//! there is no `$exists` and no `$not`. So a filter is not translated but narrowed: the condition may
//! pass documents that do not match, and must never miss one that does, whoever wrote it.

use ragstone_core::Filter;
use ragstone_core::filter::{Scalar, Test};
use serde_json::{Value, json};

use super::codec::{ENCODED_FLAG, is_plain_key};

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Narrowed {
    /// Chroma can rule nothing out.
    Everything,
    Where(Value),
    /// No document can match.
    Nothing,
}

/// A condition with more alternatives costs Chroma more than it saves.
const MAX_ALTERNATIVES: usize = 64;
/// Integers up to this are exact as floats.
const EXACT: f64 = 9_007_199_254_740_992.0;

pub(super) fn narrow(filter: &Filter) -> Narrowed {
    match filter {
        Filter::All(parts) => {
            let mut conditions = Vec::new();
            for part in parts {
                match narrow(part) {
                    Narrowed::Everything => {}
                    Narrowed::Where(condition) => conditions.push(condition),
                    Narrowed::Nothing => return Narrowed::Nothing,
                }
            }
            combine("$and", conditions).map_or(Narrowed::Everything, Narrowed::Where)
        }
        Filter::Any(parts) => {
            let mut conditions = Vec::new();
            for part in parts {
                match narrow(part) {
                    Narrowed::Everything => return Narrowed::Everything,
                    Narrowed::Where(condition) => conditions.push(condition),
                    Narrowed::Nothing => {}
                }
            }
            combine("$or", conditions).map_or(Narrowed::Nothing, Narrowed::Where)
        }
        Filter::Field {
            name,
            test: Test::OneOf(values),
        } => one_of(name, values),
        // Chroma lacks these operators, or its own do not look into lists.
        Filter::Not(_) | Filter::Field { .. } => Narrowed::Everything,
    }
}

/// An equal scalar, a native list with such an element, or encoded metadata, which Chroma cannot look
/// into.
fn one_of(name: &str, values: &[Scalar]) -> Narrowed {
    if values.is_empty() {
        return Narrowed::Nothing;
    }
    let mut alternatives = vec![json!({ENCODED_FLAG: true})];
    if is_plain_key(name) {
        for value in values {
            match value {
                Scalar::Null => {}
                Scalar::Bool(_) | Scalar::Text(_) => {
                    let value = value.to_json();
                    alternatives.push(json!({name: {"$eq": value}}));
                    alternatives.push(json!({name: {"$contains": value}}));
                }
                Scalar::Number(number) => {
                    let Some(float) = number.to_json().as_f64().filter(|f| f.abs() < EXACT) else {
                        return Narrowed::Everything;
                    };
                    alternatives.push(json!({name: {"$eq": float}}));
                    alternatives.push(json!({name: {"$contains": float}}));
                    if float.fract() == 0.0 {
                        alternatives.push(json!({name: {"$contains": float as i64}}));
                    }
                }
            }
        }
    }
    if alternatives.len() > MAX_ALTERNATIVES {
        return Narrowed::Everything;
    }
    combine("$or", alternatives).map_or(Narrowed::Nothing, Narrowed::Where)
}

fn combine(operator: &str, mut conditions: Vec<Value>) -> Option<Value> {
    match conditions.len() {
        0 => None,
        1 => conditions.pop(),
        _ => Some(json!({operator: conditions})),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn narrowed(filter: Value) -> Narrowed {
        narrow(&Filter::parse(&filter).unwrap())
    }

    #[test]
    fn equality_is_narrowed_and_the_rest_is_not() {
        assert_eq!(
            narrowed(json!({"f": "x"})),
            Narrowed::Where(json!({"$or": [
                {"ragstone:encoded": true}, {"f": {"$eq": "x"}}, {"f": {"$contains": "x"}}]}))
        );
        for wide in [
            json!({"f": {"$ne": 1}}),
            json!({"f": {"$gt": 1}}),
            json!({"f": {"$exists": true}}),
            json!({}),
        ] {
            assert_eq!(narrowed(wide), Narrowed::Everything);
        }
    }

    #[test]
    fn logic_keeps_what_it_can() {
        let x = json!({"$or": [{"ragstone:encoded": true}, {"f": {"$eq": "x"}}, {"f": {"$contains": "x"}}]});
        assert_eq!(
            narrowed(json!({"f": "x", "g": {"$gt": 1}})),
            Narrowed::Where(x.clone())
        );
        assert_eq!(
            narrowed(json!({"$or": [{"f": "x"}, {"g": {"$gt": 1}}]})),
            Narrowed::Everything
        );
        assert_eq!(
            narrowed(json!({"$or": [{"f": "x"}, {"f": {"$in": []}}]})),
            Narrowed::Where(x)
        );
        assert_eq!(narrowed(json!({"f": {"$in": []}, "g": 1})), Narrowed::Nothing);
    }

    #[test]
    fn what_is_only_ever_encoded_is_looked_for_there() {
        let encoded = Narrowed::Where(json!({"ragstone:encoded": true}));
        assert_eq!(narrowed(json!({"f": null})), encoded);
        assert_eq!(narrowed(json!({"": 1})), encoded);
    }

    #[test]
    fn numbers_that_floats_cannot_tell_apart_are_not_narrowed() {
        assert_eq!(
            narrowed(json!({"f": 9_007_199_254_740_993_i64})),
            Narrowed::Everything
        );
    }
}
