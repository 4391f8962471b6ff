//! The Messages API of Anthropic.

use async_trait::async_trait;
use futures::StreamExt;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use serde_json::{Value, json};

use super::translate::{self, AnswerHead, Speaker, Usage, refuse};
use super::{Delivery, sse};
use crate::http::{Call, ServiceClient};

const API_VERSION: &str = "2023-06-01";
/// The API wants a limit with every request; this is for callers who give none.
const DEFAULT_MAX_TOKENS: u64 = 4096;

#[derive(Debug)]
pub(super) struct AnthropicChat {
    pub(super) client: ServiceClient,
    pub(super) model: String,
}

impl AnthropicChat {
    fn call(&self, request: &ChatRequest, delivery: Delivery) -> Result<Call, ChatError> {
        let provider = self.client.service();
        let sampling = translate::sampling(request.options(), &[], provider)?;
        if sampling.temperature.is_some_and(|t| t > 1.0) {
            return Err(refuse(format!(
                "'temperature' must be at most 1 for provider '{provider}'"
            )));
        }
        let turns = translate::turns(request, provider)?;
        let messages: Vec<Value> = turns
            .turns
            .iter()
            .map(|(speaker, text)| {
                let role = match speaker {
                    Speaker::User => "user",
                    Speaker::Assistant => "assistant",
                };
                json!({"role": role, "content": text})
            })
            .collect();
        let mut body = json!({
            "model": request.model.as_ref().unwrap_or(&self.model),
            "messages": messages,
            "max_tokens": sampling.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
            "stream": delivery == Delivery::Streamed,
        });
        if !turns.system.is_empty() {
            body["system"] = turns.system.into();
        }
        if let Some(temperature) = sampling.temperature {
            body["temperature"] = temperature.into();
        }
        if let Some(top_p) = sampling.top_p {
            body["top_p"] = top_p.into();
        }
        if !sampling.stop.is_empty() {
            body["stop_sequences"] = sampling.stop.into();
        }
        Ok(Call::post("messages")
            .header("anthropic-version", API_VERSION)
            .json(&body))
    }
}

fn finish_reason(stop_reason: Option<&str>) -> &'static str {
    match stop_reason {
        Some("max_tokens" | "model_context_window_exceeded") => "length",
        Some("refusal") => "content_filter",
        _ => "stop",
    }
}

fn text(value: &Value, path: &str) -> String {
    value
        .pointer(path)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

fn count(value: &Value, path: &str) -> Option<u64> {
    value.pointer(path).and_then(Value::as_u64)
}

#[async_trait]
impl ChatModel for AnthropicChat {
    fn provider(&self) -> &str {
        self.client.service()
    }

    fn model(&self) -> &str {
        &self.model
    }

    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        let answer: Value = self
            .client
            .call_json(self.call(&request, Delivery::Whole)?)
            .await?;
        let parts = answer
            .get("content")
            .and_then(Value::as_array)
            .ok_or_else(|| self.client.bad_answer("it has no 'content'"))?;
        let said: String = parts
            .iter()
            .filter_map(|part| part.get("text").and_then(Value::as_str))
            .collect();
        let usage = Usage {
            prompt: count(&answer, "/usage/input_tokens").unwrap_or(0),
            completion: count(&answer, "/usage/output_tokens").unwrap_or(0),
        };
        let head = AnswerHead::new(&text(&answer, "/id"), &text(&answer, "/model"));
        let reason = finish_reason(answer.get("stop_reason").and_then(Value::as_str));
        Ok(head.completion(&said, reason, usage))
    }

    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        let bytes = self.client.open(self.call(&request, Delivery::Streamed)?).await?;
        let mut progress = Progress {
            head: AnswerHead::new("", request.model.as_deref().unwrap_or(&self.model)),
            usage: Usage::default(),
            wants_usage: translate::wants_usage(request.options()),
            ended: false,
            client: self.client.clone(),
        };
        let events = sse::events(bytes, self.client.clone())
            .map(Some)
            .chain(futures::stream::once(async { None }));
        Ok(sse::until_error(events.flat_map(move |event| {
            futures::stream::iter(match event {
                Some(Ok(event)) => progress.chunks(&event),
                Some(Err(error)) => vec![Err(error)],
                None => progress.end(),
            })
        })))
    }
}

/// What is known of an answer while it streams in.
struct Progress {
    head: AnswerHead,
    usage: Usage,
    wants_usage: bool,
    ended: bool,
    client: ServiceClient,
}

type Chunks = Vec<Result<Value, ChatError>>;

impl Progress {
    fn chunks(&mut self, event: &sse::Event) -> Chunks {
        let data = match sse::json(&self.client, event) {
            Ok(data) => data,
            Err(error) => return vec![Err(error)],
        };
        match text(&data, "/type").as_str() {
            "message_start" => {
                self.head = AnswerHead::new(&text(&data, "/message/id"), &text(&data, "/message/model"));
                self.usage.prompt = count(&data, "/message/usage/input_tokens").unwrap_or(0);
                vec![Ok(self.head.first_chunk())]
            }
            "content_block_delta" => match data.pointer("/delta/text").and_then(Value::as_str) {
                Some(said) => vec![Ok(self.head.text_chunk(said))],
                None => Vec::new(),
            },
            "message_delta" => {
                if let Some(tokens) = count(&data, "/usage/output_tokens") {
                    self.usage.completion = tokens;
                }
                let reason = data.pointer("/delta/stop_reason").and_then(Value::as_str);
                match reason {
                    Some(_) => vec![Ok(self.head.last_chunk(finish_reason(reason)))],
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
