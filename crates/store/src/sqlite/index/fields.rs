//! The metadata index: which documents have which value in which field.
//!
//! Scalars and list elements are kept apart, because `$contains` asks lists for an element but
//! strings for a part. All maps are persistent: a changed copy shares what did not change.

use std::ops::Bound;
use std::sync::Arc;

use hashbrown::HashMap;
use imbl::OrdMap;
use memchr::memmem;
use ragstone_core::Metadata;
use ragstone_core::filter::{Comparison, Scalar};
use roaring::RoaringBitmap;
use serde_json::Value;

use super::budget::{VALUE_WORK, WorkBudget};
use crate::error::Result;

/// A set of slots that is small where there is one slot, as in fields that are almost unique.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Slots {
    One(u32),
    Many(Arc<RoaringBitmap>),
}

impl Slots {
    pub(crate) fn add_to(&self, set: &mut RoaringBitmap) {
        match self {
            Self::One(slot) => {
                set.insert(*slot);
            }
            Self::Many(slots) => *set |= &**slots,
        }
    }

    fn from_set(slots: RoaringBitmap) -> Option<Self> {
        match (slots.len(), slots.min()) {
            (1, Some(only)) => Some(Self::One(only)),
            (_, first) => first.map(|_| Self::Many(Arc::new(slots))),
        }
    }

    fn insert(&mut self, slot: u32) {
        match self {
            Self::One(only) if *only == slot => {}
            Self::One(only) => *self = Self::Many(Arc::new(RoaringBitmap::from_iter([*only, slot]))),
            Self::Many(slots) => {
                Arc::make_mut(slots).insert(slot);
            }
        }
    }

    fn any_of(&self, live: &RoaringBitmap) -> bool {
        match self {
            Self::One(slot) => live.contains(*slot),
            Self::Many(slots) => !slots.is_disjoint(live),
        }
    }

    /// Returns whether anything is left.
    fn remove(&mut self, slot: u32) -> bool {
        match self {
            Self::One(only) => *only != slot,
            Self::Many(slots) => {
                Arc::make_mut(slots).remove(slot);
                match (slots.len(), slots.min()) {
                    (1, Some(last)) => *self = Self::One(last),
                    (0, _) => return false,
                    _ => {}
                }
                true
            }
        }
    }
}

type ValueMap = OrdMap<Scalar, Slots>;

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct FieldIndex {
    scalars: ValueMap,
    elements: ValueMap,
    present: Arc<RoaringBitmap>,
}

impl FieldIndex {
    pub(crate) fn present(&self) -> &RoaringBitmap {
        &self.present
    }

    pub(crate) fn equal(&self, value: &Scalar, into: &mut RoaringBitmap) {
        for map in [&self.scalars, &self.elements] {
            if let Some(slots) = map.get(value) {
                slots.add_to(into);
            }
        }
    }

    /// The set of one value where a single stored set answers, to spare a copy.
    pub(crate) fn equal_stored(&self, value: &Scalar) -> Option<&Arc<RoaringBitmap>> {
        match (self.scalars.get(value), self.elements.get(value)) {
            (Some(Slots::Many(slots)), None) | (None, Some(Slots::Many(slots))) => Some(slots),
            _ => None,
        }
    }

    pub(crate) fn compare(
        &self,
        comparison: Comparison,
        operand: &Scalar,
        budget: &WorkBudget,
    ) -> Result<RoaringBitmap> {
        let mut sets = SetUnion::default();
        for map in [&self.scalars, &self.elements] {
            let range = match comparison {
                Comparison::Greater => (Bound::Excluded(operand.clone()), Bound::Unbounded),
                Comparison::GreaterOrEqual => (Bound::Included(operand.clone()), Bound::Unbounded),
                Comparison::Less => (Bound::Unbounded, Bound::Excluded(operand.clone())),
                Comparison::LessOrEqual => (Bound::Unbounded, Bound::Included(operand.clone())),
            };
            for (value, slots) in map.range(range) {
                // The order of scalars runs across kinds; only values of the operand's kind count.
                if value.compare(operand).is_some() {
                    sets.add(slots, budget)?;
                }
            }
        }
        Ok(sets.finish())
    }

