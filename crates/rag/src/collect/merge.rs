//! One ranking out of many.

use std::cmp::Ordering;
use std::collections::HashMap;

use ragstone_core::document::DocumentId;
use ragstone_core::fusion::{ScoredRanking, Wording, Zero, fuse_scores, mix_wordings};
use ragstone_core::provider::{ProviderAnswer, ProviderError, ProviderHit};
use serde_json::Value;

use super::{Collected, CollectedHit, Grade, ModeChoice, Request, Target, Thresholds, words};
use crate::search::Mode;

/// Where a hit says how it stood in each ranking; asked for here, and no part of the answer.
const EXPLAIN: &str = "explain";
const KEYWORD_SCORE: &str = "keyword_score";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Distances to one query can be compared between collections.
    Distance,
    /// Distances to several queries, and scores of words, can be compared only within their ranking.
    Fused,
}

pub(super) fn order(request: &Request) -> Order {
    let dense = |target: &Target| request.mode.of(&target.service) == Mode::Dense;
    if request.plan.queries.len() == 1 && request.targets.iter().all(dense) {
        Order::Distance
    } else {
        Order::Fused
    }
}

/// Also gives the thresholds of each collection, in their order.
pub(super) async fn merge(
    request: &Request,
    found: Vec<Vec<Result<ProviderAnswer, ProviderError>>>,
) -> (Collected, Vec<Thresholds>) {
    let mut merged = Merged::default();
    for (target, answers) in request.targets.iter().zip(found) {
        merged.take(request, target, answers);
    }
    merged.make_word_scores(request).await;
    let Merged {
        mut hits,
        rankings,
        thresholds,
        warnings,
    } = merged;
    match order(request) {
        Order::Distance => hits.sort_by(nearer),
        Order::Fused => {
            let mut places: Vec<Option<CollectedHit>> = hits.into_iter().map(Some).collect();
            hits = fused(rankings)
                .into_iter()
                .filter_map(|(place, _)| places.get_mut(place)?.take())
                .collect();
            // What stood too low in every ranking to be compared comes last.
            hits.extend(places.into_iter().flatten());
        }
    }
    let collected = Collected {
        grade: Grade::None,
        hits,
        reranked: false,
        warnings,
        embedding_cache_hits: 0,
    };
    (collected, thresholds)
}

/// With one query, what its rankings have in common counts; of several, one is right.
fn fused(rankings: Vec<QueryRankings>) -> Vec<(usize, f64)> {
    if rankings.len() > 1 {
        let wordings: Vec<_> = rankings.into_iter().map(QueryRankings::wording).collect();
        mix_wordings(&wordings)
    } else {
        let scored: Vec<_> = rankings.into_iter().flat_map(QueryRankings::scored).collect();
        fuse_scores(&scored)
    }
}

fn nearer(a: &CollectedHit, b: &CollectedHit) -> Ordering {
    let far = |hit: &CollectedHit| hit.distance.unwrap_or(f32::INFINITY);
    far(a).total_cmp(&far(b))
}

/// Every hit once, and where it stood in the rankings of each query; hits are named by their place
/// among `hits`.
#[derive(Default)]
struct Merged {
    hits: Vec<CollectedHit>,
    rankings: Vec<QueryRankings>,
    thresholds: Vec<Thresholds>,
    warnings: Vec<String>,
}

#[derive(Clone, Default)]
struct QueryRankings {
    weight: f64,
    /// The query is one message, and not a topic of several.
    alone: bool,
    by_meaning: Vec<(usize, f64)>,
    by_word: Vec<(usize, f64)>,
    /// Hits of backends that give no score of either kind.
    by_place: Vec<(usize, f64)>,
    /// Hits of backends that do not rank by words: how they fit by word is not known yet.
    without_words: Vec<usize>,
}

impl QueryRankings {
    fn scored(self) -> [ScoredRanking<usize>; 3] {
        let weight = self.weight;
        [
            (self.by_meaning, Zero::LastHit),
            (self.by_word, Zero::Absolute),
            (self.by_place, Zero::LastHit),
        ]
        .map(|(hits, zero)| ScoredRanking { hits, weight, zero })
    }

    fn wording(self) -> Wording<usize> {
        Wording {
            by_meaning: self.by_meaning,
            by_word: self.by_word,
            by_place: self.by_place,
            weight: self.weight,
            as_scored: self.alone,
        }
    }

    /// A hybrid search also gives a distance to what its words found, far down by meaning. Such a hit
    /// would stretch the scale that the others are compared on, so only the first `depth` of each
    /// ranking count, as if the two had been asked for one by one.
    fn add(&mut self, key: usize, place: usize, hit: &ProviderHit, depth: usize) {
        let by_word = hit.extra.get(KEYWORD_SCORE).and_then(Value::as_f64);
        if let Some(distance) = hit.distance.filter(|_| is_within(hit, "dense", depth)) {
            self.by_meaning.push((key, -f64::from(distance)));
        }
        if let Some(score) = by_word.filter(|_| is_within(hit, "keyword", depth)) {
            self.by_word.push((key, score));
        }
        if hit.distance.is_none() && by_word.is_none() {
            self.by_place.push((key, -(place as f64)));
        }
    }
}

