//! The hub client against a server that behaves, and misbehaves, as hubs and networks do.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

mod common;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ragstone_core::model::Embedder;
use ragstone_models::hub::{Hub, HubError, HubSettings, ModelSource, ProgressEvent, silent};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const ID: &str = "org/name";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

struct Request {
    path: String,
    headers: HashMap<String, String>,
}

/// Status line, headers and body; the connection is closed after `sent` bytes of the body.
struct Reply {
    status: &'static str,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
    sent: Option<usize>,
}

fn reply(status: &'static str, body: impl Into<Vec<u8>>) -> Reply {
    Reply {
        status,
        headers: Vec::new(),
        body: body.into(),
        sent: None,
    }
}

type Seen = Arc<Mutex<Vec<Request>>>;

/// Serves `answer` on a free port; what was asked for is recorded.
async fn serve(answer: impl Fn(&Request, usize) -> Reply + Send + Sync + 'static) -> (String, Seen) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let seen = Seen::default();
    let record = seen.clone();
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                if socket.read(&mut byte).await.unwrap_or(0) == 0 {
                    break;
                }
                head.push(byte[0]);
            }
            let head = String::from_utf8(head).unwrap();
            let mut lines = head.lines();
            let Some(path) = lines.next().and_then(|line| line.split(' ').nth(1)) else {
                continue;
            };
            let headers = lines
                .filter_map(|line| line.split_once(": "))
                .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
                .collect();
            let request = Request {
                path: path.to_owned(),
                headers,
            };
            let number = record.lock().unwrap().len();
            let Reply {
                status,
                headers,
                body,
                sent,
            } = answer(&request, number);
            record.lock().unwrap().push(request);
            let mut text = format!(
                "HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {}\r\n",
                body.len()
            );
            headers
                .iter()
                .for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
            text += "\r\n";
            drop(socket.write_all(text.as_bytes()).await);
            drop(socket.write_all(&body[..sent.unwrap_or(body.len())]).await);
            drop(socket.shutdown().await);
        }
    });
    (address, seen)
}

/// The files of a small real model, as a hub describes and serves them.
#[derive(Clone)]
struct Repository {
    files: HashMap<String, Vec<u8>>,
    wrong_checksum: bool,
}

impl Repository {
    fn new() -> Self {
        let names = [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "modules.json",
            "1_Pooling/config.json",
            "sentence_bert_config.json",
            "model.safetensors",
        ];
        let read = |name: &str| std::fs::read(common::fixture("bert").join(name)).unwrap();
        let mut files: HashMap<String, Vec<u8>> =
            names.iter().map(|name| (name.to_string(), read(name))).collect();
        for unwanted in [
            "README.md",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "../evil.json",
        ] {
            files.insert(unwanted.to_owned(), b"not wanted".to_vec());
        }
        Self {
            files,
            wrong_checksum: false,
        }
    }

    fn description(&self) -> Reply {
        let siblings: Vec<_> = self.files.iter().map(|(name, content)| {
            let mut hash = Sha256::digest(content).to_vec();
            if self.wrong_checksum {
                hash[0] ^= 1;
            }
            let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let lfs = name.ends_with(".safetensors").then(|| serde_json::json!({"sha256": hex(&hash), "size": content.len()}));
            serde_json::json!({"rfilename": name, "size": content.len(), "blobId": hex(&hash[..20]), "lfs": lfs})
        }).collect();
        reply(
            "200 OK",
            serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string(),
        )
    }

    fn answer(&self, request: &Request) -> Reply {
        if request.path.starts_with(&format!("/api/models/{ID}/revision/")) {
            return self.description();
        }
        let name = request
            .path
            .strip_prefix(&format!("/{ID}/resolve/{COMMIT}/"))
            .unwrap_or_default();
        let Some(content) = self.files.get(name) else {
            return reply("404 Not Found", "");
        };
        match range_start(request) {
            Some(start) => {
                let range = format!("bytes {start}-{}/{}", content.len() - 1, content.len());
                Reply {
                    headers: vec![("content-range", range)],
                    ..reply("206 Partial Content", &content[start..])
                }
            }
            None => reply("200 OK", content.clone()),
        }
    }
}

