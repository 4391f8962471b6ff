//! How good a ranking is, by judgements that somebody made beforehand.
//!
//! The measures are those that retrieval experiments report, and they agree with the reference
//! programs of the field, ties included, so that figures can be compared with published ones. The
//! references do not agree with each other on ties: trec_eval keeps scores in single precision and
//! lets the greater id win, the reciprocal rank of MS MARCO keeps double precision and lets the
//! smaller id win. Both are followed here.

use std::cmp::Ordering;
use std::collections::HashMap;

/// How relevant each judged document is to one query. What is not listed was not judged and counts
/// as irrelevant, as does everything at or below zero.
pub type Judgements = HashMap<String, i32>;

/// The measures of one ranking, or their mean over many. All are between 0 and 1.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Measures {
    /// Discounted gain of the best ten against that of an ideal order; the gain of a document is its
    /// judgement, not a power of it.
    pub ndcg_10: f64,
    /// How many of the relevant documents are among the best ten.
    pub recall_10: f64,
    pub recall_100: f64,
    /// One over the rank of the first relevant document, 0 when it is not among the best ten.
    pub mrr_10: f64,
}

/// Measures the ranking that one query got, given as distinct ids with scores, higher is better, in
/// any order. A query without any relevant document measures 0.
pub fn measure(ranking: &[(&str, f64)], judgements: &Judgements) -> Measures {
    let gains = gains_in_order(ranking, judgements, |a, b| {
        // The cast is the point: scores that trec_eval cannot tell apart are tied.
        (b.1 as f32).total_cmp(&(a.1 as f32)).then_with(|| b.0.cmp(a.0))
    });
    let gains_of_mrr = gains_in_order(ranking, judgements, |a, b| {
        b.1.total_cmp(&a.1).then_with(|| a.0.cmp(b.0))
    });
    Measures {
        ndcg_10: ndcg(&gains, judgements, 10),
        recall_10: recall(&gains, judgements, 10),
        recall_100: recall(&gains, judgements, 100),
        mrr_10: reciprocal_rank(&gains_of_mrr, 10),
    }
}

/// The mean over queries; of no query at all it is 0.
pub fn mean(all: &[Measures]) -> Measures {
    let of = |part: fn(&Measures) -> f64| all.iter().map(part).sum::<f64>() / all.len().max(1) as f64;
    Measures {
        ndcg_10: of(|m| m.ndcg_10),
        recall_10: of(|m| m.recall_10),
        recall_100: of(|m| m.recall_100),
        mrr_10: of(|m| m.mrr_10),
    }
}

fn gains_in_order(
    ranking: &[(&str, f64)],
    judgements: &Judgements,
    order: impl Fn(&(&str, f64), &(&str, f64)) -> Ordering,
) -> Vec<i32> {
    let mut ranking = ranking.to_vec();
    ranking.sort_by(order);
    ranking
        .iter()
        .map(|(id, _)| judgements.get(*id).copied().unwrap_or(0).max(0))
        .collect()
}

fn ndcg(gains: &[i32], judgements: &Judgements, depth: usize) -> f64 {
    let mut ideal: Vec<i32> = judgements.values().copied().filter(|gain| *gain > 0).collect();
    ideal.sort_unstable_by(|a, b| b.cmp(a));
    let best = discounted(&ideal, depth);
    if best > 0.0 {
        discounted(gains, depth) / best
    } else {
        0.0
    }
}

fn discounted(gains: &[i32], depth: usize) -> f64 {
    gains
        .iter()
        .take(depth)
        .enumerate()
        .map(|(place, gain)| f64::from(*gain) / (place as f64 + 2.0).log2())
        .sum()
}

fn recall(gains: &[i32], judgements: &Judgements, depth: usize) -> f64 {
    let relevant = judgements.values().filter(|gain| **gain > 0).count();
    let found = gains.iter().take(depth).filter(|gain| **gain > 0).count();
    found as f64 / relevant.max(1) as f64
}

