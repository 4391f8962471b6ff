//! The index of a collection in memory: an immutable snapshot per state.
//!
//! Documents have dense numbers, their slots, in the order of insertion. A deleted document leaves
//! its slot empty until the slots are renumbered; a replaced one keeps it. Snapshots share whatever
//! did not change between them, so that the next one costs about as much as the write itself.

pub(crate) mod budget;
pub(crate) mod bytes;
pub(crate) mod chunked;
pub(crate) mod codes;
pub(crate) mod dense;
pub(crate) mod fields;
pub(crate) mod filter;
pub(crate) mod kernel;
pub(crate) mod keyword;
pub(crate) mod scope;
pub(crate) mod segment;
#[cfg(test)]
mod tests;
pub(crate) mod vectors;

use std::borrow::Cow;
use std::sync::Arc;

use ragstone_core::{Filter, Metadata};
use roaring::RoaringBitmap;
use serde_json::Value;

use crate::error::Result;
use budget::WorkBudget;
use chunked::Chunked;
use fields::Fields;
use keyword::KeywordIndex;
use scope::IndexScope;
use vectors::Vectors;

/// The part of a document that is indexed.
#[derive(Debug, Clone)]
pub(crate) struct Indexed {
    pub(crate) metadata: Metadata,
    /// Encoded, as in the document's row.
    pub(crate) terms: Vec<u8>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    /// The version of the collection in the database.
    pub(crate) version: i64,
    scope: IndexScope,
    /// Dimensions of its vectors, once there are any.
    dimensions: Option<usize>,
    live: Arc<RoaringBitmap>,
    /// The database row of each slot, ascending.
    rowids: Chunked<i64>,
    /// May still list documents that were deleted in bulk; see `stale`.
    fields: Fields,
    /// Number of deleted documents that `fields` still lists.
    stale: u64,
    /// Empty if only fields are indexed.
    keyword: KeywordIndex,
    vectors: Option<Vectors>,
}

/// The parts of a snapshot that was read from the database.
pub(crate) struct SnapshotParts {
    pub(crate) version: i64,
    pub(crate) scope: IndexScope,
    pub(crate) dimensions: Option<usize>,
    pub(crate) rowids: Chunked<i64>,
    pub(crate) fields: Fields,
    pub(crate) keyword: KeywordIndex,
    pub(crate) vectors: Option<Vectors>,
}

/// Number of empty slots that are never worth renumbering.
const MIN_EMPTY_SLOTS: usize = 1024;

impl Snapshot {
    pub(crate) fn empty(scope: IndexScope) -> Self {
        Self {
            scope,
            ..Self::default()
        }
    }

