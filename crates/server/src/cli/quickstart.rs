//! `ragstone quickstart`: a server with a sample collection, without configuration.

use std::io::Write;

use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use ragstone_core::backend::{Backend, BackendError};
use ragstone_core::collection::{CollectionName, EMBEDDING_MODEL};
use ragstone_core::document::{Metadata, NewDocument, RawDocument, check_documents};
use ragstone_core::models::Models;
use ragstone_models::default_model;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{QuickstartArgs, block_on, note};
use crate::config::{self, FileConfig, ServerArgs, Settings};
use crate::startup::{self, DEFAULT_MODEL_ID, Running};
use crate::stores::OpenStore;
use crate::{listen, telemetry};

const COLLECTION: &str = "handbook";
const SAMPLE: &str = include_str!("../../samples/handbook.jsonl");

pub(super) fn run(args: &QuickstartArgs) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    // The environment and configuration files do not apply.
    let mut server = ServerArgs {
        no_embeddings: true,
        ..ServerArgs::default()
    };
    server.listen.port = Some(args.port);
    server.local.store.data_dir = Some(args.data_dir.clone());
    let settings = config::build(&server, FileConfig::default(), &|_| None)?;
    block_on(start(settings, args.once))
}

async fn start(settings: Settings, once: bool) -> anyhow::Result<()> {
    let listener = startup::bind(&settings).await?;
    let address = listener.local_addr()?;
    let models = default_models(&settings).await?;
    let running = Running::start(&settings, OpenStore::open(&settings.store).await?, models).await?;
    load_sample(running.local()).await?;
    if once {
        writeln!(
            std::io::stdout(),
            "# This run stops now. While `ragstone quickstart` is running, these commands give these answers:"
        )?;
    }
    show_tries(&running, &address.to_string()).await?;
    if once {
        return running.stop().await;
    }
    note(format!(
        "\nServing on http://{address}, interactive documentation at http://{address}/docs. Stop with Ctrl-C."
    ));
    running.serve_on(listener, &settings, listen::stop_signal()).await
}

pub(super) async fn default_models(settings: &Settings) -> anyhow::Result<Models> {
    let hub = startup::hub()?;
    if default_model::cached(&hub).is_none() {
        note(format!("Downloading the default model, {} …", default_model::ID));
    }
    let embedder = startup::open_default(&startup::engine(settings), &hub).await?;
    Ok(Models::new(vec![embedder], None))
}

/// Adds the sample documents; a second start replaces them with themselves.
async fn load_sample(local: &dyn Backend) -> anyhow::Result<()> {
    let name = CollectionName::parse(COLLECTION)?;
    let metadata = Metadata::from_iter([
        (EMBEDDING_MODEL.to_owned(), Value::from(DEFAULT_MODEL_ID)),
        (
            "description".to_owned(),
            Value::from("A handbook of a small observatory"),
        ),
    ]);
    match local.create_collection(&name, metadata).await {
        Ok(_) | Err(BackendError::CollectionExists(_)) => {}
        Err(error) => return Err(error.into()),
    }
    let added = local.add_documents(&name, sample()?).await?;
    note(format!(
        "Collection '{COLLECTION}' has {} documents.",
        added.ids.len()
    ));
    Ok(())
}

fn sample() -> anyhow::Result<Vec<NewDocument>> {
    let raw = SAMPLE
        .lines()
        .map(serde_json::from_str::<RawDocument>)
        .collect::<Result<_, _>>()?;
    Ok(check_documents(raw)?)
}

/// A command to type, and its request.
struct Try {
    about: &'static str,
    method: &'static str,
    path: String,
    body: Option<Value>,
}

fn tries() -> [Try; 3] {
    let query = format!("/collections/{COLLECTION}/query");
    [
        Try {
            about: "Search by meaning: the answer does not contain the words of the question",
            method: "POST",
            path: query.clone(),
            body: Some(json!({"query": "what to do in bad weather?", "top_k": 2})),
        },
        Try {
            about: "Search by meaning and by keyword, with a filter",
            method: "POST",
            path: query,
            body: Some(
                json!({"query": "ZX-4417", "mode": "hybrid", "top_k": 1, "where": {"chapter": "dome"}}),
            ),
        },
        Try {
            about: "Get a whole section by its metadata",
            method: "GET",
            path: format!(
                "/collections/{COLLECTION}/documents?where=%7B%22section_id%22:%22mirror-care%22%7D"
            ),
            body: None,
        },
    ]
}

/// Prints each command with the answer of the running service.
async fn show_tries(running: &Running, address: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    for (number, attempt) in tries().iter().enumerate() {
        writeln!(out, "\n# {}. {}", number + 1, attempt.about)?;
        match &attempt.body {
            Some(body) => writeln!(out, "curl -s http://{address}{} -d '{body}'", attempt.path)?,
            None => writeln!(out, "curl -s 'http://{address}{}'", attempt.path)?,
        }
        let body = attempt
            .body
            .as_ref()
            .map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let request = Request::builder()
            .method(attempt.method)
            .uri(&attempt.path)
            .body(body)?;
        let answer = running.router().oneshot(request).await?;
        let bytes = answer.into_body().collect().await?.to_bytes();
        let answer: Value = serde_json::from_slice(&bytes)?;
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    }
    Ok(())
}
