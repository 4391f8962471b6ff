//! `ragstone query`: search a collection of a running server or of a data directory.

mod show;

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};

use anyhow::Context;
use axum::body::Body;
use axum::http::Request;
use clap::Args;
use clap::builder::PossibleValuesParser;
use http_body_util::BodyExt;
use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::search::SearchMode;
use ragstone_providers::config::EmbeddingConfig;
use serde_json::{Map, Value, json};
use tower::ServiceExt;

use super::block_on;
use super::remote::{REMOTE_ENVIRONMENT, RemoteArgs};
use crate::config::{CrossEncoderArgs, ListenArgs, LocalArgs, ServerArgs, Settings, StoreLocation};
use crate::startup::{self, Running};
use crate::stores::OpenStore;
use crate::telemetry;

#[derive(Args)]
#[command(after_help = REMOTE_ENVIRONMENT)]
pub(super) struct QueryArgs {
    /// Collection to search
    #[arg(value_parser = collection)]
    collection: CollectionName,
    /// Text to search for
    #[arg(value_parser = some_text)]
    text: String,
    /// Return only documents that match this filter
    #[arg(long = "where", value_name = "JSON", value_parser = filter)]
    filter: Option<Value>,
    /// Rank by meaning (dense), by words (keyword) or by both (hybrid)
    #[arg(long, default_value = SearchMode::Dense.name(), value_parser = PossibleValuesParser::new(SearchMode::ALL.map(SearchMode::name)))]
    mode: String,
    /// Return this many results
    #[arg(long, short = 'k', default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    top_k: u64,
    /// Rerank the results with the cross-encoder
    #[arg(long)]
    rerank: bool,
    /// Include documents that share this metadata field with a result
    #[arg(long, value_name = "FIELD")]
    expand: Option<String>,
    /// Omit results with a larger distance
    #[arg(long)]
    max_distance: Option<f32>,
    /// Show the ranks and timings of every stage
    #[arg(long)]
    explain: bool,
    /// Show whole texts and all metadata
    #[arg(long)]
    full: bool,
    /// Print JSON even in a terminal; the output to a pipe is always JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
    #[command(flatten)]
    local: LocalArgs,
    #[command(flatten)]
    cross_encoder: CrossEncoderArgs,
}

fn collection(text: &str) -> Result<CollectionName, InvalidInput> {
    CollectionName::parse(text)
}

fn some_text(text: &str) -> Result<String, &'static str> {
    if text.trim().is_empty() {
        return Err("the text to search for is empty");
    }
    Ok(text.to_owned())
}

/// Checks the filter as the server would, so that an invalid one is a usage error.
fn filter(text: &str) -> Result<Value, String> {
    let filter: Value = serde_json::from_str(text).map_err(|error| format!("it must be JSON: {error}"))?;
    Filter::parse(&filter).map_err(|error| error.to_string())?;
    Ok(filter)
}

pub(super) fn run(args: &QueryArgs) -> anyhow::Result<()> {
    let is_local = args.local.store.data_dir.is_some() || args.local.store.store.is_some();
    let answer = block_on(async {
        if is_local {
            search_here(args).await
        } else {
            args.remote.query(&args.collection, &body(args)).await
        }
    })?;
    let mut out = std::io::stdout().lock();
    if args.json || !out.is_terminal() {
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else {
        let style = show::Style {
            width: show::terminal_width(),
            full: args.full,
        };
        write!(out, "{}", show::cards(&answer, &args.text, &style))?;
    }
    Ok(())
}

fn body(args: &QueryArgs) -> Value {
    let mut body = Map::from_iter([
        ("query".to_owned(), json!(args.text)),
        ("mode".to_owned(), json!(args.mode)),
        ("top_k".to_owned(), json!(args.top_k)),
        ("rerank".to_owned(), json!(args.rerank)),
        ("explain".to_owned(), json!(args.explain)),
    ]);
    if let Some(filter) = &args.filter {
        body.insert("where".to_owned(), filter.clone());
    }
    if let Some(field) = &args.expand {
        body.insert("expand".to_owned(), json!(field));
    }
    if let Some(distance) = args.max_distance {
        body.insert("max_distance".to_owned(), json!(distance));
    }
    Value::Object(body)
}

/// Opens the store in this process, and asks the same route that a server would.
async fn search_here(args: &QueryArgs) -> anyhow::Result<Value> {
    telemetry::start_logs_from("warn,ragstone::progress=info", telemetry::LogFormat::Text);
    let settings = settings(args)?;
    if let StoreLocation::Embedded(directory) = &settings.store {
        // Opening would create a store.
        anyhow::ensure!(
            ragstone_store::has_database(directory),
            "there is no store in {}: correct --data-dir",
            directory.display()
        );
    }
    let store = OpenStore::open(&settings.store)
        .await
        .map_err(|error| match error.downcast_ref() {
            Some(ragstone_store::Error::InUse(_)) => {
                error.context("a server has the store open: search through it with --url")
            }
            _ => error,
        })?;
    let models = startup::load_models_or_default(&settings, Some(store.records())).await?;
    let running = Running::start(&settings, store, models).await?;
    let answer = ask(&running, args).await;
    running.stop().await?;
    answer
}

/// Settings of the store and its models. Nothing else of the configuration is started for one search.
fn settings(args: &QueryArgs) -> anyhow::Result<Settings> {
    let server = ServerArgs {
        local: args.local.clone(),
        cross_encoder: args.cross_encoder.clone(),
        no_embeddings: args.mode == SearchMode::Keyword.name(),
        listen: ListenArgs {
            allow_no_key: true,
            ..ListenArgs::default()
        },
    };
    let settings = server.settings()?;
    Ok(Settings {
        api_keys: Vec::new(),
        embedding: EmbeddingConfig::default(),
        chat: None,
        services: BTreeMap::new(),
        cross_encoder: settings.cross_encoder.filter(|_| args.rerank),
        ..settings
    })
}

async fn ask(running: &Running, args: &QueryArgs) -> anyhow::Result<Value> {
    let request = Request::post(format!("/collections/{}/query", args.collection))
        .body(Body::from(body(args).to_string()))?;
    let response = running.router().oneshot(request).await?;
    let status = response.status();
    let bytes = response.into_body().collect().await?.to_bytes();
    let answer: Value = serde_json::from_slice(&bytes).context("the answer is not JSON")?;
    if status.is_success() {
        return Ok(answer);
    }
    let detail = answer["detail"].as_str().unwrap_or("the search failed");
    anyhow::bail!("{}", super::printable(detail))
}
