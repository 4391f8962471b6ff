//! A small model on disk, of which a target replaces one file.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use ragstone_core::model::{EmbedInput, Embedder, ModelError, Role};
use ragstone_models::config::Quantize;
use ragstone_models::{EmbedderOptions, Engine, EngineOptions, LoadError, LocalEmbedder, inspect_embedder};

/// A copy of the fixture `bert`, one for each process.
pub static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/models/tests/fixtures/bert");
    let copy = std::env::temp_dir().join(format!("ragstone-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(copy.join("1_Pooling")).expect("a temporary directory");
    for file in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "modules.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
    ] {
        std::fs::copy(fixture.join(file), copy.join(file)).expect("a file of the fixture");
    }
    copy
});

static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    Engine::start(EngineOptions {
        threads: Some(1),
        ..EngineOptions::default()
    })
});

static RUNTIME: LazyLock<tokio::runtime::Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime")
});

/// Inspects and loads the model, then embeds a text. Every file may be refused, and a model that loads
/// gives vectors of the width that inspection reported. A panic on any thread ends the process.
pub fn try_model() {
    let inspected = inspect_embedder(&DIRECTORY);
    let options = EmbedderOptions {
        id: "fuzz".to_owned(),
        name: "fuzz".to_owned(),
        directory: DIRECTORY.clone(),
        version: Some("1".to_owned()),
        normalize: None,
        quantize: Some(Quantize::Never),
    };
    let model = match (LocalEmbedder::load(&ENGINE, &options), &inspected) {
        (Ok(model), Ok(width)) => {
            assert_eq!(model.info().identity.dimensions, *width);
            model
        }
        (Err(refusal), _) => return check(&refusal),
        (Ok(_), Err(refusal)) => panic!("loaded, though inspection refused: {refusal}"),
    };
    let inputs =
        ["The quick brown fox", "Zürich 3.14159 \u{0}\n", ""].map(|text| EmbedInput::Text(text.to_owned()));
    match RUNTIME.block_on(model.embed(inputs.to_vec(), Role::Passage)) {
        Ok(embeddings) => {
            for embedding in embeddings {
                assert_eq!(embedding.vector.len(), model.info().identity.dimensions);
                assert!(embedding.vector.iter().all(|value| value.is_finite()));
            }
        }
        Err(ModelError::InvalidInput(_) | ModelError::Failed(_)) => {}
        Err(other) => panic!("{other}"),
    }
}

fn check(refusal: &LoadError) {
    let message = refusal.to_string();
    assert!(!message.is_empty() && message.len() < 4000, "{message}");
}
