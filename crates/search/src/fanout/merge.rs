//! One ranking out of many.

use std::cmp::Ordering;
use std::collections::HashMap;

use ragstone_core::document::{DocumentId, Metadata};
use ragstone_core::fusion::{
    FusionWeights, HitRanks, Rank, ScoredRanking, ScoredWording, Zero, fuse_scores, mix_wordings,
};
use ragstone_core::search::{SearchHit, SearchMode, SearchResponse, StageTime};

use super::{
    FanoutHit, FanoutQuery, FanoutResponse, Grade, ModeChoice, Target, TargetResult, Thresholds, words,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Distances to one query can be compared between collections.
    Distance,
    /// Distances to several queries, and keyword scores, can be compared only within their ranking.
    Fused,
}

pub(super) fn order(query: &FanoutQuery) -> Order {
    let dense = |target: &Target| query.mode.of(&target.service) == SearchMode::Dense;
    if query.wordings.len() == 1 && query.targets.iter().all(dense) {
        Order::Distance
    } else {
        Order::Fused
    }
}

/// Merges the responses of all targets. Also returns the thresholds of each target.
pub(super) async fn merge(
    query: &FanoutQuery,
    found: Vec<TargetResult>,
) -> (FanoutResponse, Vec<Thresholds>) {
    let mut merged = Merged::default();
    for (target, answer) in found.into_iter().enumerate() {
        merged.take(query, target, answer);
    }
    merged.make_word_scores(query).await;
    let Merged {
        mut hits,
        rankings,
        thresholds,
        mut response,
    } = merged;
    match order(query) {
        Order::Distance => hits.sort_by(nearer),
        Order::Fused => {
            let mut places: Vec<Option<FanoutHit>> = hits.into_iter().map(Some).collect();
            hits = fused(rankings, query.options.weights)
                .into_iter()
                .filter_map(|(place, _)| places.get_mut(place)?.take())
                .collect();
            // Hits too low in every ranking to be compared come last.
            hits.extend(places.into_iter().flatten());
        }
    }
    response.hits = hits;
    (response, thresholds)
}

/// One wording sums what its rankings agree on. Of several wordings, one is right.
fn fused(rankings: Vec<WordingRankings>, weights: FusionWeights) -> Vec<(usize, f64)> {
    if rankings.len() > 1 {
        let wordings: Vec<_> = rankings.into_iter().map(WordingRankings::wording).collect();
        mix_wordings(&wordings)
    } else {
        let scored = rankings.into_iter().flat_map(|ranking| ranking.scored(weights));
        fuse_scores(&scored.collect::<Vec<_>>())
    }
}

fn distance(hit: &SearchHit) -> f32 {
    hit.distance.unwrap_or(f32::INFINITY)
}

fn nearer(a: &FanoutHit, b: &FanoutHit) -> Ordering {
    distance(&a.hit).total_cmp(&distance(&b.hit))
}

/// Every hit once, and its places in the rankings of each wording. Rankings name hits by their index
/// in `hits`.
#[derive(Default)]
struct Merged {
    hits: Vec<FanoutHit>,
    rankings: Vec<WordingRankings>,
    thresholds: Vec<Thresholds>,
    response: FanoutResponse,
}

#[derive(Clone, Default)]
struct WordingRankings {
    weight: f64,
    /// The wording is one message, not a topic made of several.
    alone: bool,
    by_meaning: Vec<(usize, f64)>,
    by_word: Vec<(usize, f64)>,
    /// Hits of backends that give no score of either kind.
    by_place: Vec<(usize, f64)>,
    /// Hits of backends without keyword search, which have no keyword score yet.
    without_words: Vec<usize>,
}

impl WordingRankings {
    fn scored(self, weights: FusionWeights) -> [ScoredRanking<usize>; 3] {
        let weight = self.weight;
        [
            (self.by_meaning, weight * weights.dense, Zero::LastHit),
            (self.by_word, weight * weights.keyword, Zero::Absolute),
            (self.by_place, weight, Zero::LastHit),
        ]
        .map(|(hits, weight, zero)| ScoredRanking { hits, weight, zero })
    }

    fn wording(self) -> ScoredWording<usize> {
        ScoredWording {
            by_meaning: self.by_meaning,
            by_word: self.by_word,
            by_place: self.by_place,
            weight: self.weight,
            as_scored: self.alone,
        }
    }

    /// Adds a hit to the rankings that had it among their first `depth`. A hybrid search also gives a
    /// distance to hits that only their words found, far down by meaning; those would stretch the scale
    /// that the others are compared on.
    fn add(&mut self, key: usize, place: usize, hit: &SearchHit, depth: usize) {
        let HitRanks { dense, keyword, .. } = hit.ranks;
        if let Some(distance) = hit.distance.filter(|_| is_within(hit, dense, depth)) {
            self.by_meaning.push((key, -f64::from(distance)));
        }
        if let Some(Rank { score, .. }) = keyword.filter(|rank| rank.rank <= depth) {
            self.by_word.push((key, score));
        }
        if hit.distance.is_none() && keyword.is_none() {
            self.by_place.push((key, -(place as f64)));
        }
    }
}

/// Whether a hit is among the first of one ranking. A backend that reports no ranks is believed.
fn is_within(hit: &SearchHit, rank: Option<Rank>, depth: usize) -> bool {
    hit.ranks == HitRanks::default() || rank.is_some_and(|rank| rank.rank <= depth)
}

