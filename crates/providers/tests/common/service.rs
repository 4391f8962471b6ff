//! A small RAG service that speaks the service routes, in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Mutex;

use ragstone_core::filter::Scalar;
use ragstone_core::fusion::{FusionWeights, HitRanks, Rank, fuse};
use ragstone_core::siblings::Expand;
use ragstone_core::vector::normalise;
use ragstone_core::{Filter, Metadata};
use serde_json::{Value, json};

use super::server::{Reply, Seen, TestServer};
use super::{MODEL, letter_counts};

#[derive(Default)]
struct Collection {
    name: String,
    metadata: Metadata,
    documents: Vec<(Value, Vec<f32>)>,
    /// The models of imported documents, by id.
    models: BTreeMap<String, Value>,
}

type Answer = Result<Value, (u16, String)>;

/// `cross_encoder` says whether it has one.
pub async fn start(cross_encoder: bool) -> TestServer {
    let state: Mutex<Vec<Collection>> = Mutex::default();
    TestServer::start(move |seen, _| {
        let mut state = state.lock().unwrap();
        match answer(&mut state, seen, cross_encoder) {
            Ok(body) => Reply::json(body),
            Err((status, detail)) => Reply::status(status, json!({"detail": detail})),
        }
    })
    .await
}

fn answer(state: &mut Vec<Collection>, seen: &Seen, cross_encoder: bool) -> Answer {
    let parts: Vec<&str> = seen.path().trim_matches('/').split('/').collect();
    match (seen.method.as_str(), parts.as_slice()) {
        ("GET", ["health"]) => {
            let mut health = json!({"status": "healthy", "timestamp": "2026-01-01T00:00:00Z", "version": "t",
                "collections_count": state.len(), "storage_bytes": 1});
            if cross_encoder {
                health["cross_encoder"] = json!({"model": "x", "status": "loaded"});
            }
            Ok(health)
        }
        ("POST", ["rerank"]) => Ok(rerank(&seen.json())),
        ("POST", ["query"]) => search_several(state, &seen.json()),
        ("POST", ["collections"]) => create(state, seen.json()),
        ("GET", ["collections"]) => {
            Ok(json!({"collections": state.iter().map(describe).collect::<Vec<_>>()}))
        }
        (method, ["collections", name, rest @ ..]) => {
            let found = state.iter().position(|c| c.name == *name);
            let at = found.ok_or_else(|| (404, format!("Collection '{name}' not found")))?;
            match (method, rest) {
                ("GET", []) => Ok(describe(&state[at])),
                ("DELETE", []) => {
                    state.remove(at);
                    Ok(json!({"status": "deleted", "name": name}))
                }
                ("PUT", ["metadata"]) => Ok(update(&mut state[at], seen)),
                ("POST", ["documents"]) => add(&mut state[at], &seen.json()),
                ("GET", ["documents"]) => page(&state[at], seen),
                ("DELETE", ["documents", "all"]) => {
                    let count = std::mem::take(&mut state[at].documents).len();
                    Ok(json!({"status": "emptied", "collection": name, "count_deleted": count}))
                }
                ("DELETE", ["documents"]) => delete(&mut state[at], &seen.json()),
                ("GET", ["documents", id]) => {
                    let id = decoded(id);
                    let found = state[at].documents.iter().find(|(d, _)| d["id"] == id);
                    let missing = || (404, format!("Document '{id}' not found in collection '{name}'"));
                    found.map(|(document, _)| document.clone()).ok_or_else(missing)
                }
                ("GET", ["export"]) => Ok(export(&state[at], seen)),
                ("POST", ["import"]) => Ok(import(&mut state[at], &seen.json())),
                ("GET", ["metadata-values"]) => Ok(values(&state[at], &parameter(seen, "field"))),
                ("POST", ["query"]) => search(&state[at], &seen.json()),
                _ => Err((405, "Method Not Allowed".into())),
            }
        }
        _ => Err((404, "Not Found".into())),
    }
}

fn parameter(seen: &Seen, name: &str) -> String {
    let url = reqwest::Url::parse(&format!("http://x{}", seen.target)).unwrap();
    let found = url.query_pairs().find(|(key, _)| key == name);
    found.map(|(_, value)| value.into_owned()).unwrap_or_default()
}

