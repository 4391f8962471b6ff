//! Requirement: Embedding Model Configuration Loading

use serde_json::{Value, json};

use crate::support::hub::ModelHub;
use crate::support::{Setup, fixtures};

#[tokio::test]
async fn load_models_from_yaml_config_file() {
    let setup = Setup::serve().embeddings(&[
        ("first", &fixtures::model("bert")),
        ("second", &fixtures::model("mpnet")),
    ]);
    let server = setup.start().await;
    for id in ["first", "second"] {
        let line = server
            .log()
            .lines()
            .find(|line| line.contains("embedding model loaded") && line.contains(id))
            .map(str::to_owned);
        let line = line.unwrap_or_else(|| panic!("no line about {id}:\n{}", server.log()));
        assert!(
            line.contains(&format!("dimensions={}", fixtures::DIMENSIONS)),
            "{line}"
        );
    }
    for model in ["first", "second"] {
        let answer = server
            .post("/embed", json!({"texts": ["fox"], "model": model}))
            .await
            .ok();
        assert_eq!(answer["model"], model);
    }
}

#[tokio::test]
async fn load_models_from_environment_variable() {
    let setup = Setup::serve();
    let file = setup.embeddings_file(&[("tiny", &fixtures::model("bert"))]);
    let server = setup.env("EMBEDDINGS_CONFIG", file).start().await;
    assert_eq!(
        server.get("/health").await.ok()["embedding_models"][0]["id"],
        "tiny"
    );
    assert!(
        server.log().contains("embedding model loaded"),
        "{}",
        server.log()
    );
}

#[test]
fn config_file_structure_validation() {
    let path = fixtures::model("bert");
    let path = path.display();
    for (yaml, problem) in [
        ("models: []".to_owned(), "models"),
        ("other: 1".to_owned(), "other"),
        ("embeddings: {id: a}".to_owned(), "embeddings"),
        (format!("embeddings: [{{path: '{path}'}}]"), "'id'"),
        ("embeddings: [{id: a}]".to_owned(), "'path'"),
        (format!("embeddings: [{{id: '', path: '{path}'}}]"), "'id'"),
        (
            format!("embeddings: [{{id: a, path: '{path}'}}, {{id: a, path: '{path}'}}]"),
            "'a'",
        ),
        (
            format!("embeddings: [{{id: a, path: '{path}', colour: red}}]"),
            "colour",
        ),
        ("embeddings: [[[".to_owned(), "embeddings.yml"),
    ] {
        let setup = Setup::serve();
        let file = setup.file("embeddings.yml", &yaml);
        let ended = setup.arg("--embeddings-config").arg(file).run();
        let log = ended.failed_with(78);
        assert!(log.contains("fatal") && log.contains(problem), "{yaml}: {log}");
    }
    let missing = Setup::serve()
        .arg("--embeddings-config")
        .arg("/nowhere/embeddings.yml")
        .run();
    assert!(
        missing.failed_with(78).contains("/nowhere/embeddings.yml"),
        "{missing:?}"
    );
}

/// The vectors are those that sentence-transformers computes from the same files.
#[tokio::test]
async fn model_loading_at_startup() {
    for model in ["bert", "roberta", "xlm-roberta", "distilbert", "mpnet"] {
        let server = Setup::serve()
            .embeddings(&[("m", &fixtures::model(model))])
            .start()
            .await;
        let loaded = &server.get("/health").await.ok()["embedding_models"][0];
        assert_eq!(loaded["dimensions"], fixtures::DIMENSIONS);
        let reference = fixtures::reference_vectors(model);
        let texts: Vec<&str> = reference.iter().map(|(text, _)| *text).collect();
        let answer = server.post("/embed", json!({ "texts": texts })).await.ok();
        assert_eq!(answer["dim"], fixtures::DIMENSIONS);
        for ((text, expected), actual) in reference.iter().zip(answer["embeddings"].as_array().unwrap()) {
            let actual: Vec<f64> = serde_json::from_value(actual.clone()).unwrap();
            let cosine = fixtures::cosine(expected, &actual);
            assert!(cosine >= 0.9999, "{model}, {text:?}: cosine {cosine}");
        }
    }
}

