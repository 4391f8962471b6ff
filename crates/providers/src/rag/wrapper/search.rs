//! Searching one collection, or several in one call.

use std::collections::HashMap;

use futures::future::join_all;
use ragstone_core::error::InvalidInput;
use ragstone_core::provider::{
    CallError, ProviderAnswer, ProviderError, ProviderHit, ProviderQuery, RagProvider,
};
use ragstone_core::{CollectionName, Metadata};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::filter_json::filter_to_json;
use super::super::rerank;
use super::{DocumentBody, Wrapper};
use crate::http::Call;

/// What the service routes take in one call at most.
const MAX_COLLECTIONS: usize = 64;
/// Of more results than were asked for, so many are reranked.
const MOST_RERANKED: usize = 200;

#[derive(Deserialize)]
struct HitBody {
    id: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    metadata: Option<Metadata>,
    #[serde(default)]
    distance: Option<f32>,
    #[serde(default)]
    score: Option<f64>,
    #[serde(flatten)]
    extra: Metadata,
}

#[derive(Deserialize)]
struct AnswerBody {
    results: Vec<HitBody>,
    /// Of several collections, that of each under its name.
    #[serde(default)]
    collection_metadata: Option<Metadata>,
    #[serde(default)]
    warnings: Vec<String>,
    #[serde(default)]
    failures: Vec<FailureBody>,
    #[serde(flatten)]
    extra: Metadata,
}

/// What a server may overlook of a query.
struct Asked {
    text: Option<String>,
    top_k: usize,
    max_distance: Option<f32>,
    rerank: bool,
}

impl Asked {
    fn of(query: &ProviderQuery) -> Self {
        Self {
            text: query.text.clone(),
            top_k: query.top_k,
            max_distance: query.max_distance,
            rerank: query.options.get("rerank").and_then(Value::as_bool) == Some(true),
        }
    }
}

/// A server that knows of reranking says whether it was done, or shows it.
fn tells_of_reranking(answer: &ProviderAnswer) -> bool {
    let shown = |hit: &ProviderHit| hit.extra.contains_key("rerank_score");
    answer.extra.contains_key("reranked") || answer.hits.iter().any(shown)
}

#[derive(Deserialize)]
struct FailureBody {
    collection: String,
}

impl Wrapper {
    pub(super) async fn search_one(
        &self,
        name: &CollectionName,
        query: ProviderQuery,
    ) -> Result<ProviderAnswer, ProviderError> {
        let asked = Asked::of(&query);
        let call = Call::post(Self::path(name, "/query")).json(&request(query)?);
        let answer: AnswerBody = self.client.call_json(call).await?;
        let answer = ProviderAnswer {
            hits: answer
                .results
                .into_iter()
                .map(|hit| self.read_hit(hit))
                .collect::<Result<_, _>>()?,
            collection_metadata: answer.collection_metadata.unwrap_or_default(),
            warnings: answer.warnings,
            extra: answer.extra,
        };
        Ok(self.as_asked(&asked, answer).await)
    }

    /// Makes up for what a server of other make did not heed, because it knows no such field.
    async fn as_asked(&self, asked: &Asked, mut answer: ProviderAnswer) -> ProviderAnswer {
        if let Some(max_distance) = asked.max_distance {
            answer
                .hits
                .retain(|hit| hit.distance.is_none_or(|distance| distance <= max_distance));
        }
        if asked.rerank && !tells_of_reranking(&answer) {
            self.rerank_hits(asked, &mut answer).await;
        }
        answer.hits.truncate(asked.top_k);
        answer
    }

    async fn rerank_hits(&self, asked: &Asked, answer: &mut ProviderAnswer) {
        answer.hits.truncate(MOST_RERANKED.max(asked.top_k));
        let outcome = match &asked.text {
            Some(text) => {
                let documents = answer.hits.iter().enumerate().map(|(place, hit)| {
                    Metadata::from_iter([
                        ("id".to_owned(), Value::from(place.to_string())),
                        ("text".to_owned(), Value::from(hit.document.text.as_str())),
                    ])
                });
                self.rerank(text, documents.collect(), Some(asked.top_k)).await
            }
            None => rerank::unchanged(
                self.client.service(),
                Vec::new(),
                "it takes a 'query', not a vector",
            ),
        };
        answer
            .extra
            .insert("reranked".into(), outcome.warning.is_none().into());
        if let Some(warning) = outcome.warning {
            answer.warnings.push(warning);
            return;
        }
        let mut hits: Vec<Option<ProviderHit>> =
            std::mem::take(&mut answer.hits).into_iter().map(Some).collect();
        let in_order = outcome.documents.into_iter().filter_map(|mut document| {
            let place: usize = document.get("id")?.as_str()?.parse().ok()?;
            let mut hit = hits.get_mut(place)?.take()?;
            for field in ["rerank_score", "original_rank"] {
                if let Some(value) = document.remove(field) {
                    hit.extra.insert(field.to_owned(), value);
                }
            }
            Some(hit)
        });
        answer.hits = in_order.collect();
    }