/// A segment of a path without its escapes.
fn decoded(segment: &str) -> String {
    let as_query = segment.replace('+', "%2B").replace('&', "%26");
    let url = reqwest::Url::parse(&format!("http://x/?id={as_query}")).unwrap();
    let (_, id) = url.query_pairs().next().unwrap();
    id.into_owned()
}

fn describe(collection: &Collection) -> Value {
    json!({"name": collection.name, "count": collection.documents.len(), "metadata": collection.metadata})
}

fn create(state: &mut Vec<Collection>, body: Value) -> Answer {
    let name = body["name"].as_str().unwrap_or_default().to_owned();
    if state.iter().any(|c| c.name == name) {
        return Err((409, format!("Collection '{name}' already exists")));
    }
    let metadata = body["metadata"].as_object().cloned().unwrap_or_default();
    let answer = json!({"status": "created", "name": name, "metadata": metadata});
    state.push(Collection {
        name,
        metadata,
        ..Collection::default()
    });
    Ok(answer)
}

fn update(collection: &mut Collection, seen: &Seen) -> Value {
    let merge = parameter(seen, "merge") == "true";
    if !merge {
        collection.metadata.clear();
    }
    collection
        .metadata
        .extend(seen.json()["metadata"].as_object().cloned().unwrap_or_default());
    json!({"status": "updated", "name": collection.name, "metadata": collection.metadata, "merge": merge})
}

fn model(collection: &Collection) -> Result<(), (u16, String)> {
    match collection.metadata.get("embedding_model").and_then(Value::as_str) {
        Some(MODEL) => Ok(()),
        Some(other) => Err((
            503,
            format!("Embedding model '{other}' not loaded. Available models: {MODEL}"),
        )),
        None => Err((
            400,
            format!(
                "Collection '{}' has no embedding_model in metadata.",
                collection.name
            ),
        )),
    }
}

fn vector(value: &Value) -> Option<Vec<f32>> {
    Some(
        value
            .as_array()?
            .iter()
            .map(|x| x.as_f64().unwrap() as f32)
            .collect(),
    )
}

fn has_width(collection: &Collection, vector: &[f32]) -> bool {
    collection
        .documents
        .first()
        .is_none_or(|(_, first)| first.len() == vector.len())
}

fn add(collection: &mut Collection, body: &Value) -> Answer {
    let documents = body["documents"].as_array().unwrap();
    let given = documents.iter().filter(|d| d.get("embedding").is_some()).count();
    if given == 0 {
        model(collection)?;
    } else if let Some(index) = documents.iter().position(|d| d.get("embedding").is_none()) {
        let needed = "All documents must include pre-computed embeddings";
        return Err((400, format!("{needed}: the document at index {index} has not")));
    }
    let vectors: Vec<Vec<f32>> = documents
        .iter()
        .map(|document| {
            vector(&document["embedding"])
                .unwrap_or_else(|| letter_counts(document["text"].as_str().unwrap()))
        })
        .collect();
    if let Some(index) = vectors.iter().position(|vector| !has_width(collection, vector)) {
        let mismatch = "Embedding dimension mismatch";
        return Err((
            400,
            format!("{mismatch}: the document at index {index} has others"),
        ));
    }
    for (document, vector) in documents.iter().zip(vectors) {
        let stored =
            json!({"id": document["id"], "text": document["text"], "metadata": document["metadata"]});
        put(collection, stored, vector);
    }
    let ids: Vec<&Value> = documents.iter().map(|d| &d["id"]).collect();
    Ok(json!({"status": "added", "collection": collection.name, "count": ids.len(), "ids": ids}))
}

fn put(collection: &mut Collection, document: Value, vector: Vec<f32>) {
    let mut there = collection.documents.iter_mut();
    match there.find(|(d, _)| d["id"] == document["id"]) {
        Some(there) => *there = (document, vector),
        None => collection.documents.push((document, vector)),
    }
}

fn export(collection: &Collection, seen: &Seen) -> Value {
    let from = parameter(seen, "after")
        .parse()
        .map_or(0, |after: usize| after + 1);
    let limit: usize = parameter(seen, "limit").parse().unwrap();
    let page = collection.documents.iter().skip(from).take(limit);
    let documents: Vec<Value> = page
        .map(|(document, vector)| {
            let mut unit = vector.clone();
            let mut line = document.clone();
            line["norm"] = normalise(&mut unit).into();
            line["embedding"] = json!(unit);
            if let Some(model) = collection.models.get(document["id"].as_str().unwrap()) {
                line["model"] = model.clone();
            }
            line
        })
        .collect();
    let end = from + documents.len();
    json!({"documents": documents, "last": end.checked_sub(1), "more": end < collection.documents.len()})
}

