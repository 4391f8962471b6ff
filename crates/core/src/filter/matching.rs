//! What a filter means for one document.

use serde_json::Value;

use super::{Filter, Scalar, Test};
use crate::document::Metadata;

impl Filter {
    pub fn matches(&self, metadata: &Metadata) -> bool {
        match self {
            Self::All(parts) => parts.iter().all(|part| part.matches(metadata)),
            Self::Any(parts) => parts.iter().any(|part| part.matches(metadata)),
            Self::Not(part) => !part.matches(metadata),
            Self::Field { name, test } => metadata.get(name).is_some_and(|value| test.matches(value)),
        }
    }
}

impl Test {
    fn matches(&self, value: &Value) -> bool {
        match self {
            Self::OneOf(wanted) => any_scalar(value, |scalar| wanted.contains(scalar)),
            Self::Compare(comparison, operand) => any_scalar(value, |scalar| {
                scalar
                    .compare(operand)
                    .is_some_and(|ordering| comparison.holds(ordering))
            }),
            Self::Contains(operand) => match (value, operand) {
                (Value::Array(_), _) => any_scalar(value, |scalar| scalar == operand),
                (Value::String(text), Scalar::Text(part)) => text.contains(&**part),
                _ => false,
            },
            Self::Exists => true,
        }
    }
}

/// Asks a scalar itself, or each scalar of a list; objects and nested lists have none.
fn any_scalar(value: &Value, mut test: impl FnMut(&Scalar) -> bool) -> bool {
    match value {
        Value::Array(elements) => elements
            .iter()
            .filter_map(Scalar::from_json)
            .any(|scalar| test(&scalar)),
        single => Scalar::from_json(single).is_some_and(|scalar| test(&scalar)),
    }
}
