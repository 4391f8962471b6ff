//! Any text is either refused or a filter, and a filter keeps the laws of logic on any metadata.
//!
//! The input is a filter and, after the first line break, metadata to try it on.

#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use ragstone_core::document::Metadata;
use ragstone_core::filter::{Filter, MAX_DEPTH};
use serde_json::{Value, json};

fuzz_target!(|input: &str| -> Corpus {
    let (text, metadata) = input.split_once('\n').unwrap_or((input, "{}"));
    let filter = match Filter::parse_text(text) {
        Ok(filter) => filter,
        Err(refusal) => {
            assert!(
                refusal.message().starts_with("Invalid 'where' filter: "),
                "{refusal}"
            );
            assert!(
                refusal.message().len() < 2000,
                "a refusal must not echo everything it was sent"
            );
            return Corpus::Keep;
        }
    };
    let value: Value = serde_json::from_str(text).expect("what was parsed as a filter is JSON");
    assert_eq!(
        Filter::parse(&value).as_ref(),
        Ok(&filter),
        "text and value mean the same"
    );
    let Ok(metadata) = serde_json::from_str::<Metadata>(metadata) else {
        return Corpus::Reject;
    };
    check_laws(&filter, &value, &metadata);
    check_laws(&filter, &value, &Metadata::new());
    Corpus::Keep
});

/// `not` turns the answer round; `and` and `or` of a filter with itself change nothing.
fn check_laws(filter: &Filter, value: &Value, metadata: &Metadata) {
    let answer = filter.matches(metadata);
    if filter.is_everything() {
        assert!(answer);
    }
    if value.is_null() {
        return;
    }
    for (wrapped, expected) in [
        (json!({"$not": value}), !answer),
        (json!({"$and": [value, value]}), answer),
        (json!({"$or": [value, value]}), answer),
        (json!({"$not": {"$not": value}}), answer),
    ] {
        match Filter::parse(&wrapped) {
            Ok(filter) => assert_eq!(filter.matches(metadata), expected, "{wrapped} on {metadata:?}"),
            // Wrapping adds nodes and depth, and may pass a limit that the filter alone kept.
            Err(refusal) => {
                let message = refusal.message();
                let limit =
                    message.contains("conditions") || message.contains(&format!("{MAX_DEPTH} levels"));
                assert!(limit, "{message}");
            }
        }
    }
}