fn range_start(request: &Request) -> Option<usize> {
    request
        .headers
        .get("range")?
        .strip_prefix("bytes=")?
        .strip_suffix('-')?
        .parse()
        .ok()
}

fn settings(endpoint: &str, cache: &tempfile::TempDir) -> HubSettings {
    HubSettings {
        endpoint: endpoint.to_owned(),
        token: None,
        offline: false,
        cache: cache.path().to_owned(),
        connect_timeout: Duration::from_secs(30),
    }
}

async fn pull(endpoint: &str, cache: &tempfile::TempDir) -> Result<PathBuf, HubError> {
    Hub::new(settings(endpoint, cache))
        .unwrap()
        .pull(ID, "main", &silent)
        .await
}

#[tokio::test]
async fn downloads_what_is_needed_once_and_lays_it_out_as_others_expect() {
    let repository = Repository::new();
    let (endpoint, seen) = serve(move |request, _| repository.answer(request)).await;
    let cache = tempfile::tempdir().unwrap();
    let events = Mutex::new(Vec::new());
    let hub = Hub::new(HubSettings {
        token: Some("secret".into()),
        ..settings(&endpoint, &cache)
    })
    .unwrap();
    let record = |event: ProgressEvent<'_>| events.lock().unwrap().push(format!("{event:?}"));
    let source = ModelSource::parse(ID);
    let directory = hub.model_directory(&source, &record).await.unwrap();
    assert_eq!(
        directory,
        cache.path().join("models--org--name/snapshots").join(COMMIT)
    );
    assert_eq!(
        std::fs::read_to_string(cache.path().join("models--org--name/refs/main")).unwrap(),
        COMMIT
    );
    common::embedder(&directory).unwrap();
    assert!(!directory.join("README.md").exists() && !directory.join("pytorch_model.bin").exists());
    assert!(
        !cache
            .path()
            .join("models--org--name/snapshots/evil.json")
            .exists()
    );
    {
        let seen = seen.lock().unwrap();
        assert!(
            seen.iter()
                .all(|request| request.headers["authorization"] == "Bearer secret")
        );
        assert!(
            !seen
                .iter()
                .any(|request| request.path.contains("README") || request.path.contains("evil"))
        );
    }
    let events = events.into_inner().unwrap();
    assert!(
        events
            .iter()
            .any(|event| event.contains("Finished") && event.contains("model.safetensors"))
    );

    let asked = seen.lock().unwrap().len();
    assert_eq!(hub.model_directory(&source, &silent).await.unwrap(), directory);
    assert_eq!(
        seen.lock().unwrap().len(),
        asked,
        "a cached model needs no request"
    );
    let offline = Hub::new(HubSettings {
        offline: true,
        ..settings(&endpoint, &cache)
    })
    .unwrap();
    assert_eq!(
        offline.model_directory(&source, &silent).await.unwrap(),
        directory
    );
    assert!(!format!("{:?}", hub.settings()).contains("secret"));
}

#[tokio::test]
async fn an_interrupted_transfer_is_resumed_where_it_broke_off() {
    let repository = Repository::new();
    let (endpoint, seen) = serve(move |request, _| {
        let mut reply = repository.answer(request);
        if request.path.ends_with("model.safetensors")
            && range_start(request).is_none_or(|start| start < 60_000)
        {
            reply.sent = Some(30_000);
        }
        reply
    })
    .await;
    let cache = tempfile::tempdir().unwrap();
    let directory = pull(&endpoint, &cache).await.unwrap();
    assert_eq!(
        std::fs::read(directory.join("model.safetensors")).unwrap(),
        std::fs::read(common::fixture("bert").join("model.safetensors")).unwrap()
    );
    let seen = seen.lock().unwrap();
    let starts: Vec<_> = seen
        .iter()
        .filter(|request| request.path.ends_with("model.safetensors"))
        .map(range_start)
        .collect();
    assert_eq!(starts[0], None);
    assert!(
        starts.len() >= 2 && starts[1].is_some_and(|start| start > 0 && start <= 30_000),
        "{starts:?}"
    );
    assert!(starts.windows(2).all(|pair| pair[0] < pair[1]));
}

