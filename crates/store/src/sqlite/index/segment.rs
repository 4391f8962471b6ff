//! A part of the keyword index: the words of some documents, packed and never changed.
//!
//! Words are sorted; the documents of a word are numbers local to the segment. What does change,
//! which slot a local number stands for and whether it is still alive, is kept by the index.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::error::Result;
use crate::sqlite::terms;

/// Local numbers have 16 bits. Larger segments would also take noticeably long to merge.
pub(crate) const MAX_DOCUMENTS: usize = 16_384;

#[derive(Debug, Default)]
pub(crate) struct SegmentData {
    /// All words one after the other, and where each begins; one more entry marks the end.
    letters: String,
    word_starts: Vec<u32>,
    posting_starts: Vec<u32>,
    documents: Vec<u16>,
    /// How often; beyond 16 bits more makes no difference to a score.
    counts: Vec<u16>,
    lengths: Vec<u32>,
}

/// The documents of one word: local numbers, ascending, and how often each has it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PostingList<'a> {
    pub(crate) documents: &'a [u16],
    pub(crate) counts: &'a [u16],
}

impl SegmentData {
    pub(crate) fn len(&self) -> usize {
        self.lengths.len()
    }

    pub(crate) fn length(&self, local: usize) -> u32 {
        self.lengths.get(local).copied().unwrap_or(0)
    }

    pub(crate) fn words(&self) -> usize {
        self.word_starts.len().saturating_sub(1)
    }

    fn word(&self, number: usize) -> &str {
        match (self.word_starts.get(number), self.word_starts.get(number + 1)) {
            (Some(start), Some(end)) => self.letters.get(*start as usize..*end as usize).unwrap_or(""),
            _ => "",
        }
    }

    pub(crate) fn find(&self, word: &str) -> Option<u32> {
        let (mut low, mut high) = (0, self.words());
        while low < high {
            let middle = low.midpoint(high);
            match self.word(middle).cmp(word) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return Some(middle as u32),
            }
        }
        None
    }

    pub(crate) fn postings(&self, word: u32) -> PostingList<'_> {
        let word = word as usize;
        let range = match (self.posting_starts.get(word), self.posting_starts.get(word + 1)) {
            (Some(start), Some(end)) => *start as usize..*end as usize,
            _ => 0..0,
        };
        PostingList {
            documents: self.documents.get(range.clone()).unwrap_or(&[]),
            counts: self.counts.get(range).unwrap_or(&[]),
        }
    }
}

/// Gathers documents in the order of their local numbers.
#[derive(Default)]
pub(crate) struct SegmentBuilder {
    words: Interner,
    postings: Vec<(u32, u16, u16)>,
    lengths: Vec<u32>,
}

/// Words and their numbers. They lie in one buffer and the table holds numbers only: with a string
/// object per word, looking words up was most of the time it took to open a store.
#[derive(Default)]
struct Interner {
    letters: String,
    /// Where each word begins; it ends where the next one begins.
    starts: Vec<u32>,
    /// A part of the hash, to compare before the letters, and the number.
    table: HashTable<(u32, u32)>,
    hasher: DefaultHashBuilder,
}

impl Interner {
    fn number(&mut self, word: &str) -> u32 {
        let hash = self.hasher.hash_one(word);
        let tag = (hash >> 32) as u32;
        let (letters, starts) = (&self.letters, &self.starts);
        let known = self.table.find(hash, |(other, number)| {
            *other == tag && word_at(letters, starts, *number) == word
        });
        if let Some((_, number)) = known {
            return *number;
        }
        let number = self.starts.len() as u32;
        self.starts.push(self.letters.len() as u32);
        self.letters.push_str(word);
        let (letters, starts, hasher) = (&self.letters, &self.starts, &self.hasher);
        self.table.insert_unique(hash, (tag, number), |(_, number)| {
            hasher.hash_one(word_at(letters, starts, *number))
        });
        number
    }

    /// All words with their numbers, sorted.
    fn sorted(&self) -> Vec<(&str, u32)> {
        let mut words: Vec<(&str, u32)> = (0..self.starts.len() as u32)
            .map(|number| (word_at(&self.letters, &self.starts, number), number))
            .collect();
        words.sort_unstable();
        words
    }
}

