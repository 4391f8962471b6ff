//! From JSON to a filter, within limits.

use serde_json::{Map, Value};

use super::{Comparison, Filter, Scalar, Test};
use crate::collection::shorten;
use crate::error::InvalidInput;

/// How deep objects with operators may nest.
pub const MAX_DEPTH: usize = 32;
/// How many conditions and logical operators one filter may have.
pub const MAX_NODES: usize = 512;
/// How many values `$in` and `$nin` may list.
pub const MAX_LIST: usize = 1000;

const FIELD_OPERATORS: &str = "$eq, $ne, $gt, $gte, $lt, $lte, $in, $nin, $contains, $exists, $not";
const LOGIC_OPERATORS: &str = "$and, $or, $not";

impl Filter {
    /// Reads the text of a `where` parameter.
    pub fn parse_text(text: &str) -> Result<Self, InvalidInput> {
        let value = serde_json::from_str(text).map_err(|error| {
            let reason = match error.to_string() {
                deep if deep.starts_with("recursion limit") => "it is nested too deeply".to_owned(),
                reason => reason,
            };
            InvalidInput::new(format!("Invalid 'where' filter: must be valid JSON ({reason})"))
        })?;
        Self::parse(&value)
    }

    /// Reads a filter that came as JSON. `null` is the filter that everything passes, as is `{}`.
    pub fn parse(value: &Value) -> Result<Self, InvalidInput> {
        match value {
            Value::Null => Ok(Self::everything()),
            Value::Object(object) => FilterParser { nodes: 0 }.object(object, 1),
            other => Err(refuse(format!("must be a JSON object, not {}", kind(other)))),
        }
    }
}

struct FilterParser {
    nodes: usize,
}

impl FilterParser {
    fn object(&mut self, object: &Map<String, Value>, depth: usize) -> Result<Filter, InvalidInput> {
        check_depth(depth)?;
        let mut parts = Vec::with_capacity(object.len());
        for (key, value) in object {
            parts.push(match key.as_str() {
                "$and" => Filter::All(self.list(key, value, depth)?),
                "$or" => Filter::Any(self.list(key, value, depth)?),
                "$not" => {
                    self.count()?;
                    let Value::Object(inner) = value else {
                        return Err(refuse(format!(
                            "'$not' takes a filter object, not {}",
                            kind(value)
                        )));
                    };
                    negate(self.object(inner, depth + 1)?)
                }
                unknown if unknown.starts_with('$') => {
                    return Err(refuse(format!(
                        "unknown operator '{}'; here one of {LOGIC_OPERATORS} or a field name is expected (a field \
                         whose name begins with '$' cannot be filtered on)",
                        shorten(unknown)
                    )));
                }
                field => self.field(field, value, depth)?,
            });
        }
        Ok(all_of(parts))
    }

    fn list(&mut self, operator: &str, value: &Value, depth: usize) -> Result<Vec<Filter>, InvalidInput> {
        self.count()?;
        let Value::Array(items) = value else {
            return Err(refuse(format!(
                "'{operator}' takes a list of filters, not {}",
                kind(value)
            )));
        };
        if items.is_empty() {
            return Err(refuse(format!("'{operator}' takes at least one filter")));
        }
        let mut parts = Vec::with_capacity(items.len());
        for item in items {
            let Value::Object(object) = item else {
                return Err(refuse(format!(
                    "'{operator}' takes a list of filter objects, but has {} in it",
                    kind(item)
                )));
            };
            parts.push(self.object(object, depth + 1)?);
        }
        Ok(parts)
    }

    fn field(&mut self, field: &str, value: &Value, depth: usize) -> Result<Filter, InvalidInput> {
        match value {
            Value::Object(operators) if operators.is_empty() => Err(refuse(format!(
                "field '{}' has an empty condition",
                shorten(field)
            ))),
            Value::Object(operators) => {
                check_depth(depth + 1)?;
                let parts = operators
                    .iter()
                    .map(|(operator, operand)| self.condition(field, operator, operand, depth + 1))
                    .collect::<Result<Vec<_>, _>>()?;
                Ok(all_of(parts))
            }
            value => {
                self.count()?;
                Ok(on(field, Test::OneOf(vec![scalar(field, "$eq", value)?])))
            }
        }
    }

