//! The options of an OpenAI request, field by field.

use ragstone_core::chat::ChatError;
use ragstone_core::error::InvalidInput;
use ragstone_core::{Metadata, collection::shorten};
use serde_json::{Value, json};

pub(super) fn refuse(message: impl Into<String>) -> ChatError {
    ChatError::Invalid(InvalidInput::new(message))
}

/// The settings that all providers support.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Sampling {
    pub(super) max_tokens: Option<u64>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) stop: Vec<String>,
    /// Fields that only some providers support.
    pub(super) others: Metadata,
}

/// Options that change the answer and cannot be dropped.
const ESSENTIAL: [&str; 8] = [
    "functions",
    "function_call",
    "web_search_options",
    "n",
    "logprobs",
    "top_logprobs",
    "modalities",
    "audio",
];

/// Reads the options of a request. Options in `also` are passed on. An option that the answer depends on
/// and the provider lacks is an error, unless it has no effect, such as `n: 1`. Unknown options and those
/// that only tune the answer are dropped.
pub(super) fn sampling(options: &Metadata, also: &[&str], provider: &str) -> Result<Sampling, ChatError> {
    let mut found = Sampling::default();
    for (name, value) in options {
        if has_no_effect(name, value) {
            continue;
        }
        match name.as_str() {
            "max_tokens" | "max_completion_tokens" => {
                found.max_tokens = Some(value.as_u64().ok_or_else(|| wrong(name, "a whole number"))?);
            }
            "temperature" => found.temperature = Some(number(name, value)?),
            "top_p" => found.top_p = Some(number(name, value)?),
            "stop" => found.stop = texts(name, value)?,
            known if also.contains(&known) => {
                found.others.insert(name.clone(), value.clone());
            }
            essential if ESSENTIAL.contains(&essential) => {
                return Err(refuse(format!(
                    "'{essential}' is not supported by provider '{provider}'"
                )));
            }
            _ => tracing::debug!(option = %shorten(name), provider, "dropping an option of a chat"),
        }
    }
    Ok(found)
}

fn has_no_effect(name: &str, value: &Value) -> bool {
    match name {
        // Delivery is handled here, and the rest is bookkeeping.
        "stream" | "stream_options" | "user" | "metadata" | "store" | "service_tier" => true,
        // Read elsewhere.
        "tools" | "tool_choice" | "parallel_tool_calls" | "response_format" => true,
        _ if value.is_null() => true,
        "n" => *value == 1,
        "logprobs" => *value == false,
        "top_logprobs" => *value == 0,
        "modalities" => *value == json!(["text"]),
        "function_call" => value == "none" || value == "auto",
        "functions" => value.as_array().is_some_and(Vec::is_empty),
        _ => false,
    }
}

pub(super) fn wrong(name: &str, expected: &str) -> ChatError {
    refuse(format!("'{name}' must be {expected}"))
}

fn number(name: &str, value: &Value) -> Result<f64, ChatError> {
    value.as_f64().ok_or_else(|| wrong(name, "a number"))
}

fn texts(name: &str, value: &Value) -> Result<Vec<String>, ChatError> {
    let expected = || wrong(name, "a string or a list of strings");
    match value {
        Value::String(text) => Ok(vec![text.clone()]),
        Value::Array(items) => items
            .iter()
            .map(|item| item.as_str().map(str::to_owned).ok_or_else(expected))
            .collect(),
        _ => Err(expected()),
    }
}

/// Whether the caller asked for the usage at the end of a stream.
pub(super) fn wants_usage(options: &Metadata) -> bool {
    options
        .get("stream_options")
        .and_then(|o| o.get("include_usage"))
        .is_some_and(|wanted| *wanted == true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_translated_is_refused_by_name() {
        let options = |value: Value| match value {
            Value::Object(options) => options,
            _ => unreachable!("tests give objects"),
        };
        for (given, named) in [
            (json!({"functions": [{"name": "f"}]}), "'functions'"),
            (json!({"function_call": {"name": "f"}}), "'function_call'"),
            (json!({"n": 2}), "'n'"),
            (json!({"modalities": ["text", "audio"]}), "'modalities'"),
            (json!({"temperature": "hot"}), "'temperature'"),
            (json!({"stop": [1]}), "'stop'"),
            (json!({"max_tokens": -1}), "'max_tokens'"),
        ] {
            let error = sampling(&options(given), &[], "p").unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn options_that_ask_for_nothing_only_tune_or_are_unknown_are_left_out() {
        let Value::Object(options) = json!({"tools": [], "user": "ann", "stream": true,
            "presence_penalty": 1, "seed": 3, "reasoning_effort": "low", "modalities": ["text"], "n": null,
            "parallel_tool_calls": true, "never_heard_of": {"a": 1}, "stop": "END", "max_completion_tokens": 5})
        else {
            unreachable!("this is an object")
        };
        let found = sampling(&options, &[], "p").unwrap();
        assert_eq!(
            (found.stop.as_slice(), found.max_tokens),
            (&["END".to_owned()][..], Some(5))
        );
    }
}
