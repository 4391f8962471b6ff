//! Every route, on this process and on another one: the answers are those of the service routes.

use reqwest::Method;
use serde_json::{Value, json};

use super::{Pair, add, create, pair};
use crate::support::{Setup, fixtures, plain};

const TEXTS: [&str; 5] = [
    "The quick brown fox jumps over the lazy dog.",
    "Numbers such as 3.14159 occur.",
    "Zürich is a city.",
    "vectors have an angle",
    "a question about vectors",
];

#[tokio::test]
async fn a_collection_lives_and_dies_in_the_service_that_is_named() {
    let Pair { near, far } = pair().await;
    for (service, server) in [("local", &near), ("far", &far)] {
        let body = json!({"service": service, "name": "c", "embedding_model": "tiny", "metadata": {"a": 1}});
        let created = near.post("/api/collections", body).await.ok();
        assert_eq!(
            created,
            json!({"status": "created", "name": "c", "metadata": {"a": 1, "embedding_model": "tiny"}})
        );
        assert_eq!(
            server.get("/collections/c").await.ok(),
            near.get(&format!("/api/collections/c?service={service}"))
                .await
                .ok()
        );

        let merged = near
            .put(
                "/api/collections/c/metadata?merge=true",
                json!({"service": service, "metadata": {"b": 2}}),
            )
            .await
            .ok();
        assert_eq!(
            merged["metadata"],
            json!({"a": 1, "b": 2, "embedding_model": "tiny"})
        );
        assert_eq!(
            (&merged["status"], &merged["merge"]),
            (&json!("updated"), &json!(true))
        );
        let in_body = json!({"service": service, "metadata": {"c": 3}, "merge": true});
        let merged = near.put("/api/collections/c/metadata", in_body).await.ok();
        assert_eq!(
            merged["metadata"],
            json!({"a": 1, "b": 2, "c": 3, "embedding_model": "tiny"})
        );
        let replaced = near
            .put(
                "/api/collections/c/metadata",
                json!({"service": service, "metadata": {"d": 4}}),
            )
            .await
            .ok();
        assert_eq!(
            replaced,
            json!({"status": "updated", "name": "c", "metadata": {"d": 4}, "merge": false})
        );
        assert_eq!(
            server.get("/collections/c").await.ok()["metadata"],
            json!({"d": 4})
        );

        let deleted = near
            .delete(&format!("/api/collections/c?service={service}"))
            .await
            .ok();
        assert_eq!(deleted, json!({"status": "deleted", "name": "c"}));
        server.get("/collections/c").await.refused(404);
    }
}

