//! What the translating providers share: reading an OpenAI request field by field, and writing an
//! OpenAI answer.

use jiff::Timestamp;
use ragstone_core::chat::{ChatError, ChatRequest, Message};
use ragstone_core::error::InvalidInput;
use ragstone_core::{Metadata, collection::shorten};
use serde_json::{Value, json};

pub(super) fn refuse(message: impl Into<String>) -> ChatError {
    ChatError::Invalid(InvalidInput::new(message))
}

/// The settings of a request that all providers have a word for.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Sampling {
    pub(super) max_tokens: Option<u64>,
    pub(super) temperature: Option<f64>,
    pub(super) top_p: Option<f64>,
    pub(super) stop: Vec<String>,
    /// Fields that only some providers know, with their values.
    pub(super) others: Metadata,
}

/// Options without which the answer would be another one than was asked for.
const NEEDED: [&str; 11] = [
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "web_search_options",
    "n",
    "response_format",
    "logprobs",
    "top_logprobs",
    "modalities",
    "audio",
];

/// Reads the options of a request. Those in `also` are handed on. What the provider cannot do and the
/// answer depends on is refused by name, unless it asks for nothing, such as `n: 1` or an empty list of
/// tools; what only tunes, or is not known, is left out.
pub(super) fn sampling(options: &Metadata, also: &[&str], provider: &str) -> Result<Sampling, ChatError> {
    let mut found = Sampling::default();
    for (name, value) in options {
        if asks_for_nothing(name, value) {
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
            needed if NEEDED.contains(&needed) => {
                return Err(refuse(format!(
                    "'{needed}' cannot be passed on to provider '{provider}'"
                )));
            }
            _ => tracing::debug!(option = %shorten(name), provider, "an option of a chat is left out"),
        }
    }
    Ok(found)
}

fn asks_for_nothing(name: &str, value: &Value) -> bool {
    match name {
        // How the answer is delivered is not the provider's business; the rest is bookkeeping.
        "stream" | "stream_options" | "user" | "metadata" | "store" | "service_tier" => true,
        _ if value.is_null() => true,
        "n" => *value == 1,
        "logprobs" => *value == false,
        "top_logprobs" => *value == 0,
        "response_format" => value.get("type").is_some_and(|kind| kind == "text"),
        "modalities" => *value == json!(["text"]),
        "tool_choice" | "function_call" => value == "none" || value == "auto",
        "tools" | "functions" => value.as_array().is_some_and(Vec::is_empty),
        _ => false,
    }
}

