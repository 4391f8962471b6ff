//! Tools and structured answers of the official client, in front of APIs that are not OpenAI's.

use std::process::Command;
use std::sync::{Arc, Mutex};

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::stub::KEY;
use crate::support::{Server, Setup};

/// What a provider was asked, path and body.
type Seen = Arc<Mutex<Vec<(String, Value)>>>;

/// Starts a provider that answers by `answer`, and a server in front of it.
async fn in_front_of(kind: &'static str, answer: fn(&str, &Value) -> Response) -> (Server, Seen) {
    let seen = Seen::default();
    let provider = async move |State(seen): State<Seen>, request: Request| {
        let (parts, body) = request.into_parts();
        let bytes = axum::body::to_bytes(body, 1 << 20).await.unwrap();
        let body: Value = serde_json::from_slice(&bytes).unwrap();
        let path = parts.uri.to_string();
        let answer = answer(&path, &body);
        seen.lock().unwrap().push((path, body));
        answer
    };
    let router = axum::Router::new()
        .fallback(provider)
        .with_state(Arc::clone(&seen));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await });
    let config = format!(
        "providers:\n  them: {{type: {kind}, apiKey: {KEY}, baseUrl: \"http://{address}/v1\"}}\n\
         chat: {{providerID: them, model: m}}\n"
    );
    (Setup::without_models().config(&config).start().await, seen)
}

fn events(events: &[Value]) -> Response {
    let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    ([("content-type", "text/event-stream")], Body::from(text)).into_response()
}

