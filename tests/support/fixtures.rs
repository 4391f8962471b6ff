//! Models for tests: small ones with random weights, and the real default model.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

use super::Setup;

/// Dimensions of the small embedding models.
pub const DIMENSIONS: usize = 32;

/// A small model with random weights, from the fixtures of the models crate.
pub fn model(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../models/tests/fixtures")
        .join(name);
    path.canonicalize()
        .unwrap_or_else(|_| panic!("no model {name:?} among the fixtures"))
}

/// Results of the reference implementation with these models.
fn references() -> &'static Value {
    static REFERENCES: OnceLock<Value> = OnceLock::new();
    REFERENCES.get_or_init(|| {
        let text = std::fs::read_to_string(model("references.json")).expect("the references are there");
        serde_json::from_str(&text).expect("the references are JSON")
    })
}

fn of_model<'a>(kind: &str, key: &str, model: &str) -> &'a Value {
    let all = references()[kind].as_array().expect("references of this kind");
    all.iter()
        .find(|entry| entry[key] == model)
        .unwrap_or_else(|| panic!("no reference of {model}"))
}

/// Pairs of query and text, with their scores by the reference implementation.
pub fn reference_scores(model: &str) -> Vec<(&'static Value, f64)> {
    let scores = of_model("scores", "base", model)["scores"]
        .as_array()
        .expect("scores");
    let pairs = references()["pairs"].as_array().expect("pairs");
    pairs
        .iter()
        .zip(scores)
        .map(|(pair, score)| (pair, score.as_f64().expect("a score")))
        .collect()
}

/// Texts, with their vectors by the reference implementation.
pub fn reference_vectors(model: &str) -> Vec<(&'static str, Vec<f64>)> {
    let vectors = of_model("embeddings", "name", model)["vectors"]
        .as_array()
        .expect("vectors");
    let inputs = references()["inputs"].as_array().expect("inputs");
    let numbers = |vector: &Value| serde_json::from_value(vector.clone()).expect("a vector");
    inputs
        .iter()
        .zip(vectors)
        .map(|(text, vector)| (text.as_str().expect("a text"), numbers(vector)))
        .collect()
}

pub fn cosine(a: &[f64], b: &[f64]) -> f64 {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

/// A text that is longer than the limit of the small models.
pub fn long_text() -> String {
    "a question about vectors ".repeat(40)
}

/// A copy of a model that a test may damage.
pub fn copy(name: &str, into: &Path) -> PathBuf {
    fn copy_folder(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).expect("a folder");
        for entry in std::fs::read_dir(from).expect("the model's folder") {
            let entry = entry.expect("a file");
            let target = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy_folder(&entry.path(), &target);
            } else {
                std::fs::copy(entry.path(), target).expect("the file is copied");
            }
        }
    }
    let target = into.join(name);
    copy_folder(&model(name), &target);
    target
}

/// A copy of a model in which all values of one `f32` tensor are the largest float.
pub fn with_weights_that_overflow(name: &str, tensor: &str, into: &Path) -> PathBuf {
    let directory = copy(name, into);
    let path = directory.join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("the weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header]).expect("a header of JSON");
    let offsets: [usize; 2] =
        serde_json::from_value(entries[tensor]["data_offsets"].clone()).expect("the tensor");
    assert_eq!(entries[tensor]["dtype"], "F32");
    for number in bytes[8 + header + offsets[0]..8 + header + offsets[1]].chunks_exact_mut(4) {
        number.copy_from_slice(&f32::MAX.to_le_bytes());
    }
    std::fs::write(&path, bytes).expect("the weights are written");
    directory
}

/// Downloads the default model into the ordinary cache, once per process.
pub fn default_model() {
    static PULLED: OnceLock<()> = OnceLock::new();
    PULLED.get_or_init(|| {
        Setup::command(&["models", "pull", "default"])
            .env("HF_HUB_OFFLINE", "")
            .run()
            .succeeded();
    });
}