fn reciprocal_rank(gains: &[i32], depth: usize) -> f64 {
    gains
        .iter()
        .take(depth)
        .position(|gain| *gain > 0)
        .map_or(0.0, |place| 1.0 / (place as f64 + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn judged(pairs: &[(&str, i32)]) -> Judgements {
        pairs.iter().map(|(id, gain)| ((*id).to_owned(), *gain)).collect()
    }

    fn assert_close(actual: f64, expected: f64) {
        assert!((actual - expected).abs() < 1e-9, "{actual} is not {expected}");
    }

    #[test]
    fn graded_judgements_count_linearly() {
        let judgements = judged(&[("a", 3), ("b", 1), ("c", 0)]);
        let measures = measure(&[("b", 3.0), ("x", 2.0), ("a", 1.0)], &judgements);
        let gained = 1.0 + 3.0 / 4f64.log2();
        let ideal = 3.0 + 1.0 / 3f64.log2();
        assert_close(measures.ndcg_10, gained / ideal);
        assert_close(measures.mrr_10, 1.0);
        assert_close(measures.recall_10, 1.0);
    }

    /// The figures are what the reference programs print for the same run.
    #[test]
    fn ties_and_negative_judgements_are_those_of_the_references() {
        let judgements = judged(&[("a", 2), ("b", 1), ("c", 0), ("z", -1)]);
        let measures = measure(&[("a", 1.0), ("b", 1.0), ("c", 1.0), ("z", 2.0)], &judgements);
        assert_close(measures.ndcg_10, 0.517_441_833_746_706_7);
        assert_close(measures.mrr_10, 0.5);
        let nearly_tied = measure(&[("a", 1.0 + 1e-10), ("b", 1.0)], &judged(&[("a", 1)]));
        assert_close(nearly_tied.ndcg_10, 0.630_929_753_571_457_5);
        assert_close(nearly_tied.mrr_10, 1.0);
    }

    #[test]
    fn what_cannot_be_found_measures_zero() {
        let zero = Measures::default();
        assert_eq!(measure(&[], &judged(&[("a", 1)])), zero);
        assert_eq!(measure(&[("a", 1.0)], &judged(&[("a", 0)])), zero);
        assert_eq!(measure(&[("a", f64::NAN)], &Judgements::new()), zero);
        assert_eq!(mean(&[]), zero);
    }

    #[test]
    fn depth_is_respected() {
        let ids: Vec<String> = (0..150).map(|n| format!("{n:03}")).collect();
        let ranking: Vec<(&str, f64)> = ids
            .iter()
            .map(String::as_str)
            .zip((0..150).map(|n| -f64::from(n)))
            .collect();
        let measures = measure(
            &ranking,
            &judged(&[("005", 1), ("010", 1), ("099", 1), ("100", 1)]),
        );
        assert_close(measures.recall_10, 0.25);
        assert_close(measures.recall_100, 0.75);
        assert_close(measures.mrr_10, 1.0 / 6.0);
    }

    proptest! {
        #[test]
        fn an_ideal_order_measures_one_and_no_order_measures_more(
            gains in prop::collection::vec(-1..4i32, 1..40),
            scores in prop::collection::vec(-5.0..5.0f64, 40),
        ) {
            let ids: Vec<String> = (0..gains.len()).map(|n| n.to_string()).collect();
            let judgements: Judgements = ids.iter().cloned().zip(gains.iter().copied()).collect();
            let by = |score: &dyn Fn(usize) -> f64| -> Measures {
                let ranking: Vec<(&str, f64)> = ids.iter().enumerate().map(|(n, id)| (id.as_str(), score(n))).collect();
                measure(&ranking, &judgements)
            };
            let ideal = by(&|n| f64::from(gains[n]));
            let any = by(&|n| scores[n]);
            if gains.iter().any(|gain| *gain > 0) {
                prop_assert!((ideal.ndcg_10 - 1.0).abs() < 1e-12);
                prop_assert_eq!(ideal.mrr_10, 1.0);
            }
            prop_assert!(any.ndcg_10 <= ideal.ndcg_10 + 1e-12);
            prop_assert!((0.0..=1.0).contains(&any.recall_10) && any.recall_10 <= any.recall_100);
        }
    }
}
