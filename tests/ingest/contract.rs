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
    // What it has embedded before is not asked for again, so that it need not even be there.
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
async fn the_version_that_the_service_answers_with_must_be_stated() {
    let theirs = service().await;
    let ended = client(&theirs, "").run();
    let refused = ended.failed_with(78);
    assert!(
        refused.contains("'far'") && refused.contains("'version'"),
        "{refused}"
    );
}
