//! `/memory` and `/rag/retrieve`

use serde_json::{Value, json};

use super::stub::{Behaviour, Stub};
use super::{save_knowledge, setup, until_embedded, until_status};
use crate::support::{Setup, plain};

#[tokio::test]
async fn every_kind_can_be_saved_read_listed_replaced_and_deleted() {
    let server = plain().await;
    let bodies = [
        ("knowledge", "knowledge", json!({"content": "c", "category": "k"})),
        (
            "observations",
            "observation",
            json!({"session_key": "s", "content": "c"}),
        ),
        (
            "reflections",
            "reflection",
            json!({"session_key": "s", "content": "c"}),
        ),
        (
            "learnings",
            "learning",
            json!({"trigger": "t", "fix": "f", "category": "k"}),
        ),
    ];
    for (kind, collection, body) in bodies {
        let saved = if kind == "knowledge" {
            server.put("/memory/knowledge/the%20key", body.clone()).await.ok()
        } else {
            server.post(&format!("/memory/{kind}"), body.clone()).await.ok()
        };
        assert_eq!(saved["collection"], collection);
        let id = saved["id"].as_str().unwrap().replace(' ', "%20");
        let route = format!("/memory/{kind}/{id}");
        let read = server.get(&route).await.ok();
        for (field, value) in body.as_object().unwrap() {
            assert_eq!(&read[field], value, "{kind}: {read}");
        }
        let content = read["content"].as_str().unwrap();
        assert!(if kind == "learnings" {
            content.contains('t') && content.contains('f')
        } else {
            content == "c"
        });
        let list = server.get(&format!("/memory/{kind}")).await.ok();
        assert_eq!((&list["records"], &list["count"]), (&json!([read]), &json!(1)));

        let mut changed = body.clone();
        changed[if kind == "learnings" { "fix" } else { "content" }] = json!("other");
        assert_eq!(server.put(&route, changed).await.ok(), saved);
        assert!(
            server.get(&route).await.ok()["content"]
                .as_str()
                .unwrap()
                .contains("other")
        );

        assert_eq!(server.delete(&route).await.ok()["status"], "deleted");
        for answer in [server.get(&route).await, server.delete(&route).await] {
            assert!(
                answer
                    .refused(404)
                    .starts_with(&format!("No {collection} has the id "))
            );
        }
    }
}

#[tokio::test]
async fn lists_come_in_pages_and_by_session() {
    let server = plain().await;
    for n in 0..5 {
        let body =
            json!({"session_key": format!("s{}", n % 2), "content": format!("o{n}"), "id": format!("id{n}")});
        server.post("/memory/observations", body).await.ok();
    }
    let first = server.get("/memory/observations?limit=3").await.ok();
    assert_eq!(crate::support::ids(&first["records"]), ["id0", "id1", "id2"]);
    let next = first["next"].as_str().unwrap();
    let rest = server
        .get(&format!("/memory/observations?limit=3&after={next}"))
        .await
        .ok();
    assert_eq!(crate::support::ids(&rest["records"]), ["id3", "id4"]);
    assert!(rest.get("next").is_none());
    let all = server.get("/memory/observations?limit=5").await.ok();
    assert!(all.get("next").is_none(), "a full page may be the last");
    let of_session = server.get("/memory/observations?session_key=s1").await.ok();
    assert_eq!(crate::support::ids(&of_session["records"]), ["id1", "id3"]);
    assert!(
        server
            .get("/memory/observations?limit=0")
            .await
            .refused(400)
            .contains("'limit'")
    );
    assert!(
        server
            .get("/memory/observations?limit=-1")
            .await
            .refused(400)
            .contains("'limit'")
    );
}

