//! Flags, environment and file; what is refused, and with which exit code.

use crate::support::port::unused_port;
use crate::support::{Setup, plain};

/// The address the log names, whatever started it.
async fn listens_on(setup: Setup) -> (String, u16) {
    let address = setup.start().await.address;
    (address.ip().to_string(), address.port())
}

#[tokio::test]
async fn flags_win_over_environment_which_wins_over_the_file() {
    let [flag, env, file] = [unused_port(), unused_port(), unused_port()];
    let start = |args: &[&str]| {
        let setup = Setup::command(&["serve", "--no-embeddings"]);
        args.iter()
            .fold(setup, |setup, arg| setup.arg(arg))
            .config(&format!("server: {{port: {file}, dataDir: by-file}}"))
    };
    let setup = start(&[]);
    assert_eq!(listens_on(setup.clone()).await.1, file);
    assert!(setup.folder().join("by-file").is_dir());
    let setup = start(&[])
        .env("RAGSTONE_PORT", env.to_string())
        .env("RAGSTONE_DATA_DIR", "by-env");
    assert_eq!(listens_on(setup.clone()).await.1, env);
    assert!(setup.folder().join("by-env").is_dir() && !setup.folder().join("by-file").exists());
    let setup = start(&["--port", &flag.to_string(), "--data-dir", "by-flag"])
        .env("RAGSTONE_PORT", env.to_string())
        .env("RAGSTONE_DATA_DIR", "by-env");
    assert_eq!(listens_on(setup.clone()).await.1, flag);
    assert!(setup.folder().join("by-flag").is_dir() && !setup.folder().join("by-env").exists());
}

#[tokio::test]
async fn the_file_is_named_by_the_environment_too() {
    let port = unused_port();
    let setup = Setup::command(&["serve", "--no-embeddings"]);
    let file = setup.file(
        "elsewhere.yml",
        &format!("server: {{port: {port}, data_dir: snake}}"),
    );
    let setup = setup.env("RAGSTONE_CONFIG", file);
    assert_eq!(listens_on(setup.clone()).await.1, port);
    assert!(setup.folder().join("snake").is_dir(), "snake_case is understood");
}

#[tokio::test]
async fn a_blank_environment_variable_counts_as_unset() {
    let port = unused_port();
    // No flag stands before the variables, so each of them would count.
    let setup = Setup::command(&["serve"])
        .config(&format!("server: {{port: {port}, dataDir: by-file}}"))
        .env("RAGSTONE_PORT", "")
        .env("RAGSTONE_DATA_DIR", " ")
        .env("RAGSTONE_STORE", "")
        .env("RAGSTONE_THREADS", " ")
        .env("RAGSTONE_LOG_FORMAT", "")
        .env("RAGSTONE_API_KEYS", "")
        .env("CROSS_ENCODER_MODEL", " ")
        .env("CROSS_ENCODER_PATH", "");
    let embeddings = setup.embeddings_file(&[("tiny", &crate::support::fixtures::model("bert"))]);
    let server = setup.env("EMBEDDINGS_CONFIG", embeddings).start().await;
    assert_eq!(server.address.port(), port);
    assert!(server.setup().folder().join("by-file").is_dir());
    server.get("/collections").await.ok();
    server
        .post("/rerank", serde_json::json!({"query": "q", "documents": []}))
        .await
        .refused(503);
}

/// A flag wins over the environment variable of its alternative too.
#[test]
fn a_flag_wins_over_the_variable_of_its_alternative() {
    let serve = |args: &[&str]| {
        let setup = Setup::command(&["serve", "--no-embeddings", "--port", "0"])
            .env("EMBEDDINGS_CONFIG", "/nowhere/by-env.yml")
            .env("CROSS_ENCODER_PATH", "/nowhere/path-by-env")
            .env("CROSS_ENCODER_MODEL", "/nowhere/name-by-env");
        args.iter().fold(setup, |setup, arg| setup.arg(arg)).run()
    };
    for (args, named) in [
        (&[][..], "/nowhere/path-by-env"),
        (
            &["--cross-encoder", "/nowhere/name-by-flag"],
            "/nowhere/name-by-flag",
        ),
        (
            &["--cross-encoder=/nowhere/name-by-flag"],
            "/nowhere/name-by-flag",
        ),
        (
            &[
                "--cross-encoder",
                "/nowhere/name-by-flag",
                "--cross-encoder-path",
                "/nowhere/path-by-flag",
            ],
            "/nowhere/path-by-flag",
        ),
    ] {
        let ended = serve(args);
        assert!(ended.failed_with(78).contains(named), "{args:?}: {ended:?}");
    }
}

