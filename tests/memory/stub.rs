//! A provider that speaks OpenAI's interface, checks what it is sent, and does as it is told.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::{Value, json};
use tokio::sync::watch;

pub const KEY: &str = "canary-3f9c1a7be2";
pub const WIDTH: usize = 32;

#[derive(Clone)]
pub struct Stub {
    address: SocketAddr,
    inner: Arc<Inner>,
}

#[derive(Default)]
struct Inner {
    embed_calls: Mutex<Vec<Vec<String>>>,
    chats: Mutex<Vec<Value>>,
    behaviour: Mutex<Behaviour>,
    held: watch::Sender<bool>,
    in_flight: AtomicUsize,
}

/// Counts a call as in flight until it is answered or its caller is gone.
struct InFlight(Arc<Inner>);

impl InFlight {
    fn new(stub: &Arc<Inner>) -> Self {
        stub.in_flight.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(stub))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

#[derive(Debug, Clone, Default)]
pub struct Behaviour {
    /// How long an embedding takes.
    pub delay: Duration,
    /// Answers embeddings with this status and a message that repeats the key.
    pub embed_status: Option<u16>,
    /// Refuses any batch with this text in it.
    pub refused_text: Option<String>,
    /// Has no keys, and refuses a call that brings one.
    pub keyless: bool,
    /// Answers chats with this status.
    pub chat_status: Option<u16>,
}

impl Stub {
    pub async fn start() -> Self {
        Self::behaving(Behaviour::default()).await
    }

    pub async fn behaving(behaviour: Behaviour) -> Self {
        let inner = Arc::new(Inner::default());
        *inner.behaviour.lock().unwrap() = behaviour;
        let router = Router::new()
            .route("/v1/embeddings", post(embeddings))
            .route("/v1/chat/completions", post(chat))
            .with_state(Arc::clone(&inner));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a free port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, inner }
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub fn behave(&self, behaviour: Behaviour) {
        *self.inner.behaviour.lock().unwrap() = behaviour;
    }

    /// Answers no embedding call until [`Self::release`].
    pub fn hold(&self) {
        self.inner.held.send_replace(true);
    }

    pub fn release(&self) {
        self.inner.held.send_replace(false);
    }

    /// Waits until exactly so many embedding calls wait for their answer.
    pub async fn until_in_flight(&self, count: usize) {
        for _ in 0..12_000 {
            if self.inner.in_flight.load(Ordering::SeqCst) == count {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("there were never {count} embedding calls in flight");
    }

    /// The texts of every embedding call.
    pub fn embed_calls(&self) -> Vec<Vec<String>> {
        self.inner.embed_calls.lock().unwrap().clone()
    }

    /// The body of every chat call.
    pub fn chats(&self) -> Vec<Value> {
        self.inner.chats.lock().unwrap().clone()
    }

    /// The system prompt of the last chat; empty where it had none.
    pub fn last_system_prompt(&self) -> String {
        let chats = self.chats();
        let messages = chats.last().expect("a chat")["messages"]
            .as_array()
            .expect("messages")
            .clone();
        let system = messages.iter().find(|message| message["role"] == "system");
        system
            .and_then(|message| message["content"].as_str())
            .unwrap_or_default()
            .to_owned()
    }
}

fn refused(stub: &Inner, headers: &HeaderMap) -> Option<Response> {
    let keyless = stub.behaviour.lock().unwrap().keyless;
    let expected = (!keyless).then(|| format!("Bearer {KEY}"));
    let sent = headers
        .get("authorization")
        .map(|value| value.to_str().unwrap_or_default());
    (sent != expected.as_deref()).then(|| failure(401))
}

/// As careless as a provider can be: it repeats the key, as it is and with an escape in it.
fn failure(status: u16) -> Response {
    let body = json!({"error": {"message": format!("no luck with the key {KEY}, none with ESCAPED")}});
    let body = body.to_string().replace("ESCAPED", &KEY.replace('-', "\\u002d"));
    let status = StatusCode::from_u16(status).expect("a status");
    (status, [(CONTENT_TYPE, "application/json")], body).into_response()
}

async fn embeddings(State(stub): State<Arc<Inner>>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    if let Some(refusal) = refused(&stub, &headers) {
        return refusal;
    }
    assert_eq!(
        (&body["model"], &body["dimensions"]),
        (&json!("stub-embed"), &json!(WIDTH))
    );
    let texts: Vec<String> = serde_json::from_value(body["input"].clone()).expect("a list of texts");
    let behaviour = stub.behaviour.lock().unwrap().clone();
    stub.embed_calls.lock().unwrap().push(texts.clone());
    let _in_flight = InFlight::new(&stub);
    tokio::time::sleep(behaviour.delay).await;
    let _ = stub.held.subscribe().wait_for(|held| !held).await;
    if let Some(status) = behaviour.embed_status {
        return failure(status);
    }
    if behaviour
        .refused_text
        .is_some_and(|refused| texts.contains(&refused))
    {
        return failure(400);
    }
    let data: Vec<Value> = texts
        .iter()
        .enumerate()
        .map(|(index, text)| json!({"index": index, "embedding": vector(text)}))
        .collect();
    Json(json!({"data": data, "usage": {"prompt_tokens": texts.len()}})).into_response()
}

/// Texts that share words are near each other.
fn vector(text: &str) -> Vec<f32> {
    let mut vector = vec![0.01; WIDTH];
    for word in text
        .to_lowercase()
        .split(|c: char| !c.is_alphanumeric())
        .filter(|word| !word.is_empty())
    {
        let hash = word.bytes().fold(7usize, |hash, byte| {
            hash.wrapping_mul(31).wrapping_add(byte.into())
        });
        vector[hash % WIDTH] += 1.0;
    }
    vector
}

async fn chat(State(stub): State<Arc<Inner>>, headers: HeaderMap, Json(body): Json<Value>) -> Response {
    if let Some(refusal) = refused(&stub, &headers) {
        return refusal;
    }
    stub.chats.lock().unwrap().push(body.clone());
    let status = stub.behaviour.lock().unwrap().chat_status;
    if let Some(status) = status {
        return failure(status);
    }
    let facts = json!({"id": "chat-1", "created": 1, "model": body["model"]});
    let with = |object: &str, choice: Value| {
        let mut answer = facts.clone();
        answer["object"] = json!(object);
        answer["choices"] = json!([choice]);
        answer
    };
    if body["stream"] != json!(true) {
        let message = json!({"role": "assistant", "content": "Tea is at four."});
        let mut answer = with(
            "chat.completion",
            json!({"index": 0, "message": message, "finish_reason": "stop"}),
        );
        answer["usage"] = json!({"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14});
        return Json(answer).into_response();
    }
    let mut events: Vec<Value> = ["Tea ", "is at ", "four."]
        .iter()
        .map(|text| {
            let choice = json!({"index": 0, "delta": {"content": text}, "finish_reason": null});
            with("chat.completion.chunk", choice)
        })
        .collect();
    events.push(with(
        "chat.completion.chunk",
        json!({"index": 0, "delta": {}, "finish_reason": "stop"}),
    ));
    let text: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
    let body = Body::from(format!("{text}data: [DONE]\n\n"));
    ([("content-type", "text/event-stream")], body).into_response()
}
