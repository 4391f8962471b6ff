//! Every judged query, searched for in one mode.

use std::time::{Duration, Instant};

use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::collection::CollectionName;
use ragstone_core::measures::{Measures, mean, measure};
use ragstone_core::search::{SearchMode, SearchQuery};

use super::JudgedQuery;

/// How many results each query asks for: as many as the deepest measure looks at.
pub const DEPTH: usize = 100;

/// One way to search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    pub mode: SearchMode,
    pub rerank: bool,
}

pub struct ModeResult {
    pub setting: Setting,
    /// The mean over all queries.
    pub measures: Measures,
    pub latency: Latency,
    /// What each query got, in the order of the queries.
    pub rankings: Vec<Ranking>,
}

/// How long queries took, one after the other, embedding included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Latency {
    pub p50: Duration,
    pub p95: Duration,
}

/// The ids that one query got, best first.
pub struct Ranking {
    pub query: String,
    pub documents: Vec<String>,
}

/// Searches for every query in one mode, with or without reranking.
pub async fn evaluate_mode(
    backend: &dyn Backend,
    name: &CollectionName,
    queries: &[JudgedQuery],
    setting: Setting,
) -> Result<ModeResult, BackendError> {
    let mut times = Vec::with_capacity(queries.len());
    let mut measures = Vec::with_capacity(queries.len());
    let mut rankings = Vec::with_capacity(queries.len());
    for judged in queries {
        let query = SearchQuery {
            text: Some(judged.text.clone()),
            top_k: DEPTH,
            mode: setting.mode,
            rerank: setting.rerank,
            ..SearchQuery::default()
        }
        .validate()?;
        let start = Instant::now();
        let answer = backend.search(name, query).await?;
        times.push(start.elapsed());
        if setting.rerank && !answer.reranked {
            let reason = answer.warnings.into_iter().next();
            let reason = reason.unwrap_or_else(|| "the results were not reranked".to_owned());
            return Err(ragstone_core::model::ModelError::Failed(reason).into());
        }
        let documents: Vec<String> = answer
            .hits
            .into_iter()
            .map(|hit| hit.document.id.into_string())
            .collect();
        measures.push(measure(&scored(&documents), &judged.judgements));
        rankings.push(Ranking {
            query: judged.id.clone(),
            documents,
        });
    }
    Ok(ModeResult {
        setting,
        measures: mean(&measures),
        latency: latency(times),
        rankings,
    })
}

/// The order is what counts, so that scores which happen to be equal change nothing.
pub(super) fn scored(documents: &[String]) -> Vec<(&str, f64)> {
    documents
        .iter()
        .enumerate()
        .map(|(place, id)| (id.as_str(), -(place as f64)))
        .collect()
}

fn latency(mut times: Vec<Duration>) -> Latency {
    times.sort_unstable();
    let at = |share: usize| {
        let place = (times.len() * share / 100).min(times.len().saturating_sub(1));
        times.get(place).copied().unwrap_or_default()
    };
    Latency {
        p50: at(50),
        p95: at(95),
    }
}
