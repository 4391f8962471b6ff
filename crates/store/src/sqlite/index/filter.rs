//! Filters as algebra on bitmaps.

use std::borrow::Cow;

use ragstone_core::Filter;
use ragstone_core::filter::Test;
use roaring::RoaringBitmap;

use super::fields::Fields;

/// The slots whose documents pass the filter: within `live` as far as `fields` is.
pub(crate) fn matching<'a>(
    filter: &Filter,
    fields: &'a Fields,
    live: &'a RoaringBitmap,
) -> Cow<'a, RoaringBitmap> {
    match filter {
        Filter::All(parts) => all(parts, fields, live),
        Filter::Any(parts) => {
            let mut union = RoaringBitmap::new();
            for part in parts {
                union |= matching(part, fields, live).as_ref();
            }
            Cow::Owned(union)
        }
        Filter::Not(part) => match part.as_ref() {
            Filter::Not(inner) => matching(inner, fields, live),
            part => Cow::Owned(live - matching(part, fields, live).as_ref()),
        },
        Filter::Field { name, test } => field(name, test, fields),
    }
}

fn all<'a>(parts: &[Filter], fields: &'a Fields, live: &'a RoaringBitmap) -> Cow<'a, RoaringBitmap> {
    let mut result: Option<Cow<'a, RoaringBitmap>> = None;
    let (negated, plain): (Vec<_>, Vec<_>) = parts.iter().partition(|part| matches!(part, Filter::Not(_)));
    for part in plain {
        let set = matching(part, fields, live);
        result = Some(match result {
            None => set,
            Some(sofar) => Cow::Owned(sofar.as_ref() & set.as_ref()),
        });
    }
    let mut result = result.unwrap_or(Cow::Borrowed(live));
    for part in negated {
        if let Filter::Not(part) = part {
            *result.to_mut() -= matching(part, fields, live).as_ref();
        }
    }
    result
}

fn field<'a>(name: &str, test: &Test, fields: &'a Fields) -> Cow<'a, RoaringBitmap> {
    let Some(field) = fields.get(name) else {
        return Cow::Owned(RoaringBitmap::new());
    };
    match test {
        Test::OneOf(values) => {
            if let [value] = values.as_slice()
                && let Some(slots) = field.equal_stored(value)
            {
                return Cow::Borrowed(slots);
            }
            let mut union = RoaringBitmap::new();
            for value in values {
                field.equal(value, &mut union);
            }
            Cow::Owned(union)
        }
        Test::Compare(comparison, operand) => Cow::Owned(field.compare(*comparison, operand)),
        Test::Contains(operand) => Cow::Owned(field.contains(operand)),
        Test::Exists => Cow::Borrowed(field.present()),
    }
}
