//! The filter language, on every route that takes one.

use serde_json::{Value, json};

use crate::support::{Server, ids, plain, vector};

/// One document per shape of metadata that filters tell apart.
async fn with_shapes() -> Server {
    let server = plain().await;
    server.create("c").await;
    let shapes = [
        (
            "one",
            json!({"n": 1, "s": "apple", "l": ["red", 1, null], "b": true}),
        ),
        ("two", json!({"n": 2.5, "s": "banana", "l": [], "b": false})),
        ("text", json!({"n": "1", "s": "Apple pie", "l": "red"})),
        ("null", json!({"n": null, "s": null})),
        ("none", json!({})),
        (
            "big",
            json!({"n": 9007199254740993i64, "s": "zebra", "l": [2, 3], "o": {"n": 1}}),
        ),
        (
            "odd",
            json!({"$dollar": 1, "a.b": 2, "": 3, "'; DROP TABLE x; --": 4, "ünï": 5}),
        ),
    ];
    let documents = shapes.iter().enumerate().map(|(n, (id, metadata))| json!({"id": id, "text": format!("shape {id}"), "metadata": metadata, "embedding": vector(n)}));
    server.add("c", documents.collect()).await;
    server
}

fn cases() -> Vec<(Value, &'static [&'static str])> {
    vec![
        (json!({}), &["one", "two", "text", "null", "none", "big", "odd"]),
        (json!({"n": 1}), &["one"]),
        (json!({"n": 1.0}), &["one"]),
        (json!({"n": "1"}), &["text"]),
        (json!({"n": 2.5}), &["two"]),
        (json!({"n": null}), &["null"]),
        (json!({"b": true}), &["one"]),
        (json!({"n": 9007199254740993i64}), &["big"]),
        (json!({"n": 9007199254740992i64}), &[]),
        (json!({"l": "red"}), &["one", "text"]),
        (json!({"l": 1}), &["one"]),
        (json!({"l": null}), &["one"]),
        (json!({"n": 1, "s": "apple"}), &["one"]),
        (json!({"n": 1, "s": "banana"}), &[]),
        (json!({"n": {"$eq": 1}}), &["one"]),
        (
            json!({"n": {"$ne": 1}}),
            &["two", "text", "null", "none", "big", "odd"],
        ),
        (
            json!({"l": {"$ne": "red"}}),
            &["two", "null", "none", "big", "odd"],
        ),
        (json!({"n": {"$gt": 1}}), &["two", "big"]),
        (json!({"n": {"$gte": 1}}), &["one", "two", "big"]),
        (json!({"n": {"$lt": 2.5}}), &["one"]),
        (json!({"n": {"$lte": 2.5}}), &["one", "two"]),
        (json!({"n": {"$gte": 1, "$lt": 2}}), &["one"]),
        (json!({"s": {"$gt": "apple"}}), &["two", "big"]),
        (json!({"s": {"$lt": "apple"}}), &["text"]),
        (json!({"l": {"$gt": 1}}), &["big"]),
        (json!({"n": {"$in": [1, "1", null]}}), &["one", "text", "null"]),
        (json!({"n": {"$in": []}}), &[]),
        (
            json!({"n": {"$nin": [1, "1", null]}}),
            &["two", "none", "big", "odd"],
        ),
        (
            json!({"n": {"$nin": []}}),
            &["one", "two", "text", "null", "none", "big", "odd"],
        ),
        (json!({"s": {"$contains": "an"}}), &["two"]),
        (json!({"s": {"$contains": "pple"}}), &["one", "text"]),
        (json!({"l": {"$contains": 2}}), &["big"]),
        (json!({"l": {"$contains": "re"}}), &["text"]),
        (
            json!({"n": {"$exists": true}}),
            &["one", "two", "text", "null", "big"],
        ),
        (json!({"n": {"$exists": false}}), &["none", "odd"]),
        (json!({"o": {"$exists": true}}), &["big"]),
        (
            json!({"n": {"$not": {"$gt": 1}}}),
            &["one", "text", "null", "none", "odd"],
        ),
        (json!({"$not": {"n": {"$exists": true}}}), &["none", "odd"]),
        (
            json!({"$and": [{"n": {"$gte": 1}}, {"s": {"$lt": "b"}}]}),
            &["one"],
        ),
        (json!({"$or": [{"n": 1}, {"s": "zebra"}]}), &["one", "big"]),
        (
            json!({"$or": [{"n": 1}, {"$and": [{"b": false}, {"n": 2.5}]}], "s": {"$ne": "apple"}}),
            &["two"],
        ),
        (json!({"a.b": 2}), &["odd"]),
        (json!({"": 3}), &["odd"]),
        (json!({"'; DROP TABLE x; --": 4}), &["odd"]),
        (json!({"ünï": 5}), &["odd"]),
        (json!({"o.n": 1}), &[]),
        (json!({"s": "' OR 1=1 --"}), &[]),
        (json!({"s": "apple\u{0}"}), &[]),
    ]
}

#[tokio::test]
async fn each_operator_means_what_it_says() {
    let server = with_shapes().await;
    for (filter, expected) in cases() {
        let page = server.find("c", filter.clone()).await.ok();
        assert_eq!(ids(&page["documents"]), expected, "{filter}");
        assert_eq!(page["total"], expected.len(), "{filter}");
    }
}

