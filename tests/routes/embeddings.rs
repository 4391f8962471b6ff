//! `POST /v1/embeddings` and `POST /embed`

use base64::Engine as _;
use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures, plain};

async fn with_model() -> Server {
    let (bert, mpnet) = (fixtures::model("bert"), fixtures::model("mpnet"));
    Setup::serve()
        .embeddings(&[("tiny", &bert), ("second", &mpnet)])
        .start()
        .await
}

fn numbers(vector: &Value) -> Vec<f64> {
    serde_json::from_value(vector.clone()).expect("a vector")
}

#[tokio::test]
async fn openai_answers_have_their_shape() {
    let server = with_model().await;
    let answer = server
        .post(
            "/v1/embeddings",
            json!({"model": "tiny", "input": ["fox", "dog"]}),
        )
        .await
        .ok();
    assert_eq!(
        (&answer["object"], &answer["model"]),
        (&json!("list"), &json!("tiny"))
    );
    for (index, item) in answer["data"].as_array().unwrap().iter().enumerate() {
        assert_eq!(
            (&item["object"], &item["index"]),
            (&json!("embedding"), &json!(index))
        );
        assert_eq!(numbers(&item["embedding"]).len(), fixtures::DIMENSIONS);
    }
    assert!(
        answer["usage"]["prompt_tokens"].as_u64().unwrap() >= 6,
        "{answer}"
    );
    assert_eq!(answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]);
}

#[tokio::test]
async fn every_form_of_input_is_understood() {
    let server = with_model().await;
    let embed = async |input: Value| {
        let answer = server.post("/v1/embeddings", json!({"input": input})).await.ok();
        answer["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|item| numbers(&item["embedding"]))
            .collect::<Vec<_>>()
    };
    let fox = embed(json!("fox")).await;
    assert_eq!(fox.len(), 1);
    let both = embed(json!(["fox", "dog"])).await;
    assert!(
        fixtures::cosine(&both[0], &fox[0]) > 0.999_999 && fixtures::cosine(&both[0], &both[1]) < 0.999_9
    );
    // Token ids mean the vocabulary of the model: five and six are its first ordinary pieces.
    let tokens = embed(json!([5, 6])).await;
    let lists = embed(json!([[5, 6], [7]])).await;
    assert_eq!((tokens.len(), lists.len()), (1, 2));
    assert!(fixtures::cosine(&tokens[0], &lists[0]) > 0.999_999);
}

#[tokio::test]
async fn base64_and_fewer_dimensions() {
    let server = with_model().await;
    let plain = server.post("/v1/embeddings", json!({"input": "fox"})).await.ok();
    let plain = numbers(&plain["data"][0]["embedding"]);
    let encoded = server
        .post(
            "/v1/embeddings",
            json!({"input": "fox", "encoding_format": "base64"}),
        )
        .await
        .ok();
    let bytes = base64::engine::general_purpose::STANDARD
        .decode(encoded["data"][0]["embedding"].as_str().unwrap())
        .unwrap();
    let decoded: Vec<f64> = bytes
        .chunks_exact(4)
        .map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap())))
        .collect();
    assert_eq!(decoded.len(), plain.len());
    assert!(decoded.iter().zip(&plain).all(|(a, b)| (a - b).abs() < 1e-6));

    let short = server
        .post("/v1/embeddings", json!({"input": "fox", "dimensions": 8}))
        .await
        .ok();
    let short = numbers(&short["data"][0]["embedding"]);
    assert_eq!(short.len(), 8);
    let length: f64 = short.iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-5, "scaled to length 1 again");
    assert!((fixtures::cosine(&short, &plain[..8]) - 1.0).abs() < 1e-6);
}