#[tokio::test]
async fn a_download_of_another_run_is_resumed_and_a_server_without_ranges_starts_over() {
    for ranges in [true, false] {
        let mut repository = Repository::new();
        let content = repository.files["model.safetensors"].clone();
        let partial: String = Sha256::digest(&content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        repository.files.remove("modules.json");
        let (endpoint, seen) = serve(move |request, _| {
            let plain = Request {
                path: request.path.clone(),
                headers: HashMap::new(),
            };
            repository.answer(if ranges { request } else { &plain })
        })
        .await;
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("models--org--name/blobs");
        std::fs::create_dir_all(&blobs).unwrap();
        std::fs::write(blobs.join(format!("{partial}.incomplete")), &content[..1_000]).unwrap();
        let directory = pull(&endpoint, &cache).await.unwrap();
        assert_eq!(
            std::fs::read(directory.join("model.safetensors")).unwrap(),
            content
        );
        let seen = seen.lock().unwrap();
        let request = seen
            .iter()
            .find(|request| request.path.ends_with("model.safetensors"))
            .unwrap();
        assert_eq!(range_start(request), Some(1_000));
    }
}

#[tokio::test]
async fn redirects_are_followed_and_the_token_stays_with_the_hub() {
    let repository = Repository::new();
    let store = repository.clone();
    let (storage, stored) = serve(move |request, _| store.answer(request)).await;
    // Another name for the same machine is another host.
    let storage = storage.replace("127.0.0.1", "localhost");
    let (endpoint, _) = serve(move |request, _| {
        if request.path.ends_with("model.safetensors") {
            let location = format!("{storage}{}", request.path);
            return Reply {
                headers: vec![("location", location)],
                ..reply("302 Found", "")
            };
        }
        repository.answer(request)
    })
    .await;
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(HubSettings {
        token: Some("secret".into()),
        ..settings(&endpoint, &cache)
    })
    .unwrap();
    hub.pull(ID, "main", &silent).await.unwrap();
    let stored = stored.lock().unwrap();
    assert_eq!(stored.len(), 1);
    assert!(!stored[0].headers.contains_key("authorization"));
}

#[tokio::test]
async fn a_wrong_checksum_is_refused_and_nothing_is_kept() {
    let repository = Repository {
        wrong_checksum: true,
        ..Repository::new()
    };
    let (endpoint, _) = serve(move |request, _| repository.answer(request)).await;
    let cache = tempfile::tempdir().unwrap();
    let error = pull(&endpoint, &cache).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Checksum { file, .. } if file == "model.safetensors"),
        "{error}"
    );
    let hub = Hub::new(settings(&endpoint, &cache)).unwrap();
    assert_eq!(hub.cached(ID, "main"), None);
    let blobs = std::fs::read_dir(cache.path().join("models--org--name/blobs")).unwrap();
    assert!(
        blobs
            .flatten()
            .all(|entry| entry.metadata().unwrap().len() < 50_000)
    );
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    for (status, expected) in [
        ("401 Unauthorized", "HF_TOKEN"),
        ("403 Forbidden", "HF_TOKEN"),
        ("404 Not Found", "no model 'org/name'"),
        ("429 Too Many Requests", "17 s"),
        ("500 Internal Server Error", "500"),
    ] {
        let (endpoint, _) = serve(move |_, _| Reply {
            headers: vec![("retry-after", "17".into())],
            ..reply(status, "")
        })
        .await;
        let cache = tempfile::tempdir().unwrap();
        let error = pull(&endpoint, &cache).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{status}: {error}");
    }
    for (body, expected) in [
        ("not json", "makes no sense"),
        (r#"{"sha": "../../etc"}"#, "names no commit"),
    ] {
        let (endpoint, _) = serve(move |_, _| reply("200 OK", body)).await;
        let error = pull(&endpoint, &tempfile::tempdir().unwrap())
            .await
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// What it is shows in a small file, and its weights may have gigabytes.
#[tokio::test]
async fn an_architecture_that_is_not_supported_is_refused_before_anything_large_is_fetched() {
    let mut repository = Repository::new();
    let config = br#"{"model_type": "qwen3", "hidden_size": 8}"#.to_vec();
    repository.files.insert("config.json".to_owned(), config);
    let (endpoint, seen) = serve(move |request, _| repository.answer(request)).await;
    let error = pull(&endpoint, &tempfile::tempdir().unwrap()).await.unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, HubError::Unusable { .. }), "{message}");
    assert!(
        message.contains("qwen3") && message.contains("xlm-roberta"),
        "{message}"
    );
    let seen = seen.lock().unwrap();
    let heavy = |path: &str| path.ends_with(".safetensors") || path.ends_with("tokenizer.json");
    assert!(!seen.iter().any(|request| heavy(&request.path)));
}

