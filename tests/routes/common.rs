//! Rules that hold on every route.

use reqwest::Method;
use serde_json::json;

use crate::support::{Server, plain};

/// Every documented route as method and path, with names put in.
pub(super) async fn documented(server: &Server) -> Vec<(Method, String)> {
    let api = server.get("/openapi.json").await.ok();
    let mut routes = Vec::new();
    for (path, item) in api["paths"].as_object().expect("paths") {
        let path = path
            .replace("{name}", "c")
            .replace("{id}", "d0")
            .replace("{kind}", "knowledge");
        assert!(!path.contains('{'), "this test must know every parameter: {path}");
        for method in item.as_object().expect("methods").keys() {
            if let Ok(method) = method.to_uppercase().parse::<Method>() {
                routes.push((method, path.clone()));
            }
        }
    }
    assert!(routes.len() >= 22, "{routes:?}");
    routes
}

#[tokio::test]
async fn unknown_routes_are_404() {
    let server = plain().await;
    for path in [
        "/",
        "/nothing",
        "/collections/c/nothing",
        "/collections/c/documents/all/more",
        "/Collections",
        "/collections/",
    ] {
        assert_eq!(server.get(path).await.refused(404), "Not Found", "{path}");
    }
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::PATCH] {
        assert_eq!(
            server.send(server.request(method, "/nothing")).await.refused(404),
            "Not Found"
        );
    }
}

#[tokio::test]
async fn wrong_methods_are_405_and_say_which_are_right() {
    let server = plain().await;
    let routes = documented(&server).await;
    for (_, path) in &routes {
        let answer = server.send(server.request(Method::PATCH, path)).await;
        assert_eq!(answer.refused(405), "Method Not Allowed", "{path}");
        let allowed = answer.header("allow");
        for (method, _) in routes.iter().filter(|(_, other)| other == path) {
            assert!(
                allowed.contains(method.as_str()),
                "{path} allows {allowed}, not {method}"
            );
        }
    }
}

/// Bodies that are no JSON, or JSON of another shape, are refused by every route that takes one.
#[tokio::test]
async fn malformed_bodies_are_400() {
    let server = plain().await;
    server.create("c").await;
    let before = server.get("/collections").await.ok();
    let takes_body = [
        (Method::POST, "/collections"),
        (Method::PUT, "/collections/c/metadata"),
        (Method::POST, "/collections/c/documents"),
        (Method::DELETE, "/collections/c/documents"),
        (Method::POST, "/query"),
        (Method::POST, "/collections/c/query"),
        (Method::POST, "/rerank"),
        (Method::POST, "/v1/rerank"),
        (Method::POST, "/v2/rerank"),
        (Method::POST, "/v1/embeddings"),
        (Method::POST, "/embed"),
    ];
    let deep = "[".repeat(100_000);
    let bodies: [&[u8]; 10] = [
        b"",
        b"   \n",
        b"{",
        b"{\"name\": \"x\",}",
        b"not json",
        b"\"text\"",
        b"7",
        b"\xff\xfe\x00",
        b"{\"name\": \"\\ud800\", \"query\": \"\\ud800\", \"texts\": [\"\\ud800\"], \"input\": \"\\ud800\", \"metadata\": {\"\\ud800\": 1}, \"documents\": \"\\ud800\", \"ids\": \"\\ud800\"}",
        deep.as_bytes(),
    ];
    for (method, path) in takes_body {
        for body in bodies {
            let answer = server.send_text(method.clone(), path, body.to_vec()).await;
            let detail = answer.refused(400);
            assert!(
                detail.len() > 10 && detail.len() < 1000,
                "{method} {path}: {detail:?}"
            );
        }
        // No body at all, and none announced.
        server
            .send(server.request(method.clone(), path))
            .await
            .refused(400);
    }
    let nested = format!("{{\"name\": \"n\", \"metadata\": {{\"a\": {}", "[".repeat(200));
    let nested = server
        .send_text(Method::POST, "/collections", nested)
        .await
        .refused(400);
    assert!(nested.contains("nested too deeply"), "{nested}");
    assert_eq!(
        server.get("/collections").await.ok(),
        before,
        "nothing was changed"
    );
}

