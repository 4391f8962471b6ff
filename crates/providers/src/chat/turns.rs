//! The messages of an OpenAI request as turns of typed parts.

use ragstone_core::Metadata;
use ragstone_core::chat::{ChatError, ChatRequest, Message};
use ragstone_core::collection::shorten;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::translate::refuse;

/// A conversation: the system text, and alternating turns of user and assistant. Neighbouring messages
/// of one role are joined, because the APIs require turns to alternate.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Turns {
    pub(super) system: String,
    pub(super) turns: Vec<ChatTurn>,
}

#[derive(Debug, PartialEq)]
pub(super) struct ChatTurn {
    pub(super) speaker: Speaker,
    pub(super) parts: Vec<Part>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Speaker {
    User,
    Assistant,
}

#[derive(Debug, PartialEq)]
pub(super) enum Part {
    Text(String),
    Image(Image),
    Call(PastCall),
    /// The answer of a tool, with its name and the number of the call.
    Result {
        number: usize,
        name: String,
        text: String,
    },
}

#[derive(Debug, PartialEq)]
pub(super) enum Image {
    Inline { media_type: String, base64: String },
    Link(String),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PastCall {
    /// Its number in the conversation, from 0.
    pub(super) number: usize,
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: Arguments,
    /// Gemini's thought signature, which it requires back with the call.
    pub(super) signature: Option<String>,
}

/// The arguments of a call: a JSON object as the model wrote it, with all digits of its numbers.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Arguments(Box<RawValue>);

impl Arguments {
    /// Models sometimes write arguments that are no JSON object, and callers keep them in the history.
    /// The providers take objects only, so such a text becomes the value of a field.
    fn read(text: &str) -> Result<Self, ChatError> {
        let text = match text.trim() {
            "" => "{}",
            text => text,
        };
        let object = RawValue::from_string(text.to_owned())
            .ok()
            .filter(|raw| raw.get().starts_with('{'));
        match object {
            Some(object) => Ok(Self(object)),
            None => to_raw_value(&json!({ "malformed_arguments": text }))
                .map(Self)
                .map_err(|error| refuse(error.to_string())),
        }
    }
}

impl PartialEq for Arguments {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

/// The path of a call's signature, as in Google's own OpenAI interface.
const SIGNATURE: &str = "/extra_content/google/thought_signature";

pub(super) fn turns(request: &ChatRequest, provider: &str) -> Result<Turns, ChatError> {
    let mut found = Turns::default();
    let mut calls: Vec<(String, String)> = Vec::new();
    for (index, message) in request.messages.iter().enumerate() {
        let reader = Reader {
            message,
            index,
            provider,
        };
        let (speaker, parts) = match message.role() {
            "system" | "developer" => {
                append(&mut found.system, &reader.text_only()?);
                continue;
            }
            "user" => (Speaker::User, reader.content()?),
            "tool" => (Speaker::User, vec![reader.result(&calls)?]),
            "assistant" => {
                let mut parts = reader.content()?;
                for mut call in reader.calls()? {
                    call.number = calls.len();
                    calls.push((call.id.clone(), call.name.clone()));
                    parts.push(Part::Call(call));
                }
                (Speaker::Assistant, parts)
            }
            other => {
                return Err(refuse(format!(
                    "Message at index {index} has the role '{}', which cannot be passed on to provider '{provider}'",
                    shorten(other)
                )));
            }
        };
        found.add(speaker, parts);
    }
    if found.turns.iter().all(|turn| turn.speaker == Speaker::Assistant) {
        return Err(refuse("'messages' needs at least one message of the user"));
    }
    found.turns.iter_mut().for_each(ChatTurn::order_results);
    Ok(found)
}

impl Turns {
    pub(super) fn calls(&self) -> impl Iterator<Item = &PastCall> {
        let parts = self.turns.iter().flat_map(|turn| &turn.parts);
        parts.filter_map(|part| match part {
            Part::Call(call) => Some(call),
            _ => None,
        })
    }
}

impl ChatTurn {
    /// Orders results by their calls: not every API matches them by id.
    fn order_results(&mut self) {
        let number = |part: &Part| match part {
            Part::Result { number, .. } => Some(*number),
            _ => None,
        };
        for run in self
            .parts
            .chunk_by_mut(|a, b| number(a).is_some() == number(b).is_some())
        {
            run.sort_by_key(number);
        }
    }
}

impl Turns {
    /// Drops blank text, which some APIs refuse.
    fn add(&mut self, speaker: Speaker, mut parts: Vec<Part>) {
        parts.retain(|part| !matches!(part, Part::Text(text) if text.trim().is_empty()));
        if parts.is_empty() {
            return;
        }
        let Some(turn) = self.turns.last_mut().filter(|turn| turn.speaker == speaker) else {
            self.turns.push(ChatTurn { speaker, parts });
            return;
        };
        for part in parts {
            match (turn.parts.last_mut(), part) {
                (Some(Part::Text(joined)), Part::Text(text)) => append(joined, &text),
                (_, part) => turn.parts.push(part),
            }
        }
    }
}

fn append(text: &mut String, more: &str) {
    if !text.is_empty() && !more.is_empty() {
        text.push_str("\n\n");
    }
    text.push_str(more);
}

/// Reads one message. Refuses content that cannot be translated instead of dropping it.
struct Reader<'a> {
    message: &'a Message,
    index: usize,
    provider: &'a str,
}

impl Reader<'_> {
    fn text_only(&self) -> Result<String, ChatError> {
        let mut text = String::new();
        for part in self.content()? {
            match part {
                Part::Text(part) => text.push_str(&part),
                _ => return Err(self.other_content()),
            }
        }
        Ok(text)
    }

