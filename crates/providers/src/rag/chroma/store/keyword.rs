//! Ranking by words, which Chroma does not do: all texts are read and ranked here.

use std::collections::{HashMap, HashSet};

use ragstone_core::analysis::{QueryTerm, analyze_document, analyze_query};
use ragstone_core::bm25::{Bm25, idf};
use ragstone_core::provider::ProviderError;
use ragstone_core::storage::StorageQuery;
use ragstone_core::{Document, DocumentId};

use super::super::api::CollectionRecord;
use super::ChromaStore;

/// Reading more texts than this for one search would take too long.
pub(super) const MAX_DOCUMENTS: u64 = 10_000;

/// The documents of a collection in order, and those that match ranked by words.
#[derive(Default)]
pub(super) struct Words {
    pub(super) ids: Vec<String>,
    /// Where each id stands.
    pub(super) places: HashMap<String, u32>,
    /// Best first, ties in order; places and scores.
    pub(super) ranked: Vec<(u32, f64)>,
}

/// A document that matches and has a word of the query.
struct Candidate {
    place: u32,
    length: u32,
    /// How often it has each word of the query.
    counts: Vec<u16>,
}

impl ChromaStore {
    pub(super) async fn words(
        &self,
        record: &CollectionRecord,
        text: &str,
        request: &StorageQuery,
    ) -> Result<Words, ProviderError> {
        let name = &record.described.name;
        let count = self.api().count(record).await?;
        if count > MAX_DOCUMENTS {
            return Err(ProviderError::Unsupported(format!(
                "Collection '{name}' has {count} documents: on ChromaDB, which ranks no words, keyword and hybrid search \
                 are for collections of up to {MAX_DOCUMENTS}; use mode dense"
            )));
        }
        let among: Option<HashSet<&DocumentId>> = request.among.as_ref().map(|ids| ids.iter().collect());
        let matches = |document: &Document| {
            among.as_ref().is_none_or(|ids| ids.contains(&document.id))
                && request.filter.matches(&document.metadata)
        };
        let query = analyze_query(text);
        let mut words = Words::default();
        let mut having = vec![0_u64; query.len()];
        let mut total_length = 0_u64;
        let mut candidates = Vec::new();
        self.chroma
            .each_document(record, |document| {
                let place = words.ids.len() as u32;
                words.places.insert(document.id.as_str().to_owned(), place);
                words.ids.push(document.id.as_str().to_owned());
                let terms = analyze_document(&document.text);
                total_length += u64::from(terms.length);
                let counts: Vec<u16> = query
                    .iter()
                    .map(|term| terms.counts.get(&term.text).copied().unwrap_or(0))
                    .map(|count| u16::try_from(count).unwrap_or(u16::MAX))
                    .collect();
                for (having, count) in having.iter_mut().zip(&counts) {
                    *having += u64::from(*count > 0);
                }
                if counts.iter().any(|count| *count > 0) && matches(&document) {
                    candidates.push(Candidate {
                        place,
                        length: terms.length,
                        counts,
                    });
                }
            })
            .await?;
        let documents = words.ids.len() as u64;
        let weights: Vec<f32> = query
            .iter()
            .zip(&having)
            .map(|(QueryTerm { weight, .. }, having)| weight * idf(documents, *having))
            .collect();
        words.ranked = rank(&candidates, &weights, Bm25::new(documents, total_length));
        Ok(words)
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
            (candidate.place, f64::from(score))
        })
        .collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    ranked
}
