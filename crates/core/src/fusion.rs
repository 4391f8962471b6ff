//! Fusing rankings into one.
//!
//! [`fuse`] joins the two rankings of one query, by meaning and by word, and looks at ranks alone.
//! [`fuse_scores`] joins the rankings of one query over many collections and looks at scores: by how
//! much a document leads. [`mix_wordings`] joins the rankings of several wordings of a question, of
//! which one is right.

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
pub struct Rank {
    pub rank: usize,
    pub score: f64,
}

/// Where a hit stood in every ranking that had it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HitRanks {
    pub dense: Option<Rank>,
    pub keyword: Option<Rank>,
    pub fused: Option<Rank>,
}

/// Fuses two rankings of the same kind of key, best first. A hit's score is the sum of
/// `weight / (60 + rank)` over the rankings that have it; ties go to the better dense rank, then
/// to the smaller key, so that the order never depends on chance.
pub fn fuse<K: Copy + Ord + std::hash::Hash>(
    dense: &[(K, f64)],
    keyword: &[(K, f64)],
    weights: FusionWeights,
) -> Vec<(K, HitRanks)> {
    let mut trails: std::collections::HashMap<K, HitRanks> =
        std::collections::HashMap::with_capacity(dense.len() + keyword.len());
    for (place, (key, score)) in dense.iter().enumerate() {
        trails.entry(*key).or_default().dense = Some(Rank {
            rank: place + 1,
            score: *score,
        });
    }
    for (place, (key, score)) in keyword.iter().enumerate() {
        trails.entry(*key).or_default().keyword = Some(Rank {
            rank: place + 1,
            score: *score,
        });
    }
    let part =
        |stage: Option<Rank>, weight: f64| stage.map_or(0.0, |s| weight / (RANK_CONSTANT + s.rank as f64));
    let mut fused: Vec<(K, HitRanks, f64)> = trails
        .into_iter()
        .map(|(key, ranks)| {
            let score = part(ranks.dense, weights.dense) + part(ranks.keyword, weights.keyword);
            (key, ranks, score)
        })
        .collect();
    let dense_rank = |ranks: &HitRanks| ranks.dense.map_or(usize::MAX, |s| s.rank);
    fused.sort_by(|a, b| {
        b.2.total_cmp(&a.2)
            .then_with(|| dense_rank(&a.1).cmp(&dense_rank(&b.1)))
            .then_with(|| a.0.cmp(&b.0))
    });
    fused
        .into_iter()
        .enumerate()
        .map(|(place, (key, ranks, score))| {
            (
                key,
                HitRanks {
                    fused: Some(Rank {
                        rank: place + 1,
                        score,
                    }),
                    ..ranks
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
        let (zero, best) = bounds(&ranking.hits, ranking.zero);
        for (key, score) in &ranking.hits {
            *sums.entry(key.clone()).or_default() += ranking.weight * worth(*score, zero, best);
        }
    }
    let mut fused: Vec<(K, f64)> = sums.into_iter().collect();
    fused.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    fused
}

/// The score that is worth nothing, and the best one.
fn bounds<K>(hits: &[(K, f64)], zero: Zero) -> (f64, f64) {
    let scores = || hits.iter().map(|hit| hit.1).filter(|score| score.is_finite());
    let best = scores().fold(f64::NEG_INFINITY, f64::max);
    let zero = match zero {
        Zero::LastHit => scores().fold(f64::INFINITY, f64::min),
        Zero::Absolute => 0.0,
    };
    (zero, best)
}

/// From 0 to 1.
fn worth(score: f64, zero: f64, best: f64) -> f64 {
    if !score.is_finite() || score < zero {
        0.0
    } else if best > zero {
        (score - zero) / (best - zero)
    } else {
        // All are equally good: a single hit, or nothing but ties.
        1.0
    }
}

/// How much surer a ranking by meaning makes of a document that leads it by a whole cosine.
const SURER_PER_COSINE: f64 = 15.5;
/// How much surer a ranking by word makes of a document, for each point of its score.
const SURER_PER_POINT: f64 = 0.46;
/// How much surer the best hit of a ranking is than one that is worth nothing, where scores are not
/// taken as they are.
const SURER_AT_BEST: f64 = 6.0;

/// The rankings of one wording of a question, of which there are several and one is right.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoredWording<K> {
    /// Distinct keys with their cosines, or with any number that grows with them by as much.
    pub by_meaning: Vec<(K, f64)>,
    pub by_word: Vec<(K, f64)>,
    /// Hits that have no score of either kind, with any number that falls from place to place.
    pub by_place: Vec<(K, f64)>,
    /// How likely this wording is the right one.
    pub weight: f64,
    /// Whether scores are taken as they are, not relative to the best. One message matches little and
    /// poorly when it says little, and then should not decide. A text of many messages has a high
    /// score for every document that shares many words with it, and only relations count.
    pub as_scored: bool,
}

/// Fuses the rankings of several wordings of which one is right. Each makes a distribution of
/// likelihood over all hits, exponential in their scores, and a hit's score is its likelihood in the
/// mixture of them; best first, ties go to the smaller key. Against a sum of scores this means: a
/// wording that singles out a document outweighs one that finds many alike, and what leads in one is
/// not beaten by what is second in all. How likely each wording is the right one is said with it, and
/// judged once more by what it found.
pub fn mix_wordings<K: Clone + Ord + std::hash::Hash>(wordings: &[ScoredWording<K>]) -> Vec<(K, f64)> {
    // Ordered, so that the rounding of sums does not depend on chance.
    let mut mixture: std::collections::BTreeMap<K, f64> = wordings
        .iter()
        .flat_map(|wording| [&wording.by_meaning, &wording.by_word, &wording.by_place])
        .flatten()
        .map(|(key, _)| (key.clone(), 0.0))
        .collect();
    let distributions: Vec<Vec<f64>> = wordings
        .iter()
        .map(|wording| distribution(wording, mixture.keys()))
        .collect();
    let weights = weighed_by_what_was_found(wordings, &distributions);
    for (weight, distribution) in weights.iter().zip(&distributions) {
        for (score, likelihood) in mixture.values_mut().zip(distribution) {
            *score += weight * likelihood;
        }
    }
    let mut mixed: Vec<(K, f64)> = mixture.into_iter().collect();
    mixed.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    mixed
}

/// How likely each key is by one wording; they add up to 1.
fn distribution<'a, K: Clone + Ord + std::hash::Hash + 'a>(
    wording: &ScoredWording<K>,
    keys: impl Iterator<Item = &'a K>,
) -> Vec<f64> {
    let sureness = sureness(wording);
    // Hits of other wordings are as unlikely as one that is worth nothing here.
    let most = sureness.values().copied().fold(0.0, f64::max);
    let mut likelihoods: Vec<f64> = keys
        .map(|key| (sureness.get(key).copied().unwrap_or(0.0) - most).exp())
        .collect();
    let total: f64 = likelihoods.iter().sum();
    likelihoods.iter_mut().for_each(|likelihood| *likelihood /= total);
    likelihoods
}

/// How much a topic gains where the message finds what the topic finds.
const BY_AGREEMENT: f64 = 0.4;
/// How much a topic gains where it singles out a document, and loses where the message alone does.
const BY_SINGLING_OUT: f64 = 1.0;
const BY_SINGLING_OUT_ALONE: f64 = 0.8;
/// What a topic gains by the three for no better reason than that it has more words.
const WITHOUT_REASON: f64 = 1.0;

/// A message that continues a topic fits the documents of the topic better than others; one that opens
/// a subject fits others better, and may single one out. So what was found says how likely each topic
/// is the right one, beside the message alone. Where no wording is a message alone, weights stay.
fn weighed_by_what_was_found<K>(wordings: &[ScoredWording<K>], distributions: &[Vec<f64>]) -> Vec<f64> {
    let mut weights: Vec<f64> = wordings.iter().map(|wording| wording.weight).collect();
    let Some(alone) = wordings.iter().position(|wording| wording.as_scored) else {
        return weights;
    };
    let by_message = &distributions[alone];
    let highest = |distribution: &[f64]| distribution.iter().copied().fold(0.0, f64::max);
    for (place, topic) in distributions
        .iter()
        .enumerate()
        .filter(|(place, _)| *place != alone)
    {
        // 1 where the message finds the documents of the topic no better and no worse than others.
        let both = topic.iter().zip(by_message).map(|(a, b)| a * b).sum::<f64>();
        let agreement = both * by_message.len() as f64;
        weights[place] *= agreement.powf(BY_AGREEMENT) * highest(topic).powf(BY_SINGLING_OUT)
            / highest(by_message).powf(BY_SINGLING_OUT_ALONE)
            / WITHOUT_REASON.exp();
    }
    let total: f64 = weights.iter().sum();
    if total.is_finite() && total > 0.0 {
        weights.iter_mut().for_each(|weight| *weight /= total);
    }
    weights
}

/// The logarithm of how much likelier each hit is than one that is worth nothing.
fn sureness<K: Clone + Ord + std::hash::Hash>(
    wording: &ScoredWording<K>,
) -> std::collections::HashMap<K, f64> {
    let mut sums = std::collections::HashMap::new();
    for (hits, zero, per_score) in [
        (&wording.by_meaning, Zero::LastHit, Some(SURER_PER_COSINE)),
        (&wording.by_word, Zero::Absolute, Some(SURER_PER_POINT)),
        (&wording.by_place, Zero::LastHit, None),
    ] {
        let (zero, best) = bounds(hits, zero);
        for (key, score) in hits {
            let worth = match per_score.filter(|_| wording.as_scored) {
                Some(per_score) if score.is_finite() => per_score * (score - zero).max(0.0),
                Some(_) => 0.0,
                None => SURER_AT_BEST * worth(*score, zero, best),
            };
            *sums.entry(key.clone()).or_default() += worth;
        }
    }
    sums
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
        assert_eq!(best.dense, Some(Rank { rank: 2, score: 0.8 }));
        assert_eq!(best.keyword, Some(Rank { rank: 2, score: 7.0 }));
        assert_eq!(
            best.fused,
            Some(Rank {
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

    fn wording(by_meaning: &[(i32, f64)], weight: f64, as_scored: bool) -> ScoredWording<i32> {
        ScoredWording {
            by_meaning: by_meaning.to_vec(),
            by_word: Vec::new(),
            by_place: Vec::new(),
            weight,
            as_scored,
        }
    }

    #[test]
    fn a_mixture_is_a_distribution_and_follows_the_weights() {
        let topic = [(1, 0.9), (2, 0.5), (3, 0.1)];
        let alone = [(3, 0.9), (2, 0.5), (1, 0.1)];
        for weight in [0.2, 0.8] {
            let mixed = mix_wordings(&[
                wording(&topic, weight, false),
                wording(&alone, 1.0 - weight, false),
            ]);
            let total: f64 = mixed.iter().map(|hit| hit.1).sum();
            assert!((total - 1.0).abs() < 1e-12, "{mixed:?}");
            assert_eq!(mixed[0].0, if weight > 0.5 { 1 } else { 3 });
        }
        // One of the two is right, and neither has the second first.
        let even = mix_wordings(&[wording(&topic, 0.5, false), wording(&alone, 0.5, false)]);
        assert_eq!(even[2].0, 2);
    }

    #[test]
    fn what_was_found_says_how_likely_a_topic_is_meant() {
        let topic = [(1, 0.9), (2, 0.5), (3, 0.1)];
        let weight = |alone: &[(i32, f64)]| {
            let wordings = [wording(&topic, 0.5, false), wording(alone, 0.5, true)];
            let distributions = wordings
                .each_ref()
                .map(|wording| distribution(wording, [1, 2, 3].iter()));
            let [topic, alone] = weighed_by_what_was_found(&wordings, &distributions)[..] else {
                unreachable!("there are two")
            };
            assert!((topic + alone - 1.0).abs() < 1e-12);
            topic
        };
        let agrees = weight(&[(1, 0.6), (2, 0.5), (3, 0.4)]);
        let says_nothing = weight(&[(1, 0.3), (2, 0.3), (3, 0.3)]);
        let disagrees = weight(&[(1, 0.4), (2, 0.5), (3, 0.6)]);
        let singles_out_another = weight(&[(1, 0.1), (2, 0.1), (3, 0.9)]);
        assert!(agrees > disagrees, "{agrees} {disagrees}");
        assert!(says_nothing > disagrees && disagrees > singles_out_another);
        assert!(singles_out_another < 0.1, "{singles_out_another}");
    }

    #[test]
    fn a_wording_that_finds_all_alike_does_not_decide() {
        let clear = [(1, 0.8), (2, 0.3), (3, 0.3)];
        let vague = [(3, 0.32), (2, 0.31), (1, 0.30)];
        let mixed = mix_wordings(&[wording(&clear, 0.4, false), wording(&vague, 0.6, true)]);
        assert_eq!(mixed[0].0, 1);
        // Only relations count: the same ranking is as clear as any.
        let mixed = mix_wordings(&[wording(&clear, 0.4, false), wording(&vague, 0.6, false)]);
        assert_eq!(mixed[0].0, 3);
    }

    #[test]
    fn odd_scores_do_a_mixture_no_harm() {
        assert_eq!(mix_wordings::<i32>(&[]), []);
        for as_scored in [true, false] {
            let odd = ScoredWording {
                by_word: vec![(4, f64::INFINITY), (5, 1e300), (1, 2.0)],
                by_place: vec![(6, 0.0), (7, -1.0)],
                ..wording(&[(1, f64::NAN), (2, 0.3), (3, 0.3)], 1.0, as_scored)
            };
            let mixed = mix_wordings(&[odd, wording(&[], 0.5, as_scored)]);
            // Where only relations count, the best of any ranking are alike.
            assert_eq!(mixed[0].0, if as_scored { 5 } else { 2 });
            assert_eq!(mixed.len(), 7);
            assert!(mixed.iter().all(|hit| hit.1.is_finite()));
        }
    }
}
