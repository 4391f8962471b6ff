//! Requirement: Collection Metadata Storage

use serde_json::json;

use crate::support::plain;

#[tokio::test]
async fn create_collection_with_metadata() {
    let server = plain().await;
    let body = json!({
        "name": "manuals", "embedding_provider": "some-provider-nobody-knows", "embedding_model": "mxbai-large",
        "metadata": {"description": "Docs", "query_profile": {"match_threshold": 0.4, "tags": [1, null]}},
    });
    let metadata = json!({
        "embedding_provider": "some-provider-nobody-knows", "embedding_model": "mxbai-large",
        "description": "Docs", "query_profile": {"match_threshold": 0.4, "tags": [1, null]},
    });
    let created = server.post("/collections", body).await.ok();
    assert_eq!(
        created,
        json!({"status": "created", "name": "manuals", "metadata": metadata})
    );
    let stored = server.get("/collections/manuals").await.ok();
    assert_eq!(stored["metadata"], metadata);
}

#[tokio::test]
async fn retrieve_collection_with_metadata() {
    let server = plain().await;
    server
        .post(
            "/collections",
            json!({"name": "c", "metadata": {"display_name": "Sea"}}),
        )
        .await
        .ok();
    let collection = server.get("/collections/c").await.ok();
    assert_eq!(
        collection,
        json!({"name": "c", "count": 0, "metadata": {"display_name": "Sea"}})
    );
}

#[tokio::test]
async fn update_collection_metadata() {
    let server = plain().await;
    server
        .post("/collections", json!({"name": "c", "metadata": {"old": 1}}))
        .await
        .ok();
    let updated = server
        .put("/collections/c/metadata", json!({"metadata": {"new": 2}}))
        .await
        .ok();
    assert_eq!(
        updated,
        json!({"status": "updated", "name": "c", "metadata": {"new": 2}, "merge": false})
    );
    assert_eq!(
        server.get("/collections/c").await.ok()["metadata"],
        json!({"new": 2})
    );
}

#[tokio::test]
async fn retrieve_all_collections_with_metadata() {
    let server = plain().await;
    for (name, metadata) in [
        ("b", json!({"n": 2})),
        ("a", json!({})),
        ("c.2", json!({"n": [3]})),
    ] {
        server
            .post("/collections", json!({"name": name, "metadata": metadata}))
            .await
            .ok();
    }
    let all = server.get("/collections").await.ok();
    assert_eq!(
        all,
        json!({"collections": [
            {"name": "a", "count": 0, "metadata": {}},
            {"name": "b", "count": 0, "metadata": {"n": 2}},
            {"name": "c.2", "count": 0, "metadata": {"n": [3]}},
        ]})
    );
}
