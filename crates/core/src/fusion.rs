//! Fusing rankings into one.
//!
//! [`fuse`] joins the two rankings of one query, by meaning and by word, and looks at ranks alone.
//! [`fuse_scores`] joins the rankings of several wordings of a question and looks at scores: there,
//! by how much a document leads is what tells a wording that hits the point from one that misses it.

/// The constant of reciprocal rank fusion: how quickly a rank loses its weight.
pub const RANK_CONSTANT: f64 = 60.0;

/// How much each ranking counts in the fusion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusionWeights {
    pub dense: f64,
    pub keyword: f64,
}

impl Default for FusionWeights {
    fn default() -> Self {
        Self {
            dense: 1.0,
            keyword: 1.0,
        }
    }
}

/// Where a hit stood in one ranking, counted from 1, and with which score (higher is better).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StageRank {
    pub rank: usize,
    pub score: f64,
}

/// Where a hit stood in every ranking that had it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RankTrail {
    pub dense: Option<StageRank>,
    pub keyword: Option<StageRank>,
    pub fused: Option<StageRank>,
}

/// Fuses two rankings of the same kind of key, best first. A hit's score is the sum of
/// `weight / (60 + rank)` over the rankings that have it; ties go to the better dense rank, then
/// to the smaller key, so that the order never depends on chance.
pub fn fuse<K: Copy + Ord + std::hash::Hash>(
    dense: &[(K, f64)],
    keyword: &[(K, f64)],
    weights: FusionWeights,
) -> Vec<(K, RankTrail)> {
    let mut trails: std::collections::HashMap<K, RankTrail> =
        std::collections::HashMap::with_capacity(dense.len() + keyword.len());
    for (place, (key, score)) in dense.iter().enumerate() {
        trails.entry(*key).or_default().dense = Some(StageRank {
            rank: place + 1,
            score: *score,
        });
    }
    for (place, (key, score)) in keyword.iter().enumerate() {
        trails.entry(*key).or_default().keyword = Some(StageRank {
            rank: place + 1,
            score: *score,
        });
    }
    let part = |stage: Option<StageRank>, weight: f64| {
        stage.map_or(0.0, |s| weight / (RANK_CONSTANT + s.rank as f64))
    };
    let mut fused: Vec<(K, RankTrail, f64)> = trails
        .into_iter()
        .map(|(key, trail)| {
            let score = part(trail.dense, weights.dense) + part(trail.keyword, weights.keyword);
            (key, trail, score)
        })
        .collect();
    let dense_rank = |trail: &RankTrail| trail.dense.map_or(usize::MAX, |s| s.rank);
    fused.sort_by(|a, b| {
        b.2.total_cmp(&a.2)
            .then_with(|| dense_rank(&a.1).cmp(&dense_rank(&b.1)))
            .then_with(|| a.0.cmp(&b.0))
    });
    fused
        .into_iter()
        .enumerate()
        .map(|(place, (key, trail, score))| {
            (
                key,
                RankTrail {
                    fused: Some(StageRank {
                        rank: place + 1,
                        score,
                    }),
                    ..trail
                },
            )
        })
        .collect()
}

/// One ranking among several that are fused by score.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredRanking<K> {
    /// Distinct keys with their scores, higher is better, in any order.
    pub hits: Vec<(K, f64)>,
    pub weight: f64,
    pub zero: Zero,
}

/// Which score is worth nothing. The best of a ranking is always worth 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zero {
    /// That of the last hit: every document is somewhat similar to every query, and how much so is a
    /// habit of the model.
    LastHit,
    /// Zero itself: a document without any of the words has a keyword score of 0.
    Absolute,
}

/// Fuses any number of rankings. A hit's score is the sum of `weight × worth` over the rankings that
/// have it, where worth runs from 0 to 1 within each ranking; best first, ties go to the smaller key.
/// A score that is not finite is worth nothing.
pub fn fuse_scores<K: Clone + Ord + std::hash::Hash>(rankings: &[ScoredRanking<K>]) -> Vec<(K, f64)> {
    let mut sums: std::collections::HashMap<K, f64> = std::collections::HashMap::new();
    for ranking in rankings {
        let scores = || {
            ranking
                .hits
                .iter()
                .map(|hit| hit.1)
                .filter(|score| score.is_finite())
        };
        let best = scores().fold(f64::NEG_INFINITY, f64::max);
        let zero = match ranking.zero {
            Zero::LastHit => scores().fold(f64::INFINITY, f64::min),
            Zero::Absolute => 0.0,
        };
        for (key, score) in &ranking.hits {
            let worth = if !score.is_finite() || *score < zero {
                0.0
            } else if best > zero {
                (score - zero) / (best - zero)
            } else {
                // All are equally good: a single hit, or nothing but ties.
                1.0
            };
            *sums.entry(key.clone()).or_default() += ranking.weight * worth;
        }
    }
    let mut fused: Vec<(K, f64)> = sums.into_iter().collect();
    fused.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    fused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hit_of_both_rankings_beats_the_best_of_one() {
        let dense = [(1, 0.9), (2, 0.8), (3, 0.7)];
        let keyword = [(4, 9.0), (2, 7.0)];
        let fused = fuse(&dense, &keyword, FusionWeights::default());
        let order: Vec<i32> = fused.iter().map(|(key, _)| *key).collect();
        assert_eq!(order, [2, 1, 4, 3]);
        let best = fused[0].1;
        assert_eq!(best.dense, Some(StageRank { rank: 2, score: 0.8 }));
        assert_eq!(best.keyword, Some(StageRank { rank: 2, score: 7.0 }));
        assert_eq!(
            best.fused,
            Some(StageRank {
                rank: 1,
                score: 2.0 / 62.0
            })
        );
    }

    #[test]
    fn weights_shift_the_order() {
        let fused = fuse(
            &[(1, 0.9)],
            &[(2, 9.0)],
            FusionWeights {
                dense: 0.2,
                keyword: 1.0,
            },
        );
        assert_eq!(fused[0].0, 2);
    }

    fn ranking(hits: &[(i32, f64)], weight: f64, zero: Zero) -> ScoredRanking<i32> {
        ScoredRanking {
            hits: hits.to_vec(),
            weight,
            zero,
        }
    }

    #[test]
    fn scores_are_compared_within_their_own_ranking() {
        let fused = fuse_scores(&[
            ranking(&[(1, 0.9), (2, 0.5), (3, 0.4)], 1.0, Zero::LastHit),
            ranking(&[(2, 12.0), (3, 6.0)], 0.5, Zero::Absolute),
        ]);
        let expected = [(1, 1.0), (2, 0.2 + 0.5), (3, 0.25)];
        for (actual, expected) in fused.iter().zip(expected) {
            assert_eq!(actual.0, expected.0);
            assert!(
                (actual.1 - expected.1).abs() < 1e-12,
                "{actual:?} is not {expected:?}"
            );
        }
        assert_eq!(fused.len(), 3);
    }

    #[test]
    fn a_ranking_of_ties_or_of_odd_scores_does_no_harm() {
        let fused = fuse_scores(&[
            ranking(&[(2, 0.3), (1, 0.3)], 1.0, Zero::LastHit),
            ranking(
                &[(3, f64::NAN), (4, -1.0), (5, f64::INFINITY)],
                1.0,
                Zero::Absolute,
            ),
            ranking(&[], 1.0, Zero::LastHit),
        ]);
        assert_eq!(fused, [(1, 1.0), (2, 1.0), (3, 0.0), (4, 0.0), (5, 0.0)]);
    }
}
