//! The program is killed while it ingests, and goes on.

use std::process::Stdio;
use std::time::Duration;

use serde_json::json;

use super::{Desk, counts, report};

fn folder_of_documents(desk: &Desk) {
    for n in 0..300 {
        let sections: String = (0..4)
            .map(|s| format!("## Section {s}\n\nText {s} of document {n}.\n\n"))
            .collect();
        desk.write(&format!("docs/{n}.md"), format!("# Document {n}\n\n{sections}"));
    }
    let rows: String = (0..1000)
        .map(|n| format!("{{\"id\":\"r{n}\",\"text\":\"row {n}\"}}\n"))
        .collect();
    desk.write("docs/rows.jsonl", rows);
}

#[tokio::test]
async fn nothing_is_lost_and_nothing_comes_twice_after_a_kill() {
    let desk = Desk::new();
    folder_of_documents(&desk);
    let mut delay = 100;
    let finished = loop {
        let command = desk
            .command(&["docs"])
            .arg("--data-dir")
            .arg(desk.setup.data_dir());
        let mut command = command.arg("--embeddings-config").arg(&desk.embeddings).build();
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(delay));
        if child.try_wait().unwrap().is_some() {
            break child.wait_with_output().unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        delay += 100;
    };
    assert!(finished.status.success());
    let last: serde_json::Value = serde_json::from_slice(&finished.stdout).unwrap();
    assert!(
        last["unchanged"].as_u64().unwrap() > 0,
        "no kill came after something was stored: {last}"
    );
    let again = report(&desk.here(&["docs"]));
    assert_eq!(
        (counts(&again), &again["chunks"]["embedded"]),
        ([0, 0, 1300, 0, 0], &json!(0))
    );
    let server = desk.server().start().await;
    // A title and four sections each, and the rows.
    let total = server.get("/collections/c/documents?limit=0").await.ok()["total"].clone();
    assert_eq!(total, 300 * 5 + 1000);
}

#[tokio::test]
async fn a_job_goes_on_after_a_kill() {
    let desk = Desk::new();
    let server = desk.server().start().await;
    server
        .post("/collections", json!({"name": "c", "embedding_model": "small"}))
        .await
        .ok();
    let rows: String = (0..20_000)
        .map(|n| format!("{{\"id\":\"r{n}\",\"text\":\"row number {n}\"}}\n"))
        .collect();
    let body =
        json!({"documents": [{"name": "rows.jsonl", "content": rows}, {"name": "a.md", "content": "# A"}]});
    let job = server.post("/collections/c/ingest", body).await;
    assert_eq!(job.status, 200);
    let id = job.json()["id"].clone();
    while server.get("/collections/c/documents?limit=0").await.ok()["total"] == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let server = server.kill().start().await;
    let job = super::jobs::finished(&server, &id).await;
    assert_eq!(
        (&job["state"], &job["documents"]["failed"]),
        (&json!("done"), &json!(0)),
        "{job}"
    );
    assert_eq!(
        server.get("/collections/c/documents?limit=0").await.ok()["total"],
        20_001
    );
}
