//! Tools, structured answers and images in front of APIs that have other words for them.

use futures::StreamExt;
use ragstone_core::chat::{ChatError, SentFields};
use ragstone_providers::chat::ChatBackend;
use serde_json::{Value, json};

use super::chat::{event, model, request};
use crate::common::server::{Reply, Seen, TestServer};
use ragstone_core::chat::ChatRequest;

fn weather() -> Value {
    json!({"type": "function", "function": {"name": "weather", "description": "Tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}})
}

/// A question, two calls, and what they gave.
fn with_history(more: Value) -> ChatRequest {
    let mut body = json!({"messages": [
        {"role": "user", "content": [{"type": "text", "text": "Here?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}},
            {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "{\"sky\": \"grey\"}"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"}],
        "tools": [weather(), {"type": "function", "function": {"name": "clock"}}]});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    request(body)
}

fn ask(more: Value) -> ChatRequest {
    let mut body = json!({"messages": [{"role": "user", "content": "x"}]});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    request(body)
}

/// What a streamed answer comes to: the message as a whole answer has it, and the finish reason.
async fn gathered(backend: ChatBackend, url: &str, request: ChatRequest) -> (Value, Value) {
    let mut stream = model(backend, url).stream(request).await.unwrap();
    let (mut text, mut calls, mut reason) = (String::new(), Vec::<Value>::new(), Value::Null);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.unwrap();
        let choice = &chunk["choices"][0];
        text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        for delta in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let at = delta["index"].as_u64().unwrap() as usize;
            if at == calls.len() {
                let mut call = delta.clone();
                call.as_object_mut().unwrap().remove("index");
                calls.push(call);
                continue;
            }
            let arguments = &mut calls[at]["function"]["arguments"];
            let joined = format!(
                "{}{}",
                arguments.as_str().unwrap(),
                delta["function"]["arguments"].as_str().unwrap()
            );
            *arguments = joined.into();
        }
        if choice["finish_reason"].is_string() {
            reason = choice["finish_reason"].clone();
        }
    }
    let mut message = json!({"role": "assistant", "content": text});
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
        if text.is_empty() {
            message["content"] = Value::Null;
        }
    }
    (message, reason)
}

async fn whole(backend: ChatBackend, url: &str, request: ChatRequest) -> (Value, Value) {
    let answer = model(backend, url).complete(request).await.unwrap();
    let choice = &answer["choices"][0];
    (choice["message"].clone(), choice["finish_reason"].clone())
}

#[tokio::test]
async fn anthropic_gets_tools_calls_and_results() {
    let server = TestServer::start(|_, _| {
        Reply::json(
            json!({"id": "m", "model": "c", "stop_reason": "tool_use", "content": [
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}]}),
        )
    })
    .await;
    let asked = with_history(json!({"tool_choice": "required", "parallel_tool_calls": false}));
    let (message, reason) = whole(ChatBackend::Anthropic, &server.url, asked).await;
    assert_eq!(reason, "tool_calls");
    assert_eq!(
        message,
        json!({"role": "assistant", "content": "Let me look.", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}}]})
    );
    let sent = server.seen()[0].json();
    assert_eq!(
        sent["messages"],
        json!([
            {"role": "user", "content": [{"type": "text", "text": "Here?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                {"type": "tool_use", "id": "c2", "name": "clock", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "{\"sky\": \"grey\"}"},
                {"type": "tool_result", "tool_use_id": "c2", "content": "noon"}]}])
    );
    assert_eq!(
        sent["tools"],
        json!([
            {"name": "weather", "description": "Tells the weather",
                "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
            {"name": "clock", "input_schema": {"type": "object"}}])
    );
    assert_eq!(
        sent["tool_choice"],
        json!({"type": "any", "disable_parallel_tool_use": true})
    );
    for (choice, expected) in [
        (json!("auto"), Value::Null),
        (json!("none"), json!({"type": "none"})),
        (
            json!({"type": "function", "function": {"name": "clock"}}),
            json!({"type": "tool", "name": "clock"}),
        ),
    ] {
        whole(
            ChatBackend::Anthropic,
            &server.url,
            with_history(json!({"tool_choice": choice})),
        )
        .await;
        assert_eq!(server.seen().last().unwrap().json()["tool_choice"], expected);
    }
}

fn anthropic_events(blocks: &[(Value, &[&str])], stop_reason: &str) -> Vec<String> {
    let mut events = vec![json!({"type": "message_start", "message": {"id": "m", "model": "c"}})];
    for (index, (block, deltas)) in blocks.iter().enumerate() {
        events.push(json!({"type": "content_block_start", "index": index, "content_block": block}));
        for delta in *deltas {
            let delta = match block["type"].as_str() {
                Some("text") => json!({"type": "text_delta", "text": delta}),
                _ => json!({"type": "input_json_delta", "partial_json": delta}),
            };
            events.push(json!({"type": "content_block_delta", "index": index, "delta": delta}));
        }
        events.push(json!({"type": "content_block_stop", "index": index}));
    }
    events.push(json!({"type": "message_delta", "delta": {"stop_reason": stop_reason}}));
    events.push(json!({"type": "message_stop"}));
    events.into_iter().map(event).collect()
}

#[tokio::test]
async fn anthropics_calls_stream() {
    let server = TestServer::start(|_, _| {
        let tool = |id: &str, name: &str| json!({"type": "tool_use", "id": id, "name": name, "input": {}});
        let blocks: [(Value, &[&str]); 3] = [
            (json!({"type": "text", "text": ""}), &["Let me ", "look."]),
            (tool("t1", "weather"), &["", "{\"city\"", ": \"Rome\"}"]),
            (tool("t2", "clock"), &[""]),
        ];
        Reply::Events(anthropic_events(&blocks, "tool_use"))
    })
    .await;
    let (message, reason) = gathered(ChatBackend::Anthropic, &server.url, with_history(json!({}))).await;
    assert_eq!(reason, "tool_calls");
    assert_eq!(
        message,
        json!({"role": "assistant", "content": "Let me look.", "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}},
            {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]})
    );
}

fn schema() -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "reply",
        "schema": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}}})
}

