//! Chat providers: the same request and the same kind of answer, whichever API is behind them.

use std::sync::Arc;

use futures::StreamExt;
use ragstone_core::call::CallError;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest};
use ragstone_providers::chat::{ChatBackend, ChatSettings, create};
use serde_json::{Value, json};

use crate::common::server::{Reply, TestServer};
use crate::common::{CANARY, quick};

pub(crate) fn model(backend: ChatBackend, url: &str) -> Arc<dyn ChatModel> {
    create(ChatSettings {
        provider: "my-chat".into(),
        backend,
        api_key: Some(CANARY.to_owned().into()),
        base_url: Some(format!("{url}/v1")),
        model: "default-model".into(),
        policy: quick(),
    })
    .unwrap()
}

pub(crate) fn request(body: Value) -> ChatRequest {
    ChatRequest::from_json(body.as_object().unwrap().clone()).unwrap()
}

fn conversation() -> ChatRequest {
    request(json!({
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": [{"type": "text", "text": "Who are you?"}]},
        ],
        "max_tokens": 50, "temperature": 0.5, "top_p": 0.9, "stop": ["END"],
        "stream_options": {"include_usage": true},
    }))
}

pub(crate) fn event(data: Value) -> String {
    format!("data: {data}\n\n")
}

/// The text, the finish reason and the total tokens of a stream.
async fn collect(model: &Arc<dyn ChatModel>, request: ChatRequest) -> (String, Option<String>, Option<u64>) {
    let mut stream = model.stream(request).await.unwrap();
    let (mut text, mut reason, mut tokens) = (String::new(), None, None);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.unwrap();
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert!(!chunk["id"].as_str().unwrap().is_empty());
        if let Some(more) = chunk.pointer("/choices/0/delta/content").and_then(Value::as_str) {
            text.push_str(more);
        }
        if let Some(end) = chunk.pointer("/choices/0/finish_reason").and_then(Value::as_str) {
            reason = Some(end.to_owned());
        }
        if let Some(total) = chunk.pointer("/usage/total_tokens").and_then(Value::as_u64) {
            tokens = Some(total);
        }
    }
    (text, reason, tokens)
}

#[tokio::test]
async fn openai_compatible_services_get_the_callers_body_as_it_is() {
    let server =
        TestServer::start(|_, _| Reply::json(json!({"choices": [{"message": {"content": "x"}}], "odd": 1})))
            .await;
    let body = json!({"model": "gpt-x", "messages": [{"role": "user", "content": "Hi", "name": "ann"}],
        "tools": [{"type": "function"}], "anything": {"new": true}});
    let answer = model(ChatBackend::OpenAi, &server.url)
        .complete(request(body.clone()))
        .await
        .unwrap();
    assert_eq!(answer["odd"], 1, "the answer passes too");
    let seen = &server.seen()[0];
    assert_eq!((seen.path(), seen.json()), ("/v1/chat/completions", body));
    assert_eq!(
        seen.header("authorization"),
        Some(format!("Bearer {CANARY}").as_str())
    );

    let plain = request(json!({"messages": [{"role": "user", "content": "Hi"}], "stream": true}));
    model(ChatBackend::Ollama, &server.url)
        .complete(plain)
        .await
        .unwrap();
    let sent = server.seen()[1].json();
    assert_eq!(
        (&sent["model"], &sent["stream"]),
        (&json!("default-model"), &json!(false))
    );
}

#[tokio::test]
async fn a_chat_that_may_have_been_worked_on_is_not_sent_again() {
    let backends = [
        ChatBackend::OpenAi,
        ChatBackend::Anthropic,
        ChatBackend::Gemini,
        ChatBackend::Ollama,
    ];
    for backend in backends {
        for reply in [|| Reply::Close, || Reply::status(502, json!({}))] {
            let server = TestServer::start(move |_, _| reply()).await;
            let model = model(backend, &server.url);
            model.complete(conversation()).await.unwrap_err();
            assert!(model.stream(conversation()).await.is_err());
            assert_eq!(server.seen().len(), 2, "{backend:?}");
        }
    }
}