/// Listing, searching in every mode, and deleting see the same documents.
#[tokio::test]
async fn every_route_means_the_same_by_a_filter() {
    let server = with_shapes().await;
    for (filter, expected) in cases() {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        for mode in ["dense", "keyword", "hybrid"] {
            let body = json!({"query": "shape", "query_embedding": vector(1), "mode": mode, "top_k": 100, "where": filter});
            let found = server.post("/collections/c/query", body).await.ok();
            let mut found = ids(&found["results"])
                .into_iter()
                .map(str::to_owned)
                .collect::<Vec<_>>();
            found.sort_unstable();
            assert_eq!(found, expected, "{mode}: {filter}");
        }
    }
    for (filter, expected) in cases().into_iter().filter(|(filter, _)| *filter != json!({})) {
        let server = with_shapes().await;
        let deleted = server
            .delete_with("/collections/c/documents", json!({"where": filter}))
            .await;
        if filter == json!({"n": {"$nin": []}}) && deleted.status == 400 {
            continue;
        }
        assert_eq!(deleted.ok()["count"], expected.len(), "{filter}");
        assert_eq!(
            server.get("/collections/c").await.ok()["count"],
            7 - expected.len()
        );
    }
}

#[tokio::test]
async fn no_filter_an_empty_one_and_null_are_the_same() {
    let server = with_shapes().await;
    for filter in ["", "{}", "null", "  "] {
        let page = server
            .get_with("/collections/c/documents", &[("where", filter)])
            .await
            .ok();
        assert_eq!(page["total"], 7, "{filter:?}");
    }
}

#[tokio::test]
async fn refusals_name_the_offender() {
    let server = with_shapes().await;
    let list = |n: usize| (0..n).collect::<Vec<_>>();
    let wide = |n: usize| json!({"$or": (0..n).map(|i| json!({"f": i})).collect::<Vec<_>>()});
    let deep = |n: usize| (1..n).fold(json!({"f": 1}), |inner, _| json!({"$not": inner}));
    let cases = [
        (json!({"f": {"$regex": "x"}}), "$regex"),
        (json!({"f": {"gt": 1}}), "gt"),
        (json!({"f": {"$eq": 1, "$near": 2}}), "$near"),
        (json!({"$nor": [{"f": 1}]}), "$nor"),
        (json!({"$gt": 1}), "$gt"),
        (json!({"f": {}}), "'f'"),
        (json!({"f": [1]}), "'f'"),
        (json!({"f": {"$eq": [1]}}), "$eq"),
        (json!({"f": {"$eq": {"a": 1}}}), "$eq"),
        (json!({"f": {"$ne": [1]}}), "$ne"),
        (json!({"f": {"$gt": true}}), "$gt"),
        (json!({"f": {"$gte": null}}), "$gte"),
        (json!({"f": {"$lt": [1]}}), "$lt"),
        (json!({"f": {"$lte": {}}}), "$lte"),
        (json!({"f": {"$in": 3}}), "$in"),
        (json!({"f": {"$in": [[1]]}}), "$in"),
        (json!({"f": {"$nin": "x"}}), "$nin"),
        (json!({"f": {"$contains": [1]}}), "$contains"),
        (json!({"f": {"$exists": 1}}), "$exists"),
        (json!({"f": {"$exists": "true"}}), "$exists"),
        (json!({"f": {"$not": 1}}), "$not"),
        (json!({"$not": [{"f": 1}]}), "$not"),
        (json!({"$and": {}}), "$and"),
        (json!({"$and": []}), "$and"),
        (json!({"$or": [1]}), "$or"),
        (json!({"$or": [[]]}), "$or"),
        (json!({"f": {"$in": list(1001)}}), "1001"),
        (json!({"f": {"$nin": list(1001)}}), "1001"),
        (wide(512), "512"),
        (deep(33), "32"),
        (json!([]), "object"),
        (json!("f"), "object"),
        (json!(1), "object"),
        (json!(true), "object"),
    ];
    for (filter, named) in cases {
        let by_get = server.find("c", filter.clone()).await.refused(400);
        let by_query = server
            .post(
                "/collections/c/query",
                json!({"query_embedding": vector(1), "where": filter}),
            )
            .await
            .refused(400);
        assert_eq!(by_get, by_query, "one parser, one message");
        assert!(
            by_get.starts_with("Invalid 'where' filter: ") && by_get.contains(named),
            "{named}: {by_get}"
        );
        assert!(by_get.len() < 400, "{by_get}");
        server
            .delete_with("/collections/c/documents", json!({"where": filter}))
            .await
            .refused(400);
    }
    assert_eq!(server.get("/collections/c").await.ok()["count"], 7);
    for (filter, total) in [
        (json!({"f": {"$nin": list(1000)}}), 7),
        (wide(511), 0),
        (deep(32), 7),
    ] {
        assert_eq!(
            server.find("c", filter).await.ok()["total"],
            total,
            "just within the limits"
        );
    }
}

#[tokio::test]
async fn what_is_no_json_says_so() {
    let server = with_shapes().await;
    let nested = "[".repeat(10_000);
    for text in [
        "x",
        "{",
        "{'f': 1}",
        "{\"f\": }",
        "{\"f\": 1} more",
        "{\"f\": NaN}",
        "{\"f\": \"\\ud800\"}",
        nested.as_str(),
    ] {
        let detail = server
            .get_with("/collections/c/documents", &[("where", text)])
            .await
            .refused(400);
        assert!(
            detail.starts_with("Invalid 'where' filter: must be valid JSON"),
            "{text:.40}: {detail}"
        );
    }
}
