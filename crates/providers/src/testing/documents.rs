//! Collections and documents: created, changed, filtered, deleted, exported.

use futures::future::join_all;
use ragstone_core::backend::Backend;
use ragstone_core::document::NewDocument;
use ragstone_core::model::ModelIdentity;
use ragstone_core::search::SearchQuery;
use ragstone_core::storage::{ExportRange, ExportedDocument, MetadataUpdate, Page, Selection};
use ragstone_core::vector::normalise;
use ragstone_core::{Document, DocumentId, Filter, Metadata};
use serde_json::{Value, json};

use super::{EVERYTHING, WIDTH, dense, document, fresh, object, ok, refused, varied, vector, with_vector};

pub(super) async fn collections_are_created_listed_and_deleted(backend: &dyn Backend) {
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

pub(super) async fn metadata_is_replaced_or_merged(backend: &dyn Backend) {
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

pub(super) async fn concurrent_merges_are_all_kept(backend: &dyn Backend) {
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

pub(super) async fn concurrent_writes_of_a_document_leave_one_of_them(backend: &dyn Backend) {
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

pub(super) async fn documents_come_back_as_they_were_added(backend: &dyn Backend) {
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

pub(super) async fn filters_mean_the_same_everywhere(backend: &dyn Backend) {
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

pub(super) async fn deletions_count_existing_documents(backend: &dyn Backend) {
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

pub(super) async fn exports_can_be_imported(backend: &dyn Backend) {
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

pub(super) async fn invalid_requests_are_refused(backend: &dyn Backend) {
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