#[tokio::test]
async fn documents_are_added_found_and_deleted() {
    let Pair { near, far } = pair().await;
    for (service, server) in [("local", &near), ("far", &far)] {
        create(&near, service, "c", json!({})).await;
        let documents = json!([{"id": "x", "text": "one", "metadata": {"n": 1}}, {"text": "two", "metadata": {"n": "b"}}]);
        let added = near
            .post(
                "/api/collections/c/documents",
                json!({"service": service, "documents": documents}),
            )
            .await
            .ok();
        assert_eq!(
            (&added["status"], &added["collection"], &added["count"]),
            (&json!("added"), &json!("c"), &json!(2))
        );
        assert_eq!(added["ids"][0], "x");
        assert!(added["ids"][1].as_str().unwrap().starts_with("doc_"));

        let page = [("service", service), ("where", r#"{"n":1}"#), ("limit", "5")];
        let found = near.get_with("/api/collections/c/documents", &page).await.ok();
        assert_eq!(
            found,
            server.get_with("/collections/c/documents", &page[1..]).await.ok()
        );
        assert_eq!(
            found,
            json!({"documents": [{"id": "x", "text": "one", "metadata": {"n": 1}}], "count": 1, "total": 1})
        );
        let total = near
            .get(&format!("/api/collections/c/documents?limit=0&service={service}"))
            .await
            .ok();
        assert_eq!(total, json!({"documents": [], "count": 0, "total": 2}));

        let values = near
            .get(&format!(
                "/api/collections/c/metadata-values?field=n&service={service}"
            ))
            .await
            .ok();
        assert_eq!(values, json!({"field": "n", "values": [1, "b"], "count": 2}));

        let one = near
            .delete_with(
                &format!("/api/collections/c/documents?service={service}"),
                json!({"where": {"n": 1}}),
            )
            .await
            .ok();
        assert_eq!(one, json!({"status": "deleted", "collection": "c", "count": 1}));
        let emptied = near
            .delete(&format!("/api/collections/c/documents/all?service={service}"))
            .await
            .ok();
        assert_eq!(
            emptied,
            json!({"status": "emptied", "collection": "c", "count_deleted": 1})
        );
    }
}

/// Whatever a query asks for, the gateway answers as the service does.
#[tokio::test]
async fn a_query_is_answered_as_by_the_service_itself() {
    let setup = || {
        super::with_model(Setup::serve())
            .arg("--cross-encoder-path")
            .arg(fixtures::model("cross-bert"))
    };
    let far = setup().start().await;
    let near = setup()
        .config(&super::services(&[("far", &far.url(""))]))
        .start()
        .await;
    for (service, server) in [("local", &near), ("far", &far)] {
        create(&near, service, "c", json!({"about": "tests"})).await;
        add(&near, service, "c", &TEXTS).await;
        for body in [
            json!({"query": "which animal jumps?"}),
            json!({"query": "vectors", "top_k": 5, "mode": "keyword"}),
            json!({"query": "vectors", "top_k": 4, "mode": "hybrid", "weights": {"dense": 0.5}}),
            json!({"query": "vectors", "rerank": true, "where": {"n": {"$gte": 1}}}),
            json!({"query": "vectors", "expand": "section_id", "max_distance": 1.5}),
            json!({"query": "vectors", "expand": {"field": "section_id", "max_chars": 30}}),
        ] {
            let mut through = body.clone();
            through["service"] = service.into();
            let direct = server.post("/collections/c/query", body.clone()).await.ok();
            assert_eq!(
                near.post("/api/collections/c/query", through).await.ok(),
                direct,
                "{service}: {body}"
            );
        }
        let explained = json!({"service": service, "query": "vectors", "mode": "hybrid", "explain": true, "rerank": true});
        let mut answer = near
            .post("/api/collections/c/query", explained.clone())
            .await
            .ok();
        let mut direct = server.post("/collections/c/query", explained).await.ok();
        for answer in [&mut answer, &mut direct] {
            let times = answer.as_object_mut().unwrap().remove("timings_ms").unwrap();
            assert!(times["rerank"].is_f64(), "{times}");
        }
        assert_eq!(answer, direct);
    }
}

#[tokio::test]
async fn all_collections_of_all_services_are_listed() {
    let Pair { near, far } = pair().await;
    create(&near, "local", "here", json!({})).await;
    create(&near, "far", "there", json!({"k": "v"})).await;
    add(&near, "far", "there", &TEXTS).await;
    let all = near.get("/api/collections").await.ok();
    assert_eq!(
        all["collections"],
        json!([
            {"name": "here", "service": "local", "count": 0, "metadata": {"embedding_model": "tiny"}},
            {"name": "there", "service": "far", "count": 5, "metadata": {"k": "v", "embedding_model": "tiny"}},
        ])
    );
    assert_eq!(
        all["services"],
        json!([
            {"name": "local", "provider": "local", "status": "healthy"},
            {"name": "far", "provider": "chromadb-wrapper", "status": "healthy"},
        ])
    );
    assert_eq!(
        far.get("/collections").await.ok()["collections"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

/// Every route, with the given service in the place where that route has it.
async fn every_route(server: &crate::support::Server, service: Option<&str>) -> Vec<(String, String)> {
    let status = if service.is_some() { 404 } else { 400 };
    let by_query = service.map_or_else(String::new, |name| format!("&service={name}"));
    let with_service = |mut body: Value| {
        if let Some(name) = service {
            body["service"] = name.into();
        }
        body
    };
    let mut answers = Vec::new();
    for (method, path) in [
        (Method::GET, "/api/collections/c?"),
        (Method::DELETE, "/api/collections/c?"),
        (Method::GET, "/api/collections/c/documents?limit=1"),
        (Method::DELETE, "/api/collections/c/documents/all?"),
        (Method::GET, "/api/collections/c/metadata-values?field=f"),
    ] {
        let path = format!("{path}{by_query}");
        let answer = server.send(server.request(method.clone(), &path)).await;
        answers.push((format!("{method} {path}"), answer.refused(status)));
    }
    for (method, path, body) in [
        (Method::POST, "/api/collections", json!({"name": "c"})),
        (
            Method::POST,
            "/api/collections/c/documents",
            json!({"documents": [{"text": "t"}]}),
        ),
        (
            Method::PUT,
            "/api/collections/c/metadata",
            json!({"metadata": {}}),
        ),
        (Method::POST, "/api/collections/c/query", json!({"query": "q"})),
    ] {
        let answer = server
            .send(server.request(method.clone(), path).json(&with_service(body)))
            .await;
        answers.push((format!("{method} {path}"), answer.refused(status)));
    }
    let target = with_service(json!({"name": "c"}));
    let body = json!({"user_message": "m", "collections": [target]});
    answers.push((
        "collect".to_owned(),
        server.post("/api/rag/collect", body).await.refused(status),
    ));
    answers
}

#[tokio::test]
async fn a_service_must_be_named() {
    let server = plain().await;
    for (route, detail) in every_route(&server, None).await {
        assert_eq!(detail, "Service name is required", "{route}");
    }
    // Before anything else that is missing.
    for (method, path) in [
        (Method::POST, "/api/collections"),
        (Method::PUT, "/api/collections/c/metadata"),
        (Method::DELETE, "/api/collections/c/documents"),
    ] {
        for body in ["{}", r#"{"service": " ", "metadata": 3}"#] {
            let request = server.request(method.clone(), path).body(body);
            let detail = server.send(request).await.refused(400);
            assert_eq!(detail, "Service name is required", "{method} {path}");
        }
    }
    let nothing_sent = server.request(Method::DELETE, "/api/collections/c/documents");
    assert_eq!(
        server.send(nothing_sent).await.refused(400),
        "Service name is required"
    );
}

#[tokio::test]
async fn the_collections_of_one_service_are_listed_alone() {
    let server = plain().await;
    server.create("a").await;
    let listed = server.get("/api/collections?service=local").await.ok();
    assert_eq!(listed["collections"][0]["name"], "a");
    assert_eq!(listed["services"].as_array().unwrap().len(), 1);
    assert_eq!(
        server.get("/api/collections?service=nonesuch").await.refused(404),
        "Service \"nonesuch\" not found"
    );
}

/// What must be sent is required, and what is ignored is not offered.
#[tokio::test]
async fn bodies_are_described_as_they_are_here() {
    let api = server_api().await;
    for (path, method) in [
        ("/api/collections", "post"),
        ("/api/collections/{name}/metadata", "put"),
        ("/api/collections/{name}/documents", "post"),
        ("/api/collections/{name}/query", "post"),
    ] {
        let body = &api["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"];
        let reference = body["$ref"].as_str().unwrap();
        let schema = api.pointer(&reference[1..]).unwrap();
        assert!(
            schema["required"].as_array().unwrap().contains(&json!("service")),
            "{path}: {schema}"
        );
        assert!(schema["properties"].get("collections").is_none(), "{path}");
    }
    let health = &api["components"]["schemas"]["HealthBody"]["properties"];
    assert!(
        health["status"].is_object() && health["latency_ms"].is_object(),
        "{health}"
    );
}

async fn server_api() -> Value {
    plain().await.get("/openapi.json").await.ok()
}

#[tokio::test]
async fn an_unknown_service_is_not_found() {
    let server = plain().await;
    for (route, detail) in every_route(&server, Some("x")).await {
        assert_eq!(detail, "Service \"x\" not found", "{route}");
    }
}

/// What a service refuses, the gateway refuses in the same words.
#[tokio::test]
async fn refusals_of_a_service_pass_through_unchanged() {
    let Pair { near, far } = pair().await;
    for (service, server) in [("local", &near), ("far", &far)] {
        create(&near, service, "c", json!({})).await;
        let named = |path: &str| {
            format!(
                "/api{path}{}service={service}",
                if path.contains('?') { '&' } else { '?' }
            )
        };
        for path in [
            "/collections/missing",
            "/collections/missing/documents",
            "/collections/missing/metadata-values?field=f",
        ] {
            assert_eq!(
                near.get(&named(path)).await.refused(404),
                server.get(path).await.refused(404)
            );
        }
        for (path, body, status) in [
            ("/collections", json!({"name": "c"}), 409),
            ("/collections/c/query", json!({"query_embedding": [1.0]}), 200),
            ("/collections/missing/query", json!({"query": "q"}), 404),
            (
                "/collections/c/documents",
                json!({"documents": [{"text": "t"}, {"text": "u", "embedding": [1]}]}),
                400,
            ),
        ] {
            let mut through = body.clone();
            through["service"] = service.into();
            let (answer, direct) = (
                near.post(&format!("/api{path}"), through).await,
                server.post(path, body).await,
            );
            assert_eq!(
                (answer.status, answer.json()),
                (status, direct.json()),
                "{service} {path}"
            );
        }
        let filter = [("where", r#"{"f":{"$near":1}}"#), ("service", service)];
        let refusal = near
            .get_with("/api/collections/c/documents", &filter)
            .await
            .refused(400);
        assert!(refusal.contains("$near"), "{refusal}");
    }
}

#[tokio::test]
async fn a_model_that_is_not_loaded_is_said_in_the_usual_words() {
    let Pair { near, far: _far } = pair().await;
    for service in ["local", "far"] {
        near.post(
            "/api/collections",
            json!({"service": service, "name": "m", "embedding_model": "gone"}),
        )
        .await
        .ok();
        near.post("/api/collections", json!({"service": service, "name": "n"}))
            .await
            .ok();
        let add = async |name: &str| {
            let body = json!({"service": service, "documents": [{"text": "t"}]});
            near.post(&format!("/api/collections/{name}/documents"), body)
                .await
        };
        let none = add("n").await.refused(400);
        assert!(
            none.starts_with("All documents must include pre-computed embeddings: collection 'n' has no"),
            "{none}"
        );
        let detail = add("m").await.refused(503);
        assert_eq!(
            detail,
            "Embedding model 'gone' not loaded. Available models: tiny"
        );
    }
}

#[tokio::test]
async fn texts_longer_than_the_model_reads_are_named() {
    let Pair { near, far: _far } = pair().await;
    for service in ["local", "far"] {
        create(&near, service, "c", json!({})).await;
        let long = "word ".repeat(2000);
        let documents = json!([{"id": "short", "text": "fox"}, {"id": "long", "text": long}]);
        let body = json!({"service": service, "documents": documents});
        let added = near.post("/api/collections/c/documents", body).await.ok();
        assert_eq!(
            (&added["ids"], &added["truncated"]),
            (&json!(["short", "long"]), &json!(["long"])),
            "{service}"
        );
    }
}
