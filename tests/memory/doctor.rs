//! `ragstone doctor`

use serde_json::Value;

use super::stub::{Behaviour, Stub};
use super::{config, save_knowledge, setup, until_embedded};
use crate::support::{Setup, postgres};

const EMBEDDING: &str = "Embedding / RAG";

struct Report {
    code: Option<i32>,
    json: Value,
    text: String,
}

fn examine(setup: Setup) -> Report {
    let finished = setup.arg("--json").run();
    let json: Value =
        serde_json::from_str(&finished.stdout).unwrap_or_else(|error| panic!("{error}: {finished:?}"));
    let summary = &json["summary"];
    for (status, key) in [
        ("pass", "passed"),
        ("warn", "warnings"),
        ("fail", "failed"),
        ("skip", "skipped"),
    ] {
        let counted = json["results"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|result| result["status"] == status)
            .count();
        assert_eq!(summary[key], counted, "{json:#}");
    }
    let failed = summary["failed"].as_u64().unwrap() > 0;
    assert_eq!(finished.code, Some(i32::from(failed)), "{finished:?}");
    Report {
        code: finished.code,
        json,
        text: format!("{}{}", finished.stdout, finished.stderr),
    }
}

impl Report {
    fn status(&self, name: &str) -> &str {
        let found = self.json["results"]
            .as_array()
            .unwrap()
            .iter()
            .find(|result| result["name"] == name);
        found.unwrap_or_else(|| panic!("no check {name:?}: {:#}", self.json))["status"]
            .as_str()
            .unwrap()
    }

    fn message(&self, name: &str) -> &str {
        let found = self.json["results"]
            .as_array()
            .unwrap()
            .iter()
            .find(|result| result["name"] == name);
        found.unwrap_or_else(|| panic!("no check {name:?}: {:#}", self.json))["message"]
            .as_str()
            .unwrap()
    }
}

fn doctor(yaml: &str) -> Setup {
    let setup = Setup::command(&["doctor", "--port", "0"]);
    let data = setup.data_dir();
    setup.arg("--data-dir").arg(data).config(yaml)
}

#[test]
fn where_nothing_is_configured_nothing_fails() {
    let report = examine(doctor(""));
    assert_eq!(report.code, Some(0));
    for name in [
        EMBEDDING,
        "Chat",
        "Services",
        "Cross-encoder",
        "Embedding models",
        "Database",
    ] {
        assert_eq!(report.status(name), "skip", "{name}");
    }
    for name in ["Configuration", "Data directory", "Port"] {
        assert_eq!(report.status(name), "pass", "{name}");
    }
}

#[test]
fn the_embedding_check_says_what_to_do() {
    let openai = "providers: {o: {type: openai, apiKey: k-1234567}}\n";
    for (yaml, status, named) in [
        (format!("{openai}embedding: {{providerID: o, dimensions: 1536}}"), "pass", "1536"),
        (format!("{openai}embedding: {{providerID: o}}"), "warn", "embedding.dimensions"),
        (format!("{openai}embedding: {{providerID: other}}"), "fail", "'other'"),
        ("providers: {o: {type: openai}}\nembedding: {providerID: o, dimensions: 3}".into(), "fail", "apiKey"),
        (
            "providers: {o: {type: gemini, apiKey: '${NOT_SET_HERE}'}}\nembedding: {providerID: o, dimensions: 3}".into(),
            "fail",
            "NOT_SET_HERE",
        ),
        (
            "providers: {o: {type: openai, apiKey: '  ', baseUrl: 'http://127.0.0.1:9/v1'}}\nembedding: {providerID: o, dimensions: 3}".into(),
            "fail",
            "only blanks",
        ),
        ("providers: {c: {type: anthropic, apiKey: k}}\nembedding: {providerID: c}".into(), "fail", "anthropic"),
        ("embedding: {provider: local, dimensions: 768}".into(), "pass", "nomic-embed-text"),
        ("embedding: {provider: in-process}".into(), "fail", "--embeddings-config"),
        ("embedding: {provider: openai}".into(), "warn", "providerID"),
        ("embedding: {rag: {maxResults: 0}}".into(), "fail", "maxResults"),
        ("embedding: {rag: {maxDistance: -1}}".into(), "fail", "maxDistance"),
        ("embedding: {rag: {collections: [a, a]}}".into(), "fail", "'a' twice"),
    ] {
        let report = examine(doctor(&yaml));
        assert_eq!(report.status(EMBEDDING), status, "{yaml}: {}", report.message(EMBEDDING));
        assert!(report.message(EMBEDDING).contains(named), "{}", report.message(EMBEDDING));
    }
}

