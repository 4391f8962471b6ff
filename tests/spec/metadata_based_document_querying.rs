//! Requirement: Metadata-Based Document Querying

use serde_json::{Value, json};

use crate::support::{Server, documents, ids, plain, vector};

async fn with_documents(count: usize, metadata: impl Fn(usize) -> Value) -> Server {
    let server = plain().await;
    server.create("c").await;
    server.add("c", documents(count, metadata)).await;
    server
}

#[tokio::test]
async fn simple_equality_filter() {
    let server = with_documents(
        6,
        |n| json!({"section_id": if n % 3 == 0 { "intro" } else { "body" }}),
    )
    .await;
    let answer = server.find("c", json!({"section_id": "intro"})).await.ok();
    assert_eq!(
        answer,
        json!({
            "documents": [
                {"id": "d0", "text": "text number 0", "metadata": {"section_id": "intro"}},
                {"id": "d3", "text": "text number 3", "metadata": {"section_id": "intro"}},
            ],
            "count": 2, "total": 2,
        })
    );
}

#[tokio::test]
async fn multiple_field_filter_implicit_and() {
    let kinds = ["paragraph", "heading"];
    let server = with_documents(
        12,
        |n| json!({"chapter_id": (n % 3).to_string(), "doc_type": kinds[n % 2]}),
    )
    .await;
    let answer = server
        .find("c", json!({"chapter_id": "1", "doc_type": "paragraph"}))
        .await
        .ok();
    assert_eq!(ids(&answer["documents"]), ["d4", "d10"]);
    for document in answer["documents"].as_array().unwrap() {
        assert_eq!(
            document["metadata"],
            json!({"chapter_id": "1", "doc_type": "paragraph"})
        );
    }
}

#[tokio::test]
async fn complex_filter_with_operators() {
    let kinds = ["heading", "code", "paragraph", "list"];
    let server = with_documents(8, |n| json!({"doc_type": kinds[n % 4]})).await;
    let answer = server
        .find("c", json!({"doc_type": {"$in": ["heading", "paragraph"]}}))
        .await
        .ok();
    assert_eq!(ids(&answer["documents"]), ["d0", "d2", "d4", "d6"]);
    assert_eq!(answer["total"], 4);
}

#[tokio::test]
async fn logical_or_operator() {
    let server = with_documents(8, |n| json!({"chapter": (n % 4).to_string()})).await;
    let answer = server
        .find("c", json!({"$or": [{"chapter": "1"}, {"chapter": "3"}]}))
        .await
        .ok();
    assert_eq!(ids(&answer["documents"]), ["d1", "d3", "d5", "d7"]);
}

#[tokio::test]
async fn no_filter_provided() {
    let server = with_documents(500, |_| json!({})).await;
    let answer = server.get("/collections/c/documents").await.ok();
    assert_eq!((&answer["count"], &answer["total"]), (&json!(100), &json!(500)));
    let first: Vec<String> = (0..100).map(|n| format!("d{n}")).collect();
    assert_eq!(ids(&answer["documents"]), first);
}

#[tokio::test]
async fn pagination_with_limit_and_offset() {
    let server = with_documents(500, |n| json!({"half": n % 2})).await;
    let query = [("where", r#"{"half": 0}"#), ("limit", "50"), ("offset", "100")];
    let answer = server.get_with("/collections/c/documents", &query).await.ok();
    assert_eq!((&answer["count"], &answer["total"]), (&json!(50), &json!(250)));
    let page: Vec<String> = (100..150).map(|n| format!("d{}", n * 2)).collect();
    assert_eq!(ids(&answer["documents"]), page);
}

#[tokio::test]
async fn empty_results() {
    let server = with_documents(3, |n| json!({"n": n})).await;
    for filter in [json!({"n": 77}), json!({"nonexistent": "x"})] {
        let answer = server.find("c", filter).await.ok();
        assert_eq!(answer, json!({"documents": [], "count": 0, "total": 0}));
    }
}

#[tokio::test]
async fn collection_not_found() {
    let server = plain().await;
    let detail = server
        .get("/collections/nonexistent/documents")
        .await
        .refused(404);
    assert_eq!(detail, "Collection 'nonexistent' not found");
}

#[tokio::test]
async fn invalid_json_filter() {
    let server = with_documents(1, |_| json!({})).await;
    let detail = server
        .get("/collections/c/documents?where=invalid-json-string")
        .await
        .refused(400);
    assert!(
        detail.starts_with("Invalid 'where' filter: must be valid JSON"),
        "{detail}"
    );
}

#[tokio::test]
async fn limit_enforcement() {
    let server = with_documents(1100, |_| json!({})).await;
    let answer = server.get("/collections/c/documents?limit=5000").await.ok();
    assert_eq!((&answer["count"], &answer["total"]), (&json!(1000), &json!(1100)));
    assert_eq!(answer["documents"].as_array().unwrap().len(), 1000);
}

#[tokio::test]
async fn sibling_gathering_use_case() {
    let server = plain().await;
    server.create("c").await;
    let parts = [
        ("other", "paragraph", "Something else."),
        ("retention-config", "heading", "Retention"),
        ("retention-config", "paragraph", "Logs are kept for thirty days."),
        ("retention-config", "code", "retention: 30d"),
        ("retention-config", "paragraph", "Metrics are kept for a year."),
    ];
    let documents = parts.iter().enumerate().map(|(n, (section, kind, text))| {
        let metadata = json!({"section_id": section, "doc_type": kind});
        json!({"id": format!("p{n}"), "text": text, "metadata": metadata, "embedding": vector(n)})
    });
    server.add("c", documents.collect()).await;

    let search = json!({"collection": "c", "query_embedding": vector(2), "top_k": 1});
    let found = server.post("/query", search).await.ok();
    assert_eq!(ids(&found["results"]), ["p2"]);
    let section = found["results"][0]["metadata"]["section_id"].clone();
    let answer = server.find("c", json!({"section_id": section})).await.ok();
    assert_eq!(
        ids(&answer["documents"]),
        ["p1", "p2", "p3", "p4"],
        "the whole section, in its order"
    );
    let kinds: Vec<&Value> = answer["documents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|document| &document["metadata"]["doc_type"])
        .collect();
    assert_eq!(kinds, ["heading", "paragraph", "code", "paragraph"]);
}
