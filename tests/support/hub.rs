//! A local model hub that serves the small models and records requests.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::Json;
use axum::Router;
use axum::extract::{Path as UrlPath, Request, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use axum::routing::get;
use serde_json::{Value, json};

use super::{Setup, fixtures};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves `tests/NAME` for every small model NAME.
pub struct ModelHub {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl ModelHub {
    pub async fn start() -> Self {
        let requests = Arc::new(Mutex::new(Vec::new()));
        let router = Router::new()
            .route("/api/models/tests/{name}/revision/{revision}", get(describe))
            .route("/tests/{name}/resolve/{commit}/{*file}", get(download))
            .layer(from_fn_with_state(Arc::clone(&requests), record))
            .with_state(Arc::clone(&requests));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a free port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { address, requests }
    }

    /// Makes the program download from this hub into its own folder.
    pub fn reached_by(&self, setup: Setup) -> Setup {
        let cache = setup.folder().join("models");
        setup
            .env("HF_HUB_OFFLINE", "0")
            .env("HF_ENDPOINT", format!("http://{}", self.address))
            .env("HF_HOME", cache)
            .env("HF_HUB_CACHE", "")
            .env("NO_PROXY", "127.0.0.1")
    }

    /// The requested paths since the last call.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().expect("the list of requests"))
    }
}

type Requests = Arc<Mutex<Vec<String>>>;

async fn record(State(requests): State<Requests>, request: Request, next: Next) -> Response {
    requests
        .lock()
        .expect("the list of requests")
        .push(request.uri().path().to_owned());
    next.run(request).await
}

async fn describe(UrlPath((name, _)): UrlPath<(String, String)>) -> Result<Json<Value>, StatusCode> {
    if !known(&name) {
        return Err(StatusCode::NOT_FOUND);
    }
    let root = fixtures::model(&name);
    let mut files = Vec::new();
    list(&root, &root, &mut files);
    Ok(Json(json!({"sha": COMMIT, "siblings": files})))
}

async fn download(
    UrlPath((name, _, file)): UrlPath<(String, String, String)>,
) -> Result<Vec<u8>, StatusCode> {
    let plain = file.split('/').all(|part| !part.starts_with('.'));
    if !known(&name) || !plain {
        return Err(StatusCode::NOT_FOUND);
    }
    std::fs::read(fixtures::model(&name).join(file)).map_err(|_| StatusCode::NOT_FOUND)
}

fn known(name: &str) -> bool {
    let plain = name
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    plain
        && Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../models/tests/fixtures")
            .join(name)
            .is_dir()
}

fn list(root: &Path, folder: &Path, files: &mut Vec<Value>) {
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() {
            list(root, &path, files);
        } else {
            let name = path
                .strip_prefix(root)
                .expect("a file below")
                .to_string_lossy()
                .into_owned();
            files.push(json!({"rfilename": name, "size": entry.metadata().expect("a size").len()}));
        }
    }
}
