//! Searching many collections of many backends at once, with one merge.
//!
//! Every collection is searched for every wording of the question at the same time. A collection that
//! fails is reported and the others answer. The hits are merged into one ranking, graded by the
//! thresholds of their collection and, if asked for, reranked and expanded with their siblings.

mod grade;
mod measure;
mod merge;
mod rerank;
mod siblings;
mod words;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::future::join_all;
use ragstone_core::backend::{BackendError, Capability};
use ragstone_core::collection::CollectionName;
use ragstone_core::conversation::QueryVariant;
use ragstone_core::document::Metadata;
use ragstone_core::search::{SearchHit, SearchMode, SearchQuery, SearchResponse, StageTime};
use ragstone_providers::http::within;

pub use grade::{Grade, MATCH_THRESHOLD, PARTIAL_THRESHOLD, Thresholds};

use crate::gateway::NamedBackend;
use crate::plan::Plan;
use crate::rerank::rerank_depth;

/// Rankings that are fused are this many times as deep as what is asked for, within the two bounds.
const FUSION_FACTOR: usize = 4;
const FUSION_AT_LEAST: usize = 100;
const FUSION_AT_MOST: usize = 200;

/// Timeout of each step for one of several services.
const STEP_TIMEOUT: Duration = Duration::from_secs(10);

/// One collection of one backend.
#[derive(Clone)]
pub struct Target {
    pub service: NamedBackend,
    pub name: CollectionName,
}

pub struct FanoutQuery {
    /// The wordings of the question, at least one, the most important first.
    pub wordings: Vec<QueryVariant>,
    /// The wording that distances and grades refer to.
    pub reported: usize,
    pub targets: Vec<Target>,
    /// Everything that is the same for all wordings. Its text and mode are ignored.
    pub options: SearchQuery,
    pub mode: ModeChoice,
    pub limit: Limit,
    /// The backend of this process, whose cross-encoder is asked first.
    pub local: NamedBackend,
}

impl FanoutQuery {
    /// The search that answers a message, for the best `top_k` hits of all targets together.
    pub fn for_plan(
        plan: &Plan,
        targets: Vec<Target>,
        top_k: usize,
        mode: ModeChoice,
        local: NamedBackend,
    ) -> Self {
        Self {
            wordings: plan.queries.clone(),
            reported: plan.reported,
            targets,
            options: SearchQuery {
                top_k,
                ..SearchQuery::default()
            },
            mode,
            limit: Limit::AllTogether,
            local,
        }
    }
}

/// The meaning of `top_k`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Limit {
    #[default]
    AllTogether,
    EachCollection,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeChoice {
    /// The same mode for every backend. One without keyword search is searched by meaning, with a
    /// warning.
    Given(SearchMode),
    /// Hybrid where the backend has keyword search, dense elsewhere.
    Best,
}

impl ModeChoice {
    fn of(self, service: &NamedBackend) -> SearchMode {
        match self {
            Self::Given(mode) if mode.uses_words() && !has_keyword_search(service) => SearchMode::Dense,
            Self::Given(mode) => mode,
            Self::Best if has_keyword_search(service) => SearchMode::Hybrid,
            Self::Best => SearchMode::Dense,
        }
    }

    fn is_beyond(self, service: &NamedBackend) -> bool {
        matches!(self, Self::Given(mode) if mode.uses_words()) && !has_keyword_search(service)
    }
}

fn has_keyword_search(service: &NamedBackend) -> bool {
    service
        .backend
        .capabilities()
        .contains(&Capability::KeywordSearch)
}

#[derive(Debug, Clone, PartialEq)]
pub struct FanoutHit {
    /// Index into [`FanoutQuery::targets`].
    pub target: usize,
    pub hit: SearchHit,
    pub grade: Grade,
}

/// A warning about one target, or about the whole search.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FanoutWarning {
    pub target: Option<usize>,
    pub message: String,
}

#[derive(Debug, Default)]
pub struct FanoutResponse {
    /// Best first.
    pub hits: Vec<FanoutHit>,
    pub reranked: bool,
    pub warnings: Vec<FanoutWarning>,
    /// Targets that could not be searched.
    pub failures: Vec<(usize, BackendError)>,
    /// The metadata of each target's collection; `None` where it could not be searched.
    pub metadata: Vec<Option<Metadata>>,
    pub timings: Vec<StageTime>,
}

impl FanoutResponse {
    /// The best grade of the hits, `none` without any.
    pub fn grade(&self) -> Grade {
        self.hits.iter().map(|hit| hit.grade).max().unwrap_or(Grade::None)
    }

    /// Whether no target could be searched.
    pub fn failed(&self) -> bool {
        self.metadata.iter().all(Option::is_none) && !self.failures.is_empty()
    }

    fn warn(&mut self, target: Option<usize>, message: String) {
        let warning = FanoutWarning { target, message };
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }
}

