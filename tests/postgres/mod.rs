//! Several processes over one Postgres database. `cargo xtask test` also runs `routes` and `spec` on Postgres.

mod outage;
mod processes;
mod refusals;
mod tls;

use crate::support::{Server, Setup, fixtures};

/// A process with a small model, over a database.
fn setup(url: &str) -> Setup {
    Setup::serve_embedded()
        .embeddings(&[("small", &fixtures::model("bert"))])
        .env("RAGSTONE_STORE", url)
}

async fn start(url: &str) -> Server {
    setup(url).start().await
}
