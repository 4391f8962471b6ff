//! What callers rely on from a chat model, wherever it runs.
//!
//! The shapes are those of the OpenAI chat API: requests and answers stay JSON, so that fields this
//! program knows nothing of reach a provider that does. Only what is read or changed on the way has
//! a name here.

use std::collections::HashSet;
use std::fmt;

use async_trait::async_trait;
use futures::stream::BoxStream;
use serde::de::{MapAccess, Visitor};
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::call::CallError;
use crate::document::Metadata;
use crate::error::InvalidInput;

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
    /// Every other field of the request.
    options: Metadata,
    /// The same as the caller wrote them, in that order.
    sent: Vec<(String, RawField)>,
}

/// One message: a JSON object with a `role`.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    fields: Metadata,
    /// As the caller wrote it, unless it was changed here.
    sent: Option<RawField>,
}

/// JSON to the letter: the order of keys and the digits of numbers mean something to some providers.
#[derive(Debug, Clone)]
struct RawField(Box<RawValue>);

impl PartialEq for RawField {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

/// The fields of a JSON object, each as it was written.
#[derive(Debug)]
pub struct SentFields(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for SentFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SentFieldsVisitor;

        impl<'de> Visitor<'de> for SentFieldsVisitor {
            type Value = SentFields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<SentFields, A::Error> {
                let mut fields: Vec<(String, Box<RawValue>)> = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                // The last of repeated fields counts, as everywhere. A set keeps this linear.
                let mut seen = HashSet::new();
                let mut is_last: Vec<bool> = fields.iter().rev().map(|(name, _)| seen.insert(name)).collect();
                fields.retain(|_| is_last.pop().unwrap_or(true));
                Ok(SentFields(fields))
            }
        }

        deserializer.deserialize_map(SentFieldsVisitor)
    }
}

impl ChatRequest {
    pub fn new(messages: Vec<Message>) -> Self {
        Self {
            model: None,
            messages,
            options: Metadata::new(),
            sent: Vec::new(),
        }
    }

    /// A request that is passed on, where it can be, as it was written.
    pub fn from_sent(SentFields(fields): SentFields) -> Result<Self, InvalidInput> {
        let mut sent = Vec::new();
        let mut body = Metadata::new();
        let mut messages = Vec::new();
        for (name, text) in fields {
            body.insert(name.clone(), parsed(&text)?);
            match name.as_str() {
                "messages" => messages = serde_json::from_str(text.get()).unwrap_or_default(),
                "model" => {}
                _ => sent.push((name, RawField(text))),
            }
        }
        let mut request = Self::from_json(body)?;
        request.sent = sent;
        for (message, text) in request.messages.iter_mut().zip(messages) {
            message.sent = Some(RawField(text));
        }
        Ok(request)
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
            sent: Vec::new(),
        })
    }

    /// Every field but the model and the messages.
    pub fn options(&self) -> &Metadata {
        &self.options
    }

    /// A field as the caller wrote it: in a schema, the order of keys means something. `None` where it is
    /// absent or null.
    pub fn option_as_sent(&self, name: &str) -> Option<Box<RawValue>> {
        let value = self.options.get(name).filter(|value| !value.is_null())?;
        match self.sent.iter().find(|(sent, _)| sent == name) {
            Some((_, text)) => Some(text.0.clone()),
            None => serde_json::value::to_raw_value(value).ok(),
        }
    }

    pub fn set_option(&mut self, name: &str, value: Value) {
        self.sent.retain(|(sent, _)| sent != name);
        self.options.insert(name.to_owned(), value);
    }

    /// The body of an OpenAI chat request, with `model` where the request names none, and with
    /// `stream` as given instead of as sent.
    pub fn body<'a>(&'a self, model: &'a str, stream: Option<bool>) -> impl Serialize + 'a {
        RequestBody {
            request: self,
            model: self.model.as_deref().unwrap_or(model),
            stream,
        }
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

fn parsed(text: &RawValue) -> Result<Value, InvalidInput> {
    serde_json::from_str(text.get())
        .map_err(|error| InvalidInput::new(format!("The body is not JSON: {error}")))
}

struct RequestBody<'a> {
    request: &'a ChatRequest,
    model: &'a str,
    stream: Option<bool>,
}