/// Keeps a document that comes several times in one response where it is nearest.
fn each_once(hits: Vec<SearchHit>) -> Vec<SearchHit> {
    let mut nearest: HashMap<DocumentId, (usize, f32)> = HashMap::with_capacity(hits.len());
    for (place, hit) in hits.iter().enumerate() {
        let known = nearest
            .entry(hit.document.id.clone())
            .or_insert((place, distance(hit)));
        if distance(hit) < known.1 {
            *known = (place, distance(hit));
        }
    }
    hits.into_iter()
        .enumerate()
        .filter(|(place, hit)| {
            nearest
                .get(&hit.document.id)
                .is_some_and(|(kept, _)| kept == place)
        })
        .map(|(_, hit)| hit)
        .collect()
}

/// Whether a backend ranked by words.
fn has_words(hits: &[SearchHit]) -> bool {
    hits.iter()
        .any(|hit| hit.ranks.keyword.is_some() || hit.ranks.fused.is_some())
}

impl Merged {
    /// Gives hits of backends without keyword search a keyword score beside those of backends with it,
    /// so that the same document scores about the same wherever it is.
    async fn make_word_scores(&mut self, query: &FanoutQuery) {
        let is_by_word = |target: &Target| query.mode.of(&target.service).uses_words();
        let is_missing = |rankings: &WordingRankings| !rankings.without_words.is_empty();
        if !query.targets.iter().any(is_by_word) || !self.rankings.iter().any(is_missing) {
            return;
        }
        let queries = query.wordings.iter().map(|wording| wording.keywords.clone());
        let texts = self.hits.iter().map(|hit| hit.hit.document.text.clone());
        let made = words::scores(queries.collect(), texts.collect()).await;
        for (rankings, made) in self.rankings.iter_mut().zip(made) {
            let scale = words::scale(&made, &rankings.by_word);
            for key in std::mem::take(&mut rankings.without_words) {
                if let Some(score) = made.get(key).filter(|score| **score > 0.0) {
                    rankings.by_word.push((key, scale * score));
                }
            }
            if query.mode == ModeChoice::Given(SearchMode::Keyword) {
                // The other hits have no distance to compare with.
                rankings.by_meaning.clear();
            }
        }
    }

    /// Takes in the responses of one target, or its failure.
    fn take(&mut self, query: &FanoutQuery, index: usize, answer: TargetResult) {
        self.rankings
            .resize_with(query.wordings.len(), WordingRankings::default);
        let target = &query.targets[index];
        let responses = match answer {
            Ok(responses) => responses,
            Err(error) => {
                let (service, collection) = (&target.service.name, &target.name);
                tracing::warn!(%service, %collection, %error, "a collection could not be searched");
                self.response.failures.push((index, error));
                self.response.metadata.push(None);
                self.thresholds.push(Thresholds::default());
                return;
            }
        };
        if query.mode.is_beyond(&target.service) {
            let message = "searched by meaning only: this kind of service has no keyword search";
            self.response.warn(Some(index), message.to_owned());
        }
        let (mut thresholds, mut metadata) = (None, Metadata::new());
        let mut known: HashMap<DocumentId, usize> = HashMap::new();
        for (number, (wording, response)) in query.wordings.iter().zip(responses).enumerate() {
            let SearchResponse {
                hits,
                collection_metadata,
                warnings,
                timings,
                ..
            } = response;
            for warning in warnings {
                self.response.warn(Some(index), warning);
            }
            slowest(&mut self.response.timings, timings);
            let thresholds = *thresholds.get_or_insert_with(|| {
                let read = Thresholds::read(&collection_metadata, |warning| {
                    self.response.warn(Some(index), warning);
                });
                metadata = collection_metadata;
                read
            });
            let rankings = &mut self.rankings[number];
            rankings.weight = wording.weight;
            rankings.alone = wording.alone;
            let has_words = has_words(&hits);
            for (place, hit) in each_once(hits).into_iter().enumerate() {
                let key = *known.entry(hit.document.id.clone()).or_insert(self.hits.len());
                rankings.add(key, place, &hit, super::depth(query));
                if !has_words {
                    rankings.without_words.push(key);
                }
                let is_reported = number == query.reported;
                let found = if is_reported {
                    graded(index, hit, thresholds)
                } else {
                    unmeasured(index, hit)
                };
                match self.hits.get_mut(key) {
                    Some(before) if is_reported => *before = found,
                    Some(_) => {}
                    None => self.hits.push(found),
                }
            }
        }
        self.thresholds.push(thresholds.unwrap_or_default());
        self.response.metadata.push(Some(metadata));
    }
}

/// Targets are searched at the same time, so a stage took as long as its slowest.
fn slowest(timings: &mut Vec<StageTime>, more: Vec<StageTime>) {
    for time in more {
        match timings.iter_mut().find(|known| known.stage == time.stage) {
            Some(known) => known.took = known.took.max(time.took),
            None => timings.push(time),
        }
    }
}

fn graded(target: usize, hit: SearchHit, thresholds: Thresholds) -> FanoutHit {
    FanoutHit {
        target,
        grade: thresholds.grade(hit.distance),
        hit,
    }
}

/// A hit that only another wording than the reported one found. Its distance to the reported wording
/// has yet to be measured.
fn unmeasured(target: usize, hit: SearchHit) -> FanoutHit {
    FanoutHit {
        target,
        grade: Grade::None,
        hit: SearchHit {
            distance: None,
            ranks: HitRanks::default(),
            ..hit
        },
    }
}