fn word_at<'a>(letters: &'a str, starts: &[u32], number: u32) -> &'a str {
    let number = number as usize;
    let start = starts.get(number).map_or(letters.len(), |start| *start as usize);
    let end = starts.get(number + 1).map_or(letters.len(), |end| *end as usize);
    letters.get(start..end).unwrap_or("")
}

impl SegmentBuilder {
    pub(crate) fn len(&self) -> usize {
        self.lengths.len()
    }

    /// The caller adds at most [`MAX_DOCUMENTS`]. Returns the document's length.
    pub(crate) fn add(&mut self, encoded_terms: &[u8]) -> Result<u32> {
        let local = self.lengths.len() as u16;
        let length = terms::for_each(encoded_terms, |word, count| {
            let number = self.words.number(word);
            let count = u16::try_from(count).unwrap_or(u16::MAX);
            self.postings.push((number, local, count));
        })?;
        self.lengths.push(length);
        Ok(length)
    }

    pub(crate) fn finish(self) -> SegmentData {
        let words = self.words.sorted();
        // A counting sort by word: postings were added in the order of documents and stay so.
        let mut start_of_number = vec![0u32; words.len()];
        let mut frequency_of_number = vec![0u32; words.len()];
        for (number, ..) in &self.postings {
            frequency_of_number[*number as usize] += 1;
        }
        let mut data = SegmentData {
            documents: vec![0; self.postings.len()],
            counts: vec![0; self.postings.len()],
            lengths: self.lengths,
            ..SegmentData::default()
        };
        let mut next = 0;
        for (word, number) in words {
            data.word_starts.push(data.letters.len() as u32);
            data.posting_starts.push(next);
            data.letters.push_str(word);
            start_of_number[number as usize] = next;
            next += frequency_of_number[number as usize];
        }
        data.word_starts.push(data.letters.len() as u32);
        data.posting_starts.push(next);
        for (number, local, count) in self.postings {
            let next = &mut start_of_number[number as usize];
            data.documents[*next as usize] = local;
            data.counts[*next as usize] = count;
            *next += 1;
        }
        data
    }
}

/// One segment of what several hold. For each of them `survives` says, by local number, whether a
/// document is still alive; survivors are numbered in order, segment after segment.
pub(crate) fn merge(segments: &[(&SegmentData, Vec<bool>)]) -> SegmentData {
    let mut merged = SegmentData::default();
    let mut new_locals: Vec<Vec<Option<u16>>> = Vec::with_capacity(segments.len());
    for (data, survives) in segments {
        let mut locals = Vec::with_capacity(data.len());
        for (local, alive) in survives.iter().enumerate() {
            locals.push(alive.then(|| {
                merged.lengths.push(data.length(local));
                (merged.lengths.len() - 1) as u16
            }));
        }
        new_locals.push(locals);
    }
    let mut words: Vec<(&str, usize, u32)> = Vec::new();
    for (number, (data, _)) in segments.iter().enumerate() {
        words.extend((0..data.words()).map(|word| (data.word(word), number, word as u32)));
    }
    // Stable, and quick on what is a few sorted runs.
    words.sort_by(|a, b| a.0.cmp(b.0));
    let mut current = None;
    for (word, number, index) in words {
        let list = segments[number].0.postings(index);
        for (document, count) in list.documents.iter().zip(list.counts) {
            let Some(Some(local)) = new_locals[number].get(usize::from(*document)) else {
                continue;
            };
            if current != Some(word) {
                merged.word_starts.push(merged.letters.len() as u32);
                merged.posting_starts.push(merged.documents.len() as u32);
                merged.letters.push_str(word);
                current = Some(word);
            }
            merged.documents.push(*local);
            merged.counts.push(*count);
        }
    }
    merged.word_starts.push(merged.letters.len() as u32);
    merged.posting_starts.push(merged.documents.len() as u32);
    merged.letters.shrink_to_fit();
    merged.documents.shrink_to_fit();
    merged.counts.shrink_to_fit();
    merged
}
