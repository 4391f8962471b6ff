//! Gathering what a message is about, from many collections of many services at once.
//!
//! A [`Plan`] says what to search for. Every collection is searched with it at the same time; one
//! that fails becomes a warning. The hits are graded by the thresholds of their collection, merged,
//! and, where that is wanted, reranked and completed with their siblings.

mod finish;
mod grade;
mod measure;
mod merge;
mod strategy;
mod vectors;
mod words;

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use ragstone_core::collection::CollectionName;
use ragstone_core::conversation::QueryVariant;
use ragstone_core::document::{Document, Metadata};
use ragstone_core::model::ModelIdentity;
use ragstone_core::provider::{Capability, ProviderAnswer, ProviderError, ProviderQuery, RagProvider};
use ragstone_providers::http::within;

pub use grade::{Grade, MATCH_THRESHOLD, PARTIAL_THRESHOLD, Thresholds};
pub use strategy::{Plan, Strategy, by_topic, normalise_topic};

use crate::gateway::NamedService;
use crate::models::Models;
use crate::search::{Expand, Mode};
use vectors::QueryVectors;

/// Rankings that are fused or reranked are this many times as deep as what is asked for, within the
/// two bounds.
const DEPTH_FACTOR: usize = 4;
const DEPTH_AT_LEAST: usize = 100;
const DEPTH_AT_MOST: usize = 200;

/// So long each step waits for one of several services.
const PATIENCE_WITH_ONE: Duration = Duration::from_secs(10);

/// One collection of one service.
#[derive(Clone)]
pub struct Target {
    pub service: NamedService,
    pub name: CollectionName,
}

pub struct Request {
    pub plan: Plan,
    pub targets: Vec<Target>,
    /// How many hits of all collections together.
    pub top_k: usize,
    pub mode: ModeChoice,
    pub rerank: bool,
    /// The backend of this process, whose cross-encoder is asked first.
    pub reranker: Arc<dyn RagProvider>,
    pub expand: Option<Expand>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModeChoice {
    /// The same for every service; one that cannot do it is searched by meaning, with a warning.
    Given(Mode),
    /// By meaning and by word where the service can, by meaning elsewhere.
    Best,
}

impl ModeChoice {
    fn of(self, service: &NamedService) -> Mode {
        match self {
            Self::Given(_) if self.is_beyond(service) => Mode::Dense,
            Self::Given(mode) => mode,
            Self::Best if ranks_by_words(service) => Mode::Hybrid,
            Self::Best => Mode::Dense,
        }
    }

    /// Words were asked for, and this kind of service does not rank by them.
    fn is_beyond(self, service: &NamedService) -> bool {
        matches!(self, Self::Given(Mode::Keyword | Mode::Hybrid)) && !ranks_by_words(service)
    }
}

fn ranks_by_words(service: &NamedService) -> bool {
    service
        .backend
        .capabilities()
        .contains(&Capability::KeywordSearch)
}

#[derive(Debug, Clone, PartialEq)]
pub struct CollectedHit {
    pub service: String,
    pub collection: CollectionName,
    pub document: Document,
    pub distance: Option<f32>,
    pub score: Option<f64>,
    pub grade: Grade,
    /// What the backend, reranking and expanding have added.
    pub extra: Metadata,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Collected {
    /// The best grade of these hits, `none` without any.
    pub grade: Grade,
    /// Best first.
    pub hits: Vec<CollectedHit>,
    pub reranked: bool,
    pub warnings: Vec<String>,
    /// How often a query's vector was there already when another collection needed it.
    pub embedding_cache_hits: u64,
}

/// Fails where every collection failed, as the first of them did.
pub async fn collect(models: &Models, request: &Request) -> Result<Collected, ProviderError> {
    strategy::log(&request.plan);
    let vectors: Vec<QueryVectors<'_>> = request
        .plan
        .queries
        .iter()
        .map(|query| QueryVectors::new(models, &query.text))
        .collect();
    let mut found = in_time(request, search(request, &vectors)).await;
    if let Some(error) = failed_altogether(&mut found) {
        return Err(error);
    }
    let (mut collected, thresholds) = merge::merge(request, found).await;
    collected.warnings.extend(request.plan.warnings.iter().cloned());
    collected.embedding_cache_hits = vectors.iter().map(QueryVectors::report_hits).sum();
    if request.rerank {
        in_time(request, finish::rerank(models, request, &mut collected)).await;
    }
    collected.hits.truncate(request.top_k);
    let measuring = measure::measure(request, &vectors, &thresholds, &mut collected.hits);
    in_time(request, measuring).await;
    let grades = collected.hits.iter().map(|hit| hit.grade);
    collected.grade = grades.max().unwrap_or(Grade::None);
    if let Some(expand) = &request.expand {
        in_time(request, finish::expand(request, expand, &mut collected)).await;
    }
    Ok(collected)
}

/// A step of collecting. Where several services are asked, what the others found is worth more than
/// waiting for one that hangs; a single one has all the time that is configured for it.
async fn in_time<T>(request: &Request, step: impl Future<Output = T>) -> T {
    let same_service = |pair: &[Target]| pair[0].service.name == pair[1].service.name;
    if request.targets.windows(2).all(same_service) {
        step.await
    } else {
        within(PATIENCE_WITH_ONE, step).await
    }
}

/// The first failure, where nothing else was found.
fn failed_altogether(found: &mut [Vec<Result<ProviderAnswer, ProviderError>>]) -> Option<ProviderError> {
    if found.iter().flatten().any(Result::is_ok) {
        return None;
    }
    let first = found.iter_mut().find(|answers| !answers.is_empty())?;
    first.swap_remove(0).err()
}

/// Collections that are searched by one call.
struct Batch<'a> {
    service: &'a NamedService,
    names: Vec<CollectionName>,
    /// Where they stand among the targets.
    places: Vec<usize>,
}

/// A service that embeds by itself gets all its collections in one call, and so embeds a query once.
/// Where the vector is made here, each collection is given its own, by the model it names.
fn batches(targets: &[Target]) -> Vec<Batch<'_>> {
    let mut batches: Vec<Batch<'_>> = Vec::new();
    for (place, target) in targets.iter().enumerate() {
        let known = batches
            .iter_mut()
            .find(|batch| batch.service.name == target.service.name && !batch.service.embeds_here());
        match known {
            Some(batch) => {
                batch.names.push(target.name.clone());
                batch.places.push(place);
            }
            None => batches.push(Batch {
                service: &target.service,
                names: vec![target.name.clone()],
                places: vec![place],
            }),
        }
    }
    batches
}