#[tokio::test]
async fn openai_compatible_streams_pass_through() {
    let chunk = |delta: Value, reason: Value| json!({"id": "c1", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]});
    let server = TestServer::start(move |seen, _| {
        assert_eq!(seen.json()["stream"], true);
        let text = event(chunk(json!({"content": "Grüß"}), Value::Null));
        // Cut in the middle of a line: pieces of a body are no lines.
        let (half, rest) = text.split_at(20);
        Reply::Events(vec![
            ": comment\n\n".into(),
            half.into(),
            rest.into(),
            event(chunk(json!({"content": " dich"}), Value::Null)),
            event(chunk(json!({}), json!("stop"))),
            event(json!({"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 9}})),
            "data: [DONE]\n\n".into(),
        ])
    })
    .await;
    let (text, reason, tokens) = collect(&model(ChatBackend::OpenAi, &server.url), conversation()).await;
    assert_eq!(
        (text.as_str(), reason.as_deref(), tokens),
        ("Grüß dich", Some("stop"), Some(9))
    );
}

#[tokio::test]
async fn anthropic_is_translated_both_ways() {
    let server = TestServer::start(|_, _| {
        Reply::json(json!({"id": "msg_1", "model": "claude-x", "content": [{"type": "text", "text": "I am "}, {"type": "text", "text": "Claude."}],
            "stop_reason": "max_tokens", "usage": {"input_tokens": 11, "output_tokens": 4}}))
    })
    .await;
    let answer = model(ChatBackend::Anthropic, &server.url)
        .complete(conversation())
        .await
        .unwrap();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(
        answer["choices"][0]["message"],
        json!({"role": "assistant", "content": "I am Claude."})
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 11, "completion_tokens": 4, "total_tokens": 15})
    );

    let seen = &server.seen()[0];
    assert_eq!(seen.path(), "/v1/messages");
    assert_eq!(seen.header("x-api-key"), Some(CANARY));
    assert!(seen.header("anthropic-version").is_some() && seen.header("authorization").is_none());
    assert_eq!(
        seen.json(),
        json!({"model": "default-model", "system": "Be brief.", "max_tokens": 50, "temperature": 0.5, "top_p": 0.9,
            "stop_sequences": ["END"], "stream": false,
            "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Who are you?"}]})
    );
}

#[tokio::test]
async fn anthropic_streams_are_translated() {
    let named = |data: Value| {
        format!(
            "event: {}\n{}",
            data["type"].as_str().unwrap(),
            event(data.clone())
        )
    };
    let server = TestServer::start(move |_, _| {
        Reply::Events(vec![
            named(json!({"type": "message_start", "message": {"id": "msg_1", "model": "claude-x", "usage": {"input_tokens": 11}}})),
            named(json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})),
            named(json!({"type": "ping"})),
            named(json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}})),
            named(json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}})),
            named(json!({"type": "content_block_stop", "index": 0})),
            named(json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 4}})),
            named(json!({"type": "message_stop"})),
        ])
    })
    .await;
    let (text, reason, tokens) = collect(&model(ChatBackend::Anthropic, &server.url), conversation()).await;
    assert_eq!(
        (text.as_str(), reason.as_deref(), tokens),
        ("Hello", Some("stop"), Some(15))
    );
    assert_eq!(server.seen()[0].json()["stream"], true);
}

fn gemini_piece(text: &str, reason: Option<&str>) -> Value {
    let mut candidate = json!({"content": {"role": "model", "parts": [{"text": text}]}});
    if let Some(reason) = reason {
        candidate["finishReason"] = reason.into();
    }
    json!({"candidates": [candidate], "usageMetadata": {"promptTokenCount": 11, "candidatesTokenCount": 4, "totalTokenCount": 15}})
}

#[tokio::test]
async fn gemini_is_translated_both_ways() {
    let server = TestServer::start(|_, _| Reply::json(gemini_piece("I am Gemini.", Some("STOP")))).await;
    let answer = model(ChatBackend::Gemini, &server.url)
        .complete(conversation())
        .await
        .unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "I am Gemini.");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["total_tokens"], 15);

    let seen = &server.seen()[0];
    assert_eq!(seen.target, "/v1/models/default-model:generateContent");
    assert_eq!(seen.header("x-goog-api-key"), Some(CANARY));
    let sent = seen.json();
    assert_eq!(sent["systemInstruction"]["parts"][0]["text"], "Be brief.");
    assert_eq!(
        sent["contents"][1],
        json!({"role": "model", "parts": [{"text": "Hello"}]})
    );
    assert_eq!(
        sent["generationConfig"],
        json!({"maxOutputTokens": 50, "temperature": 0.5, "topP": 0.9, "stopSequences": ["END"]})
    );
}

