//! `/health`, `/livez`, `/readyz`, `/metrics` and `/docs`

use serde_json::{Value, json};

use crate::support::{Setup, documents, fixtures, plain, vector};

#[tokio::test]
async fn health_tells_what_is_there() {
    let server = plain().await;
    let before = server.get("/health").await.ok();
    assert_eq!(
        (&before["status"], &before["collections_count"]),
        (&json!("healthy"), &json!(0))
    );
    assert_eq!(before["version"], env!("CARGO_PKG_VERSION"));
    let time = before["timestamp"].as_str().unwrap();
    assert!(
        time.ends_with('Z') && time.parse::<jiff::Timestamp>().is_ok(),
        "RFC 3339 in UTC: {time}"
    );
    server.create("c").await;
    server
        .add("c", documents(500, |_| json!({"filler": "x".repeat(500)})))
        .await;
    let after = server.get("/health").await.ok();
    assert_eq!(after["collections_count"], 1);
    assert!(
        after["storage_bytes"].as_u64().unwrap() > before["storage_bytes"].as_u64().unwrap() + 100_000,
        "{before} {after}"
    );
}

#[tokio::test]
async fn probes_answer() {
    let server = plain().await;
    assert_eq!(server.get("/livez").await.ok(), json!({"status": "alive"}));
    assert_eq!(server.get("/readyz").await.ok(), json!({"status": "ready"}));
}

