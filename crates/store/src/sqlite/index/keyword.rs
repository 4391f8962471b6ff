//! The keyword index: for each word the documents that have it, and BM25 over them.
//!
//! It is made of segments that are never changed. A write puts its documents into a new, small
//! segment; segments are merged so that each is about twice as large as the next. A document that
//! is deleted or replaced is only marked as gone in its segment, with a count of the words it took
//! away, so that document frequencies are exact at any time.

use std::collections::BTreeMap;
use std::sync::Arc;

use ragstone_core::analysis::QueryTerm;
use ragstone_core::bm25::{Bm25, idf};
use rayon::prelude::*;
use roaring::RoaringBitmap;

use super::chunked::Chunked;
use super::segment::{MAX_DOCUMENTS, PostingList, SegmentBuilder, SegmentData, merge};
use crate::error::Result;
use crate::sqlite::terms;

/// Marks the slot of a removed document.
const GONE: u32 = u32::MAX;
/// Marks documents that are not in a segment yet.
const FRESH: u32 = u32::MAX;

#[derive(Debug, Clone)]
struct Segment {
    number: u32,
    data: Arc<SegmentData>,
    /// The slot of each local number, or [`GONE`].
    slots: Vec<u32>,
    gone: usize,
    /// Number of removed documents of a word, by the word's number.
    removed: BTreeMap<u32, u32>,
}

impl Segment {
    fn alive(&self) -> usize {
        self.slots.len() - self.gone
    }

    /// Adds these documents, by local number, to the counts of removed ones.
    fn count_removed(&mut self, removed: &[bool]) {
        let mut counts: Vec<(u32, u32)> = Vec::new();
        for word in 0..self.data.words() as u32 {
            let documents = self.data.postings(word).documents.iter();
            let gone = documents.filter(|local| removed.get(usize::from(**local)) == Some(&true));
            let gone = gone.count() as u32;
            let before = self.removed.get(&word).copied().unwrap_or(0);
            if before + gone > 0 {
                counts.push((word, before + gone));
            }
        }
        // Built from sorted pairs, which is far quicker than inserting one by one.
        self.removed = counts.into_iter().collect();
    }
}

/// The segment with a document's words, and its number there.
#[derive(Debug, Clone, Copy)]
struct SegmentSlot {
    segment: u32,
    local: u32,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct KeywordIndex {
    segments: Vec<Arc<Segment>>,
    next_number: u32,
    positions: Chunked<SegmentSlot>,
    /// Documents of the transaction that is being prepared, with their encoded words.
    fresh: Vec<(u32, Vec<u8>)>,
    documents: u64,
    total_length: u64,
}

impl KeywordIndex {
    /// Slots are filled in order: the new one equals the number of existing ones.
    pub(crate) fn push(&mut self, slot: u32, encoded_terms: Vec<u8>) {
        self.positions.push(SegmentSlot {
            segment: FRESH,
            local: 0,
        });
        self.fresh.push((slot, encoded_terms));
    }

    pub(crate) fn replace(&mut self, slot: u32, old: &[u8], new: Vec<u8>) -> Result<()> {
        self.remove(slot, old)?;
        self.positions.set(
            slot as usize,
            SegmentSlot {
                segment: FRESH,
                local: 0,
            },
        );
        self.fresh.push((slot, new));
        Ok(())
    }

    pub(crate) fn remove(&mut self, slot: u32, encoded_terms: &[u8]) -> Result<()> {
        let Some(position) = self.positions.get(slot as usize) else {
            return Ok(());
        };
        if position.segment == FRESH {
            self.fresh.retain(|(fresh, _)| *fresh != slot);
            return Ok(());
        }
        let Some(segment) = self.segments.iter_mut().find(|s| s.number == position.segment) else {
            return Ok(());
        };
        let segment = Arc::make_mut(segment);
        if let Some(of_local) = segment.slots.get_mut(position.local as usize) {
            *of_local = GONE;
        }
        segment.gone += 1;
        let length = terms::for_each(encoded_terms, |word, _| {
            if let Some(number) = segment.data.find(word) {
                *segment.removed.entry(number).or_default() += 1;
            }
        })?;
        self.documents -= 1;
        self.total_length -= u64::from(length);
        Ok(())
    }