/// Searches all targets. Failures are part of the response, also when every target failed.
pub async fn search(query: &FanoutQuery) -> FanoutResponse {
    let found = in_time(query, search_targets(query)).await;
    let (mut response, thresholds) = merge::merge(query, found).await;
    if query.options.rerank {
        let start = Instant::now();
        cut(query, rerank_depth(query.options.top_k), &mut response.hits);
        in_time(query, rerank::rerank(query, &mut response)).await;
        if response.reranked {
            response.timings.push(StageTime::new("rerank", start.elapsed()));
        }
    }
    cut(query, query.options.top_k, &mut response.hits);
    in_time(query, measure::measure(query, &thresholds, &mut response.hits)).await;
    if let Some(expand) = &query.options.expand {
        let start = Instant::now();
        in_time(query, siblings::expand(query, expand, &mut response)).await;
        response.timings.push(StageTime::new("expand", start.elapsed()));
    }
    response
}

/// Limits a step to [`STEP_TIMEOUT`] where several services are asked: the others' results are worth
/// more than waiting for one that hangs. A single service has the timeout configured for it.
async fn in_time<T>(query: &FanoutQuery, step: impl Future<Output = T>) -> T {
    let same_service = |pair: &[Target]| pair[0].service.name == pair[1].service.name;
    if query.targets.windows(2).all(same_service) {
        step.await
    } else {
        within(STEP_TIMEOUT, step).await
    }
}

fn cut(query: &FanoutQuery, top_k: usize, hits: &mut Vec<FanoutHit>) {
    match query.limit {
        Limit::AllTogether => hits.truncate(top_k),
        Limit::EachCollection => {
            let mut kept = vec![0_usize; query.targets.len()];
            hits.retain(|hit| {
                let count = &mut kept[hit.target];
                *count += 1;
                *count <= top_k
            });
        }
    }
}

/// The collections of one service, searched by one call.
struct Batch<'a> {
    service: &'a NamedBackend,
    names: Vec<CollectionName>,
    /// Their indexes among the targets.
    targets: Vec<usize>,
}

fn batches(targets: &[Target]) -> Vec<Batch<'_>> {
    let mut batches: Vec<Batch<'_>> = Vec::new();
    let mut by_service: HashMap<&str, usize> = HashMap::new();
    for (index, target) in targets.iter().enumerate() {
        let batch = *by_service.entry(&target.service.name).or_insert(batches.len());
        if batch == batches.len() {
            batches.push(Batch {
                service: &target.service,
                names: Vec::new(),
                targets: Vec::new(),
            });
        }
        batches[batch].names.push(target.name.clone());
        batches[batch].targets.push(index);
    }
    batches
}

type TargetResult = Result<Vec<SearchResponse>, BackendError>;

/// The responses of every target to every wording.
async fn search_targets(query: &FanoutQuery) -> Vec<TargetResult> {
    let batches = batches(&query.targets);
    let mut searches = Vec::with_capacity(batches.len());
    for batch in &batches {
        searches.push(search_batch(query, batch));
    }
    let answers = join_all(searches).await;
    let mut found: Vec<TargetResult> = query.targets.iter().map(|_| Ok(Vec::new())).collect();
    for (batch, answers) in batches.iter().zip(answers) {
        for (target, answer) in batch.targets.iter().zip(answers) {
            found[*target] = answer;
        }
    }
    found
}

async fn search_batch(query: &FanoutQuery, batch: &Batch<'_>) -> Vec<TargetResult> {
    let depth = depth(query);
    let queries = queries_for(query, batch.service, depth);
    let mut answers = batch.service.backend.search_many(&batch.names, &queries).await;
    if depth <= query.options.top_k {
        return answers;
    }
    // A service with a smaller limit refuses the deeper ranking. Ask it for what the client wants.
    let refused = |answer: &TargetResult| matches!(answer, Err(BackendError::Call(error)) if error.status() == Some(400));
    let (indexes, names): (Vec<usize>, Vec<CollectionName>) = answers
        .iter()
        .zip(&batch.names)
        .enumerate()
        .filter(|(_, (answer, _))| refused(answer))
        .map(|(index, (_, name))| (index, name.clone()))
        .unzip();
    if names.is_empty() {
        return answers;
    }
    tracing::debug!(service = %batch.service.name, depth, "searching again, less deep");
    let queries = queries_for(query, batch.service, query.options.top_k);
    let retried = batch.service.backend.search_many(&names, &queries).await;
    for (index, answer) in indexes.into_iter().zip(retried) {
        answers[index] = answer;
    }
    answers
}

fn queries_for(query: &FanoutQuery, service: &NamedBackend, top_k: usize) -> Vec<SearchQuery> {
    let mode = query.mode.of(service);
    query
        .wordings
        .iter()
        .map(|wording| SearchQuery {
            text: Some(wording.text.clone()).filter(|text| !text.is_empty()),
            keywords: Some(wording.keywords.clone()).filter(|words| !words.is_empty()),
            top_k,
            mode,
            // Both are done to the merged hits.
            rerank: false,
            expand: None,
            max_distance: query.options.max_distance.filter(|_| mode.uses_vectors()),
            ..query.options.clone()
        })
        .collect()
}

/// How many hits each ranking has.
fn depth(query: &FanoutQuery) -> usize {
    let top_k = query.options.top_k;
    let fused = match merge::order(query) {
        merge::Order::Fused => (top_k * FUSION_FACTOR).clamp(FUSION_AT_LEAST, FUSION_AT_MOST),
        merge::Order::Distance => 0,
    };
    let reranked = if query.options.rerank {
        rerank_depth(top_k)
    } else {
        0
    };
    top_k.max(fused).max(reranked)
}

#[cfg(test)]
mod tests;