#[tokio::test]
async fn plain_answers_have_their_shape() {
    let server = with_model().await;
    let long = fixtures::long_text();
    let answer = server
        .post(
            "/embed",
            json!({"texts": ["fox", long, "dog"], "normalize": true}),
        )
        .await
        .ok();
    assert_eq!(
        (&answer["model"], &answer["dim"]),
        (&json!("tiny"), &json!(fixtures::DIMENSIONS))
    );
    assert_eq!(answer["truncated"], json!([1]));
    for vector in answer["embeddings"].as_array().unwrap() {
        let length: f64 = numbers(vector).iter().map(|x| x * x).sum();
        assert!((length - 1.0).abs() < 1e-5);
    }
    assert_eq!(
        server.post("/embed", json!({"texts": []})).await.ok()["embeddings"],
        json!([])
    );
}

/// OpenAI's answer cannot say it, so a header does.
#[tokio::test]
async fn inputs_that_were_cut_are_named_in_a_header() {
    let server = with_model().await;
    let long = fixtures::long_text();
    let embed = async |input: Value| server.post("/v1/embeddings", json!({"input": input})).await;
    let answer = embed(json!([long, "fox", "dog", long])).await;
    assert_eq!(answer.header("x-ragstone-truncated"), "0,3");
    let many = embed(json!(vec![long.as_str(); 300])).await;
    let listed: Vec<&str> = many.header("x-ragstone-truncated").split(',').collect();
    assert_eq!((listed.len(), listed[199], listed[200]), (201, "199", "..."));
    let none = embed(json!(["fox"])).await;
    assert!(!none.headers.contains_key("x-ragstone-truncated"));
}

/// A text gets the same vector whatever stands beside it.
#[tokio::test]
async fn batches_do_not_mix() {
    let server = with_model().await;
    let texts: Vec<String> = (0..300)
        .map(|n| format!("{} number {n}", "word ".repeat(n % 40)))
        .collect();
    let together = server.post("/embed", json!({ "texts": texts })).await.ok();
    assert_eq!(together["embeddings"].as_array().unwrap().len(), 300);
    for n in [0, 1, 39, 40, 255, 256, 299] {
        let alone = server.post("/embed", json!({"texts": [texts[n]]})).await.ok();
        let cosine = fixtures::cosine(
            &numbers(&alone["embeddings"][0]),
            &numbers(&together["embeddings"][n]),
        );
        assert!(cosine > 0.999_99, "{n}: {cosine}");
    }
}

#[tokio::test]
async fn models_are_chosen_by_id_or_by_name() {
    let server = with_model().await;
    let name = fixtures::model("mpnet").display().to_string();
    for (asked, answered) in [("tiny", "tiny"), ("second", "second"), (name.as_str(), "second")] {
        assert_eq!(
            server
                .post("/v1/embeddings", json!({"input": "x", "model": asked}))
                .await
                .ok()["model"],
            answered
        );
    }
    assert_eq!(
        server.post("/embed", json!({"texts": ["x"]})).await.ok()["model"],
        "tiny",
        "the first is the default"
    );
    for (path, body) in [
        ("/v1/embeddings", json!({"input": "x", "model": "gpt"})),
        ("/embed", json!({"texts": ["x"], "model": "gpt"})),
    ] {
        let detail = server.post(path, body).await.refused(404);
        assert_eq!(
            detail,
            "Embedding model 'gpt' not loaded. Available models: second, tiny"
        );
    }
}

#[tokio::test]
async fn of_two_entries_with_one_path_the_first_answers_for_it() {
    let bert = fixtures::model("bert");
    let server = Setup::serve()
        .embeddings(&[("zebra", &bert), ("ant", &bert)])
        .start()
        .await;
    let body = json!({"input": "x", "model": bert.display().to_string()});
    assert_eq!(server.post("/v1/embeddings", body).await.ok()["model"], "zebra");
    let body = json!({"input": "x", "model": "ant"});
    assert_eq!(server.post("/v1/embeddings", body).await.ok()["model"], "ant");
}

