//! Databases in the ChromaDB server that `cargo xtask test` starts for the tests of all routes.

use serde_json::json;

use super::test_databases;

const MISSING: &str =
    "no ChromaDB to test with: run `cargo xtask test`, or `cargo xtask with-chroma cargo test …`";

/// Creates an empty database and returns its URL.
pub fn new_database() -> String {
    let server = std::env::var("RAGSTONE_TEST_CHROMA").expect(MISSING);
    let name = test_databases::new_name();
    let url = format!("chroma://{server}/default_tenant/{name}");
    test_databases::wait_for(async move {
        let http = reqwest::Client::builder()
            .no_proxy()
            .build()
            .expect("an HTTP client");
        let made = http
            .post(format!("http://{server}/api/v2/tenants/default_tenant/databases"))
            .json(&json!({ "name": name }))
            .send()
            .await
            .expect("the ChromaDB server answers");
        assert!(made.status().is_success(), "{made:?}");
    });
    url
}
