//! Stopping finishes what was accepted; clients that never finish are cut off.

use serde_json::json;

use crate::support::raw::RawClient;
use crate::support::{Setup, documents, plain};

#[tokio::test]
async fn the_signal_to_stop_ends_with_0() {
    let server = plain().await;
    server.create("c").await;
    let (status, log) = server.stop();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(
        log.contains("stopping") && log.trim_end().ends_with("stopped"),
        "{log}"
    );
}

/// A request whose headers were read before the signal is answered after it, and what it stored stays.
#[tokio::test]
async fn an_accepted_request_is_finished() {
    let mut server = plain().await;
    server.create("c").await;
    let body =
        json!({"documents": [{"id": "late", "text": "just in time", "embedding": [1, 2]}]}).to_string();
    let (first, rest) = body.split_at(20);
    let mut client = RawClient::connect(server.address).await;
    let length = body.len();
    client
        .send(format!(
            "POST /collections/c/documents HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{first}"
        ))
        .await;
    // The server has read the head of the request once it has answered a later one on another connection.
    for _ in 0..20 {
        server.get("/livez").await.ok();
    }
    server.terminate();
    server.wait_for_log("stopping");
    assert!(
        tokio::net::TcpStream::connect(server.address).await.is_err(),
        "nothing new is accepted"
    );
    client.send(rest).await;
    let answer = client.read_to_end().await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("\"late\""),
        "{answer}"
    );
    assert_eq!(server.wait_for_exit().code(), Some(0), "{}", server.log());
    let server = server.setup().clone().start().await;
    assert_eq!(
        server.get("/collections/c/documents/late").await.ok()["text"],
        "just in time"
    );
}

/// A request that does not finish in the time there is does not keep the server from stopping.
#[tokio::test]
async fn a_request_that_never_finishes_is_given_up() {
    let server = Setup::without_models()
        .config("server: {limits: {shutdownSeconds: 1}}")
        .start()
        .await;
    server.create("c").await;
    let mut client = RawClient::connect(server.address).await;
    client
        .send("POST /collections/c/documents HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        .await;
    for _ in 0..20 {
        server.get("/livez").await.ok();
    }
    let (status, log) = server.stop();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("did not finish in time"), "{log}");
}

/// An idle connection that is kept alive does not delay stopping.
#[tokio::test]
async fn idle_connections_are_closed() {
    let server = plain().await;
    let mut client = RawClient::connect(server.address).await;
    client
        .send("GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        .await;
    for _ in 0..20 {
        server.get("/livez").await.ok();
    }
    let (status, log) = server.stop();
    assert!(status.success() && !log.contains("did not finish"), "{log}");
    assert!(client.read_to_end().await.contains("200 OK"));
}

#[tokio::test]
async fn a_client_that_sends_its_headers_too_slowly_is_cut_off() {
    let server = Setup::without_models()
        .config("server: {limits: {headerSeconds: 1}}")
        .start()
        .await;
    let silent = RawClient::connect(server.address).await;
    let mut slow = RawClient::connect(server.address).await;
    slow.send("GET /livez HTTP/1.1\r\nhost: localhost\r\nx-half-a-hea")
        .await;
    assert!(!slow.read_to_end().await.contains("200 OK"));
    assert!(!silent.read_to_end().await.contains("200 OK"));
    server.get("/livez").await.ok();
}

#[tokio::test]
async fn a_client_that_sends_its_body_too_slowly_gets_408() {
    let server = Setup::without_models()
        .config("server: {limits: {bodySeconds: 1}}")
        .start()
        .await;
    let mut slow = RawClient::connect(server.address).await;
    slow.send(
        "POST /collections HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: 100\r\n\r\n{\"name\"",
    )
    .await;
    let answer = slow.read_to_end().await;
    assert!(
        answer.starts_with("HTTP/1.1 408") && answer.contains("\"detail\""),
        "{answer}"
    );
}

#[tokio::test]
async fn what_is_not_http_is_answered_or_closed_and_harms_nobody() {
    let server = plain().await;
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..],
        b"GET / SPDY/9\r\n\r\n",
        b"GET /livez HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /collections HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\0\0\0\0\0\0\r\n\r\n",
    ] {
        let mut client = RawClient::connect(server.address).await;
        client.send(bytes).await;
        client.send("\r\n\r\n").await;
        assert!(!client.read_to_end().await.contains("200 OK"));
    }
    server.get("/livez").await.ok();
    assert!(!server.log().contains("panic"), "{}", server.log());
}

#[tokio::test]
async fn an_invalid_request_gets_a_status() {
    let server = plain().await;
    for (request, status) in [
        ("GET / SPDY/9\r\n\r\n".to_owned(), "400 Bad Request"),
        (
            "GET /livez HTTP/1.1\r\nhost: localhost\r\nno colon\r\n\r\n".to_owned(),
            "400 Bad Request",
        ),
        (
            format!("GET /{} HTTP/1.1\r\nhost: localhost\r\n\r\n", "y".repeat(70_000)),
            "414 URI Too Long",
        ),
    ] {
        let mut client = RawClient::connect(server.address).await;
        client.send(request).await;
        let answer = client.read_to_end().await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{answer}");
    }
    server.get("/livez").await.ok();
}

/// A client that goes away in the middle leaves nothing half done.
#[tokio::test]
async fn a_client_that_goes_away_changes_nothing() {
    let server = plain().await;
    server.create("c").await;
    for _ in 0..20 {
        let mut client = RawClient::connect(server.address).await;
        let body = json!({ "documents": documents(5, |_| json!({})) }).to_string();
        let half = &body[..body.len() / 2];
        client
            .send(format!(
                "POST /collections/c/documents HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{half}",
                body.len()
            ))
            .await;
        drop(client);
    }
    assert_eq!(server.get("/collections/c").await.ok()["count"], 0);
    server.add("c", documents(5, |_| json!({}))).await;
}