#[tokio::test]
async fn it_binds_to_this_machine_only_unless_told() {
    assert!(plain().await.address.ip().is_loopback());
    let (host, _) = listens_on(Setup::without_models().arg("--host").arg("localhost")).await;
    assert_eq!(host, "127.0.0.1");
}

/// A data directory that `ingest` or `quickstart` filled is served by the command in the error.
#[tokio::test]
async fn a_store_of_the_default_model_is_told_how_to_be_served() {
    let server = Setup::serve_embedded().arg("--no-embeddings").start().await;
    let created = serde_json::json!({"name": "handbook", "metadata": {"embedding_model": "minilm"}});
    server.post("/collections", created).await.ok();
    let setup = server.setup().clone();
    let (status, log) = server.stop();
    assert!(status.success(), "{log}");
    let data = setup.data_dir();
    let ended = Setup::command(&["serve", "--port", "0", "--data-dir"])
        .arg(&data)
        .run();
    let log = ended.failed_with(78);
    let data = data.to_str().unwrap();
    for part in [
        "'handbook'".to_owned(),
        "printf 'embeddings:\\n  - {id: minilm, path: sentence-transformers/all-MiniLM-L6-v2}\\n' > embeddings.yml".to_owned(),
        format!("ragstone serve --data-dir {data} --embeddings-config embeddings.yml"),
    ] {
        assert!(log.contains(&part), "{part}: {log}");
    }
    let other = Setup::serve_embedded().run();
    assert!(!other.failed_with(78).contains("printf"), "{other:?}");
}

#[test]
fn an_open_address_without_a_key_is_refused_with_78() {
    for setup in [
        Setup::without_models().arg("--host").arg("0.0.0.0"),
        Setup::without_models().arg("--host").arg("::"),
        Setup::without_models().env("RAGSTONE_HOST", "0.0.0.0"),
        Setup::without_models().config("server: {host: 0.0.0.0}"),
    ] {
        let ended = setup.run();
        let log = ended.failed_with(78);
        assert!(
            log.contains("API key") && log.contains("RAGSTONE_API_KEYS") && log.contains("--allow-no-key"),
            "{log}"
        );
    }
}

#[tokio::test]
async fn an_open_address_with_a_key_or_the_flag_is_served() {
    let open = || Setup::without_models().arg("--host").arg("0.0.0.0");
    assert_eq!(
        listens_on(open().env("RAGSTONE_API_KEYS", "k")).await.0,
        "0.0.0.0"
    );
    assert_eq!(listens_on(open().arg("--allow-no-key")).await.0, "0.0.0.0");
}

#[test]
fn wrong_configuration_is_named_and_ends_with_78() {
    for (yaml, named) in [
        ("servr: {}", "servr"),
        ("server: {prt: 1}", "prt"),
        ("server: {limits: {topk: 3}}", "topk"),
        (
            "server: {port: many}",
            "'server.port': line 1 column 16: a whole number from 0 to 65535",
        ),
        ("server: {port: 70000}", "from 0 to 65535"),
        ("server: {threads: 0}", "'server.threads'"),
        ("server: {allowNoKey: perhaps}", "true or false"),
        ("server: {limits: {topK: [3]}}", "'server.limits.topK'"),
        ("server: {limits: {topK: 0}}", "topK"),
        ("server: {limits: {headerSeconds: 0}}", "headerSeconds"),
        (
            "server: {apiKeys: ['${NO_SUCH_VARIABLE_HERE}']}",
            "NO_SUCH_VARIABLE_HERE",
        ),
        ("server: {apiKeys: ['']}", "API key"),
        ("server: {host: example.org}", "example.org"),
        ("server: {store: 'redis://user:pass-word@host'}", "redis://"),
        ("[1, 2", "ragstone.yml"),
        ("just text", "ragstone.yml"),
    ] {
        let ended = Setup::without_models().config(yaml).run();
        let log = ended.failed_with(78);
        assert!(log.contains("fatal") && log.contains(named), "{yaml}: {log}");
        assert!(!log.contains("pass-word"), "{log}");
    }
    for (name, value) in [
        ("RAGSTONE_HOST", "example.org"),
        ("RAGSTONE_STORE", "redis://x"),
        ("RAGSTONE_API_KEYS", "a,,b"),
        ("RAGSTONE_LOG_FORMAT", "prose"),
        ("RAGSTONE_THREADS", "0"),
        ("RAGSTONE_PORT", "many"),
    ] {
        let ended = Setup::command(&["serve", "--no-embeddings"])
            .env(name, value)
            .run();
        let log = ended.failed_with(78);
        let by_clap = ["RAGSTONE_LOG_FORMAT", "RAGSTONE_THREADS", "RAGSTONE_PORT"];
        if by_clap.contains(&name) {
            assert!(log.contains(&format!("{name} is '{value}': must be")), "{log}");
        }
    }
    let missing = Setup::without_models()
        .arg("--config")
        .arg("/nowhere/ragstone.yml")
        .run();
    assert!(
        missing.failed_with(78).contains("/nowhere/ragstone.yml"),
        "{missing:?}"
    );
}

