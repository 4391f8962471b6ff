use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use super::Desk;
use crate::support::Server;

async fn start() -> Server {
    start_with("server: {}").await
}

async fn start_with(config: &str) -> Server {
    let server = Desk::new().server().config(config).start().await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "small"}))
        .await
        .ok();
    server
}

async fn submit(server: &Server, body: Value) -> Value {
    let answer = server.post("/collections/c/ingest", body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()
}

pub(super) async fn finished(server: &Server, id: &Value) -> Value {
    for _ in 0..6000 {
        let job = server.get(&format!("/jobs/{}", id.as_str().unwrap())).await.ok();
        if !["queued", "running"].contains(&job["state"].as_str().unwrap()) {
            return job;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the job does not end; the log:\n{}", server.log());
}

#[tokio::test]
async fn documents_sent_as_json_are_ingested() {
    let server = start().await;
    let body = json!({"documents": [
        {"name": "guide.md", "content": "# Guide\n\nOpen the dome."},
        {"name": "page", "text": "<h1>Page</h1><p>Text.</p>", "media_type": "text/html"},
        {"name": "binary.txt", "content": "AAAA", "encoding": "base64"},
        {"name": "picture.png", "content": "AAAA", "encoding": "base64"},
        {"name": "notes.html", "content": "a <b> c", "media_type": "text/plain"},
    ]});
    let job = submit(&server, body).await;
    let job = finished(&server, &job["id"]).await;
    assert_eq!(job["state"], "done");
    assert_eq!(
        job["documents"],
        json!({"added": 3, "changed": 0, "unchanged": 0, "removed": 0, "failed": 2})
    );
    let errors: Vec<&str> = job["errors"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["error"].as_str().unwrap())
        .collect();
    assert!(errors.contains(&"it is a binary file, not text"), "{errors:?}");
    assert!(
        errors
            .iter()
            .any(|error| error.starts_with("its type cannot be read")),
        "{errors:?}"
    );
    assert_eq!(job["progress"]["documents_done"], 5);
    assert_eq!(job["progress"]["bytes_done"], job["progress"]["bytes_total"]);
    assert!(job["progress"]["tokens"].as_u64().unwrap() > 0);
    assert!(job["finished_at"].is_string() && job["error"].is_null());
    let listed = server.get("/jobs?collection=c").await.ok();
    assert_eq!(listed["jobs"][0]["id"], job["id"]);
    let documents = server.get("/collections/c/documents").await.ok();
    assert_eq!(
        crate::support::ids(&documents["documents"]),
        ["guide.md#guide:0", "page#page:0", "notes.html:0"]
    );
    assert_eq!(documents["documents"][2]["text"], "a <b> c");
}

#[tokio::test]
async fn documents_sent_as_a_form_are_ingested() {
    let server = start().await;
    let boundary = "XBOUNDARYX";
    let part = |name: &str, file: &str, body: &str| {
        let file = if file.is_empty() {
            String::new()
        } else {
            format!("; filename=\"{file}\"")
        };
        format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{body}\r\n")
    };
    let form = format!(
        "{}{}{}--{boundary}--\r\n",
        part("files", "a.md", "# A\n\ntext"),
        part("files", "b.csv", "id,text\n1,one\n2,two\n"),
        part("chunk_tokens", "", "32")
    );
    let post = |body: String| {
        server
            .request(Method::POST, "/collections/c/ingest")
            .header(
                "content-type",
                format!("multipart/form-data; boundary={boundary}"),
            )
            .body(body)
    };
    let answer = server.send(post(form.clone())).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let job = finished(&server, &answer.json()["id"]).await;
    assert_eq!(job["documents"]["added"], 3, "{job}");
    let broken = server.send(post(form[..form.len() / 2].to_owned())).await;
    assert!(
        broken
            .refused(400)
            .starts_with("The multipart body cannot be read")
    );
    let wrong = server.send(post(form.replace("32", "many"))).await;
    assert_eq!(
        wrong.refused(400),
        "The field 'chunk_tokens' must be a whole number"
    );
}

#[tokio::test]
async fn what_cannot_be_ingested_is_refused_at_once() {
    let server = start().await;
    let refused = async |body: Value| server.post("/collections/c/ingest", body).await.refused(400);
    assert_eq!(
        refused(json!({})).await,
        "Documents are required: send at least one"
    );
    assert_eq!(
        refused(json!({"documents": [{"content": "x"}]})).await,
        "Document at index 0: 'name' is required"
    );
    assert_eq!(
        refused(json!({"documents": [{"name": "a"}]})).await,
        "Document at index 0: 'content' is required"
    );
    let base64 = json!({"documents": [{"name": "a.md", "content": "!", "encoding": "base64"}]});
    assert_eq!(
        refused(base64).await,
        "Document at index 0: 'content' is not valid base64"
    );
    let tokens = json!({"documents": [{"name": "a.md", "content": "x"}], "chunk_tokens": 1});
    assert!(refused(tokens).await.contains("chunk_tokens must be from 16"));
    // A path of the server is nothing that a client can name.
    assert_eq!(
        refused(json!({"path": "/etc/passwd"})).await,
        "Documents are required: send at least one"
    );
    let one = json!({"documents": [{"name": "a.md", "content": "x"}]});
    let missing = server.post("/collections/none/ingest", one.clone()).await;
    assert_eq!(missing.refused(404), "Collection 'none' not found");
    server.create("plain").await;
    let plain = server.post("/collections/plain/ingest", one).await;
    assert!(plain.refused(400).contains("has no embedding_model"));
    assert_eq!(
        server.get("/jobs/none").await.refused(404),
        "Job 'none' not found"
    );
    assert_eq!(
        server.delete("/jobs/none").await.refused(404),
        "Job 'none' not found"
    );
}

fn long_job() -> Value {
    let rows: String = (0..20_000)
        .map(|n| format!("{{\"text\":\"row number {n} of a long file\"}}\n"))
        .collect();
    json!({"documents": [{"name": "rows.jsonl", "content": rows}]})
}

#[tokio::test]
async fn a_job_is_refused_while_too_many_are_not_finished() {
    let server = start_with("server: {limits: {openJobs: 1}}").await;
    let long = submit(&server, long_job()).await;
    let short = json!({"documents": [{"name": "a.md", "content": "short"}]});
    let answer = server.post("/collections/c/ingest", short.clone()).await;
    let refused = answer.refused(429);
    assert!(
        refused.starts_with("Too many ingestion jobs are unfinished (1, with "),
        "{refused}"
    );
    assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
    let path = format!("/jobs/{}", long["id"].as_str().unwrap());
    server.delete(&path).await.ok();
    let next = submit(&server, short).await;
    assert_eq!(finished(&server, &next["id"]).await["state"], "done");
}

#[tokio::test]
async fn a_job_can_be_cancelled_and_the_next_goes_on() {
    let server = start().await;
    let long = submit(&server, long_job()).await;
    let next = submit(
        &server,
        json!({"documents": [{"name": "a.md", "content": "short"}]}),
    )
    .await;
    let cancelled = server
        .delete(&format!("/jobs/{}", long["id"].as_str().unwrap()))
        .await
        .ok();
    assert_eq!(cancelled["state"], "cancelled");
    assert_eq!(finished(&server, &next["id"]).await["state"], "done");
    assert_eq!(finished(&server, &long["id"]).await["state"], "cancelled");
}

#[tokio::test]
async fn a_cancelled_job_counts_the_chunks_that_stay() {
    let server = start().await;
    let sections: String = (0..20_000)
        .map(|n| format!("# Section {n}\n\nText of section {n}.\n\n"))
        .collect();
    let body = json!({"documents": [{"name": "long.md", "content": sections}]});
    let job = submit(&server, body).await;
    let total = async || server.get("/collections/c/documents?limit=0").await.ok()["total"].clone();
    while total().await == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let path = format!("/jobs/{}", job["id"].as_str().unwrap());
    let cancelled = server.delete(&path).await.ok();
    assert_eq!(cancelled["state"], "cancelled");
    let stored = total().await;
    assert!(stored.as_u64().unwrap() < 20_000, "it was not cancelled in time");
    let job = server.get(&path).await.ok();
    assert_eq!(job["chunks"]["added"], stored, "{job}");
}

#[tokio::test]
async fn metadata_is_stored_and_unknown_fields_are_named() {
    let server = start().await;
    let body = json!({"chunktokens": 32, "colour": "red", "documents": [
        {"name": "a.md", "content": "---\nlang: de\n---\ntext", "metadata": {"team": "dome", "lang": "en"}, "meta": {}},
        {"name": "b.csv", "content": "id,text,n\n1,one,7\n"},
    ]});
    let job = submit(&server, body).await;
    let warnings: Vec<(&str, &str)> = job["warnings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|warning| {
            (
                warning["source"].as_str().unwrap(),
                warning["error"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        warnings,
        [
            (
                "request",
                "unknown field 'chunktokens' was ignored; did you mean 'chunk_tokens'?"
            ),
            ("request", "unknown field 'colour' was ignored"),
            (
                "a.md",
                "unknown field 'meta' was ignored; did you mean 'metadata'?"
            ),
        ]
    );
    finished(&server, &job["id"]).await;
    let found = server.find("c", json!({"team": "dome", "lang": "de"})).await.ok();
    assert_eq!(found["total"], 1);
    assert_eq!(server.find("c", json!({"n": {"$gt": 6}})).await.ok()["total"], 1);
    let wrong = json!({"csv_types": "guess", "documents": [{"name": "a.md", "content": "x"}]});
    assert_eq!(
        server.post("/collections/c/ingest", wrong).await.refused(400),
        "Field 'csv_types' is 'guess'; it must be 'auto' or 'text'"
    );
}

#[tokio::test]
async fn a_job_survives_a_restart() {
    let server = start().await;
    let rows: String = (0..3_000)
        .map(|n| format!("{{\"id\":\"r{n}\",\"text\":\"row number {n}\"}}\n"))
        .collect();
    let job = submit(
        &server,
        json!({"documents": [{"name": "rows.jsonl", "content": rows}]}),
    )
    .await;
    let server = server.restarted().await;
    let job = finished(&server, &job["id"]).await;
    assert_eq!(job["state"], "done", "{job}");
    assert_eq!(
        server.get("/collections/c/documents?limit=0").await.ok()["total"],
        3_000
    );
}

#[tokio::test]
async fn a_multipart_body_without_a_boundary_is_told_so() {
    let server = start().await;
    let request = server
        .request(Method::POST, "/collections/c/ingest")
        .header("content-type", "multipart/form-data")
        .body("--x\r\n");
    let refused = server.send(request).await.refused(400);
    assert!(refused.contains("boundary"), "{refused}");
}
