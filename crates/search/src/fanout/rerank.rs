//! Reordering the merged hits by cross-encoders.
//!
//! The texts of a service are given to the model of this process or to the service they come from,
//! never to another service.

use futures::future::join_all;
use ragstone_core::backend::{BackendError, Capability};
use ragstone_core::search::SearchHit;

use super::{FanoutHit, FanoutQuery, FanoutResponse};
use crate::gateway::{LOCAL, NamedBackend};
use crate::rerank::{rerank_hits, skipped};

/// Uses the cross-encoder of this process. Without one, each service reranks its own hits, and the
/// rankings are merged by rank.
pub(super) async fn rerank(query: &FanoutQuery, response: &mut FanoutResponse) {
    if response.hits.is_empty() {
        return;
    }
    let Some(text) = query
        .wordings
        .get(query.reported)
        .map(|wording| wording.text.as_str())
    else {
        return;
    };
    let hits: Vec<SearchHit> = response.hits.iter().map(|hit| hit.hit.clone()).collect();
    let (ordered, outcome) = rerank_hits(query.local.backend.as_ref(), text, hits).await;
    match outcome {
        Ok(warning) => {
            response.hits = reordered(&response.hits, ordered);
            response.reranked = true;
            if let Some(warning) = warning {
                response.warn(None, warning);
            }
        }
        Err(error) => rerank_by_services(query, text, response, &error).await,
    }
}

/// The hits in the order of their places before, which reranked hits remember.
fn reordered(before: &[FanoutHit], ordered: Vec<SearchHit>) -> Vec<FanoutHit> {
    let mut rest: Vec<Option<&FanoutHit>> = before.iter().map(Some).collect();
    let mut hits = Vec::with_capacity(before.len());
    for hit in ordered {
        let place = match &hit.rerank {
            Some(reranked) => Some(reranked.original_rank - 1),
            None => rest
                .iter()
                .position(|left| left.is_some_and(|left| left.hit.document == hit.document)),
        };
        if let Some(known) = place.and_then(|place| rest.get_mut(place)).and_then(Option::take) {
            hits.push(FanoutHit { hit, ..known.clone() });
        }
    }
    hits
}

/// The hits of one service, with their places in the merged ranking.
struct Group<'a> {
    service: &'a NamedBackend,
    places: Vec<usize>,
}

async fn rerank_by_services(
    query: &FanoutQuery,
    text: &str,
    response: &mut FanoutResponse,
    local_error: &BackendError,
) {
    let mut groups: Vec<Group<'_>> = Vec::new();
    for (place, hit) in response.hits.iter().enumerate() {
        let service = &query.targets[hit.target].service;
        match groups.iter_mut().find(|group| group.service.name == service.name) {
            Some(group) => group.places.push(place),
            None => groups.push(Group {
                service,
                places: vec![place],
            }),
        }
    }
    let can_rerank = |group: &Group<'_>| {
        group.service.name != LOCAL && group.service.backend.capabilities().contains(&Capability::Rerank)
    };
    if !groups.iter().any(can_rerank) {
        response.warn(None, skipped(local_error));
        return;
    }
    let mut rerankings = Vec::with_capacity(groups.len());
    for group in &groups {
        let hits = group.places.iter().map(|place| response.hits[*place].hit.clone());
        let hits: Vec<SearchHit> = hits.collect();
        let is_able = can_rerank(group);
        rerankings.push(async move {
            if is_able {
                rerank_hits(group.service.backend.as_ref(), text, hits).await
            } else {
                (hits, Err(BackendError::NoReranker))
            }
        });
    }
    // By rank within its service, then by its place before.
    let mut merged: Vec<(usize, usize, FanoutHit)> = Vec::with_capacity(response.hits.len());
    for (group, (ordered, outcome)) in groups.iter().zip(join_all(rerankings).await) {
        match outcome {
            Ok(warning) => {
                response.reranked = true;
                if let Some(message) = warning {
                    response.warn(None, message);
                }
            }
            Err(error) => {
                let message = format!(
                    "not reranked by service '{}': {}",
                    group.service.name,
                    error.public()
                );
                response.warn(None, message);
            }
        }
        let before: Vec<FanoutHit> = group
            .places
            .iter()
            .map(|place| response.hits[*place].clone())
            .collect();
        for (rank, mut hit) in reordered(&before, ordered).into_iter().enumerate() {
            let place = match &mut hit.hit.rerank {
                Some(reranked) => {
                    let place = group.places[reranked.original_rank - 1];
                    reranked.original_rank = place + 1;
                    place
                }
                None => group.places[rank],
            };
            merged.push((rank, place, hit));
        }
    }
    merged.sort_by_key(|(rank, place, _)| (*rank, *place));
    response.hits = merged.into_iter().map(|(_, _, hit)| hit).collect();
}
