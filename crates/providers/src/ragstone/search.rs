//! Searching one collection, or several in one call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use ragstone_core::backend::BackendError;
use ragstone_core::call::CallError;
use ragstone_core::error::InvalidInput;
use ragstone_core::fusion::{FusionWeights, HitRanks, Rank};
use ragstone_core::search::{RerankedFrom, SearchHit, SearchMode, SearchQuery, SearchResponse, StageTime};
use ragstone_core::{CollectionName, Document, DocumentId, Metadata};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::filter_json::filter_to_json;
use super::wire::{AnswerBody, DocumentBody, ExpandBody, HitBody, QueryBody, WeightsBody};
use super::{RagstoneClient, collection_error};
use crate::http::{Call, Repeat};

/// Limit of collections in one call.
const MAX_COLLECTIONS: usize = 64;
/// Of more results than were requested, so many are reranked.
const MAX_RERANKED: usize = 200;

impl RagstoneClient {
    /// Searches several collections with one call. Collections that it does not answer for, because the
    /// server does not support such calls or because they fail, are searched alone, so that each failure
    /// has its own reason.
    pub(super) async fn search_together(
        &self,
        names: &[CollectionName],
        query: &SearchQuery,
    ) -> Vec<Result<SearchResponse, BackendError>> {
        let is_possible =
            (2..=MAX_COLLECTIONS).contains(&names.len()) && !self.only_query_route.load(Ordering::Relaxed);
        let mut together = HashMap::new();
        if is_possible {
            match self.search_in_one_call(names, query).await {
                Ok(responses) => together = responses,
                Err(BackendError::Call(error)) if !is_refusal(&error) => {
                    return names.iter().map(|_| Err(error.clone().into())).collect();
                }
                Err(_) => {}
            }
        }
        let responses = names.iter().map(|name| {
            let response = together.remove(name);
            async move {
                match response {
                    Some(response) => Ok(response),
                    None => self.search_one(name, query).await,
                }
            }
        });
        join_all(responses).await
    }

    async fn search_one(
        &self,
        name: &CollectionName,
        query: &SearchQuery,
    ) -> Result<SearchResponse, BackendError> {
        let body = self.query_one(name, request(query)?).await;
        let body = body.map_err(|error| collection_error(error, name))?;
        let mut response = response(&body, body.collection_metadata.clone().unwrap_or_default());
        let knows_reranking = body.reranked.is_some();
        for hit in body.results {
            response.hits.push(self.read_hit(hit, query)?);
        }
        Ok(self.complete(query, response, knows_reranking).await)
    }

    /// Servers of the original make have no route per collection; the first 404 shows it.
    async fn query_one(
        &self,
        name: &CollectionName,
        mut body: QueryBody<'_>,
    ) -> Result<AnswerBody, CallError> {
        let mut unknown_route = None;
        if !self.only_query_route.load(Ordering::Relaxed) {
            let call = Call::post(Self::path(name, "/query")).json(&body);
            match self.client.call_json(call.repeat(Repeat::Read)).await {
                Err(error) if is_unknown_route(&error) => unknown_route = Some(error),
                outcome => return outcome,
            }
        }
        body.collection = Some(name.as_str());
        let call = Call::post("query").json(&body).repeat(Repeat::Read);
        let outcome = self.client.call_json(call).await;
        match (&outcome, unknown_route) {
            (Err(error), Some(first)) if is_unknown_route(error) => return Err(first),
            (Ok(_), Some(_)) => self.only_query_route.store(true, Ordering::Relaxed),
            _ => {}
        }
        outcome
    }

    /// The responses of the collections that could be searched.
    async fn search_in_one_call(
        &self,
        names: &[CollectionName],
        query: &SearchQuery,
    ) -> Result<HashMap<CollectionName, SearchResponse>, BackendError> {
        let mut body = request(query)?;
        body.collections = Some(names.iter().map(CollectionName::as_str).collect());
        body.per_collection = Some(true);
        let call = Call::post("query").json(&body).repeat(Repeat::Read);
        let mut answer: AnswerBody = self.client.call_json(call).await?;
        let mut metadata = answer.collection_metadata.take().unwrap_or_default();
        let failed = |name: &CollectionName| {
            let mut failures = answer.failures.iter();
            failures.any(|failure| failure.collection == name.as_str())
        };
        let mut responses: HashMap<CollectionName, SearchResponse> = names
            .iter()
            .filter(|name| !failed(name))
            .map(|name| {
                let metadata = match metadata.remove(name.as_str()) {
                    Some(Value::Object(metadata)) => metadata,
                    _ => Metadata::new(),
                };
                (name.clone(), response(&answer, metadata))
            })
            .collect();
        let knows_reranking = answer.reranked.is_some();
        for mut hit in answer.results {
            let name = hit
                .collection
                .take()
                .and_then(|name| CollectionName::parse(name).ok());
            match name.and_then(|name| responses.get_mut(&name)) {
                Some(response) => response.hits.push(self.read_hit(hit, query)?),
                None => {
                    let reason = "a result names none of the requested collections";
                    return Err(self.client.bad_answer(reason).into());
                }
            }
        }
        let completed = responses
            .into_iter()
            .map(|(name, response)| async { (name, self.complete(query, response, knows_reranking).await) });
        Ok(join_all(completed).await.into_iter().collect())
    }