    pub(crate) fn contains(&self, operand: &Scalar, budget: &WorkBudget) -> Result<RoaringBitmap> {
        let mut sets = SetUnion::default();
        if let Some(slots) = self.elements.get(operand) {
            sets.add(slots, budget)?;
        }
        if let Scalar::Text(part) = operand {
            // Prepared once; preparing it for every value would take most of the time.
            let finder = memmem::Finder::new(part.as_bytes());
            for (value, slots) in self.scalars.range(Scalar::Text("".into())..) {
                let Scalar::Text(text) = value else { break };
                budget.spend(VALUE_WORK + text.len() as u64)?;
                if finder.find(text.as_bytes()).is_some() {
                    sets.add(slots, budget)?;
                }
            }
        }
        Ok(sets.finish())
    }

    /// Distinct scalars in their order; with `live`, only those that a live document has.
    pub(crate) fn values(&self, live: Option<&RoaringBitmap>) -> Vec<Value> {
        let is_live = |slots: &Slots| live.is_none_or(|live| slots.any_of(live));
        let keys = |map: &'_ ValueMap| {
            let live = map.iter().filter(|(_, slots)| is_live(slots));
            live.map(|(value, _)| value.clone()).collect::<Vec<_>>()
        };
        let (scalars, elements) = (keys(&self.scalars), keys(&self.elements));
        let mut scalars = scalars.iter().peekable();
        let mut elements = elements.iter().peekable();
        let mut values = Vec::with_capacity(self.scalars.len() + self.elements.len());
        loop {
            let next = match (scalars.peek(), elements.peek()) {
                (Some(a), Some(b)) if a == b => {
                    elements.next();
                    scalars.next()
                }
                (Some(a), Some(b)) if a < b => scalars.next(),
                (_, Some(_)) => elements.next(),
                (Some(_), None) => scalars.next(),
                (None, None) => return values,
            };
            values.extend(next.map(Scalar::to_json));
        }
    }

    fn is_empty(&self) -> bool {
        self.present.is_empty()
    }
}

/// The union of many sets, gathered as plain bits: adding thousands of small sets one by one to a
/// compressed one would copy it as often.
#[derive(Default)]
struct SetUnion {
    bytes: Vec<u8>,
}

impl SetUnion {
    fn add(&mut self, slots: &Slots, budget: &WorkBudget) -> Result<()> {
        match slots {
            Slots::One(slot) => {
                budget.spend(VALUE_WORK)?;
                self.insert(*slot);
            }
            Slots::Many(slots) => {
                budget.spend(VALUE_WORK + slots.len())?;
                slots.iter().for_each(|slot| self.insert(slot));
            }
        }
        Ok(())
    }

    fn insert(&mut self, slot: u32) {
        let byte = slot as usize / 8;
        if byte >= self.bytes.len() {
            self.bytes.resize(byte + 1, 0);
        }
        self.bytes[byte] |= 1 << (slot % 8);
    }

