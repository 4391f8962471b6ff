//! Services with the OpenAI chat protocol: requests and answers pass through unchanged.

use async_trait::async_trait;
use futures::StreamExt;
use ragstone_core::chat::{ChatError, ChatModel, ChatRequest, ChatStream};
use serde_json::Value;

use super::{Delivery, sse};
use crate::http::{Call, ServiceClient};

#[derive(Debug)]
pub(super) struct OpenAiChat {
    pub(super) client: ServiceClient,
    pub(super) model: String,
}

impl OpenAiChat {
    fn call(&self, request: &ChatRequest, delivery: Delivery) -> Call {
        let stream = delivery == Delivery::Streamed;
        let says_so = stream || request.options().contains_key("stream");
        super::paid("chat/completions").json(&request.body(&self.model, says_so.then_some(stream)))
    }
}

#[async_trait]
impl ChatModel for OpenAiChat {
    fn provider(&self) -> &str {
        self.client.service()
    }

    fn model(&self) -> &str {
        &self.model
    }

    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError> {
        let answer: Value = self
            .client
            .call_json(self.call(&request, Delivery::Whole))
            .await?;
        if !answer.get("choices").is_some_and(Value::is_array) {
            return Err(self.client.bad_answer("it has no 'choices'").into());
        }
        Ok(answer)
    }

    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError> {
        let bytes = self.client.open(self.call(&request, Delivery::Streamed)).await?;
        let client = self.client.clone();
        let mut finished = false;
        let events = sse::events(bytes, client.clone());
        // Not every service ends with `[DONE]`, but all send a finish reason.
        let end = sse::Event {
            name: String::new(),
            data: String::new(),
        };
        let chunks = events
            .chain(futures::stream::once(async move { Ok(end) }))
            .map(move |event| {
                let event = event?;
                if event.data == "[DONE]" {
                    finished = true;
                    return Ok(None);
                }
                if event.data.is_empty() {
                    return match finished {
                        true => Ok(None),
                        false => Err(client.bad_answer("the stream ended before the answer did").into()),
                    };
                }
                let chunk: Value = sse::json(&client, &event)?;
                if let Some(message) = sse::error_in(&chunk) {
                    return Err(client.bad_answer(message).into());
                }
                finished |= chunk
                    .pointer("/choices/0/finish_reason")
                    .is_some_and(Value::is_string);
                Ok(Some(chunk))
            })
            .filter_map(async |chunk: Result<Option<Value>, ChatError>| chunk.transpose());
        Ok(sse::until_error(chunks))
    }
}