#[tokio::test]
async fn a_gemini_stream_with_a_reason_in_every_piece_finishes_once() {
    let server = TestServer::start(|_, _| {
        let call = json!({"candidates": [{"finishReason": "STOP", "content": {"role": "model", "parts": [
            {"functionCall": {"name": "weather", "args": {"city": "Rome"}}}]}}]});
        Reply::Events(vec![
            event(gemini_piece("Hel", Some("STOP"))),
            event(gemini_piece("lo", Some("STOP"))),
            event(call),
        ])
    })
    .await;
    let gemini = model(ChatBackend::Gemini, &server.url);
    let mut stream = gemini.stream(conversation()).await.unwrap();
    let (mut text, mut reasons, mut calls) = (String::new(), Vec::new(), 0);
    while let Some(chunk) = stream.next().await {
        let choice = chunk.unwrap()["choices"][0].clone();
        assert!(
            reasons.is_empty() || choice.is_null(),
            "only the usage follows: {choice}"
        );
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        calls += choice["delta"]["tool_calls"].as_array().map_or(0, Vec::len);
        reasons.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    assert_eq!((text.as_str(), calls), ("Hello", 1));
    assert_eq!(reasons, ["tool_calls"]);
}

#[tokio::test]
async fn gemini_streams_are_translated() {
    let server = TestServer::start(|_, _| {
        Reply::Events(vec![
            event(gemini_piece("Hel", None)),
            event(gemini_piece("lo", Some("MAX_TOKENS"))),
        ])
    })
    .await;
    let (text, reason, tokens) = collect(&model(ChatBackend::Gemini, &server.url), conversation()).await;
    assert_eq!(
        (text.as_str(), reason.as_deref(), tokens),
        ("Hello", Some("length"), Some(15))
    );
    assert_eq!(
        server.seen()[0].target,
        "/v1/models/default-model:streamGenerateContent?alt=sse"
    );
}

#[tokio::test]
async fn what_cannot_be_translated_is_refused_and_nothing_is_sent() {
    let server = TestServer::start(|_, _| Reply::json(json!({}))).await;
    for backend in [ChatBackend::Anthropic, ChatBackend::Gemini] {
        for (body, named) in [
            (
                json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}),
                "'tools'",
            ),
            (
                json!({"messages": [{"role": "user", "content": "x"}], "n": 3}),
                "'n'",
            ),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
                "index 0",
            ),
        ] {
            let refusal = model(backend, &server.url)
                .complete(request(body.clone()))
                .await
                .unwrap_err();
            assert!(
                matches!(refusal, ChatError::Invalid(_)) && refusal.to_string().contains(named),
                "{refusal}"
            );
            assert!(model(backend, &server.url).stream(request(body)).await.is_err());
        }
    }
    let hot = request(json!({"messages": [{"role": "user", "content": "x"}], "temperature": 1.5}));
    assert!(
        model(ChatBackend::Anthropic, &server.url)
            .complete(hot)
            .await
            .is_err()
    );
    assert!(server.seen().is_empty());
}

#[tokio::test]
async fn a_model_name_leads_nowhere_but_to_a_model() {
    let server = TestServer::start(|_, _| Reply::json(gemini_piece("x", Some("STOP")))).await;
    let gemini = model(ChatBackend::Gemini, &server.url);
    let named = |name: &str| request(json!({"model": name, "messages": [{"role": "user", "content": "x"}]}));
    for name in ["../../v1/secret?x=", "models/a/b", "files/x", "a#b"] {
        let refusal = gemini.complete(named(name)).await.unwrap_err();
        assert!(
            matches!(refusal, ChatError::Invalid(_)) && refusal.to_string().contains("'model'"),
            "{refusal}"
        );
        assert!(gemini.stream(named(name)).await.is_err());
    }
    assert!(server.seen().is_empty());
    gemini.complete(named("tunedModels/mine")).await.unwrap();
    assert_eq!(server.seen()[0].target, "/v1/tunedModels/mine:generateContent");
}