#[test]
fn what_is_wrong_elsewhere_is_found() {
    let report = examine(doctor("servr: {}"));
    assert_eq!(report.status("Configuration"), "fail");
    assert!(report.message("Configuration").contains("servr"));

    let setup = doctor("chat: {providerID: nobody, model: m}\nservices: {s: {provider: nothing}}");
    // A file where the directory should be.
    setup.file("data", "");
    let report = examine(setup.arg("--cross-encoder-path").arg("/does/not/exist"));
    for name in ["Chat", "Service s", "Cross-encoder", "Data directory"] {
        assert_eq!(report.status(name), "fail", "{name}");
    }
}

#[test]
fn what_serve_would_refuse_is_a_failure() {
    let setup = doctor(
        "providers: {o: {type: openai, apiKey: k}, x: {type: cohere}}\nchat: {providerID: o, model: \"\"}",
    );
    let report = examine(setup);
    assert_eq!(
        (report.status("Chat"), report.status("Provider x")),
        ("fail", "warn")
    );

    let setup = Setup::command(&[
        "doctor",
        "--port",
        "0",
        "--no-embeddings",
        "--allow-no-key",
        "--host",
        "0.0.0.0",
    ]);
    let file = setup.file("afile", "");
    let report = examine(setup.arg("--data-dir").arg(file.join("x")));
    assert_eq!(report.status("Data directory"), "fail");
    assert_eq!(report.status("Configuration"), "pass");

    let setup = doctor("");
    let config = setup.file("other.yml", "chat: {providerID: nobody, model: m}");
    let report = examine(
        Setup::command(&["doctor", "--port", "0"])
            .arg("--data-dir")
            .arg(setup.data_dir())
            .env("RAGSTONE_CONFIG", config.to_str().unwrap()),
    );
    assert!(report.message("Configuration").contains("other.yml"));
    assert_eq!(report.status("Chat"), "fail");
}

#[test]
fn the_files_of_models_are_looked_into() {
    let model = crate::support::fixtures::model("bert");
    let broken = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(&model).unwrap() {
        let file = file.unwrap();
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), broken.path().join(file.file_name())).unwrap();
        }
    }
    std::fs::write(broken.path().join("model.safetensors"), "").unwrap();
    let setup = Setup::command(&["doctor", "--port", "0"])
        .embeddings(&[("tiny", &model), ("broken", broken.path())])
        .config("embedding: {provider: in-process, model: tiny, dimensions: 7}");
    let data = setup.data_dir();
    let report = examine(setup.arg("--data-dir").arg(data));
    assert_eq!(report.status("Embedding model tiny"), "pass", "{:#}", report.json);
    assert_eq!(report.status("Embedding model broken"), "fail");
    assert_eq!(report.status(EMBEDDING), "fail");
    assert!(report.message(EMBEDDING).contains("embedding.dimensions is 7"));
}

