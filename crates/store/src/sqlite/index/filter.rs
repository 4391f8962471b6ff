//! Filters as algebra on bitmaps.

use std::borrow::Cow;

use ragstone_core::Filter;
use ragstone_core::filter::Test;
use roaring::RoaringBitmap;

use super::budget::{VALUE_WORK, WorkBudget};
use super::fields::Fields;
use crate::error::Result;

type Slots<'a> = Cow<'a, RoaringBitmap>;

/// The slots whose documents pass the filter: within `live` as far as `fields` is.
pub(crate) fn matching<'a>(
    filter: &Filter,
    fields: &'a Fields,
    live: &'a RoaringBitmap,
    budget: &WorkBudget,
) -> Result<Slots<'a>> {
    // Combining two sets takes about as long as copying their bits.
    budget.spend(VALUE_WORK + live.len() / 64)?;
    match filter {
        Filter::All(parts) => all(parts, fields, live, budget),
        Filter::Any(parts) => {
            let mut union = RoaringBitmap::new();
            for part in parts {
                union |= matching(part, fields, live, budget)?.as_ref();
            }
            Ok(Cow::Owned(union))
        }
        Filter::Not(part) => match part.as_ref() {
            Filter::Not(inner) => matching(inner, fields, live, budget),
            part => Ok(Cow::Owned(live - matching(part, fields, live, budget)?.as_ref())),
        },
        Filter::Field { name, test } => field(name, test, fields, budget),
    }
}

fn all<'a>(
    parts: &[Filter],
    fields: &'a Fields,
    live: &'a RoaringBitmap,
    budget: &WorkBudget,
) -> Result<Slots<'a>> {
    let mut result: Option<Slots<'a>> = None;
    let (negated, plain): (Vec<_>, Vec<_>) = parts.iter().partition(|part| matches!(part, Filter::Not(_)));
    for part in plain {
        let set = matching(part, fields, live, budget)?;
        result = Some(match result {
            None => set,
            Some(sofar) => Cow::Owned(sofar.as_ref() & set.as_ref()),
        });
    }
    let mut result = result.unwrap_or(Cow::Borrowed(live));
    for part in negated {
        if let Filter::Not(part) = part {
            *result.to_mut() -= matching(part, fields, live, budget)?.as_ref();
        }
    }
    Ok(result)
}

fn field<'a>(name: &str, test: &Test, fields: &'a Fields, budget: &WorkBudget) -> Result<Slots<'a>> {
    let Some(field) = fields.get(name) else {
        return Ok(Cow::Owned(RoaringBitmap::new()));
    };
    Ok(match test {
        Test::OneOf(values) => {
            if let [value] = values.as_slice()
                && let Some(slots) = field.equal_stored(value)
            {
                return Ok(Cow::Borrowed(slots));
            }
            let mut union = RoaringBitmap::new();
            for value in values {
                budget.spend(VALUE_WORK)?;
                field.equal(value, &mut union);
            }
            Cow::Owned(union)
        }
        Test::Compare(comparison, operand) => Cow::Owned(field.compare(*comparison, operand, budget)?),
        Test::Contains(operand) => Cow::Owned(field.contains(operand, budget)?),
        Test::Exists => Cow::Borrowed(field.present()),
    })
}
