//! Encoding of values, so that Postgres stores and compares them as the embedded store does.

use std::borrow::Cow;

use ragstone_core::Metadata;
use ragstone_core::analysis::TermCounts;
use ragstone_core::filter::Scalar;
use serde_json::{Map, Value};

use crate::error::Result;

/// Escapes U+0000, which Postgres text cannot contain, and the three characters that follow it, of
/// which escapes are made. Each becomes three characters. Equality, order and containment are
/// preserved: `\u{1}` only occurs at the start of an escape, and no other text contains any of the
/// three.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    if text.bytes().all(|byte| byte > 3) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\0' => escaped.push_str("\u{1}\u{2}\u{2}"),
            '\u{1}' => escaped.push_str("\u{1}\u{2}\u{3}"),
            '\u{2}' => escaped.push_str("\u{1}\u{3}\u{2}"),
            '\u{3}' => escaped.push_str("\u{1}\u{3}\u{3}"),
            plain => escaped.push(plain),
        }
    }
    Cow::Owned(escaped)
}

pub(super) fn unescape(text: String) -> String {
    if !text.contains('\u{1}') {
        return text;
    }
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\u{1}' {
            plain.push(c);
            continue;
        }
        match (chars.next(), chars.next()) {
            (Some('\u{2}'), Some('\u{2}')) => plain.push('\0'),
            (Some('\u{2}'), Some('\u{3}')) => plain.push('\u{1}'),
            (Some('\u{3}'), Some('\u{2}')) => plain.push('\u{2}'),
            (Some('\u{3}'), Some('\u{3}')) => plain.push('\u{3}'),
            (second, third) => plain.extend([Some(c), second, third].into_iter().flatten()),
        }
    }
    plain
}

/// The key of a field's scalars in [`fields`].
pub(super) fn scalars_key(field: &str) -> String {
    format!("={}", escape(field))
}

/// The second key of a field that is a list.
pub(super) fn list_key(field: &str) -> String {
    format!("[{}", escape(field))
}

/// The JSON of a scalar; equal scalars have the same.
pub(super) fn scalar_json(scalar: &Scalar) -> Value {
    match scalar {
        Scalar::Text(text) => Value::String(escape(text).into_owned()),
        other => other.to_json(),
    }
}

/// The part of metadata that filters use: for every field the list of its scalars, even if it is not a
/// list, so that one containment test covers "equals" and "has as an element".
pub(super) fn fields(metadata: &Metadata) -> String {
    let mut fields = Map::with_capacity(metadata.len());
    for (name, value) in metadata {
        let scalars = match value {
            Value::Array(elements) => {
                let scalars = scalars(elements);
                fields.insert(list_key(name), scalars.clone());
                scalars
            }
            single => scalars(std::slice::from_ref(single)),
        };
        fields.insert(scalars_key(name), scalars);
    }
    Value::Object(fields).to_string()
}

fn scalars(values: &[Value]) -> Value {
    values
        .iter()
        .filter_map(Scalar::from_json)
        .map(|scalar| scalar_json(&scalar))
        .collect()
}

/// Decodes an element of [`fields`].
pub(super) fn read_scalar(json: &str) -> Result<Option<Scalar>> {
    Ok(match serde_json::from_str(json)? {
        Value::String(text) => Some(Scalar::Text(unescape(text).into())),
        other => Scalar::from_json(&other),
    })
}

/// Maximum size of the words and counts of one document.
const MAX_TERMS_BYTES: usize = (1 << 20) - 1;
/// Postgres keeps at most 255 positions of a word, each with one of four labels. So a count is written
/// in units: a position stands for 1, 64, 4,096 or 262,144 occurrences by its label, and no count has
/// more than 63 of each.
const UNIT_BITS: u32 = 6;
const LABELS: [&str; 4] = ["", "C", "B", "A"];
const MAX_COUNT: u32 = (1 << (UNIT_BITS * LABELS.len() as u32)) - 1;
/// Weights of positions by label, from the smallest unit, as parts of the largest, because no weight may
/// exceed one. All are powers of two and no count has more than 24 bits, so sums are exact.
pub(super) const COUNT_WEIGHTS: &str = "{3.814697265625e-06,0.000244140625,0.015625,1}";
pub(super) const LARGEST_UNIT: u32 = 1 << (UNIT_BITS * 3);

/// The number of positions of each label in a count, from the smallest unit.
fn units(count: u32) -> [u32; LABELS.len()] {
    std::array::from_fn(|label| (count >> (UNIT_BITS * label as u32)) & ((1 << UNIT_BITS) - 1))
}