#[tokio::test]
async fn what_only_tunes_or_is_unknown_is_left_out() {
    for (backend, answer) in [
        (
            ChatBackend::Anthropic,
            json!({"content": [], "stop_reason": "end_turn"}),
        ),
        (ChatBackend::Gemini, gemini_piece("x", Some("STOP"))),
    ] {
        let server = TestServer::start(move |_, _| Reply::json(answer.clone())).await;
        let body = json!({"messages": [{"role": "user", "content": "x"}], "user": "ann", "verbosity": "low",
            "parallel_tool_calls": true, "prompt_cache_key": "k", "modalities": ["text"], "brand_new": {"a": 1}});
        model(backend, &server.url).complete(request(body)).await.unwrap();
        let sent = server.seen()[0].json().to_string();
        assert!(
            !sent.contains("brand_new") && !sent.contains("verbosity"),
            "{sent}"
        );
    }
}

#[tokio::test]
async fn an_empty_event_ends_nothing_and_an_error_may_be_a_sentence() {
    let chunk = |text: &str, reason: Value| {
        event(json!({"id": "c", "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}))
    };
    let pieces = vec![
        chunk("Hel", Value::Null),
        "data:\n\n".to_owned(),
        chunk("lo", json!("stop")),
    ];
    let server = TestServer::start(move |_, _| Reply::Events(pieces.clone())).await;
    let (text, reason, _) = collect(&model(ChatBackend::OpenAi, &server.url), conversation()).await;
    assert_eq!((text.as_str(), reason.as_deref()), ("Hello", Some("stop")));

    for backend in [ChatBackend::OpenAi, ChatBackend::Gemini] {
        let server = TestServer::start(|_, _| Reply::Events(vec![event(json!({"error": "boom"}))])).await;
        let stream = model(backend, &server.url).stream(conversation()).await.unwrap();
        let error = stream
            .filter_map(async |chunk| chunk.err())
            .collect::<Vec<_>>()
            .await;
        assert!(error[0].to_string().contains("boom"), "{error:?}");
    }
}

#[tokio::test]
async fn half_a_stream_is_an_error_and_not_an_end() {
    let half = [
        (
            ChatBackend::OpenAi,
            event(
                json!({"id": "c", "choices": [{"index": 0, "delta": {"content": "Hel"}, "finish_reason": null}]}),
            ),
        ),
        (
            ChatBackend::Anthropic,
            event(json!({"type": "content_block_delta", "delta": {"text": "Hel"}})),
        ),
        (ChatBackend::Gemini, event(gemini_piece("Hel", None))),
    ];
    for (backend, piece) in half {
        let server = TestServer::start(move |_, _| Reply::Events(vec![piece.clone()])).await;
        let chunks: Vec<_> = model(backend, &server.url)
            .stream(conversation())
            .await
            .unwrap()
            .collect()
            .await;
        let errors = chunks.iter().filter(|chunk| chunk.is_err()).count();
        assert!(
            matches!(
                chunks.last(),
                Some(Err(ChatError::Call(CallError::BadAnswer { .. })))
            ),
            "{backend:?}"
        );
        assert_eq!(errors, 1, "{backend:?}");
    }
}

#[tokio::test]
async fn refusals_of_the_api_pass_with_their_status() {
    for backend in [
        ChatBackend::OpenAi,
        ChatBackend::Anthropic,
        ChatBackend::Gemini,
        ChatBackend::Ollama,
    ] {
        let server =
            TestServer::start(|_, _| Reply::status(401, json!({"error": {"message": "bad key"}}))).await;
        let model = model(backend, &server.url);
        for error in [
            model.complete(conversation()).await.unwrap_err(),
            model.stream(conversation()).await.err().unwrap(),
        ] {
            match error {
                ChatError::Call(error) => assert_eq!(error.status(), Some(401), "{error}"),
                other => panic!("{other}"),
            }
        }
    }
}
