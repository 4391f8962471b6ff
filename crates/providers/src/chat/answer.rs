//! Answers in the format of OpenAI, whole or in chunks.

use jiff::Timestamp;
use serde_json::{Value, json};

/// The text and the calls of an answer.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Said {
    pub(super) text: String,
    pub(super) calls: Vec<ToolCall>,
}

/// A call of a tool.
#[derive(Debug, PartialEq)]
pub(super) struct ToolCall {
    pub(super) id: String,
    pub(super) name: String,
    /// JSON, possibly incomplete.
    pub(super) arguments: String,
    /// Gemini's thought signature, which it requires back with the call.
    pub(super) signature: Option<String>,
}

impl ToolCall {
    fn to_json(&self) -> Value {
        let function = json!({"name": self.name, "arguments": self.arguments});
        let mut call = json!({"id": self.id, "type": "function", "function": function});
        if let Some(signature) = &self.signature {
            call["extra_content"] = json!({"google": {"thought_signature": signature}});
        }
        call
    }
}

/// The fields that all chunks of an answer share.
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

    pub(super) fn completion(&self, said: &Said, finish_reason: &str, usage: ChatUsage) -> Value {
        let mut message = json!({"role": "assistant", "content": said.text});
        if !said.calls.is_empty() {
            if said.text.is_empty() {
                message["content"] = Value::Null;
            }
            message["tool_calls"] = said.calls.iter().map(ToolCall::to_json).collect();
        }
        json!({
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model,
            "choices": [{
                "index": 0,
                "message": message,
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

    /// The call of this number, with the arguments received so far.
    pub(super) fn call_chunk(&self, number: usize, call: &ToolCall) -> Value {
        let mut begun = call.to_json();
        begun["index"] = number.into();
        self.chunk(json!([{"index": 0, "delta": {"tool_calls": [begun]}, "finish_reason": null}]))
    }

    pub(super) fn arguments_chunk(&self, number: usize, more: &str) -> Value {
        let call = json!({"index": number, "function": {"arguments": more}});
        self.chunk(json!([{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": null}]))
    }

    pub(super) fn last_chunk(&self, finish_reason: &str) -> Value {
        self.chunk(json!([{"index": 0, "delta": {}, "finish_reason": finish_reason}]))
    }

    pub(super) fn usage_chunk(&self, usage: ChatUsage) -> Value {
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
pub(super) struct ChatUsage {
    pub(super) prompt: u64,
    pub(super) completion: u64,
}

impl ChatUsage {
    fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        })
    }
}
