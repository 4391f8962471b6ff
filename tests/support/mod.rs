//! Starts the program as a user would and talks to it over HTTP.

mod answer;
#[path = "../../crates/providers/tests/common/chroma.rs"]
#[allow(dead_code, reason = "shared with tests that use more of it")]
pub mod chroma;
mod chroma_database;
pub mod fixtures;
pub mod hub;
#[path = "../../xtask/src/port.rs"]
pub mod port;
pub mod postgres;
pub mod raw;
mod server;
mod setup;
#[path = "../../crates/providers/tests/common/signal.rs"]
pub mod signal;
mod test_databases;

pub use answer::Answer;
pub use server::Server;
pub use setup::{Finished, Setup};

use serde_json::{Value, json};

/// A server without models, which is enough for most tests.
pub async fn plain() -> Server {
    Setup::without_models().start().await
}

/// Documents `d0`, `d1`, … with distinct embeddings.
pub fn documents(count: usize, metadata: impl Fn(usize) -> Value) -> Vec<Value> {
    (0..count)
        .map(|n| json!({"id": format!("d{n}"), "text": format!("text number {n}"), "metadata": metadata(n), "embedding": vector(n)}))
        .collect()
}

/// A vector of four dimensions, different for every `n`.
pub fn vector(n: usize) -> Value {
    let angle = n as f64 * 0.37;
    json!([angle.cos(), angle.sin(), 1.0 + n as f64 * 0.001, 0.5])
}

/// The ids of a list of documents or results, in order.
pub fn ids(list: &Value) -> Vec<&str> {
    list.as_array()
        .expect("a list")
        .iter()
        .map(|item| item["id"].as_str().expect("an id"))
        .collect()
}
