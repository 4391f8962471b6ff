//! What is held in memory of a collection: an immutable snapshot per state.
//!
//! Documents have dense numbers, their slots, in the order of insertion. A deleted document leaves
//! its slot empty until the slots are renumbered; a replaced one keeps it. Snapshots share whatever
//! did not change between them, so that the next one costs about as much as the write itself.

pub(crate) mod bytes;
pub(crate) mod chunked;
pub(crate) mod codes;
pub(crate) mod dense;
pub(crate) mod fields;
pub(crate) mod filter;
pub(crate) mod held;
pub(crate) mod kernel;
pub(crate) mod keyword;
pub(crate) mod segment;
#[cfg(test)]
mod tests;
pub(crate) mod vectors;

use std::borrow::Cow;
use std::sync::Arc;

use ragstone_core::{Filter, Metadata};
use roaring::RoaringBitmap;

use crate::error::Result;
use chunked::Chunked;
use fields::Fields;
use held::Held;
use keyword::KeywordIndex;
use vectors::Vectors;

/// What the indexes need to know of a document.
#[derive(Debug, Clone)]
pub(crate) struct Indexed {
    pub(crate) metadata: Metadata,
    /// Encoded, as in the document's row.
    pub(crate) terms: Vec<u8>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    /// Of the collection, in the database, when it was in this state.
    pub(crate) version: i64,
    held: Held,
    /// How many numbers its vectors have, once there are any.
    dimensions: Option<usize>,
    live: Arc<RoaringBitmap>,
    /// The database row of each slot, ascending.
    rowids: Chunked<i64>,
    fields: Fields,
    /// Empty where only fields are held.
    keyword: KeywordIndex,
    vectors: Option<Vectors>,
}

/// The parts of a snapshot that was read from the database.
pub(crate) struct SnapshotParts {
    pub(crate) version: i64,
    pub(crate) held: Held,
    pub(crate) dimensions: Option<usize>,
    pub(crate) rowids: Chunked<i64>,
    pub(crate) fields: Fields,
    pub(crate) keyword: KeywordIndex,
    pub(crate) vectors: Option<Vectors>,
}

/// Whether a snapshot got rid of its empty slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sealed {
    AsItWas,
    Renumbered,
}

/// Slots are renumbered when more than this many are empty and they outnumber the others.
const EMPTY_SLOTS_KEPT: usize = 1024;

impl Snapshot {
    pub(crate) fn empty(held: Held) -> Self {
        Self {
            held,
            ..Self::default()
        }
    }

    pub(crate) fn from_parts(parts: SnapshotParts) -> Self {
        let mut live = RoaringBitmap::new();
        live.insert_range(0..parts.rowids.len() as u32);
        Self {
            version: parts.version,
            held: parts.held,
            dimensions: parts.dimensions,
            live: Arc::new(live),
            rowids: parts.rowids,
            fields: parts.fields,
            keyword: parts.keyword,
            vectors: parts.vectors,
        }
    }

    /// The state without any document.
    pub(crate) fn emptied(&self) -> Self {
        Self {
            version: self.version,
            ..Self::empty(self.held)
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.live.len()
    }

    /// How many slots there are, empty ones included.
    pub(crate) fn slots(&self) -> usize {
        self.rowids.len()
    }

    pub(crate) fn fields(&self) -> &Fields {
        &self.fields
    }

    pub(crate) fn keyword(&self) -> &KeywordIndex {
        &self.keyword
    }

    pub(crate) fn vectors(&self) -> Option<&Vectors> {
        self.vectors.as_ref()
    }

    pub(crate) fn dimensions(&self) -> Option<usize> {
        self.dimensions
    }

    pub(crate) fn matching(&self, filter: &Filter) -> Cow<'_, RoaringBitmap> {
        filter::matching(filter, &self.fields, &self.live)
    }

    pub(crate) fn live(&self) -> &RoaringBitmap {
        &self.live
    }

    pub(crate) fn rowid(&self, slot: u32) -> Option<i64> {
        self.rowids.get(slot as usize)
    }

    /// The slots of the documents whose rows are newer than this one.
    pub(crate) fn after(&self, rowid: i64) -> impl Iterator<Item = u32> + '_ {
        self.live.range(self.rowids.up_to(rowid) as u32..)
    }

    pub(crate) fn slot(&self, rowid: i64) -> Option<u32> {
        let slot = self.rowids.find(&rowid)? as u32;
        self.live.contains(slot).then_some(slot)
    }

    /// Adds a document whose row is newer than all others.
    pub(crate) fn insert(&mut self, rowid: i64, vector: &[f32], indexed: Indexed) {
        let slot = self.rowids.len() as u32;
        self.rowids.push(rowid);
        Arc::make_mut(&mut self.live).insert(slot);
        self.fields.insert(slot, &self.held.of(&indexed.metadata));
        let dimensions = *self.dimensions.get_or_insert(vector.len());
        if self.held == Held::Everything {
            self.keyword.push(slot, indexed.terms);
            self.vectors
                .get_or_insert_with(|| Vectors::new(dimensions))
                .push(vector);
        }
    }

    pub(crate) fn replace(&mut self, slot: u32, vector: &[f32], old: &Indexed, new: Indexed) -> Result<()> {
        if old.metadata != new.metadata {
            self.fields.remove(slot, &self.held.of(&old.metadata));
            self.fields.insert(slot, &self.held.of(&new.metadata));
        }
        if self.held == Held::Everything && old.terms != new.terms {
            self.keyword.replace(slot, &old.terms, new.terms)?;
        }
        if let Some(vectors) = &mut self.vectors {
            vectors.set(slot, vector);
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, slot: u32, old: &Indexed) -> Result<()> {
        Arc::make_mut(&mut self.live).remove(slot);
        self.fields.remove(slot, &self.held.of(&old.metadata));
        match self.held {
            Held::Everything => self.keyword.remove(slot, &old.terms),
            Held::Fields { .. } => Ok(()),
        }
    }

    /// Finishes what a transaction changed, before it is published.
    pub(crate) fn seal(&mut self) -> Result<Sealed> {
        self.keyword.seal()?;
        if !self.wants_renumbering() {
            return Ok(Sealed::AsItWas);
        }
        *self = self.renumbered();
        Ok(Sealed::Renumbered)
    }

    fn wants_renumbering(&self) -> bool {
        let empty = self.rowids.len() - self.live.len() as usize;
        empty > EMPTY_SLOTS_KEPT && empty > self.live.len() as usize
    }

    /// The same state without empty slots.
    fn renumbered(&self) -> Self {
        let mut new_slots = vec![0u32; self.rowids.len()];
        for (new, old) in self.live.iter().enumerate() {
            if let Some(place) = new_slots.get_mut(old as usize) {
                *place = new as u32;
            }
        }
        let new_slot = |old: u32| new_slots.get(old as usize).copied().unwrap_or(0);
        let vectors = self.vectors.as_ref().map(|vectors| {
            let mut moved = Vectors::new(vectors.dimensions());
            self.live.iter().for_each(|slot| moved.push(vectors.get(slot)));
            moved
        });
        Self::from_parts(SnapshotParts {
            version: self.version,
            held: self.held,
            dimensions: self.dimensions,
            rowids: self.live.iter().filter_map(|slot| self.rowid(slot)).collect(),
            fields: self.fields.renumber(&new_slot),
            keyword: self.keyword.renumber(&self.live, &new_slot),
            vectors,
        })
    }
}
