//! Unmodified client libraries of other services.
//!
//! They are Python packages; `cargo xtask test` installs them once and names the interpreter in
//! `RAGSTONE_TEST_PYTHON`.

use std::process::Command;

use crate::support::{Server, Setup, fixtures};

async fn with_models() -> Server {
    Setup::serve()
        .embeddings(&[("tiny", &fixtures::model("bert"))])
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-bert"))
        .env("RAGSTONE_API_KEYS", "client-key")
        .start()
        .await
}

/// The interpreter with the libraries.
pub fn python() -> std::ffi::OsString {
    std::env::var_os("RAGSTONE_TEST_PYTHON").expect(
        "RAGSTONE_TEST_PYTHON names no interpreter with the packages of tests/requirements.txt: run `cargo xtask test`, \
         or `cargo xtask python` for the path to set",
    )
}

/// Runs a script of this folder, which contains the assertions.
async fn run(script: &'static str, server: &Server) {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/clients/");
    let mut command = Command::new(python());
    command
        .arg(format!("{path}{script}"))
        .arg(server.url(""))
        .arg("client-key")
        .env("NO_PROXY", "127.0.0.1");
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .expect("the interpreter runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{}\n{}\n{}",
        text(&output.stdout),
        text(&output.stderr),
        server.log()
    );
    assert!(
        text(&output.stdout).trim_end().ends_with("done"),
        "{}",
        text(&output.stdout)
    );
}

#[tokio::test]
async fn openai_embeddings() {
    run("openai_embeddings.py", &with_models().await).await;
}

#[tokio::test]
async fn cohere_rerank() {
    run("cohere_rerank.py", &with_models().await).await;
}
