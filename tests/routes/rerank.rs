//! `POST /rerank`, `/v1/rerank` and `/v2/rerank`: bad input, and the other services' shapes.

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures, plain};

async fn with_cross_encoder() -> Server {
    Setup::without_models()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await
}

#[tokio::test]
async fn bad_requests_are_400_and_named() {
    let server = with_cross_encoder().await;
    let document = json!([{"id": "a", "text": "t"}]);
    for (body, named) in [
        (json!({}), "'query'"),
        (json!({"query": null, "documents": document}), "'query"),
        (json!({"query": 5, "documents": document}), "'query"),
        (json!({"query": "", "documents": document}), "'query'"),
        (json!({"query": " \n", "documents": document}), "'query'"),
        (json!({"query": "q", "documents": "t"}), "'documents"),
        (json!({"query": "q", "documents": null}), "'documents"),
        (
            json!({"query": "q", "documents": [{"id": "a", "text": "t"}, {"id": "b"}]}),
            "index 1",
        ),
        (
            json!({"query": "q", "documents": [{"id": "a", "text": null}]}),
            "index 0",
        ),
        (
            json!({"query": "q", "documents": [{"id": "a", "text": 5}]}),
            "'documents[0].text'",
        ),
        (
            json!({"query": "q", "documents": document, "top_k": 0}),
            "'top_k'",
        ),
        (
            json!({"query": "q", "documents": document, "top_k": -1}),
            "'top_k'",
        ),
        (
            json!({"query": "q", "documents": document, "top_k": "1"}),
            "'top_k'",
        ),
    ] {
        let detail = server.post("/rerank", body.clone()).await.refused(400);
        assert!(detail.contains(named), "{body}: {detail}");
    }
    for path in ["/v1/rerank", "/v2/rerank"] {
        for (body, named) in [
            (json!({"documents": ["t"]}), "'query'"),
            (json!({"query": "q"}), "'documents'"),
            (
                json!({"query": "q", "documents": [5]}),
                "'documents[0]': expected a text or an object",
            ),
            (json!({"query": "q", "documents": ["a", {}]}), "index 1"),
            (json!({"query": "q", "documents": ["t"], "top_n": 0}), "'top_n'"),
        ] {
            let detail = server.post(path, body.clone()).await.refused(400);
            assert!(detail.contains(named), "{path} {body}: {detail}");
        }
    }
}

#[tokio::test]
async fn without_a_cross_encoder_every_rerank_route_is_503() {
    let server = plain().await;
    for (path, documents) in [
        ("/rerank", json!([{"id": "a", "text": "t"}])),
        ("/v1/rerank", json!(["t"])),
        ("/v2/rerank", json!(["t"])),
    ] {
        let detail = server
            .post(path, json!({"query": "q", "documents": documents}))
            .await
            .refused(503);
        assert_eq!(
            detail,
            "Cross-encoder not loaded. Start server with --cross-encoder flag."
        );
    }
}

/// Ids come back as they went, of any type; where there is none, the index stands in.
#[tokio::test]
async fn ids_are_given_back_as_they_came() {
    let server = with_cross_encoder().await;
    let ids = [json!("a"), json!(7), json!("a"), json!({"x": 1})];
    let documents: Vec<Value> = ids
        .iter()
        .map(|id| json!({"id": id, "text": "the same text"}))
        .chain([json!({"text": "the same text"})])
        .collect();
    let answer = server
        .post("/rerank", json!({"query": "q", "documents": documents}))
        .await
        .ok();
    let back: Vec<&Value> = answer["reranked"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| &item["id"])
        .collect();
    assert_eq!(
        back,
        [&ids[0], &ids[1], &ids[2], &ids[3], &json!("4")],
        "equal scores keep the order of the request"
    );
}

#[tokio::test]
async fn the_compatible_routes_agree_with_our_own() {
    let server = with_cross_encoder().await;
    let texts = [
        "The quick brown fox",
        "Numbers such as 3.14159",
        "東京?",
        "",
        "vectors ".repeat(50).as_str(),
    ]
    .map(str::to_owned);
    let documents: Vec<Value> = texts
        .iter()
        .enumerate()
        .map(|(n, text)| json!({"id": n.to_string(), "text": text}))
        .collect();
    let own = server
        .post(
            "/rerank",
            json!({"query": "which animal?", "documents": documents}),
        )
        .await
        .ok();
    for path in ["/v1/rerank", "/v2/rerank"] {
        let body = json!({"model": "any-name", "query": "which animal?", "documents": texts, "top_n": 4, "return_documents": true});
        let answer = server.post(path, body).await.ok();
        let model = answer["model"].as_str().unwrap();
        assert!(model.ends_with("cross-bert"), "the one that scored: {model}");
        let tokens = answer["usage"]["total_tokens"].as_u64().unwrap();
        assert!(tokens > 50, "{answer}");
        assert_eq!(answer["meta"]["tokens"]["input_tokens"], tokens);
        let short = json!({"query": "which animal?", "documents": texts, "max_tokens_per_doc": 2});
        let short = server.post(path, short).await.ok();
        assert!(
            short["usage"]["total_tokens"].as_u64().unwrap() < tokens,
            "{short}"
        );
        let none = json!({"query": "which animal?", "documents": texts, "max_tokens_per_doc": 0});
        server.post(path, none).await.refused(400);
        let results = answer["results"].as_array().unwrap();
        assert_eq!(results.len(), 4);
        for (result, ours) in results.iter().zip(own["reranked"].as_array().unwrap()) {
            let index = result["index"].as_u64().unwrap() as usize;
            assert_eq!(index + 1, ours["original_rank"].as_u64().unwrap() as usize);
            assert_eq!(result["relevance_score"], ours["score"]);
            assert_eq!(result["document"]["text"], texts[index]);
        }
        let objects = json!({"query": "which animal?", "documents": [{"text": "fox"}, "dog"]});
        let answer = server.post(path, objects).await.ok();
        assert!(
            answer["results"][0].get("document").is_none(),
            "texts only when asked for"
        );
        assert_eq!(
            server
                .post(path, json!({"query": "q", "documents": []}))
                .await
                .ok()["results"],
            json!([])
        );
    }
}

#[tokio::test]
async fn more_documents_than_allowed_are_400_on_every_route() {
    let server = Setup::without_models()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .config("server: {limits: {rerankDocuments: 3}}")
        .start()
        .await;
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        let body = |count: usize| json!({"query": "q", "documents": vec![json!({"text": "t"}); count]});
        let detail = server.post(path, body(4)).await.refused(400);
        assert!(
            detail.contains("4 documents") && detail.contains("at most 3"),
            "{detail}"
        );
        server.post(path, body(3)).await.ok();
    }
}

#[tokio::test]
async fn many_documents_at_once() {
    let server = with_cross_encoder().await;
    let documents: Vec<Value> = (0..1000)
        .map(|n| json!({"id": n.to_string(), "text": format!("text {n}")}))
        .collect();
    let answer = server
        .post("/rerank", json!({"query": "q", "documents": documents}))
        .await
        .ok();
    let mut ranks: Vec<u64> = answer["reranked"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["original_rank"].as_u64().unwrap())
        .collect();
    ranks.sort_unstable();
    assert_eq!(ranks, (1..=1000).collect::<Vec<_>>());
}
