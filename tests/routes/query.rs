//! `POST /query` and `POST /collections/{name}/query`: what is asked for and what is refused.

use serde_json::{Value, json};

use crate::support::{Server, documents, ids, plain, vector};

async fn with_documents(count: usize) -> Server {
    let server = plain().await;
    server
        .post(
            "/collections",
            json!({"name": "c", "metadata": {"title": "Numbers"}}),
        )
        .await
        .ok();
    server
        .add("c", documents(count, |n| json!({"n": n, "tenth": n % 10})))
        .await;
    server
}

/// Cosine distances computed the plain way, nearest first.
fn by_brute_force(count: usize, query: &[f64], keep: impl Fn(usize) -> bool) -> Vec<(String, f64)> {
    let mut all: Vec<(String, f64)> = (0..count)
        .filter(|n| keep(*n))
        .map(|n| {
            let vector: Vec<f64> = serde_json::from_value(vector(n)).unwrap();
            (
                format!("d{n}"),
                1.0 - crate::support::fixtures::cosine(&vector, query),
            )
        })
        .collect();
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    all
}

#[tokio::test]
async fn the_nearest_come_first_with_their_true_distance() {
    let server = with_documents(500).await;
    for (top_k, modulo) in [(1, 1), (10, 1), (10, 10), (500, 1), (1000, 10)] {
        let query = [0.3, -0.8, 1.1, 0.4];
        let filter = if modulo == 1 {
            json!(null)
        } else {
            json!({"tenth": 3})
        };
        let expected = by_brute_force(500, &query, |n| modulo == 1 || n % 10 == 3);
        let body = json!({"collection": "c", "query_embedding": query, "top_k": top_k, "where": filter});
        let answer = server.post("/query", body).await.ok();
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), expected.len().min(top_k), "the true top_k");
        for (result, (id, distance)) in results.iter().zip(&expected) {
            assert_eq!(result["id"], *id);
            let found = result["distance"].as_f64().unwrap();
            assert!((found - distance).abs() < 1e-5, "{id}: {found}, not {distance}");
            assert!((result["score"].as_f64().unwrap() - (1.0 - distance / 2.0)).abs() < 1e-5);
        }
    }
}

#[tokio::test]
async fn both_routes_answer_alike() {
    let server = with_documents(10).await;
    let body = json!({"query_embedding": vector(4)});
    let below = server.post("/collections/c/query", body.clone()).await.ok();
    let mut named = body;
    named["collection"] = json!("c");
    assert_eq!(server.post("/query", named).await.ok(), below);
    assert_eq!(
        below["results"].as_array().unwrap().len(),
        3,
        "top_k is 3 unless given"
    );
    assert_eq!(below["collection_metadata"], json!({"title": "Numbers"}));
    assert_eq!(below["results"][0]["text"], "text number 4");
    assert_eq!(below["results"][0]["metadata"], json!({"n": 4, "tenth": 4}));
    let mut keys: Vec<&str> = below["results"][0]
        .as_object()
        .unwrap()
        .keys()
        .map(String::as_str)
        .collect();
    keys.sort_unstable();
    assert_eq!(keys, ["distance", "id", "metadata", "score", "text"]);
    let mut keys: Vec<&str> = below.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, ["collection_metadata", "results"]);
}

#[tokio::test]
async fn distances_go_from_zero_to_two() {
    let server = plain().await;
    server.create("c").await;
    let documents = [
        ("same", [2.0, 0.0]),
        ("across", [0.0, 1.0]),
        ("opposite", [-0.1, 0.0]),
    ];
    server
        .add(
            "c",
            documents
                .map(|(id, vector)| json!({"id": id, "text": id, "embedding": vector}))
                .to_vec(),
        )
        .await;
    let answer = server
        .post(
            "/collections/c/query",
            json!({"query_embedding": [5, 0], "top_k": 9}),
        )
        .await
        .ok();
    assert_eq!(ids(&answer["results"]), ["same", "across", "opposite"]);
    for (result, expected) in answer["results"].as_array().unwrap().iter().zip([0.0, 1.0, 2.0]) {
        assert!(
            (result["distance"].as_f64().unwrap() - expected).abs() < 1e-6,
            "{answer}"
        );
        assert!(
            (result["score"].as_f64().unwrap() - (1.0 - expected / 2.0)).abs() < 1e-6,
            "{answer}"
        );
    }
}

