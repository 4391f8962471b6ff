//! What the test files share: fixtures with files put over them, and ways to load them.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use ragstone_models::config::Quantize;
use ragstone_models::{
    CrossEncoder, CrossEncoderOptions, EmbedderOptions, Engine, EngineOptions, LoadError, LocalEmbedder,
};

pub(crate) static ENGINE: LazyLock<Engine> = LazyLock::new(|| {
    Engine::start(EngineOptions {
        threads: Some(2),
        ..EngineOptions::default()
    })
});

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// A copy of a fixture that a test may change.
pub(crate) fn copy(name: &str) -> tempfile::TempDir {
    let target = tempfile::tempdir().unwrap();
    copy_tree(&fixture(name), target.path());
    target
}

fn copy_tree(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_tree(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// With all bits, so that vectors can be compared with exact ones.
pub(crate) fn options(directory: &Path) -> EmbedderOptions {
    EmbedderOptions {
        id: "test".to_owned(),
        name: directory.display().to_string(),
        directory: directory.to_owned(),
        version: None,
        normalize: None,
        quantize: Some(Quantize::Never),
    }
}

pub(crate) fn embedder(directory: &Path) -> Result<LocalEmbedder, LoadError> {
    LocalEmbedder::load(&ENGINE, &options(directory))
}

pub(crate) fn cross_encoder(directory: &Path) -> Result<CrossEncoder, LoadError> {
    let options = CrossEncoderOptions {
        name: "cross".to_owned(),
        directory: directory.to_owned(),
    };
    CrossEncoder::load(&ENGINE, &options)
}

pub(crate) fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .map(|(x, y)| f64::from(*x) * f64::from(*y))
            .sum::<f64>()
    };
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