/// The answer is the arguments of a tool made for it, whatever is said beside it.
#[tokio::test]
async fn anthropic_answers_in_json() {
    let server = TestServer::start(|seen, _| {
        let streamed = seen.json()["stream"] == true;
        let name = seen.json()["tools"].as_array().unwrap().last().unwrap()["name"].clone();
        let tool = json!({"type": "tool_use", "id": "t", "name": name, "input": {"word": "yes"}});
        let text = json!({"type": "text", "text": "Sure: "});
        match streamed {
            true => {
                let blocks: [(Value, &[&str]); 2] =
                    [(text, &["Sure: "]), (tool, &["{\"word\":", "\"yes\"}"])];
                Reply::Events(anthropic_events(&blocks, "tool_use"))
            }
            false => Reply::json(
                json!({"id": "m", "model": "c", "stop_reason": "tool_use", "content": [text, tool]}),
            ),
        }
    })
    .await;
    let expected = (
        json!({"role": "assistant", "content": "{\"word\":\"yes\"}"}),
        json!("stop"),
    );
    let plain = || ask(json!({"response_format": schema()}));
    assert_eq!(
        whole(ChatBackend::Anthropic, &server.url, plain()).await,
        expected
    );
    assert_eq!(
        gathered(ChatBackend::Anthropic, &server.url, plain()).await,
        expected
    );
    let sent = server.seen()[0].json();
    assert_eq!(
        sent["tools"][0]["input_schema"],
        schema()["json_schema"]["schema"]
    );
    assert_eq!(
        sent["tool_choice"],
        json!({"type": "tool", "name": sent["tools"][0]["name"], "disable_parallel_tool_use": true})
    );
    // With tools of the caller beside it, one or the other.
    let both = json!({"response_format": {"type": "json_object"},
        "tools": [{"type": "function", "function": {"name": "answer"}}]});
    assert_eq!(
        whole(ChatBackend::Anthropic, &server.url, ask(both)).await,
        expected
    );
    let sent = server.seen()[2].json();
    assert_eq!(sent["tool_choice"], json!({"type": "any"}));
    assert_ne!(sent["tools"][0]["name"], sent["tools"][1]["name"]);
}