    fn content(&self) -> Result<Vec<Part>, ChatError> {
        let fields = self.message.fields();
        if ["function_call", "audio"]
            .iter()
            .any(|field| is_there(fields, field))
        {
            return Err(self.other_content());
        }
        let mut parts = Vec::new();
        match fields.get("content") {
            Some(Value::String(text)) => parts.push(Part::Text(text.clone())),
            Some(Value::Array(given)) => {
                for part in given {
                    match (self.part(part)?, parts.last_mut()) {
                        (Part::Text(text), Some(Part::Text(joined))) => {
                            joined.push('\n');
                            joined.push_str(&text);
                        }
                        (part, _) => parts.push(part),
                    }
                }
            }
            Some(Value::Null) | None => {}
            Some(_) => return Err(self.other_content()),
        }
        Ok(parts)
    }

    fn part(&self, part: &Value) -> Result<Part, ChatError> {
        if let Some(text) = part.get("text").and_then(Value::as_str) {
            return Ok(Part::Text(text.to_owned()));
        }
        let url = part.pointer("/image_url/url").and_then(Value::as_str);
        let url = url
            .filter(|_| self.message.role() == "user")
            .ok_or_else(|| self.other_content())?;
        if url.starts_with("https://") || url.starts_with("http://") {
            return Ok(Part::Image(Image::Link(url.to_owned())));
        }
        let inline = url
            .strip_prefix("data:")
            .and_then(|rest| rest.split_once(";base64,"));
        let media_type = |given: &str| {
            let kind = given.split(';').next().unwrap_or_default().to_ascii_lowercase();
            match kind.as_str() {
                "image/jpg" => "image/jpeg".to_owned(),
                _ => kind,
            }
        };
        match inline.map(|(given, base64)| (media_type(given), base64)) {
            Some((media_type, base64)) if media_type.starts_with("image/") => {
                Ok(Part::Image(Image::Inline {
                    media_type,
                    base64: base64.to_owned(),
                }))
            }
            _ => Err(refuse(format!(
                "Message at index {} has an 'image_url' that is neither a web address nor an image as a data URL with base64",
                self.index
            ))),
        }
    }

    fn calls(&self) -> Result<Vec<PastCall>, ChatError> {
        match self.message.fields().get("tool_calls") {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(Value::Array(calls)) => calls.iter().map(|call| self.call(call)).collect(),
            Some(_) => Err(self.wrong("'tool_calls' must be a list")),
        }
    }

    fn call(&self, call: &Value) -> Result<PastCall, ChatError> {
        let text = |path: &str| call.pointer(path).and_then(Value::as_str);
        let (Some(id), Some(name)) = (text("/id"), text("/function/name")) else {
            return Err(
                self.wrong("every one of 'tool_calls' must have an 'id' and a 'function' with a 'name'")
            );
        };
        let arguments = Arguments::read(text("/function/arguments").unwrap_or_default())?;
        Ok(PastCall {
            number: 0,
            id: id.to_owned(),
            name: name.to_owned(),
            arguments,
            signature: text(SIGNATURE).map(str::to_owned),
        })
    }

    fn result(&self, calls: &[(String, String)]) -> Result<Part, ChatError> {
        let id = self.message.fields().get("tool_call_id").and_then(Value::as_str);
        let id = id.ok_or_else(|| self.wrong("a message of a tool must have a 'tool_call_id'"))?;
        let number = calls.iter().rposition(|(known, _)| known == id);
        let number = number.ok_or_else(|| {
            self.wrong(&format!(
                "no message before it makes the tool call '{}'",
                shorten(id)
            ))
        })?;
        Ok(Part::Result {
            number,
            name: calls
                .get(number)
                .map(|(_, name)| name.clone())
                .unwrap_or_default(),
            text: self.text_only()?,
        })
    }

    fn wrong(&self, what: &str) -> ChatError {
        refuse(format!("Message at index {}: {what}", self.index))
    }

