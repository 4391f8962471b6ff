//! How far hits are from the reported wording that only another one found.

use futures::future::join_all;
use ragstone_core::document::DocumentId;
use ragstone_core::provider::{ProviderHit, ProviderQuery};

use super::{Batch, CollectedHit, Request, Target, Thresholds, vector};
use crate::collect::vectors::QueryVectors;
use crate::search::Mode;

/// Asks each collection for the distances that are missing, and grades by them. One that cannot tell
/// leaves them out: nothing is claimed then.
pub(super) async fn measure(
    request: &Request,
    vectors: &[QueryVectors<'_>],
    thresholds: &[Thresholds],
    hits: &mut [CollectedHit],
) {
    let Some(vectors) = vectors.get(request.plan.reported) else {
        return;
    };
    if request.plan.queries.len() < 2 {
        return;
    }
    let mut asked = Vec::new();
    let mut searches = Vec::new();
    for (target, thresholds) in request.targets.iter().zip(thresholds) {
        if request.mode.of(&target.service) == Mode::Keyword {
            continue;
        }
        let ids: Vec<DocumentId> = hits
            .iter()
            .filter(|hit| hit.distance.is_none() && is_of(hit, target))
            .map(|hit| hit.document.id.clone())
            .collect();
        if !ids.is_empty() {
            asked.push((target, thresholds));
            searches.push(distances(request.plan.query_text(), target, vectors, ids));
        }
    }
    for ((target, thresholds), found) in asked.into_iter().zip(join_all(searches).await) {
        for ProviderHit {
            document,
            distance,
            score,
            ..
        } in found
        {
            let missing = hits
                .iter_mut()
                .find(|hit| hit.distance.is_none() && is_of(hit, target) && hit.document.id == document.id);
            if let (Some(hit), Some(_)) = (missing, distance) {
                hit.distance = distance;
                hit.score = score;
                hit.grade = thresholds.grade(distance);
            }
        }
    }
}

fn is_of(hit: &CollectedHit, target: &Target) -> bool {
    hit.service == target.service.name && hit.collection == target.name
}

async fn distances(
    text: &str,
    target: &Target,
    vectors: &QueryVectors<'_>,
    ids: Vec<DocumentId>,
) -> Vec<ProviderHit> {
    let batch = Batch {
        service: &target.service,
        names: vec![target.name.clone()],
        places: Vec::new(),
    };
    let (vector, vector_by) = vector(&batch, vectors).await.unzip();
    let query = ProviderQuery {
        text: Some(text.to_owned()),
        vector,
        vector_by,
        top_k: ids.len(),
        among: Some(ids),
        ..ProviderQuery::default()
    };
    match target.service.backend.search(&target.name, query).await {
        Ok(answer) => answer.hits,
        Err(error) => {
            let (service, collection) = (&target.service.name, &target.name);
            tracing::warn!(%service, %collection, %error, "distances of results could not be measured");
            Vec::new()
        }
    }
}