    fn finish(self) -> RoaringBitmap {
        RoaringBitmap::from_lsb0_bytes(0, &self.bytes)
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Fields {
    fields: OrdMap<Arc<str>, FieldIndex>,
}

impl Fields {
    pub(crate) fn get(&self, name: &str) -> Option<&FieldIndex> {
        self.fields.get(name)
    }

    pub(crate) fn insert(&mut self, slot: u32, metadata: &Metadata) {
        for (name, value) in metadata {
            if !self.fields.contains_key(name.as_str()) {
                self.fields.insert(name.as_str().into(), FieldIndex::default());
            }
            let Some(field) = self.fields.get_mut(name.as_str()) else {
                continue;
            };
            Arc::make_mut(&mut field.present).insert(slot);
            each_scalar(value, |kind, scalar| {
                let map = field.map(kind);
                match map.get_mut(&scalar) {
                    Some(slots) => slots.insert(slot),
                    None => {
                        map.insert(scalar, Slots::One(slot));
                    }
                }
            });
        }
    }

    /// Takes back what [`Self::insert`] did with the same metadata.
    pub(crate) fn remove(&mut self, slot: u32, metadata: &Metadata) {
        for (name, value) in metadata {
            let Some(field) = self.fields.get_mut(name.as_str()) else {
                continue;
            };
            Arc::make_mut(&mut field.present).remove(slot);
            each_scalar(value, |kind, scalar| {
                let map = field.map(kind);
                if map.get_mut(&scalar).is_some_and(|slots| !slots.remove(slot)) {
                    map.remove(&scalar);
                }
            });
            if field.is_empty() {
                self.fields.remove(name.as_str());
            }
        }
    }

    /// The same index with every slot renumbered. Slots without a new number are left out.
    pub(crate) fn renumber(&self, new_slot: &dyn Fn(u32) -> Option<u32>) -> Self {
        let set = |slots: &RoaringBitmap| slots.iter().filter_map(new_slot).collect::<RoaringBitmap>();
        let map = |values: &ValueMap| {
            let renumbered = values.iter().filter_map(|(value, slots)| {
                let slots = match slots {
                    Slots::One(slot) => Slots::One(new_slot(*slot)?),
                    Slots::Many(slots) => Slots::from_set(set(slots))?,
                };
                Some((value.clone(), slots))
            });
            renumbered.collect()
        };
        let fields = self.fields.iter().filter_map(|(name, field)| {
            let field = FieldIndex {
                scalars: map(&field.scalars),
                elements: map(&field.elements),
                present: Arc::new(set(&field.present)),
            };
            (!field.is_empty()).then(|| (name.clone(), field))
        });
        Self {
            fields: fields.collect(),
        }
    }
}

/// The index of documents that come all at once, in the order of their slots. The persistent
/// maps are made once, and not changed for every document.
#[derive(Default)]
pub(crate) struct FieldsBuilder {
    fields: HashMap<String, FieldBuilder>,
}

#[derive(Default)]
struct FieldBuilder {
    scalars: HashMap<Scalar, Vec<u32>>,
    elements: HashMap<Scalar, Vec<u32>>,
    present: Vec<u32>,
}

impl FieldsBuilder {
    pub(crate) fn insert(&mut self, slot: u32, metadata: &Metadata) {
        for (name, value) in metadata {
            if !self.fields.contains_key(name.as_str()) {
                self.fields.insert(name.clone(), FieldBuilder::default());
            }
            let Some(field) = self.fields.get_mut(name.as_str()) else {
                continue;
            };
            field.present.push(slot);
            each_scalar(value, |kind, scalar| {
                let map = match kind {
                    ValueKind::Scalar => &mut field.scalars,
                    ValueKind::Element => &mut field.elements,
                };
                let slots = map.entry(scalar).or_default();
                // A list may have an element twice.
                if slots.last() != Some(&slot) {
                    slots.push(slot);
                }
            });
        }
    }

    pub(crate) fn finish(self) -> Fields {
        let set = |slots: &[u32]| Arc::new(slots.iter().copied().collect::<RoaringBitmap>());
        let map = |values: HashMap<Scalar, Vec<u32>>| {
            let mut values: Vec<(Scalar, Slots)> = values
                .into_iter()
                .map(|(value, slots)| match slots[..] {
                    [only] => (value, Slots::One(only)),
                    _ => (value, Slots::Many(set(&slots))),
                })
                .collect();
            values.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
            values.into_iter().collect()
        };
        let fields = self.fields.into_iter().map(|(name, field)| {
            let index = FieldIndex {
                scalars: map(field.scalars),
                elements: map(field.elements),
                present: set(&field.present),
            };
            (Arc::from(name), index)
        });
        Fields {
            fields: fields.collect(),
        }
    }
}

#[derive(Clone, Copy)]
enum ValueKind {
    Scalar,
    Element,
}

impl FieldIndex {
    fn map(&mut self, kind: ValueKind) -> &mut ValueMap {
        match kind {
            ValueKind::Scalar => &mut self.scalars,
            ValueKind::Element => &mut self.elements,
        }
    }
}

fn each_scalar(value: &Value, mut visit: impl FnMut(ValueKind, Scalar)) {
    match value {
        Value::Array(elements) => elements
            .iter()
            .filter_map(Scalar::from_json)
            .for_each(|scalar| visit(ValueKind::Element, scalar)),
        single => {
            if let Some(scalar) = Scalar::from_json(single) {
                visit(ValueKind::Scalar, scalar);
            }
        }
    }
}