#[tokio::test]
async fn ids_confine_a_search_to_these_documents() {
    let server = with_documents(300).await;
    let query: Vec<f64> = serde_json::from_value(vector(7)).unwrap();
    let far: Vec<(String, f64)> = by_brute_force(300, &query, |n| n % 50 == 3);
    let mut asked: Vec<String> = far.iter().rev().map(|(id, _)| id.clone()).collect();
    asked.extend(["gone".to_owned(), asked[0].clone()]);
    let search = async |body: Value| {
        let mut whole = json!({"query_embedding": query, "top_k": 9, "ids": asked});
        whole
            .as_object_mut()
            .unwrap()
            .extend(body.as_object().unwrap().clone());
        server.post("/collections/c/query", whole).await.ok()["results"].clone()
    };
    let found = search(json!({})).await;
    let expected: Vec<&str> = far.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(ids(&found), expected);
    for (result, (_, distance)) in found.as_array().unwrap().iter().zip(&far) {
        assert!((result["distance"].as_f64().unwrap() - distance).abs() < 1e-5);
    }
    assert_eq!(ids(&search(json!({"top_k": 2})).await), expected[..2]);
    assert_eq!(ids(&search(json!({"where": {"n": 103}})).await), ["d103"]);
    assert!(ids(&search(json!({"ids": []})).await).is_empty());
    assert!(ids(&search(json!({"ids": ["gone"]})).await).is_empty());
    let by_word = json!({"mode": "hybrid", "query": "text", "ids": ["d3", "d4"]});
    let found = search(by_word).await;
    let mut both = ids(&found);
    both.sort_unstable();
    assert_eq!(both, ["d3", "d4"]);
    let by_word = json!({"mode": "keyword", "query": "number text 3", "ids": ["d3", "d4"]});
    assert!(
        ids(&search(by_word).await)
            .iter()
            .all(|id| ["d3", "d4"].contains(id))
    );
}

#[tokio::test]
async fn max_distance_leaves_out_what_is_farther() {
    let server = with_documents(100).await;
    let query: Vec<f64> = serde_json::from_value(vector(7)).unwrap();
    let expected = by_brute_force(100, &query, |_| true);
    let search = async |max: Value| {
        let body = json!({"query_embedding": query, "top_k": 1000, "max_distance": max});
        server.post("/collections/c/query", body).await.ok()["results"]
            .as_array()
            .unwrap()
            .len()
    };
    for max in [0.05, 0.2, 0.5, 1.9] {
        assert_eq!(
            search(json!(max)).await,
            expected.iter().filter(|(_, distance)| *distance <= max).count()
        );
    }
    assert_eq!(search(json!(0)).await, 100, "0 is off");
    assert_eq!(search(json!(0.0)).await, 100);
    assert_eq!(search(json!(null)).await, 100);
    assert_eq!(search(json!(2)).await, 100);
}

#[tokio::test]
async fn an_empty_collection_and_no_match_give_no_results() {
    let server = with_documents(5).await;
    server.create("empty").await;
    for mode in ["dense", "keyword", "hybrid"] {
        let body = json!({"query": "number", "query_embedding": vector(1), "mode": mode});
        let answer = server.post("/collections/empty/query", body.clone()).await.ok();
        assert_eq!(answer, json!({"results": [], "collection_metadata": {}}));
        let mut filtered = body;
        filtered["where"] = json!({"n": 77});
        assert_eq!(
            server.post("/collections/c/query", filtered).await.ok()["results"],
            json!([])
        );
    }
}

