//! Another server as the embedding service of this one.

use serde_json::{Value, json};

use crate::support::{Server, Setup, fixtures};

async fn service() -> Server {
    let setup = Setup::command(&["serve", "--port", "0"]);
    let models = setup.embeddings_file(&[("small", &fixtures::model("bert"))]);
    let data = setup.data_dir();
    let setup = setup.arg("--data-dir").arg(data);
    setup.arg("--embeddings-config").arg(models).start().await
}

async fn embed(server: &Server, knowledge_base: &str) -> Value {
    let chunk = json!({"chunk_id": "1", "content": "x", "content_hash": "h"});
    let body = json!({"knowledgebase_id": knowledge_base, "chunks": [chunk]});
    server.post("/embeddings", body).await.ok()["embeddings"][0].clone()
}

fn client(service: &Server, version: &str) -> Setup {
    let setup = Setup::command(&["serve", "--port", "0"]);
    let entry = format!(
        "embeddings:\n  - {{id: far, provider: theirs, model: small, dimensions: 32{version}, knowledgebase_id: ours}}\n"
    );
    let models = setup.file("far.yml", &entry);
    let data = setup.data_dir();
    let config = format!(
        "providers: {{theirs: {{type: embedding-service, baseUrl: '{}'}}}}",
        service.url("")
    );
    let setup = setup.config(&config).arg("--data-dir").arg(data);
    setup.arg("--embeddings-config").arg(models)
}

#[tokio::test]
async fn a_collection_can_be_embedded_by_another_service_which_gets_each_content_once() {
    let theirs = service().await;
    let version = embed(&theirs, "probe").await["model_version"].clone();
    let version = format!(", version: {version}");
    let ours = client(&theirs, &version).start().await;
    let create = json!({"name": "c", "embedding_model": "far"});
    ours.post("/collections", create).await.ok();
    let add = |id: &str| json!({"documents": [{"id": id, "text": "the dome opens at dusk"}]});
    ours.post("/collections/c/documents", add("a")).await.ok();
    let query = json!({"query": "the dome opens at dusk"});
    let found = ours.post("/collections/c/query", query.clone()).await.ok();
    assert!(
        found["results"][0]["distance"].as_f64().unwrap() < 1e-4,
        "{found}"
    );
    // Content that it embedded before is not sent again, so that the service may be down.
    drop(theirs.kill());
    ours.post("/collections/c/documents", add("b")).await.ok();
    assert_eq!(
        ours.post("/collections/c/query", query).await.ok()["results"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let new = json!({"documents": [{"text": "never seen"}]});
    let answer = ours.post("/collections/c/documents", new).await;
    assert!(answer.status == 502 || answer.status == 503, "{answer:?}");
}

#[tokio::test]
async fn new_content_that_was_cut_is_named_in_a_header() {
    let server = service().await;
    let chunk = |id: &str, content: &str| json!({"chunk_id": id, "content": content, "content_hash": id});
    let long = fixtures::long_text();
    let embed = async |chunks: Value| {
        let body = json!({"knowledgebase_id": "k", "chunks": chunks});
        server.post("/embeddings", body).await
    };
    let first = embed(json!([chunk("a", "fox"), chunk("b", &long)])).await;
    assert_eq!(first.header("x-ragstone-truncated"), "1");
    // Skipped chunks count: the indexes are those of the request.
    let more = embed(json!([chunk("a", "fox"), chunk("b", &long), chunk("c", &long)])).await;
    assert_eq!(more.header("x-ragstone-truncated"), "2");
    let none = embed(json!([chunk("d", "fox")])).await;
    assert!(!none.headers.contains_key("x-ragstone-truncated"));
}

#[tokio::test]
async fn the_version_that_the_service_answers_with_must_be_stated() {
    let theirs = service().await;
    let ended = client(&theirs, "").run();
    let refused = ended.failed_with(78);
    assert!(
        refused.contains("'far'") && refused.contains("'version'"),
        "{refused}"
    );
}

#[tokio::test]
async fn a_service_with_another_version_is_a_bad_gateway() {
    let theirs = service().await;
    let ours = client(&theirs, ", version: other").start().await;
    let create = json!({"name": "c", "embedding_model": "far"});
    ours.post("/collections", create).await.ok();
    let add = json!({"documents": [{"text": "the dome opens at dusk"}]});
    let refused = ours.post("/collections/c/documents", add).await.refused(502);
    assert!(
        refused.contains("'theirs'") && refused.contains("'other'"),
        "{refused}"
    );
}

#[tokio::test]
async fn content_is_new_to_a_client_though_the_service_had_it_from_us() {
    let theirs = service().await;
    let version = embed(&theirs, "probe").await["model_version"].clone();
    let ours = client(&theirs, &format!(", version: {version}")).start().await;
    // Under the knowledge base that our own content has at the service, by the same hash.
    let hash = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881";
    let body = json!({"knowledgebase_id": "ours", "chunks": [{"chunk_id": "1", "content": "x", "content_hash": hash}]});
    let answer = ours.post("/embeddings", body.clone()).await.ok();
    assert_eq!(answer["embeddings"][0]["vector_dimension"], 32, "{answer}");
    let again = ours.post("/embeddings", body).await.ok();
    assert_eq!(again["skipped"][0]["chunk_id"], "1", "{again}");
}

#[tokio::test]
async fn the_doctor_asks_an_embedding_service() {
    let theirs = service().await;
    let version = embed(&theirs, "probe").await["model_version"].clone();
    let examine = |version: &str| {
        let entry = format!(
            "embeddings:\n  - {{id: far, provider: theirs, model: small, dimensions: 32, version: {version}}}\n"
        );
        let setup = Setup::command(&["doctor", "--online", "--json"]);
        let (models, data) = (setup.file("far.yml", &entry), setup.data_dir());
        let config = format!(
            "providers: {{theirs: {{type: embedding-service, baseUrl: '{}'}}}}",
            theirs.url("")
        );
        let setup = setup.config(&config).arg("--data-dir").arg(data);
        let finished = setup.arg("--embeddings-config").arg(models).run();
        let report: Value = serde_json::from_str(&finished.stdout).unwrap();
        let results = report["results"].as_array().unwrap().clone();
        let asked = |result: &Value| result["name"] == "Provider of model far";
        results
            .into_iter()
            .find(asked)
            .unwrap_or_else(|| panic!("not asked: {report}"))
    };
    let sound = examine(&version.to_string());
    assert_eq!(sound["status"], "pass", "{sound}");
    let other = examine("other");
    assert_eq!(other["status"], "fail", "{other}");
    assert!(other["message"].as_str().unwrap().contains("'other'"), "{other}");
}

#[tokio::test]
async fn a_request_whose_answer_was_lost_is_repeated_and_a_knowledge_base_is_deleted() {
    let server = service().await;
    let first = embed(&server, "k").await;
    let chunk = json!({"chunk_id": "1", "content": "x", "content_hash": "h"});
    let again = json!({"knowledgebase_id": "k", "chunks": [chunk], "include_vectors": true});
    let skipped = server.post("/embeddings", again).await.ok()["skipped"][0].clone();
    assert_eq!(skipped["embedding_id"], first["embedding_id"]);
    assert_eq!(skipped["vector"], first["vector"]);
    let deleted = server.delete("/embeddings?knowledgebase_id=k").await.ok();
    assert_eq!(
        deleted,
        json!({"status": "deleted", "knowledgebase_id": "k", "deleted": 1})
    );
    assert_eq!(
        embed(&server, "k").await["vector"],
        first["vector"],
        "embedded anew"
    );
    server.delete("/embeddings").await.refused(400);
}
