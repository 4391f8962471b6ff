//! A provider that answers after a fixed time.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::response::IntoResponse;
use axum::routing::post;
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use super::WIDTH;

pub(crate) struct Stub {
    address: SocketAddr,
    inner: Arc<Inner>,
}

struct Inner {
    delay: Duration,
    calls: AtomicUsize,
    texts: AtomicUsize,
    last_chat: Mutex<String>,
}

#[derive(Deserialize)]
struct EmbeddingRequest {
    input: Vec<String>,
    encoding_format: String,
}

impl Stub {
    pub(crate) async fn start(delay: Duration) -> Self {
        let inner = Arc::new(Inner {
            delay,
            calls: AtomicUsize::new(0),
            texts: AtomicUsize::new(0),
            last_chat: Mutex::default(),
        });
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

    pub(crate) fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    /// Calls, and texts in them.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (
            self.inner.calls.load(Ordering::Relaxed),
            self.inner.texts.load(Ordering::Relaxed),
        )
    }

    pub(crate) fn last_chat(&self) -> String {
        self.inner.last_chat.lock().expect("the last chat").clone()
    }
}

async fn embeddings(
    State(stub): State<Arc<Inner>>,
    Json(request): Json<EmbeddingRequest>,
) -> impl IntoResponse {
    assert_eq!(request.encoding_format, "base64");
    stub.calls.fetch_add(1, Ordering::Relaxed);
    stub.texts.fetch_add(request.input.len(), Ordering::Relaxed);
    tokio::time::sleep(stub.delay).await;
    let mut body = String::with_capacity(request.input.len() * WIDTH * 6);
    body.push_str("{\"data\":[");
    for (index, text) in request.input.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        body.push_str(&format!("{comma}{{\"index\":{index},\"embedding\":\""));
        let mut random = fastrand::Rng::with_seed(
            text.bytes()
                .fold(7, |hash, b| hash * 31 % 1_000_003 + u64::from(b)),
        );
        let numbers: Vec<u8> = (0..WIDTH).flat_map(|_| random.f32().to_le_bytes()).collect();
        STANDARD.encode_string(numbers, &mut body);
        body.push_str("\"}");
    }
    body.push_str("]}");
    ([("content-type", "application/json")], body)
}

async fn chat(State(stub): State<Arc<Inner>>, Json(body): Json<Value>) -> Json<Value> {
    *stub.last_chat.lock().expect("the last chat") = body.to_string();
    Json(
        json!({"id": "c", "object": "chat.completion", "created": 1, "model": "stub",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}]}),
    )
}
