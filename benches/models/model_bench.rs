//! The measured side of `benches/models/run.py`: reads one JSON request per line on standard input,
//! answers each on standard output. Measuring only what was asked for lets the driver take turns
//! between engines, so that all of them see the same disturbances.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Instant;

use ragstone_core::model::{EmbedInput, Embedder, Reranker, Role};
use ragstone_models::config::Quantize;
use ragstone_models::{
    CrossEncoder, CrossEncoderOptions, EmbedderOptions, Engine, EngineOptions, LocalEmbedder,
};
use serde_json::{Value, json};

/// As in the program.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn std::error::Error>;

struct Loaded {
    engine: Engine,
    embedder: Option<LocalEmbedder>,
    cross_encoder: Option<CrossEncoder>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let threads = std::env::args().nth(1).map(|count| count.parse()).transpose()?;
    let engine = Engine::start(EngineOptions {
        threads,
        ..EngineOptions::default()
    });
    let mut loaded = Loaded {
        engine,
        embedder: None,
        cross_encoder: None,
    };
    for line in std::io::stdin().lock().lines() {
        let answer = answer(&mut loaded, &serde_json::from_str(&line?)?).await?;
        writeln!(std::io::stdout(), "{answer}")?;
    }
    Ok(())
}

async fn answer(loaded: &mut Loaded, request: &Value) -> Result<Value, Failure> {
    let texts = |key: &str| -> Vec<String> {
        let list = request[key].as_array().into_iter().flatten();
        list.filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    let start = Instant::now();
    match request["do"].as_str().unwrap_or_default() {
        "load" => {
            let options = EmbedderOptions {
                id: "bench".to_owned(),
                name: "bench".to_owned(),
                directory: directory(request),
                version: None,
                normalize: None,
                quantize: match request["quantize"].as_str() {
                    None => None,
                    Some("int8") => Some(Quantize::Int8),
                    Some("none") => Some(Quantize::Never),
                    Some(other) => return Err(format!("unknown precision '{other}'").into()),
                },
            };
            loaded.embedder = Some(LocalEmbedder::load(&loaded.engine, &options)?);
            Ok(json!({ "seconds": start.elapsed().as_secs_f64() }))
        }
        "load-cross-encoder" => {
            let options = CrossEncoderOptions {
                name: "bench".to_owned(),
                directory: directory(request),
            };
            loaded.cross_encoder = Some(CrossEncoder::load(&loaded.engine, &options)?);
            Ok(json!({ "seconds": start.elapsed().as_secs_f64() }))
        }
        "embed" => {
            let model = loaded.embedder.as_ref().ok_or("no model is loaded")?;
            let inputs = texts("texts").into_iter().map(EmbedInput::Text).collect();
            let embeddings = model.embed(inputs, Role::Passage).await?;
            let seconds = start.elapsed().as_secs_f64();
            let tokens: usize = embeddings.iter().map(|embedding| embedding.tokens).sum();
            let vectors: Vec<_> = match request["vectors"].as_bool() {
                Some(true) => embeddings.into_iter().map(|embedding| embedding.vector).collect(),
                _ => Vec::new(),
            };
            Ok(json!({ "seconds": seconds, "tokens": tokens, "vectors": vectors }))
        }
        "score" => {
            let model = loaded
                .cross_encoder
                .as_ref()
                .ok_or("no cross-encoder is loaded")?;
            let scores = model
                .score(
                    request["query"].as_str().unwrap_or_default(),
                    texts("texts"),
                    None,
                )
                .await?;
            Ok(json!({ "seconds": start.elapsed().as_secs_f64(), "scores": scores.scores }))
        }
        "memory" => Ok(json!({ "peak_mb": peak_memory_mb()? })),
        other => Err(format!("unknown request '{other}'").into()),
    }
}

fn directory(request: &Value) -> PathBuf {
    PathBuf::from(request["directory"].as_str().unwrap_or_default())
}

fn peak_memory_mb() -> Result<f64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM"))
        .ok_or("no VmHWM")?;
    let kilobytes: f64 = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kilobytes / 1024.0)
}