    /// Numbers the hits, and applies the fields of a query that a foreign server may ignore.
    async fn complete(
        &self,
        query: &SearchQuery,
        mut response: SearchResponse,
        knows_reranking: bool,
    ) -> SearchResponse {
        for (place, hit) in response.hits.iter_mut().enumerate() {
            number(hit, place, query.mode);
        }
        if let Some(max_distance) = query.max_distance {
            response
                .hits
                .retain(|hit| hit.distance.is_none_or(|distance| distance <= max_distance));
        }
        let was_reranked = knows_reranking || response.hits.iter().any(|hit| hit.rerank.is_some());
        if query.rerank && !was_reranked {
            response.hits.truncate(MAX_RERANKED.max(query.top_k));
            if let Err(reason) = self.rerank_hits(query, &mut response).await {
                let service = self.client.service();
                response.warn(format!("not reranked by service '{service}': {reason}"));
            }
        }
        response.hits.truncate(query.top_k);
        response
    }

    /// The error is the reason for the client.
    async fn rerank_hits(&self, query: &SearchQuery, response: &mut SearchResponse) -> Result<(), String> {
        let Some(text) = &query.text else {
            return Err("it needs a 'query' text, and only a vector was given".to_owned());
        };
        let texts: Vec<&str> = response
            .hits
            .iter()
            .map(|hit| hit.document.text.as_str())
            .collect();
        let ranked = self.rerank_texts(text, &texts, query.top_k).await;
        let ranked = ranked.map_err(|error| error.public())?;
        let mut hits: Vec<Option<SearchHit>> =
            std::mem::take(&mut response.hits).into_iter().map(Some).collect();
        let in_order = ranked.into_iter().filter_map(|ranked| {
            let mut hit = hits.get_mut(ranked.index)?.take()?;
            hit.rerank = Some(RerankedFrom {
                score: ranked.score,
                original_rank: ranked.index + 1,
            });
            Some(hit)
        });
        response.hits = in_order.collect();
        response.reranked = true;
        Ok(())
    }

    fn read_hit(&self, hit: HitBody, query: &SearchQuery) -> Result<SearchHit, BackendError> {
        let text = hit.text.unwrap_or_default();
        let metadata = hit.metadata.unwrap_or_default();
        let id = hit.id.unwrap_or_else(|| content_id(&text, &metadata));
        let document = Document {
            id: self.read_id(id)?,
            text,
            metadata,
        };
        let siblings = hit.siblings.map(|siblings| {
            let read = |sibling: DocumentBody| self.read_document(sibling).map(Arc::new);
            siblings.into_iter().map(read).collect::<Result<Vec<_>, _>>()
        });
        let from_score = hit.score.filter(|score| (0.0..=1.0).contains(score));
        let from_score = from_score.filter(|_| query.mode.uses_vectors());
        let ranks = match hit.explain {
            Some(explain) => HitRanks {
                dense: explain.dense.map(Rank::from),
                keyword: explain.keyword.map(Rank::from),
                fused: explain.fused.map(Rank::from),
            },
            None => HitRanks {
                // The rank follows from the order of the hits.
                keyword: hit.keyword_score.map(|score| Rank { rank: 0, score }),
                ..HitRanks::default()
            },
        };
        Ok(SearchHit {
            document,
            distance: hit
                .distance
                .or_else(|| from_score.map(|score| 2.0 * (1.0 - score))),
            ranks,
            rerank: hit.rerank_score.map(|score| RerankedFrom {
                score,
                original_rank: hit.original_rank.unwrap_or_default(),
            }),
            siblings: siblings.transpose()?,
        })
    }
}