    fn other_content(&self) -> ChatError {
        refuse(format!(
            "Message at index {} has content that cannot be passed on to provider '{}'",
            self.index, self.provider
        ))
    }
}

fn is_there(fields: &Metadata, name: &str) -> bool {
    match fields.get(name) {
        None | Some(Value::Null) => false,
        Some(Value::Array(items)) => !items.is_empty(),
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(messages: Value) -> Result<Turns, ChatError> {
        let mut body = Metadata::new();
        body.insert("messages".into(), messages);
        turns(&ChatRequest::from_json(body).unwrap(), "p")
    }

    fn text(speaker: Speaker, text: &str) -> ChatTurn {
        ChatTurn {
            speaker,
            parts: vec![Part::Text(text.to_owned())],
        }
    }

    #[test]
    fn neighbours_of_one_role_are_joined_and_system_texts_gathered() {
        let found = read(json!([
            {"role": "system", "content": "a"}, {"role": "user", "content": "b"},
            {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "C"}]},
            {"role": "developer", "content": "d"}, {"role": "assistant", "content": "e"}]))
        .unwrap();
        assert_eq!(found.system, "a\n\nd");
        assert_eq!(
            found.turns,
            [text(Speaker::User, "b\n\nc\nC"), text(Speaker::Assistant, "e")]
        );
    }

    #[test]
    fn calls_and_their_results_are_turns() {
        let found = read(json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}},
                {"id": "2", "type": "function", "function": {"name": "clock", "arguments": ""},
                 "extra_content": {"google": {"thought_signature": "sig"}}}]},
            {"role": "tool", "tool_call_id": "2", "content": "noon"},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}]},
            {"role": "user", "content": "and now?"}]))
        .unwrap();
        let call = |id: &str, name: &str, arguments: &str, signature: Option<&str>| {
            Part::Call(PastCall {
                number: usize::from(id == "2"),
                id: id.into(),
                name: name.into(),
                arguments: Arguments::read(arguments).unwrap(),
                signature: signature.map(str::to_owned),
            })
        };
        let result = |number: usize, name: &str, text: &str| Part::Result {
            number,
            name: name.into(),
            text: text.into(),
        };
        assert_eq!(
            found.turns[1].parts,
            [
                call("1", "weather", "{\"city\": \"Oslo\"}", None),
                call("2", "clock", "{}", Some("sig"))
            ]
        );
        assert_eq!(
            found.turns[2].parts,
            [
                result(0, "weather", "rain"),
                result(1, "clock", "noon"),
                Part::Text("and now?".into())
            ]
        );
    }

    #[test]
    fn arguments_keep_their_digits_and_malformed_ones_are_wrapped() {
        let written = |text: &str| Arguments::read(text).unwrap().0.get().to_owned();
        let long = r#"{"id": 123456789012345678901234567890, "price": 0.10000000000000000001}"#;
        assert_eq!(written(&format!(" {long}\n")), long);
        for malformed in ["[1]", "{\"city\": \"Os", "city=Oslo", "7"] {
            let object: Value = serde_json::from_str(&written(malformed)).unwrap();
            assert_eq!(object, json!({ "malformed_arguments": malformed }));
        }
    }

    #[test]
    fn what_is_blank_is_left_out() {
        let found = read(json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": ""},
            {"role": "user", "content": [{"type": "text", "text": " "}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null}]))
        .unwrap();
        assert_eq!(found.turns.len(), 1, "{found:?}");
        assert!(matches!(&found.turns[0].parts[..], [Part::Text(text)] if text.ends_with('b')));
        let nothing = read(json!([{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]));
        assert!(nothing.unwrap_err().to_string().contains("'messages'"));
    }

    #[test]
    fn images_are_linked_or_inline() {
        let image = |url: &str| {
            let parts =
                json!([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url}}]);
            read(json!([{"role": "user", "content": parts}]))
                .map(|mut found| found.turns.remove(0).parts.remove(1))
        };
        assert_eq!(
            image("data:image/png;base64,AAAA").unwrap(),
            Part::Image(Image::Inline {
                media_type: "image/png".into(),
                base64: "AAAA".into()
            })
        );
        let Part::Image(Image::Inline { media_type, .. }) =
            image("data:IMAGE/JPG;name=a.jpg;base64,AAAA").unwrap()
        else {
            panic!("this is an image");
        };
        assert_eq!(media_type, "image/jpeg");
        assert_eq!(
            image("https://h/a.png").unwrap(),
            Part::Image(Image::Link("https://h/a.png".into()))
        );
        for wrong in [
            "file:///etc/passwd",
            "data:text/html;base64,AA",
            "data:image/png,AA",
        ] {
            assert!(
                image(wrong).unwrap_err().to_string().contains("index 0"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn what_cannot_be_translated_is_refused_by_its_place() {
        for message in [
            json!({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}),
            json!({"role": "user", "content": [{"type": "image_url"}]}),
            json!({"role": "user", "content": 3}),
            json!({"role": "system", "content": [{"type": "image_url", "image_url": {"url": "https://h"}}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}),
            json!({"role": "assistant", "content": null, "tool_calls": "x"}),
            json!({"role": "assistant", "content": null, "function_call": {"name": "f"}}),
            json!({"role": "tool", "content": "x"}),
            json!({"role": "tool", "tool_call_id": "never made", "content": "x"}),
            json!({"role": "critic", "content": "x"}),
        ] {
            let refusal = read(json!([message])).unwrap_err().to_string();
            assert!(refusal.contains("index 0"), "{message}: {refusal}");
        }
    }
}