#[tokio::test]
async fn bad_requests_are_400_and_named() {
    let server = with_model().await;
    for (body, named) in [
        (json!({}), "'input'"),
        (json!({"input": null}), "'input': expected a text"),
        (json!({"input": 5}), "'input': expected a text"),
        (json!({"input": {"text": "x"}}), "'input': expected a text"),
        (json!({"input": ["x", 5]}), "'input': expected a text"),
        (json!({"input": [-1]}), "'input': expected a text"),
        (json!({"input": [4000000]}), "4000000"),
        (json!({"input": "x", "dimensions": 0}), "'dimensions'"),
        (json!({"input": "x", "dimensions": 33}), "'dimensions'"),
        (json!({"input": "x", "dimensions": -1}), "'dimensions'"),
        (
            json!({"input": "x", "encoding_format": "hex"}),
            "'encoding_format'",
        ),
        (json!({"input": "x", "model": 5}), "'model'"),
        (json!({"input": vec!["x"; 2049]}), "2049"),
    ] {
        let answer = server.post("/v1/embeddings", body.clone()).await;
        let detail = answer.refused(400);
        assert!(detail.contains(named), "{body:.80}: {detail}");
    }
    for (body, named) in [
        (json!({}), "'texts'"),
        (json!({"texts": "x"}), "'texts'"),
        (json!({"texts": [5]}), "'texts[0]'"),
        (json!({"texts": ["x"], "normalize": "yes"}), "'normalize'"),
        (json!({"texts": ["x"], "role": "speaker"}), "role"),
    ] {
        let detail = server.post("/embed", body.clone()).await.refused(400);
        assert!(detail.contains(named), "{body}: {detail}");
    }
}

#[tokio::test]
async fn without_a_model_it_is_503() {
    let server = plain().await;
    for (path, body) in [
        ("/v1/embeddings", json!({"input": "x"})),
        ("/embed", json!({"texts": ["x"]})),
    ] {
        let detail = server.post(path, body).await.refused(503);
        assert!(detail.contains("--embeddings-config"), "{detail}");
    }
}

/// A full queue is an answer, soon and with a time to wait; short queries pass, and nothing stays behind.
#[tokio::test]
async fn a_full_queue_is_429_for_large_requests_and_not_for_queries() {
    let bert = fixtures::model("bert");
    let server = Setup::serve()
        .embeddings(&[("tiny", &bert)])
        .config("server: {threads: 1, limits: {modelQueueTokens: 1}}")
        .start()
        .await;
    let large = json!({"input": vec![fixtures::long_text(); 1_500]});
    let mut refused = None;
    // Whether two requests meet in the queue is a matter of time, so this goes on until they do.
    for _ in 0..100 {
        let (first, second, third, query) = tokio::join!(
            server.post("/v1/embeddings", large.clone()),
            server.post("/v1/embeddings", large.clone()),
            server.post("/v1/embeddings", large.clone()),
            server.post("/v1/embeddings", json!({"input": "fox"})),
        );
        assert_eq!(query.status, 200, "a query was kept out: {}", query.text);
        let (answered, kept_out): (Vec<_>, Vec<_>) = [first, second, third]
            .into_iter()
            .partition(|answer| answer.status == 200);
        assert!(!answered.is_empty(), "nobody was answered");
        if let Some(answer) = kept_out.into_iter().next() {
            refused = Some(answer);
            break;
        }
    }
    let answer = refused.expect("a refusal");
    let detail = answer.refused(429);
    assert!(detail.contains("queue is full"), "{detail}");
    let seconds: u64 = answer.header("retry-after").parse().expect("seconds");
    assert!((1..=60).contains(&seconds), "{seconds}");
    server.post("/v1/embeddings", large).await.ok();
}

/// Texts that a tokenizer may stumble over give finite vectors.
#[tokio::test]
async fn unusual_texts_are_embedded() {
    let server = with_model().await;
    let texts = [
        "",
        " ",
        "\u{0}",
        "🦀🦀🦀",
        "\u{200b}\u{301}",
        "ＡＢＣ",
        "a\r\nb\tc",
        "\u{202e}rtl",
        "[CLS] [SEP] [MASK]",
    ];
    for model in ["tiny", "second"] {
        let answer = server
            .post("/embed", json!({"texts": texts, "model": model}))
            .await
            .ok();
        for vector in answer["embeddings"].as_array().unwrap() {
            assert!(numbers(vector).iter().all(|x| x.is_finite()));
        }
    }
}