/// A stable id for a result without one.
fn content_id(text: &str, metadata: &Metadata) -> String {
    let mut hash = Sha256::new();
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text.as_bytes());
    hash.update(Value::Object(metadata.clone()).to_string().as_bytes());
    let hex: String = hash.finalize()[..16]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("doc_{hex}")
}

/// A response without its hits.
fn response(body: &AnswerBody, collection_metadata: Metadata) -> SearchResponse {
    let timings = body.timings_ms.iter().filter_map(|(stage, millis)| {
        Some(StageTime {
            stage: stage.clone().into(),
            took: Duration::try_from_secs_f64(millis / 1e3).ok()?,
        })
    });
    SearchResponse {
        hits: Vec::with_capacity(body.results.len()),
        collection_metadata,
        warnings: body.warnings.clone(),
        reranked: body.reranked.unwrap_or_default(),
        timings: timings.collect(),
    }
}

/// Fills in the rank of a hit in the only ranking of its mode, where the server did not explain it.
fn number(hit: &mut SearchHit, place: usize, mode: SearchMode) {
    let rank = match hit.rerank {
        Some(reranked) if reranked.original_rank > 0 => reranked.original_rank,
        _ => place + 1,
    };
    match mode {
        SearchMode::Dense if hit.ranks.dense.is_none() => {
            hit.ranks.dense = hit.score().map(|score| Rank {
                rank,
                score: score.into(),
            });
        }
        SearchMode::Keyword => {
            if let Some(keyword) = hit.ranks.keyword.as_mut().filter(|keyword| keyword.rank == 0) {
                keyword.rank = rank;
            }
        }
        SearchMode::Hybrid => hit.ranks.keyword = hit.ranks.keyword.filter(|keyword| keyword.rank > 0),
        SearchMode::Dense => {}
    }
}

/// The body of a query, without collections.
fn request(query: &SearchQuery) -> Result<QueryBody<'_>, BackendError> {
    if query.text.is_none() && query.vector.is_none() {
        return Err(InvalidInput::new("'query' or 'query_embedding' is required").into());
    }
    // The API has one text for both rankings. Other words can only be sent where it is used for them alone.
    let only_for_words = query.mode == SearchMode::Keyword
        || query.mode == SearchMode::Hybrid && query.vector.is_some() && !query.rerank;
    let text = if only_for_words {
        query.words()
    } else {
        query.text.as_deref()
    };
    let weights = query.weights;
    Ok(QueryBody {
        collection: None,
        collections: None,
        per_collection: None,
        query: text,
        query_embedding: query.vector.as_ref().map(|vector| vector.values.as_slice()),
        top_k: query.top_k,
        filter: (!query.filter.is_everything()).then(|| filter_to_json(&query.filter)),
        ids: query
            .ids
            .as_ref()
            .map(|ids| ids.iter().map(DocumentId::as_str).collect()),
        max_distance: query.max_distance,
        mode: (query.mode != SearchMode::default()).then(|| query.mode.name()),
        weights: (weights != FusionWeights::default()).then_some(WeightsBody {
            dense: weights.dense,
            keyword: weights.keyword,
        }),
        rerank: query.rerank.then_some(true),
        expand: query.expand.as_ref().map(|expand| ExpandBody {
            field: &expand.field,
            max_chars: expand.max_chars,
        }),
        explain: true,
    })
}

/// A server that refuses a call may accept a smaller one. One that is too busy, or does not answer, would
/// not.
fn is_refusal(error: &CallError) -> bool {
    let refused = |status| (400..500).contains(&status) && status != 429;
    error.is_considered() || error.status().is_some_and(refused)
}

/// A 404 that is not about a collection.
fn is_unknown_route(error: &CallError) -> bool {
    let CallError::Answered(answer) = error else {
        return false;
    };
    let names_a_collection = || {
        let message = answer.message().unwrap_or_default();
        message.to_ascii_lowercase().contains("collection")
    };
    matches!(answer.status, 404 | 405) && !names_a_collection()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_depends_on_text_and_metadata_alone() {
        let metadata = |n: u64| Metadata::from_iter([("n".to_owned(), n.into())]);
        let id = content_id("text", &metadata(1));
        assert_eq!(id, content_id("text", &metadata(1)));
        assert!(id.starts_with("doc_") && id.len() == 36, "{id}");
        for other in [
            content_id("texts", &metadata(1)),
            content_id("text", &metadata(2)),
        ] {
            assert_ne!(id, other);
        }
    }
}
