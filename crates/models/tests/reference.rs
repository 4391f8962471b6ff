//! Every supported architecture, pooling and module against the outputs of sentence-transformers
//! for the same files and texts (made by `scripts/make_test_models.py`).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

mod common;

use std::collections::HashMap;

use common::{cosine, cross_encoder, embedder, fixture};
use ragstone_core::model::{EmbedInput, Embedder, Reranker, Role};
use ragstone_models::config::Quantize;
use ragstone_models::{
    CrossEncoder, CrossEncoderOptions, EmbedderOptions, Engine, EngineOptions, LocalEmbedder,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct References {
    inputs: Vec<String>,
    pairs: Vec<(String, String)>,
    embeddings: Vec<EmbeddingReference>,
    scores: Vec<ScoreReference>,
}

#[derive(Deserialize)]
struct EmbeddingReference {
    name: String,
    base: String,
    files: HashMap<String, Option<serde_json::Value>>,
    role: String,
    vectors: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct ScoreReference {
    base: String,
    scores: Vec<f32>,
}

fn references() -> References {
    serde_json::from_slice(&std::fs::read(fixture("references.json")).unwrap()).unwrap()
}

/// The base model with the variant's own files put over it.
fn variant(reference: &EmbeddingReference) -> tempfile::TempDir {
    let directory = common::copy(&reference.base);
    for (name, content) in &reference.files {
        let path = directory.path().join(name);
        match content {
            Some(content) => {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(path, content.to_string()).unwrap();
            }
            None => std::fs::remove_file(path).unwrap(),
        }
    }
    directory
}

fn texts(inputs: &[String]) -> Vec<EmbedInput> {
    inputs.iter().cloned().map(EmbedInput::Text).collect()
}

fn role(name: &str) -> Role {
    if name == "query" {
        Role::Query
    } else {
        Role::Passage
    }
}

#[tokio::test]
async fn embeddings_agree_with_sentence_transformers() {
    let references = references();
    for reference in &references.embeddings {
        let directory = variant(reference);
        let model = embedder(directory.path()).unwrap();
        assert_eq!(
            model.info().identity.dimensions,
            reference.vectors[0].len(),
            "{}",
            reference.name
        );
        let embeddings = model
            .embed(texts(&references.inputs), role(&reference.role))
            .await
            .unwrap();
        for ((embedding, expected), text) in embeddings.iter().zip(&reference.vectors).zip(&references.inputs)
        {
            let similarity = cosine(&embedding.vector, expected);
            assert!(
                similarity > 0.99999,
                "{}: {similarity} for {text:?}",
                reference.name
            );
            let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
            for (value, expected) in embedding.vector.iter().zip(expected) {
                assert!(
                    (value - expected).abs() < 2e-4 * scale,
                    "{}: {value} {expected}",
                    reference.name
                );
            }
        }
    }
}

#[tokio::test]
async fn scores_agree_with_sentence_transformers() {
    let references = references();
    for reference in &references.scores {
        let model = cross_encoder(&fixture(&reference.base)).unwrap();
        for ((query, text), expected) in references.pairs.iter().zip(&reference.scores) {
            let scores = model
                .score(query, vec![text.clone(), text.clone()], None)
                .await
                .unwrap()
                .scores;
            for score in scores {
                assert!(
                    (score - expected).abs() < 1e-4,
                    "{}: {score} {expected} {query:?}",
                    reference.base
                );
            }
        }
    }
}

/// However a request is divided for the queue, and however its query is cut for each text.
#[tokio::test]
async fn scores_are_the_same_for_one_text_and_for_many() {
    let references = references();
    let small = Engine::start(EngineOptions {
        threads: Some(2),
        queue_tokens: 100,
        ..EngineOptions::default()
    });
    for base in ["cross-bert", "cross-roberta"] {
        let options = CrossEncoderOptions {
            name: base.to_owned(),
            directory: fixture(base),
        };
        let model = CrossEncoder::load(&small, &options).unwrap();
        let scores = &references
            .scores
            .iter()
            .find(|scores| scores.base == base)
            .unwrap()
            .scores;
        for ((query, text), expected) in references.pairs.iter().zip(scores) {
            let texts: Vec<String> = references.pairs.iter().map(|(_, text)| text.clone()).collect();
            let place = texts.iter().position(|other| other == text).unwrap();
            let scored = model.score(query, texts, None).await.unwrap();
            assert_eq!(scored.scores.len(), references.pairs.len());
            assert!((scored.scores[place] - expected).abs() < 1e-4, "{base} {query:?}");
        }
    }
}

#[tokio::test]
async fn a_text_gives_the_same_vector_alone_and_in_any_company() {
    let references = references();
    for base in ["bert", "mpnet"] {
        let model = embedder(&fixture(base)).unwrap();
        let mut inputs = texts(&references.inputs);
        let forward = model.embed(inputs.clone(), Role::Passage).await.unwrap();
        inputs.reverse();
        let mut backward = model.embed(inputs.clone(), Role::Passage).await.unwrap();
        backward.reverse();
        for (a, b) in forward.iter().zip(&backward) {
            assert!(cosine(&a.vector, &b.vector) > 0.999_999);
        }
        for (input, together) in inputs.into_iter().rev().zip(&forward) {
            let alone = model.embed(vec![input], Role::Passage).await.unwrap();
            assert!(cosine(&alone[0].vector, &together.vector) > 0.999_999);
            assert_eq!(
                (alone[0].tokens, alone[0].truncated),
                (together.tokens, together.truncated)
            );
        }
    }
}

#[tokio::test]
async fn truncation_is_reported_and_the_limit_is_the_models_own() {
    let model = embedder(&fixture("bert")).unwrap();
    assert_eq!(model.info().max_tokens, Some(40));
    let inputs = vec![
        EmbedInput::Text("fox".into()),
        EmbedInput::Text("the fox ".repeat(100)),
    ];
    let embeddings = model.embed(inputs, Role::Passage).await.unwrap();
    assert!(!embeddings[0].truncated && embeddings[0].tokens < 10);
    assert!(embeddings[1].truncated);
    assert_eq!(embeddings[1].tokens, 40);
    assert_eq!(model.count_tokens(&"the ".repeat(100)), Some(100));
}

#[tokio::test]
async fn a_very_long_text_is_cut_as_if_it_had_been_read_whole() {
    let model = embedder(&fixture("xlm-roberta")).unwrap();
    let start = "Retrieval finds the passages that answer a question. ".repeat(20);
    let long = start.clone() + &"zebra ".repeat(100_000);
    let inputs = vec![EmbedInput::Text(start), EmbedInput::Text(long)];
    let embeddings = model.embed(inputs, Role::Passage).await.unwrap();
    assert_eq!(embeddings[0].vector, embeddings[1].vector);
    assert!(embeddings[1].truncated);
}

#[tokio::test]
async fn tokens_of_a_client_mean_the_same_as_their_text() {
    let model = embedder(&fixture("bert")).unwrap();
    let tokenizer = tokenizer_ids("bert", "the quick brown fox");
    let inputs = vec![
        EmbedInput::Text("the quick brown fox".into()),
        EmbedInput::Tokens(tokenizer),
    ];
    let embeddings = model.embed(inputs, Role::Passage).await.unwrap();
    assert_eq!(embeddings[0], embeddings[1]);
    let foreign = model
        .embed(vec![EmbedInput::Tokens(vec![1_000_000])], Role::Passage)
        .await
        .unwrap_err();
    assert!(foreign.to_string().contains("1000000"), "{foreign}");
    let many = model
        .embed(vec![EmbedInput::Tokens(vec![7; 5_000])], Role::Passage)
        .await
        .unwrap();
    assert!(many[0].truncated && many[0].tokens == 40);
}

/// Looks whole words up in the vocabulary, which is all the test's text needs.
fn tokenizer_ids(base: &str, text: &str) -> Vec<u32> {
    let file = std::fs::read(fixture(base).join("tokenizer.json")).unwrap();
    let tokenizer: serde_json::Value = serde_json::from_slice(&file).unwrap();
    let id = |word: &str| tokenizer["model"]["vocab"][word].as_u64().unwrap() as u32;
    text.split(' ').map(id).collect()
}

fn reference_of<'a>(references: &'a References, name: &str) -> &'a EmbeddingReference {
    let mut all = references.embeddings.iter();
    all.find(|reference| reference.name == name).unwrap()
}

