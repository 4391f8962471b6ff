//! The keyword index: for each word the documents that have it, and BM25 over them.
//!
//! Posting lists are kept in blocks of bounded size, sorted by slot, each block shared between
//! snapshots until it changes.

use std::sync::Arc;

use ragstone_core::analysis::QueryTerm;
use roaring::RoaringBitmap;

use super::chunked::Chunked;
use crate::terms::Terms;

const K1: f32 = 1.2;
const B: f32 = 0.75;
/// A block that grows beyond this is split in two.
const BLOCK: usize = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Posting {
    pub(crate) slot: u32,
    pub(crate) count: u32,
}

/// The documents of one word. Most words are rare, so one posting needs no allocation.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Postings {
    One(Posting),
    Many(Arc<PostingBlocks>),
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct PostingBlocks {
    blocks: Vec<Arc<Vec<Posting>>>,
    len: usize,
}

impl PostingBlocks {
    pub(crate) fn from_sorted(postings: &[Posting]) -> Self {
        Self {
            blocks: postings
                .chunks(BLOCK)
                .map(|block| Arc::new(block.to_vec()))
                .collect(),
            len: postings.len(),
        }
    }

    fn block_of(&self, slot: u32) -> usize {
        self.blocks
            .partition_point(|block| block.last().is_some_and(|last| last.slot < slot))
    }

    fn insert(&mut self, posting: Posting) {
        let at = self
            .block_of(posting.slot)
            .min(self.blocks.len().saturating_sub(1));
        let Some(shared) = self.blocks.get_mut(at) else {
            self.blocks.push(Arc::new(vec![posting]));
            self.len = 1;
            return;
        };
        let block = Arc::make_mut(shared);
        match block.binary_search_by_key(&posting.slot, |p| p.slot) {
            Ok(place) => block[place] = posting,
            Err(place) => {
                // Documents mostly arrive in order: a full last block is left full.
                if place == block.len() && block.len() >= BLOCK {
                    self.blocks.insert(at + 1, Arc::new(vec![posting]));
                } else {
                    block.insert(place, posting);
                    if block.len() > BLOCK {
                        let upper = block.split_off(BLOCK / 2);
                        self.blocks.insert(at + 1, Arc::new(upper));
                    }
                }
                self.len += 1;
            }
        }
    }

    fn remove(&mut self, slot: u32) {
        let at = self.block_of(slot);
        let Some(shared) = self.blocks.get_mut(at) else {
            return;
        };
        let Ok(place) = shared.binary_search_by_key(&slot, |p| p.slot) else {
            return;
        };
        let block = Arc::make_mut(shared);
        block.remove(place);
        if block.is_empty() {
            self.blocks.remove(at);
        }
        self.len -= 1;
    }

    fn find(&self, slot: u32) -> Option<Posting> {
        let block = self.blocks.get(self.block_of(slot))?;
        let place = block.binary_search_by_key(&slot, |p| p.slot).ok()?;
        block.get(place).copied()
    }
}

impl Postings {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::One(_) => 1,
            Self::Many(blocks) => blocks.len,
        }
    }

    fn for_each(&self, mut visit: impl FnMut(Posting)) {
        match self {
            Self::One(posting) => visit(*posting),
            Self::Many(blocks) => blocks
                .blocks
                .iter()
                .for_each(|block| block.iter().for_each(|posting| visit(*posting))),
        }
    }

    fn find(&self, slot: u32) -> Option<Posting> {
        match self {
            Self::One(posting) => (posting.slot == slot).then_some(*posting),
            Self::Many(blocks) => blocks.find(slot),
        }
    }

    fn insert(&mut self, posting: Posting) {
        match self {
            Self::One(only) => {
                let mut blocks = PostingBlocks::from_sorted(&[*only]);
                blocks.insert(posting);
                *self = Self::Many(Arc::new(blocks));
            }
            Self::Many(blocks) => Arc::make_mut(blocks).insert(posting),
        }
    }

    /// Returns whether anything is left.
    fn remove(&mut self, slot: u32) -> bool {
        match self {
            Self::One(only) => only.slot != slot,
            Self::Many(blocks) => {
                let blocks = Arc::make_mut(blocks);
                blocks.remove(slot);
                blocks.len > 0
            }
        }
    }
}

#[derive(Debug, Clone, Default)]
pub(crate) struct KeywordIndex {
    words: imbl::HashMap<Arc<str>, Postings>,
    /// Length of each document, by slot.
    lengths: Chunked<u32>,
    documents: u64,
    total_length: u64,
}

impl KeywordIndex {
    pub(crate) fn from_parts(words: imbl::HashMap<Arc<str>, Postings>, lengths: Chunked<u32>) -> Self {
        Self {
            words,
            documents: lengths.len() as u64,
            total_length: lengths.iter().map(u64::from).sum(),
            lengths,
        }
    }

    /// Slots are filled in order: a new one is the number of those there are.
    pub(crate) fn push(&mut self, slot: u32, terms: &Terms) {
        self.lengths.push(terms.length);
        self.count_in(slot, terms);
    }

