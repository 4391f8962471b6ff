//! Streamed answers of the Messages API.

use std::collections::HashMap;

use futures::StreamExt;
use ragstone_core::chat::{ChatError, ChatStream};
use serde_json::Value;

use super::super::answer::{AnswerHead, ChatUsage, ToolCall};
use super::super::sse;
use super::{count, finish_reason, text};
use crate::http::{ByteStream, ServiceClient};

pub(super) fn chunks(bytes: ByteStream, mut progress: StreamProgress) -> ChatStream {
    let events = sse::events(bytes, progress.client.clone())
        .map(Some)
        .chain(futures::stream::once(async { None }));
    sse::until_error(events.flat_map(move |event| {
        futures::stream::iter(match event {
            Some(Ok(event)) => progress.chunks(&event),
            Some(Err(error)) => vec![Err(error)],
            None => progress.end(),
        })
    }))
}

/// The state of an answer while it is read.
pub(super) struct StreamProgress {
    client: ServiceClient,
    head: AnswerHead,
    usage: ChatUsage,
    wants_usage: bool,
    /// The tool whose arguments are the answer.
    answer_tool: Option<String>,
    /// Text that is the answer only if that tool is not called.
    held_back: String,
    /// By the index of the API.
    blocks: HashMap<u64, StreamBlock>,
    calls: usize,
    answered: bool,
    ended: bool,
}

/// A call that is being read.
struct StreamBlock {
    /// Its number in this answer; `None` for the answer tool.
    call: Option<usize>,
    /// No arguments have been received yet.
    bare: bool,
}

type Chunks = Vec<Result<Value, ChatError>>;

impl StreamProgress {
    pub(super) fn new(
        client: ServiceClient,
        model: &str,
        answer_tool: Option<String>,
        wants_usage: bool,
    ) -> Self {
        Self {
            client,
            head: AnswerHead::new("", model),
            usage: ChatUsage::default(),
            wants_usage,
            answer_tool,
            held_back: String::new(),
            blocks: HashMap::new(),
            calls: 0,
            answered: false,
            ended: false,
        }
    }

    fn chunks(&mut self, event: &sse::Event) -> Chunks {
        let data: Value = match sse::json(&self.client, event) {
            Ok(data) => data,
            Err(error) => return vec![Err(error)],
        };
        let index = count(&data, "/index").unwrap_or(0);
        match text(&data, "/type").as_str() {
            "message_start" => {
                self.head = AnswerHead::new(&text(&data, "/message/id"), &text(&data, "/message/model"));
                self.usage.prompt = count(&data, "/message/usage/input_tokens").unwrap_or(0);
                vec![Ok(self.head.first_chunk())]
            }
            "content_block_start" => self.begin(index, &data),
            "content_block_delta" => self.go_on(index, &data),
            "content_block_stop" => match self.blocks.remove(&index).filter(|block| block.bare) {
                Some(block) => vec![Ok(self.arguments(block.call, "{}"))],
                None => Vec::new(),
            },
            "message_delta" => {
                if let Some(tokens) = count(&data, "/usage/output_tokens") {
                    self.usage.completion = tokens;
                }
                match data.pointer("/delta/stop_reason").and_then(Value::as_str) {
                    Some(reason) => self.finish(reason),
                    None => Vec::new(),
                }
            }
            "message_stop" => {
                self.ended = true;
                match self.wants_usage {
                    true => vec![Ok(self.head.usage_chunk(self.usage))],
                    false => Vec::new(),
                }
            }
            "error" => vec![Err(self
                .client
                .bad_answer(sse::error_in(&data).unwrap_or_default())
                .into())],
            _ => Vec::new(),
        }
    }

    fn begin(&mut self, index: u64, data: &Value) -> Chunks {
        if text(data, "/content_block/type") != "tool_use" {
            return Vec::new();
        }
        let name = text(data, "/content_block/name");
        let is_answer = self.answer_tool.as_ref() == Some(&name);
        if is_answer && self.answered {
            // Only the first answer counts.
            return Vec::new();
        }
        self.answered |= is_answer;
        let call = (!is_answer).then_some(self.calls);
        self.blocks.insert(index, StreamBlock { call, bare: true });
        let Some(number) = call else {
            return Vec::new();
        };
        self.calls += 1;
        let call = ToolCall {
            id: text(data, "/content_block/id"),
            name,
            arguments: String::new(),
            signature: None,
        };
        vec![Ok(self.head.call_chunk(number, &call))]
    }

    fn go_on(&mut self, index: u64, data: &Value) -> Chunks {
        if let Some(more) = data.pointer("/delta/partial_json").and_then(Value::as_str) {
            let Some(block) = self.blocks.get_mut(&index).filter(|_| !more.is_empty()) else {
                return Vec::new();
            };
            block.bare = false;
            let call = block.call;
            return vec![Ok(self.arguments(call, more))];
        }
        match data.pointer("/delta/text").and_then(Value::as_str) {
            Some(said) if self.answer_tool.is_some() => {
                self.held_back.push_str(said);
                Vec::new()
            }
            Some(said) => vec![Ok(self.head.text_chunk(said))],
            None => Vec::new(),
        }
    }

    fn arguments(&self, call: Option<usize>, more: &str) -> Value {
        match call {
            Some(number) => self.head.arguments_chunk(number, more),
            None => self.head.text_chunk(more),
        }
    }

    fn finish(&mut self, reason: &str) -> Chunks {
        let mut chunks = Vec::new();
        if !self.answered && !self.held_back.is_empty() {
            chunks.push(Ok(self.head.text_chunk(&self.held_back)));
        }
        chunks.push(Ok(self.head.last_chunk(finish_reason(Some(reason), self.calls))));
        chunks
    }

    fn end(&self) -> Chunks {
        match self.ended {
            true => Vec::new(),
            false => vec![Err(self
                .client
                .bad_answer("the stream ended before the answer did")
                .into())],
        }
    }
}
