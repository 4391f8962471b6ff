//! Search by word and by both, explained, expanded.

use serde_json::{Value, json};

use crate::support::{Server, documents, ids, plain, vector};

/// Texts of one length, so that a rank can be told from the words alone.
async fn library() -> Server {
    let server = plain().await;
    server.create("c").await;
    let texts = [
        ("part", "order number ZX-4417 for the pump", [1.0, 0.0, 0.0]),
        (
            "code",
            "call snake_case_name before version v1.2.3",
            [0.0, 1.0, 0.0],
        ),
        ("runs", "the engine was running all night", [0.0, 0.0, 1.0]),
        ("city", "Zürich lies beside a wide lake", [1.0, 1.0, 0.0]),
        ("pump", "pump pump pump water up here", [1.0, 0.0, 1.0]),
    ];
    let documents = texts.iter().enumerate().map(|(n, (id, text, vector))| {
        json!({"id": id, "text": text, "embedding": vector, "metadata": {"section": if n < 3 { "first" } else { "second" }, "position": 10 - n}})
    });
    server.add("c", documents.collect()).await;
    server
}

async fn found(server: &Server, mut body: Value) -> Vec<String> {
    body["top_k"] = json!(10);
    let answer = server.post("/collections/c/query", body).await.ok();
    ids(&answer["results"]).into_iter().map(str::to_owned).collect()
}

#[tokio::test]
async fn keywords_find_identifiers_stems_and_folded_letters() {
    let server = library().await;
    for (query, expected) in [
        ("ZX-4417", &["part"][..]),
        ("zx-4417", &["part"]),
        ("4417", &["part"]),
        ("snake_case_name", &["code"]),
        ("v1.2.3", &["code"]),
        ("run", &["runs"]),
        ("runs", &["runs"]),
        ("engines", &["runs"]),
        ("Zurich", &["city"]),
        ("ZÜRICH", &["city"]),
        ("pump", &["pump", "part"]),
        ("nothing-of-the-kind", &[]),
        ("\"unbalanced AND (syntax* NEAR", &[]),
    ] {
        assert_eq!(
            found(&server, json!({"query": query, "mode": "keyword"})).await,
            expected,
            "{query}"
        );
    }
}

#[tokio::test]
async fn keyword_results_have_no_distance() {
    let server = library().await;
    let answer = server
        .post(
            "/collections/c/query",
            json!({"query": "pump", "mode": "keyword"}),
        )
        .await
        .ok();
    for result in answer["results"].as_array().unwrap() {
        assert_eq!(
            (&result["distance"], &result["score"]),
            (&Value::Null, &Value::Null)
        );
        assert!(result["keyword_score"].as_f64().unwrap() > 0.0);
    }
}

/// Reciprocal rank fusion: a document's score is the sum of 1/(60 + rank) over both rankings.
#[tokio::test]
async fn hybrid_fuses_both_rankings() {
    let server = library().await;
    let body = json!({"query": "pump", "query_embedding": [1.0, 0.1, 0.0], "mode": "hybrid", "top_k": 10, "explain": true});
    let answer = server.post("/collections/c/query", body).await.ok();
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 5, "what either finds is there");
    let order = ids(&answer["results"]);
    assert_eq!(order[0], "part", "first by meaning and second by word: {answer}");
    let mut fused: Vec<f64> = Vec::new();
    for result in results {
        let explain = &result["explain"];
        let part = |stage: &str| {
            explain[stage]["rank"]
                .as_f64()
                .map_or(0.0, |rank| 1.0 / (60.0 + rank))
        };
        let expected = part("dense") + part("keyword");
        let score = explain["fused"]["score"].as_f64().unwrap();
        assert!((score - expected).abs() < 1e-9, "{result}");
        assert_eq!(explain["fused"]["rank"], fused.len() + 1);
        fused.push(score);
    }
    assert!(fused.is_sorted_by(|a, b| a >= b));
    assert!(
        answer["timings_ms"]
            .as_object()
            .is_some_and(|stages| !stages.is_empty()),
        "{answer}"
    );
}

#[tokio::test]
async fn weights_shift_the_fusion() {
    let server = library().await;
    let weighted = async |dense: f64, keyword: f64| {
        let weights = json!({"dense": dense, "keyword": keyword});
        found(&server, json!({"query": "engine", "query_embedding": [1.0, 0.0, 0.0], "mode": "hybrid", "weights": weights})).await
    };
    assert_eq!(weighted(1.0, 0.0).await[0], "part");
    assert_eq!(weighted(0.0, 1.0).await[0], "runs");
    assert_eq!(weighted(0.1, 5.0).await[0], "runs");
}