    /// One call for all of them. What it does not answer, because the server does not know how to or
    /// because a collection fails, is asked for alone, so that each failure says its own reason.
    pub(super) async fn search_at_once(
        &self,
        names: &[CollectionName],
        query: ProviderQuery,
    ) -> Vec<Result<ProviderAnswer, ProviderError>> {
        let mut together = if (2..=MAX_COLLECTIONS).contains(&names.len()) {
            match self.ask_for_several(names, query.clone()).await {
                Ok(answers) => answers,
                Err(ProviderError::Call(error)) if !is_refusal(&error) => {
                    return names.iter().map(|_| Err(error.clone().into())).collect();
                }
                Err(_) => HashMap::new(),
            }
        } else {
            HashMap::new()
        };
        let answers = names.iter().map(|name| {
            let answer = together.remove(name);
            let query = query.clone();
            async move {
                match answer {
                    Some(answer) => Ok(answer),
                    None => self.search_one(name, query).await,
                }
            }
        });
        join_all(answers).await
    }

    /// The answers of the collections that could be searched.
    async fn ask_for_several(
        &self,
        names: &[CollectionName],
        query: ProviderQuery,
    ) -> Result<HashMap<CollectionName, ProviderAnswer>, ProviderError> {
        let asked = Asked::of(&query);
        let mut body = request(query)?;
        let listed: Vec<&str> = names.iter().map(CollectionName::as_str).collect();
        body.insert("collections".into(), json!(listed));
        body.insert("per_collection".into(), true.into());
        let answer: AnswerBody = self.client.call_json(Call::post("query").json(&body)).await?;
        let mut metadata = answer.collection_metadata.unwrap_or_default();
        let mut answers: HashMap<CollectionName, ProviderAnswer> = names
            .iter()
            .filter(|name| {
                answer
                    .failures
                    .iter()
                    .all(|failure| failure.collection != name.as_str())
            })
            .map(|name| {
                let empty = ProviderAnswer {
                    hits: Vec::new(),
                    collection_metadata: match metadata.remove(name.as_str()) {
                        Some(Value::Object(metadata)) => metadata,
                        _ => Metadata::new(),
                    },
                    warnings: answer.warnings.clone(),
                    extra: answer.extra.clone(),
                };
                (name.clone(), empty)
            })
            .collect();
        for mut hit in answer.results {
            let collection = match hit.extra.remove("collection") {
                Some(Value::String(collection)) => CollectionName::parse(collection).ok(),
                _ => None,
            };
            match collection.and_then(|name| answers.get_mut(&name)) {
                Some(answer) => answer.hits.push(self.read_hit(hit)?),
                None => {
                    let reason = "a result is of no collection that was asked for";
                    return Err(self.client.bad_answer(reason).into());
                }
            }
        }
        let finished = answers
            .into_iter()
            .map(|(name, answer)| async { (name, self.as_asked(&asked, answer).await) });
        Ok(join_all(finished).await.into_iter().collect())
    }

    fn read_hit(&self, hit: HitBody) -> Result<ProviderHit, ProviderError> {
        Ok(ProviderHit {
            document: self.read_document(DocumentBody {
                id: hit.id,
                text: hit.text,
                metadata: hit.metadata,
            })?,
            distance: hit.distance,
            score: hit.score,
            extra: hit.extra,
        })
    }
}

/// The body of a search, without the collections.
fn request(query: ProviderQuery) -> Result<Metadata, ProviderError> {
    if query.text.is_none() && query.vector.is_none() {
        return Err(InvalidInput::new("'query' or 'query_embedding' is required").into());
    }
    let mut body = query.options;
    body.insert("top_k".into(), query.top_k.into());
    if let Some(text) = query.text {
        body.insert("query".into(), text.into());
    }
    if let Some(vector) = query.vector {
        body.insert("query_embedding".into(), vector.into());
    }
    if !query.filter.is_everything() {
        body.insert("where".into(), filter_to_json(&query.filter));
    }
    if let Some(ids) = query.among {
        let ids: Vec<Value> = ids.iter().map(|id| id.as_str().into()).collect();
        body.insert("ids".into(), ids.into());
    }
    if let Some(max_distance) = query.max_distance {
        body.insert("max_distance".into(), max_distance.into());
    }
    Ok(body)
}

/// A server that refuses the call as such may still answer one for less; one that is too busy, or
/// does not answer, would only be asked in vain.
fn is_refusal(error: &CallError) -> bool {
    let refused = |status| (400..500).contains(&status) && status != 429;
    error.is_considered() || error.status().is_some_and(refused)
}
