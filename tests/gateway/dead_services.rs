//! A service that is down, hangs or talks nonsense is reported, and the others answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Barrier;

use super::{add, create, nobody, services, with_model};
use crate::support::{Server, Setup};

/// A server that answers every request with this text, or never, where there is none.
async fn answering(text: impl Into<String>) -> String {
    let text: Arc<str> = text.into().into();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let text = Arc::clone(&text);
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4096]).await;
                if text.is_empty() {
                    std::future::pending::<()>().await;
                }
                let _ = stream.write_all(text.as_bytes()).await;
            });
        }
    });
    format!("http://{address}")
}

/// A whole answer with this status line and these headers.
fn answer(head: &str, body: &str) -> String {
    format!("HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// A server that answers nobody before so many are asked that `all` is full, and counts those it answered.
async fn waiting(all: &Arc<Barrier>, answered: &Arc<AtomicUsize>) -> String {
    let (all, answered) = (Arc::clone(all), Arc::clone(answered));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (all, answered) = (Arc::clone(&all), Arc::clone(&answered));
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 4096]).await;
                all.wait().await;
                answered.fetch_add(1, Ordering::Relaxed);
                let text = answer("404 Not Found", r#"{"detail": "not here"}"#);
                let _ = stream.write_all(text.as_bytes()).await;
            });
        }
    });
    format!("http://{address}")
}

/// One after the other, the first would never be answered.
#[tokio::test]
async fn services_are_asked_at_the_same_time() {
    let (all, answered) = (Arc::new(Barrier::new(2)), Arc::default());
    let urls = [waiting(&all, &answered).await, waiting(&all, &answered).await];
    let server = with_model(Setup::serve())
        .config(&services(&[("one", &urls[0]), ("two", &urls[1])]))
        .start()
        .await;
    create(&server, "local", "c", json!({})).await;
    add(&server, "local", "c", &["one"]).await;
    let targets = ["one", "two", "local"].map(|service| json!({"service": service, "name": "c"}));
    let body = json!({"user_message": "one", "collections": targets});
    let collected = server.post("/api/rag/collect", body).await.ok();
    assert_eq!(collected["results"].as_array().unwrap().len(), 1, "{collected}");
    assert!(answered.load(Ordering::Relaxed) >= 2, "{collected}");
}

async fn beside(url: &str) -> Server {
    with_model(Setup::serve())
        .config(&services(&[("bad", url)]))
        .start()
        .await
}

#[tokio::test]
async fn a_service_that_is_down_is_reported_and_not_fatal() {
    let server = beside(&nobody()).await;
    create(&server, "local", "c", json!({})).await;
    add(&server, "local", "c", &["one", "two"]).await;

    let all = server.get("/api/collections").await.ok();
    assert_eq!(all["collections"].as_array().unwrap().len(), 1);
    assert_eq!(all["services"][0]["status"], "healthy");
    assert_eq!(
        (&all["services"][1]["name"], &all["services"][1]["status"]),
        (&json!("bad"), &json!("unhealthy"))
    );

    let services = server.get("/api/services").await.ok();
    let health = &services["services"][1]["health"];
    assert_eq!(health["status"], "unhealthy", "{services}");
    assert!(
        health["details"]["error"].as_str().unwrap().contains("bad"),
        "{health}"
    );
    assert!(
        health["latency_ms"].is_f64() && health["timestamp"].as_str().unwrap().ends_with('Z'),
        "{health}"
    );

    let body = json!({"user_message": "one", "collections": [{"service": "bad", "name": "c"}, {"service": "local", "name": "c"}]});
    let collected = server.post("/api/rag/collect", body).await.ok();
    assert_eq!(collected["results"].as_array().unwrap().len(), 2);
    assert!(
        collected["warnings"][0].as_str().unwrap().starts_with("bad/c: "),
        "{collected}"
    );
}

#[tokio::test]
async fn no_answer_is_a_bad_gateway_however_often_it_is_asked() {
    let server = beside(&nobody()).await;
    for attempt in 0..8 {
        let detail = server.get("/api/collections/c?service=bad").await.refused(502);
        assert!(detail.contains("'bad'"), "{attempt}: {detail}");
    }
    let left_alone = server.get("/api/collections/c?service=bad").await;
    assert!(left_alone.headers.contains_key("retry-after"), "{left_alone:?}");
}