#[tokio::test]
async fn explain_is_only_there_when_asked_for() {
    let server = library().await;
    let answer = server
        .post("/collections/c/query", json!({"query_embedding": [1, 0, 0]}))
        .await
        .ok();
    assert!(answer.get("timings_ms").is_none() && answer["results"][0].get("explain").is_none());
    let answer = server
        .post(
            "/collections/c/query",
            json!({"query_embedding": [1, 0, 0], "explain": true}),
        )
        .await
        .ok();
    let ranks: Vec<&Value> = answer["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| &result["explain"]["dense"]["rank"])
        .collect();
    assert_eq!(ranks, [&json!(1), &json!(2), &json!(3)]);
}

#[tokio::test]
async fn expand_gives_siblings_in_document_order() {
    let server = library().await;
    let body = json!({"query_embedding": [0, 1, 0], "top_k": 1, "expand": "section"});
    let answer = server.post("/collections/c/query", body).await.ok();
    assert_eq!(ids(&answer["results"]), ["code"]);
    let siblings = &answer["results"][0]["siblings"];
    assert_eq!(
        ids(siblings),
        ["runs", "code", "part"],
        "by their position, where they have one"
    );
    assert_eq!(siblings[2]["text"], "order number ZX-4417 for the pump");
    assert_eq!(
        siblings[2]["metadata"],
        json!({"section": "first", "position": 10})
    );

    let narrow =
        json!({"query_embedding": [0, 1, 0], "top_k": 1, "expand": {"field": "section", "max_chars": 80}});
    let answer = server.post("/collections/c/query", narrow).await.ok();
    let kept = ids(&answer["results"][0]["siblings"]);
    assert!(
        kept.contains(&"code") && kept.len() == 2,
        "within the budget, the hit always: {kept:?}"
    );

    let none = json!({"query_embedding": [0, 1, 0], "top_k": 1, "expand": "no_such_field"});
    let answer = server.post("/collections/c/query", none).await.ok();
    assert!(
        answer["results"][0]
            .get("siblings")
            .is_none_or(|siblings| *siblings == json!([])),
        "{answer}"
    );
}

#[tokio::test]
async fn reranking_without_a_cross_encoder_is_skipped_and_says_so() {
    let server = library().await;
    let plain = json!({"query": "pump", "query_embedding": [1, 0, 0], "mode": "hybrid"});
    let mut reranked = plain.clone();
    reranked["rerank"] = json!(true);
    let first = server.post("/collections/c/query", plain).await.ok();
    let second = server.post("/collections/c/query", reranked).await.ok();
    assert_eq!(ids(&second["results"]), ids(&first["results"]), "in fused order");
    assert_eq!(second["reranked"], false);
    assert!(
        second["warnings"][0]
            .as_str()
            .unwrap()
            .contains("Cross-encoder not loaded"),
        "{second}"
    );
    assert!(first.get("reranked").is_none() && first.get("warnings").is_none());
}

/// However many share a value and however many are asked for, an answer stays of a size, and every
/// result is among its siblings.
#[tokio::test]
async fn siblings_are_bounded() {
    let server = plain().await;
    server.create("c").await;
    server
        .add("c", documents(1500, |n| json!({"section": "one", "position": n})))
        .await;
    let body = json!({"query_embedding": vector(7), "top_k": 1000, "expand": "section"});
    let answer = server.post("/collections/c/query", body).await.ok();
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 1000);
    for result in results {
        let siblings = ids(&result["siblings"]);
        assert!(siblings.len() <= 100 && siblings.contains(&result["id"].as_str().unwrap()));
    }
    assert_eq!(ids(&results[0]["siblings"]).len(), 100);
    let size = answer.to_string().len();
    assert!(size < 6 << 20, "{size}");
    assert!(
        answer["warnings"][0].as_str().unwrap().contains("siblings"),
        "{}",
        answer["warnings"]
    );

    let last = json!({"query_embedding": vector(1400), "top_k": 1, "where": {"position": 1400},
        "expand": {"field": "section", "max_chars": 50}});
    let answer = server.post("/collections/c/query", last).await.ok();
    assert_eq!(
        ids(&answer["results"][0]["siblings"]),
        ["d1399", "d1400", "d1401"],
        "behind the first thousand too"
    );
    assert!(answer.get("warnings").is_none(), "{answer}");
}
