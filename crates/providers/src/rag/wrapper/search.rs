//! Searching one collection, or several in one call.

use std::collections::HashMap;

use futures::future::join_all;
use ragstone_core::error::InvalidInput;
use ragstone_core::provider::{CallError, ProviderAnswer, ProviderError, ProviderHit, ProviderQuery};
use ragstone_core::{CollectionName, Metadata};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::filter_json::filter_to_json;
use super::{DocumentBody, Wrapper};
use crate::http::Call;

/// What the service routes take in one call at most.
const MAX_COLLECTIONS: usize = 64;

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
        let call = Call::post(Self::path(name, "/query")).json(&request(query)?);
        let answer: AnswerBody = self.client.call_json(call).await?;
        Ok(ProviderAnswer {
            hits: answer
                .results
                .into_iter()
                .map(|hit| self.read_hit(hit))
                .collect::<Result<_, _>>()?,
            collection_metadata: answer.collection_metadata.unwrap_or_default(),
            warnings: answer.warnings,
            extra: answer.extra,
        })
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
        Ok(answers)
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