#[tokio::test]
async fn bad_bodies_are_refused_by_name_and_change_nothing() {
    let server = plain().await;
    let long = "x".repeat(70_000);
    for (route, body, named) in [
        ("/memory/observations", json!({"content": "c"}), "'session_key'"),
        ("/memory/observations", json!({"session_key": "s"}), "'content'"),
        (
            "/memory/observations",
            json!({"session_key": "", "content": "c"}),
            "'session_key'",
        ),
        (
            "/memory/reflections",
            json!({"session_key": "s", "content": "  "}),
            "'content'",
        ),
        (
            "/memory/reflections",
            json!({"session_key": 3, "content": "c"}),
            "session_key",
        ),
        ("/memory/learnings", json!({"trigger": "t"}), "'fix'"),
        ("/memory/learnings", json!({"trigger": "t", "fix": long}), "'fix'"),
        (
            "/memory/learnings",
            json!({"trigger": "t", "fix": "f", "id": "a\nb"}),
            "'id'",
        ),
        (
            "/memory/learnings",
            json!({"trigger": "t", "fix": "f", "id": ""}),
            "'id'",
        ),
        ("/memory/knowledge", json!({"content": "c"}), "key"),
        ("/memory/knowledge", json!([]), ""),
    ] {
        let detail = server.post(route, body).await.refused(400);
        assert!(detail.contains(named), "{named}: {detail}");
    }
    let detail = server
        .post("/memory/dreams", json!({"content": "c"}))
        .await
        .refused(404);
    assert!(
        detail.contains("knowledge, observations, reflections, learnings"),
        "{detail}"
    );
    for kind in ["knowledge", "observations", "reflections", "learnings"] {
        assert_eq!(
            server.get(&format!("/memory/{kind}")).await.ok()["records"],
            json!([])
        );
    }
}

#[tokio::test]
async fn memory_is_no_collection_that_a_client_can_reach() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    save_knowledge(&server, "a", "tea").await;
    until_embedded(&server, 1).await;
    assert_eq!(server.get("/collections").await.ok()["collections"], json!([]));
    assert_eq!(server.get("/collections/.memory.knowledge").await.status, 400);
}

#[tokio::test]
async fn retrieval_refuses_what_makes_no_sense() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    for (body, named) in [
        (json!({}), "'query'"),
        (json!({"query": " "}), "'query'"),
        (json!({"query": "q", "limit": 0}), "'limit'"),
        (json!({"query": "q", "limit": 100_000}), "'limit'"),
        (json!({"query": "q", "max_distance": -1}), "'max_distance'"),
        (json!({"query": "q", "collections": []}), "'collections'"),
        (json!({"query": "q", "collections": ["a b"]}), "a b"),
    ] {
        let detail = server.post("/rag/retrieve", body).await.refused(400);
        assert!(detail.contains(named), "{named}: {detail}");
    }
}

#[tokio::test]
async fn a_provider_that_is_down_fails_retrieval_and_not_saving() {
    let stub = Stub::behaving(Behaviour {
        embed_status: Some(500),
        ..Behaviour::default()
    })
    .await;
    let server = setup(&stub).start().await;
    save_knowledge(&server, "a", "tea").await;
    for (status, ours) in [(500, 502), (401, 502), (400, 502), (429, 503)] {
        stub.behave(Behaviour {
            embed_status: Some(status),
            ..Behaviour::default()
        });
        let answer = server.post("/rag/retrieve", json!({"query": "tea"})).await;
        let detail = answer.refused(ours);
        assert!(
            detail.contains("'stub'") && !detail.contains("no luck"),
            "{detail}"
        );
        assert!(status != 429 || !answer.header("retry-after").is_empty());
    }
    stub.behave(Behaviour::default());
    until_embedded(&server, 1).await;
}

/// With a key that it does not take, Google answers 400 to everything.
#[tokio::test]
async fn a_provider_that_refuses_everything_costs_no_entry_and_few_calls() {
    let stub = Stub::behaving(Behaviour {
        embed_status: Some(400),
        ..Behaviour::default()
    })
    .await;
    let server = setup(&stub).start().await;
    for n in 0..20 {
        save_knowledge(&server, &format!("k{n}"), &format!("text {n}")).await;
    }
    let status = until_status(&server, |_| {
        server.log().contains("agent memory could not be embedded")
    })
    .await;
    assert_eq!((&status["failed"], &status["queued"]), (&json!(0), &json!(20)));
    assert!(stub.embed_calls().len() <= 10, "{:?}", stub.embed_calls());
    until_lag(&server, |seconds| seconds > 0.0).await;
    stub.behave(Behaviour::default());
    until_embedded(&server, 20).await;
    until_lag(&server, |seconds| seconds == 0.0).await;
}

