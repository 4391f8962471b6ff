//! `POST /api/rag/collect`

use serde_json::{Value, json};

use super::{Pair, add, create, pair, services, with_model};
use crate::support::{Server, Setup, fixtures, plain};

const FRUIT: [&str; 4] = [
    "red apples grow on trees",
    "apples are stored in cellars",
    "pears are green",
    "plums are blue",
];

fn target(service: &str, name: &str) -> Value {
    json!({"service": service, "name": name})
}

async fn collected(server: &Server, body: Value) -> Value {
    server.post("/api/rag/collect", body).await.ok()
}

#[tokio::test]
async fn collections_of_several_services_are_searched_at_once() {
    let Pair { near, far: _far } = pair().await;
    create(&near, "local", "a", json!({})).await;
    create(&near, "far", "b", json!({})).await;
    add(&near, "local", "a", &FRUIT).await;
    add(&near, "far", "b", &FRUIT).await;
    let collections = json!([target("local", "a"), target("far", "b"), target("local", "a")]);
    let answer = collected(
        &near,
        json!({"user_message": FRUIT[2], "collections": collections, "top_k": 4}),
    )
    .await;
    let results = answer["results"].as_array().unwrap();
    assert_eq!(
        results.len(),
        4,
        "of all collections together, each once: {answer}"
    );
    let mut best: Vec<(&str, &str)> = results[..2]
        .iter()
        .map(|hit| (hit["service"].as_str().unwrap(), hit["id"].as_str().unwrap()))
        .collect();
    best.sort_unstable();
    assert_eq!(
        best,
        [("far", "b-2"), ("local", "a-2")],
        "the same text is nearest in both"
    );
    for hit in results {
        assert!(
            hit["distance"].is_number() && hit["score"].is_number() && hit["metadata"].is_object(),
            "{hit}"
        );
        assert_eq!(hit["collection"], if hit["service"] == "far" { "b" } else { "a" });
    }
    assert!(
        results.is_sorted_by_key(|hit| hit["distance"].as_f64().unwrap()),
        "{answer}"
    );
    assert_eq!(
        (&answer["reranked"], &answer["warnings"]),
        (&json!(false), &json!([]))
    );
    assert_eq!(answer["result"], "match");
}

#[tokio::test]
async fn thresholds_come_from_the_collections_metadata() {
    let server = with_model(Setup::serve()).start().await;
    for (name, matching, partial, result) in [
        ("m", 2.0, 2.0, "match"),
        ("p", 0.0, 2.0, "partial"),
        ("n", 0.0, 0.0, "none"),
    ] {
        create(
            &server,
            "local",
            name,
            json!({"match_threshold": matching, "partial_threshold": partial}),
        )
        .await;
        add(&server, "local", name, &FRUIT).await;
        let body =
            json!({"user_message": "something else", "collections": [target("local", name)], "top_k": 1});
        let answer = collected(&server, body).await;
        assert_eq!(
            (&answer["result"], &answer["results"][0]["result"]),
            (&json!(result), &json!(result)),
            "{answer}"
        );
    }
    let all = json!([target("local", "n"), target("local", "p")]);
    let answer = collected(
        &server,
        json!({"user_message": "something else", "collections": all}),
    )
    .await;
    assert_eq!(answer["result"], "partial", "the best of all counts");
}

#[tokio::test]
async fn results_are_reranked_and_expanded_where_that_is_wanted() {
    let setup = with_model(Setup::serve())
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"));
    let server = setup.start().await;
    create(&server, "local", "a", json!({})).await;
    add(&server, "local", "a", &FRUIT).await;
    let body = json!({"user_message": "apples", "collections": [target("local", "a")], "top_k": 2, "rerank": true, "expand": "section_id"});
    let answer = collected(&server, body).await;
    assert_eq!(answer["reranked"], true);
    let documents: Vec<Value> = FRUIT
        .iter()
        .enumerate()
        .map(|(n, text)| json!({"id": format!("a-{n}"), "text": text}))
        .collect();
    let expected = server
        .post(
            "/rerank",
            json!({"query": "apples", "documents": documents, "top_k": 2}),
        )
        .await
        .ok();
    for (hit, expected) in answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .zip(expected["reranked"].as_array().unwrap())
    {
        assert_eq!(hit["id"], expected["id"]);
        let difference = hit["rerank_score"].as_f64().unwrap() - expected["score"].as_f64().unwrap();
        assert!(difference.abs() < 1e-5, "{hit} {expected}");
        let siblings = hit["siblings"].as_array().unwrap();
        assert_eq!(siblings.len(), 2, "{hit}");
        assert!(
            siblings
                .iter()
                .all(|sibling| sibling["metadata"]["section_id"] == hit["metadata"]["section_id"])
        );
    }
}

#[tokio::test]
async fn without_a_cross_encoder_the_order_stays_and_a_warning_says_so() {
    let server = with_model(Setup::serve()).start().await;
    create(&server, "local", "a", json!({})).await;
    add(&server, "local", "a", &FRUIT).await;
    let plain = collected(
        &server,
        json!({"user_message": "apples", "collections": [target("local", "a")]}),
    )
    .await;
    let body = json!({"user_message": "apples", "collections": [target("local", "a")], "rerank": true});
    let answer = collected(&server, body).await;
    assert_eq!(
        (&answer["reranked"], &answer["results"]),
        (&json!(false), &plain["results"])
    );
    assert!(
        answer["warnings"][0]
            .as_str()
            .unwrap()
            .contains("Cross-encoder not loaded"),
        "{answer}"
    );
}

