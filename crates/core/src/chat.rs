//! What callers rely on from a chat model, wherever it runs.
//!
//! The shapes are those of the OpenAI chat API: requests and answers stay JSON, so that fields this
//! program knows nothing of reach a provider that does. Only what is read or changed on the way has
//! a name here.

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde_json::{Value, json};

use crate::document::Metadata;
use crate::error::InvalidInput;
use crate::provider::CallError;

/// A model that continues a conversation.
#[async_trait]
pub trait ChatModel: Send + Sync {
    /// The id of the provider it is reached through, for logs and errors.
    fn provider(&self) -> &str;

    /// The model that is used where a request names none.
    fn model(&self) -> &str;

    /// The whole answer, a `chat.completion` object.
    async fn complete(&self, request: ChatRequest) -> Result<Value, ChatError>;

    /// The answer as it is made, as `chat.completion.chunk` objects; the stream ends after the last
    /// one. Dropping it cancels the request. An error before the first chunk is the outer one.
    async fn stream(&self, request: ChatRequest) -> Result<ChatStream, ChatError>;
}

pub type ChatStream = BoxStream<'static, Result<Value, ChatError>>;

#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest {
    /// The model the caller asked for.
    pub model: Option<String>,
    pub messages: Vec<Message>,
    /// Every other field of the request, as the caller sent it.
    pub options: Metadata,
}

/// One message: a JSON object with a `role`, kept as it was sent.
#[derive(Debug, Clone, PartialEq)]
pub struct Message(Metadata);

impl ChatRequest {
    pub fn new(messages: Vec<Message>) -> Self {
        Self {
            model: None,
            messages,
            options: Metadata::new(),
        }
    }

    pub fn from_json(mut body: Metadata) -> Result<Self, InvalidInput> {
        let model = match body.remove("model") {
            None | Some(Value::Null) => None,
            Some(Value::String(model)) => Some(model).filter(|name| !name.is_empty()),
            Some(_) => return Err(InvalidInput::new("'model' must be a string")),
        };
        let messages = match body.remove("messages") {
            Some(Value::Array(messages)) if !messages.is_empty() => messages,
            Some(Value::Array(_)) | None => return Err(InvalidInput::new("'messages' is required")),
            Some(_) => return Err(InvalidInput::new("'messages' must be a list")),
        };
        let messages = messages
            .into_iter()
            .enumerate()
            .map(|(index, message)| Message::from_json(message, index))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            model,
            messages,
            options: body,
        })
    }

    /// The body of an OpenAI chat request, with `model` where the request names none.
    pub fn into_json(self, model: &str) -> Metadata {
        let mut body = self.options;
        let model = self.model.unwrap_or_else(|| model.to_owned());
        body.insert("model".into(), Value::String(model));
        let messages = self.messages.into_iter().map(|m| Value::Object(m.0)).collect();
        body.insert("messages".into(), Value::Array(messages));
        body
    }

    /// What the user asked last, for retrieval.
    pub fn last_user_text(&self) -> Option<String> {
        self.messages
            .iter()
            .rev()
            .find(|message| message.role() == "user")
            .map(Message::text)
            .filter(|text| !text.trim().is_empty())
    }

    /// Puts a section into the system prompt, after the caller's own system text.
    pub fn append_to_system(&mut self, section: &str) {
        match self.messages.iter_mut().rev().find(|message| message.is_system()) {
            Some(message) => message.append_text(section),
            None => self.messages.insert(0, Message::new("system", section)),
        }
    }
}

impl Message {
    pub fn new(role: &str, text: &str) -> Self {
        let mut fields = Metadata::new();
        fields.insert("role".into(), role.into());
        fields.insert("content".into(), text.into());
        Self(fields)
    }

    fn from_json(message: Value, index: usize) -> Result<Self, InvalidInput> {
        match message {
            Value::Object(fields) if fields.get("role").is_some_and(Value::is_string) => Ok(Self(fields)),
            _ => Err(InvalidInput::new(format!(
                "Message at index {index} must be an object with a 'role'"
            ))),
        }
    }

    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    pub fn is_system(&self) -> bool {
        matches!(self.role(), "system" | "developer")
    }

    pub fn fields(&self) -> &Metadata {
        &self.0
    }

    /// Its text, with the texts of several parts joined by newlines; parts of another kind are left out.
    pub fn text(&self) -> String {
        match self.0.get("content") {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => parts
                .iter()
                .filter_map(|part| part.get("text")?.as_str())
                .collect::<Vec<_>>()
                .join("\n"),
            _ => String::new(),
        }
    }

    fn append_text(&mut self, section: &str) {
        match self.0.get_mut("content") {
            Some(Value::Array(parts)) => parts.push(json!({"type": "text", "text": section})),
            Some(Value::String(text)) if !text.is_empty() => {
                text.push_str("\n\n");
                text.push_str(section);
            }
            _ => {
                self.0.insert("content".into(), section.into());
            }
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The request asks for what this provider cannot do, or is not a chat request; nothing was sent.
    #[error(transparent)]
    Invalid(#[from] InvalidInput),
    #[error(transparent)]
    Call(#[from] CallError),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(body: Value) -> Result<ChatRequest, InvalidInput> {
        match body {
            Value::Object(body) => ChatRequest::from_json(body),
            _ => unreachable!("tests send objects"),
        }
    }

    #[test]
    fn unknown_fields_survive_the_round_trip() {
        let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi", "name": "ann"}], "top_p": 0.5});
        let back = request(body.clone()).unwrap().into_json("other");
        assert_eq!(Value::Object(back), body);
    }

    #[test]
    fn a_request_without_a_model_gets_the_configured_one() {
        let request = request(json!({"messages": [{"role": "user", "content": "hi"}]})).unwrap();
        assert_eq!(request.into_json("gpt")["model"], "gpt");
    }

    #[test]
    fn the_system_section_follows_the_callers_own_text() {
        let mut own = request(json!({"messages": [
            {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]}))
        .unwrap();
        own.append_to_system("## More");
        assert_eq!(own.messages[0].text(), "Be brief.\n\n## More");

        let mut parts = request(json!({"messages": [
            {"role": "developer", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "hi"}]}))
        .unwrap();
        parts.append_to_system("b");
        assert_eq!(parts.messages[0].text(), "a\nb");

        let mut none = request(json!({"messages": [{"role": "user", "content": "hi"}]})).unwrap();
        none.append_to_system("b");
        assert_eq!(
            (none.messages[0].role(), none.messages[0].text().as_str()),
            ("system", "b")
        );
    }

    #[test]
    fn what_is_no_chat_request_is_refused_by_name() {
        for (body, named) in [
            (json!({}), "'messages' is required"),
            (json!({"messages": []}), "'messages' is required"),
            (json!({"messages": "x"}), "'messages' must be a list"),
            (
                json!({"messages": [{"role": "user"}, {"content": "x"}]}),
                "index 1",
            ),
            (json!({"messages": [{"role": "user"}], "model": 3}), "'model'"),
        ] {
            let refusal = request(body).unwrap_err().to_string();
            assert!(refusal.contains(named), "{refusal}");
        }
    }
}