    fn condition(
        &mut self,
        field: &str,
        operator: &str,
        operand: &Value,
        depth: usize,
    ) -> Result<Filter, InvalidInput> {
        self.count()?;
        let compare = |comparison| {
            Ok(on(
                field,
                Test::Compare(comparison, ordered(field, operator, operand)?),
            ))
        };
        match operator {
            "$eq" => Ok(on(field, Test::OneOf(vec![scalar(field, operator, operand)?]))),
            "$ne" => Ok(negate(on(
                field,
                Test::OneOf(vec![scalar(field, operator, operand)?]),
            ))),
            "$in" => Ok(on(field, Test::OneOf(scalars(field, operator, operand)?))),
            "$nin" => Ok(negate(on(field, Test::OneOf(scalars(field, operator, operand)?)))),
            "$gt" => compare(Comparison::Greater),
            "$gte" => compare(Comparison::GreaterOrEqual),
            "$lt" => compare(Comparison::Less),
            "$lte" => compare(Comparison::LessOrEqual),
            "$contains" => Ok(on(field, Test::Contains(scalar(field, operator, operand)?))),
            "$exists" => match operand {
                Value::Bool(true) => Ok(on(field, Test::Exists)),
                Value::Bool(false) => Ok(negate(on(field, Test::Exists))),
                other => Err(wrong_operand(field, operator, "true or false", other)),
            },
            "$not" => match operand {
                Value::Object(_) => Ok(negate(self.field(field, operand, depth)?)),
                other => Err(wrong_operand(field, operator, "an object with operators", other)),
            },
            unknown => Err(refuse(format!(
                "unknown operator '{}' on field '{}'; known are {FIELD_OPERATORS}",
                shorten(unknown),
                shorten(field)
            ))),
        }
    }

    fn count(&mut self) -> Result<(), InvalidInput> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(refuse(format!("more than {MAX_NODES} conditions")));
        }
        Ok(())
    }
}

fn on(field: &str, test: Test) -> Filter {
    Filter::Field {
        name: field.to_owned(),
        test,
    }
}

fn negate(filter: Filter) -> Filter {
    Filter::Not(Box::new(filter))
}

fn all_of(mut parts: Vec<Filter>) -> Filter {
    if parts.len() == 1 {
        parts.remove(0)
    } else {
        Filter::All(parts)
    }
}

fn check_depth(depth: usize) -> Result<(), InvalidInput> {
    if depth > MAX_DEPTH {
        return Err(refuse(format!("nested deeper than {MAX_DEPTH} levels")));
    }
    Ok(())
}

fn scalar(field: &str, operator: &str, operand: &Value) -> Result<Scalar, InvalidInput> {
    Scalar::from_json(operand).ok_or_else(|| {
        let expected = match operator {
            "$eq" => "a string, number, boolean or null (use '$in' for several values)",
            _ => "a string, number, boolean or null",
        };
        wrong_operand(field, operator, expected, operand)
    })
}

fn scalars(field: &str, operator: &str, operand: &Value) -> Result<Vec<Scalar>, InvalidInput> {
    let Value::Array(items) = operand else {
        return Err(wrong_operand(field, operator, "a list of values", operand));
    };
    if items.len() > MAX_LIST {
        return Err(refuse(format!(
            "'{operator}' on field '{}' lists {} values; at most {MAX_LIST} are allowed",
            shorten(field),
            items.len()
        )));
    }
    items.iter().map(|item| scalar(field, operator, item)).collect()
}

fn ordered(field: &str, operator: &str, operand: &Value) -> Result<Scalar, InvalidInput> {
    match Scalar::from_json(operand) {
        Some(scalar @ (Scalar::Number(_) | Scalar::Text(_))) => Ok(scalar),
        _ => Err(wrong_operand(field, operator, "a number or a string", operand)),
    }
}

fn wrong_operand(field: &str, operator: &str, expected: &str, actual: &Value) -> InvalidInput {
    refuse(format!(
        "'{operator}' on field '{}' takes {expected}, not {}",
        shorten(field),
        kind(actual)
    ))
}

