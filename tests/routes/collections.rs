//! `/collections` and `/collections/{name}`

use serde_json::json;

use crate::support::{documents, plain};

#[tokio::test]
async fn names_follow_the_rule() {
    let server = plain().await;
    let longest = "x".repeat(128);
    for good in ["a", "9", "A.b_c-d", longest.as_str(), "all", "documents", "a..b"] {
        assert_eq!(
            server.post("/collections", json!({"name": good})).await.ok()["name"],
            good
        );
        assert_eq!(
            server.get(&format!("/collections/{good}")).await.ok()["name"],
            good
        );
    }
    let too_long = "x".repeat(129);
    let wrong = [
        "",
        ".a",
        "-a",
        "_a",
        "a b",
        "a/b",
        "ä",
        "a\n",
        "a\0",
        "a'b",
        "..",
        too_long.as_str(),
    ];
    for bad in wrong {
        let detail = server
            .post("/collections", json!({"name": bad}))
            .await
            .refused(400);
        assert!(detail.starts_with("Invalid collection name"), "{bad:?}: {detail}");
        assert!(detail.len() < 500, "what was sent is not echoed whole: {detail}");
    }
    assert_eq!(
        server.get("/collections").await.ok()["collections"]
            .as_array()
            .unwrap()
            .len(),
        7
    );
}

#[tokio::test]
async fn bad_bodies_are_refused_by_name() {
    let server = plain().await;
    for (body, named) in [
        (json!({}), "'name'"),
        (json!({"metadata": {}}), "'name'"),
        (json!({"name": 5}), "'name"),
        (json!({"name": null}), "'name"),
        (json!({"name": ["a"]}), "'name"),
        (json!({"name": "a", "metadata": "x"}), "'metadata"),
        (json!({"name": "a", "metadata": [1]}), "'metadata"),
        (json!({"name": "a", "embedding_model": 7}), "'embedding_model"),
        (json!([]), ""),
    ] {
        let detail = server.post("/collections", body.clone()).await.refused(400);
        assert!(detail.contains(named), "{body}: {detail}");
    }
    assert_eq!(server.get("/collections").await.ok(), json!({"collections": []}));
}

#[tokio::test]
async fn an_existing_name_is_409_and_stays_as_it_was() {
    let server = plain().await;
    server
        .post("/collections", json!({"name": "c", "metadata": {"first": true}}))
        .await
        .ok();
    server.add("c", documents(2, |_| json!({}))).await;
    let detail = server
        .post("/collections", json!({"name": "c", "metadata": {"second": true}}))
        .await
        .refused(409);
    assert!(detail.contains("'c'"), "{detail}");
    assert_eq!(
        server.get("/collections/c").await.ok(),
        json!({"name": "c", "count": 2, "metadata": {"first": true}})
    );
    // Names differ by case.
    server.create("C").await;
}

#[tokio::test]
async fn the_two_embedding_fields_go_into_metadata() {
    let server = plain().await;
    let body =
        json!({"name": "c", "embedding_model": "top", "metadata": {"embedding_model": "inner", "x": 1}});
    let created = server.post("/collections", body).await.ok();
    assert_eq!(created["metadata"], json!({"embedding_model": "top", "x": 1}));
    let body = json!({"name": "d", "embedding_model": null, "embedding_provider": null, "metadata": null});
    assert_eq!(
        server.post("/collections", body).await.ok()["metadata"],
        json!({})
    );
}

#[tokio::test]
async fn metadata_is_any_json_object() {
    let server = plain().await;
    let metadata = json!({
        "": "empty key", "ünï": "cödé 🦀", "nested": {"deep": [[{"x": null}]]}, "big": 18446744073709551615u64,
        "small": -9223372036854775808i64, "float": 0.1, "sql": "'; DROP TABLE collections; --", "nul": "a\u{0}b",
    });
    server
        .post("/collections", json!({"name": "c", "metadata": metadata}))
        .await
        .ok();
    let server = server.restarted().await;
    assert_eq!(server.get("/collections/c").await.ok()["metadata"], metadata);
}

#[tokio::test]
async fn deleting_a_collection_deletes_its_documents() {
    let server = plain().await;
    server.create("c").await;
    server.add("c", documents(3, |_| json!({"k": "v"}))).await;
    assert_eq!(
        server.delete("/collections/c").await.ok(),
        json!({"status": "deleted", "name": "c"})
    );
    for path in [
        "/collections/c",
        "/collections/c/documents",
        "/collections/c/documents/d0",
    ] {
        assert_eq!(server.get(path).await.refused(404), "Collection 'c' not found");
    }
    assert_eq!(
        server.delete("/collections/c").await.refused(404),
        "Collection 'c' not found"
    );
    // The name is free again, and nothing of the old one is left, not even its width.
    server.create("c").await;
    assert_eq!(server.get("/collections/c").await.ok()["count"], 0);
    server
        .add("c", vec![json!({"text": "t", "embedding": [1, 2]})])
        .await;
    assert_eq!(
        server.get("/collections/c/metadata-values?field=k").await.ok()["values"],
        json!([])
    );
}

