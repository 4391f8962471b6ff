//! What is done to the merged hits: reranking them, and completing them with their siblings.

use std::collections::HashMap;
use std::sync::Arc;

use futures::StreamExt;
use ragstone_core::document::{Document, Metadata};
use ragstone_core::filter::{Filter, Scalar};
use ragstone_core::provider::{Capability, ProviderError, RagProvider};
use ragstone_core::siblings::{Expand, Gathering, SECTION_REACH, SIBLING_BYTES, in_document_order};
use ragstone_core::storage::Page;
use serde_json::{Value, json};

use super::{Collected, CollectedHit, DEPTH_AT_MOST, Request, Target};
use crate::gateway::document_json;
use crate::models::Models;
use crate::search::too_many_siblings;

/// So many sections are fetched at once.
const SECTIONS_AT_ONCE: usize = 8;

/// Orders the hits by a cross-encoder, if one can be had; otherwise they stay as they are, and a
/// warning says why.
///
/// The texts of one service are its own business: they are given to the model of this process or to
/// the service they come from, never to another one.
pub(super) async fn rerank(models: &Models, request: &Request, collected: &mut Collected) {
    collected.hits.truncate(DEPTH_AT_MOST.max(request.top_k));
    if collected.hits.is_empty() {
        return;
    }
    let mut reasons = Vec::new();
    for backend in rerankers(models, request, &collected.hits) {
        match reranked(backend, request, &collected.hits).await {
            Ok(hits) => {
                collected.hits = hits;
                collected.reranked = true;
                return;
            }
            Err(reason) => reasons.push(reason),
        }
    }
    collected.warnings.extend(reasons);
}

/// Who may be asked, in this order. This process, where it has no cross-encoder, is asked only where
/// nobody else can be: it is then the one to say so.
fn rerankers<'a>(models: &Models, request: &'a Request, hits: &[CollectedHit]) -> Vec<&'a dyn RagProvider> {
    let here = request.reranker.as_ref();
    let from_one_service = hits.windows(2).all(|pair| pair[0].service == pair[1].service);
    let there = hits
        .first()
        .filter(|hit| from_one_service && hit.service != crate::gateway::LOCAL)
        .and_then(|hit| target(request, hit))
        .map(|target| target.service.backend.as_ref())
        .filter(|backend| backend.capabilities().contains(&Capability::Rerank));
    match (models.reranker().is_ok(), there) {
        (true, Some(there)) => vec![here, there],
        (false, Some(there)) => vec![there],
        (_, None) => vec![here],
    }
}

/// The hits in their new order, or why there is none.
async fn reranked(
    backend: &dyn RagProvider,
    request: &Request,
    hits: &[CollectedHit],
) -> Result<Vec<CollectedHit>, String> {
    let documents = hits.iter().enumerate().map(|(place, hit)| {
        Metadata::from_iter([
            ("id".to_owned(), Value::from(place.to_string())),
            ("text".to_owned(), Value::from(hit.document.text.as_str())),
        ])
    });
    let answer = backend
        .rerank(
            request.plan.query_text(),
            documents.collect(),
            Some(request.top_k),
        )
        .await;
    if let Some(reason) = answer.warning {
        return Err(reason);
    }
    let place = |document: &Metadata| document.get("id")?.as_str()?.parse::<usize>().ok();
    Ok(answer
        .documents
        .iter()
        .filter_map(|document| {
            let mut hit = hits.get(place(document)?)?.clone();
            for field in ["rerank_score", "original_rank"] {
                if let Some(value) = document.get(field) {
                    hit.extra.insert(field.to_owned(), value.clone());
                }
            }
            Some(hit)
        })
        .collect())
}

fn target<'a>(request: &'a Request, hit: &CollectedHit) -> Option<&'a Target> {
    request
        .targets
        .iter()
        .find(|target| target.service.name == hit.service && target.name == hit.collection)
}

/// The documents that share a value of a field, in one collection.
type SectionKey = (String, String, Scalar);

/// Adds to each hit the documents that share its value of a field, in document order. A section that
/// several hits are in is fetched once; one that cannot be fetched becomes a warning.
pub(super) async fn expand(request: &Request, expand: &Expand, collected: &mut Collected) {
    let mut wanted: HashMap<SectionKey, &Target> = HashMap::new();
    for hit in &collected.hits {
        if let (Some(key), Some(target)) = (section_of(hit, expand), target(request, hit)) {
            wanted.insert(key, target);
        }
    }
    // A loop, not a closure: borrowed arguments of a closure that makes futures would keep the whole
    // request from crossing threads.
    let mut fetches = Vec::with_capacity(wanted.len());
    for (key, target) in wanted {
        fetches.push(section(key, target, expand));
    }
    let fetched: Vec<_> = futures::stream::iter(fetches)
        .buffer_unordered(SECTIONS_AT_ONCE)
        .collect()
        .await;
    let mut sections = HashMap::new();
    for (key, found) in fetched {
        match found {
            Ok(documents) => {
                sections.insert(key, in_document_order(documents));
            }
            Err(error) => {
                let (service, collection, _) = &key;
                tracing::warn!(service, collection, %error, "the siblings of a result cannot be had");
                collected
                    .warnings
                    .push(format!("{service}/{collection}: no siblings: {}", error.public()));
            }
        }
    }
    let mut gathering = Gathering::new(expand, SIBLING_BYTES);
    for hit in &mut collected.hits {
        let Some(section) = section_of(hit, expand).and_then(|key| sections.get(&key)) else {
            continue;
        };
        let siblings = gathering.within(section, &hit.document);
        let siblings: Vec<Value> = siblings
            .into_iter()
            .map(|sibling| document_json(Arc::unwrap_or_clone(sibling)))
            .collect();
        hit.extra.insert("siblings".to_owned(), json!(siblings));
    }
    if gathering.cut {
        collected.warnings.push(too_many_siblings());
    }
}

async fn section(
    key: SectionKey,
    target: &Target,
    expand: &Expand,
) -> (SectionKey, Result<Vec<Document>, ProviderError>) {
    let filter = Filter::equals(expand.field.clone(), key.2.clone());
    let page = Page {
        limit: 2 * SECTION_REACH,
        offset: 0,
    };
    let found = target
        .service
        .backend
        .documents(&target.name, &filter, page)
        .await;
    (key, found.map(|page| page.documents))
}

fn section_of(hit: &CollectedHit, expand: &Expand) -> Option<SectionKey> {
    let value = Scalar::from_json(hit.document.metadata.get(&expand.field)?)?;
    Some((hit.service.clone(), hit.collection.to_string(), value))
}