#[tokio::test]
async fn what_cannot_be_asked_is_refused() {
    let server = with_documents(5).await;
    let q = vector(1);
    let cases: Vec<(Value, &str)> = vec![
        (json!({}), "'query'"),
        (json!({"query": ""}), "'query'"),
        (json!({"query": "  "}), "'query'"),
        (json!({"query": 5}), "'query"),
        (json!({"query": ["a"]}), "'query"),
        (json!({"query_embedding": "x"}), "'query_embedding"),
        (json!({"query_embedding": []}), "'query_embedding'"),
        (json!({"query_embedding": [0, 0, 0, 0]}), "'query_embedding'"),
        (json!({"query_embedding": [1, 2, null, 4]}), "'query_embedding"),
        (json!({"query_embedding": [1, 2, "3", 4]}), "'query_embedding"),
        (json!({"query_embedding": [1, 2, 3, 1e39]}), "'query_embedding"),
        (json!({"query_embedding": [1, 2, 3]}), "dimension mismatch"),
        (json!({"query_embedding": vec![1; 9000]}), "'query_embedding"),
        (json!({"query_embedding": q, "top_k": 0}), "'top_k'"),
        (json!({"query_embedding": q, "top_k": -3}), "'top_k'"),
        (json!({"query_embedding": q, "top_k": 1001}), "1000"),
        (json!({"query_embedding": q, "top_k": 1.5}), "'top_k"),
        (json!({"query_embedding": q, "top_k": "3"}), "'top_k"),
        (
            json!({"query_embedding": q, "max_distance": -0.1}),
            "'max_distance'",
        ),
        (
            json!({"query_embedding": q, "max_distance": "near"}),
            "'max_distance",
        ),
        (json!({"query_embedding": q, "ids": "d3"}), "'ids"),
        (json!({"query_embedding": q, "ids": [""]}), "'ids'"),
        (json!({"query_embedding": q, "ids": vec!["d"; 1001]}), "1000"),
        (json!({"query_embedding": q, "mode": "sparse"}), "'sparse'"),
        (json!({"query_embedding": q, "mode": "Dense"}), "'Dense'"),
        (json!({"query_embedding": q, "mode": 1}), "'mode"),
        (json!({"query_embedding": q, "mode": "keyword"}), "'query'"),
        (json!({"query_embedding": q, "mode": "hybrid"}), "'query'"),
        (json!({"query_embedding": q, "rerank": true}), "'query'"),
        (json!({"query_embedding": q, "rerank": "yes"}), "'rerank"),
        (
            json!({"query": "x", "mode": "keyword", "max_distance": 0.5}),
            "'max_distance'",
        ),
        (
            json!({"query": "x", "query_embedding": q, "mode": "hybrid", "weights": {"dense": -1}}),
            "'weights'",
        ),
        (
            json!({"query": "x", "query_embedding": q, "mode": "hybrid", "weights": {"dense": 0, "keyword": 0}}),
            "'weights'",
        ),
        (
            json!({"query_embedding": q, "where": {"f": {"$regex": 1}}}),
            "$regex",
        ),
        (
            json!({"query_embedding": q, "expand": 5}),
            "'expand': expected the name",
        ),
        (json!({"query_embedding": q, "explain": "yes"}), "'explain"),
    ];
    for (body, named) in cases {
        let detail = server
            .post("/collections/c/query", body.clone())
            .await
            .refused(400);
        assert!(detail.contains(named), "{body}: {detail}");
    }
}

#[tokio::test]
async fn the_collection_must_be_named_once() {
    let server = with_documents(2).await;
    let q = vector(1);
    let detail = server
        .post("/query", json!({"query_embedding": q}))
        .await
        .refused(400);
    assert!(detail.contains("'collection'"), "{detail}");
    for body in [
        json!({"collection": "c", "collections": ["c"], "query_embedding": q}),
        json!({"collections": [], "query_embedding": q}),
        json!({"collections": ["not/valid"], "query_embedding": q}),
        json!({"collections": vec!["c"; 65], "query_embedding": q}),
        json!({"collection": 5, "query_embedding": q}),
    ] {
        server.post("/query", body).await.refused(400);
    }
}