    pub(crate) fn replace(&mut self, slot: u32, old: &Terms, new: &Terms) {
        self.remove(slot, old);
        self.lengths.set(slot as usize, new.length);
        self.count_in(slot, new);
    }

    pub(crate) fn remove(&mut self, slot: u32, terms: &Terms) {
        self.documents -= 1;
        self.total_length -= u64::from(terms.length);
        for (word, _) in &terms.counts {
            if self.words.get_mut(&**word).is_some_and(|list| !list.remove(slot)) {
                self.words.remove(&**word);
            }
        }
    }

    fn count_in(&mut self, slot: u32, terms: &Terms) {
        self.documents += 1;
        self.total_length += u64::from(terms.length);
        for (word, count) in &terms.counts {
            let posting = Posting { slot, count: *count };
            match self.words.get_mut(&**word) {
                Some(list) => list.insert(posting),
                None => {
                    self.words.insert((&**word).into(), Postings::One(posting));
                }
            }
        }
    }

    pub(crate) fn renumber(&self, live: &RoaringBitmap, new_slot: &dyn Fn(u32) -> u32) -> Self {
        let moved = |posting: &Posting| Posting {
            slot: new_slot(posting.slot),
            count: posting.count,
        };
        let words = self.words.iter().map(|(word, list)| {
            let list = match list {
                Postings::One(posting) => Postings::One(moved(posting)),
                Postings::Many(blocks) => {
                    let all: Vec<Posting> = blocks.blocks.iter().flat_map(|b| b.iter().map(moved)).collect();
                    Postings::Many(Arc::new(PostingBlocks::from_sorted(&all)))
                }
            };
            (word.clone(), list)
        });
        let lengths = live.iter().filter_map(|slot| self.lengths.get(slot as usize));
        Self::from_parts(words.collect(), lengths.collect())
    }

    /// The best `limit` of the candidates by BM25, best first, ties in slot order. Documents that
    /// have none of the words are left out.
    pub(crate) fn search(
        &self,
        query: &[QueryTerm],
        candidates: &RoaringBitmap,
        limit: usize,
    ) -> Vec<(u32, f64)> {
        let lists: Vec<(&Postings, f32)> = query
            .iter()
            .filter_map(|term| {
                let list = self.words.get(term.text.as_str())?;
                Some((list, term.weight * self.idf(list.len())))
            })
            .collect();
        let postings: usize = lists.iter().map(|(list, _)| list.len()).sum();
        if postings == 0 || limit == 0 || candidates.is_empty() {
            return Vec::new();
        }
        // Looking a slot up costs a binary search where walking the list costs a step.
        const LOOKUP_COST: u64 = 16;
        let scores = if candidates.len() * LOOKUP_COST * (lists.len() as u64) < postings as u64 {
            self.score_each(&lists, candidates)
        } else {
            self.score_lists(&lists, candidates)
        };
        best(scores, limit)
    }

    fn idf(&self, document_frequency: usize) -> f32 {
        let frequency = document_frequency as f64;
        let documents = self.documents as f64;
        (1.0 + (documents - frequency + 0.5) / (frequency + 0.5)).ln() as f32
    }

    fn score_each(&self, lists: &[(&Postings, f32)], candidates: &RoaringBitmap) -> Vec<(u32, f32)> {
        let score = self.scorer();
        candidates
            .iter()
            .filter_map(|slot| {
                let mut sum = 0.0;
                for (list, idf) in lists {
                    if let Some(posting) = list.find(slot) {
                        sum += score(posting, *idf);
                    }
                }
                (sum > 0.0).then_some((slot, sum))
            })
            .collect()
    }

    fn score_lists(&self, lists: &[(&Postings, f32)], candidates: &RoaringBitmap) -> Vec<(u32, f32)> {
        let score = self.scorer();
        let mut sums = vec![0.0f32; self.lengths.len()];
        for (list, idf) in lists {
            list.for_each(|posting| {
                if let Some(sum) = sums.get_mut(posting.slot as usize) {
                    *sum += score(posting, *idf);
                }
            });
        }
        let scored = |(slot, sum): (usize, f32)| (sum > 0.0).then_some((slot as u32, sum));
        if candidates.len() == self.documents {
            sums.into_iter().enumerate().filter_map(scored).collect()
        } else {
            candidates
                .iter()
                .filter_map(|slot| scored((slot as usize, sums.get(slot as usize).copied()?)))
                .collect()
        }
    }

    fn scorer(&self) -> impl Fn(Posting, f32) -> f32 + '_ {
        let average = (self.total_length as f64 / self.documents.max(1) as f64).max(1.0) as f32;
        move |posting, idf| {
            let length = self.lengths.get(posting.slot as usize).unwrap_or(0) as f32;
            let count = posting.count as f32;
            idf * count * (K1 + 1.0) / (count + K1 * (1.0 - B + B * length / average))
        }
    }
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
