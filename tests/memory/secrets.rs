//! The keys of providers are never shown.

use serde_json::json;

use super::config;
use super::stub::{self, Behaviour, Stub};
use crate::support::Setup;

/// The stub answers on another thread while this one waits for a process to end.
#[tokio::test(flavor = "multi_thread")]
async fn a_canary_key_is_in_no_answer_log_line_error_or_report() {
    let stub = Stub::start().await;
    // A model of collections that is behind the same provider.
    let setup = Setup::serve().config(&config(&stub)).env("RAGSTONE_LOG", "trace");
    let far = "embeddings: [{id: far, provider: stub, model: stub-embed, dimensions: 32, version: '1'}]";
    let models = setup.file("embeddings.yml", far);
    let server = setup.arg("--embeddings-config").arg(models).start().await;
    let named = json!({"name": "c", "embedding_model": "far"});
    let mut shown = format!("{:?}\n", server.post("/collections", named).await);
    for (embed, chat) in [
        (None, None),
        (Some(401), Some(401)),
        (Some(500), Some(500)),
        (Some(429), Some(429)),
        (Some(400), Some(400)),
    ] {
        stub.behave(Behaviour {
            embed_status: embed,
            chat_status: chat,
            ..Behaviour::default()
        });
        let key = format!("k{}", embed.unwrap_or_default());
        let chat_body = json!({"messages": [{"role": "user", "content": format!("tea {key}")}]});
        let streamed = json!({"messages": [{"role": "user", "content": "tea"}], "stream": true});
        let answers = [
            server
                .put(&format!("/memory/knowledge/{key}"), json!({"content": "tea"}))
                .await,
            server
                .post("/rag/retrieve", json!({"query": format!("tea {key}")}))
                .await,
            server.post("/v1/chat/completions", chat_body).await,
            server.post("/v1/chat/completions", streamed).await,
            server
                .post(
                    "/api/providers/chromadb-wrapper/test",
                    json!({"config": {"url": stub.url()}}),
                )
                .await,
            server
                .post(
                    "/collections/c/documents",
                    json!({"documents": [{"id": key, "text": format!("tea {key}")}]}),
                )
                .await,
            server
                .post("/collections/c/query", json!({"query": format!("cup {key}")}))
                .await,
            server
                .post(
                    "/v1/embeddings",
                    json!({"model": "far", "input": format!("pot {key}")}),
                )
                .await,
            server
                .post("/embed", json!({"inputs": format!("leaf {key}")}))
                .await,
            server
                .post(
                    "/api/rag/collect",
                    json!({
                        "user_message": format!("and {key}?"),
                        "conversation_id": "talk",
                        "collections": [{"service": "local", "name": "c"}],
                    }),
                )
                .await,
        ];
        shown.extend(answers.iter().map(|answer| format!("{answer:?}\n")));
    }
    stub.behave(Behaviour {
        embed_status: Some(400),
        ..Behaviour::default()
    });
    super::until_status(&server, |_| {
        server.log().contains("agent memory could not be embedded")
    })
    .await;
    for route in [
        "/health",
        "/metrics",
        "/memory/status",
        "/memory/knowledge",
        "/memory/knowledge/k400",
        "/openapi.json",
        "/api/services",
        "/api/providers",
        "/collections",
        "/docs",
        "/nowhere",
    ] {
        shown.push_str(&format!("{:?}\n", server.get(route).await));
    }
    let (_, log) = server.stop();
    assert!(
        log.contains("agent memory could not be embedded"),
        "the failures are logged:\n{log}"
    );
    shown.push_str(&log);
    let doctored = Setup::command(&["doctor", "--online"])
        .config(&config(&stub))
        .run();
    shown.push_str(&format!("{doctored:?}"));
    let wrong = Setup::without_models()
        .config(&config(&stub).replace("type: openai", "type: nothing"))
        .run();
    shown.push_str(&format!("{wrong:?}"));
    let unreadable = Setup::without_models()
        .config(&config(&stub).replace("apiKey:", "apiKye:"))
        .run();
    assert_eq!(unreadable.code, Some(78));
    shown.push_str(&format!("{unreadable:?}"));
    let listed = Setup::without_models()
        .config(&config(&stub).replace(&format!("\"{}\"", stub::KEY), &format!("[\"{}\"]", stub::KEY)))
        .run();
    assert_eq!(listed.code, Some(78));
    shown.push_str(&format!("{listed:?}"));
    if let Some(at) = shown.find(stub::KEY) {
        let from = shown[..at].char_indices().rev().nth(300).map_or(0, |(at, _)| at);
        panic!("the key is shown: {}", &shown[from..at]);
    }
}
