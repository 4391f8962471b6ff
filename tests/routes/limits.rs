//! Sizes: what is too large is refused before it costs anything.

use reqwest::Method;
use serde_json::json;

use crate::support::raw::RawClient;
use crate::support::{Setup, documents, plain};

#[tokio::test]
async fn a_body_over_two_megabytes_is_413_and_one_below_is_not() {
    let server = plain().await;
    let body = |bytes: usize| format!(r#"{{"name": "c{bytes}", "padding": "{}"}}"#, "x".repeat(bytes));
    let detail = server
        .send_text(Method::POST, "/collections", body(2 * 1024 * 1024))
        .await
        .refused(413);
    assert!(detail.contains("2097152 bytes"), "{detail}");
    server
        .send_text(Method::POST, "/collections", body(2 * 1024 * 1024 - 100))
        .await
        .ok();
    // Documents may be much larger.
    server.create("d").await;
    let large = json!({"id": "large", "text": "word ".repeat(1_000_000), "embedding": [1.0]});
    server.add("d", vec![large]).await;
    let stored = server.get("/collections/d/documents/large").await.ok();
    assert_eq!(stored["text"].as_str().unwrap().len(), 5_000_000);
}

#[tokio::test]
async fn an_add_over_its_limit_is_413() {
    let server = Setup::without_models()
        .config("server: {limits: {addBytes: 1000, addDocuments: 3}}")
        .start()
        .await;
    server.create("c").await;
    let large = json!({"documents": [{"text": "x".repeat(1000), "embedding": [1]}]});
    let detail = server.post("/collections/c/documents", large).await.refused(413);
    assert!(detail.contains("1000 bytes"), "{detail}");
    let many = json!({"documents": documents(4, |_| json!({}))});
    let detail = server.post("/collections/c/documents", many).await.refused(400);
    assert!(detail.contains("4 documents") && detail.contains('3'), "{detail}");
    assert_eq!(server.get("/collections/c").await.ok()["count"], 0);
    server.add("c", documents(3, |_| json!({}))).await;
}

/// A body without an announced length is cut off when it passes the limit.
#[tokio::test]
async fn a_body_of_unknown_length_is_limited_too() {
    let server = Setup::without_models()
        .config("server: {limits: {addBytes: 1000, bodyBytes: 1000}}")
        .start()
        .await;
    server.create("c").await;
    for path in ["/collections", "/collections/c/documents"] {
        let mut client = RawClient::connect(server.address).await;
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            ))
            .await;
        client
            .send(format!("7d0\r\n{}\r\n0\r\n\r\n", " ".repeat(2000)))
            .await;
        let answer = client.read_to_end().await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    }
}

/// One that says it is too long is refused before it is sent.
#[tokio::test]
async fn a_body_that_is_announced_as_too_long_is_not_waited_for() {
    let server = plain().await;
    server.create("c").await;
    for path in ["/collections", "/collections/c/documents"] {
        let mut client = RawClient::connect(server.address).await;
        client
            .send(format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 70000000\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
            ))
            .await;
        let answer = client.read_to_end().await;
        assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    }
}

#[tokio::test]
async fn a_compressed_body_is_415() {
    let server = plain().await;
    server.create("c").await;
    for path in ["/collections", "/collections/c/documents", "/query"] {
        let request = server
            .request(Method::POST, path)
            .header("content-encoding", "gzip");
        let answer = server.send(request.body(vec![0x1f, 0x8b, 8, 0])).await;
        assert!(answer.refused(415).contains("gzip"));
    }
}

#[tokio::test]
async fn ten_thousand_documents_fit_into_one_add_and_no_more() {
    let server = plain().await;
    server.create("c").await;
    let body = |count: usize| json!({"documents": (0..count).map(|n| json!({"text": "t", "embedding": [1, n]})).collect::<Vec<_>>()});
    let detail = server
        .post("/collections/c/documents", body(10_001))
        .await
        .refused(400);
    assert!(detail.contains("10001") && detail.contains("10000"), "{detail}");
    assert_eq!(
        server.post("/collections/c/documents", body(10_000)).await.ok()["count"],
        10_000
    );
}

#[tokio::test]
async fn top_k_has_a_limit_that_can_be_set() {
    let server = Setup::without_models()
        .config("server: {limits: {topK: 5}}")
        .start()
        .await;
    server.create("c").await;
    server
        .post(
            "/collections/c/query",
            json!({"query_embedding": [1], "top_k": 5}),
        )
        .await
        .ok();
    let detail = server
        .post(
            "/collections/c/query",
            json!({"query_embedding": [1], "top_k": 6}),
        )
        .await
        .refused(400);
    assert!(detail.contains("'top_k'") && detail.contains('5'), "{detail}");
}

/// Large bodies share a budget of memory; when it is used up, the next one is told to come back.
#[tokio::test]
async fn too_many_large_bodies_at_once_are_503_with_retry_after() {
    let server = Setup::without_models()
        .config("server: {limits: {addBytes: 102400}}")
        .start()
        .await;
    server.create("c").await;
    let mut waiting = Vec::new();
    for _ in 0..8 {
        let mut client = RawClient::connect(server.address).await;
        let head =
            "POST /collections/c/documents HTTP/1.1\r\nhost: localhost\r\ncontent-length: 102400\r\n\r\n";
        client.send(format!("{head}{}", "{".repeat(102_399))).await;
        waiting.push(client);
    }
    // They hold their share once the server has read what they sent.
    let body = json!({"documents": [{"text": "x".repeat(101_000), "embedding": [1]}]});
    let answer = loop {
        let answer = server.post("/collections/c/documents", body.clone()).await;
        if answer.status != 200 {
            break answer;
        }
    };
    answer.refused(503);
    assert!(answer.header("retry-after").parse::<u64>().unwrap() >= 1);
    // Reading is not affected, and the budget comes back.
    server.get("/collections/c").await.ok();
    drop(waiting);
    server.post("/collections/c/documents", body).await.ok();
}