/// A document's words as a `tsvector`, with positions that encode their counts. For a text of very many
/// different words the counts are reduced, so that all words can still be found. `None` if even that
/// exceeds what Postgres can index.
pub(super) fn tsvector(terms: &TermCounts) -> Option<String> {
    let size = |most: u32| -> usize {
        let of_word = |(word, count): (&String, &u32)| {
            let positions: u32 = units((*count).min(most)).iter().sum();
            word.len().next_multiple_of(2) + 2 + 2 * positions as usize
        };
        terms.counts.iter().map(of_word).sum()
    };
    let most = [MAX_COUNT, 15, 3, 1]
        .into_iter()
        .find(|most| size(*most) <= MAX_TERMS_BYTES)?;
    let mut vector = String::with_capacity(terms.counts.len() * 16);
    for (word, count) in &terms.counts {
        push_lexeme(&mut vector, word);
        let labels = units((*count).min(most)).into_iter().zip(LABELS);
        let labels = labels.flat_map(|(times, label)| std::iter::repeat_n(label, times as usize));
        for (before, label) in labels.enumerate() {
            vector.push(if before == 0 { ':' } else { ',' });
            vector.push_str(&(before + 1).to_string());
            vector.push_str(label);
        }
        vector.push(' ');
    }
    Some(vector)
}

/// The `tsquery` for one word.
pub(super) fn tsquery(word: &str) -> String {
    let mut query = String::with_capacity(word.len() + 2);
    push_lexeme(&mut query, word);
    query
}

fn push_lexeme(into: &mut String, word: &str) {
    into.push('\'');
    for c in word.chars() {
        if matches!(c, '\'' | '\\') {
            into.push(c);
        }
        into.push(c);
    }
    into.push('\'');
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn odd_text() -> impl Strategy<Value = String> {
        prop::collection::vec(
            prop::sample::select(vec!['\0', '\u{1}', '\u{2}', '\u{3}', '\u{4}', 'a', 'é']),
            0..6,
        )
        .prop_map(|chars| chars.into_iter().collect())
    }

    proptest! {
        #[test]
        fn escaping_keeps_text_order_and_parts(a in odd_text(), b in odd_text()) {
            let (x, y) = (escape(&a).into_owned(), escape(&b).into_owned());
            prop_assert!(!x.contains('\0'));
            prop_assert_eq!(&unescape(x.clone()), &a);
            prop_assert_eq!(x.cmp(&y), a.cmp(&b));
            prop_assert_eq!(x.contains(&y), a.contains(&b));
        }
    }

    #[test]
    fn equal_numbers_are_written_alike() {
        let metadata = |json: &str| serde_json::from_str::<Metadata>(json).unwrap();
        let same = fields(&metadata(r#"{"n": 9223372036854775808.0}"#));
        assert_eq!(same, fields(&metadata(r#"{"n": 9223372036854775808}"#)));
        assert_eq!(fields(&metadata(r#"{"n": 1.0}"#)), r#"{"=n":[1]}"#);
        assert_eq!(
            fields(&metadata(r#"{"l": [1, [2], {"x": 3}, null]}"#)),
            r#"{"=l":[1,null],"[l":[1,null]}"#
        );
    }

    #[test]
    fn a_count_is_written_in_units_of_few_positions() {
        let written = |count: u32| {
            let counts = [("w".to_owned(), count)].into_iter().collect();
            tsvector(&TermCounts { counts, length: 1 }).unwrap()
        };
        assert_eq!(written(3), "'w':1,2,3 ");
        assert_eq!(written(66), "'w':1,2,3C ");
        assert_eq!(written(4096 + 262_144), "'w':1B,2A ");
        assert_eq!(written(u32::MAX).matches(',').count(), 4 * 63 - 1);
        let weights = COUNT_WEIGHTS.trim_matches(['{', '}']).split(',');
        let values: Vec<f64> = weights.map(|weight| weight.parse().unwrap()).collect();
        for (label, weight) in values.into_iter().enumerate() {
            assert_eq!(weight * f64::from(LARGEST_UNIT), f64::from(1 << (6 * label)));
        }
    }

    #[test]
    fn a_text_of_very_many_words_keeps_all_of_them_or_is_refused() {
        let counts = |words: usize| TermCounts {
            counts: (0..words).map(|n| (format!("word{n:06}"), 200)).collect(),
            length: 1,
        };
        let vector = tsvector(&counts(60_000)).unwrap();
        assert_eq!(vector.matches('\'').count(), 2 * 60_000);
        assert_eq!(tsvector(&counts(120_000)), None);
    }
}