/// A model that answers in words all the same is not lost.
#[tokio::test]
async fn an_answer_in_words_comes_through() {
    let server = TestServer::start(|_, _| {
        let blocks: [(Value, &[&str]); 1] =
            [(json!({"type": "text", "text": ""}), &["I would ", "rather not."])];
        Reply::Events(anthropic_events(&blocks, "refusal"))
    })
    .await;
    let asked = ask(json!({"response_format": schema()}));
    let (message, reason) = gathered(ChatBackend::Anthropic, &server.url, asked).await;
    assert_eq!(
        (&message["content"], &reason),
        (&json!("I would rather not."), &json!("content_filter"))
    );
}

fn gemini_calls(reason: &str) -> Value {
    json!({"responseId": "r", "candidates": [{"finishReason": reason, "content": {"role": "model", "parts": [
        {"text": "thinking", "thought": true},
        {"functionCall": {"name": "weather", "args": {"city": "Rome"}}, "thoughtSignature": "c2ln"},
        {"functionCall": {"name": "clock"}}]}}]})
}

const LONG: &str = r#"{"id":123456789012345678901234567890,"b":1,"a":2}"#;

/// Asks about a call with these arguments, whose tool failed.
fn about_a_call(arguments: &str) -> ChatRequest {
    ask(json!({"messages": [{"role": "user", "content": "x"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]},
        {"role": "tool", "tool_call_id": "1", "content": "failed"}]}))
}

#[tokio::test]
async fn arguments_in_the_history_keep_their_digits_and_may_be_malformed() {
    for backend in [ChatBackend::Gemini, ChatBackend::Anthropic] {
        let server = TestServer::start(move |_, _| match backend {
            ChatBackend::Gemini => Reply::json(gemini_calls("STOP")),
            _ => Reply::json(
                json!({"id": "m", "model": "c", "content": [{"type": "text", "text": "x"}],
                "stop_reason": "end_turn"}),
            ),
        })
        .await;
        whole(backend, &server.url, about_a_call(LONG)).await;
        let sent = String::from_utf8(server.seen()[0].body.clone()).unwrap();
        assert!(sent.contains(LONG), "{sent}");
        for malformed in ["{\"city\": \"Os", "[1, 2]", "Oslo"] {
            whole(backend, &server.url, about_a_call(malformed)).await;
            let sent = server.seen().last().unwrap().json();
            let call = match backend {
                ChatBackend::Gemini => &sent["contents"][1]["parts"][0]["functionCall"]["args"],
                _ => &sent["messages"][1]["content"][0]["input"],
            };
            assert_eq!(*call, json!({ "malformed_arguments": malformed }));
        }
    }
}

#[tokio::test]
async fn arguments_that_gemini_writes_keep_their_digits() {
    let server = TestServer::start(|_, _| {
        let body = json!({"candidates": [{"finishReason": "STOP", "content": {"parts": [
            {"functionCall": {"name": "weather", "args": "LONG"}}]}}]});
        Reply::Answer {
            status: 200,
            headers: Vec::new(),
            body: body.to_string().replace("\"LONG\"", LONG).into_bytes(),
        }
    })
    .await;
    let (message, _) = whole(
        ChatBackend::Gemini,
        &server.url,
        ask(json!({"messages": [
        {"role": "user", "content": "x"}]})),
    )
    .await;
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], LONG);
}

