//! `GET /collections/{name}/metadata-values`

use serde_json::json;

use crate::support::{documents, plain};

#[tokio::test]
async fn types_are_kept_and_numbers_come_before_strings() {
    let server = plain().await;
    server.create("c").await;
    let values = [
        json!("10"),
        json!(10),
        json!(2),
        json!(1.5),
        json!(-1),
        json!("a"),
        json!(2.0),
        json!("B"),
        json!(""),
    ];
    server
        .add("c", documents(values.len(), |n| json!({"f": values[n]})))
        .await;
    let answer = server.get("/collections/c/metadata-values?field=f").await.ok();
    assert_eq!(answer["values"], json!([-1, 1.5, 2, 10, "", "10", "B", "a"]));
    assert_eq!(answer["count"], 8);
}

#[tokio::test]
async fn lists_count_with_each_element_and_objects_not_at_all() {
    let server = plain().await;
    server.create("c").await;
    let values = [
        json!(["b", "a"]),
        json!("a"),
        json!(["c", ["x"], {"y": 1}]),
        json!({"z": 1}),
        json!([]),
    ];
    server
        .add("c", documents(values.len(), |n| json!({"tags": values[n]})))
        .await;
    let answer = server.get("/collections/c/metadata-values?field=tags").await.ok();
    assert_eq!(
        answer,
        json!({"field": "tags", "values": ["a", "b", "c"], "count": 3})
    );
}

#[tokio::test]
async fn values_follow_the_documents() {
    let server = plain().await;
    server.create("c").await;
    let values = async || server.get("/collections/c/metadata-values?field=f").await.ok()["values"].clone();
    server.add("c", documents(3, |n| json!({"f": n}))).await;
    assert_eq!(values().await, json!([0, 1, 2]));
    server
        .delete_with("/collections/c/documents", json!(["d1"]))
        .await
        .ok();
    assert_eq!(values().await, json!([0, 2]));
    server.add("c", documents(1, |_| json!({"f": "new"}))).await;
    assert_eq!(values().await, json!([2, "new"]));
    server.delete("/collections/c/documents/all").await.ok();
    assert_eq!(values().await, json!([]));
}

#[tokio::test]
async fn a_field_may_have_any_name() {
    let server = plain().await;
    server.create("c").await;
    server
        .add(
            "c",
            documents(
                1,
                |_| json!({"a b&c=d": 1, "ünï": 2, "$x": 3, "a.b": 4, "'; --": 5}),
            ),
        )
        .await;
    for (field, value) in [("a b&c=d", 1), ("ünï", 2), ("$x", 3), ("a.b", 4), ("'; --", 5)] {
        let answer = server
            .get_with("/collections/c/metadata-values", &[("field", field)])
            .await
            .ok();
        assert_eq!(answer, json!({"field": field, "values": [value], "count": 1}));
    }
}

#[tokio::test]
async fn thousands_of_values_come_whole() {
    let server = plain().await;
    server.create("c").await;
    server
        .add(
            "c",
            documents(5000, |n| json!({"f": format!("v{:04}", (n * 7) % 5000)})),
        )
        .await;
    let answer = server.get("/collections/c/metadata-values?field=f").await.ok();
    let expected: Vec<String> = (0..5000).map(|n| format!("v{n:04}")).collect();
    assert_eq!(answer["values"], json!(expected));
}
