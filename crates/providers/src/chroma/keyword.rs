//! ChromaRanking by words, which Chroma does not do: all texts are read and ranked here with BM25.

use std::collections::{HashMap, HashSet};

use ragstone_core::analysis::{QueryTerm, analyze_document, analyze_query};
use ragstone_core::bm25::{Bm25, idf};
use ragstone_core::storage::{StorageError, StorageQuery};
use ragstone_core::{Document, DocumentId};

use super::ChromaStorage;
use super::api::CollectionRecord;

/// Reading more texts than this for one search would take too long.
const MAX_DOCUMENTS: u64 = 10_000;

/// The documents of a collection in order, and the matching ones ranked by words.
#[derive(Default)]
pub(super) struct ChromaKeywordRanking {
    pub(super) ids: Vec<String>,
    /// The position of each id.
    pub(super) positions: HashMap<String, u32>,
    /// Positions and scores, best first, ties in order.
    pub(super) ranked: Vec<(u32, f64)>,
}

/// A matching document that has a word of the query.
struct Candidate {
    position: u32,
    length: u32,
    /// How often it has each word of the query.
    counts: Vec<u16>,
}

impl ChromaStorage {
    pub(super) async fn rank_by_words(
        &self,
        record: &CollectionRecord,
        text: &str,
        query: &StorageQuery,
    ) -> Result<ChromaKeywordRanking, StorageError> {
        let name = &record.described.name;
        let count = self.api.count(record).await?;
        if count > MAX_DOCUMENTS {
            return Err(StorageError::Unsupported(format!(
                "Collection '{name}' has {count} documents: ChromaDB does not rank by words, so keyword and hybrid \
                 search are limited to {MAX_DOCUMENTS} documents; use mode dense"
            )));
        }
        let ids: Option<HashSet<&DocumentId>> = query.ids.as_ref().map(|ids| ids.iter().collect());
        let matches = |document: &Document| {
            ids.as_ref().is_none_or(|ids| ids.contains(&document.id))
                && query.filter.matches(&document.metadata)
        };
        let terms = analyze_query(text);
        let mut ranking = ChromaKeywordRanking::default();
        let mut document_frequencies = vec![0_u64; terms.len()];
        let mut total_length = 0_u64;
        let mut candidates = Vec::new();
        self.each_document(record, |document| {
            let position = ranking.ids.len() as u32;
            let id = document.id.as_str();
            ranking.positions.insert(id.to_owned(), position);
            ranking.ids.push(id.to_owned());
            let words = analyze_document(&document.text);
            total_length += u64::from(words.length);
            let counts: Vec<u16> = terms
                .iter()
                .map(|term| words.counts.get(&term.text).copied().unwrap_or(0))
                .map(|count| u16::try_from(count).unwrap_or(u16::MAX))
                .collect();
            for (frequency, count) in document_frequencies.iter_mut().zip(&counts) {
                *frequency += u64::from(*count > 0);
            }
            if counts.iter().any(|count| *count > 0) && matches(&document) {
                candidates.push(Candidate {
                    position,
                    length: words.length,
                    counts,
                });
            }
        })
        .await?;
        let documents = ranking.ids.len() as u64;
        let weights: Vec<f32> = terms
            .iter()
            .zip(&document_frequencies)
            .map(|(QueryTerm { weight, .. }, frequency)| weight * idf(documents, *frequency))
            .collect();
        ranking.ranked = rank(&candidates, &weights, Bm25::new(documents, total_length));
        Ok(ranking)
    }
}

fn rank(candidates: &[Candidate], weights: &[f32], bm25: Bm25) -> Vec<(u32, f64)> {
    let mut ranked: Vec<(u32, f64)> = candidates
        .iter()
        .map(|candidate| {
            let words = weights.iter().zip(&candidate.counts);
            let score: f32 = words
                .filter(|(_, count)| **count > 0)
                .map(|(weight, count)| weight * bm25.saturation(*count, candidate.length))
                .sum();
            (candidate.position, f64::from(score))
        })
        .collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    ranked
}