fn refuse(problem: String) -> InvalidInput {
    InvalidInput::new(format!("Invalid 'where' filter: {problem}"))
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn matches(filter: Value, metadata: Value) -> bool {
        let Value::Object(metadata) = metadata else {
            panic!("metadata must be an object")
        };
        Filter::parse(&filter).unwrap().matches(&metadata)
    }

    fn refusal(filter: Value) -> String {
        Filter::parse(&filter).unwrap_err().to_string()
    }

    #[test]
    fn equality_compares_by_value_and_kind() {
        assert!(matches(json!({"n": 1.0}), json!({"n": 1})));
        assert!(!matches(json!({"n": "1"}), json!({"n": 1})));
        assert!(matches(
            json!({"a": "x", "b": true}),
            json!({"a": "x", "b": true})
        ));
        assert!(!matches(
            json!({"a": "x", "b": true}),
            json!({"a": "x", "b": false})
        ));
        assert!(matches(json!({"tags": "red"}), json!({"tags": ["blue", "red"]})));
        assert!(matches(json!({"n": null}), json!({"n": null})));
        assert!(!matches(json!({"n": null}), json!({})));
    }

    #[test]
    fn negations_match_documents_that_lack_the_field() {
        for filter in [
            json!({"f": {"$ne": 1}}),
            json!({"f": {"$nin": [1, 2]}}),
            json!({"$not": {"f": 1}}),
        ] {
            assert!(matches(filter.clone(), json!({})), "{filter}");
            assert!(!matches(filter.clone(), json!({"f": 1})), "{filter}");
            assert!(!matches(filter, json!({"f": [3, 1]})));
        }
    }

    #[test]
    fn several_operators_on_a_field_are_all_meant() {
        let filter = json!({"n": {"$gte": 2, "$lt": 5}});
        assert!(matches(filter.clone(), json!({"n": 2})));
        assert!(!matches(filter.clone(), json!({"n": 5})));
        assert!(!matches(filter, json!({"n": "3"})));
    }

    #[test]
    fn contains_looks_into_lists_and_strings() {
        assert!(matches(
            json!({"tags": {"$contains": "a"}}),
            json!({"tags": ["a"]})
        ));
        assert!(!matches(
            json!({"tags": {"$contains": "a"}}),
            json!({"tags": ["ab"]})
        ));
        assert!(matches(
            json!({"title": {"$contains": "ell"}}),
            json!({"title": "hello"})
        ));
    }

    #[test]
    fn empty_and_null_filters_match_everything() {
        assert!(Filter::parse(&json!({})).unwrap().is_everything());
        assert!(Filter::parse(&json!(null)).unwrap().is_everything());
        assert!(!matches(json!({"f": {"$in": []}}), json!({"f": 1})));
    }

    #[test]
    fn refusals_name_the_offender() {
        assert!(refusal(json!({"f": {"$regex": "x"}})).contains("'$regex' on field 'f'"));
        assert!(refusal(json!({"$nor": []})).contains("'$nor'"));
        assert!(
            refusal(json!({"f": {"$gt": true}})).contains("'$gt' on field 'f' takes a number or a string")
        );
        assert!(refusal(json!({"f": {"$in": 3}})).contains("takes a list"));
        assert!(refusal(json!({"f": {}})).contains("'f'"));
        assert!(refusal(json!({"$and": []})).contains("'$and'"));
        assert!(refusal(json!([])).contains("a list"));
        let error = Filter::parse_text("invalid-json-string").unwrap_err().to_string();
        assert!(
            error.starts_with("Invalid 'where' filter: must be valid JSON"),
            "{error}"
        );
    }

    #[test]
    fn limits_hold() {
        let list = |n: usize| json!({"f": {"$in": (0..n).collect::<Vec<_>>()}});
        assert!(Filter::parse(&list(1000)).is_ok());
        assert!(refusal(list(1001)).contains("1001"));

        let wide = |n: usize| json!({"$or": (0..n).map(|i| json!({"f": i})).collect::<Vec<_>>()});
        assert!(Filter::parse(&wide(511)).is_ok());
        assert!(refusal(wide(512)).contains("512"));

        let deep = |n: usize| (1..n).fold(json!({"f": 1}), |inner, _| json!({"$not": inner}));
        assert!(Filter::parse(&deep(32)).is_ok());
        assert!(refusal(deep(33)).contains("32"));
    }
}
