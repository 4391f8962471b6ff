use serde_json::json;

use super::{document, fill};
use crate::support::Setup;

#[tokio::test]
async fn pages_of_an_export_go_on_where_the_last_one_ended() {
    let server = Setup::without_models().start().await;
    fill(&server, "docs", 5).await;
    let first = server.get("/collections/docs/export?limit=3").await.ok();
    assert_eq!(first["documents"].as_array().unwrap().len(), 3);
    assert_eq!(first["more"], true);
    let next = format!("/collections/docs/export?limit=3&after={}", first["last"]);
    let second = server.get(&next).await.ok();
    assert_eq!(
        (&second["documents"][0]["id"], &second["more"]),
        (&json!("d3"), &json!(false))
    );
    assert_eq!(first["documents"][2]["metadata"], document(2)["metadata"]);
    assert!(first["documents"][2]["norm"].as_f64().unwrap() > 3.0);
    server.get("/collections/none/export").await.refused(404);
    let refusal = server.get("/collections/docs/export?after=x").await.refused(400);
    assert!(refusal.contains("'after'"), "{refusal}");
}

#[tokio::test]
async fn what_is_imported_is_all_there_or_not_at_all() {
    let server = Setup::without_models().start().await;
    server.create("docs").await;
    let path = "/collections/docs/import";
    let good = json!({"id": "a", "text": "t", "embedding": [0.6, 0.8], "norm": 5.0,
        "model": {"id": "m", "version": "1", "dimensions": 2}});
    for (bad, expected) in [
        (
            json!({"id": "", "text": "t", "embedding": [1.0, 0.0]}),
            "index 1: a document id",
        ),
        (
            json!({"id": "b", "text": "t", "embedding": [3.0, 4.0], "norm": 5.0}),
            "index 1: an embedding beside a 'norm'",
        ),
        (
            json!({"id": "b", "text": "t", "embedding": [0.0, 0.0]}),
            "index 1: an embedding must not be all zeros",
        ),
        (
            json!({"id": "b", "text": "t", "embedding": [1.0, 0.0], "norm": -1.0}),
            "index 1: 'norm'",
        ),
        (
            json!({"id": "a", "text": "t", "embedding": [1.0, 0.0]}),
            "index 1 has the same id",
        ),
        (
            json!({"id": "b", "text": "t", "embedding": [1.0]}),
            "dimension mismatch",
        ),
        (json!({"id": "b", "text": "t"}), "'embedding' is required"),
        (
            json!({"id": "b", "text": "t", "embedding": [1.0, 0.0], "model": {"id": "m", "version": "1", "dimensions": 3}}),
            "its model makes vectors of 3",
        ),
    ] {
        let body = json!({"documents": [good, bad]});
        let refusal = server.post(path, body).await.refused(400);
        assert!(refusal.contains(expected), "{expected}: {refusal}");
    }
    assert_eq!(server.get("/collections/docs").await.ok()["count"], 0);
    let raw = json!({"id": "b", "text": "t", "embedding": [3.0, 4.0]});
    let stored = server.post(path, json!({"documents": [good, raw]})).await.ok();
    assert_eq!(
        stored,
        json!({"status": "imported", "collection": "docs", "count": 2})
    );
    let page = server.get("/collections/docs/export").await.ok();
    let mut expected = good.clone();
    expected["metadata"] = json!({});
    assert_eq!(page["documents"][0], expected);
    assert_eq!(page["documents"][1]["norm"], 5.0);
    server
        .post("/collections/none/import", json!({"documents": [good]}))
        .await
        .refused(404);
}