/// Calls the tool it is given, answers once it has the result, and writes JSON where there is nothing to
/// call but the tool that takes it.
fn anthropic(_: &str, body: &Value) -> Response {
    let name = body["tools"][0]["name"].as_str().unwrap();
    let block = match body.pointer("/messages/2/content/0/content") {
        Some(result) => json!({"type": "text", "text": format!("It is {}.", result.as_str().unwrap())}),
        None if name == "add" => {
            json!({"type": "tool_use", "id": "t", "name": name, "input": {"a": 17, "b": 25}})
        }
        None => json!({"type": "tool_use", "id": "t", "name": name, "input": {"sum": 42}}),
    };
    let reason = match block["type"].as_str() {
        Some("text") => "end_turn",
        _ => "tool_use",
    };
    if body["stream"] == false {
        let usage = json!({"input_tokens": 1, "output_tokens": 1});
        let answer =
            json!({"id": "a", "model": "m", "content": [block], "stop_reason": reason, "usage": usage});
        return Json(answer).into_response();
    }
    let delta = match block["text"].as_str() {
        Some(text) => json!({"type": "text_delta", "text": text}),
        None => json!({"type": "input_json_delta", "partial_json": block["input"].to_string()}),
    };
    events(&[
        json!({"type": "message_start", "message": {"id": "a", "model": "m"}}),
        json!({"type": "content_block_start", "index": 0, "content_block": block}),
        json!({"type": "content_block_delta", "index": 0, "delta": delta}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({"type": "message_delta", "delta": {"stop_reason": reason}}),
        json!({"type": "message_stop"}),
    ])
}

fn gemini(path: &str, body: &Value) -> Response {
    let result = body.pointer("/contents/2/parts/0/functionResponse/response/result");
    let part = match result {
        Some(result) => json!({"text": format!("It is {result}.")}),
        None if body.get("tools").is_some() => {
            json!({"functionCall": {"name": "add", "args": {"a": 17, "b": 25}}, "thoughtSignature": "c2ln"})
        }
        None => json!({"text": "{\"sum\": 42}"}),
    };
    let answer = json!({"candidates": [{"content": {"parts": [part]}, "finishReason": "STOP"}]});
    match path.contains("streamGenerateContent") {
        true => events(&[answer]),
        false => Json(answer).into_response(),
    }
}

#[tokio::test]
async fn tools_and_structured_answers_work_with_the_official_client() {
    let python = crate::clients::python();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/clients/openai_tools.py");
    for (kind, answer) in [
        ("anthropic", anthropic as fn(&str, &Value) -> Response),
        ("gemini", gemini),
    ] {
        let (server, seen) = in_front_of(kind, answer).await;
        let (python, url) = (python.clone(), server.url("/v1"));
        let run = move || Command::new(python).args([script, &url]).output();
        let output = tokio::task::spawn_blocking(run).await.unwrap().unwrap();
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{kind}: {complaint}");
        let asked = seen.lock().unwrap().len();
        assert_eq!(asked, 5, "two turns whole, two streamed, one in JSON");
        // What Gemini thought of a call went back to it with the result.
        if kind == "gemini" {
            for turn in [1, 3] {
                let call = &seen.lock().unwrap()[turn].1["contents"][1]["parts"][0];
                assert_eq!(call["thoughtSignature"], "c2ln", "{call}");
            }
        }
    }
}

/// Google's 400 for a key it does not know is no fault of the client's.
#[tokio::test]
async fn a_key_that_google_does_not_know_is_a_fault_of_the_server() {
    let (server, _) = in_front_of("gemini", |_, _| {
        let error = json!({"code": 400, "message": "API key not valid. Please pass a valid API key.",
            "status": "INVALID_ARGUMENT", "details": [{"reason": "API_KEY_INVALID"}]});
        (StatusCode::BAD_REQUEST, Json(json!({ "error": error }))).into_response()
    })
    .await;
    // The reason is where the message is another language.
    let (listing, _) = in_front_of("gemini", |_, _| {
        let error = json!({"code": 400, "message": "No.", "details": [{"reason": "API_KEY_INVALID"}]});
        (StatusCode::BAD_REQUEST, Json(json!([{ "error": error }]))).into_response()
    })
    .await;
    for server in [server, listing] {
        for stream in [false, true] {
            let body = json!({"messages": [{"role": "user", "content": "x"}], "stream": stream});
            let detail = server.post("/v1/chat/completions", body).await.refused(502);
            assert!(detail.contains("apiKey") && !detail.contains(KEY), "{detail}");
        }
    }
}

#[tokio::test]
async fn what_a_provider_refuses_is_explained_with_all_that_it_says() {
    type Answer = fn(&str, &Value) -> Response;
    let cases: [(Answer, Value); 4] = [
        (
            |_, _| {
                let body = json!({"type": "error", "error": {"type": "invalid", "message": "too long"}});
                (StatusCode::BAD_REQUEST, Json(body)).into_response()
            },
            json!({"type": "error", "error": {"type": "invalid", "message": "too long"}, "detail": "too long"}),
        ),
        (
            |_, _| (StatusCode::NOT_FOUND, Json(json!({"error": "no such model"}))).into_response(),
            json!({"error": "no such model", "detail": "no such model"}),
        ),
        (
            |_, _| {
                (
                    StatusCode::BAD_REQUEST,
                    Json(json!([{"error": {"message": "listed"}}])),
                )
                    .into_response()
            },
            json!({"error": {"message": "listed"}, "detail": "listed"}),
        ),
        (
            |_, _| (StatusCode::BAD_REQUEST, Json(json!({"detail": "own"}))).into_response(),
            json!({"error": {"message": "own", "type": "upstream_error", "code": null}, "detail": "own"}),
        ),
    ];
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    for (provider, expected) in cases {
        let (server, _) = in_front_of("openai", provider).await;
        let answer = server.post("/v1/chat/completions", body.clone()).await;
        assert!([400, 404].contains(&answer.status), "{answer:?}");
        assert_eq!(answer.header("content-type"), "application/json");
        assert_eq!(serde_json::from_str::<Value>(&answer.text).unwrap(), expected);
    }
}

/// A page, as any web server has for an address that it does not know.
#[tokio::test]
async fn a_page_instead_of_an_error_is_told_as_a_wrong_address() {
    let (server, _) = in_front_of("openai", |_, _| {
        let page = "<html><body>404 page not found</body></html>";
        (StatusCode::NOT_FOUND, [("content-type", "text/html")], page).into_response()
    })
    .await;
    let body = json!({"messages": [{"role": "user", "content": "x"}]});
    let detail = server.post("/v1/chat/completions", body).await.refused(502);
    assert!(
        detail.contains("no JSON") && detail.contains("baseUrl"),
        "{detail}"
    );
}
