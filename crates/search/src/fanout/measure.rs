//! Distances to the reported wording, for hits that only another wording found.

use std::collections::HashMap;

use futures::future::join_all;
use ragstone_core::document::DocumentId;
use ragstone_core::search::{SearchHit, SearchMode, SearchQuery};

use super::{FanoutHit, FanoutQuery, Target, Thresholds};

/// Asks each target for the distances that are missing, and grades by them. Hits of a target that cannot
/// tell stay without a distance.
pub(super) async fn measure(query: &FanoutQuery, thresholds: &[Thresholds], hits: &mut [FanoutHit]) {
    let Some(reported) = query.wordings.get(query.reported) else {
        return;
    };
    if query.wordings.len() < 2 {
        return;
    }
    let mut missing: HashMap<usize, Vec<DocumentId>> = HashMap::new();
    for hit in hits.iter().filter(|hit| hit.hit.distance.is_none()) {
        let ids = missing.entry(hit.target).or_default();
        ids.push(hit.hit.document.id.clone());
    }
    let (mut targets, mut searches) = (Vec::new(), Vec::new());
    for (target, ids) in missing {
        if query.mode.of(&query.targets[target].service).uses_vectors() {
            targets.push(target);
            searches.push(distances(&reported.text, &query.targets[target], ids));
        }
    }
    for (target, found) in targets.into_iter().zip(join_all(searches).await) {
        for measured in found {
            let unmeasured = |hit: &&mut FanoutHit| {
                hit.target == target
                    && hit.hit.distance.is_none()
                    && hit.hit.document.id == measured.document.id
            };
            if let (Some(hit), Some(_)) = (hits.iter_mut().find(unmeasured), measured.distance) {
                hit.hit.distance = measured.distance;
                hit.grade = thresholds[target].grade(measured.distance);
            }
        }
    }
}

async fn distances(text: &str, target: &Target, ids: Vec<DocumentId>) -> Vec<SearchHit> {
    let query = SearchQuery {
        text: Some(text.to_owned()),
        top_k: ids.len(),
        ids: Some(ids),
        mode: SearchMode::Dense,
        ..SearchQuery::default()
    };
    match target.service.backend.search(&target.name, query).await {
        Ok(response) => response.hits,
        Err(error) => {
            let (service, collection) = (&target.service.name, &target.name);
            tracing::warn!(%service, %collection, %error, "distances of results could not be measured");
            Vec::new()
        }
    }
}