async fn assert_vectors(model: &LocalEmbedder, references: &References, role: Role, name: &str) {
    let vectors = &reference_of(references, name).vectors;
    let embeddings = model.embed(texts(&references.inputs), role).await.unwrap();
    for (embedding, expected) in embeddings.iter().zip(vectors) {
        let similarity = cosine(&embedding.vector, expected);
        assert!(similarity > 0.99999, "{role:?} is not {name}: {similarity}");
    }
}

/// The default prompt is for every text of a model that knows no roles, and for no text of one that does.
#[tokio::test]
async fn a_default_prompt_counts_where_no_role_has_a_prompt() {
    let references = references();
    let default = variant(reference_of(&references, "prompt-default"));
    let model = embedder(default.path()).unwrap();
    for role in [Role::Query, Role::Passage] {
        assert_vectors(&model, &references, role, "prompt-default").await;
    }
    let config = serde_json::json!({
        "prompts": {"query": "query: ", "all": "every text: "},
        "default_prompt_name": "all",
    });
    let file = "config_sentence_transformers.json";
    std::fs::write(default.path().join(file), config.to_string()).unwrap();
    let model = embedder(default.path()).unwrap();
    assert_vectors(&model, &references, Role::Query, "prompt-query").await;
    std::fs::remove_file(default.path().join(file)).unwrap();
    let plain = embedder(default.path()).unwrap();
    let inputs = || texts(&references.inputs);
    let with = model.embed(inputs(), Role::Passage).await.unwrap();
    let without = plain.embed(inputs(), Role::Passage).await.unwrap();
    for (with, without) in with.iter().zip(&without) {
        assert!(cosine(&with.vector, &without.vector) > 0.999_999);
    }
}

