//! The real default model, got as a user gets it, against vectors of sentence-transformers.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

mod common;

use common::{cosine, embedder};
use ragstone_core::model::{EmbedInput, Embedder, Role};
use ragstone_models::config::Quantize;
use ragstone_models::hub::{Hub, HubSettings, silent};
use ragstone_models::{EmbedderOptions, LocalEmbedder, default_model};

#[tokio::test]
async fn the_default_model_agrees_with_sentence_transformers() {
    let hub = Hub::new(HubSettings::from_env()).unwrap();
    let directory = default_model::ensure(&hub, &silent).await.unwrap();
    let model = embedder(&directory).unwrap();
    assert_eq!(
        (model.info().identity.dimensions, model.info().max_tokens),
        (384, Some(256))
    );
    let file = std::fs::read(common::fixture("all-minilm-l6-v2.json")).unwrap();
    let reference: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let texts: Vec<String> = serde_json::from_value(reference["texts"].clone()).unwrap();
    let vectors: Vec<Vec<f32>> = serde_json::from_value(reference["vectors"].clone()).unwrap();
    let inputs = texts.iter().cloned().map(EmbedInput::Text).collect();
    let embeddings = model.embed(inputs, Role::Passage).await.unwrap();
    for ((embedding, expected), text) in embeddings.iter().zip(&vectors).zip(&texts) {
        let similarity = cosine(&embedding.vector, expected);
        assert!(similarity > 0.99999, "{similarity} for {text:?}");
    }
    assert!(embeddings.last().unwrap().truncated);
    let options = EmbedderOptions {
        quantize: None,
        ..common::options(&directory)
    };
    let usual = LocalEmbedder::load(&common::ENGINE, &options).unwrap();
    assert_eq!(usual.info().identity, model.info().identity);
    let inputs = texts.iter().cloned().map(EmbedInput::Text).collect();
    let close = usual.embed(inputs, Role::Passage).await.unwrap();
    for ((embedding, expected), text) in close.iter().zip(&vectors).zip(&texts) {
        let similarity = cosine(&embedding.vector, expected);
        assert!(similarity > 0.9999, "{similarity} for {text:?}");
    }
    let options = EmbedderOptions {
        quantize: Some(Quantize::Int8),
        ..common::options(&directory)
    };
    let quantized = LocalEmbedder::load(&common::ENGINE, &options).unwrap();
    let inputs = texts.iter().cloned().map(EmbedInput::Text).collect();
    let close = quantized.embed(inputs, Role::Passage).await.unwrap();
    for ((close, exact), text) in close.iter().zip(&embeddings).zip(&texts) {
        let similarity = cosine(&close.vector, &exact.vector);
        // Errors do not average out over the two or three tokens of no text or of one unknown word.
        let least = if close.tokens <= 3 { 0.99 } else { 0.995 };
        assert!(similarity > least, "{similarity} for {text:?}");
    }
    assert_eq!(default_model::ensure(&hub, &silent).await.unwrap(), directory);
}
