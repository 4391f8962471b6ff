//! The conformance suite that every [`Backend`] must pass.
//!
//! [`check_backend`] panics with a message at the first difference. It works in collections of its
//! own, whose names begin with `conformance-`, and deletes them in the end.

mod documents;
mod search;

use ragstone_core::backend::{Backend, BackendError, Capability, HealthStatus};
use ragstone_core::call::CallError;
use ragstone_core::document::NewDocument;
use ragstone_core::search::{QueryVector, SearchQuery};
use ragstone_core::storage::Page;
use ragstone_core::{CollectionName, Document, DocumentId, Metadata};
use serde_json::{Value, json};

use documents::*;
use search::*;

const WIDTH: usize = 8;
const EVERYTHING: Page = Page {
    limit: 1000,
    offset: 0,
};

/// Runs the whole suite. `embedding_model` is the id of a model that the backend can embed with.
pub async fn check_backend(backend: &dyn Backend, embedding_model: Option<&str>) {
    let health = backend.health().await;
    assert_eq!(health.status, HealthStatus::Healthy, "{health:?}");
    assert!(
        health.latency_ms >= 0.0 && health.timestamp.ends_with('Z'),
        "{health:?}"
    );
    assert!(health.details.contains_key("collections_count"), "{health:?}");
    let capabilities = health.capabilities(backend.capabilities());

    collections_are_created_listed_and_deleted(backend).await;
    metadata_is_replaced_or_merged(backend).await;
    concurrent_merges_are_all_kept(backend).await;
    concurrent_writes_of_a_document_leave_one_of_them(backend).await;
    documents_come_back_as_they_were_added(backend).await;
    filters_mean_the_same_everywhere(backend).await;
    deletions_count_existing_documents(backend).await;
    searches_are_exact_under_any_filter(backend).await;
    several_collections_and_queries_are_searched_at_once(backend).await;
    vectors_of_any_length_keep_their_direction(backend).await;
    exports_can_be_imported(backend).await;
    invalid_requests_are_refused(backend).await;
    if capabilities.contains(&Capability::KeywordSearch) {
        words_are_ranked(backend).await;
    }
    reranking_orders_texts_or_fails(backend, capabilities.contains(&Capability::Rerank)).await;
    if let Some(model) = embedding_model {
        texts_are_embedded_by_the_collections_model(backend, model).await;
    }
}

/// The HTTP status of a failure, whichever backend it comes from.
pub fn status(error: &BackendError) -> u16 {
    match error {
        BackendError::CollectionNotFound(_) => 404,
        BackendError::CollectionExists(_) => 409,
        BackendError::Invalid(_) | BackendError::Unsupported(_) | BackendError::NoModel { .. } => 400,
        BackendError::ModelNotLoaded { .. } | BackendError::NoReranker => 503,
        BackendError::Model(_) | BackendError::Storage(_) => 500,
        BackendError::Call(error) => error.status().unwrap_or(502),
    }
}

fn ok<T>(outcome: Result<T, BackendError>, what: &str) -> T {
    match outcome {
        Ok(value) => value,
        Err(error) => panic!("{what}: {error}"),
    }
}

fn refused<T>(outcome: Result<T, BackendError>, expected: u16, what: &str) -> String {
    match outcome {
        Ok(_) => panic!("{what}: succeeded, {expected} was expected"),
        Err(error) => {
            assert_eq!(status(&error), expected, "{what}: {error}");
            match &error {
                BackendError::Call(CallError::Answered(answer)) => {
                    String::from_utf8_lossy(&answer.body).into_owned()
                }
                other => other.to_string(),
            }
        }
    }
}

fn object(value: Value) -> Metadata {
    match value {
        Value::Object(object) => object,
        other => panic!("not an object: {other}"),
    }
}

fn name(text: &str) -> CollectionName {
    CollectionName::parse(format!("conformance-{text}")).unwrap_or_else(|e| panic!("{e}"))
}

/// Makes an empty collection, also when an earlier run left one behind.
async fn fresh(backend: &dyn Backend, text: &str, metadata: Value) -> CollectionName {
    let name = name(text);
    let _ = backend.delete_collection(&name).await;
    ok(
        backend.create_collection(&name, object(metadata)).await,
        "creating",
    );
    name
}

fn document(id: &str, text: &str, metadata: Value) -> Document {
    Document {
        id: DocumentId::parse(id).unwrap_or_else(|e| panic!("{e}")),
        text: text.to_owned(),
        metadata: object(metadata),
    }
}

fn with_vector(document: Document, vector: Vec<f32>) -> NewDocument {
    NewDocument {
        document,
        embedding: Some(vector),
    }
}

/// The same vectors in every run, in no particular direction.
fn vector(seed: usize) -> Vec<f32> {
    let mut state = (seed as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..WIDTH)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32) / (1_u64 << 24) as f32 - 0.5
        })
        .collect()
}

/// Documents with every kind of value in every kind of field.
fn varied() -> Vec<Document> {
    let values = [
        json!({"f": 1, "g": "a"}),
        json!({"f": 1.0, "g": "b", "l": ["p", "q"]}),
        json!({"f": "1"}),
        json!({"f": true, "g": "ab"}),
        json!({"f": null}),
        json!({"f": [1, 2]}),
        json!({"f": ["1", "x"], "g": "c"}),
        json!({"f": {"x": 1}}),
        json!({"g": "a", "n": 5}),
        json!({"f": -2.5, "n": 7}),
        json!({"f": [], "n": 5.5}),
        json!({"f": 9_007_199_254_740_993_i64}),
        json!({"f": 9_007_199_254_740_992_i64}),
        json!({}),
        json!({"f": false, "$odd": 1, "": "empty"}),
        json!({"f": [[1]], "g": ""}),
    ];
    let of = |(i, v): (usize, Value)| document(&format!("d{i}"), &format!("text {i}"), v);
    values.into_iter().enumerate().map(of).collect()
}

fn dense(vector: Vec<f32>, top_k: usize) -> SearchQuery {
    SearchQuery {
        vector: Some(QueryVector::from_client(vector)),
        top_k,
        ..SearchQuery::default()
    }
}
