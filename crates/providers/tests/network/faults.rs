//! What becomes of a call when the network or the service fails.

use std::time::Duration;

use ragstone_core::call::CallError;
use ragstone_core::storage::{Storage, StorageError};
use ragstone_providers::chroma::ChromaStorage;
use ragstone_providers::http::{Call, Policy, Repeat};
use serde_json::{Value, json};

use crate::common::server::{Reply, TestServer, refusing_url};
use crate::common::{client, quick};

type MakeCall = fn() -> Call;

fn once() -> Policy {
    Policy {
        max_attempts: 1,
        ..quick()
    }
}

fn impatient() -> Policy {
    Policy {
        deadline: Duration::from_millis(150),
        ..quick()
    }
}

#[tokio::test]
async fn a_refused_connection_is_unreachable() {
    let error = client(&refusing_url().await, quick())
        .call(Call::get("x"))
        .await
        .unwrap_err();
    assert!(
        matches!(&error, CallError::Unreachable { service, .. } if service == "far"),
        "{error}"
    );
    assert!(error.to_string().contains("refused"), "{error}");
}

#[tokio::test]
async fn a_hanging_service_costs_the_deadline_and_no_more() {
    let server = TestServer::start(|_, _| Reply::Hang).await;
    let error = client(&server.url, impatient())
        .call(Call::get("x"))
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::DeadlineExceeded { .. }), "{error}");
}

#[tokio::test]
async fn one_byte_at_a_time_costs_the_deadline_and_no_more() {
    let server = TestServer::start(|_, _| Reply::Drip).await;
    let error = client(&server.url, impatient())
        .call(Call::get("x"))
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::DeadlineExceeded { .. }), "{error}");
}

#[tokio::test]
async fn failures_of_the_service_are_retried() {
    let read = || Call::post("x").json(&json!({})).repeat(Repeat::Read);
    let write = || Call::post("x").json(&json!({}));
    let calls: [(MakeCall, &[u16]); 3] = [
        (|| Call::get("x"), &[429, 500, 502, 503, 504]),
        (read, &[429, 500, 502, 503, 504]),
        (write, &[429, 502, 503, 504]),
    ];
    for (call, statuses) in calls {
        for status in statuses.iter().copied() {
            let server = TestServer::start(move |_, before| match before {
                0 | 1 => Reply::status(status, json!({})),
                _ => Reply::json(json!({"ok": true})),
            })
            .await;
            let answer: Value = client(&server.url, quick()).call_json(call()).await.unwrap();
            assert_eq!(answer["ok"], true);
            assert_eq!(server.seen().len(), 3, "{status}");
        }
    }
}