#[tokio::test]
async fn the_stored_vectors_are_compared_with_the_configuration() {
    let stub = Stub::start().await;
    let server = setup(&stub).start().await;
    save_knowledge(&server, "a", "tea").await;
    until_embedded(&server, 1).await;
    let data = server.setup().data_dir();
    let check = |yaml: String| {
        let setup = Setup::command(&["doctor", "--port", "0"])
            .arg("--data-dir")
            .arg(&data)
            .config(&yaml);
        examine(setup)
    };
    // A server is running on it, which the doctor must not mind.
    let same = check(config(&stub));
    assert_eq!(
        (same.status("Database"), same.status(EMBEDDING)),
        ("pass", "pass"),
        "{:#}",
        same.json
    );
    let other = check(config(&stub).replace("dimensions: 32", "dimensions: 64"));
    assert_eq!(other.status(EMBEDDING), "warn");
    assert!(other.message(EMBEDDING).contains("stored vectors have 32"));
    let none = check(config(&stub).replace(", dimensions: 32", ""));
    assert_eq!(none.status(EMBEDDING), "warn");
    assert!(none.message(EMBEDDING).contains("stored vectors have 32"));
    let renamed = check(config(&stub).replace("model: stub-embed", "model: stub-other"));
    assert_eq!(renamed.status(EMBEDDING), "warn");
    let message = renamed.message(EMBEDDING);
    assert!(
        message.contains("stub-embed/32") && message.contains("embeds all of memory again"),
        "{message}"
    );
    let unused = check(config(&stub).replace("{enabled: true}", "{enabled: false}"));
    assert!(!same.message("Chat").contains("embedding.rag.enabled"));
    assert!(
        unused.message("Chat").contains("embedding.rag.enabled"),
        "{:#}",
        unused.json
    );
    // The doctor changed nothing.
    let server = server.restarted().await;
    until_embedded(&server, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_on_postgres_is_looked_into_as_well() {
    let stub = Stub::start().await;
    let url = postgres::new_database();
    let check = |yaml: String| {
        let setup = doctor(&yaml).arg("--store").arg(&url);
        tokio::task::spawn_blocking(move || examine(setup))
    };
    let unused = check(config(&stub)).await.unwrap();
    assert_eq!(unused.status("Store"), "pass", "{:#}", unused.json);
    assert!(
        unused.message("Store").contains("schema 0 of"),
        "{:#}",
        unused.json
    );

    let setup = Setup::serve_embedded()
        .arg("--no-embeddings")
        .arg("--store")
        .arg(&url);
    let server = setup.config(&config(&stub)).start().await;
    save_knowledge(&server, "a", "tea").await;
    until_embedded(&server, 1).await;
    let same = check(config(&stub)).await.unwrap();
    assert_eq!(same.status(EMBEDDING), "pass", "{:#}", same.json);
    let other = config(&stub).replace("dimensions: 32", "dimensions: 64");
    let other = check(other).await.unwrap();
    assert_eq!(other.status(EMBEDDING), "warn", "{:#}", other.json);
    assert!(other.message(EMBEDDING).contains("stored vectors have 32"));
    drop(server);

    postgres::run_sql(&url, "INSERT INTO ragstone.migrations (version) VALUES (99)").unwrap();
    let newer = check(config(&stub)).await.unwrap();
    assert_eq!(newer.status("Store"), "fail");
    assert!(
        newer.message("Store").contains("newer Ragstone"),
        "{:#}",
        newer.json
    );
}

#[test]
fn the_names_and_kinds_of_services_are_those_that_serve_takes() {
    let report = examine(doctor(
        "services: {mine: {provider: local}, local: {provider: local}, 'a b': {provider: local}}",
    ));
    for (name, status) in [("mine", "pass"), ("local", "fail"), ("a b", "fail")] {
        let name = format!("Service {name}");
        assert_eq!(report.status(&name), status, "{:#}", report.json);
    }
}

#[tokio::test]
async fn a_damaged_database_is_a_failure() {
    let server = crate::support::plain().await;
    for n in 0..50 {
        save_knowledge(&server, &format!("k{n}"), &"text ".repeat(1000)).await;
    }
    let data = server.setup().data_dir();
    let (_folder, _) = (server.setup().clone(), server.stop());
    // Whole pages in the middle become nonsense, as a bad disk would have it.
    let database = data.join("ragstone.db");
    let mut bytes = std::fs::read(&database).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 16_384].fill(0xA5);
    std::fs::write(&database, bytes).unwrap();
    let report = examine(
        Setup::command(&["doctor", "--port", "0"])
            .arg("--data-dir")
            .arg(&data),
    );
    assert_eq!(report.status("Database"), "fail");
    assert!(
        report.message("Database").contains("backup"),
        "{}",
        report.message("Database")
    );
}

#[test]
fn files_that_serve_could_not_open_are_a_failure() {
    for name in ["ragstone.db", "ragstone.lock"] {
        let setup = doctor("");
        let data = setup.data_dir();
        std::fs::create_dir_all(data.join(name)).unwrap();
        let report = examine(setup);
        let message = report.message("Database");
        assert_eq!(report.status("Database"), "fail", "{message}");
        assert!(message.contains(name) && !message.contains("backup"), "{message}");
    }
}

#[test]
fn an_empty_database_is_not_called_sound() {
    let setup = doctor("");
    let data = setup.data_dir();
    std::fs::create_dir_all(&data).unwrap();
    std::fs::write(data.join("ragstone.db"), "").unwrap();
    let file = std::fs::File::open(data.join("ragstone.db")).unwrap();
    let report = examine(setup);
    let message = report.message("Database");
    assert_eq!(report.status("Database"), "warn", "{message}");
    assert!(
        message.contains("empty") && message.contains("backup"),
        "{message}"
    );
    // The folder goes with the setup; the file is still what it was.
    assert_eq!(file.metadata().unwrap().len(), 0);
}

#[tokio::test]
async fn online_the_providers_and_services_are_asked() {
    let stub = Stub::start().await;
    let other = crate::support::plain().await;
    let services = format!(
        "services: {{up: {{provider: chromadb-wrapper, url: \"{}\"}}}}\n",
        other.url("")
    );
    let yaml = config(&stub) + &services;
    let check = |yaml: String| tokio::task::spawn_blocking(move || examine(doctor(&yaml).arg("--online")));
    let report = check(yaml.clone()).await.unwrap();
    for name in ["Embedding provider", "Chat provider", "Service up"] {
        assert_eq!(report.status(name), "pass", "{:#}", report.json);
    }
    stub.behave(Behaviour {
        embed_status: Some(401),
        chat_status: Some(401),
        ..Behaviour::default()
    });
    drop(other);
    let report = check(yaml).await.unwrap();
    for name in ["Embedding provider", "Chat provider", "Service up"] {
        assert_eq!(report.status(name), "fail", "{:#}", report.json);
    }
    assert!(!report.text.contains(super::stub::KEY), "{}", report.text);
}

/// Those that collections name, in the file of models.
#[tokio::test]
async fn online_the_models_behind_providers_are_asked() {
    const ASKED: &str = "Provider of model far";
    let stub = Stub::start().await;
    let check = |online: bool| {
        let setup = doctor(&config(&stub));
        let entry = "embeddings: [{id: far, provider: stub, model: stub-embed, dimensions: 32}]";
        let file = setup.file("embeddings.yml", entry);
        let setup = setup.arg("--embeddings-config").arg(file);
        let setup = if online { setup.arg("--online") } else { setup };
        tokio::task::spawn_blocking(move || examine(setup))
    };
    let report = check(true).await.unwrap();
    assert_eq!(report.status(ASKED), "pass", "{:#}", report.json);
    stub.behave(Behaviour {
        embed_status: Some(401),
        ..Behaviour::default()
    });
    let report = check(true).await.unwrap();
    assert_eq!(report.status(ASKED), "fail", "{:#}", report.json);
    assert!(!report.text.contains(super::stub::KEY), "{}", report.text);
    // Without being told to, it talks to nobody.
    let report = check(false).await.unwrap();
    assert_eq!(report.status("Embedding model far"), "pass", "{:#}", report.json);
    assert!(!report.text.contains(ASKED), "{}", report.text);
}

#[test]
fn in_a_pipe_it_is_plain_text() {
    let finished = doctor("").run();
    assert_eq!(finished.code, Some(0), "{finished:?}");
    assert!(
        finished.stdout.contains("skip  Embedding / RAG"),
        "{}",
        finished.stdout
    );
    assert!(!finished.stdout.contains('\u{1b}'));
}
