//! Encoding of metadata for Chroma.
//!
//! Strings, booleans and numbers are stored as they are, so that other clients see them and Chroma
//! can filter on them. Everything else (null, lists, objects, numbers and keys that Chroma would
//! change or refuse) is stored as JSON in one reserved key. A flag beside it makes such documents
//! searchable.

use ragstone_core::Metadata;
use serde_json::Value;

/// Set on everything that has encoded fields.
pub(super) const ENCODED_FLAG: &str = "ragstone:encoded";
const ENCODED_FIELDS: &str = "ragstone:json";
/// The original length of a document's vector, and the model that made it.
pub(super) const NORM: &str = "ragstone:norm";
pub(super) const MODEL: &str = "ragstone:model";

/// False for keys that Chroma refuses or reserves, and for our own.
pub(super) fn is_plain_key(key: &str) -> bool {
    !key.is_empty()
        && !["$", "#", "chroma:", "ragstone:"]
            .iter()
            .any(|prefix| key.starts_with(prefix))
}

fn is_plain_value(value: &Value) -> bool {
    match value {
        Value::String(_) | Value::Bool(_) => true,
        // Chroma changes numbers beyond this range, and loses the sign of minus zero.
        Value::Number(number) => match number.as_f64() {
            _ if number.is_i64() => true,
            Some(float) => !(number.is_u64() || float == 0.0 && float.is_sign_negative()),
            None => false,
        },
        Value::Null | Value::Array(_) | Value::Object(_) => false,
    }
}

/// Chroma returns a neighbour of a number with many digits.
fn is_rounded_by_chroma(value: &Value) -> bool {
    const SAFE_DIGITS: usize = 15;
    let Value::Number(number) = value else {
        return false;
    };
    let text = number.to_string();
    number.is_f64() && (text.contains('e') || text.bytes().filter(u8::is_ascii_digit).count() > SAFE_DIGITS)
}

pub(super) fn encode(metadata: &Metadata) -> Metadata {
    let (plain, mut other): (Metadata, Metadata) = metadata
        .clone()
        .into_iter()
        .partition(|(key, value)| is_plain_key(key) && is_plain_value(value));
    // The exact number is stored beside the one that other clients see.
    let inexact = plain.iter().filter(|(_, value)| is_rounded_by_chroma(value));
    other.extend(inexact.map(|(key, value)| (key.clone(), value.clone())));
    if other.is_empty() {
        plain
    } else {
        flagged(plain, &other)
    }
}

/// [`encode`] for a collection: Chroma refuses empty metadata.
pub(super) fn encode_some(metadata: &Metadata) -> Metadata {
    let encoded = encode(metadata);
    if encoded.is_empty() {
        flagged(encoded, &Metadata::new())
    } else {
        encoded
    }
}

fn flagged(mut plain: Metadata, other: &Metadata) -> Metadata {
    plain.insert(ENCODED_FLAG.into(), true.into());
    plain.insert(
        ENCODED_FIELDS.into(),
        Value::Object(other.clone()).to_string().into(),
    );
    plain
}

/// The error is the reason why the metadata cannot be decoded.
pub(super) fn decode(stored: Option<Metadata>) -> Result<Metadata, String> {
    let mut metadata = stored.unwrap_or_default();
    for key in [ENCODED_FLAG, NORM, MODEL] {
        metadata.remove(key);
    }
    if let Some(fields) = metadata.remove(ENCODED_FIELDS) {
        let fields: Metadata = fields
            .as_str()
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| format!("the metadata under '{ENCODED_FIELDS}' is not JSON"))?;
        for (key, kept) in fields {
            let seen = metadata.remove(&key);
            if let Some(value) = newest(&key, kept, seen) {
                metadata.insert(key, value);
            }
        }
    }
    Ok(metadata)
}

/// The current value of an encoded field: the value `kept` as JSON, unless the plain value `seen` beside
/// it shows that another client changed the field since. Only numbers are stored in both places.
fn newest(key: &str, kept: Value, seen: Option<Value>) -> Option<Value> {
    let is_twice = is_plain_key(key) && is_plain_value(&kept);
    match seen {
        Some(seen) if is_twice && is_rounded(&kept, &seen) => Some(kept),
        None if !is_twice => Some(kept),
        seen => seen,
    }
}

/// Whether the two numbers differ only by Chroma's rounding.
fn is_rounded(written: &Value, read: &Value) -> bool {
    /// A few dozen neighbours: more than Chroma was ever off by, less than any real change.
    const RELATIVE: f64 = 1e-14;
    let (Some(written), Some(read)) = (written.as_f64(), read.as_f64()) else {
        return false;
    };
    let difference = (written - read).abs();
    difference <= RELATIVE * written.abs() || difference < f64::MIN_POSITIVE
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn object(value: Value) -> Metadata {
        match value {
            Value::Object(object) => object,
            _ => unreachable!("tests give objects"),
        }
    }

    #[test]
    fn everything_comes_back_as_it_was() {
        for metadata in [
            json!({}),
            json!({"s": "x", "b": true, "i": 7, "f": 1.0, "min": i64::MIN}),
            json!({"n": null, "l": [1, "a", null], "o": {"x": [1]}, "big": u64::MAX, "neg": -0.0}),
            json!({"": 1, "$x": 2, "#y": 3, "chroma:document": "z", "ragstone:json": "not json"}),
        ] {
            let metadata = object(metadata);
            assert_eq!(decode(Some(encode(&metadata))).unwrap(), metadata);
            assert_eq!(decode(Some(encode_some(&metadata))).unwrap(), metadata);
            assert!(!encode_some(&metadata).is_empty());
        }
        assert_eq!(decode(None).unwrap(), Metadata::new());
    }

    #[test]
    fn numbers_of_many_digits_are_kept_twice() {
        let encoded = encode(&object(json!({"third": 271.0 / 3.0, "tiny": 1e-300})));
        assert!(encoded.contains_key("third") && encoded[ENCODED_FLAG] == true);
        let mut rounded = encoded.clone();
        rounded.insert("third".into(), json!(90.33333333333331));
        assert_eq!(decode(Some(rounded)).unwrap()["third"], 271.0 / 3.0);
        let short = object(json!({"half": 0.5, "price": 12.99, "whole": 3.0}));
        assert_eq!(encode(&short), short);
    }

    #[test]
    fn what_another_client_changed_afterwards_holds() {
        let metadata = object(json!({"third": 271.0 / 3.0, "tiny": 5e-324, "list": [1]}));
        let encoded = encode(&metadata);
        let changed = |key: &str, value: Option<Value>| {
            let mut stored = encoded.clone();
            match value {
                Some(value) => stored.insert(key.into(), value),
                None => stored.remove(key),
            };
            decode(Some(stored)).unwrap().remove(key)
        };
        for value in [json!(90.33), json!(-90.33333333333333), json!(7), json!("none")] {
            assert_eq!(changed("third", Some(value.clone())), Some(value));
        }
        assert_eq!(changed("third", None), None, "deleted");
        assert_eq!(changed("tiny", Some(json!(0.0))), Some(json!(5e-324)));
        assert_eq!(changed("list", Some(json!("short"))), Some(json!("short")));
        assert_eq!(decode(Some(encoded)).unwrap(), metadata);
    }

    #[test]
    fn scalars_stay_visible_to_other_clients() {
        let encoded = encode(&object(json!({"s": "x", "l": [1]})));
        assert_eq!(encoded["s"], "x");
        assert_eq!(encoded[ENCODED_FLAG], true);
        assert!(!encoded.contains_key("l"));
    }
}