/// Whether a hit is among the first of one ranking. Where the backend does not say, it is.
fn is_within(hit: &ProviderHit, ranking: &str, depth: usize) -> bool {
    hit.extra.get(EXPLAIN).is_none_or(|stages| {
        let rank = stages.get(ranking).and_then(|stage| stage.get("rank")?.as_u64());
        rank.is_some_and(|rank| rank <= depth as u64)
    })
}

/// A document that comes several times in one answer stands where it is nearest.
fn each_once(hits: Vec<ProviderHit>) -> Vec<ProviderHit> {
    let far = |hit: &ProviderHit| hit.distance.unwrap_or(f32::INFINITY);
    let mut nearest: HashMap<DocumentId, (usize, f32)> = HashMap::with_capacity(hits.len());
    for (place, hit) in hits.iter().enumerate() {
        let known = nearest
            .entry(hit.document.id.clone())
            .or_insert((place, far(hit)));
        if far(hit) < known.1 {
            *known = (place, far(hit));
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

/// Whether a backend ranked by words. One that did says so of its hits, also of those that have none.
fn has_words(hits: &[ProviderHit]) -> bool {
    hits.iter()
        .any(|hit| hit.extra.contains_key(EXPLAIN) || hit.extra.contains_key(KEYWORD_SCORE))
}

impl Merged {
    /// Gives hits of services that do not rank by words a score beside those of services that do, so
    /// that the same document has about the same wherever it is.
    async fn make_word_scores(&mut self, request: &Request) {
        let is_by_word = |target: &Target| request.mode.of(&target.service) != Mode::Dense;
        let is_missing = |rankings: &QueryRankings| !rankings.without_words.is_empty();
        if !request.targets.iter().any(is_by_word) || !self.rankings.iter().any(is_missing) {
            return;
        }
        let queries = request.plan.queries.iter().map(|query| query.keywords.clone());
        let texts = self.hits.iter().map(|hit| hit.document.text.clone());
        let made = words::scores(queries.collect(), texts.collect()).await;
        for (rankings, made) in self.rankings.iter_mut().zip(made) {
            let scale = words::scale(&made, &rankings.by_word);
            for key in std::mem::take(&mut rankings.without_words) {
                if let Some(score) = made.get(key).filter(|score| **score > 0.0) {
                    rankings.by_word.push((key, scale * score));
                }
            }
            if request.mode == ModeChoice::Given(Mode::Keyword) {
                // The others have no place by meaning to be compared with.
                rankings.by_meaning.clear();
            }
        }
    }

    /// Takes in what one collection answered, and what went wrong there, said once.
    fn take(
        &mut self,
        request: &Request,
        target: &Target,
        answers: Vec<Result<ProviderAnswer, ProviderError>>,
    ) {
        self.rankings
            .resize_with(request.plan.queries.len(), QueryRankings::default);
        let mut said: Vec<String> = Vec::new();
        if request.mode.is_beyond(&target.service) {
            said.push("searched by meaning only, this kind of service does not rank by words".to_owned());
        }
        let mut thresholds = None;
        let mut known: HashMap<DocumentId, usize> = HashMap::new();
        for (index, (query, answer)) in request.plan.queries.iter().zip(answers).enumerate() {
            let answer = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    let (service, collection) = (&target.service.name, &target.name);
                    tracing::warn!(%service, %collection, %error, "a collection could not be searched");
                    said.push(error.public());
                    continue;
                }
            };
            said.extend(answer.warnings);
            let thresholds = *thresholds.get_or_insert_with(|| {
                Thresholds::read(&answer.collection_metadata, |warning| said.push(warning))
            });
            let rankings = &mut self.rankings[index];
            rankings.weight = query.weight;
            rankings.alone = query.alone;
            let has_words = has_words(&answer.hits);
            for (place, mut hit) in each_once(answer.hits).into_iter().enumerate() {
                let key = *known.entry(hit.document.id.clone()).or_insert(self.hits.len());
                rankings.add(key, place, &hit, super::depth(request));
                if !has_words {
                    rankings.without_words.push(key);
                }
                hit.extra.remove(EXPLAIN);
                let found = if index == request.plan.reported {
                    collected(target, hit, thresholds)
                } else {
                    found_otherwise(target, hit)
                };
                match self.hits.get_mut(key) {
                    Some(before) if index == request.plan.reported => *before = found,
                    Some(_) => {}
                    None => self.hits.push(found),
                }
            }
        }
        self.thresholds.push(thresholds.unwrap_or_default());
        said.sort();
        said.dedup();
        let place = format!("{}/{}", target.service.name, target.name);
        self.warnings
            .extend(said.into_iter().map(|what| format!("{place}: {what}")));
    }
}

fn collected(target: &Target, hit: ProviderHit, thresholds: Thresholds) -> CollectedHit {
    CollectedHit {
        service: target.service.name.clone(),
        collection: target.name.clone(),
        grade: thresholds.grade(hit.distance),
        document: hit.document,
        distance: hit.distance,
        score: hit.score,
        extra: hit.extra,
    }
}

/// A hit of another wording than the reported one, which did not find it among its own. How far it is
/// from that has yet to be measured.
fn found_otherwise(target: &Target, hit: ProviderHit) -> CollectedHit {
    let mut extra = hit.extra;
    extra.remove(KEYWORD_SCORE);
    CollectedHit {
        service: target.service.name.clone(),
        collection: target.name.clone(),
        grade: Grade::None,
        document: hit.document,
        distance: None,
        score: None,
        extra,
    }
}