    /// Removes many documents without reading their words: counts them in the segments.
    pub(crate) fn remove_many(&mut self, slots: &RoaringBitmap) {
        self.fresh.retain(|(slot, _)| !slots.contains(*slot));
        let removed: Vec<(u64, u64)> = self
            .segments
            .par_iter_mut()
            .map(|segment| {
                let is_removed = |slot: &u32| *slot != GONE && slots.contains(*slot);
                let removed: Vec<bool> = segment.slots.iter().map(is_removed).collect();
                let documents = removed.iter().filter(|removed| **removed).count();
                if documents == 0 {
                    return (0, 0);
                }
                let segment = Arc::make_mut(segment);
                let mut length = 0;
                for (local, slot) in segment.slots.iter_mut().enumerate() {
                    if removed.get(local) == Some(&true) {
                        *slot = GONE;
                        length += u64::from(segment.data.length(local));
                    }
                }
                segment.gone += documents;
                if segment.alive() > 0 {
                    segment.count_removed(&removed);
                }
                (documents as u64, length)
            })
            .collect();
        for (documents, length) in removed {
            self.documents -= documents;
            self.total_length -= length;
        }
    }

    /// Makes segments of the fresh documents, and merges what has become too many.
    pub(crate) fn seal(&mut self) -> Result<()> {
        for part in std::mem::take(&mut self.fresh).chunks(MAX_DOCUMENTS) {
            let mut builder = SegmentBuilder::default();
            let mut slots = Vec::with_capacity(part.len());
            for (slot, encoded_terms) in part {
                builder.add(encoded_terms)?;
                slots.push(*slot);
            }
            self.add_segment(builder.finish(), slots);
        }
        self.segments.retain(|segment| segment.alive() > 0);
        while let Some(first) = self.mergeable() {
            self.merge_from(first);
        }
        if let Some(worn) = self.segments.iter().position(|s| s.gone > s.alive()) {
            self.merge_range(worn..worn + 1);
        }
        Ok(())
    }

    /// Adds a finished segment, whose documents have these slots. They have positions already, or get
    /// them now if the slots continue where the positions end.
    pub(crate) fn add_segment(&mut self, data: SegmentData, slots: Vec<u32>) {
        self.documents += data.len() as u64;
        self.total_length += (0..data.len())
            .map(|local| u64::from(data.length(local)))
            .sum::<u64>();
        self.append(data, slots);
    }

    fn append(&mut self, data: SegmentData, slots: Vec<u32>) {
        let segment = self.number_segment(data, slots);
        self.segments.push(Arc::new(segment));
    }

    fn number_segment(&mut self, data: SegmentData, slots: Vec<u32>) -> Segment {
        let number = self.next_number;
        self.next_number += 1;
        for (local, slot) in slots.iter().enumerate() {
            let position = SegmentSlot {
                segment: number,
                local: local as u32,
            };
            if *slot as usize == self.positions.len() {
                self.positions.push(position);
            } else {
                self.positions.set(*slot as usize, position);
            }
        }
        Segment {
            number,
            data: Arc::new(data),
            slots,
            gone: 0,
            removed: BTreeMap::new(),
        }
    }

    /// The first of the last segments that should be merged, if any.
    fn mergeable(&self) -> Option<usize> {
        let mut first = self.segments.len();
        let mut sum = 0;
        for (at, segment) in self.segments.iter().enumerate().rev() {
            let alive = segment.alive();
            if sum > 0 && (alive >= 2 * sum || alive + sum > MAX_DOCUMENTS) {
                break;
            }
            sum += alive;
            first = at;
        }
        (self.segments.len() - first > 1).then_some(first)
    }

    fn merge_from(&mut self, first: usize) {
        self.merge_range(first..self.segments.len());
    }

    fn merge_range(&mut self, range: std::ops::Range<usize>) {
        let parts: Vec<(&SegmentData, Vec<bool>)> = self.segments[range.clone()]
            .iter()
            .map(|s| (&*s.data, s.slots.iter().map(|slot| *slot != GONE).collect()))
            .collect();
        let data = merge(&parts);
        let slots = self.segments[range.clone()]
            .iter()
            .flat_map(|s| s.slots.iter().copied().filter(|slot| *slot != GONE))
            .collect();
        let merged = self.number_segment(data, slots);
        self.segments.splice(range, [Arc::new(merged)]);
    }

    pub(crate) fn renumber(&self, live: &RoaringBitmap, new_slot: &dyn Fn(u32) -> Option<u32>) -> Self {
        let segments = self.segments.iter().map(|segment| {
            let slots = segment.slots.iter().map(|slot| match *slot {
                GONE => GONE,
                slot => new_slot(slot).unwrap_or(GONE),
            });
            Arc::new(Segment {
                slots: slots.collect(),
                ..(**segment).clone()
            })
        });
        Self {
            segments: segments.collect(),
            positions: live
                .iter()
                .filter_map(|slot| self.positions.get(slot as usize))
                .collect(),
            fresh: self
                .fresh
                .iter()
                .filter_map(|(slot, terms)| Some((new_slot(*slot)?, terms.clone())))
                .collect(),
            ..*self
        }
    }