#[tokio::test]
async fn retry_after_is_honoured_within_the_deadline() {
    let server = TestServer::start(|_, before| match before {
        0 => Reply::status(429, json!({})).with_header("retry-after", "0"),
        _ => Reply::json(json!({})),
    })
    .await;
    client(&server.url, quick()).call(Call::get("x")).await.unwrap();
    assert_eq!(server.seen().len(), 2);

    // Waiting longer than the deadline is no use: the answer at hand is given back at once.
    let server =
        TestServer::start(|_, _| Reply::status(429, json!({})).with_header("retry-after", "3600")).await;
    let error = client(&server.url, quick())
        .call(Call::get("x"))
        .await
        .unwrap_err();
    assert_eq!(server.seen().len(), 1);
    match error {
        CallError::Answered(answer) => assert_eq!(answer.retry_after, Some(Duration::from_secs(3600))),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn other_errors_are_not_retried_and_pass_with_their_body() {
    let (read, write): (MakeCall, MakeCall) = (|| Call::get("x"), || Call::post("x"));
    for (status, call) in [
        (400, read),
        (401, read),
        (404, read),
        (409, read),
        (500, write),
        (503, write),
    ] {
        let server =
            TestServer::start(move |_, _| Reply::status(status, json!({"detail": "so it is"}))).await;
        let error = client(&server.url, quick()).call(call()).await.unwrap_err();
        assert_eq!(server.seen().len(), 1, "{status}");
        match error {
            CallError::Answered(answer) => {
                assert_eq!(answer.status, status);
                assert_eq!(answer.body, br#"{"detail":"so it is"}"#);
                assert_eq!(answer.content_type.as_deref(), Some("application/json"));
            }
            other => panic!("{other}"),
        }
    }
}

#[tokio::test]
async fn what_must_not_happen_twice_is_not_sent_twice() {
    for reply in [
        || Reply::CutShort,
        || Reply::Close,
        || Reply::status(502, json!({})),
        || Reply::status(504, json!({})),
    ] {
        let server = TestServer::start(move |_, _| reply()).await;
        let call = Call::post("x").json(&json!({})).repeat(Repeat::IfUnprocessed);
        client(&server.url, quick()).call(call).await.unwrap_err();
        assert_eq!(server.seen().len(), 1);
    }
    let server = TestServer::start(|_, before| match before {
        0 => Reply::status(503, json!({})),
        _ => Reply::json(json!({})),
    })
    .await;
    let call = Call::post("x").json(&json!({})).repeat(Repeat::IfUnprocessed);
    client(&server.url, quick()).call(call).await.unwrap();
}

#[tokio::test]
async fn a_reset_in_the_middle_of_a_body_is_tried_again() {
    let server = TestServer::start(|_, before| match before {
        0 => Reply::CutShort,
        1 => Reply::Close,
        _ => Reply::json(json!({"whole": true})),
    })
    .await;
    let answer: Value = client(&server.url, quick())
        .call_json(Call::get("x"))
        .await
        .unwrap();
    assert_eq!(answer["whole"], true);

    let server = TestServer::start(|_, _| Reply::CutShort).await;
    let error = client(&server.url, once())
        .call(Call::get("x"))
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::Unreachable { .. }), "{error}");
}

#[tokio::test]
async fn wrong_json_is_a_bad_answer() {
    let server = TestServer::start(|_, _| Reply::Answer {
        status: 200,
        headers: Vec::new(),
        body: b"<html>".to_vec(),
    })
    .await;
    let error = client(&server.url, quick())
        .call_json::<Value>(Call::get("x"))
        .await
        .unwrap_err();
    assert!(matches!(error, CallError::BadAnswer { .. }), "{error}");
    assert_eq!(server.seen().len(), 1);
}

#[tokio::test]
async fn a_gigabyte_of_answer_is_cut_off() {
    for announced in [true, false] {
        let server = TestServer::start(move |_, _| Reply::Flood { announced }).await;
        let client = client(&server.url, quick());
        let error = client.call(Call::get("x")).await.unwrap_err();
        assert!(
            matches!(error, CallError::TooLarge { limit, .. } if limit == 1 << 20),
            "{error}"
        );
        // What fits into the buffers of the connection may be on its way.
        assert!(server.flooded() < 64 << 20, "{}", server.flooded());
        assert_eq!(server.seen().len(), 1, "and not asked for again");
    }
}

#[tokio::test]
async fn redirects_are_followed_on_the_same_host_only() {
    let elsewhere = TestServer::start(|_, _| Reply::json(json!({"stolen": true}))).await;
    let target = format!("{}/x", elsewhere.url);
    let server = TestServer::start(move |seen, _| match seen.path() {
        "/moved" => Reply::status(307, json!({})).with_header("location", "/here?a=1"),
        "/here" => Reply::json(json!({"method": seen.method, "body": seen.json()})),
        "/round" => Reply::status(308, json!({})).with_header("location", "/round"),
        "/seen-other" => Reply::status(302, json!({})).with_header("location", "/here"),
        _ => Reply::status(302, json!({})).with_header("location", target.clone()),
    })
    .await;
    let client = client(&server.url, quick());
    let call = Call::post("moved").json(&json!({"kept": 1}));
    let answer: Value = client.call_json(call).await.unwrap();
    assert_eq!(answer, json!({"method": "POST", "body": {"kept": 1}}));

    for path in ["away", "round"] {
        let error = client.call(Call::get(path)).await.unwrap_err();
        assert!(
            matches!(&error, CallError::BadAnswer { reason, .. } if reason.contains("redirects")),
            "{error}"
        );
    }
    assert!(elsewhere.seen().is_empty(), "nothing was sent to the other host");
    // A redirect that would turn a POST into a GET is not followed, and is explained.
    for call in [Call::post("seen-other").json(&json!({})), Call::delete("away")] {
        let error = client.call(call).await.unwrap_err();
        assert!(
            matches!(&error, CallError::BadAnswer { reason, .. } if reason.contains("redirects")),
            "{error}"
        );
    }
    assert!(elsewhere.seen().is_empty(), "nothing was sent to the other host");
}

/// A reasoned refusal of a read is retried, and it does not show that other requests would fail, too.
#[tokio::test]
async fn a_503_that_gives_its_reason_is_no_outage() {
    let server =
        TestServer::start(|_, _| Reply::status(503, json!({"detail": "model 'ghost' not loaded"}))).await;
    let client = client(
        &server.url,
        Policy {
            max_attempts: 3,
            failures_to_open: 2,
            ..quick()
        },
    );
    for asked in 1..=5 {
        let error = client.call(Call::get("x")).await.unwrap_err();
        assert_eq!(error.status(), Some(503));
        assert_eq!(server.seen().len(), 3 * asked, "every attempt was made");
    }
}

#[tokio::test]
async fn a_service_that_keeps_failing_is_left_alone() {
    let server = TestServer::start(|_, _| Reply::status(500, json!({}))).await;
    let client = client(
        &server.url,
        Policy {
            failures_to_open: 2,
            cooldown: Duration::from_secs(600),
            ..once()
        },
    );
    for _ in 0..2 {
        assert_eq!(client.call(Call::get("x")).await.unwrap_err().status(), Some(500));
    }
    let error = client.call(Call::get("x")).await.unwrap_err();
    assert!(matches!(error, CallError::CircuitOpen { .. }), "{error}");
    assert_eq!(server.seen().len(), 2);
}

#[tokio::test]
async fn refusals_do_not_open_the_circuit() {
    let server = TestServer::start(|_, _| Reply::status(404, json!({}))).await;
    let client = client(
        &server.url,
        Policy {
            failures_to_open: 1,
            ..once()
        },
    );
    for _ in 0..3 {
        assert_eq!(client.call(Call::get("x")).await.unwrap_err().status(), Some(404));
    }
}

/// The first thing it is asked when somebody wants to know how it is, it answers.
#[tokio::test]
async fn a_chromadb_that_stops_answering_half_way_keeps_no_probe_waiting() {
    let server = TestServer::start(|seen, _| match seen.path() {
        "/api/v2/version" => Reply::json(json!("1.5.9")),
        _ => Reply::Hang,
    })
    .await;
    let address = server.url.replace("http://", "chroma://");
    let store = ChromaStorage::connect(&address, None).unwrap();
    let soon = Duration::from_secs(120);
    for _ in 0..3 {
        let asked = tokio::time::timeout(soon, store.health()).await;
        let error = asked.expect("an answer without waiting for the service");
        assert!(
            matches!(error, Err(StorageError::Unavailable { .. })),
            "{error:?}"
        );
    }
    // That it does not answer was noted: nobody else waits for it.
    let before = server.seen().len();
    let asked = tokio::time::timeout(soon, store.collections()).await;
    let error = asked.expect("an answer without waiting for the service");
    assert!(
        matches!(error, Err(StorageError::Unavailable { .. })),
        "{error:?}"
    );
    assert_eq!(server.seen().len(), before, "it is left alone");
}
