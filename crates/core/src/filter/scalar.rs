//! Scalars with one total order: null, false, true, numbers, strings.

use std::cmp::Ordering;

use serde_json::Value;

/// A JSON scalar that compares by value: `1` and `1.0` are the same number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scalar {
    Null,
    Bool(bool),
    Number(Number),
    Text(Box<str>),
}

impl Scalar {
    /// `None` for lists and objects.
    pub fn from_json(value: &Value) -> Option<Self> {
        match value {
            Value::Null => Some(Self::Null),
            Value::Bool(flag) => Some(Self::Bool(*flag)),
            Value::Number(number) => Number::from_json(number).map(Self::Number),
            Value::String(text) => Some(Self::Text(text.as_str().into())),
            Value::Array(_) | Value::Object(_) => None,
        }
    }

    pub fn to_json(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(flag) => Value::Bool(*flag),
            Self::Number(number) => number.to_json(),
            Self::Text(text) => Value::String(text.to_string()),
        }
    }

    /// The order of two values of the same kind, where that kind can be ordered.
    pub fn compare(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Number(a), Self::Number(b)) => Some(a.cmp(b)),
            (Self::Text(a), Self::Text(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }
}

/// A JSON number in canonical form, so that equal values are equal whatever they were written as.
#[derive(Debug, Clone, Copy)]
pub struct Number(Repr);

#[derive(Debug, Clone, Copy)]
enum Repr {
    /// Every whole number that JSON integers or floats below 2^100 can hold.
    Whole(i128),
    /// A float with a fraction, or one too large for `Whole`. Never NaN.
    Float(f64),
}

const LARGEST_WHOLE: f64 = (1u128 << 100) as f64;

impl Number {
    /// `None` only for numbers that no `f64` can hold.
    pub fn from_json(number: &serde_json::Number) -> Option<Self> {
        if let Some(whole) = number.as_i64() {
            return Some(Self(Repr::Whole(whole.into())));
        }
        if let Some(whole) = number.as_u64() {
            return Some(Self(Repr::Whole(whole.into())));
        }
        number.as_f64().and_then(Self::from_f64)
    }

    pub fn from_f64(float: f64) -> Option<Self> {
        if float.is_nan() {
            None
        } else if float.fract() == 0.0 && float.abs() < LARGEST_WHOLE {
            Some(Self(Repr::Whole(float as i128)))
        } else {
            Some(Self(Repr::Float(float)))
        }
    }

    pub fn to_json(self) -> Value {
        match self.0 {
            Repr::Whole(whole) => match (i64::try_from(whole), u64::try_from(whole)) {
                (Ok(small), _) => small.into(),
                (_, Ok(large)) => large.into(),
                _ => (whole as f64).into(),
            },
            Repr::Float(float) => float.into(),
        }
    }
}

impl Ord for Number {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self.0, other.0) {
            (Repr::Whole(a), Repr::Whole(b)) => a.cmp(&b),
            (Repr::Float(a), Repr::Float(b)) => a.total_cmp(&b),
            (Repr::Whole(a), Repr::Float(b)) => whole_to_float(a, b),
            (Repr::Float(a), Repr::Whole(b)) => whole_to_float(b, a).reverse(),
        }
    }
}

/// A `Repr::Float` is never whole below the bound, so the two are never equal: it lies strictly
/// between its floor and the next whole number, or beyond every whole one.
fn whole_to_float(whole: i128, float: f64) -> Ordering {
    if float.abs() >= LARGEST_WHOLE {
        return if float > 0.0 {
            Ordering::Less
        } else {
            Ordering::Greater
        };
    }
    if whole <= float.floor() as i128 {
        Ordering::Less
    } else {
        Ordering::Greater
    }
}

impl PartialOrd for Number {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Number {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Number {}

impl std::hash::Hash for Number {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        match self.0 {
            Repr::Whole(whole) => whole.hash(state),
            Repr::Float(float) => float.to_bits().hash(state),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn scalar(value: Value) -> Scalar {
        Scalar::from_json(&value).unwrap()
    }

    #[test]
    fn numbers_compare_by_value() {
        assert_eq!(scalar(json!(1)), scalar(json!(1.0)));
        assert_eq!(scalar(json!(-0.0)), scalar(json!(0)));
        assert_ne!(
            scalar(json!(9_007_199_254_740_993_i64)),
            scalar(json!(9_007_199_254_740_992.0))
        );
        let ascending = [
            json!(null),
            json!(false),
            json!(true),
            json!(-1e300),
            json!(i64::MIN),
            json!(-1.5),
            json!(-1),
            json!(0),
            json!(0.5),
            json!(1),
            json!(1.5),
            json!(i64::MAX),
            json!(u64::MAX),
            json!(1e300),
            json!(""),
            json!("1"),
            json!("a"),
        ];
        for pair in ascending.windows(2) {
            assert!(scalar(pair[0].clone()) < scalar(pair[1].clone()), "{pair:?}");
        }
    }

    #[test]
    fn scalars_keep_their_json() {
        for value in [
            json!(null),
            json!(true),
            json!(7),
            json!(u64::MAX),
            json!(0.25),
            json!(1e300),
            json!("x"),
        ] {
            assert_eq!(scalar(value.clone()).to_json(), value);
        }
    }
}