#[tokio::test]
async fn nonsense_is_a_bad_gateway() {
    for (nonsense, reason) in [
        (
            answer("200 OK\r\ncontent-type: application/json", r#"{"a": 1}"#),
            "cannot be used",
        ),
        (answer("200 OK", "<html"), "cannot be used"),
        (answer("500 Oops", r#"{"detail":"db at 10.1"}"#), "status 500"),
        (answer("302 Found\r\nlocation: http://10.0.0.1/", ""), "'bad'"),
        (
            "HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{\"name\":".to_owned(),
            "'bad'",
        ),
    ] {
        let server = beside(&answering(nonsense).await).await;
        let detail = server.get("/api/collections/c?service=bad").await.refused(502);
        assert!(detail.contains(reason) && !detail.contains("10."), "{detail}");
    }
}

#[tokio::test]
async fn past_its_deadline_a_service_is_a_gateway_timeout() {
    let yaml = services(&[("bad", &answering("").await)]).replace("timeoutMs: 20000", "timeoutMs: 200");
    let server = with_model(Setup::serve()).config(&yaml).start().await;
    let detail = server.get("/api/collections/c?service=bad").await.refused(504);
    assert!(detail.contains("'bad'") && detail.contains("200 ms"), "{detail}");
}

/// It has half a minute for an answer; whoever asks all services has not.
#[tokio::test]
async fn one_that_hangs_does_not_hold_up_the_others() {
    let yaml = services(&[("bad", &answering("").await)]).replace("timeoutMs: 20000, ", "");
    let server = with_model(Setup::serve()).config(&yaml).start().await;
    create(&server, "local", "c", json!({})).await;
    add(&server, "local", "c", &["one"]).await;
    let targets = ["bad", "local"].map(|service| json!({"service": service, "name": "c"}));
    let ask = json!({"user_message": "one", "collections": targets});
    let (collected, listed, health) = tokio::join!(
        server.post("/api/rag/collect", ask),
        server.get("/api/collections"),
        server.get("/api/services"),
    );
    let collected = collected.ok();
    assert_eq!(collected["results"].as_array().unwrap().len(), 1, "{collected}");
    assert_eq!(
        collected["warnings"],
        json!(["bad/c: service 'bad' did not answer within 10000 ms"])
    );
    let of_all = json!("service 'bad' did not answer within 5000 ms");
    let listed = &listed.ok()["services"][1];
    assert_eq!(
        (&listed["status"], &listed["error"]),
        (&json!("unhealthy"), &of_all)
    );
    let health = &health.ok()["services"][1]["health"];
    assert_eq!(
        (&health["status"], &health["message"]),
        (&json!("unhealthy"), &of_all)
    );
}

#[tokio::test]
async fn what_a_client_has_to_mend_is_no_warning() {
    for (head, status, warns) in [
        ("404 Not Found", 404, false),
        ("401 Unauthorized", 401, true),
        ("500 Oops", 502, true),
    ] {
        let url = answering(answer(head, r#"{"detail":"not here"}"#)).await;
        let server = beside(&url).await;
        server.get("/api/collections/c?service=bad").await.refused(status);
        let (_, log) = server.stop();
        let told = log
            .lines()
            .any(|line| line.contains("WARN") && line.contains("bad"));
        assert_eq!(told, warns, "{head}: {log}");
    }
}

#[tokio::test]
async fn a_4xx_passes_through_with_everything_it_says() {
    let head = "429 Slow Down\r\ncontent-type: application/problem+json\r\nretry-after: 7";
    let url = answering(answer(head, r#"{"why":"full"}"#)).await;
    let server = beside(&url).await;
    let answer = server
        .post("/api/collections", json!({"service": "bad", "name": "c"}))
        .await;
    assert_eq!((answer.status, answer.text.as_str()), (429, r#"{"why":"full"}"#));
    assert_eq!(answer.header("content-type"), "application/problem+json");
    assert_eq!(answer.header("retry-after"), "7");
}

#[tokio::test]
async fn a_4xx_that_is_no_error_of_ours_is_made_one() {
    for (content_type, body, passed) in [
        ("application/json", r#"{ "detail": "so", "more": [1] }"#, true),
        ("text/html", r#"{"detail":"called a page"}"#, true),
        (
            "application/json",
            r#"{"error":"NotFoundError","message":"so it is"}"#,
            false,
        ),
        ("text/html", "<script>alert(1)</script>", false),
        ("text/plain", "nothing here", false),
        ("application/json", r#"["listed"]"#, false),
    ] {
        let head = format!("404 Not Found\r\ncontent-type: {content_type}");
        let server = beside(&answering(answer(&head, body)).await).await;
        let refused = server.get("/api/collections/c?service=bad").await;
        assert_eq!(refused.header("content-type"), "application/json", "{body}");
        assert_eq!(refused.text == body, passed, "{}", refused.text);
        assert_eq!(refused.status, 404, "{body}");
        if !passed {
            let expected = if body.contains("so it is") {
                "so it is"
            } else {
                "Service 'bad' answered with status 404"
            };
            assert_eq!(refused.refused(404), expected);
        }
    }
}

#[tokio::test]
async fn what_a_service_says_of_its_failure_is_not_shown() {
    let failing = answer("500 Oops", r#"{"detail":"table x of db at 10.1"}"#);
    let server = beside(&answering(failing).await).await;
    create(&server, "local", "c", json!({})).await;
    add(&server, "local", "c", &["one"]).await;
    let targets = ["bad", "local"].map(|service| json!({"service": service, "name": "c"}));
    let ask = json!({"user_message": "one", "collections": targets});
    let collected = server.post("/api/rag/collect", ask).await;
    let listed = server.get("/api/collections").await;
    assert_eq!(
        collected.json()["warnings"],
        json!(["bad/c: service 'bad' answered with status 500"])
    );
    assert_eq!(
        listed.json()["services"][1]["error"],
        "service 'bad' answered with status 500"
    );
    for answer in [collected, listed] {
        assert!(!answer.text.contains("table x"), "{}", answer.text);
    }
}

#[tokio::test]
async fn a_service_that_is_not_available_says_when_to_come_again() {
    for (headers, body, seconds) in [
        ("\r\nretry-after: 17", r#"{"detail":"db at 10.1 is full"}"#, "17"),
        ("", "db at 10.1 is full", "5"),
    ] {
        let head = format!("503 Service Unavailable{headers}");
        let url = answering(answer(&head, body)).await;
        let server = beside(&url).await;
        let refused = server.get("/api/collections/c?service=bad").await;
        assert_eq!(refused.header("retry-after"), seconds);
        let detail = refused.refused(503);
        assert!(detail.contains("'bad'") && !detail.contains("10."), "{detail}");
    }
}

/// One collection that cannot be searched as it is configured says nothing of the others.
#[tokio::test]
async fn a_503_with_a_reason_passes_through_and_is_no_outage() {
    let far = with_model(Setup::serve()).start().await;
    let near = beside(&far.url("")).await;
    create(&near, "bad", "fine", json!({})).await;
    add(&near, "bad", "fine", &["one"]).await;
    far.post(
        "/collections",
        json!({"name": "ghostly", "embedding_model": "ghost"}),
    )
    .await
    .ok();
    let query = json!({"service": "bad", "query": "one"});
    for _ in 0..6 {
        let answer = near.post("/api/collections/ghostly/query", query.clone()).await;
        assert!(
            answer
                .refused(503)
                .starts_with("Embedding model 'ghost' not loaded")
        );
    }
    let found = near.post("/api/collections/fine/query", query).await.ok();
    assert_eq!(found["results"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn where_every_collection_fails_the_first_failure_is_the_answer() {
    let server = beside(&nobody()).await;
    let ask = |collections: serde_json::Value| json!({"user_message": "one", "conversation_id": "a", "collections": collections});
    let gone = json!({"service": "local", "name": "gone"});
    let dead = json!({"service": "bad", "name": "c"});
    let detail = server
        .post("/api/rag/collect", ask(json!([gone, dead])))
        .await
        .refused(404);
    assert_eq!(detail, "Collection 'gone' not found");
    server
        .post("/api/rag/collect", ask(json!([dead, gone])))
        .await
        .refused(502);
    // What could not be searched for was not said.
    server.get("/api/conversations/a").await.refused(404);
}

/// Where a hit is from says the gateway, and says it once.
#[tokio::test]
async fn a_backend_cannot_say_where_its_hits_are_from() {
    let hit =
        r#"{"id":"a","text":"t","distance":1.9,"service":"local","collection":"bank","result":"match"}"#;
    let body = format!(r#"{{"results":[{hit}],"collection_metadata":{{}}}}"#);
    let server = beside(&answering(answer("200 OK", &body)).await).await;
    let ask = json!({"user_message": "one", "collections": [{"service": "bad", "name": "c"}]});
    let answer = server.post("/api/rag/collect", ask).await;
    let said = |field: &str| answer.text.matches(&format!("\"{field}\":")).count();
    assert_eq!((said("service"), said("collection")), (1, 1), "{}", answer.text);
    let hit = &answer.json()["results"][0];
    assert_eq!(
        (&hit["service"], &hit["collection"], &hit["result"]),
        (&json!("bad"), &json!("c"), &json!("none"))
    );
}

#[tokio::test]
async fn a_hit_that_comes_twice_stands_where_it_is_nearest() {
    let hit = |id: &str, distance: f64| json!({"id": id, "text": id, "distance": distance, "score": 0.5});
    let body = json!({"results": [hit("a", 0.1), hit("b", 0.2), hit("a", 0.9), hit("b", 0.05)]});
    let server = beside(&answering(answer("200 OK", &body.to_string())).await).await;
    let ask = json!({"user_message": "one", "collections": [{"service": "bad", "name": "c"}]});
    let collected = server.post("/api/rag/collect", ask).await.ok();
    let hits: Vec<(&str, f64)> = collected["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|hit| (hit["id"].as_str().unwrap(), hit["distance"].as_f64().unwrap()))
        .collect();
    assert_eq!(hits, [("b", 0.05), ("a", 0.1)]);
}

#[tokio::test]
async fn what_an_answer_should_have_been_is_said_in_plain_words() {
    let server = beside(&answering(answer("200 OK", "[]")).await).await;
    let detail = server.get("/api/collections/c?service=bad").await.refused(502);
    assert!(
        detail.contains("expected an object") && !detail.contains("Body"),
        "{detail}"
    );
}
