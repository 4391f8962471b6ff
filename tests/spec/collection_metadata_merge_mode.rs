//! Requirement: Collection Metadata Merge Mode

use serde_json::{Value, json};

use crate::support::{Server, plain};

async fn with_metadata() -> (Server, Value) {
    let server = plain().await;
    let metadata = json!({"description": "Test", "match_threshold": 0.5, "custom_field": "value"});
    server
        .post("/collections", json!({"name": "c", "metadata": metadata}))
        .await
        .ok();
    (server, metadata)
}

#[tokio::test]
async fn merge_mode_preserves_existing_metadata() {
    let (server, _) = with_metadata().await;
    let updated = server
        .put(
            "/collections/c/metadata?merge=true",
            json!({"metadata": {"new_field": "new"}}),
        )
        .await
        .ok();
    let merged =
        json!({"description": "Test", "match_threshold": 0.5, "custom_field": "value", "new_field": "new"});
    assert_eq!(
        updated,
        json!({"status": "updated", "name": "c", "metadata": merged, "merge": true})
    );
    assert_eq!(server.get("/collections/c").await.ok()["metadata"], merged);
}

#[tokio::test]
async fn replace_mode_overwrites_metadata_default() {
    let (server, _) = with_metadata().await;
    let updated = server
        .put(
            "/collections/c/metadata",
            json!({"metadata": {"new_field": "new"}}),
        )
        .await
        .ok();
    assert_eq!(updated["metadata"], json!({"new_field": "new"}));
    assert_eq!(
        server.get("/collections/c").await.ok()["metadata"],
        json!({"new_field": "new"})
    );
}

#[tokio::test]
async fn explicit_replace_mode() {
    let (server, _) = with_metadata().await;
    let updated = server
        .put(
            "/collections/c/metadata?merge=false",
            json!({"metadata": {"new_field": "new"}}),
        )
        .await
        .ok();
    assert_eq!(updated["merge"], false);
    assert_eq!(
        server.get("/collections/c").await.ok()["metadata"],
        json!({"new_field": "new"})
    );
}