/// The answers of every collection, in their order, to every query of the plan, in theirs. All of
/// them are asked at the same time.
async fn search(
    request: &Request,
    vectors: &[QueryVectors<'_>],
) -> Vec<Vec<Result<ProviderAnswer, ProviderError>>> {
    let batches = batches(&request.targets);
    let mut searches = Vec::with_capacity(batches.len() * vectors.len());
    for batch in &batches {
        for (query, vectors) in request.plan.queries.iter().zip(vectors) {
            searches.push(search_for(query, batch, request, vectors));
        }
    }
    let mut answers = join_all(searches).await.into_iter();
    let mut found: Vec<Vec<_>> = request.targets.iter().map(|_| Vec::new()).collect();
    for batch in &batches {
        for answers in answers.by_ref().take(vectors.len()) {
            for (place, answer) in batch.places.iter().zip(answers) {
                found[*place].push(answer);
            }
        }
    }
    found
}

async fn search_for(
    query: &QueryVariant,
    batch: &Batch<'_>,
    request: &Request,
    vectors: &QueryVectors<'_>,
) -> Vec<Result<ProviderAnswer, ProviderError>> {
    let mode = request.mode.of(batch.service);
    let (vector, vector_by) = match mode {
        Mode::Keyword => None,
        Mode::Dense | Mode::Hybrid => vector(batch, vectors).await,
    }
    .unzip();
    // Where the text is not embedded any more, only its words are of use.
    let by_word = mode == Mode::Keyword || (mode == Mode::Hybrid && vector.is_some());
    let text = if by_word { &query.keywords } else { &query.text };
    let mut options = Metadata::new();
    if mode != Mode::Dense {
        options.insert("mode".into(), mode.name().into());
    }
    if mode == Mode::Hybrid {
        // Merging wants to know which of the two rankings a hit is from.
        options.insert("explain".into(), true.into());
    }
    let query = ProviderQuery {
        text: Some(text.clone()),
        vector,
        vector_by,
        top_k: depth(request),
        options,
        ..ProviderQuery::default()
    };
    let mut answers = batch
        .service
        .backend
        .search_several(&batch.names, query.clone())
        .await;
    if query.top_k > request.top_k {
        search_again(batch, query, request.top_k, &mut answers).await;
    }
    answers
}

/// A ranking is asked for deeper than anybody wanted. A service that does not go so deep refuses it,
/// which does not tell how deep it goes, and is asked once more for what was wanted.
async fn search_again(
    batch: &Batch<'_>,
    query: ProviderQuery,
    top_k: usize,
    answers: &mut [Result<ProviderAnswer, ProviderError>],
) {
    let is_refused = |answer: &Result<ProviderAnswer, ProviderError>| matches!(answer, Err(ProviderError::Call(error)) if error.status() == Some(400));
    let (places, names): (Vec<usize>, Vec<CollectionName>) = batch
        .names
        .iter()
        .enumerate()
        .filter(|(place, _)| answers.get(*place).is_some_and(is_refused))
        .map(|(place, name)| (place, name.clone()))
        .unzip();
    if names.is_empty() {
        return;
    }
    tracing::debug!(service = %batch.service.name, depth = query.top_k, top_k, "searching less deep");
    let query = ProviderQuery { top_k, ..query };
    let again = batch.service.backend.search_several(&names, query).await;
    for (place, answer) in places.into_iter().zip(again) {
        answers[place] = answer;
    }
}

/// The query's vector, and the model that made it, where this process does. Whatever stands in the
/// way of that (no such collection, no such model) is for the search itself to say.
async fn vector(batch: &Batch<'_>, vectors: &QueryVectors<'_>) -> Option<(Vec<f32>, ModelIdentity)> {
    let name = batch.names.first().filter(|_| batch.service.embeds_here())?;
    let collection = batch.service.backend.collection(name).await.ok()?;
    vectors.get(&collection).await.ok()
}

/// How many hits each ranking is asked for.
fn depth(request: &Request) -> usize {
    if request.rerank || merge::order(request) == merge::Order::Fused {
        (request.top_k * DEPTH_FACTOR)
            .clamp(DEPTH_AT_LEAST, DEPTH_AT_MOST)
            .max(request.top_k)
    } else {
        request.top_k
    }
}

#[cfg(test)]
mod tests;
