//! Requirement: Metadata Field Values Endpoint

use serde_json::json;

use crate::support::{Server, documents, plain};

async fn with_regions() -> Server {
    let server = plain().await;
    server.create("c").await;
    let regions = [
        "British Classics",
        "Asian & Middle Eastern Sweets",
        "British Classics",
        "French Pastries",
    ];
    server
        .add("c", documents(4, |n| json!({"region": regions[n]})))
        .await;
    server
}

#[tokio::test]
async fn get_unique_values_for_metadata_field() {
    let server = with_regions().await;
    let answer = server
        .get("/collections/c/metadata-values?field=region")
        .await
        .ok();
    assert_eq!(
        answer,
        json!({
            "field": "region", "count": 3,
            "values": ["Asian & Middle Eastern Sweets", "British Classics", "French Pastries"],
        })
    );
}

#[tokio::test]
async fn get_values_for_field_with_no_documents() {
    let server = with_regions().await;
    let answer = server
        .get("/collections/c/metadata-values?field=nonexistent")
        .await
        .ok();
    assert_eq!(answer, json!({"field": "nonexistent", "values": [], "count": 0}));
}

#[tokio::test]
async fn collection_not_found() {
    let server = plain().await;
    let detail = server
        .get("/collections/nonexistent/metadata-values?field=region")
        .await
        .refused(404);
    assert_eq!(detail, "Collection 'nonexistent' does not exist.");
}

#[tokio::test]
async fn missing_field_parameter() {
    let server = with_regions().await;
    for path in [
        "/collections/c/metadata-values",
        "/collections/c/metadata-values?field=",
    ] {
        assert_eq!(
            server.get(path).await.refused(400),
            "Query parameter 'field' is required"
        );
    }
}

#[tokio::test]
async fn values_returned_in_consistent_order() {
    let server = plain().await;
    server.create("c").await;
    let words = ["pear", "apple", "Zebra", "fig", "äpfel", "apple"];
    server
        .add("c", documents(words.len(), |n| json!({"word": words[n]})))
        .await;
    let first = server.get("/collections/c/metadata-values?field=word").await.ok();
    assert_eq!(first["values"], json!(["Zebra", "apple", "fig", "pear", "äpfel"]));
    for _ in 0..3 {
        assert_eq!(
            server.get("/collections/c/metadata-values?field=word").await.ok(),
            first
        );
    }
    let server = server.restarted().await;
    assert_eq!(
        server.get("/collections/c/metadata-values?field=word").await.ok(),
        first,
        "also after a restart"
    );
}