#[tokio::test]
async fn what_is_missing_or_wrong_is_named() {
    let server = plain().await;
    let collections = json!([target("local", "c")]);
    for (body, named) in [
        (json!({"collections": collections}), "user_message"),
        (
            json!({"user_message": "  ", "collections": collections}),
            "user_message",
        ),
        (json!({"user_message": "m"}), "collections"),
        (json!({"user_message": "m", "collections": []}), "collections"),
        (
            json!({"user_message": "m", "collections": [{"service": "local"}]}),
            "index 0",
        ),
        (
            json!({"user_message": "m", "collections": [target("local", "a b")]}),
            "a b",
        ),
        (
            json!({"user_message": "m", "collections": vec![target("local", "c"); 65]}),
            "65",
        ),
        (
            json!({"user_message": "m", "collections": collections, "top_k": 0}),
            "top_k",
        ),
        (
            json!({"user_message": "m", "collections": collections, "mode": "psychic"}),
            "psychic",
        ),
        (
            json!({"user_message": "m", "collections": collections, "conversation_id": ""}),
            "conversation_id",
        ),
        (
            json!({"user_message": "m", "collections": collections, "conversation_id": "x".repeat(300)}),
            "conversation_id",
        ),
    ] {
        let detail = server.post("/api/rag/collect", body).await.refused(400);
        assert!(detail.contains(named), "{detail}");
    }
}

/// A service that embeds by itself is asked once, whatever the number of its collections; each is graded
/// by its own thresholds, and one that is not there is a warning.
#[tokio::test]
async fn the_collections_of_another_service_are_asked_for_in_one_call() {
    let Pair { near, far } = pair().await;
    create(
        &near,
        "far",
        "a",
        json!({"match_threshold": 0.0, "partial_threshold": 0.0}),
    )
    .await;
    create(&near, "far", "b", json!({"match_threshold": 2.0})).await;
    add(&near, "far", "a", &FRUIT).await;
    add(&near, "far", "b", &FRUIT[..1]).await;
    let targets = json!([target("far", "a"), target("far", "b")]);
    let body = json!({"user_message": FRUIT[2], "collections": targets, "top_k": 2});
    let answer = collected(&near, body).await;
    assert_eq!(answer["warnings"], json!([]));
    let hits: Vec<(&str, &str)> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|hit| (hit["collection"].as_str().unwrap(), hit["id"].as_str().unwrap()))
        .collect();
    assert_eq!(hits[0], ("a", "a-2"));
    assert_eq!(
        answer["result"], "match",
        "also a hit below the first two counts: {answer}"
    );
    let asked = |metrics: String| {
        let line = metrics
            .lines()
            .find(|line| line.starts_with("ragstone_queries_total"))
            .map(str::to_owned);
        line.unwrap_or_default()
    };
    let line = asked(far.get("/metrics").await.text);
    assert!(line.ends_with(" 1"), "{line}");

    let targets = json!([target("far", "a"), target("far", "none"), target("far", "b")]);
    let answer = collected(&near, json!({"user_message": FRUIT[2], "collections": targets})).await;
    assert_eq!(answer["results"].as_array().unwrap().len(), 5, "{answer}");
    let warnings = answer["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 1, "{answer}");
    let warning = warnings[0].as_str().unwrap();
    assert!(
        warning.starts_with("far/none: ") && warning.contains("Collection 'none' not found"),
        "{warning}"
    );
}

/// Fusing and reranking ask for more than the user did, which such a service refuses.
#[tokio::test]
async fn a_service_of_few_results_gives_as_many_as_were_asked_for() {
    let far = with_model(Setup::serve())
        .config("server: {limits: {topK: 5}}")
        .start()
        .await;
    let near = with_model(Setup::serve())
        .config(&services(&[("far", &far.url(""))]))
        .start()
        .await;
    for name in ["a", "b"] {
        create(&near, "far", name, json!({})).await;
        add(&near, "far", name, &FRUIT).await;
    }
    for targets in [
        json!([target("far", "a")]),
        json!([target("far", "a"), target("far", "b")]),
    ] {
        let body = json!({"user_message": FRUIT[2], "collections": targets, "top_k": 2, "mode": "hybrid"});
        let answer = collected(&near, body).await;
        assert_eq!(answer["warnings"], json!([]), "{answer}");
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), 2, "{answer}");
        assert_eq!(results[0]["text"], FRUIT[2], "{answer}");
    }
    let body =
        json!({"user_message": "m", "collections": [target("far", "a")], "top_k": 6, "mode": "hybrid"});
    let detail = near.post("/api/rag/collect", body).await.refused(400);
    assert!(detail.contains("'top_k'"), "{detail}");
}

#[tokio::test]
async fn where_fewer_are_allowed_than_are_usual_they_are_what_comes() {
    let server = with_model(Setup::serve())
        .config("server: {limits: {topK: 2}}")
        .start()
        .await;
    create(&server, "local", "a", json!({})).await;
    add(&server, "local", "a", &FRUIT).await;
    let body = json!({"user_message": "apples", "collections": [target("local", "a")]});
    let answer = collected(&server, body).await;
    assert_eq!(answer["results"].as_array().unwrap().len(), 2, "{answer}");
    let found = server
        .post("/collections/a/query", json!({"query": "apples"}))
        .await
        .ok();
    assert_eq!(found["results"].as_array().unwrap().len(), 2, "{found}");
}