#[tokio::test]
async fn gemini_gets_tools_calls_and_results() {
    let server = TestServer::start(|seen, _| match seen.target.contains("stream") {
        true => Reply::Events(vec![event(gemini_calls("STOP"))]),
        false => Reply::json(gemini_calls("STOP")),
    })
    .await;
    let asked =
        || with_history(json!({"tool_choice": {"type": "function", "function": {"name": "weather"}}}));
    for (message, reason) in [
        whole(ChatBackend::Gemini, &server.url, asked()).await,
        gathered(ChatBackend::Gemini, &server.url, asked()).await,
    ] {
        assert_eq!(reason, "tool_calls");
        assert_eq!(message["content"], Value::Null);
        let calls = message["tool_calls"].as_array().unwrap();
        let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
        assert_eq!(
            functions,
            [
                &json!({"name": "weather", "arguments": "{\"city\":\"Rome\"}"}),
                &json!({"name": "clock", "arguments": "{}"})
            ]
        );
        assert_ne!(calls[0]["id"], calls[1]["id"]);
        assert_eq!(calls[0]["extra_content"]["google"]["thought_signature"], "c2ln");
        // What comes back on the next turn is what the API gave.
        let next = ask(json!({"messages": [{"role": "user", "content": "x"}, message,
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "[1, 2]"},
            {"role": "tool", "tool_call_id": calls[1]["id"], "content": "noon"}]}));
        whole(ChatBackend::Gemini, &server.url, next).await;
        let sent = server.seen().last().unwrap().json();
        assert_eq!(
            sent["contents"][1]["parts"][0],
            json!({"functionCall": {"name": "weather", "args": {"city": "Rome"}}, "thoughtSignature": "c2ln"})
        );
        assert_eq!(
            sent["contents"][2]["parts"],
            json!([{"functionResponse": {"name": "weather", "response": {"result": [1, 2]}}},
                {"functionResponse": {"name": "clock", "response": {"result": "noon"}}}])
        );
    }
    let sent = server.seen()[0].json();
    assert_eq!(
        sent["contents"][0]["parts"][1],
        json!({"inlineData": {"mimeType": "image/png", "data": "AAAA"}})
    );
    let calls = &sent["contents"][1]["parts"];
    assert!(calls[0]["thoughtSignature"].is_string() && calls[1]["thoughtSignature"].is_null());
    assert_eq!(
        sent["contents"][2]["parts"][0],
        json!({"functionResponse": {"name": "weather", "response": {"sky": "grey"}}})
    );
    let declared = &sent["tools"][0]["functionDeclarations"];
    assert_eq!(
        declared[0]["parametersJsonSchema"],
        weather()["function"]["parameters"]
    );
    assert_eq!(declared[1]["name"], "clock");
    assert_eq!(
        sent["toolConfig"]["functionCallingConfig"],
        json!({"mode": "ANY", "allowedFunctionNames": ["weather"]})
    );
}

