//! Reordering hits by a cross-encoder.

use std::time::Instant;

use ragstone_core::backend::{Backend, BackendError, RankedText};
use ragstone_core::search::{RerankedFrom, SearchHit, SearchResponse, StageTime};

/// A reranker sees this many times as many hits as are asked for, within the two bounds, but always
/// some more than are asked for.
pub(crate) const RERANK_FACTOR: usize = 4;
const RERANK_AT_LEAST: usize = 40;
const RERANK_AT_MOST: usize = 200;
const RERANK_SPARE: usize = 40;

pub(crate) fn rerank_depth(top_k: usize) -> usize {
    (top_k * RERANK_FACTOR)
        .clamp(RERANK_AT_LEAST, RERANK_AT_MOST)
        .max(top_k + RERANK_SPARE)
}

/// Reranks the hits of a response. Without a cross-encoder, or when it fails, the hits keep their order
/// and the response gets a warning.
pub(crate) async fn rerank_response(backend: &dyn Backend, text: &str, response: &mut SearchResponse) {
    let start = Instant::now();
    let hits = std::mem::take(&mut response.hits);
    let (hits, outcome) = rerank_hits(backend, text, hits).await;
    response.hits = hits;
    match outcome {
        Ok(warning) => {
            response.reranked = true;
            response.timings.push(StageTime::new("rerank", start.elapsed()));
            response.warnings.extend(warning);
        }
        Err(error) => response.warn(skipped(&error)),
    }
}

pub(crate) fn skipped(error: &BackendError) -> String {
    format!("Reranking was skipped: {}", error.public())
}

/// The hits in the backend's order. Hits that it had no time to score come last, in the order they had,
/// and the warning says so.
pub(crate) async fn rerank_hits(
    backend: &dyn Backend,
    text: &str,
    hits: Vec<SearchHit>,
) -> (Vec<SearchHit>, Result<Option<String>, BackendError>) {
    let texts: Vec<String> = hits.iter().map(|hit| hit.document.text.clone()).collect();
    let count = texts.len();
    match backend.rerank(text, texts, count).await {
        Ok(ranked) => {
            let warning = (ranked.len() < count).then(|| {
                format!(
                    "Only the first {} of {count} results were reranked: scoring all of them takes too long",
                    ranked.len()
                )
            });
            (in_order(hits, &ranked), Ok(warning))
        }
        Err(error) => {
            if !matches!(error, BackendError::NoReranker) {
                tracing::error!(%error, results = count, "reranking failed, results keep their order");
            }
            (hits, Err(error))
        }
    }
}

fn in_order(hits: Vec<SearchHit>, ranked: &[RankedText]) -> Vec<SearchHit> {
    let mut hits: Vec<Option<SearchHit>> = hits.into_iter().map(Some).collect();
    let mut ordered: Vec<SearchHit> = ranked
        .iter()
        .filter_map(|RankedText { index, score }| {
            let mut hit = hits.get_mut(*index)?.take()?;
            hit.rerank = Some(RerankedFrom {
                score: *score,
                original_rank: index + 1,
            });
            Some(hit)
        })
        .collect();
    ordered.extend(hits.into_iter().flatten());
    ordered
}
