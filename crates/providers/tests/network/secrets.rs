//! A canary key goes in, and comes out nowhere but in the header it belongs to.

use std::io::Write;
use std::sync::{Arc, Mutex};

use ragstone_core::backend::BackendError;
use ragstone_core::call::CallError;
use ragstone_core::chat::{ChatRequest, Message};
use ragstone_core::model::Role;
use ragstone_providers::chat::{ChatBackend, ChatSettings};
use ragstone_providers::embedding::{EmbedderSettings, EmbeddingBackend};
use ragstone_providers::http::{Auth, Call, ClientSettings, ServiceClient};
use serde_json::{Value, json};

use crate::common::server::{Reply, Seen, TestServer};
use crate::common::{CANARY, connect, quick};
use ragstone_providers::registry::Connected;

/// Everything that is logged, at every level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// A service that is as talkative as can be: it says what it was sent.
fn echo(seen: &Seen, status: u16) -> Reply {
    let headers: Value = seen.headers.iter().map(|(k, v)| json!([k, v])).collect();
    let all = seen
        .headers
        .iter()
        .map(|(_, v)| v.as_str())
        .collect::<Vec<_>>()
        .join(" ");
    Reply::status(
        status,
        json!({"detail": format!("you sent {all}"), "headers": headers}),
    )
}

fn assert_clean(what: &str, text: &str) {
    assert!(!text.contains(CANARY), "{what} shows the key: {text}");
    let encoded = {
        use base64::Engine as _;
        base64::engine::general_purpose::STANDARD.encode(format!("ann:{CANARY}"))
    };
    assert!(!text.contains(&encoded), "{what} shows the key: {text}");
}

#[tokio::test]
async fn a_canary_key_is_shown_nowhere() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    // For all threads: what the other tests log is looked at as well.
    tracing::subscriber::set_global_default(subscriber).unwrap();

    for status in [200, 401, 429, 500] {
        let server = TestServer::start(move |seen, _| echo(seen, status)).await;
        for auth in [
            Auth::Bearer(CANARY.to_owned().into()),
            Auth::Header {
                name: "x-key".into(),
                key: CANARY.to_owned().into(),
            },
            Auth::Basic {
                username: "ann".into(),
                password: CANARY.to_owned().into(),
            },
        ] {
            let mut settings = ClientSettings::new("far", &server.url, "url").unwrap();
            settings.policy = quick();
            settings.auth = auth;
            assert_clean("settings", &format!("{settings:?}"));
            let client = ServiceClient::new(settings).unwrap();
            assert_clean("client", &format!("{client:?}"));
            if let Err(error) = client.call_json::<Vec<u8>>(Call::get("x")).await {
                assert_clean("error", &format!("{error} {error:?}"));
                if let CallError::Answered(answer) = error {
                    assert_clean("body", &String::from_utf8_lossy(&answer.body));
                }
            }
        }
        providers_show_nothing(&server.url).await;
        let with_canary = server
            .seen()
            .iter()
            .filter(|s| s.headers.iter().any(|(_, v)| v.contains(CANARY)))
            .count();
        assert!(with_canary > 0, "the key was sent");
        assert!(
            server.seen().iter().all(|s| !s.target.contains(CANARY)),
            "and never in an address"
        );
    }
    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(logged.contains("reranking failed"), "failures were logged");
    assert_clean("log", &logged);
}

async fn providers_show_nothing(url: &str) {
    for backend in EmbeddingBackend::ALL {
        let settings = EmbedderSettings {
            id: "m".into(),
            provider: "p".into(),
            backend,
            api_key: Some(CANARY.to_owned().into()),
            base_url: Some(url.to_owned()),
            model: String::new(),
            dimensions: None,
            version: None,
            policy: quick(),
        };
        assert_clean("settings", &format!("{settings:?}"));
        let embedder = ragstone_providers::embedding::create(settings).unwrap();
        let error = embedder
            .embed(vec!["x".to_owned().into()], Role::Query)
            .await
            .unwrap_err();
        assert_clean("embedding", &format!("{error} {error:?}"));
    }
    for backend in [
        ChatBackend::OpenAi,
        ChatBackend::Anthropic,
        ChatBackend::Gemini,
        ChatBackend::Ollama,
    ] {
        let settings = ChatSettings {
            provider: "p".into(),
            backend,
            api_key: Some(CANARY.to_owned().into()),
            base_url: Some(url.to_owned()),
            model: "m".into(),
            policy: quick(),
        };
        let chat = ragstone_providers::chat::create(settings).unwrap();
        let request = || ChatRequest::new(vec![Message::new("user", "x")]);
        if let Err(error) = chat.complete(request()).await {
            assert_clean("chat", &format!("{error} {error:?}"));
        }
        if let Err(error) = chat.stream(request()).await {
            assert_clean("chat", &format!("{error} {error:?}"));
        }
    }
    for provider in ["chromadb", "chromadb-wrapper"] {
        let provider = connect(
            json!({"provider": provider, "url": url, "retry": {"maxAttempts": 1},
            "auth": {"type": "bearer", "token": CANARY}}),
        );
        let (health, listed) = asked(&provider.unwrap()).await;
        assert_clean("health", &health);
        if let Err(error) = listed {
            assert_clean("collections", &format!("{error} {error:?}"));
        }
    }
}

/// The health of a service in full, and the outcome of listing its collections; a rerank is tried, too.
async fn asked(service: &Connected) -> (String, Result<(), BackendError>) {
    match service {
        Connected::Backend(backend) => {
            let _ = backend.rerank("q", vec!["t".to_owned()], 1).await;
            let health = backend.health().await;
            (format!("{health:?}"), backend.collections().await.map(drop))
        }
        Connected::Storage(storage) => {
            let health = storage.service_health().await;
            let listed = storage.collections().await.map(drop);
            (format!("{health:?}"), listed.map_err(BackendError::from))
        }
    }
}

#[tokio::test]
async fn a_key_with_characters_that_json_escapes_is_shown_nowhere() {
    for key in [r#"p"ss\wd/longer"#, "canary-5e/KEY-0", "k/7"] {
        let as_json = json!(key).to_string();
        let assert_clean = |what: &str, text: &str| {
            let shown = [key, as_json.trim_matches('"')]
                .into_iter()
                .any(|form| text.contains(form));
            assert!(!shown, "{what} shows the key: {text}");
        };
        for status in [200, 400, 500] {
            let server = TestServer::start(move |seen, _| echo(seen, status)).await;
            for provider in ["chromadb", "chromadb-wrapper"] {
                let provider = connect(json!({"provider": provider, "url": server.url,
                    "retry": {"maxAttempts": 1}, "auth": {"type": "bearer", "token": key}}));
                let (health, listed) = asked(&provider.unwrap()).await;
                assert_clean("health", &health);
                let Err(error) = listed else {
                    panic!("no echo is a list")
                };
                assert_clean("an error", &error.to_string());
                if let BackendError::Call(CallError::Answered(answer)) = error {
                    let body: Value = serde_json::from_slice(&answer.body).unwrap();
                    assert_clean("a body", &body.to_string());
                    assert!(body["detail"].as_str().unwrap().contains("***"), "{body}");
                }
            }
            let sent = format!("Bearer {key}");
            assert!(
                server
                    .seen()
                    .iter()
                    .any(|seen| seen.header("authorization") == Some(&sent))
            );
        }
    }
}
