//! Missing, damaged, pickled and unsupported files give a clear error each, never a panic.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test may fail, and a benchmark may print"
)]

mod common;

use std::path::Path;

use common::{copy, cross_encoder, embedder, fixture};
use ragstone_core::model::{EmbedInput, Embedder, Role};
use ragstone_models::{LoadError, LocalEmbedder, cache, inspect_cross_encoder, inspect_embedder};

fn error(directory: &Path) -> LoadError {
    match embedder(directory) {
        Ok(_) => panic!("{} was loaded", directory.display()),
        Err(error) => error,
    }
}

fn edit(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut content = std::fs::read(path).unwrap();
    change(&mut content);
    std::fs::write(path, content).unwrap();
}

fn edit_json(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

#[test]
fn missing_files_are_named() {
    for file in [
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "1_Pooling/config.json",
    ] {
        let model = copy("bert");
        std::fs::remove_file(model.path().join(file)).unwrap();
        let message = error(model.path()).to_string();
        assert!(message.contains(file.rsplit('/').next().unwrap()), "{message}");
    }
    assert!(matches!(
        error(Path::new("/nonexistent/model")),
        LoadError::NoDirectory(_)
    ));
    let sharded = copy("bert-sharded");
    let shard = std::fs::read_dir(sharded.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.path());
    let shard = shard
        .into_iter()
        .find(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .unwrap();
    std::fs::remove_file(&shard).unwrap();
    assert!(
        error(sharded.path())
            .to_string()
            .contains(shard.file_name().unwrap().to_str().unwrap())
    );
}

#[test]
fn pickled_weights_are_refused_with_the_reason() {
    let model = copy("bert");
    let weights = model.path().join("model.safetensors");
    std::fs::rename(&weights, model.path().join("pytorch_model.bin")).unwrap();
    let error = error(model.path());
    assert!(matches!(error, LoadError::PickledWeights { .. }));
    assert!(error.to_string().contains("safetensors") && error.to_string().contains("run code"));
}

#[test]
fn damaged_weights_are_refused_wherever_the_damage_is() {
    let whole = std::fs::read(fixture("bert").join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let cases: [(&str, Vec<u8>); 8] = [
        ("empty", Vec::new()),
        ("only a length", whole[..8].to_vec()),
        ("cut in the header", whole[..8 + header / 2].to_vec()),
        ("cut in the data", whole[..whole.len() - 100].to_vec()),
        ("too long", [&whole[..], &[0; 64]].concat()),
        (
            "a header of exabytes",
            [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat(),
        ),
        (
            "a header that is no JSON",
            [&whole[..8], &vec![b'x'; header][..], &whole[8 + header..]].concat(),
        ),
        ("a web page", b"<!DOCTYPE html><html>Not found</html>".to_vec()),
    ];
    for (case, content) in cases {
        let model = copy("bert");
        std::fs::write(model.path().join("model.safetensors"), content).unwrap();
        let error = error(model.path());
        assert!(matches!(error, LoadError::Malformed { .. }), "{case}: {error}");
    }
}

/// A damaged byte of the header is refused, or hits nothing that counts: then the vectors are the same.
#[tokio::test]
async fn no_damaged_byte_of_the_header_changes_what_is_computed() {
    let vector = async |model: LocalEmbedder| {
        let input = vec![EmbedInput::Text("the quick fox".to_owned())];
        model.embed(input, Role::Passage).await.unwrap().remove(0).vector
    };
    let expected = vector(embedder(&fixture("bert")).unwrap()).await;
    let model = copy("bert");
    let path = model.path().join("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let (mut refused, mut harmless) = (0, 0);
    for (step, at) in (0..8 + header).step_by(5).enumerate() {
        // Single bits, and a mask that turns digits and letters into something else.
        let damage = [0x01, 0x02, 0x11, 0x80][step % 4];
        let mut content = whole.clone();
        content[at] ^= damage;
        std::fs::write(&path, content).unwrap();
        match embedder(model.path()) {
            Ok(loaded) => {
                harmless += 1;
                assert_eq!(vector(loaded).await, expected, "byte {at} ^ {damage:#x}");
            }
            Err(error) => {
                refused += 1;
                assert!(
                    matches!(
                        error,
                        LoadError::Malformed { .. }
                            | LoadError::MissingTensor { .. }
                            | LoadError::WrongShape { .. }
                            | LoadError::Unsupported { .. }
                    ),
                    "byte {at} ^ {damage:#x}: {error}"
                );
            }
        }
    }
    // Names of tensors that an embedding model does not use, and the padding, may be damaged.
    assert!(refused > 10 * harmless, "{refused} refused, {harmless} harmless");
}

#[test]
fn numbers_that_are_not_finite_are_refused() {
    let model = copy("bert");
    edit(&model.path().join("model.safetensors"), |content| {
        // The first tensor by name, and so in the file, belongs to the embeddings and is read.
        let header = u64::from_le_bytes(content[..8].try_into().unwrap()) as usize;
        content[8 + header..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let message = error(model.path()).to_string();
    assert!(message.contains("not finite"), "{message}");
}

#[test]
fn a_configuration_that_does_not_fit_the_weights_is_refused() {
    // Each with what its message must name: the file and what is wrong in it, or the tensor.
    for (key, value, named) in [
        ("hidden_size", 64, vec!["1_Pooling/config.json", "32", "64"]),
        ("intermediate_size", 57, vec!["intermediate.dense.weight", "57"]),
        ("vocab_size", 9, vec!["word_embeddings.weight", "220", "9"]),
        ("num_hidden_layers", 3, vec!["layer.2.", "has no tensor"]),
        (
            "num_attention_heads",
            5,
            vec!["config.json", "32", "5 attention heads"],
        ),
        (
            "max_position_embeddings",
            0,
            vec!["config.json", "'max_position_embeddings'"],
        ),
        (
            "hidden_size",
            1_000_000_000,
            vec!["config.json", "'hidden_size'", "1000000000"],
        ),
    ] {
        let model = copy("bert");
        edit_json(&model.path().join("config.json"), |config| {
            assert_ne!(config[key], value, "the change would be none");
            config[key] = value.into();
        });
        let message = error(model.path()).to_string();
        for part in named {
            assert!(message.contains(part), "{key}: {value} gives {message}");
        }
    }
    let model = copy("bert");
    edit_json(&model.path().join("config.json"), |config| {
        config["hidden_size"] = 64.into();
    });
    edit_json(&model.path().join("1_Pooling/config.json"), |config| {
        config["word_embedding_dimension"] = 64.into();
    });
    assert!(matches!(error(model.path()), LoadError::WrongShape { .. }));
}

/// Memory for such sizes cannot be allocated: trying to would abort the process.
#[test]
fn sizes_are_compared_with_the_weights_before_anything_is_allocated() {
    for name in [
        "bert",
        "roberta",
        "distilbert",
        "mpnet",
        "cross-bert",
        "cross-distilbert",
    ] {
        for key in [
            "hidden_size",
            "intermediate_size",
            "vocab_size",
            "max_position_embeddings",
        ] {
            let model = copy(name);
            edit_json(&model.path().join("config.json"), |config| {
                let distilbert = match key {
                    "hidden_size" => "dim",
                    "intermediate_size" => "hidden_dim",
                    other => other,
                };
                let key = if config.get(key).is_some() {
                    key
                } else {
                    distilbert
                };
                assert!(config[key].is_u64(), "{name} has no {key}");
                config[key] = 10_000_000.into();
            });
            let pooling = model.path().join("1_Pooling/config.json");
            if key == "hidden_size" && pooling.exists() {
                edit_json(&pooling, |config| {
                    config["word_embedding_dimension"] = 10_000_000.into();
                });
            }
            let (loaded, inspected) = if name.starts_with("cross") {
                (
                    cross_encoder(model.path()).map(|_| ()),
                    inspect_cross_encoder(model.path()),
                )
            } else {
                (
                    embedder(model.path()).map(|_| ()),
                    inspect_embedder(model.path()).map(|_| ()),
                )
            };
            for outcome in [loaded, inspected] {
                let error = outcome.expect_err(key).to_string();
                assert!(error.contains("10000000"), "{name}, {key}: {error}");
            }
            let shown = cache::problem(model.path()).expect("`models show` reports the problem");
            assert!(shown.contains("10000000"), "{name}, {key}: {shown}");
        }
    }
    for (name, key, value) in [
        ("bert", "num_hidden_layers", 1_001),
        ("mpnet", "relative_attention_num_buckets", 1),
        ("mpnet", "relative_attention_num_buckets", 64),
    ] {
        let model = copy(name);
        edit_json(&model.path().join("config.json"), |config| {
            config[key] = value.into();
        });
        let message = error(model.path()).to_string();
        assert!(message.contains(&value.to_string()), "{message}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_name_with_what_is() {
    for (key, value, named) in [
        ("model_type", "qwen3", "qwen3"),
        ("hidden_act", "quick_gelu", "quick_gelu"),
        ("position_embedding_type", "relative_key", "relative_key"),
    ] {
        let model = copy("bert");
        edit_json(&model.path().join("config.json"), |config| {
            config[key] = value.into();
        });
        let error = error(model.path());
        assert!(matches!(&error, LoadError::Unsupported { .. }));
        assert!(
            error.to_string().contains(named) && error.to_string().contains("supported are"),
            "{error}"
        );
    }
    let model = copy("bert");
    edit_json(&model.path().join("modules.json"), |modules| {
        modules[2]["type"] = "sentence_transformers.models.LSTM".into();
    });
    assert!(error(model.path()).to_string().contains("LSTM"));
    let model = copy("bert");
    edit_json(&model.path().join("modules.json"), |modules| {
        modules[1]["path"] = "../../etc".into();
    });
    assert!(error(model.path()).to_string().contains("../../etc"));
}

#[test]
fn other_damaged_files_are_named() {
    let model = copy("bert");
    let prompts = r#"{"prompts": {"all": "text: "}, "default_prompt_name": "every"}"#;
    std::fs::write(model.path().join("config_sentence_transformers.json"), prompts).unwrap();
    let message = error(model.path()).to_string();
    assert!(
        message.contains("config_sentence_transformers.json") && message.contains("'every'"),
        "{message}"
    );
    for file in [
        "config.json",
        "tokenizer.json",
        "modules.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
    ] {
        let model = copy("bert");
        edit(&model.path().join(file), |content| {
            content.truncate(content.len() / 2);
        });
        let message = error(model.path()).to_string();
        assert!(message.contains(file) && message.contains("damaged"), "{message}");
    }
    let model = copy("bert-sharded");
    let index = model.path().join("model.safetensors.index.json");
    edit_json(&index, |index| {
        index["weight_map"] = serde_json::json!({"x": "../../../etc/passwd"});
    });
    assert!(error(model.path()).to_string().contains("../../../etc/passwd"));
}

/// The tokenizers library panics on such files.
#[tokio::test]
async fn a_tokenizer_of_the_wrong_form_is_an_error() {
    let model = copy("bert");
    edit_json(&model.path().join("tokenizer.json"), |tokenizer| {
        tokenizer["decoder"] = serde_json::json!(7);
    });
    let message = error(model.path()).to_string();
    assert!(message.contains("tokenizer.json"), "{message}");

    let model = copy("bert");
    edit_json(&model.path().join("tokenizer.json"), |tokenizer| {
        for part in tokenizer["post_processor"]["single"].as_array_mut().unwrap() {
            for (_, value) in part.as_object_mut().unwrap() {
                value["type_id"] = 9.into();
            }
        }
    });
    let input = vec![EmbedInput::Text("the quick fox".to_owned())];
    let failure = embedder(model.path())
        .unwrap()
        .embed(input, Role::Passage)
        .await
        .unwrap_err()
        .to_string();
    assert!(failure.contains("token type 9"), "{failure}");
}

/// The files are sparse, and none of their bytes is read.
#[test]
fn a_file_far_larger_than_any_model_has_is_refused() {
    for file in ["config.json", "tokenizer.json", "modules.json"] {
        let model = copy("bert");
        let path = model.path().join(file);
        let limit: u64 = 256 << 20;
        std::fs::File::create(&path).unwrap().set_len(limit + 1).unwrap();
        let message = error(model.path()).to_string();
        assert!(
            message.contains(file) && message.contains("larger than 256 MB"),
            "{message}"
        );
    }
}

/// A pipe without a writer would block forever.
#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused() {
    for file in ["config.json", "sentence_bert_config.json", "model.safetensors"] {
        let model = copy("bert");
        let path = model.path().join(file);
        std::fs::remove_file(&path).unwrap();
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        let message = error(model.path()).to_string();
        assert!(
            message.contains(file) && message.contains("not a regular file"),
            "{message}"
        );
    }
}

#[test]
fn only_models_with_one_score_are_rerankers() {
    let message = |name| match cross_encoder(&fixture(name)) {
        Ok(_) => panic!("{name} was loaded"),
        Err(error) => error.to_string(),
    };
    assert!(message("cross-two-labels").contains("2 labels"));
    assert!(message("bert").contains("no classification head"));
}
