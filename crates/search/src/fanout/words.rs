//! How well hits fit by their words, where their service does not say.
//!
//! A service that ranks by meaning alone gives no score by word. Beside hits of services that do, its
//! own would count as if they had none of the words, so their scores are made here: BM25 over the hits
//! at hand. Among those, words of the query are more common than in whole collections and count for
//! less; the scores are therefore brought to the scale of those that the services gave.

use std::collections::HashMap;

use ragstone_core::analysis::{QueryTerm, analyze_document, analyze_query};
use ragstone_core::bm25::{Bm25, idf};

/// The scores of every text by each query. Texts come from outside and may be long, so this is done
/// where it holds nothing else up; where it cannot be, no text has a score.
pub(super) async fn scores(queries: Vec<String>, texts: Vec<String>) -> Vec<Vec<f64>> {
    let none = vec![vec![0.0; texts.len()]; queries.len()];
    tokio::task::spawn_blocking(move || score(&queries, &texts))
        .await
        .unwrap_or(none)
}

fn score(queries: &[String], texts: &[String]) -> Vec<Vec<f64>> {
    let documents: Vec<_> = texts.iter().map(|text| analyze_document(text)).collect();
    let all = documents.len() as u64;
    let total_length = documents.iter().map(|document| u64::from(document.length)).sum();
    let bm25 = Bm25::new(all, total_length);
    let mut having: HashMap<&str, u64> = HashMap::new();
    for word in documents.iter().flat_map(|document| document.counts.keys()) {
        *having.entry(word).or_default() += 1;
    }
    let having = |word: &str| having.get(word).copied().unwrap_or(0);
    queries
        .iter()
        .map(|query| {
            let terms = analyze_query(query);
            let by_term = |QueryTerm { text, weight }: &QueryTerm| weight * idf(all, having(text));
            documents
                .iter()
                .map(|document| {
                    let parts = terms.iter().filter_map(|term| {
                        let count = u16::try_from(*document.counts.get(&term.text)?).unwrap_or(u16::MAX);
                        Some(f64::from(by_term(term) * bm25.saturation(count, document.length)))
                    });
                    parts.sum()
                })
                .collect()
        })
        .collect()
}

/// By how much scores that were made here are to be multiplied to be like `given`, the scores of hits,
/// by their place, as their services gave them: the factor with the least squared error.
pub(super) fn scale(made: &[f64], given: &[(usize, f64)]) -> f64 {
    let (mut both, mut own) = (0.0, 0.0);
    for (place, given) in given.iter().filter(|hit| hit.1.is_finite()) {
        let made = made.get(*place).copied().unwrap_or(0.0);
        both += made * given;
        own += made * made;
    }
    if own > 0.0 && both > 0.0 { both / own } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_words_and_short_texts_count_more() {
        let texts = ["red apple", "red pear", "red wall and a garden of stones", "sky"].map(str::to_owned);
        let made = score(&["red apple".to_owned()], &texts);
        let [apple, pear, wall, sky] = made[0][..] else {
            panic!("a score for each: {made:?}")
        };
        assert!(
            apple > pear && pear > wall && wall > sky && sky == 0.0,
            "{made:?}"
        );
    }

    #[test]
    fn scores_are_brought_to_the_scale_of_those_given() {
        assert!((scale(&[1.0, 2.0, 5.0], &[(0, 3.0), (1, 6.0)]) - 3.0).abs() < 1e-12);
        for given in [&[][..], &[(7, 3.0)], &[(0, f64::NAN)], &[(0, 0.0)]] {
            assert!((scale(&[1.0], given) - 1.0).abs() < 1e-12, "{given:?}");
        }
    }
}
