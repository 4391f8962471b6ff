//! `ragstone models`: the model cache.

use std::io::Write;

use anyhow::Context;
use comfy_table::{Table, presets};
use ragstone_models::cache::{self, CachedModel, ModelKind};
use ragstone_models::default_model;
use ragstone_models::hub::{Hub, ModelSource};
use serde_json::{Value, json};

use super::{ModelsCommand, block_on, note, printable};
use crate::{startup, telemetry};

pub(super) fn run(command: ModelsCommand) -> anyhow::Result<()> {
    telemetry::start_logs(telemetry::LogFormat::Text);
    let hub = startup::hub()?;
    match command {
        ModelsCommand::List { json } => list(&hub, json),
        ModelsCommand::Pull { name, update } => pull(&hub, &name, update),
        ModelsCommand::Remove { name } => remove(&hub, &name),
        ModelsCommand::Show { name, json } => show(&hub, &name, json),
    }
}

/// Resolves `default`, short for the built-in default model.
fn full_name(name: &str) -> &str {
    if name == "default" {
        default_model::ID
    } else {
        name
    }
}

fn list(hub: &Hub, as_json: bool) -> anyhow::Result<()> {
    let models = cache::list(&hub.settings().cache)?;
    let mut out = std::io::stdout().lock();
    if as_json {
        let rows: Vec<Value> = models.iter().map(to_json).collect();
        writeln!(
            out,
            "{}",
            serde_json::to_string_pretty(&json!({ "models": rows }))?
        )?;
        return Ok(());
    }
    if models.is_empty() {
        note(format!(
            "No models in {}. Download one with `ragstone models pull NAME`.",
            hub.settings().cache.display()
        ));
        return Ok(());
    }
    let mut table = Table::new();
    table
        .load_preset(presets::NOTHING)
        .set_header(["MODEL", "KIND", "ARCHITECTURE", "SIZE", "USABLE"]);
    for model in &models {
        table.add_row([
            model.id.as_str(),
            kind(model.kind),
            model.architecture.as_deref().unwrap_or("unknown"),
            &size(model.bytes),
            if model.problem.is_none() { "yes" } else { "no" },
        ]);
    }
    writeln!(out, "{table}")?;
    Ok(())
}

fn pull(hub: &Hub, name: &str, update: bool) -> anyhow::Result<()> {
    let progress = crate::progress::downloads();
    let directory = block_on(async {
        match full_name(name) {
            default_model::ID if !update => Ok(default_model::ensure(hub, &progress).await?),
            name => match ModelSource::parse(name) {
                ModelSource::Directory(path) => Err(anyhow::anyhow!(
                    "{} is not a model id: name a model of the Hugging Face hub such as BAAI/bge-reranker-base",
                    path.display()
                )),
                ModelSource::Hub { id, revision } if update => {
                    Ok(hub.pull(&id, &revision, &progress).await?)
                }
                source => Ok(hub.model_directory(&source, &progress).await?),
            },
        }
    })?;
    if let Some(problem) = cache::problem(&directory) {
        anyhow::bail!(
            "'{name}' was downloaded to {}, but cannot be loaded: {problem}",
            directory.display()
        );
    }
    writeln!(std::io::stdout().lock(), "{}", directory.display())?;
    Ok(())
}

fn remove(hub: &Hub, name: &str) -> anyhow::Result<()> {
    let freed = cache::remove(&hub.settings().cache, full_name(name))?;
    anyhow::ensure!(freed > 0, "'{}' is not in the cache", full_name(name));
    note(format!("Removed {}, freed {}.", full_name(name), size(freed)));
    Ok(())
}

fn show(hub: &Hub, name: &str, as_json: bool) -> anyhow::Result<()> {
    let name = full_name(name);
    let model = cache::show(&hub.settings().cache, name)?.with_context(|| {
        format!("'{name}' is not in the cache: download it with `ragstone models pull {name}`")
    })?;
    let mut out = std::io::stdout().lock();
    if as_json {
        writeln!(out, "{}", serde_json::to_string_pretty(&to_json(&model))?)?;
        return Ok(());
    }
    for (label, value) in [
        ("model", model.id.clone()),
        ("revision", model.revision.clone()),
        ("directory", model.directory.display().to_string()),
        ("kind", kind(model.kind).to_owned()),
        (
            "architecture",
            model.architecture.clone().unwrap_or_else(|| "unknown".to_owned()),
        ),
        ("size", size(model.bytes)),
        (
            "usable",
            match &model.problem {
                None => "yes".to_owned(),
                Some(problem) => format!("no: {problem}"),
            },
        ),
    ] {
        writeln!(out, "{label:<14}{}", printable(&value))?;
    }
    Ok(())
}

fn to_json(model: &CachedModel) -> Value {
    json!({
        "id": model.id, "revision": model.revision, "directory": model.directory, "kind": kind(model.kind),
        "architecture": model.architecture, "bytes": model.bytes, "usable": model.problem.is_none(),
        "problem": model.problem,
    })
}

fn kind(kind: ModelKind) -> &'static str {
    match kind {
        ModelKind::Embedding => "embedding",
        ModelKind::CrossEncoder => "cross-encoder",
        ModelKind::Other => "other",
    }
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} kB", bytes.div_ceil(1000)),
        1_000_000..1_000_000_000 => format!("{:.0} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