fn import(collection: &mut Collection, body: &Value) -> Value {
    let lines = body["documents"].as_array().unwrap();
    for line in lines {
        let norm = line["norm"].as_f64().unwrap() as f32;
        let given = vector(&line["embedding"]).unwrap();
        if !line["model"].is_null() {
            let id = line["id"].as_str().unwrap().to_owned();
            collection.models.insert(id, line["model"].clone());
        }
        let document = json!({"id": line["id"], "text": line["text"], "metadata": line["metadata"]});
        put(collection, document, given.iter().map(|x| x * norm).collect());
    }
    json!({"status": "imported", "collection": collection.name, "count": lines.len()})
}

fn matches(filter: &Filter, document: &Value) -> bool {
    filter.matches(document["metadata"].as_object().unwrap())
}

fn parse(filter: &Value) -> Result<Filter, (u16, String)> {
    Filter::parse(filter).map_err(|e| (400, e.to_string()))
}

fn page(collection: &Collection, seen: &Seen) -> Answer {
    let text = parameter(seen, "where");
    let filter = match text.as_str() {
        "" => Filter::everything(),
        text => Filter::parse_text(text).map_err(|e| (400, e.to_string()))?,
    };
    let number = |name| parameter(seen, name).parse::<usize>().unwrap();
    let found: Vec<&Value> = collection
        .documents
        .iter()
        .map(|(d, _)| d)
        .filter(|d| matches(&filter, d))
        .collect();
    let page: Vec<&&Value> = found
        .iter()
        .skip(number("offset"))
        .take(number("limit").min(1000))
        .collect();
    Ok(json!({"documents": page, "count": page.len(), "total": found.len()}))
}

fn delete(collection: &mut Collection, body: &Value) -> Answer {
    let before = collection.documents.len();
    if let Some(ids) = body["ids"].as_array() {
        collection.documents.retain(|(d, _)| !ids.contains(&d["id"]));
    } else {
        let filter = parse(&body["where"])?;
        collection.documents.retain(|(d, _)| !matches(&filter, d));
    }
    let count = before - collection.documents.len();
    Ok(json!({"status": "deleted", "collection": collection.name, "count": count}))
}

fn values(collection: &Collection, field: &str) -> Value {
    let mut found = BTreeSet::new();
    for (document, _) in &collection.documents {
        match document["metadata"].get(field) {
            Some(Value::Array(elements)) => found.extend(elements.iter().filter_map(Scalar::from_json)),
            Some(value) => found.extend(Scalar::from_json(value)),
            None => {}
        }
    }
    let values: Vec<Value> = found.iter().map(Scalar::to_json).collect();
    json!({"field": field, "values": values, "count": values.len()})
}

/// A search of each collection, as `per_collection` has it.
fn search_several(state: &[Collection], body: &Value) -> Answer {
    assert_eq!(body["per_collection"], true);
    let (mut results, mut failures, mut metadata) = (Vec::new(), Vec::new(), json!({}));
    for name in body["collections"].as_array().unwrap() {
        let Some(collection) = state.iter().find(|c| c.name == *name) else {
            failures.push(json!({"collection": name, "detail": "Collection not found"}));
            continue;
        };
        let mut answer = search(collection, body)?;
        for hit in answer["results"].as_array_mut().unwrap() {
            hit["collection"] = name.clone();
            results.push(hit.take());
        }
        metadata[&collection.name] = answer["collection_metadata"].take();
    }
    Ok(json!({"results": results, "collection_metadata": metadata, "failures": failures}))
}

/// How many of the query's words a text has.
fn word_count(query: &str, text: &str) -> usize {
    query.split(' ').filter(|word| text.contains(word)).count()
}

