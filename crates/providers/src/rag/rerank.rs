//! Reranking by a service, with the documents coming back unchanged whenever it fails.

use std::collections::{HashMap, HashSet};

use ragstone_core::Metadata;
use ragstone_core::provider::{CallError, Reranked};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::{Call, ServiceClient};

#[derive(Deserialize)]
struct Answer {
    reranked: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
    score: f64,
}

/// Logs why documents stay as they are, and hands them back.
pub(super) fn unchanged(service: &str, documents: Vec<Metadata>, reason: &str) -> Reranked {
    tracing::warn!(service, reason, "documents are not reranked");
    with_warning(service, documents, reason)
}

/// The same after a call that brought nothing, of which the log tells more.
fn not_answered(error: &CallError, documents: Vec<Metadata>) -> Reranked {
    tracing::warn!(service = error.service(), %error, "documents are not reranked");
    with_warning(error.service(), documents, &error.public())
}

fn with_warning(service: &str, documents: Vec<Metadata>, reason: &str) -> Reranked {
    Reranked {
        documents,
        warning: Some(format!("not reranked by service '{service}': {reason}")),
    }
}

/// Asks the `/rerank` route of a service that has just been asked how it is.
pub(super) async fn rerank(
    client: &ServiceClient,
    account: Result<Metadata, CallError>,
    query: &str,
    documents: Vec<Metadata>,
    top_k: Option<usize>,
) -> Reranked {
    let service = client.service();
    let account = match account {
        Ok(account) => account,
        Err(error) => return not_answered(&error, documents),
    };
    if account.get("status").and_then(Value::as_str) == Some("unhealthy") {
        return unchanged(service, documents, "it says it is unhealthy");
    }
    if !account.contains_key("cross_encoder") {
        return unchanged(service, documents, "it has no cross-encoder loaded");
    }
    if documents.is_empty() {
        return Reranked {
            documents,
            warning: None,
        };
    }
    let ids = unique_ids(&documents);
    match scores(client, query, &documents, &ids, top_k).await {
        Ok(ranking) => Reranked {
            documents: in_order(documents, &ranking),
            warning: None,
        },
        Err(error) => not_answered(&error, documents),
    }
}

/// The id of each document, or one made of its place where it has none or another has the same.
fn unique_ids(documents: &[Metadata]) -> Vec<String> {
    let mut taken = HashSet::new();
    documents
        .iter()
        .enumerate()
        .map(|(index, document)| {
            let own = document.get("id").and_then(Value::as_str).unwrap_or_default();
            let mut id = own.to_owned();
            let mut suffix = 0;
            while id.is_empty() || !taken.insert(id.clone()) {
                id = format!("doc_{index}_{suffix}");
                suffix += 1;
            }
            id
        })
        .collect()
}

/// Places and scores of the documents, best first.
async fn scores(
    client: &ServiceClient,
    query: &str,
    documents: &[Metadata],
    ids: &[String],
    top_k: Option<usize>,
) -> Result<Vec<(usize, f64)>, CallError> {
    let texts: Vec<Value> = documents
        .iter()
        .zip(ids)
        .map(|(document, id)| json!({"id": id, "text": document.get("text").and_then(Value::as_str).unwrap_or_default()}))
        .collect();
    let mut body = json!({"query": query, "documents": texts});
    if let Some(top_k) = top_k {
        body["top_k"] = top_k.into();
    }
    let mut answer: Answer = client.call_json(Call::post("rerank").json(&body)).await?;
    let mut places: HashMap<&str, usize> = ids
        .iter()
        .enumerate()
        .map(|(place, id)| (id.as_str(), place))
        .collect();
    let expected = top_k.unwrap_or(documents.len()).min(documents.len());
    // A server that does not know `top_k` ranks them all.
    answer.reranked.truncate(expected);
    if answer.reranked.len() != expected {
        return Err(client.bad_answer(format!("{} of {expected} documents", answer.reranked.len())));
    }
    answer
        .reranked
        .iter()
        .map(|entry| match places.remove(entry.id.as_str()) {
            Some(place) if entry.score.is_finite() => Ok((place, entry.score)),
            _ => Err(client.bad_answer("a document that was not sent, or comes twice")),
        })
        .collect()
}

fn in_order(documents: Vec<Metadata>, ranking: &[(usize, f64)]) -> Vec<Metadata> {
    let mut documents: Vec<Option<Metadata>> = documents.into_iter().map(Some).collect();
    ranking
        .iter()
        .filter_map(|(place, score)| {
            let mut document = documents.get_mut(*place)?.take()?;
            document.insert("rerank_score".into(), (*score).into());
            document.insert("original_rank".into(), (place + 1).into());
            Some(document)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generate_fallback_document_ids() {
        let documents: Vec<Metadata> = [
            json!({"id": "a"}),
            json!({}),
            json!({"id": "a"}),
            json!({"id": "doc_1_0"}),
            json!({"id": 7}),
        ]
        .into_iter()
        .map(|d| d.as_object().unwrap().clone())
        .collect();
        let ids = unique_ids(&documents);
        assert_eq!(ids.iter().collect::<HashSet<_>>().len(), 5);
        assert_eq!(ids[0], "a");
        assert!(ids.iter().all(|id| !id.is_empty()));
    }
}
