//! Requirement: Cross-Encoder Model Discovery

use crate::support::{Setup, plain};

const MODELS: [&str; 3] = [
    "cross-encoder/ms-marco-MiniLM-L-6-v2",
    "BAAI/bge-reranker-base",
    "BAAI/bge-reranker-large",
];

#[test]
fn help_text_shows_model_examples() {
    let help = Setup::command(&["serve", "--help"]).run();
    let help = help.succeeded();
    let (_, about) = help
        .split_once("--cross-encoder <NAME>")
        .expect("the flag is described");
    let (about, _) = about
        .split_once("--cross-encoder-path")
        .expect("the next flag follows");
    for model in MODELS {
        let (_, example) = about
            .split_once(model)
            .unwrap_or_else(|| panic!("no {model} in: {about}"));
        let (example, _) = example.split_once(')').expect("size and use case in brackets");
        assert!(
            example.contains("MB") || example.contains("GB"),
            "no size: {example}"
        );
    }
    for use_case in ["fast", "recommended", "high-accuracy"] {
        assert!(
            about.to_lowercase().contains(use_case),
            "no {use_case} model in: {about}"
        );
    }
}

#[test]
fn list_available_models_command() {
    let list = Setup::command(&["serve", "--list-reranker-models"]).run();
    let text = list.succeeded();
    let mut from = 0;
    for (model, group) in MODELS.into_iter().zip(["fast", "recommended", "high-accuracy"]) {
        let lower = text.to_lowercase();
        let heading = lower[from..]
            .find(group)
            .unwrap_or_else(|| panic!("no group {group} in: {text}"));
        from += heading;
        assert!(
            text[from..].contains(model),
            "{model} is not under {group}: {text}"
        );
    }
    assert!(
        text.contains("https://huggingface.co/models?pipeline_tag=text-ranking"),
        "{text}"
    );
    assert!(
        text.to_lowercase().contains("any hugging face cross-encoder"),
        "{text}"
    );
    assert!(!list.stderr.contains("listening"), "it exits after the list");
}

#[tokio::test]
async fn startup_banner_when_no_model_specified() {
    let log = plain().await.log();
    assert!(log.contains("cross-encoder disabled"), "{log}");
    assert!(
        log.contains("--cross-encoder BAAI/bge-reranker-base"),
        "a hint with an example: {log}"
    );
    assert!(log.contains("--list-reranker-models"), "{log}");
}

#[test]
fn curated_list_includes_metadata() {
    let list = Setup::command(&["serve", "--list-reranker-models"]).run();
    let text = list.succeeded();
    for model in MODELS {
        let (_, entry) = text
            .split_once(model)
            .unwrap_or_else(|| panic!("no {model} in: {text}"));
        // Everything up to the next model belongs to this one.
        let end = MODELS
            .iter()
            .filter_map(|other| entry.find(other))
            .min()
            .unwrap_or(entry.len());
        let entry = &entry[..end];
        assert!(entry.contains("MB") || entry.contains("GB"), "no size: {entry}");
        assert!(
            entry.contains(" ms") || entry.contains(" s"),
            "no latency: {entry}"
        );
        assert!(
            entry.contains("10 documents") || text.contains("10 documents"),
            "latency of what: {entry}"
        );
        assert!(
            entry.to_lowercase().contains("accura") || text.to_lowercase().contains("accuracy"),
            "no tier: {entry}"
        );
    }
}
