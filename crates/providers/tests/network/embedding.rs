//! Embedding providers: what they send, and what they make of the answers.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, RemoteFailure, RemoteFault, Role};
use ragstone_providers::embedding::{EmbedderSettings, EmbeddingBackend, create};
use ragstone_providers::http::Policy;
use serde_json::{Value, json};

use crate::common::server::{Reply, Seen, TestServer, refusing_url};
use crate::common::{CANARY, quick};

const WIDTH: usize = 4;

fn embedder(backend: EmbeddingBackend, url: &str, policy: Policy) -> Arc<dyn Embedder> {
    create(EmbedderSettings {
        id: "m".into(),
        provider: "my-provider".into(),
        backend,
        api_key: (backend != EmbeddingBackend::Local).then(|| CANARY.to_owned().into()),
        base_url: Some(format!("{url}/v1")),
        model: "model-x".into(),
        dimensions: Some(WIDTH),
        version: None,
        policy,
    })
    .unwrap()
}

async fn embed(embedder: &Arc<dyn Embedder>, texts: &[&str]) -> Result<Vec<Embedding>, ModelError> {
    let inputs = texts
        .iter()
        .map(|text| EmbedInput::Text((*text).to_owned()))
        .collect();
    embedder.embed(inputs, Role::Passage).await
}

