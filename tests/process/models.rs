//! `ragstone models`: what is in the cache.

use serde_json::Value;

use crate::support::hub::ModelHub;
use crate::support::{Setup, fixtures};

async fn run(setup: Setup) -> crate::support::Finished {
    tokio::task::spawn_blocking(move || setup.run()).await.unwrap()
}

#[tokio::test]
async fn pull_list_show_remove() {
    let hub = ModelHub::start().await;
    let base = hub.reached_by(Setup::command(&["models"]));
    let models = |args: &[&str]| args.iter().fold(base.clone(), |setup, arg| setup.arg(arg));

    assert_eq!(
        json(&run(models(&["list", "--json"])).await),
        serde_json::json!({"models": []})
    );
    let pulled = run(models(&["pull", "tests/cross-bert"])).await;
    pulled.succeeded();
    run(models(&["pull", "tests/bert"])).await.succeeded();
    let asked = hub.take_requests();
    assert!(
        asked
            .iter()
            .any(|path| path.contains("cross-bert") && path.ends_with("model.safetensors")),
        "{asked:?}"
    );

    let listed = json(&run(models(&["list", "--json"])).await);
    let ids: Vec<&str> = listed["models"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| model["id"].as_str().unwrap())
        .collect();
    assert_eq!(ids, ["tests/bert", "tests/cross-bert"]);
    let table = run(models(&["list"])).await;
    assert!(table.succeeded().contains("tests/bert") && table.stdout.contains("tests/cross-bert"));
    let shown = run(models(&["show", "tests/cross-bert"])).await;
    assert!(shown.succeeded().contains("tests/cross-bert"), "{shown:?}");
    assert!(shown.stdout.contains("usable        yes"), "{shown:?}");
    // A directory of this one's name, with a model that is not whole.
    let beside = base.folder().join("model");
    std::fs::create_dir(&beside).unwrap();
    std::fs::copy(
        fixtures::model("bert").join("config.json"),
        beside.join("config.json"),
    )
    .unwrap();
    for name in ["model", "./model"] {
        let shown = run(models(&["show", name])).await;
        assert!(shown.succeeded().contains("usable        no: "), "{shown:?}");
    }

    run(models(&["remove", "tests/bert"])).await.succeeded();
    let listed = json(&run(models(&["list", "--json"])).await);
    assert_eq!(listed["models"].as_array().unwrap().len(), 1);
    for missing in [
        ["remove", "tests/bert"],
        ["show", "tests/bert"],
        ["pull", "tests/no-such-model"],
        ["pull", "."],
        ["show", "/etc"],
    ] {
        let ended = run(models(&missing)).await;
        assert!(ended.failed_with(1).contains(missing[1]), "{ended:?}");
    }
}

#[tokio::test]
async fn pull_fails_where_the_model_cannot_be_loaded_and_revisions_are_found() {
    let hub = ModelHub::start().await;
    let base = hub.reached_by(Setup::command(&["models"]));
    let models = |args: &[&str]| args.iter().fold(base.clone(), |setup, arg| setup.arg(arg));
    for args in [
        &["pull", "tests/cross-two-labels"][..],
        &["pull", "--update", "tests/cross-two-labels"],
    ] {
        let ended = run(models(args)).await;
        let message = ended.failed_with(1);
        assert!(
            message.contains("cannot be loaded") && message.contains("2 labels"),
            "{ended:?}"
        );
    }
    run(models(&["pull", "tests/bert@v1"])).await.succeeded();
    let shown = run(models(&["show", "tests/bert@v1"])).await;
    assert!(shown.succeeded().contains("usable        yes"), "{shown:?}");
    hub.take_requests();
    run(models(&["pull", "tests/bert@v1"])).await.succeeded();
    assert_eq!(hub.take_requests(), Vec::<String>::new(), "it is in the cache");
    run(models(&["pull", "--update", "tests/bert@v1"]))
        .await
        .succeeded();
    assert_eq!(hub.take_requests(), ["/api/models/tests/bert/revision/v1"]);
    run(models(&["remove", "tests/bert@v1"])).await.succeeded();
    run(models(&["show", "tests/bert@v1"])).await.failed_with(1);
}

fn json(ended: &crate::support::Finished) -> Value {
    serde_json::from_str(ended.succeeded()).unwrap_or_else(|_| panic!("not JSON: {ended:?}"))
}

#[tokio::test]
async fn offline_means_that_no_socket_is_opened() {
    let hub = ModelHub::start().await;
    let setup = hub
        .reached_by(Setup::command(&["models", "pull", "tests/bert"]))
        .env("HF_HUB_OFFLINE", "1");
    let ended = run(setup).await;
    assert!(ended.failed_with(1).contains("HF_HUB_OFFLINE"), "{ended:?}");
    let serve = hub
        .reached_by(Setup::serve().embeddings(&[("m", "tests/bert".as_ref())]))
        .env("HF_HUB_OFFLINE", "1");
    let ended = run(serve).await;
    assert!(ended.failed_with(1).contains("HF_HUB_OFFLINE"), "{ended:?}");
    assert_eq!(hub.take_requests(), Vec::<String>::new());
}