fn wrong(name: &str, expected: &str) -> ChatError {
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

/// The turns of a conversation: the system text apart, and user and assistant turns in which
/// neighbours of the same role are joined, as the APIs want them to alternate.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Turns {
    pub(super) system: String,
    pub(super) turns: Vec<(Speaker, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaker {
    User,
    Assistant,
}

pub(super) fn turns(request: &ChatRequest, provider: &str) -> Result<Turns, ChatError> {
    let mut found = Turns::default();
    for (index, message) in request.messages.iter().enumerate() {
        let text = plain_text(message, index, provider)?;
        let speaker = match message.role() {
            "system" | "developer" => {
                append(&mut found.system, &text);
                continue;
            }
            "user" => Speaker::User,
            "assistant" => Speaker::Assistant,
            other => {
                return Err(refuse(format!(
                    "Message at index {index} has the role '{}', which cannot be passed on to provider '{provider}'",
                    shorten(other)
                )));
            }
        };
        match found.turns.last_mut() {
            Some((last, joined)) if *last == speaker => append(joined, &text),
            _ => found.turns.push((speaker, text)),
        }
    }
    if found.turns.is_empty() {
        return Err(refuse("'messages' needs at least one message of the user"));
    }
    Ok(found)
}

fn append(text: &mut String, more: &str) {
    if !text.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

/// Text is all that is translated; an image or a tool call is refused rather than left out.
fn plain_text(message: &Message, index: usize, provider: &str) -> Result<String, ChatError> {
    let fields = message.fields();
    let only_text = match fields.get("content") {
        Some(Value::Array(parts)) => parts
            .iter()
            .all(|part| part.get("text").is_some_and(Value::is_string)),
        Some(Value::String(_) | Value::Null) | None => true,
        Some(_) => false,
    };
    let calls = ["tool_calls", "function_call", "audio"]
        .iter()
        .any(|field| fields.get(*field).is_some_and(|value| !value.is_null()));
    if only_text && !calls {
        return Ok(message.text());
    }
    Err(refuse(format!(
        "Message at index {index} has content other than text, which cannot be passed on to provider '{provider}'"
    )))
}

/// What identifies one answer in all its chunks.
#[derive(Debug, Clone)]
pub(super) struct AnswerHead {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) created: i64,
}

impl AnswerHead {
    pub(super) fn new(id: &str, model: &str) -> Self {
        let created = Timestamp::now();
        Self {
            id: if id.is_empty() {
                format!("chatcmpl-{:x}", created.as_nanosecond())
            } else {
                id.to_owned()
            },
            model: model.to_owned(),
            created: created.as_second(),
        }
    }

    pub(super) fn completion(&self, text: &str, finish_reason: &str, usage: Usage) -> Value {
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
            }],
            "usage": usage.to_json(),
        })
    }

    pub(super) fn first_chunk(&self) -> Value {
        self.chunk(
            json!([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]),
        )
    }

    pub(super) fn text_chunk(&self, text: &str) -> Value {
        self.chunk(json!([{"index": 0, "delta": {"content": text}, "finish_reason": null}]))
    }

    pub(super) fn last_chunk(&self, finish_reason: &str) -> Value {
        self.chunk(json!([{"index": 0, "delta": {}, "finish_reason": finish_reason}]))
    }

    pub(super) fn usage_chunk(&self, usage: Usage) -> Value {
        let mut chunk = self.chunk(json!([]));
        chunk["usage"] = usage.to_json();
        chunk
    }

    fn chunk(&self, choices: Value) -> Value {
        json!({
            "id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model,
            "choices": choices,
        })
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: u64,
    pub(super) completion: u64,
}

impl Usage {
    fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        })
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

    fn request(body: Value) -> ChatRequest {
        match body {
            Value::Object(body) => ChatRequest::from_json(body).unwrap(),
            _ => unreachable!("tests send objects"),
        }
    }

    #[test]
    fn neighbours_of_one_role_are_joined_and_system_texts_gathered() {
        let request = request(json!({"messages": [
            {"role": "system", "content": "a"}, {"role": "user", "content": "b"},
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "developer", "content": "d"}, {"role": "assistant", "content": "e"}]}));
        let found = turns(&request, "p").unwrap();
        assert_eq!(found.system, "a\n\nd");
        assert_eq!(
            found.turns,
            [
                (Speaker::User, "b\n\nc".to_owned()),
                (Speaker::Assistant, "e".to_owned())
            ]
        );
    }

    #[test]
    fn what_cannot_be_translated_is_refused_by_name() {
        let options = |value: Value| match value {
            Value::Object(options) => options,
            _ => unreachable!("tests give objects"),
        };
        for (given, named) in [
            (json!({"tools": [{"type": "function"}]}), "'tools'"),
            (json!({"n": 2}), "'n'"),
            (json!({"modalities": ["text", "audio"]}), "'modalities'"),
            (json!({"tool_choice": "required"}), "'tool_choice'"),
            (
                json!({"response_format": {"type": "json_object"}}),
                "'response_format'",
            ),
            (json!({"temperature": "hot"}), "'temperature'"),
            (json!({"stop": [1]}), "'stop'"),
            (json!({"max_tokens": -1}), "'max_tokens'"),
        ] {
            let error = sampling(&options(given), &[], "p").unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
        for message in [
            json!({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}),
            json!({"role": "tool", "content": "x"}),
        ] {
            assert!(turns(&request(json!({"messages": [message]})), "p").is_err());
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