    /// The best `limit` of the candidates by BM25, best first, ties in slot order. Documents that
    /// have none of the words are left out.
    pub(crate) fn search(
        &self,
        query: &[QueryTerm],
        candidates: &RoaringBitmap,
        limit: usize,
    ) -> Vec<(u32, f64)> {
        let words: Vec<QueryWord> = query.iter().filter_map(|term| self.query_word(term)).collect();
        let postings: u64 = words.iter().map(|word| word.documents).sum();
        if postings == 0 || limit == 0 || candidates.is_empty() {
            return Vec::new();
        }
        // Looking a slot up costs a binary search where walking a list costs a step.
        const LOOKUP_COST: u64 = 16;
        let scores = if candidates.len() * LOOKUP_COST * (words.len() as u64) < postings {
            self.score_each(&words, candidates)
        } else {
            self.score_lists(&words, candidates)
        };
        best(scores, limit)
    }

    /// A word's number in each segment, and its weight; `None` if no document has it.
    fn query_word(&self, term: &QueryTerm) -> Option<QueryWord> {
        let numbers: Vec<Option<u32>> = self.segments.iter().map(|s| s.data.find(&term.text)).collect();
        let documents: u64 = self
            .segments
            .iter()
            .zip(&numbers)
            .filter_map(|(segment, number)| {
                let number = (*number)?;
                let removed = segment.removed.get(&number).copied().unwrap_or(0);
                Some(segment.data.postings(number).documents.len() as u64 - u64::from(removed))
            })
            .sum();
        (documents > 0).then_some(QueryWord {
            numbers,
            documents,
            weight: term.weight * idf(self.documents, documents),
        })
    }

    fn score_each(&self, words: &[QueryWord], candidates: &RoaringBitmap) -> Vec<(u32, f32)> {
        let bm25 = self.bm25();
        let score = |slot: u32| {
            let position = self.positions.get(slot as usize)?;
            let at = self.segments.iter().position(|s| s.number == position.segment)?;
            let segment = self.segments.get(at)?;
            let mut sum = 0.0;
            for word in words {
                let Some(Some(number)) = word.numbers.get(at) else {
                    continue;
                };
                let list = segment.data.postings(*number);
                if let Ok(found) = list.documents.binary_search(&(position.local as u16)) {
                    let count = list.counts.get(found).copied().unwrap_or(0);
                    sum += word.weight * bm25.saturation(count, segment.data.length(position.local as usize));
                }
            }
            (sum > 0.0).then_some((slot, sum))
        };
        candidates.iter().filter_map(score).collect()
    }

    fn score_lists(&self, words: &[QueryWord], candidates: &RoaringBitmap) -> Vec<(u32, f32)> {
        let bm25 = self.bm25();
        let mut sums = vec![0.0f32; self.positions.len()];
        for (at, segment) in self.segments.iter().enumerate() {
            for word in words {
                let Some(Some(number)) = word.numbers.get(at) else {
                    continue;
                };
                let PostingList { documents, counts } = segment.data.postings(*number);
                for (local, count) in documents.iter().zip(counts) {
                    let local = usize::from(*local);
                    // A removed document has no slot, and so no sum.
                    if let Some(slot) = segment.slots.get(local)
                        && let Some(sum) = sums.get_mut(*slot as usize)
                    {
                        *sum += word.weight * bm25.saturation(*count, segment.data.length(local));
                    }
                }
            }
        }
        let scored = |slot: u32, sum: f32| (sum > 0.0).then_some((slot, sum));
        if candidates.len() == self.documents {
            let all = sums.into_iter().enumerate();
            all.filter_map(|(slot, sum)| scored(slot as u32, sum)).collect()
        } else {
            candidates
                .iter()
                .filter_map(|slot| scored(slot, sums.get(slot as usize).copied()?))
                .collect()
        }
    }

    fn bm25(&self) -> Bm25 {
        Bm25::new(self.documents, self.total_length)
    }
}

struct QueryWord {
    /// By segment.
    numbers: Vec<Option<u32>>,
    documents: u64,
    weight: f32,
}

fn best(mut scores: Vec<(u32, f32)>, limit: usize) -> Vec<(u32, f64)> {
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0));
    if scores.len() > limit {
        scores.select_nth_unstable_by(limit - 1, order);
        scores.truncate(limit);
    }
    scores.sort_unstable_by(order);
    scores
        .into_iter()
        .map(|(slot, score)| (slot, f64::from(score)))
        .collect()
}