/// What is computed where nothing is said about it: with 16 bits where the processor is made for that.
#[tokio::test]
async fn the_usual_precision_agrees_with_sentence_transformers_and_is_no_version_of_its_own() {
    let references = references();
    for reference in &references.embeddings {
        let directory = variant(reference);
        let options = EmbedderOptions {
            quantize: None,
            ..common::options(directory.path())
        };
        let usual = LocalEmbedder::load(&common::ENGINE, &options).unwrap();
        let exact = embedder(directory.path()).unwrap();
        assert_eq!(usual.info().identity, exact.info().identity);
        let embeddings = usual
            .embed(texts(&references.inputs), role(&reference.role))
            .await
            .unwrap();
        for ((embedding, expected), text) in embeddings.iter().zip(&reference.vectors).zip(&references.inputs)
        {
            let similarity = cosine(&embedding.vector, expected);
            assert!(
                similarity > 0.9999,
                "{}: {similarity} for {text:?}",
                reference.name
            );
        }
        // Alone or among others, on one thread or on several: the same vector.
        let alone = usual
            .embed(texts(&references.inputs[..1]), role(&reference.role))
            .await
            .unwrap();
        assert!(cosine(&alone[0].vector, &embeddings[0].vector) > 0.999_999);
    }
}

/// Eight-bit weights of every architecture give nearly the same vectors, under a version of their own.
#[tokio::test]
async fn int8_stays_close_and_is_another_version() {
    let references = references();
    for base in [
        "bert",
        "roberta",
        "xlm-roberta",
        "distilbert",
        "mpnet",
        "bert-dense",
        "bert-sharded",
    ] {
        let exact = embedder(&fixture(base)).unwrap();
        for version in [None, Some("7".to_owned())] {
            let options = EmbedderOptions {
                version: version.clone(),
                quantize: Some(Quantize::Int8),
                ..common::options(&fixture(base))
            };
            let quantized = LocalEmbedder::load(&common::ENGINE, &options).unwrap();
            let expected = version.unwrap_or_else(|| exact.info().identity.version.clone());
            assert_eq!(quantized.info().identity.version, format!("{expected}-int8"));
            let inputs = || texts(&references.inputs);
            let close = quantized.embed(inputs(), Role::Passage).await.unwrap();
            let vectors = exact.embed(inputs(), Role::Passage).await.unwrap();
            for ((close, exact), text) in close.iter().zip(&vectors).zip(&references.inputs) {
                let similarity = cosine(&close.vector, &exact.vector);
                assert!(similarity > 0.998, "{base}: {similarity} for {text:?}");
                assert_ne!(close.vector, exact.vector, "{base} was not quantised");
            }
            // Alone or among others, on one thread or on several: the same vector.
            let alone = quantized
                .embed(texts(&references.inputs[..1]), Role::Passage)
                .await
                .unwrap();
            assert!(cosine(&alone[0].vector, &close[0].vector) > 0.999_999, "{base}");
        }
    }
}

#[tokio::test]
async fn normalisation_can_be_chosen() {
    use ragstone_models::config::Normalize;
    let length = |vector: &[f32]| vector.iter().map(|v| v * v).sum::<f32>().sqrt();
    for (choice, unit) in [(Normalize::Always, true), (Normalize::Never, false)] {
        let options = EmbedderOptions {
            normalize: Some(choice),
            ..common::options(&fixture("bert"))
        };
        let model = LocalEmbedder::load(&common::ENGINE, &options).unwrap();
        let embeddings = model
            .embed(texts(&["fox".to_owned()]), Role::Passage)
            .await
            .unwrap();
        assert_eq!((length(&embeddings[0].vector) - 1.0).abs() < 1e-5, unit);
    }
}

#[tokio::test]
async fn the_version_follows_every_file_that_matters_and_can_be_given() {
    let version = |directory: &std::path::Path| embedder(directory).unwrap().info().identity.version.clone();
    let original = version(&fixture("bert"));
    assert_eq!(original, version(common::copy("bert").path()));
    for file in [
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
    ] {
        let copy = common::copy("bert");
        let path = copy.path().join(file);
        let mut content = std::fs::read(&path).unwrap();
        content.push(b' ');
        std::fs::write(&path, content).unwrap();
        assert_ne!(original, version(copy.path()), "{file}");
    }
    let copy = common::copy("bert");
    std::fs::write(copy.path().join("sentence_xlnet_config.json"), "{}").unwrap();
    assert_ne!(original, version(copy.path()), "an older name of the same file");
    let copy = common::copy("bert");
    let path = copy.path().join("model.safetensors");
    let mut content = std::fs::read(&path).unwrap();
    let last = content.len() - 4;
    content[last] ^= 1;
    std::fs::write(&path, content).unwrap();
    assert_ne!(original, version(copy.path()));
    let options = EmbedderOptions {
        version: Some("7".into()),
        ..common::options(&fixture("bert"))
    };
    let given = LocalEmbedder::load(&common::ENGINE, &options).unwrap();
    assert_eq!(given.info().identity.version, "7");
}