#[tokio::test]
async fn every_route_of_an_unknown_collection_is_404() {
    let server = plain().await;
    let unknown = "Collection 'no' not found";
    assert_eq!(server.get("/collections/no").await.refused(404), unknown);
    assert_eq!(server.delete("/collections/no").await.refused(404), unknown);
    assert_eq!(
        server
            .put("/collections/no/metadata", json!({"metadata": {}}))
            .await
            .refused(404),
        unknown
    );
    let add = json!({"documents": [{"text": "t", "embedding": [1]}]});
    assert_eq!(
        server.post("/collections/no/documents", add).await.refused(404),
        unknown
    );
    assert_eq!(
        server.get("/collections/no/documents/x").await.refused(404),
        unknown
    );
    assert_eq!(
        server
            .delete_with("/collections/no/documents", json!(["x"]))
            .await
            .refused(404),
        unknown
    );
    assert_eq!(
        server
            .delete_with("/collections/no/documents", json!({"where": {"a": 1}}))
            .await
            .refused(404),
        unknown
    );
    let query = json!({"query_embedding": [1]});
    assert_eq!(
        server.post("/collections/no/query", query).await.refused(404),
        unknown
    );
    assert_eq!(
        server
            .post("/collections/no/query", json!({"query": "t"}))
            .await
            .refused(404),
        unknown
    );
    let query = json!({"collection": "no", "query": "t", "mode": "keyword"});
    assert_eq!(server.post("/query", query).await.refused(404), unknown);
}

/// Whether a name breaks the rule or is merely unknown, there is nothing under it.
#[tokio::test]
async fn a_name_that_cannot_exist_is_a_client_error() {
    let server = plain().await;
    for name in [".internal", "a%20b", "%C3%A4", "..%2f..%2fetc"] {
        let answer = server.get(&format!("/collections/{name}")).await;
        assert!(matches!(answer.status, 400 | 404), "{answer:?}");
        answer.refused(answer.status);
    }
}

#[tokio::test]
async fn metadata_updates_are_checked() {
    let server = plain().await;
    server
        .post("/collections", json!({"name": "c", "metadata": {"a": 1}}))
        .await
        .ok();
    for body in [
        json!({}),
        json!({"metadata": null}),
        json!({"metadata": []}),
        json!({"metadata": "x"}),
        json!({"metadata": {}, "merge": "yes"}),
    ] {
        server.put("/collections/c/metadata", body).await.refused(400);
    }
    for merge in ["maybe", "2", "TRUE ", ""] {
        let detail = server
            .put(
                &format!("/collections/c/metadata?merge={merge}"),
                json!({"metadata": {}}),
            )
            .await
            .refused(400);
        assert!(detail.contains("'merge'"), "{detail}");
    }
    assert_eq!(
        server.get("/collections/c").await.ok()["metadata"],
        json!({"a": 1})
    );
}

#[tokio::test]
async fn merging_replaces_top_level_keys_only() {
    let server = plain().await;
    server
        .post(
            "/collections",
            json!({"name": "c", "metadata": {"a": {"x": 1}, "b": 2}}),
        )
        .await
        .ok();
    let merged = server
        .put(
            "/collections/c/metadata?merge=true",
            json!({"metadata": {"a": {"y": 2}, "c": null}}),
        )
        .await
        .ok();
    assert_eq!(merged["metadata"], json!({"a": {"y": 2}, "b": 2, "c": null}));
    let in_body = server
        .put(
            "/collections/c/metadata",
            json!({"metadata": {"d": 4}, "merge": true}),
        )
        .await
        .ok();
    assert_eq!(
        in_body["metadata"],
        json!({"a": {"y": 2}, "b": 2, "c": null, "d": 4})
    );
    let parameter_wins = server
        .put(
            "/collections/c/metadata?merge=false",
            json!({"metadata": {}, "merge": true}),
        )
        .await
        .ok();
    assert_eq!(parameter_wins["metadata"], json!({}));
}

#[tokio::test]
async fn counts_follow_the_documents() {
    let server = plain().await;
    server.create("c").await;
    let count = async || server.get("/collections/c").await.ok()["count"].clone();
    server.add("c", documents(10, |_| json!({}))).await;
    assert_eq!(count().await, 10);
    server.add("c", documents(5, |_| json!({"again": true}))).await;
    assert_eq!(count().await, 10, "the same ids are replaced");
    server
        .delete_with("/collections/c/documents", json!(["d0", "nothing"]))
        .await
        .ok();
    assert_eq!(count().await, 9);
    let listed = server.get("/collections").await.ok();
    assert_eq!(listed["collections"][0]["count"], 9);
}

/// Many collections, made at once, are all there.
#[tokio::test]
async fn many_collections() {
    let server = plain().await;
    let made = (0..100).map(|n| {
        server.post(
            "/collections",
            json!({"name": format!("c{n:03}"), "metadata": {"n": n}}),
        )
    });
    for answer in futures::future::join_all(made).await {
        answer.ok();
    }
    let listed = server.get("/collections").await.ok();
    let names: Vec<&str> = listed["collections"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["name"].as_str().unwrap())
        .collect();
    let expected: Vec<String> = (0..100).map(|n| format!("c{n:03}")).collect();
    assert_eq!(names, expected);
}