fn search(collection: &Collection, body: &Value) -> Answer {
    let mode = body["mode"].as_str().unwrap_or("dense");
    let query = match (vector(&body["query_embedding"]), body["query"].as_str()) {
        (Some(vector), _) => vector,
        (None, Some(text)) if mode == "keyword" => letter_counts(text),
        (None, Some(text)) => {
            model(collection)?;
            letter_counts(text)
        }
        (None, None) => return Err((400, "'query' is required".into())),
    };
    if mode != "keyword" && !has_width(collection, &query) {
        return Err((400, "Embedding dimension mismatch".into()));
    }
    let filter = parse(&body["where"])?;
    let limit = body["max_distance"].as_f64().unwrap_or(2.0);
    let candidates: Vec<(usize, &Value, f64)> = collection
        .documents
        .iter()
        .enumerate()
        .filter(|(_, (d, _))| matches(&filter, d))
        .filter(|(_, (d, _))| body["ids"].as_array().is_none_or(|ids| ids.contains(&d["id"])))
        .map(|(at, (d, v))| (at, d, distance(&query, v)))
        .filter(|(_, _, distance)| mode == "keyword" || *distance <= limit)
        .collect();
    let ranking = |score: &dyn Fn(&Value, f64) -> f64| {
        let scored = candidates
            .iter()
            .map(|(at, d, distance)| (*at, score(d, *distance)));
        let mut scored: Vec<(usize, f64)> = scored.filter(|(_, score)| *score > 0.0).collect();
        scored.sort_by(|a, b| b.1.total_cmp(&a.1));
        scored
    };
    let words = body["query"].as_str().unwrap_or_default();
    let dense = ranking(&|_, distance| 1.0 - distance / 2.0 + f64::MIN_POSITIVE);
    let keyword = ranking(&|d, _| word_count(words, d["text"].as_str().unwrap()) as f64);
    let (dense, keyword) = match mode {
        "dense" => (dense, Vec::new()),
        "keyword" => (Vec::new(), keyword),
        _ => (dense, keyword),
    };
    let mut ranked = fuse(&dense, &keyword, FusionWeights::default());
    ranked.truncate(body["top_k"].as_u64().unwrap() as usize);
    let found: HashMap<usize, (&Value, f64)> =
        candidates.iter().map(|(at, d, far)| (*at, (*d, *far))).collect();
    let results: Vec<Value> = ranked
        .into_iter()
        .map(|(at, ranks)| {
            let (document, distance) = found[&at];
            let mut hit = document.clone();
            if mode != "keyword" {
                hit["distance"] = distance.into();
                hit["score"] = (1.0 - distance / 2.0).into();
            }
            if body["explain"] == true {
                hit["explain"] = explanation(ranks, mode);
            }
            if let Ok(Expand { field, max_chars }) = Expand::from_json(&body["expand"])
                && let Some(shared) = document["metadata"].get(&field)
            {
                let siblings = collection.documents.iter().map(|(d, _)| d);
                hit["siblings"] = siblings
                    .filter(|d| d["metadata"].get(&field) == Some(shared))
                    // As if no budget had room for more than the hit itself.
                    .filter(|d| max_chars.is_none() || d["id"] == document["id"])
                    .cloned()
                    .collect();
            }
            hit
        })
        .collect();
    Ok(json!({"results": results, "collection_metadata": collection.metadata, "timings_ms": {"dense": 1.5}}))
}

fn explanation(ranks: HitRanks, mode: &str) -> Value {
    let stage = |rank: Rank| json!({"rank": rank.rank, "score": rank.score});
    let fused = ranks.fused.filter(|_| mode == "hybrid");
    let stages = [
        ("dense", ranks.dense),
        ("keyword", ranks.keyword),
        ("fused", fused),
    ];
    let stages = stages
        .into_iter()
        .filter_map(|(name, rank)| Some((name.to_owned(), stage(rank?))));
    Value::Object(stages.collect())
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let dot = |x: &[f32], y: &[f32]| {
        x.iter()
            .zip(y)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum::<f64>()
    };
    1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// Scores by length: the longest text answers best.
fn rerank(body: &Value) -> Value {
    let length = |d: &Value| d["text"].as_str().unwrap().len();
    let mut ranked: Vec<(usize, &Value)> = body["documents"].as_array().unwrap().iter().enumerate().collect();
    ranked.sort_by_key(|(_, d)| std::cmp::Reverse(length(d)));
    if let Some(top_k) = body["top_k"].as_u64() {
        ranked.truncate(top_k as usize);
    }
    let reranked: Vec<Value> = ranked
        .iter()
        .map(|(place, d)| json!({"id": d["id"], "score": length(d), "original_rank": place + 1}))
        .collect();
    json!({"reranked": reranked})
}
