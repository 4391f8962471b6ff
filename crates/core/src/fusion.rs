//! Fusing two rankings into one by reciprocal rank.

/// The constant of reciprocal rank fusion: how quickly a rank loses its weight.
const RANK_CONSTANT: f64 = 60.0;

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
}