#[tokio::test]
async fn a_hub_that_fails_for_a_moment_is_asked_again() {
    let repository = Repository::new();
    let (endpoint, seen) = serve(move |request, number| match number {
        0 | 1 => reply("503 Service Unavailable", ""),
        _ => repository.answer(request),
    })
    .await;
    let cache = tempfile::tempdir().unwrap();
    common::embedder(&pull(&endpoint, &cache).await.unwrap()).unwrap();
    let seen = seen.lock().unwrap();
    let asked = seen.iter().filter(|request| request.path.starts_with("/api/"));
    assert_eq!(asked.count(), 3);
}

/// Older models keep the same settings under another name.
#[tokio::test]
async fn a_sentence_configuration_under_an_older_name_is_fetched() {
    let mut repository = Repository::new();
    let content = repository.files.remove("sentence_bert_config.json").unwrap();
    repository
        .files
        .insert("sentence_xlm-roberta_config.json".to_owned(), content);
    let (endpoint, _) = serve(move |request, _| repository.answer(request)).await;
    let cache = tempfile::tempdir().unwrap();
    let model = common::embedder(&pull(&endpoint, &cache).await.unwrap()).unwrap();
    assert_eq!(model.info().max_tokens, Some(40));
}

#[tokio::test]
async fn a_mistyped_directory_is_said_to_be_none() {
    let (endpoint, _) = serve(|_, _| reply("404 Not Found", "")).await;
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(settings(&endpoint, &cache)).unwrap();
    let source = ModelSource::parse("models/foo");
    let message = hub
        .model_directory(&source, &silent)
        .await
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("'models/foo'") && message.contains("no directory of that name"),
        "{message}"
    );
}

#[tokio::test]
async fn a_repository_with_only_pickled_weights_is_refused_before_downloading() {
    let mut repository = Repository::new();
    repository.files.remove("model.safetensors");
    let (endpoint, seen) = serve(move |request, _| repository.answer(request)).await;
    let error = pull(&endpoint, &tempfile::tempdir().unwrap()).await.unwrap_err();
    assert!(matches!(error, HubError::PickledOnly { .. }), "{error}");
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn offline_opens_no_socket() {
    let (endpoint, seen) = serve(|_, _| reply("200 OK", "{}")).await;
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(HubSettings {
        offline: true,
        ..settings(&endpoint, &cache)
    })
    .unwrap();
    for id in [ID, ragstone_models::default_model::ID] {
        let error = hub
            .model_directory(&ModelSource::parse(id), &silent)
            .await
            .unwrap_err();
        assert!(matches!(error, HubError::Offline { .. }), "{error}");
    }
    assert!(seen.lock().unwrap().is_empty());
}

#[tokio::test]
async fn a_hub_that_is_not_there_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = pull(&endpoint, &tempfile::tempdir().unwrap()).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Unreachable { endpoint: named, .. } if *named == endpoint),
        "{error}"
    );
}

#[tokio::test]
async fn two_downloads_at_once_do_not_clash() {
    let repository = Repository::new();
    let (endpoint, seen) = serve(move |request, _| repository.answer(request)).await;
    let cache = tempfile::tempdir().unwrap();
    let (a, b) = tokio::join!(pull(&endpoint, &cache), pull(&endpoint, &cache));
    assert_eq!(a.unwrap(), b.unwrap());
    let seen = seen.lock().unwrap();
    let weights = seen
        .iter()
        .filter(|request| request.path.ends_with("model.safetensors"))
        .count();
    assert_eq!(weights, 1);
}