/// Waits until the age of the oldest entry that waits is as it should be.
async fn until_lag(server: &crate::support::Server, holds: impl Fn(f64) -> bool) {
    for _ in 0..6_000 {
        let metrics = server.get("/metrics").await.text;
        let lag = metrics
            .lines()
            .find_map(|line| line.strip_prefix("ragstone_memory_lag_seconds "));
        if lag.and_then(|lag| lag.parse().ok()).is_some_and(&holds) {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    panic!("the lag never became as expected:\n{}", server.log());
}

#[tokio::test]
async fn the_text_of_one_session_does_not_reach_another_through_an_old_vector() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    let save = async |session: &str, content: &str| {
        let body = json!({"session_key": session, "content": content});
        server.put("/memory/observations/o", body).await.ok();
    };
    save("s1", "tea is at four").await;
    until_embedded(&server, 1).await;
    // The new text cannot be embedded while it is the one that is refused.
    stub.behave(Behaviour {
        refused_text: Some("a secret of s2".into()),
        ..Behaviour::default()
    });
    save("s2", "a secret of s2").await;
    for session in ["s1", "s2"] {
        let body = json!({"query": "tea is at four", "session_key": session});
        assert_eq!(
            server.post("/rag/retrieve", body).await.ok()["results"],
            json!([]),
            "{session}"
        );
    }
    let status = until_status(&server, |status| status["failed"] == 1 && status["queued"] == 0).await;
    assert_eq!(status["embedded"], 0);
}

#[tokio::test]
async fn a_refused_text_is_marked_with_its_error_and_does_not_hold_up_the_others() {
    let stub = Stub::behaving(Behaviour {
        refused_text: Some("bad".into()),
        ..Behaviour::default()
    })
    .await;
    let server = setup(&stub).start().await;
    for text in ["good", "bad", "better"] {
        save_knowledge(&server, text, text).await;
    }
    until_status(&server, |status| {
        status["failed"] == 1 && status["embedded"] == 2 && status["queued"] == 0
    })
    .await;
    let entry = server.get("/memory/knowledge/bad").await.ok();
    assert_eq!(entry["embedding"], "failed");
    assert!(
        entry["embedding_error"].as_str().unwrap().contains("status 400"),
        "{entry}"
    );
    assert_eq!(
        server.get("/memory/knowledge/good").await.ok()["embedding"],
        "embedded"
    );
    // Gauges are set when the worker counts, in its own time.
    for name in [
        "saves_total",
        "embedded_total",
        "embed_calls_total",
        "embed_failures_total",
        "lag_seconds",
        "queued",
    ] {
        let name = format!("ragstone_memory_{name}");
        let mut metrics = server.get("/metrics").await.text;
        for _ in 0..3_000 {
            if metrics.contains(&name) {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            metrics = server.get("/metrics").await.text;
        }
        assert!(metrics.contains(&name), "{name} is not in:\n{metrics}");
    }
}

#[tokio::test]
async fn collections_of_the_service_can_be_named_beside_memory() {
    let stub = Stub::start().await;
    let setup = setup(&stub);
    let models = setup.file(
        "embeddings.yml",
        &format!(
            "embeddings:\n  - {{id: far, provider: stub, model: stub-embed, dimensions: {}}}\n",
            super::stub::WIDTH
        ),
    );
    let setup = Setup::serve()
        .config(&super::config(&stub))
        .arg("--embeddings-config")
        .arg(models);
    let server = setup.start().await;
    save_knowledge(&server, "k", "tea is at four").await;
    until_embedded(&server, 1).await;
    server
        .post("/collections", json!({"name": "books", "embedding_model": "far"}))
        .await
        .ok();
    server
        .add(
            "books",
            vec![json!({"id": "b", "text": "tea and cake", "metadata": {"page": 3}})],
        )
        .await;
    let body = json!({"query": "tea and cake", "collections": ["knowledge", "books", "nowhere"]});
    let answer = server.post("/rag/retrieve", body).await.ok();
    assert_eq!(crate::support::ids(&answer["results"]), ["b", "k"]);
    assert_eq!(answer["results"][0]["content"], "tea and cake");
    assert_eq!(answer["results"][0]["metadata"], json!({"page": 3}));
    let warnings = answer["warnings"].as_array().unwrap();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].as_str().unwrap().contains("'nowhere'"), "{answer}");
}