#[test]
fn model_load_failure_terminates_startup() {
    let good = fixtures::model("bert");
    let missing = Setup::serve()
        .embeddings(&[("good", &good), ("gone", "/nowhere/model".as_ref())])
        .run();
    let log = missing.failed_with(78);
    assert!(
        log.contains("fatal") && log.contains("'gone'") && log.contains("/nowhere/model"),
        "{log}"
    );

    let setup = Setup::serve();
    let spoiled = fixtures::copy("bert", setup.folder());
    let weights = std::fs::read(spoiled.join("model.safetensors")).unwrap();
    std::fs::write(spoiled.join("model.safetensors"), &weights[..weights.len() / 2]).unwrap();
    let truncated = setup.embeddings(&[("half", &spoiled)]).run();
    let log = truncated.failed_with(1);
    assert!(
        log.contains("'half'") && log.contains("model.safetensors"),
        "{log}"
    );

    let setup = Setup::serve();
    let foreign = fixtures::copy("bert", setup.folder());
    let config = std::fs::read_to_string(foreign.join("config.json")).unwrap();
    std::fs::write(
        foreign.join("config.json"),
        config.replace("\"bert\"", "\"mamba\""),
    )
    .unwrap();
    let unsupported = setup.embeddings(&[("strange", &foreign)]).run();
    let log = unsupported.failed_with(1);
    assert!(
        log.contains("mamba") && log.to_lowercase().contains("xlm-roberta"),
        "names it and what is supported: {log}"
    );
}

#[test]
fn no_embedding_models_configured() {
    let unset = Setup::serve().run();
    let empty = {
        let setup = Setup::serve();
        let file = setup.file("embeddings.yml", "embeddings: []\n");
        setup.arg("--embeddings-config").arg(file).run()
    };
    for ended in [unset, empty] {
        let log = ended.failed_with(78);
        assert!(
            log.contains("fatal") && log.contains("no embedding models"),
            "{log}"
        );
        assert!(
            log.contains("embeddings:") && log.contains("- id: ") && log.contains("path: "),
            "an example: {log}"
        );
        assert!(
            log.contains("--no-embeddings") && log.contains("quickstart"),
            "and other ways: {log}"
        );
    }
}

#[tokio::test]
async fn download_models_without_starting_server() {
    let hub = ModelHub::start().await;
    let setup = hub.reached_by(
        Setup::serve().embeddings(&[("a", "tests/bert".as_ref()), ("b", "tests/mpnet".as_ref())]),
    );
    let download = setup.clone().arg("--download-models");
    let ended = tokio::task::spawn_blocking(move || download.run()).await.unwrap();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(!ended.stderr.contains("listening on"), "{ended:?}");
    for id in ["a", "b"] {
        let told = ended.stderr.lines().any(|line| {
            line.contains("embedding model loaded")
                && line.contains(&format!("tests/{}", if id == "a" { "bert" } else { "mpnet" }))
                && line.contains(&format!("dimensions={}", fixtures::DIMENSIONS))
        });
        assert!(told, "nothing about {id}: {}", ended.stderr);
    }
    assert!(!setup.data_dir().exists(), "no store is made");
    assert!(!hub.take_requests().is_empty());

    // The models are cached: the next start needs no network.
    let server = setup.env("HF_HUB_OFFLINE", "1").start().await;
    let health = server.get("/health").await.ok();
    let ids: Vec<&Value> = health["embedding_models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| &model["id"])
        .collect();
    assert_eq!(ids, ["a", "b"]);
    assert_eq!(
        hub.take_requests(),
        Vec::<String>::new(),
        "offline means no socket"
    );
}