/// The value of a counter with all of these labels.
fn counter(metrics: &str, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let line = metrics.lines().find(|line| {
        line.starts_with(name)
            && labels
                .iter()
                .all(|(key, value)| line.contains(&format!("{key}=\"{value}\"")))
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let server = Setup::without_models()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await;
    server.create("c").await;
    server.add("c", documents(7, |_| json!({}))).await;
    for _ in 0..3 {
        server
            .post("/collections/c/query", json!({"query_embedding": vector(1)}))
            .await
            .ok();
    }
    server
        .post(
            "/collections/c/query",
            json!({"query": "text", "mode": "keyword"}),
        )
        .await
        .ok();
    server
        .post(
            "/rerank",
            json!({"query": "q", "documents": [{"id": "a", "text": "t"}]}),
        )
        .await
        .ok();
    for n in 0..5 {
        server.get(&format!("/collections/missing{n}")).await.refused(404);
    }
    server.get("/no/such/route").await.refused(404);

    let answer = server.get("/metrics").await;
    assert!(
        answer.header("content-type").starts_with("text/plain"),
        "{:?}",
        answer.headers
    );
    let text = answer.text;
    for line in text
        .lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
    {
        assert!(
            line.rsplit(' ')
                .next()
                .is_some_and(|value| value.parse::<f64>().is_ok()),
            "not a sample: {line}"
        );
    }
    assert_eq!(counter(&text, "ragstone_documents_added_total", &[]), Some(7.0));
    assert_eq!(
        counter(&text, "ragstone_queries_total", &[("mode", "dense")]),
        Some(3.0)
    );
    assert_eq!(
        counter(&text, "ragstone_queries_total", &[("mode", "keyword")]),
        Some(1.0)
    );
    assert_eq!(counter(&text, "ragstone_reranks_total", &[]), Some(1.0));
    let requests = |route: &str, method: &str, status: &str| {
        counter(
            &text,
            "ragstone_http_requests_total",
            &[("route", route), ("method", method), ("status", status)],
        )
    };
    assert_eq!(
        requests("/collections/{name}", "GET", "404"),
        Some(5.0),
        "by route, not by name"
    );
    assert_eq!(requests("/collections/{name}/query", "POST", "200"), Some(4.0));
    assert_eq!(requests("unmatched", "GET", "404"), Some(1.0));
    let labels = [("route", "/collections/{name}/query"), ("le", "+Inf")];
    assert_eq!(
        counter(&text, "ragstone_http_request_seconds_bucket", &labels),
        Some(4.0)
    );
    assert!(
        !text.contains("missing3") && !text.contains("no/such"),
        "names never become labels"
    );
}

#[tokio::test]
async fn docs_is_a_page_that_needs_nothing_from_elsewhere() {
    let server = plain().await;
    let page = server.get("/docs").await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-type").starts_with("text/html"));
    assert!(page.text.contains("/openapi.json"), "it shows the API document");
    for (at, _) in page
        .text
        .match_indices("src=\"")
        .chain(page.text.match_indices("href=\""))
    {
        let target = page.text[at..].split('"').nth(1).unwrap();
        assert!(
            !target.starts_with("//") && !target.starts_with("http"),
            "loads {target}"
        );
    }
}

/// Whole answers, so that no field comes or goes unnoticed.
#[tokio::test]
async fn whole_answers() {
    let server = Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .start()
        .await;
    let mut health = server.get("/health").await.ok();
    health["timestamp"] = json!("[time]");
    health["storage_bytes"] = json!("[bytes]");
    health["embedding_models"][0]["name"] = json!("[path]");
    health["cross_encoder"]["model"] = json!("[path]");
    // What only an engine other than the embedded one declares.
    health.as_object_mut().unwrap().remove("store");
    insta::assert_json_snapshot!("health", health);

    let create = json!({"name": "manuals", "embedding_model": "tiny", "metadata": {"description": "Docs"}});
    insta::assert_json_snapshot!("create", server.post("/collections", create).await.ok());
    let documents = json!({"documents": [
        {"id": "a", "text": "The quick brown fox jumps over the lazy dog.", "metadata": {"section": "one", "position": 1}},
        {"id": "b", "text": "Numbers such as 42 occur.", "metadata": {"section": "one", "position": 2}},
        {"id": "c", "text": fixtures::long_text(), "metadata": {"section": "two"}},
    ]});
    insta::assert_json_snapshot!(
        "add",
        server
            .post("/collections/manuals/documents", documents)
            .await
            .ok()
    );
    insta::assert_json_snapshot!("list", server.get("/collections").await.ok());
    let filter = r#"{"section": "one"}"#;
    insta::assert_json_snapshot!(
        "documents",
        server
            .get_with("/collections/manuals/documents", &[("where", filter)])
            .await
            .ok()
    );
    let query = json!({
        "collections": ["manuals", "missing"], "query": "fox", "mode": "hybrid", "top_k": 2, "rerank": true,
        "expand": "section", "explain": true, "where": {"section": "one"},
    });
    insta::assert_json_snapshot!("query", rounded(server.post("/query", query).await.ok()));
    let rerank =
        json!({"query": "fox", "documents": [{"id": "x", "text": "fox"}, {"id": "y", "text": "dog"}]});
    insta::assert_json_snapshot!("rerank", rounded(server.post("/rerank", rerank).await.ok()));
    let embed = json!({"input": ["fox"], "dimensions": 2});
    insta::assert_json_snapshot!(
        "embeddings",
        rounded(server.post("/v1/embeddings", embed).await.ok())
    );
    insta::assert_json_snapshot!(
        "deleted",
        server
            .delete_with("/collections/manuals/documents", json!(["a"]))
            .await
            .ok()
    );
    insta::assert_json_snapshot!(
        "emptied",
        server.delete("/collections/manuals/documents/all").await.ok()
    );
}

/// Numbers to three digits, times to none: what may differ between machines is left out.
fn rounded(value: Value) -> Value {
    match value {
        Value::Object(map) => map
            .into_iter()
            .map(|(key, value)| {
                let value = if key == "timings_ms" {
                    value
                        .as_object()
                        .into_iter()
                        .flatten()
                        .map(|(stage, _)| (stage.clone(), json!("[ms]")))
                        .collect()
                } else {
                    rounded(value)
                };
                (key, value)
            })
            .collect(),
        Value::Array(items) => items.into_iter().map(rounded).collect(),
        Value::Number(number) if number.is_f64() => {
            json!((number.as_f64().unwrap_or_default() * 1e3).round() / 1e3)
        }
        other => other,
    }
}
