//! Requirement: Cross-Encoder Model Discovery

use crate::support::{Setup, plain};

/// A model of each use case, in the order of the list.
const MODELS: [(&str, &str); 3] = [
    ("cross-encoder/ms-marco-MiniLM-L-6-v2", "fast"),
    ("BAAI/bge-reranker-base", "recommended"),
    ("BAAI/bge-reranker-large", "high-accuracy"),
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
    for (model, use_case) in MODELS {
        let (_, example) = about
            .split_once(model)
            .unwrap_or_else(|| panic!("no {model} in: {about}"));
        let (example, _) = example
            .trim_start()
            .trim_start_matches('(')
            .split_once(')')
            .expect("size and use case in brackets");
        assert!(
            has_quantity(example, &["MB", "GB"]),
            "{model} is shown without a size: {example}"
        );
        assert!(
            example.contains(use_case),
            "{model} is not shown as {use_case}: {example}"
        );
    }
}

#[test]
fn list_available_models_command() {
    let list = Setup::command(&["serve", "--list-reranker-models"]).run();
    let text = list.succeeded();
    for (model, use_case) in MODELS {
        let (_, group) = text
            .split_once(&format!("\n{use_case}\n"))
            .unwrap_or_else(|| panic!("no group {use_case} in: {text}"));
        let (group, _) = group.split_once("\n\n").expect("a blank line ends a group");
        assert!(group.contains(model), "{model} is not under {use_case}: {text}");
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
    for (model, _) in MODELS {
        let (_, entry) = text
            .split_once(model)
            .unwrap_or_else(|| panic!("no {model} in: {text}"));
        // An entry ends where the next model starts.
        let end = MODELS
            .iter()
            .filter_map(|(other, _)| entry.find(other))
            .min()
            .unwrap_or(entry.len());
        let entry = &entry[..end];
        assert!(
            has_quantity(entry, &["MB", "GB"]),
            "{model} is listed without a size: {entry}"
        );
        assert!(
            entry
                .split_once(" for 10 documents")
                .is_some_and(|(latency, _)| has_quantity(latency, &["ms", "s"])),
            "{model} is listed without a latency for 10 documents: {entry}"
        );
        let tier = entry.split_once("accuracy: ").map(|(_, tier)| tier);
        let (tier, _) = tier
            .unwrap_or_else(|| panic!("{model} is listed without an accuracy tier: {entry}"))
            .split_once('\n')
            .expect("an entry is one line");
        assert!(
            ["good", "high", "very high"]
                .iter()
                .any(|name| tier.starts_with(name)),
            "{model} has the tier {tier:?}"
        );
    }
}

/// Whether the text contains a number followed by one of these units.
fn has_quantity(text: &str, units: &[&str]) -> bool {
    let words: Vec<&str> = text.split_whitespace().collect();
    words.windows(2).any(|pair| {
        pair[0].trim_start_matches('~').parse::<f64>().is_ok()
            && units.contains(&pair[1].trim_end_matches(','))
    })
}