/// A model directory that is not there is a mistake in the configuration.
#[test]
fn a_missing_model_directory_ends_with_78() {
    let setup = Setup::serve_embedded();
    let file = setup.file("weights.bin", "");
    for (path, says) in [
        ("/nowhere/model".as_ref(), "does not exist"),
        (file.as_path(), "is a file"),
    ] {
        let ended = setup.clone().embeddings(&[("m", path)]).run();
        let log = ended.failed_with(78);
        assert!(log.contains("embedding model 'm'") && log.contains(says), "{log}");
    }
    let ended = Setup::without_models()
        .arg("--cross-encoder-path")
        .arg("/nowhere/model")
        .run();
    assert!(ended.failed_with(78).contains("/nowhere/model"), "{ended:?}");
}

#[tokio::test]
async fn a_port_that_is_taken_ends_with_1() {
    let server = plain().await;
    let port = server.address.port().to_string();
    let setup = Setup::command(&["serve", "--no-embeddings", "--port", &port]);
    let ended = tokio::task::spawn_blocking(move || setup.run()).await.unwrap();
    assert!(
        ended.failed_with(1).contains(&format!("127.0.0.1:{port}")),
        "{ended:?}"
    );
}

#[test]
fn a_data_directory_that_cannot_be_used_ends_with_1() {
    let setup = Setup::command(&["serve", "--no-embeddings", "--port", "0"]);
    let file = setup.file("in-the-way", "a file");
    let ended = setup.clone().arg("--data-dir").arg(&file).run();
    assert!(ended.failed_with(1).contains("in-the-way"), "{ended:?}");
    assert_eq!(
        std::fs::read_to_string(&file).unwrap(),
        "a file",
        "it is left alone"
    );
}

/// Two servers on one data directory would not know of each other's writes.
#[tokio::test]
async fn a_second_server_on_the_same_data_is_refused() {
    let server = plain().await;
    server.create("c").await;
    let second = server.setup().clone();
    let ended = tokio::task::spawn_blocking(move || second.run()).await.unwrap();
    let log = ended.failed_with(1);
    assert!(log.contains("data"), "{log}");
    server.create("d").await;
    // Once the first is gone, the place is free.
    let setup = server.kill();
    let server = setup.start().await;
    assert_eq!(server.get("/query").await.ok()["collections"], 2);
}

#[test]
fn a_damaged_database_is_a_clear_error() {
    let setup = Setup::without_models();
    std::fs::create_dir(setup.data_dir()).unwrap();
    // Whatever the file is called, every database there is damaged.
    let made = Setup::clone(&setup);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(made.start());
    runtime.block_on(server.create("c"));
    let (status, log) = server.stop();
    assert!(status.success(), "{log}");
    let databases: Vec<_> = std::fs::read_dir(setup.data_dir())
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| std::fs::read(path).is_ok_and(|bytes| bytes.starts_with(b"SQLite format 3\0")))
        .collect();
    assert_eq!(databases.len(), 1, "the store is one file: {databases:?}");
    std::fs::write(
        &databases[0],
        "this is no database, and never was one. ".repeat(200),
    )
    .unwrap();
    let ended = setup.run();
    let log = ended.failed_with(1);
    assert!(log.contains("fatal") && log.contains("data"), "{log}");
    assert!(!log.contains("panic"), "{log}");
}
