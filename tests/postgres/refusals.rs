//! Errors for unsuitable and unavailable databases.

use std::time::Duration;

use serde_json::json;

use super::start;
use crate::support::postgres::{Engine, new_database, run_sql};
use crate::support::{Server, Setup, vector};

#[tokio::test]
async fn reading_leaves_nothing_in_a_database_of_others() {
    let url = new_database();
    let exports = ["export", "c", "-", "--store", &url];
    let copies = ["copy", "--from", &url, "--to", "target"];
    for args in [&exports[..], &copies[..]] {
        let refused = Setup::command(args).run();
        let said = refused.failed_with(1);
        assert!(said.contains("there is no store at postgres://"), "{said}");
    }
    let schemas = run_sql(
        &url,
        "SELECT 1 / (count(*) - 1) FROM pg_namespace WHERE nspname = 'ragstone'",
    );
    assert!(schemas.is_ok(), "there is a schema now");
    let wrong = url.replace("postgres:postgres@", "postgres:wrong@");
    let refused = Setup::command(&["export", "c", "-", "--store", &wrong]).run();
    let said = refused.failed_with(1);
    assert_eq!(
        said.matches("password authentication failed").count(),
        1,
        "{said}"
    );
}

#[tokio::test]
async fn a_document_of_too_many_words_is_named_and_a_read_only_database_is_said() {
    let url = new_database();
    let server = start(&url).await;
    server.create("c").await;
    let words: String = (0..300_000).map(|n| format!("w{n} ")).collect();
    let documents = json!([
        {"id": "short", "text": "text", "embedding": vector(1)},
        {"id": "long", "text": words, "embedding": vector(2)},
    ]);
    let refused = server
        .post("/collections/c/documents", json!({"documents": documents}))
        .await;
    let said = refused.refused(400);
    assert!(
        said.contains("document \"long\" has more different words"),
        "{said}"
    );

    let (_, name) = url.rsplit_once('/').unwrap();
    run_sql(
        &url,
        &format!("ALTER DATABASE {name} SET default_transaction_read_only = on"),
    )
    .unwrap();
    // New connections apply the setting.
    let server = start_read_only(server, &url).await;
    let body = json!({"documents": [{"id": "a", "text": "text", "embedding": vector(1)}]});
    let refused = server.post("/collections/c/documents", body).await;
    let said = refused.refused(503);
    assert!(said.contains("read-only"), "{said}");
    assert!(refused.headers.contains_key("retry-after"));
    server.get("/collections/c").await.ok();
}

/// Closes the connections of a running server, and waits until it has new ones.
async fn start_read_only(server: Server, url: &str) -> Server {
    let others = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
                  WHERE datname = current_database() AND pid <> pg_backend_pid()";
    run_sql(url, others).unwrap();
    for _ in 0..6000 {
        if server.get("/readyz").await.status == 200 {
            return server;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the server does not resume; the log:\n{}", server.log());
}

/// Probes have their own deadline, and after a few failures requests fail at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_hangs_keeps_nobody_waiting() {
    let engine = tokio::task::spawn_blocking(Engine::start).await.unwrap();
    let server = Setup::serve_embedded()
        .arg("--no-embeddings")
        .env("RAGSTONE_STORE", engine.url())
        .start()
        .await;
    server.create("c").await;
    // Without deadlines, no answer would ever come.
    const SOON: Duration = Duration::from_secs(120);
    let soon = async |path: &str| {
        let answer = tokio::time::timeout(SOON, server.get(path)).await;
        answer.unwrap_or_else(|_| panic!("{path} keeps its caller waiting"))
    };
    engine.pause();
    for _ in 0..2 {
        soon("/readyz").await.refused(503);
        assert_eq!(soon("/health").await.ok()["status"], "degraded");
    }
    let refused = soon("/collections/c").await;
    refused.refused(503);
    assert!(refused.headers.contains_key("retry-after"));
    engine.resume();
    for attempt in 0.. {
        let ready = server.get("/readyz").await.status == 200;
        if ready && server.get("/collections/c").await.status == 200 {
            break;
        }
        assert!(attempt < 2400, "the service does not resume");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// As on many hosted databases.
#[tokio::test]
async fn pgvector_may_be_in_a_schema_of_its_own() {
    let url = new_database();
    let extension = "CREATE SCHEMA \"Their extensions\"; CREATE EXTENSION vector SCHEMA \"Their extensions\"";
    run_sql(&url, extension).unwrap();
    let server = start(&url).await;
    server.create("c").await;
    let body = json!({"documents": [{"id": "a", "text": "text", "embedding": vector(1)}]});
    server.post("/collections/c/documents", body).await.ok();
    let found = server
        .post("/collections/c/query", json!({"query_embedding": vector(1)}))
        .await
        .ok();
    assert_eq!(found["results"][0]["id"], "a");
}

fn refused_to_serve(url: &str) -> String {
    let serve = Setup::command(&["serve", "--no-embeddings", "--port", "0", "--store", url]);
    serve.run().failed_with(1).to_owned()
}

#[tokio::test]
async fn a_database_of_another_encoding_is_refused() {
    let url = new_database();
    let (address, name) = url.rsplit_once('/').unwrap();
    run_sql(
        &url,
        &format!("CREATE DATABASE {name}_latin ENCODING 'LATIN1' TEMPLATE template0 LOCALE 'C'"),
    )
    .unwrap();
    let said = refused_to_serve(&format!("{address}/{name}_latin"));
    assert!(said.contains("LATIN1") && said.contains("UTF8"), "{said}");
}

#[tokio::test]
async fn a_user_who_may_not_make_tables_is_refused_and_one_whose_password_changed_waits() {
    let url = new_database();
    drop(start(&url).await);
    let (_, name) = url.rsplit_once('/').unwrap();
    let user = format!("user_{name}");
    run_sql(
        &url,
        &format!(
            "CREATE ROLE {user} LOGIN PASSWORD 'first';
             GRANT USAGE ON SCHEMA ragstone TO {user};
             GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA ragstone TO {user};
             GRANT USAGE ON ALL SEQUENCES IN SCHEMA ragstone TO {user}"
        ),
    )
    .unwrap();
    let theirs = url.replace("postgres:postgres@", &format!("{user}:first@"));
    let said = refused_to_serve(&theirs);
    assert!(said.contains(&format!("GRANT postgres TO {user}")), "{said}");
    run_sql(&url, &format!("GRANT postgres TO {user}")).unwrap();
    let server = start(&theirs).await;
    server.create("c").await;

    let password = |password: &str| {
        let sql = format!(
            "ALTER ROLE {user} PASSWORD '{password}';
             SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = '{user}'"
        );
        run_sql(&url, &sql).unwrap();
    };
    password("second");
    let refused = server.get("/collections").await;
    refused.refused(503);
    assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    password("first");
    for attempt in 0.. {
        if server.get("/collections").await.status == 200 {
            break;
        }
        assert!(attempt < 2400, "the service does not resume");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
