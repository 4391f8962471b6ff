//! Export, import, copy, backup and restore.

mod backup;
mod chroma;
mod commands;
mod postgres;
mod routes;

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Finished, Server, Setup};

/// Runs `ragstone` until it exits, on a blocking thread.
async fn ragstone(args: &[&str]) -> Finished {
    let setup = Setup::command(args);
    tokio::task::spawn_blocking(move || setup.run())
        .await
        .expect("the command ends")
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path of plain text")
}

fn document(n: usize) -> Value {
    json!({
        "id": format!("d{n}"),
        "text": format!("Document {n}: \"quoted\"\nand ✓"),
        "metadata": {"n": n, "third": n as f64 / 3.0, "tags": ["a", null, n], "deep": {"x": [1, {"y": null}]}},
        "embedding": [0.1, n as f32 * 0.37, -2.5e-8, 3.0],
    })
}

/// A collection with every kind of data that a transfer could lose.
async fn fill(server: &Server, collection: &str, documents: usize) {
    let metadata = json!({"team": "ops", "limits": {"a": [1, null]}});
    let body = json!({"name": collection, "metadata": metadata});
    server.post("/collections", body).await.ok();
    for from in (0..documents).step_by(500) {
        let part = (from..(from + 500).min(documents)).map(document);
        server.add(collection, part.collect()).await;
    }
}