fn failure(error: ModelError) -> RemoteFailure {
    match error {
        ModelError::Remote(failure) => failure,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn googles_answer_to_a_wrong_key_is_not_about_the_text() {
    let server = TestServer::start(|_, _| {
        let details = json!([{"reason": "API_KEY_INVALID"}]);
        Reply::status(
            400,
            json!({"error": {"message": "Please pass a valid one.", "details": details}}),
        )
    })
    .await;
    let refused = embed(&embedder(EmbeddingBackend::Google, &server.url, quick()), &["a"]).await;
    assert_eq!(
        failure(refused.unwrap_err()).fault,
        RemoteFault::Misconfigured { status: 400 }
    );
}

#[tokio::test]
async fn a_wait_without_end_is_no_reason_to_panic() {
    let server = TestServer::start(|_, _| {
        Reply::status(429, json!({})).with_header("retry-after", "18446744073709551615")
    })
    .await;
    let refused = embed(&embedder(EmbeddingBackend::OpenAi, &server.url, quick()), &["a"]).await;
    let hour = Duration::from_secs(3600);
    assert_eq!(
        failure(refused.unwrap_err()).fault,
        RemoteFault::Busy { retry_after: hour }
    );
}

/// A vector that tells which text it is of.
fn vector_of(text: &str) -> Vec<f32> {
    vec![1.0, text.len() as f32, 0.5, -1.0]
}

fn openai_answer(seen: &Seen) -> Value {
    let input = seen.json()["input"].as_array().unwrap().clone();
    let data: Vec<Value> = input
        .iter()
        .enumerate()
        .map(|(index, text)| json!({"object": "embedding", "index": index, "embedding": vector_of(text.as_str().unwrap())}))
        .collect();
    json!({"object": "list", "data": data, "usage": {"prompt_tokens": 10, "total_tokens": 10}})
}

fn google_answer(seen: &Seen) -> Value {
    let requests = seen.json()["requests"].as_array().unwrap().clone();
    let embeddings: Vec<Value> = requests
        .iter()
        .map(|r| json!({"values": vector_of(r["content"]["parts"][0]["text"].as_str().unwrap())}))
        .collect();
    json!({"embeddings": embeddings})
}

async fn well_behaved(backend: EmbeddingBackend) -> TestServer {
    TestServer::start(move |seen, _| {
        Reply::json(match backend {
            EmbeddingBackend::Google => google_answer(seen),
            EmbeddingBackend::OpenAi | EmbeddingBackend::Local => openai_answer(seen),
        })
    })
    .await
}

#[tokio::test]
async fn given_openai_api_key_and_model_when_embed_is_called_then_vectors_of_configured_dimensions_are_returned()
 {
    let server = well_behaved(EmbeddingBackend::OpenAi).await;
    let done = embed(
        &embedder(EmbeddingBackend::OpenAi, &server.url, quick()),
        &["a", "bcd"],
    )
    .await
    .unwrap();
    assert_eq!(done[0].vector, vector_of("a"));
    assert_eq!(done[1].vector, vector_of("bcd"));
    assert_eq!(done.iter().map(|e| e.tokens).sum::<usize>(), 10);
    let seen = &server.seen()[0];
    assert_eq!((seen.method.as_str(), seen.path()), ("POST", "/v1/embeddings"));
    assert_eq!(
        seen.header("authorization"),
        Some(format!("Bearer {CANARY}").as_str())
    );
}

#[tokio::test]
async fn given_openai_provider_with_dimensions_n_then_embedding_request_includes_dimensions_n() {
    let server = well_behaved(EmbeddingBackend::OpenAi).await;
    embed(&embedder(EmbeddingBackend::OpenAi, &server.url, quick()), &["a"])
        .await
        .unwrap();
    let body = server.seen()[0].json();
    assert_eq!(
        (&body["dimensions"], &body["model"]),
        (&json!(WIDTH), &json!("model-x"))
    );
}

#[tokio::test]
async fn given_google_api_key_and_model_when_embed_is_called_then_vectors_matching_configured_dimensions_are_returned()
 {
    let server = well_behaved(EmbeddingBackend::Google).await;
    let done = embed(
        &embedder(EmbeddingBackend::Google, &server.url, quick()),
        &["a", "bcd"],
    )
    .await
    .unwrap();
    assert_eq!(done[1].vector, vector_of("bcd"));
    let seen = &server.seen()[0];
    assert_eq!(
        seen.target, "/v1/models/model-x:batchEmbedContents",
        "no key in the address"
    );
    assert_eq!(seen.header("x-goog-api-key"), Some(CANARY));
}

#[tokio::test]
async fn given_google_provider_with_dimensions_n_then_embed_content_includes_output_dimensionality_n() {
    let server = well_behaved(EmbeddingBackend::Google).await;
    let embedder = embedder(EmbeddingBackend::Google, &server.url, quick());
    embed(&embedder, &["a", "b"]).await.unwrap();
    embedder
        .embed(vec!["q".to_owned().into()], Role::Query)
        .await
        .unwrap();
    let seen = server.seen();
    for request in seen[0].json()["requests"].as_array().unwrap() {
        assert_eq!(request["outputDimensionality"], WIDTH);
        assert_eq!(request["model"], "models/model-x");
        assert_eq!(request["taskType"], "RETRIEVAL_DOCUMENT");
    }
    assert_eq!(seen[1].json()["requests"][0]["taskType"], "RETRIEVAL_QUERY");
}

#[tokio::test]
async fn given_local_ollama_endpoint_when_embed_is_called_then_vectors_from_the_local_model_are_returned() {
    let server = well_behaved(EmbeddingBackend::Local).await;
    let done = embed(&embedder(EmbeddingBackend::Local, &server.url, quick()), &["abc"])
        .await
        .unwrap();
    assert_eq!(done[0].vector, vector_of("abc"));
    assert_eq!(server.seen()[0].header("authorization"), None);
}

#[tokio::test]
async fn given_local_provider_with_dimensions_n_then_embedding_request_includes_dimensions_n() {
    let server = well_behaved(EmbeddingBackend::Local).await;
    embed(&embedder(EmbeddingBackend::Local, &server.url, quick()), &["a"])
        .await
        .unwrap();
    assert_eq!(server.seen()[0].json()["dimensions"], WIDTH);
}

#[tokio::test]
async fn batches_respect_each_apis_limits_and_keep_the_order() {
    for (backend, texts, calls) in [
        (EmbeddingBackend::OpenAi, 2049, 2),
        (EmbeddingBackend::Google, 101, 2),
        (EmbeddingBackend::Local, 65, 2),
    ] {
        let server = well_behaved(backend).await;
        let texts: Vec<String> = (0..texts).map(|i| "x".repeat(i % 7 + 1)).collect();
        let inputs = texts.iter().cloned().map(EmbedInput::Text).collect();
        let done = embedder(backend, &server.url, quick())
            .embed(inputs, Role::Passage)
            .await
            .unwrap();
        assert_eq!(server.seen().len(), calls, "{backend:?}");
        assert!(
            texts
                .iter()
                .zip(&done)
                .all(|(text, e)| e.vector == vector_of(text))
        );
    }
    let server = well_behaved(EmbeddingBackend::OpenAi).await;
    let long = "x".repeat(200_000);
    let done = embed(
        &embedder(EmbeddingBackend::OpenAi, &server.url, quick()),
        &[&long, &long, "y"],
    )
    .await
    .unwrap();
    assert_eq!((done.len(), server.seen().len()), (3, 2));
}

#[tokio::test]
async fn nothing_to_embed_asks_nobody() {
    let server = well_behaved(EmbeddingBackend::OpenAi).await;
    assert!(
        embed(&embedder(EmbeddingBackend::OpenAi, &server.url, quick()), &[])
            .await
            .unwrap()
            .is_empty()
    );
    assert!(server.seen().is_empty());
}

/// As the API answers where it is asked for base64; many services know nothing but lists.
#[tokio::test]
async fn vectors_are_asked_for_in_base64_and_read_in_both_forms() {
    let server = TestServer::start(|seen, number| {
        assert_eq!(seen.json()["encoding_format"], "base64");
        let mut answer = openai_answer(seen);
        if number == 0 {
            for item in answer["data"].as_array_mut().unwrap() {
                let numbers: Vec<f32> = serde_json::from_value(item["embedding"].clone()).unwrap();
                let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
                item["embedding"] = STANDARD.encode(bytes).into();
            }
        }
        Reply::json(answer)
    })
    .await;
    let embedder = embedder(EmbeddingBackend::OpenAi, &server.url, quick());
    for _ in 0..2 {
        let done = embed(&embedder, &["a", "bcd"]).await.unwrap();
        assert_eq!(done[0].vector, vector_of("a"));
        assert_eq!(done[1].vector, vector_of("bcd"));
    }
}

#[tokio::test]
async fn a_shuffled_answer_is_put_in_order() {
    let server = TestServer::start(|seen, _| {
        let mut answer = openai_answer(seen);
        answer["data"].as_array_mut().unwrap().reverse();
        Reply::json(answer)
    })
    .await;
    let done = embed(
        &embedder(EmbeddingBackend::OpenAi, &server.url, quick()),
        &["a", "bb", "ccc"],
    )
    .await
    .unwrap();
    let lengths: Vec<f32> = done.iter().map(|e| e.vector[1]).collect();
    assert_eq!(lengths, [1.0, 2.0, 3.0]);
}

/// Answers that cannot be right, each with a word that the error must have.
#[tokio::test]
async fn answers_that_cannot_be_right_are_refused() {
    let item = |index: usize, vector: Value| json!({"index": index, "embedding": vector});
    let good = || json!(vector_of("a"));
    let cases = [
        (
            json!({"data": [item(0, json!([1.0, 2.0])), item(1, good())]}),
            "2 numbers where 4",
        ),
        (json!({"data": [item(0, good())]}), "1 vectors for 2 texts"),
        (
            json!({"data": [item(0, json!("not base64!")), item(1, good())]}),
            "not the JSON",
        ),
        (
            json!({"data": [item(0, json!("AAAAAAA=")), item(1, good())]}),
            "not of 32-bit numbers",
        ),
        (json!({"data": [item(0, good()), item(0, good())]}), "twice"),
        (json!({"data": [item(0, good()), item(7, good())]}), "index 7"),
        (
            json!({"data": [item(0, json!([1, 2, 3, null])), item(1, good())]}),
            "not the JSON",
        ),
        (
            json!({"data": [item(0, json!([1, 2, 3, 1e300])), item(1, good())]}),
            "out of range",
        ),
        (
            json!({"data": [item(0, json!([0, 0, 0, 0])), item(1, good())]}),
            "zeros",
        ),
        // Numbers in base64, the first of which is none.
        (
            json!({"data": [item(0, json!("AADAfwAAgD8AAIA/AACAPw==")), item(1, good())]}),
            "finite",
        ),
        (json!({"unexpected": true}), "not the JSON"),
    ];
    for (answer, word) in cases {
        let server = TestServer::start(move |_, _| Reply::json(answer.clone())).await;
        let error = embed(
            &embedder(EmbeddingBackend::OpenAi, &server.url, quick()),
            &["a", "b"],
        )
        .await
        .unwrap_err();
        let failure = failure(error);
        assert_eq!(failure.fault, RemoteFault::BadAnswer, "{failure:?}");
        assert!(failure.reason.contains(word), "{word}: {failure:?}");
        assert!(failure.to_string().contains("my-provider"), "{failure}");
    }
    for body in [
        &b"{\"data\": [{\"index\": 0, \"embedding\": [NaN,1,2,3]}]}"[..],
        b"{\"data\": [{\"ind",
    ] {
        let server = TestServer::start(move |_, _| Reply::Answer {
            status: 200,
            headers: Vec::new(),
            body: body.to_vec(),
        })
        .await;
        let error = embed(&embedder(EmbeddingBackend::OpenAi, &server.url, quick()), &["a"])
            .await
            .unwrap_err();
        assert_eq!(failure(error).fault, RemoteFault::BadAnswer);
    }
    for (answer, word) in [
        (json!({"embeddings": [{"values": [1.0]}]}), "1 numbers where 4"),
        (json!({"embeddings": []}), "0 vectors for 1 texts"),
    ] {
        let server = TestServer::start(move |_, _| Reply::json(answer.clone())).await;
        let error = embed(&embedder(EmbeddingBackend::Google, &server.url, quick()), &["a"])
            .await
            .unwrap_err();
        assert!(failure(error).reason.contains(word));
    }
}

#[tokio::test]
async fn refusals_of_the_api_are_told_apart() {
    let quickly = || Policy {
        max_attempts: 1,
        ..quick()
    };
    let answer = async |status: u16| {
        let server = TestServer::start(move |_, _| {
            Reply::status(status, json!({"error": {"message": "because"}})).with_header("retry-after", "7")
        })
        .await;
        let refused = embed(
            &embedder(EmbeddingBackend::OpenAi, &server.url, quickly()),
            &["a"],
        )
        .await;
        failure(refused.unwrap_err())
    };
    let unauthorised = answer(401).await;
    assert!(unauthorised.reason.contains("because"), "{unauthorised:?}");
    let said = unauthorised.to_string();
    assert!(said.contains("apiKey") && !said.contains("because"), "{said}");
    for (status, fault) in [
        (401, RemoteFault::Misconfigured { status: 401 }),
        (404, RemoteFault::Misconfigured { status: 404 }),
        (400, RemoteFault::Refused { status: 400 }),
        (500, RemoteFault::Down),
        (
            429,
            RemoteFault::Busy {
                retry_after: Duration::from_secs(7),
            },
        ),
    ] {
        assert_eq!(answer(status).await.fault, fault);
    }
    let hanging = TestServer::start(|_, _| Reply::Hang).await;
    let impatient = Policy {
        deadline: Duration::from_millis(100),
        ..quick()
    };
    let error = embed(
        &embedder(EmbeddingBackend::Local, &hanging.url, impatient),
        &["a"],
    )
    .await
    .unwrap_err();
    assert_eq!(failure(error).fault, RemoteFault::Down);
    let error = embed(
        &embedder(EmbeddingBackend::Local, &refusing_url().await, quick()),
        &["a"],
    )
    .await
    .unwrap_err();
    assert_eq!(failure(error).fault, RemoteFault::Down);
}

#[tokio::test]
async fn a_busy_api_is_asked_again_when_it_says_so() {
    let server = TestServer::start(|seen, before| match before {
        0 => Reply::status(429, json!({})).with_header("retry-after", "0"),
        _ => Reply::json(openai_answer(seen)),
    })
    .await;
    embed(&embedder(EmbeddingBackend::OpenAi, &server.url, quick()), &["a"])
        .await
        .unwrap();
    assert_eq!(server.seen().len(), 2);
}
