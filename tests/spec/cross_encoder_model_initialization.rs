//! Requirement: Cross-Encoder Model Initialization

use serde_json::json;

use crate::support::hub::ModelHub;
use crate::support::{Server, Setup, fixtures, plain};

async fn assert_reranks(server: &Server) {
    let body = json!({"query": "which animal?", "documents": [{"id": "a", "text": "fox"}, {"id": "b", "text": "dog"}]});
    let answer = server.post("/rerank", body).await.ok();
    assert_eq!(answer["reranked"].as_array().unwrap().len(), 2);
}

async fn loaded(server: &Server) -> String {
    server.get("/health").await.ok()["cross_encoder"]["model"]
        .as_str()
        .expect("a model")
        .to_owned()
}

#[tokio::test]
async fn load_model_from_huggingface() {
    let hub = ModelHub::start().await;
    let setup = hub.reached_by(
        Setup::without_models()
            .arg("--cross-encoder")
            .arg("tests/cross-bert"),
    );
    let server = setup.start().await;
    assert!(
        hub.take_requests()
            .iter()
            .any(|path| path.ends_with("model.safetensors")),
        "it was downloaded"
    );
    let line = server.wait_for_log("cross-encoder loaded");
    assert!(line.contains("tests/cross-bert"), "{line}");
    assert_eq!(loaded(&server).await, "tests/cross-bert");
    assert_reranks(&server).await;
    // The second start finds it in the cache.
    let server = server.restarted().await;
    assert_eq!(hub.take_requests(), Vec::<String>::new());
    assert_reranks(&server).await;
}

#[tokio::test]
async fn load_model_from_local_path() {
    let hub = ModelHub::start().await;
    let path = fixtures::model("cross-bert");
    let server = hub
        .reached_by(Setup::without_models().arg("--cross-encoder-path").arg(&path))
        .start()
        .await;
    assert_eq!(hub.take_requests(), Vec::<String>::new(), "nothing is downloaded");
    let line = server.wait_for_log("cross-encoder loaded");
    assert!(line.contains(&path.display().to_string()), "{line}");
    assert_reranks(&server).await;
}

#[tokio::test]
async fn load_model_from_environment_variable() {
    let hub = ModelHub::start().await;
    let setup = Setup::without_models().env("CROSS_ENCODER_MODEL", "tests/cross-bert");
    let server = hub.reached_by(setup).start().await;
    let line = server.wait_for_log("cross-encoder loaded");
    assert!(line.contains("tests/cross-bert"), "{line}");
    assert_reranks(&server).await;
}

#[tokio::test]
async fn priority_order_for_model_source() {
    let hub = ModelHub::start().await;
    let setup = || {
        hub.reached_by(Setup::without_models())
            .env("CROSS_ENCODER_PATH", fixtures::model("cross-xlm-roberta"))
            .env("CROSS_ENCODER_MODEL", "tests/cross-bert-identity")
    };
    let all = setup()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("cross-roberta"));
    let server = all.arg("--cross-encoder").arg("tests/cross-bert").start().await;
    assert!(
        loaded(&server).await.ends_with("cross-roberta"),
        "the path by flag comes first"
    );
    let server = setup()
        .arg("--cross-encoder")
        .arg("tests/cross-bert")
        .start()
        .await;
    assert_eq!(loaded(&server).await, "tests/cross-bert", "then the name by flag");
    let server = setup().start().await;
    assert!(
        loaded(&server).await.ends_with("cross-xlm-roberta"),
        "then the environment"
    );
}

#[tokio::test]
async fn model_load_failure_terminates_startup() {
    let hub = ModelHub::start().await;
    let missing = tokio::task::spawn_blocking({
        let setup = hub.reached_by(
            Setup::without_models()
                .arg("--cross-encoder")
                .arg("tests/nothing-here"),
        );
        move || setup.run()
    });
    let missing = missing.await.unwrap();
    let log = missing.failed_with(1);
    assert!(
        log.contains("fatal") && log.contains("tests/nothing-here"),
        "{log}"
    );

    // A model, but not one that scores pairs.
    let wrong = Setup::without_models()
        .arg("--cross-encoder-path")
        .arg(fixtures::model("bert"))
        .run();
    let log = wrong.failed_with(1);
    assert!(
        log.contains("fatal") && log.contains("classification head"),
        "{log}"
    );

    let setup = Setup::without_models();
    let spoiled = fixtures::copy("cross-bert", setup.folder());
    std::fs::write(spoiled.join("model.safetensors"), b"no weights at all").unwrap();
    let damaged = setup.arg("--cross-encoder-path").arg(spoiled).run();
    assert!(
        damaged.failed_with(1).contains("model.safetensors"),
        "{damaged:?}"
    );
}

#[tokio::test]
async fn no_cross_encoder_specified() {
    let server = plain().await;
    assert!(
        server.log().contains("cross-encoder disabled"),
        "{}",
        server.log()
    );
    assert_eq!(server.get("/health").await.ok()["status"], "healthy");
    server
        .post(
            "/rerank",
            json!({"query": "q", "documents": [{"id": "a", "text": "t"}]}),
        )
        .await
        .refused(503);
}
