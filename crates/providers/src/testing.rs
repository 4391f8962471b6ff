//! The conformance suite that every [`Backend`] must pass.
//!
//! [`check_backend`] panics with a message at the first difference. It works in collections of its
//! own, whose names begin with `conformance-`, and deletes them in the end.

use futures::future::join_all;
use ragstone_core::backend::{Backend, BackendError, Capability, HealthStatus};
use ragstone_core::call::CallError;
use ragstone_core::document::NewDocument;
use ragstone_core::model::ModelIdentity;
use ragstone_core::search::{QueryVector, SearchHit, SearchMode, SearchQuery};
use ragstone_core::siblings::Expand;
use ragstone_core::storage::{ExportRange, ExportedDocument, MetadataUpdate, Page, Selection};
use ragstone_core::vector::normalise;
use ragstone_core::{CollectionName, Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

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

async fn collections_are_created_listed_and_deleted(backend: &dyn Backend) {
    let metadata =
        json!({"embedding_model": "none", "thresholds": {"match": 0.4}, "tags": ["a", 1, null], "n": null});
    let first = fresh(backend, "life", metadata.clone()).await;
    refused(
        backend.create_collection(&first, Metadata::new()).await,
        409,
        "creating twice",
    );
    let found = ok(backend.collection(&first).await, "reading");
    assert_eq!(
        (found.count, Value::Object(found.metadata)),
        (0, metadata.clone())
    );

    let second = fresh(backend, "life-2", json!({})).await;
    let listed = ok(backend.collections().await, "listing");
    let named: Vec<&str> = listed.iter().map(|c| c.name.as_str()).collect();
    assert!(named.is_sorted(), "{named:?}");
    let of_first = listed
        .iter()
        .find(|c| c.name == first)
        .map(|c| Value::Object(c.metadata.clone()));
    assert_eq!(of_first, Some(metadata));
    assert!(listed.iter().any(|c| c.name == second && c.metadata.is_empty()));

    for gone in [&first, &second] {
        ok(backend.delete_collection(gone).await, "deleting");
        refused(backend.collection(gone).await, 404, "reading what is gone");
        refused(
            backend.delete_collection(gone).await,
            404,
            "deleting what is gone",
        );
    }
    let everything = Filter::everything();
    refused(
        backend.documents(&first, &everything, EVERYTHING).await,
        404,
        "documents of none",
    );
    refused(backend.empty(&first).await, 404, "emptying none");
    refused(backend.metadata_values(&first, "f").await, 404, "values of none");
    let documents = vec![with_vector(document("a", "t", json!({})), vector(0))];
    refused(
        backend.add_documents(&first, documents).await,
        404,
        "adding to none",
    );
}

async fn metadata_is_replaced_or_merged(backend: &dyn Backend) {
    let name = fresh(backend, "metadata", json!({"a": 1, "b": [2]})).await;
    let update = |metadata: Value, update| backend.update_metadata(&name, object(metadata), update);
    let merged = ok(
        update(json!({"b": {"x": 1}, "c": "3"}), MetadataUpdate::Merge).await,
        "merging",
    );
    assert_eq!(Value::Object(merged), json!({"a": 1, "b": {"x": 1}, "c": "3"}));
    let replaced = ok(
        update(json!({"d": 4}), MetadataUpdate::Replace).await,
        "replacing",
    );
    assert_eq!(Value::Object(replaced), json!({"d": 4}));
    ok(
        update(json!({}), MetadataUpdate::Replace).await,
        "replacing by nothing",
    );
    assert!(ok(backend.collection(&name).await, "reading").metadata.is_empty());
    ok(backend.delete_collection(&name).await, "deleting");
}

/// Number of concurrent writers.
const WRITERS: usize = 20;

async fn concurrent_merges_are_all_kept(backend: &dyn Backend) {
    let name = fresh(backend, "merged-at-once", json!({"kept": true})).await;
    let merges = (0..WRITERS).map(|i| {
        let metadata = Metadata::from_iter([(format!("writer-{i}"), json!(i))]);
        backend.update_metadata(&name, metadata, MetadataUpdate::Merge)
    });
    for merged in join_all(merges).await {
        ok(merged, "merging at once");
    }
    let metadata = ok(backend.collection(&name).await, "reading").metadata;
    assert_eq!(metadata.len(), WRITERS + 1, "{metadata:?}");
    ok(backend.delete_collection(&name).await, "deleting");
}

async fn concurrent_writes_of_a_document_leave_one_of_them(backend: &dyn Backend) {
    let name = fresh(backend, "written-at-once", json!({})).await;
    let writes = (0..WRITERS).map(|i| {
        let metadata = Value::Object(Metadata::from_iter([(format!("writer-{i}"), json!(i))]));
        let written = document("same", &format!("writer-{i}"), metadata);
        backend.add_documents(&name, vec![with_vector(written, vector(i))])
    });
    for written in join_all(writes).await {
        ok(written, "writing at once");
    }
    let everything = Filter::everything();
    let page = ok(backend.documents(&name, &everything, EVERYTHING).await, "reading");
    let [found] = page.documents.as_slice() else {
        panic!("one document was written: {page:?}");
    };
    let keys: Vec<&str> = found.metadata.keys().map(String::as_str).collect();
    assert_eq!(keys, [found.text.as_str()], "of one writer alone");
    ok(backend.delete_collection(&name).await, "deleting");
}

async fn documents_come_back_as_they_were_added(backend: &dyn Backend) {
    let name = fresh(backend, "documents", json!({"kept": true})).await;
    let documents = [
        document(
            "z",
            "last name, first place",
            json!({"n": 1, "f": 1.0, "b": true, "s": "ü\n\"", "neg": -7}),
        ),
        document(
            "a/b?c=d&e",
            "an id of many signs",
            json!({"list": ["x", 1, null, true], "empty": []}),
        ),
        document(
            "m",
            "nested",
            json!({"o": {"deep": [{"x": null}]}, "null": null, "big": u64::MAX}),
        ),
        document("plain", "no metadata at all", json!({})),
    ];
    let added: Vec<NewDocument> = documents
        .iter()
        .enumerate()
        .map(|(i, d)| with_vector(d.clone(), vector(i)))
        .collect();
    let added = ok(backend.add_documents(&name, added).await, "adding");
    assert_eq!(
        added.ids,
        documents.iter().map(|d| d.id.clone()).collect::<Vec<_>>()
    );
    let everything = Filter::everything();
    let page = ok(backend.documents(&name, &everything, EVERYTHING).await, "reading");
    assert_eq!((page.documents.as_slice(), page.total), (&documents[..], 4));

    let replaced = document("a/b?c=d&e", "replaced", json!({"only": "this"}));
    ok(
        backend
            .add_documents(&name, vec![with_vector(replaced.clone(), vector(9))])
            .await,
        "replacing",
    );
    let page = |limit, offset| backend.documents(&name, &everything, Page { limit, offset });
    let second = ok(page(1, 1).await, "a page");
    assert_eq!(
        (second.documents, second.total),
        (vec![replaced.clone()], 4),
        "replaced whole, in its place"
    );
    for document in [&documents[0], &documents[1], &documents[2]] {
        let found = ok(backend.document(&name, &document.id).await, "one document");
        let expected = if document.id == replaced.id {
            &replaced
        } else {
            document
        };
        assert_eq!(found.as_ref(), Some(expected));
    }
    let missing = DocumentId::parse("never-added").unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(ok(backend.document(&name, &missing).await, "no document"), None);
    let none = ok(page(0, 0).await, "no page");
    assert_eq!((none.documents.len(), none.total), (0, 4));
    let beyond = ok(page(10, 4).await, "beyond the end");
    assert_eq!((beyond.documents.len(), beyond.total), (0, 4));
    assert_eq!(ok(backend.collection(&name).await, "counting").count, 4);
    ok(backend.delete_collection(&name).await, "deleting");
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

fn filters() -> Vec<Filter> {
    [
        json!({"f": 1}),
        json!({"f": 1.0}),
        json!({"f": "1"}),
        json!({"f": true}),
        json!({"f": null}),
        json!({"f": 9_007_199_254_740_993_i64}),
        json!({"f": -2.5}),
        json!({"": "empty"}),
        json!({"f": {"$ne": 1}}),
        json!({"f": {"$ne": null}}),
        json!({"f": {"$in": [1, "1", false]}}),
        json!({"f": {"$in": []}}),
        json!({"f": {"$nin": [1, true]}}),
        json!({"f": {"$nin": []}}),
        json!({"f": {"$gt": 0}}),
        json!({"f": {"$gte": 1, "$lt": 2}}),
        json!({"f": {"$lte": -2.5}}),
        json!({"g": {"$gt": "a"}}),
        json!({"g": {"$lte": "a"}}),
        json!({"g": {"$contains": "b"}}),
        json!({"l": {"$contains": "p"}}),
        json!({"f": {"$contains": 2}}),
        json!({"f": {"$exists": true}}),
        json!({"f": {"$exists": false}}),
        json!({"f": {"$not": {"$gt": 0}}}),
        json!({"f": 1, "g": "a"}),
        json!({"$or": [{"f": 1}, {"g": "c"}]}),
        json!({"$or": [{"f": 1}, {"n": {"$gt": 5}}]}),
        json!({"$and": [{"f": {"$exists": true}}, {"$not": {"g": "a"}}]}),
        json!({"$not": {"$or": [{"f": 1}, {"f": {"$exists": false}}]}}),
        json!({"missing": 1}),
        json!({"f": {"$in": (0..200).collect::<Vec<_>>()}}),
    ]
    .iter()
    .map(|json| Filter::parse(json).unwrap_or_else(|e| panic!("{e}")))
    .collect()
}

async fn filters_mean_the_same_everywhere(backend: &dyn Backend) {
    let name = fresh(backend, "filters", json!({})).await;
    let documents = varied();
    let added = documents
        .iter()
        .enumerate()
        .map(|(i, d)| with_vector(d.clone(), vector(i)))
        .collect();
    ok(backend.add_documents(&name, added).await, "adding");
    for filter in filters() {
        let expected: Vec<&Document> = documents.iter().filter(|d| filter.matches(&d.metadata)).collect();
        let page = ok(backend.documents(&name, &filter, EVERYTHING).await, "filtering");
        assert_eq!(page.documents.iter().collect::<Vec<_>>(), expected, "{filter:?}");
        assert_eq!(page.total as usize, expected.len(), "{filter:?}");
        let page = Page { limit: 1, offset: 1 };
        let page = ok(backend.documents(&name, &filter, page).await, "a filtered page");
        assert_eq!(page.documents.first(), expected.get(1).copied(), "{filter:?}");
        assert_eq!(page.total as usize, expected.len(), "{filter:?}");
    }
    let values = |field| backend.metadata_values(&name, field);
    let of_f = ok(values("f").await, "values");
    let expected = json!([
        null,
        false,
        true,
        -2.5,
        1,
        2,
        9_007_199_254_740_992_i64,
        9_007_199_254_740_993_i64,
        "1",
        "x"
    ]);
    assert_eq!(Value::Array(of_f), expected);
    assert_eq!(
        ok(values("missing").await, "values of no field"),
        [] as [Value; 0]
    );
    ok(backend.delete_collection(&name).await, "deleting");
}

async fn deletions_count_existing_documents(backend: &dyn Backend) {
    let name = fresh(backend, "deleting", json!({"kept": [1]})).await;
    let add = || async {
        let documents = varied()
            .into_iter()
            .enumerate()
            .map(|(i, d)| with_vector(d, vector(i)))
            .collect();
        ok(backend.add_documents(&name, documents).await, "adding");
    };
    add().await;
    let id = |text: &str| DocumentId::parse(text).unwrap_or_else(|e| panic!("{e}"));
    let by_id = Selection::Ids(vec![id("d0"), id("never-there"), id("d3"), id("d0")]);
    assert_eq!(
        ok(backend.delete_documents(&name, by_id).await, "deleting by id"),
        2
    );
    let lacking = Filter::parse(&json!({"f": {"$exists": false}})).unwrap_or_else(|e| panic!("{e}"));
    let by_filter = || Selection::Matching(lacking.clone());
    assert_eq!(
        ok(
            backend.delete_documents(&name, by_filter()).await,
            "deleting by filter"
        ),
        2
    );
    assert_eq!(
        ok(
            backend.delete_documents(&name, by_filter()).await,
            "deleting again"
        ),
        0
    );
    assert_eq!(ok(backend.collection(&name).await, "counting").count, 12);

    assert_eq!(ok(backend.empty(&name).await, "emptying"), 12);
    assert_eq!(ok(backend.empty(&name).await, "emptying again"), 0);
    let emptied = ok(backend.collection(&name).await, "reading");
    assert_eq!(
        (emptied.count, Value::Object(emptied.metadata)),
        (0, json!({"kept": [1]}))
    );
    add().await;
    assert_eq!(ok(backend.collection(&name).await, "counting").count, 16);
    ok(backend.delete_collection(&name).await, "deleting");
}

fn cosine_distance(a: &[f32], b: &[f32]) -> f32 {
    let dot = |x: &[f32], y: &[f32]| {
        x.iter()
            .zip(y)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum::<f64>()
    };
    (1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()) as f32
}

async fn searches_are_exact_under_any_filter(backend: &dyn Backend) {
    let name = fresh(backend, "search", json!({"match_threshold": 0.4})).await;
    let empty = ok(
        backend.search(&name, dense(vector(0), 3)).await,
        "searching nothing",
    );
    assert!(empty.hits.is_empty());
    let documents: Vec<(Document, Vec<f32>)> = (0..300)
        .map(|i| {
            let metadata = match i % 100 {
                0 => json!({"rare": [i / 100, "list"], "half": i % 2}),
                _ => json!({"half": i % 2, "tenth": i % 10}),
            };
            (
                document(&format!("s{i}"), &format!("text {i}"), metadata),
                vector(i),
            )
        })
        .collect();
    let added = documents
        .iter()
        .map(|(d, v)| with_vector(d.clone(), v.clone()))
        .collect();
    ok(backend.add_documents(&name, added).await, "adding");

    let queried = vector(1000);
    for (filter, top_k) in [
        (json!({}), 5),
        (json!({}), 1000),
        (json!({"half": 1}), 10),
        (json!({"tenth": {"$gte": 8}}), 7),
        (json!({"rare": "list"}), 5),
        (json!({"rare": {"$exists": true}}), 2),
        (json!({"rare": 2}), 3),
        (json!({"half": {"$ne": 0}}), 20),
        (json!({"half": 7}), 5),
    ] {
        let filter = Filter::parse(&filter).unwrap_or_else(|e| panic!("{e}"));
        let mut expected: Vec<(f32, &str)> = documents
            .iter()
            .filter(|(d, _)| filter.matches(&d.metadata))
            .map(|(d, v)| (cosine_distance(&queried, v), d.id.as_str()))
            .collect();
        expected.sort_by(|a, b| a.0.total_cmp(&b.0));
        expected.truncate(top_k);
        let query = SearchQuery {
            filter: filter.clone(),
            ..dense(queried.clone(), top_k)
        };
        let answer = ok(backend.search(&name, query).await, "searching");
        assert_eq!(
            ids(&answer.hits),
            expected.iter().map(|e| e.1).collect::<Vec<_>>(),
            "{filter:?}"
        );
        for (hit, (distance, _)) in answer.hits.iter().zip(&expected) {
            let given = hit.distance.unwrap_or(f32::NAN);
            assert!((given - distance).abs() < 1e-4, "{given} for {distance}");
            assert!(hit.ranks.dense.is_some(), "{hit:?}");
        }
        let ranks = answer.hits.iter().filter_map(|hit| Some(hit.ranks.dense?.rank));
        assert!(ranks.eq(1..=expected.len()), "{filter:?}");
        assert_eq!(answer.collection_metadata["match_threshold"], 0.4);
    }

    let near = SearchQuery {
        max_distance: Some(0.5),
        ..dense(queried.clone(), 1000)
    };
    let hits = ok(backend.search(&name, near).await, "searching nearby").hits;
    let expected = documents
        .iter()
        .filter(|(_, v)| cosine_distance(&queried, v) <= 0.5)
        .count();
    assert_eq!(hits.len(), expected);

    let few: Vec<DocumentId> = ["s17", "s3", "gone", "s250", "s251"]
        .into_iter()
        .filter_map(|id| DocumentId::parse(id.to_owned()).ok())
        .collect();
    let mut expected: Vec<(f32, &str)> = documents
        .iter()
        .filter(|(d, _)| few.contains(&d.id) && d.metadata["half"] == 1)
        .map(|(d, v)| (cosine_distance(&queried, v), d.id.as_str()))
        .collect();
    expected.sort_by(|a, b| a.0.total_cmp(&b.0));
    let among = SearchQuery {
        ids: Some(few),
        filter: Filter::parse(&json!({"half": 1})).unwrap_or_else(|e| panic!("{e}")),
        ..dense(queried.clone(), 10)
    };
    let hits = ok(backend.search(&name, among).await, "searching among a few").hits;
    assert_eq!(ids(&hits), expected.iter().map(|e| e.1).collect::<Vec<_>>());

    let siblings = async |field: &str, max_chars, filter: Value| {
        let query = SearchQuery {
            expand: Some(Expand {
                field: field.to_owned(),
                max_chars,
            }),
            filter: Filter::parse(&filter).unwrap_or_else(|e| panic!("{e}")),
            ..dense(queried.clone(), 1)
        };
        let mut hits = ok(backend.search(&name, query).await, "expanding").hits;
        let siblings = hits.pop().and_then(|hit| hit.siblings)?;
        let ids = siblings.iter().map(|sibling| sibling.id.as_str().to_owned());
        Some(ids.collect::<Vec<_>>())
    };
    let all = siblings("tenth", None, json!({"tenth": 3}))
        .await
        .unwrap_or_default();
    assert_eq!(all.len(), 30, "{all:?}");
    assert_eq!(all[..2], ["s3", "s13"], "in document order");
    let within_budget = siblings("tenth", Some(0), json!({"tenth": 3})).await;
    assert_eq!(within_budget.map(|kept| kept.len()), Some(1), "the hit alone");
    assert_eq!(siblings("no_such_field", None, json!({})).await, None);
    ok(backend.delete_collection(&name).await, "deleting");
}

fn ids(hits: &[SearchHit]) -> Vec<&str> {
    hits.iter().map(|hit| hit.document.id.as_str()).collect()
}

async fn several_collections_and_queries_are_searched_at_once(backend: &dyn Backend) {
    let mut names = Vec::new();
    for collection in 0..3 {
        let name = fresh(
            backend,
            &format!("many-{collection}"),
            json!({"number": collection}),
        )
        .await;
        let documents = (0..5).map(|i| {
            let plain = document(&format!("c{collection}-{i}"), "t", json!({}));
            with_vector(plain, vector(10 * collection + i))
        });
        ok(backend.add_documents(&name, documents.collect()).await, "adding");
        names.push(name);
    }
    names.insert(1, name("never-created"));
    let queries = [dense(vector(3), 2), dense(vector(22), 4)];
    let responses = backend.search_many(&names, &queries).await;
    assert_eq!(responses.len(), names.len());
    for (name, responses) in names.iter().zip(responses) {
        assert_eq!(responses.len(), queries.len());
        for (query, response) in queries.iter().zip(responses) {
            if name.as_str().ends_with("never-created") {
                refused(response, 404, "searching none");
                continue;
            }
            let alone = ok(backend.search(name, query.clone()).await, "searching alone");
            let response = ok(response, "searching many");
            assert_eq!(ids(&response.hits), ids(&alone.hits), "{name}");
            assert_eq!(response.hits.len(), query.top_k);
            assert_eq!(response.collection_metadata, alone.collection_metadata);
            assert!(response.collection_metadata.contains_key("number"));
        }
    }
    names.remove(1);
    for name in names {
        ok(backend.delete_collection(&name).await, "deleting");
    }
}

async fn exports_can_be_imported(backend: &dyn Backend) {
    let name = fresh(backend, "exported", json!({})).await;
    let model = ModelIdentity {
        id: "m".to_owned(),
        version: "1".to_owned(),
        dimensions: WIDTH,
    };
    let documents: Vec<ExportedDocument> = varied()
        .into_iter()
        .enumerate()
        .map(|(i, document)| {
            let mut vector = vector(i);
            let norm = normalise(&mut vector);
            ExportedDocument {
                document,
                vector,
                norm,
                model: (i % 2 == 0).then(|| model.clone()),
            }
        })
        .collect();
    ok(backend.import(&name, documents.clone()).await, "importing");
    let mut exported: Vec<ExportedDocument> = Vec::new();
    let mut after = None;
    loop {
        let range = ExportRange { after, limit: 5 };
        let page = ok(backend.export(&name, range).await, "exporting");
        assert!(page.documents.len() <= 5, "{}", page.documents.len());
        exported.extend(page.documents);
        after = page.last;
        if !page.more {
            break;
        }
    }
    assert_eq!(exported.len(), documents.len());
    for (exported, imported) in exported.iter().zip(&documents) {
        assert_eq!(
            (&exported.document, &exported.model),
            (&imported.document, &imported.model)
        );
        let close = |a: f32, b: f32| (a - b).abs() < 1e-6;
        assert!(close(exported.norm, imported.norm), "{exported:?}");
        let mut pairs = exported.vector.iter().zip(&imported.vector);
        assert!(pairs.all(|(a, b)| close(*a, *b)), "{exported:?}");
    }
    ok(backend.delete_collection(&name).await, "deleting");
    let range = ExportRange {
        after: None,
        limit: 1,
    };
    refused(backend.export(&name, range).await, 404, "exporting none");
    refused(backend.import(&name, documents).await, 404, "importing into none");
}

async fn words_are_ranked(backend: &dyn Backend) {
    let name = fresh(backend, "words", json!({})).await;
    let texts = [
        "the harbour at night",
        "a lighthouse keeper",
        "lighthouse and harbour",
        "rain",
    ];
    let documents = texts.iter().enumerate().map(|(i, text)| {
        let plain = document(&format!("w{i}"), text, json!({"even": i % 2 == 0}));
        with_vector(plain, vector(i))
    });
    ok(backend.add_documents(&name, documents.collect()).await, "adding");
    let keyword = |words: &str| SearchQuery {
        text: Some(words.to_owned()),
        mode: SearchMode::Keyword,
        ..SearchQuery::default()
    };
    let both = ok(
        backend.search(&name, keyword("lighthouse harbour")).await,
        "ranking words",
    );
    assert_eq!(ids(&both.hits)[0], "w2", "it has both words");
    assert_eq!(both.hits.len(), 3);
    for (place, hit) in both.hits.iter().enumerate() {
        assert_eq!(hit.distance, None, "no vector was compared");
        assert_eq!(hit.ranks.keyword.map(|rank| rank.rank), Some(place + 1));
    }
    let filtered = SearchQuery {
        filter: Filter::parse(&json!({"even": false})).unwrap_or_else(|e| panic!("{e}")),
        ..keyword("lighthouse harbour")
    };
    let filtered = ok(backend.search(&name, filtered).await, "ranking words of a few");
    assert_eq!(ids(&filtered.hits), ["w1"]);
    let hybrid = SearchQuery {
        mode: SearchMode::Hybrid,
        vector: Some(QueryVector::from_client(vector(3))),
        ..keyword("lighthouse harbour")
    };
    let hybrid = ok(backend.search(&name, hybrid).await, "ranking by both");
    assert_eq!(hybrid.hits.len(), 4, "every document has a distance");
    let ranks = hybrid.hits.iter().filter_map(|hit| Some(hit.ranks.fused?.rank));
    assert!(ranks.eq(1..=4), "{hybrid:?}");
    let rain = hybrid.hits.iter().find(|hit| hit.document.text == "rain");
    let rain = rain.unwrap_or_else(|| panic!("it is nearest: {hybrid:?}"));
    assert_eq!(rain.ranks.dense.map(|rank| rank.rank), Some(1));
    assert_eq!(rain.ranks.keyword, None, "it has none of the words");
    ok(backend.delete_collection(&name).await, "deleting");
}

async fn reranking_orders_texts_or_fails(backend: &dyn Backend, is_offered: bool) {
    let texts = ["one", "another text", "a third text of some length"];
    let ranked = backend
        .rerank("a question", texts.map(str::to_owned).to_vec(), 2)
        .await;
    if !is_offered {
        assert!(ranked.is_err(), "{ranked:?}");
        return;
    }
    let ranked = ok(ranked, "reranking");
    assert_eq!(ranked.len(), 2, "{ranked:?}");
    assert!(ranked[0].score >= ranked[1].score, "{ranked:?}");
    assert!(
        ranked[0].index != ranked[1].index && ranked.iter().all(|text| text.index < texts.len()),
        "{ranked:?}"
    );
    let none = ok(
        backend.rerank("a question", Vec::new(), 2).await,
        "reranking none",
    );
    assert!(none.is_empty());
}

async fn vectors_of_any_length_keep_their_direction(backend: &dyn Backend) {
    let name = fresh(backend, "lengths", json!({})).await;
    let scales = [1.0, 1e-30, 1e30, 1e-18, 1e18];
    let documents = scales.iter().enumerate().map(|(i, scale)| {
        let scaled = vector(i).into_iter().map(|x| x * scale).collect();
        with_vector(document(&i.to_string(), "t", json!({})), scaled)
    });
    ok(
        backend.add_documents(&name, documents.collect()).await,
        "adding vectors of all lengths",
    );
    let queried = vector(1000);
    let hits = ok(
        backend.search(&name, dense(queried.clone(), scales.len())).await,
        "searching among all lengths",
    )
    .hits;
    assert_eq!(hits.len(), scales.len());
    for hit in hits {
        let number: usize = hit.document.id.as_str().parse().unwrap_or(usize::MAX);
        let expected = cosine_distance(&queried, &vector(number));
        let given = hit.distance.unwrap_or(f32::NAN);
        assert!((given - expected).abs() < 1e-4, "{given} for {expected}");
    }
    ok(backend.delete_collection(&name).await, "deleting");
}

fn dense(vector: Vec<f32>, top_k: usize) -> SearchQuery {
    SearchQuery {
        vector: Some(QueryVector::from_client(vector)),
        top_k,
        ..SearchQuery::default()
    }
}

async fn invalid_requests_are_refused(backend: &dyn Backend) {
    let name = fresh(backend, "refusals", json!({})).await;
    let plain = |id: &str| document(id, "t", json!({}));
    ok(
        backend
            .add_documents(&name, vec![with_vector(plain("a"), vector(0))])
            .await,
        "adding",
    );
    let narrow = vec![with_vector(plain("b"), vec![1.0, 2.0])];
    let message = refused(backend.add_documents(&name, narrow).await, 400, "another width");
    assert!(message.contains("dimension mismatch"), "{message}");
    let narrow = vec![
        with_vector(plain("b"), vector(1)),
        with_vector(plain("c"), vec![1.0, 2.0]),
    ];
    let message = refused(backend.add_documents(&name, narrow).await, 400, "two widths");
    assert!(message.contains("the document at index 1 "), "{message}");
    let mixed = vec![
        with_vector(plain("b"), vector(1)),
        NewDocument {
            document: plain("c"),
            embedding: None,
        },
    ];
    let message = refused(backend.add_documents(&name, mixed).await, 400, "some vectors");
    assert!(
        message.contains("All documents must include pre-computed embeddings"),
        "{message}"
    );
    assert!(message.contains("the document at index 1 "), "{message}");
    let unembedded = || {
        vec![NewDocument {
            document: plain("d"),
            embedding: None,
        }]
    };
    let message = refused(backend.add_documents(&name, unembedded()).await, 400, "no model");
    assert!(
        message.contains("has no embedding_model in metadata"),
        "{message}"
    );
    refused(
        backend.search(&name, dense(vec![1.0], 3)).await,
        400,
        "searching by another width",
    );
    let by_text = SearchQuery {
        text: Some("words".into()),
        top_k: 3,
        ..SearchQuery::default()
    };
    let message = refused(
        backend.search(&name, by_text).await,
        400,
        "searching by text without a model",
    );
    let start = format!("Collection '{name}' has no embedding_model in metadata.");
    assert!(message.contains(&start), "{message}");
    assert_eq!(
        ok(backend.collection(&name).await, "counting").count,
        1,
        "nothing was changed"
    );

    let unloaded = fresh(backend, "unloaded", json!({"embedding_model": "never-loaded"})).await;
    let message = refused(
        backend.add_documents(&unloaded, unembedded()).await,
        503,
        "a model that is not loaded",
    );
    assert!(message.contains("never-loaded"), "{message}");
    for name in [name, unloaded] {
        ok(backend.delete_collection(&name).await, "deleting");
    }
}

async fn texts_are_embedded_by_the_collections_model(backend: &dyn Backend, model: &str) {
    let name = fresh(backend, "embedded", json!({"embedding_model": model})).await;
    let texts = [
        "The cat sleeps on the mat.",
        "Rust has no garbage collector.",
        "Rain is expected tomorrow.",
    ];
    let documents = texts
        .iter()
        .enumerate()
        .map(|(i, text)| NewDocument {
            document: document(&format!("t{i}"), text, json!({"i": i})),
            embedding: None,
        })
        .collect();
    ok(backend.add_documents(&name, documents).await, "adding texts");
    for (i, text) in texts.iter().enumerate() {
        let query = SearchQuery {
            text: Some((*text).to_owned()),
            top_k: 1,
            ..SearchQuery::default()
        };
        let hits = ok(backend.search(&name, query).await, "searching by text").hits;
        assert_eq!(hits[0].document.id.as_str(), format!("t{i}"));
    }
    ok(backend.delete_collection(&name).await, "deleting");
}
