//! `DELETE /collections/{name}/documents`

use reqwest::Method;
use serde_json::json;

use crate::support::{Server, documents, ids, plain};

const PATH: &str = "/collections/c/documents";

async fn with_ten() -> Server {
    let server = plain().await;
    server.create("c").await;
    server
        .add(
            "c",
            documents(
                10,
                |n| json!({"parity": if n % 2 == 0 { "even" } else { "odd" }, "n": n}),
            ),
        )
        .await;
    server
}

#[tokio::test]
async fn by_ids_in_both_shapes() {
    let server = with_ten().await;
    let deleted = server
        .delete_with(PATH, json!(["d1", "d2", "missing", "d1"]))
        .await
        .ok();
    assert_eq!(
        deleted,
        json!({"status": "deleted", "collection": "c", "count": 2}),
        "what was really there"
    );
    let deleted = server.delete_with(PATH, json!({"ids": ["d3", "d2"]})).await.ok();
    assert_eq!(deleted["count"], 1);
    let left = server.get(PATH).await.ok();
    assert_eq!(
        ids(&left["documents"]),
        ["d0", "d4", "d5", "d6", "d7", "d8", "d9"]
    );
    assert_eq!(left["total"], 7);
    assert_eq!(server.delete_with(PATH, json!([])).await.ok()["count"], 0);
    assert_eq!(
        server.delete_with(PATH, json!({"ids": []})).await.ok()["count"],
        0
    );
}

#[tokio::test]
async fn by_filter() {
    let server = with_ten().await;
    let deleted = server
        .delete_with(PATH, json!({"where": {"parity": "odd", "n": {"$lt": 6}}}))
        .await
        .ok();
    assert_eq!(
        deleted,
        json!({"status": "deleted", "collection": "c", "count": 3})
    );
    let left = server.get(PATH).await.ok();
    assert_eq!(
        ids(&left["documents"]),
        ["d0", "d2", "d4", "d6", "d7", "d8", "d9"]
    );
    assert_eq!(
        server
            .delete_with(PATH, json!({"where": {"parity": "neither"}}))
            .await
            .ok()["count"],
        0
    );
    // What was deleted is in no other answer either.
    let values = server.get("/collections/c/metadata-values?field=n").await.ok();
    assert_eq!(values["values"], json!([0, 2, 4, 6, 7, 8, 9]));
    let found = server
        .post(
            "/collections/c/query",
            json!({"query": "text number", "mode": "keyword", "top_k": 100}),
        )
        .await
        .ok();
    assert_eq!(found["results"].as_array().unwrap().len(), 7);
}

#[tokio::test]
async fn what_is_unclear_deletes_nothing() {
    let server = with_ten().await;
    for body in [
        json!({}),
        json!({"where": {}}),
        json!({"where": null}),
        json!({"ids": null}),
        json!({"ids": ["d1"], "where": {"n": 2}}),
        json!({"ids": "d1"}),
        json!({"ids": [1]}),
        json!({"ids": [""]}),
        json!([1]),
        json!([["d1"]]),
        json!("d1"),
        json!({"where": "n"}),
        json!({"where": ["n"]}),
        json!({"where": {"n": {"$regex": "x"}}}),
        json!({"where": {"$and": []}}),
        json!({"where": {"$and": [{}]}}),
        json!({"where": {"$or": [{"n": 1}, {}]}}),
        json!({"where": {"$not": {"$not": {}}}}),
    ] {
        let detail = server.delete_with(PATH, body.clone()).await.refused(400);
        assert!(detail.len() > 10, "{body}: {detail}");
    }
    server.send_text(Method::DELETE, PATH, "").await.refused(400);
    assert_eq!(server.get("/collections/c").await.ok()["count"], 10);
}

#[tokio::test]
async fn refusals_of_ids_say_which_rule_they_break() {
    let server = with_ten().await;
    let detail = server.delete_with(PATH, json!({"ids": [1]})).await.refused(400);
    assert!(
        detail.contains("ids") || detail.contains("string"),
        "a person can act on it: {detail}"
    );
}