#[tokio::test]
async fn gemini_answers_in_json_and_useless_calls_are_errors() {
    let server = TestServer::start(|_, count| {
        Reply::json(match count {
            0 | 1 => {
                json!({"candidates": [{"finishReason": "STOP", "content": {"parts": [{"text": "{}"}]}}]})
            }
            _ => gemini_calls("MALFORMED_FUNCTION_CALL"),
        })
    })
    .await;
    // The order of keys is the order the model writes in.
    let sent = r#"{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"why": {}, "answer": {}}}}}}"#;
    let fields: SentFields = serde_json::from_str(sent).unwrap();
    whole(
        ChatBackend::Gemini,
        &server.url,
        ChatRequest::from_sent(fields).unwrap(),
    )
    .await;
    let body = String::from_utf8(server.seen()[0].body.clone()).unwrap();
    assert!(
        body.contains(r#""responseJsonSchema":{"type": "object", "properties": {"why": {}, "answer": {}}}"#),
        "{body}"
    );
    assert!(
        body.contains(r#""responseMimeType":"application/json""#),
        "{body}"
    );
    let any = ask(json!({"response_format": {"type": "json_object"}}));
    whole(ChatBackend::Gemini, &server.url, any).await;
    let generation = &server.seen()[1].json()["generationConfig"];
    assert_eq!(*generation, json!({"responseMimeType": "application/json"}));
    let failed = model(ChatBackend::Gemini, &server.url)
        .complete(ask(json!({})))
        .await
        .unwrap_err();
    assert!(matches!(failed, ChatError::Call(_)), "{failed}");
    let linked = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://h/a.png"}}]}]});
    let refused = model(ChatBackend::Gemini, &server.url)
        .complete(request(linked))
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("'image_url'"), "{refused}");
    assert_eq!(server.seen().len(), 3);
}

/// Two calls of one function, whose results come back in the other order.
#[tokio::test]
async fn results_go_back_in_the_order_of_their_calls() {
    let server = TestServer::start(|_, _| Reply::json(gemini_calls("STOP"))).await;
    let call = |id: &str, city: &str| {
        let arguments = json!({ "city": city }).to_string();
        json!({"id": id, "type": "function", "function": {"name": "weather", "arguments": arguments}})
    };
    let asked = ask(json!({"messages": [{"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call("1", "Oslo"), call("2", "Rome")]},
        {"role": "tool", "tool_call_id": "2", "content": "9007199254740993"},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
        {"role": "user", "content": "And?"}]}));
    whole(ChatBackend::Gemini, &server.url, asked).await;
    let sent = server.seen()[0].json();
    let result =
        |value: Value| json!({"functionResponse": {"name": "weather", "response": {"result": value}}});
    // What a floating number cannot hold stays a text.
    assert_eq!(
        sent["contents"][2]["parts"],
        json!([result(json!("rain")), result(json!("9007199254740993"))])
    );
    assert_eq!(
        sent["contents"][3],
        json!({"role": "user", "parts": [{"text": "And?"}]})
    );
}

/// Few Gemini models take tools and a form for the answer at once.
#[tokio::test]
async fn gemini_gets_tools_or_a_form_for_the_answer() {
    let server = TestServer::start(|seen, _| {
        let sent = seen.json();
        let declared = sent["tools"][0]["functionDeclarations"].as_array();
        let name = declared
            .and_then(|all| all.last())
            .map(|last| last["name"].clone());
        let part = match name {
            Some(name) => json!({"functionCall": {"name": name, "args": {"word": "yes"}}}),
            None => json!({"text": "{\"word\":\"yes\"}"}),
        };
        let parts = json!([{"text": "Sure: "}, part]);
        let parts = if sent["tools"].is_array() {
            parts
        } else {
            json!([part])
        };
        let answer = json!({"candidates": [{"finishReason": "STOP", "content": {"parts": parts}}]});
        match seen.target.contains("stream") {
            true => Reply::Events(vec![event(answer)]),
            false => Reply::json(answer),
        }
    })
    .await;
    let asked =
        |choice: &str| ask(json!({"response_format": schema(), "tools": [weather()], "tool_choice": choice}));
    let expected = (
        json!({"role": "assistant", "content": "{\"word\":\"yes\"}"}),
        json!("stop"),
    );
    assert_eq!(
        whole(ChatBackend::Gemini, &server.url, asked("auto")).await,
        expected
    );
    assert_eq!(
        gathered(ChatBackend::Gemini, &server.url, asked("auto")).await,
        expected
    );
    assert_eq!(
        whole(ChatBackend::Gemini, &server.url, asked("none")).await,
        expected
    );
    let (message, reason) = whole(ChatBackend::Gemini, &server.url, asked("required")).await;
    assert_eq!(
        (&message["content"], &reason),
        (&json!("Sure: "), &json!("tool_calls"))
    );
    let seen: Vec<Value> = server.seen().iter().map(Seen::json).collect();
    for sent in &seen[..2] {
        let declared = sent["tools"][0]["functionDeclarations"].as_array().unwrap();
        assert_eq!(declared.len(), 2);
        assert_eq!(
            declared[1]["parametersJsonSchema"],
            schema()["json_schema"]["schema"]
        );
        assert_eq!(
            sent["toolConfig"]["functionCallingConfig"],
            json!({"mode": "ANY"})
        );
        assert_eq!(sent["generationConfig"], json!({}));
    }
    assert!(seen[2].get("tools").is_none() && seen[2]["generationConfig"]["responseMimeType"].is_string());
    assert_eq!(seen[3]["generationConfig"], json!({}));
}

#[tokio::test]
async fn one_call_at_a_time_where_that_is_asked_for() {
    let server = TestServer::start(|seen, _| match seen.target.contains("stream") {
        true => Reply::Events(vec![event(gemini_calls("STOP"))]),
        false => Reply::json(gemini_calls("STOP")),
    })
    .await;
    let asked = || ask(json!({"tools": [weather()], "parallel_tool_calls": false}));
    for (message, reason) in [
        whole(ChatBackend::Gemini, &server.url, asked()).await,
        gathered(ChatBackend::Gemini, &server.url, asked()).await,
    ] {
        assert_eq!(
            message["tool_calls"].as_array().map(Vec::len),
            Some(1),
            "{message}"
        );
        assert_eq!(reason, "tool_calls");
    }
}

/// A history of another provider, to be summed up without tools.
#[tokio::test]
async fn anthropic_takes_histories_of_others() {
    let server = TestServer::start(|seen, _| {
        let tool = json!({"type": "tool_use", "id": "t", "name": "answer", "input": {"word": "yes"}});
        match seen.json()["stream"] == true {
            true => {
                let blocks: [(Value, &[&str]); 2] = [(tool.clone(), &["{\"n\":1}"]), (tool, &["{\"n\":2}"])];
                Reply::Events(anthropic_events(&blocks, "tool_use"))
            }
            false => {
                Reply::json(json!({"content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn"}))
            }
        }
    })
    .await;
    let call =
        |id: &str| json!({"id": id, "type": "function", "function": {"name": "clock", "arguments": "{}"}});
    let turn = |id: &str| {
        [
            json!({"role": "assistant", "content": "", "tool_calls": [call(id)]}),
            json!({"role": "tool", "tool_call_id": id, "content": "noon"}),
        ]
    };
    let mut messages = vec![json!({"role": "user", "content": "x"})];
    for id in ["functions.clock:0", "call_0", "call_0", "call_1"] {
        messages.extend(turn(id));
    }
    messages.push(json!({"role": "user", "content": " "}));
    whole(
        ChatBackend::Anthropic,
        &server.url,
        ask(json!({ "messages": messages })),
    )
    .await;
    let sent = server.seen()[0].json();
    assert_eq!(
        sent["tools"],
        json!([{"name": "clock", "input_schema": {"type": "object"}}])
    );
    assert_eq!(sent["tool_choice"], json!({"type": "none"}));
    let turns = sent["messages"].as_array().unwrap();
    assert_eq!(turns.len(), 9);
    for (number, id) in ["ragstone_0", "ragstone_1", "ragstone_2", "call_1"]
        .iter()
        .enumerate()
    {
        assert_eq!(turns[2 * number + 1]["content"][0]["id"], *id);
        assert_eq!(turns[2 * number + 2]["content"][0]["tool_use_id"], *id);
    }
    assert_eq!(
        turns[8]["content"].as_array().map(Vec::len),
        Some(1),
        "blank text is left out"
    );
    // A second answer is one too many.
    let twice = ask(json!({"response_format": {"type": "json_object"}}));
    let (message, _) = gathered(ChatBackend::Anthropic, &server.url, twice).await;
    assert_eq!(message["content"], "{\"n\":1}");
    assert_eq!(
        server.seen()[1].json()["tool_choice"],
        json!({"type": "tool", "name": "answer", "disable_parallel_tool_use": true})
    );
    for url in ["http://h/a.png", "data:image/tiff;base64,AAAA"] {
        let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]});
        let refused = model(ChatBackend::Anthropic, &server.url)
            .complete(request(image))
            .await;
        assert!(refused.unwrap_err().to_string().contains("'image_url'"), "{url}");
    }
}