#[tokio::test]
async fn an_in_process_model_can_embed_memory() {
    let model = crate::support::fixtures::model("bert");
    let setup = Setup::serve().embeddings(&[("tiny", &model)]);
    let server = setup
        .config("embedding: {provider: in-process, model: tiny}\n")
        .start()
        .await;
    save_knowledge(&server, "a", "the quick brown fox").await;
    until_embedded(&server, 1).await;
    let answer = server
        .post("/rag/retrieve", json!({"query": "the quick brown fox"}))
        .await
        .ok();
    assert_eq!(crate::support::ids(&answer["results"]), ["a"]);
    assert!(
        answer["results"][0]["distance"].as_f64().unwrap() < 1e-3,
        "{answer}"
    );
}

/// Vectors of two models cannot be compared: retrieval says so, like `/query`.
#[tokio::test]
async fn retrieval_refuses_a_collection_with_vectors_of_another_model() {
    let model = crate::support::fixtures::model("bert");
    let setup = Setup::serve().embeddings(&[("tiny", &model), ("other", &model)]);
    let server = setup
        .config("embedding: {provider: in-process, model: tiny}\n")
        .start()
        .await;
    server
        .post(
            "/collections",
            json!({"name": "books", "embedding_model": "tiny"}),
        )
        .await
        .ok();
    let tea = json!({"id": "b", "text": "tea and cake"});
    server.add("books", vec![tea]).await;
    let metadata = json!({"metadata": {"embedding_model": "other"}});
    server.put("/collections/books/metadata", metadata).await.ok();
    let query = json!({"query": "tea and cake"});
    let refused = server.post("/collections/books/query", query).await;
    assert_eq!(refused.status, 400);
    save_knowledge(&server, "k", "tea is at four").await;
    until_embedded(&server, 1).await;
    let body = json!({"query": "tea and cake", "collections": ["knowledge", "books"]});
    let answer = server.post("/rag/retrieve", body).await.ok();
    assert_eq!(crate::support::ids(&answer["results"]), ["k"]);
    let warning = answer["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("'books'") && warning.contains("vectors of model 'tiny'"),
        "{answer}"
    );
}

#[tokio::test]
async fn wrong_configurations_are_fatal_and_name_the_key() {
    for (yaml, named) in [
        ("embedding: {providerID: nobody}", "nobody"),
        ("embedding: {provider: in-process, model: tiny}", "tiny"),
        ("embedding: {providerId: x, modle: y}", "modle"),
        ("embedding: {rag: {maxResults: 0}}", "maxResults"),
        ("embedding: {rag: {maxTokens: 0}}", "maxTokens"),
        ("embedding: {rag: {timeoutMs: 0}}", "timeoutMs"),
        ("embedding: {rag: {collections: [a, a]}}", "'a' twice"),
        ("embedding: {rag: {collections: [\"a b\"]}}", "a b"),
        (
            "embedding: {dimensions: -1}",
            "a whole number, zero or more, is expected",
        ),
        (
            "providers: {c: {type: cohere, apiKey: k}}\nembedding: {providerID: c}",
            "openai, gemini, google, ollama",
        ),
        (
            "providers: {g: {type: gemini, apiKey: k}}\nembedding: {providerID: g, model: ../x}",
            "letters, digits",
        ),
        (
            "providers: {o: {type: openai, apiKey: k}}\nchat: {providerID: o, model: \"\"}",
            "model",
        ),
        ("chat: {providerID: nobody, model: m}", "nobody"),
        (
            "providers: {c: {type: anthropic, apiKey: k}}\nembedding: {providerID: c}",
            "anthropic",
        ),
        (
            "providers: {o: {type: openai}}\nembedding: {providerID: o}",
            "apiKey",
        ),
        (
            "providers: {o: {type: openai, apiKey: \"${NOT_SET_HERE}\"}}\nembedding: {providerID: o}",
            "NOT_SET_HERE",
        ),
    ] {
        let finished = Setup::without_models().config(yaml).run();
        let said = finished.failed_with(78);
        assert!(said.contains(named), "{named}: {said}");
    }
}

#[tokio::test]
async fn the_description_of_the_routes_is_complete() {
    let server = plain().await;
    let api = server.get("/openapi.json").await.ok();
    for (path, methods) in [
        ("/memory/status", &["get"][..]),
        ("/memory/{kind}", &["get", "post"]),
        ("/memory/{kind}/{id}", &["get", "put", "delete"]),
        ("/rag/retrieve", &["post"]),
        ("/v1/chat/completions", &["post"]),
    ] {
        for method in methods {
            assert_ne!(api["paths"][path][method], Value::Null, "{method} {path}");
        }
    }
}
