//! Rules of ranking that both stores share.

use std::time::Instant;

use ragstone_core::search::StageTime;
use ragstone_core::{Document, DocumentId, Metadata};

use crate::error::{Error, Result};

/// How much deeper than the limit each ranking goes before the two are fused.
const FUSION_DEPTH: usize = 4;
const MIN_FUSION_DEPTH: usize = 100;

/// Number of documents that each ranking contributes to a fusion with this limit.
pub(crate) fn fusion_depth(limit: usize) -> usize {
    limit.saturating_mul(FUSION_DEPTH).max(MIN_FUSION_DEPTH)
}

/// Cosine distance, from the cosine.
pub(crate) fn distance(similarity: f32) -> f32 {
    (1.0 - similarity).clamp(0.0, 2.0)
}

/// The score that clients see: 1 for the same direction, 0 for the opposite one.
pub(crate) fn dense_score(similarity: f32) -> f64 {
    f64::from(1.0 - distance(similarity) / 2.0)
}

/// A document from its stored columns.
pub(crate) fn document(id: String, metadata: &str, text: String) -> Result<Document> {
    let metadata: Metadata = serde_json::from_str(metadata)?;
    Ok(Document {
        id: DocumentId::parse(id).map_err(|e| Error::Damaged(e.to_string()))?,
        text,
        metadata,
    })
}

/// Measures the stages of a search.
#[derive(Default)]
pub(crate) struct StageClock {
    pub(crate) stages: Vec<StageTime>,
}

impl StageClock {
    pub(crate) fn time<T>(&mut self, stage: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let outcome = work();
        self.stages.push(StageTime::new(stage, start.elapsed()));
        outcome
    }

    pub(crate) async fn time_async<T>(&mut self, stage: &'static str, work: impl Future<Output = T>) -> T {
        let start = Instant::now();
        let outcome = work.await;
        self.stages.push(StageTime::new(stage, start.elapsed()));
        outcome
    }
}