/// Unknown fields and query parameters are ignored, and a content type is not asked for.
/// A list could be read as the fields of an object in the order of their declaration.
#[tokio::test]
async fn lists_are_not_taken_for_objects() {
    let server = plain().await;
    server.create("c").await;
    let document = json!({"id": "d", "text": "t", "embedding": [1, 0]});
    for (path, body) in [
        ("/collections", json!([null, "by-place", null, null, {"a": 1}])),
        ("/collections", json!([])),
        ("/collections", json!(5)),
        ("/collections/c/documents", json!([null, [document.clone()]])),
        (
            "/collections/c/documents",
            json!({"documents": [["d", "t", null, [1, 0]]]}),
        ),
        ("/collections/c/import", json!([[document]])),
        ("/api/collections", json!(["local", "by-place", null, null, null])),
        (
            "/api/rag/collect",
            json!({"user_message": "q", "collections": [["local", "c"]]}),
        ),
        ("/query", json!(["c", null, null, null, [1, 0]])),
        ("/rerank", json!(["q", [{"id": "a", "text": "b"}], null])),
        ("/rerank", json!({"query": "q", "documents": [["a", "b"]]})),
        ("/embeddings", json!(["kb", [["a", "x", "h", null]], null])),
        (
            "/collections/c/ingest",
            json!({"documents": [["a.md", "by place", null, null, null]]}),
        ),
    ] {
        let detail = server.post(path, body.clone()).await.refused(400);
        assert!(detail.contains("object"), "{path} {body}: {detail}");
        assert!(!detail.contains("struct"), "{path} {body}: {detail}");
    }
    let left = server.get("/collections").await.ok();
    assert_eq!(left["collections"].as_array().map(Vec::len), Some(1), "{left}");
    assert_eq!(left["collections"][0]["count"], 0);
}

#[tokio::test]
async fn what_is_not_known_is_ignored() {
    let server = plain().await;
    let body = json!({"name": "c", "colour": "red", "metadata": {}}).to_string();
    let answer = server
        .send(
            server
                .request(Method::POST, "/collections?verbose=yes")
                .body(body),
        )
        .await;
    assert_eq!(answer.ok()["name"], "c");
    let document = json!({"documents": [{"text": "t", "embedding": [1], "colour": "red"}], "more": [1]});
    server.post("/collections/c/documents?x=%20", document).await.ok();
    server
        .get("/collections/c/documents?colour=red&limit=1")
        .await
        .ok();
    server
        .post(
            "/collections/c/query",
            json!({"query_embedding": [1], "colour": {}}),
        )
        .await
        .ok();
}

#[tokio::test]
async fn paths_and_query_strings_must_be_utf8() {
    let server = plain().await;
    server.create("c").await;
    for path in [
        "/collections/%ff",
        "/collections/c/documents/%ff",
        "/collections/%ff/documents",
    ] {
        server.get(path).await.refused(400);
    }
    let answer = server.get("/collections/c/documents?limit=%zz").await;
    assert_eq!(answer.status, 400, "{answer:?}");
}

#[tokio::test]
async fn every_answer_has_a_request_id() {
    let server = plain().await;
    let first = server.get("/livez").await.header("x-request-id").to_owned();
    let second = server.get("/nothing").await.header("x-request-id").to_owned();
    assert_eq!(first.len(), 36, "a UUID: {first}");
    assert_ne!(first, second);

    let send = async |id: &[u8]| {
        let id = reqwest::header::HeaderValue::from_bytes(id).unwrap();
        server
            .send(server.request(Method::GET, "/livez").header("x-request-id", id))
            .await
            .header("x-request-id")
            .to_owned()
    };
    assert_eq!(send(b"client-chose.this:1").await, "client-chose.this:1");
    for unfit in [&b"with space"[..], b"", b"\xff\xfe", "x".repeat(129).as_bytes()] {
        assert_eq!(send(unfit).await.len(), 36, "replaced: {unfit:?}");
    }
}

#[tokio::test]
async fn answers_to_get_also_answer_head() {
    let server = plain().await;
    for path in ["/health", "/livez", "/collections"] {
        let answer = server.send(server.request(Method::HEAD, path)).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, ""), "{path}");
    }
}