    pub(crate) fn from_parts(parts: SnapshotParts) -> Self {
        let mut live = RoaringBitmap::new();
        live.insert_range(0..parts.rowids.len() as u32);
        Self {
            version: parts.version,
            scope: parts.scope,
            dimensions: parts.dimensions,
            live: Arc::new(live),
            rowids: parts.rowids,
            fields: parts.fields,
            stale: 0,
            keyword: parts.keyword,
            vectors: parts.vectors,
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.live.len()
    }

    /// Number of slots, including empty ones.
    pub(crate) fn slots(&self) -> usize {
        self.rowids.len()
    }

    #[cfg(test)]
    pub(crate) fn fields(&self) -> &Fields {
        &self.fields
    }

    /// The distinct values of a field, in order.
    pub(crate) fn values(&self, field: &str) -> Vec<Value> {
        let live = (self.stale > 0).then_some(&*self.live);
        let field = self.fields.get(field);
        field.map_or_else(Vec::new, |field| field.values(live))
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

    pub(crate) fn matching(&self, filter: &Filter, budget: &WorkBudget) -> Result<Cow<'_, RoaringBitmap>> {
        let found = filter::matching(filter, &self.fields, &self.live, budget)?;
        Ok(match self.stale {
            0 => found,
            _ => Cow::Owned(found.as_ref() & &*self.live),
        })
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

    /// The slots of these documents, given in ascending order; `None` if one of them does not exist.
    pub(crate) fn slots_of(&self, rowids: &[i64]) -> Option<RoaringBitmap> {
        let mut wanted = rowids.iter().peekable();
        let mut slots = Vec::with_capacity(rowids.len());
        for (slot, rowid) in self.rowids.iter().enumerate() {
            if wanted.next_if(|wanted| **wanted == rowid).is_some() {
                slots.push(slot as u32);
            }
            if wanted.peek().is_none() {
                break;
            }
        }
        let slots = RoaringBitmap::from_sorted_iter(slots).ok()?;
        (slots.len() == rowids.len() as u64 && slots.is_subset(&self.live)).then_some(slots)
    }

    /// Adds a document whose row is newer than all others.
    pub(crate) fn insert(&mut self, rowid: i64, vector: &[f32], indexed: Indexed) {
        let slot = self.rowids.len() as u32;
        self.rowids.push(rowid);
        Arc::make_mut(&mut self.live).insert(slot);
        self.fields.insert(slot, &self.scope.of(&indexed.metadata));
        let dimensions = *self.dimensions.get_or_insert(vector.len());
        if self.scope == IndexScope::Everything {
            self.keyword.push(slot, indexed.terms);
            self.vectors
                .get_or_insert_with(|| Vectors::new(dimensions))
                .push(vector);
        }
    }

    pub(crate) fn replace(&mut self, slot: u32, vector: &[f32], old: &Indexed, new: Indexed) -> Result<()> {
        if old.metadata != new.metadata {
            self.fields.remove(slot, &self.scope.of(&old.metadata));
            self.fields.insert(slot, &self.scope.of(&new.metadata));
        }
        if self.scope == IndexScope::Everything && old.terms != new.terms {
            self.keyword.replace(slot, &old.terms, new.terms)?;
        }
        if let Some(vectors) = &mut self.vectors {
            vectors.set(slot, vector);
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, slot: u32, old: &Indexed) -> Result<()> {
        Arc::make_mut(&mut self.live).remove(slot);
        self.fields.remove(slot, &self.scope.of(&old.metadata));
        match self.scope {
            IndexScope::Everything => self.keyword.remove(slot, &old.terms),
            IndexScope::Fields { .. } => Ok(()),
        }
    }

    /// Removes many documents. Unlike [`Self::remove`] it needs nothing from their rows, but leaves
    /// them listed in `fields` until [`Self::forget`].
    pub(crate) fn remove_many(&mut self, slots: &RoaringBitmap) {
        *Arc::make_mut(&mut self.live) -= slots;
        self.stale += slots.len();
        if self.scope == IndexScope::Everything {
            self.keyword.remove_many(slots);
        }
    }

    /// Removes the metadata of a document that was removed by [`Self::remove_many`].
    pub(crate) fn forget(&mut self, rowid: i64, metadata: &Metadata) {
        if self.stale > 0
            && let Some(slot) = self.rowids.find(&rowid)
            && !self.live.contains(slot as u32)
        {
            self.fields.remove(slot as u32, &self.scope.of(metadata));
            self.stale -= 1;
        }
    }

    /// Finishes the changes of a transaction before they are published.
    pub(crate) fn seal(&mut self) -> Result<()> {
        self.keyword.seal()
    }

    /// Whether most slots are empty.
    pub(crate) fn wants_renumbering(&self) -> bool {
        let empty = self.rowids.len() - self.live.len() as usize;
        empty > MIN_EMPTY_SLOTS && empty > self.live.len() as usize
    }

    /// The same state without empty slots. Takes seconds for a million documents.
    pub(crate) fn renumbered(&self) -> Self {
        let mut new_slots = vec![None; self.rowids.len()];
        for (new, old) in self.live.iter().enumerate() {
            if let Some(slot) = new_slots.get_mut(old as usize) {
                *slot = Some(new as u32);
            }
        }
        let new_slot = |old: u32| new_slots.get(old as usize).copied().flatten();
        let vectors = self.vectors.as_ref().map(|vectors| {
            let mut moved = Vectors::new(vectors.dimensions());
            self.live.iter().for_each(|slot| moved.push(vectors.get(slot)));
            moved
        });
        Self::from_parts(SnapshotParts {
            version: self.version,
            scope: self.scope,
            dimensions: self.dimensions,
            rowids: self.live.iter().filter_map(|slot| self.rowid(slot)).collect(),
            fields: self.fields.renumber(&new_slot),
            keyword: self.keyword.renumber(&self.live, &new_slot),
            vectors,
        })
    }
}