impl Serialize for RequestBody<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("model", self.model)?;
        map.serialize_entry("messages", &self.request.messages)?;
        let sent = &self.request.sent;
        for (name, text) in sent.iter().filter(|(name, _)| name != "stream") {
            map.serialize_entry(name, &text.0)?;
        }
        let written: HashSet<&String> = sent.iter().map(|(name, _)| name).collect();
        for (name, value) in &self.request.options {
            if name != "stream" && !written.contains(name) {
                map.serialize_entry(name, value)?;
            }
        }
        if let Some(stream) = self.stream {
            map.serialize_entry("stream", &stream)?;
        }
        map.end()
    }
}

impl Serialize for Message {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.sent {
            Some(text) => text.0.serialize(serializer),
            None => self.fields.serialize(serializer),
        }
    }
}

impl Message {
    pub fn new(role: &str, text: &str) -> Self {
        let mut fields = Metadata::new();
        fields.insert("role".into(), role.into());
        fields.insert("content".into(), text.into());
        Self { fields, sent: None }
    }

    fn from_json(message: Value, index: usize) -> Result<Self, InvalidInput> {
        match message {
            Value::Object(fields) if fields.get("role").is_some_and(Value::is_string) => {
                Ok(Self { fields, sent: None })
            }
            _ => Err(InvalidInput::new(format!(
                "Message at index {index} must be an object with a 'role'"
            ))),
        }
    }

    pub fn role(&self) -> &str {
        self.fields
            .get("role")
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    pub fn is_system(&self) -> bool {
        matches!(self.role(), "system" | "developer")
    }

    pub fn fields(&self) -> &Metadata {
        &self.fields
    }

    /// Its text, with the texts of several parts joined by newlines; parts of another kind are left out.
    pub fn text(&self) -> String {
        match self.fields.get("content") {
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
        self.sent = None;
        match self.fields.get_mut("content") {
            Some(Value::Array(parts)) => parts.push(json!({"type": "text", "text": section})),
            Some(Value::String(text)) if !text.is_empty() => {
                text.push_str("\n\n");
                text.push_str(section);
            }
            _ => {
                self.fields.insert("content".into(), section.into());
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
        let request = request(body.clone()).unwrap();
        assert_eq!(serde_json::to_value(request.body("other", None)).unwrap(), body);
    }

    /// Takes minutes where every field is compared with every other.
    #[test]
    fn a_request_of_many_fields_is_read_in_linear_time() {
        let count = 150_000;
        let fields: String = (0..count).map(|n| format!(r#","f{n}":{n}"#)).collect();
        let sent = format!(r#"{{"messages":[{{"role":"user","content":"hi"}}]{fields},"f0":"last"}}"#);
        let request = ChatRequest::from_sent(serde_json::from_str(&sent).unwrap()).unwrap();
        assert_eq!(request.options().len(), count);
        let body = serde_json::to_value(request.body("m", None)).unwrap();
        assert_eq!((&body["f0"], &body["f1"]), (&json!("last"), &json!(1)));
    }

    #[test]
    fn what_is_not_changed_passes_to_the_letter() {
        let sent = r#"{"response_format": {"z": 1, "a": {"y": 1.50, "b": 123456789012345678901234567890}},
            "messages": [{"role": "user", "name": "ann", "content": "hi"}], "stream": true, "seed": 1, "seed": 7}"#;
        let mut request = ChatRequest::from_sent(serde_json::from_str(sent).unwrap()).unwrap();
        request.append_to_system("## More");
        assert_eq!(
            serde_json::to_string(&request.body("m", Some(false))).unwrap(),
            r###"{"model":"m","messages":[{"content":"## More","role":"system"},{"role": "user", "name": "ann", "content": "hi"}],"response_format":{"z": 1, "a": {"y": 1.50, "b": 123456789012345678901234567890}},"seed":7,"stream":false}"###
        );
        assert_eq!(request.options()["seed"], 7);
    }

    #[test]
    fn a_request_without_a_model_gets_the_configured_one() {
        let request = request(json!({"messages": [{"role": "user", "content": "hi"}]})).unwrap();
        assert_eq!(
            serde_json::to_value(request.body("gpt", None)).unwrap()["model"],
            "gpt"
        );
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
