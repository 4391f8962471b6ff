//! Databases in the one ChromaDB server that `cargo xtask test` starts for the tests of all routes.

use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

const MISSING: &str =
    "no ChromaDB to test with: run `cargo xtask test`, or `cargo xtask with-chroma cargo test …`";

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Makes an empty database and gives its address.
pub fn new_database() -> String {
    let server = std::env::var("RAGSTONE_TEST_CHROMA").expect(MISSING);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("service_{}_{number}", std::process::id());
    let url = format!("chroma://{server}/default_tenant/{name}");
    // A thread with a runtime of its own, because tests call this with and without one.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let http = reqwest::Client::builder()
                .no_proxy()
                .build()
                .expect("an HTTP client");
            let made = http
                .post(format!("http://{server}/api/v2/tenants/default_tenant/databases"))
                .json(&json!({ "name": name }))
                .send()
                .await
                .expect("the server of the tests answers");
            assert!(made.status().is_success(), "{made:?}");
        });
    })
    .join()
    .expect("a new database");
    url
}