#[tokio::test]
async fn several_collections_at_once() {
    let server = with_documents(5).await;
    server
        .post(
            "/collections",
            json!({"name": "other", "metadata": {"title": "Other"}}),
        )
        .await
        .ok();
    server
        .add(
            "other",
            vec![json!({"id": "x", "text": "other number", "embedding": vector(2)})],
        )
        .await;
    server.create("narrow").await;
    server
        .add(
            "narrow",
            vec![json!({"id": "y", "text": "narrow", "embedding": [1, 2]})],
        )
        .await;
    let body =
        json!({"collections": ["c", "other", "missing", "narrow"], "query_embedding": vector(2), "top_k": 3});
    let answer = server.post("/query", body).await.ok();
    let places: Vec<(&Value, &Value)> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| (&result["collection"], &result["id"]))
        .collect();
    assert_eq!(places.len(), 3);
    assert!(
        places[..2].contains(&(&json!("c"), &json!("d2")))
            && places[..2].contains(&(&json!("other"), &json!("x")))
    );
    assert_eq!(
        answer["collection_metadata"],
        json!({"c": {"title": "Numbers"}, "other": {"title": "Other"}})
    );
    let each = json!({"collections": ["c", "other"], "query_embedding": vector(2), "top_k": 2, "per_collection": true});
    let each = server.post("/query", each).await.ok();
    assert_eq!(
        each["results"].as_array().unwrap().len(),
        3,
        "two of one, all of the other: {each}"
    );
    let failures = answer["failures"].as_array().unwrap();
    assert_eq!(failures.len(), 2, "{answer}");
    let of = |name: &str| {
        failures
            .iter()
            .find(|failure| failure["collection"] == name)
            .unwrap()["detail"]
            .as_str()
            .unwrap()
    };
    assert_eq!(of("missing"), "Collection 'missing' not found");
    assert!(of("narrow").contains("dimension mismatch"), "{answer}");
    // When all of them fail, so does the search.
    server
        .post(
            "/query",
            json!({"collections": ["no", "nothing"], "query_embedding": [1]}),
        )
        .await
        .refused(404);
    let none = json!({"collections": ["no", "not/valid"], "query_embedding": [1]});
    let detail = server.post("/query", none).await.refused(404);
    assert!(
        detail.contains("no: Collection 'no' not found; not/valid: Invalid collection name"),
        "{detail}"
    );
    // A name that is none is a collection that fails.
    let odd = json!({"collections": ["not/valid", "c"], "query_embedding": vector(2)});
    let answer = server.post("/query", odd).await.ok();
    assert_eq!(answer["failures"][0]["collection"], "not/valid");
    assert_eq!(answer["results"].as_array().unwrap().len(), 3);
    let twice = json!({"collections": ["c", "other", "c"], "query_embedding": vector(2)});
    let detail = server.post("/query", twice).await.refused(400);
    assert_eq!(detail, "'collections' names 'c' more than once");
}

#[tokio::test]
async fn get_says_whether_it_is_ready() {
    let server = with_documents(1).await;
    assert_eq!(
        server.get("/query").await.ok(),
        json!({"status": "ready", "collections": 1})
    );
    server.create("d").await;
    assert_eq!(
        server.get("/query").await.ok(),
        json!({"status": "ready", "collections": 2})
    );
}

/// A document that is replaced is found by its new vector and words only.
#[tokio::test]
async fn search_follows_the_documents() {
    let server = with_documents(50).await;
    server
        .add(
            "c",
            vec![json!({"id": "d7", "text": "entirely replaced", "embedding": [-9.0, -9.0, -9.0, -9.0]})],
        )
        .await;
    server
        .delete_with("/collections/c/documents", json!(["d8"]))
        .await
        .ok();
    let near = server
        .post(
            "/collections/c/query",
            json!({"query_embedding": vector(7), "top_k": 49}),
        )
        .await
        .ok();
    assert_eq!(
        *ids(&near["results"]).last().unwrap(),
        "d7",
        "its old vector is gone"
    );
    assert!(!ids(&near["results"]).contains(&"d8"));
    let words = async |text: &str| {
        let found = server
            .post(
                "/collections/c/query",
                json!({"query": text, "mode": "keyword", "top_k": 100}),
            )
            .await
            .ok();
        ids(&found["results"])
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(words("replaced").await, ["d7"]);
    assert_eq!(words("number").await.len(), 48);
    assert!(!words("8").await.contains(&"d8".to_owned()));
}
