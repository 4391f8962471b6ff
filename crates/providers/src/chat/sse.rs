//! Server-sent events, the streaming protocol of all these APIs.

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use ragstone_core::chat::{ChatError, ChatStream};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::http::{ByteStream, ServiceClient};

/// One event with its data lines joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) name: String,
    pub(super) data: String,
}

/// No event of a chat API comes near this size.
const MAX_EVENT_BYTES: usize = 4 << 20;

pub(super) fn events(
    bytes: ByteStream,
    client: ServiceClient,
) -> BoxStream<'static, Result<Event, ChatError>> {
    let state = (bytes, SseParser::default(), client);
    futures::stream::try_unfold(state, |(mut bytes, mut parser, client)| async move {
        loop {
            if let Some(event) = parser.next_event() {
                return Ok(Some((event, (bytes, parser, client))));
            }
            if parser.buffer.len() > MAX_EVENT_BYTES {
                return Err(client.bad_answer("an event of its stream is too large").into());
            }
            match bytes.next().await {
                Some(chunk) => parser.push(&chunk?),
                None => return Ok(None),
            }
        }
    })
    .boxed()
}

pub(super) fn json<T: DeserializeOwned>(client: &ServiceClient, event: &Event) -> Result<T, ChatError> {
    serde_json::from_str(&event.data).map_err(|e| {
        client
            .bad_answer(format!(
                "an event of its stream is not the JSON that was expected ({e})"
            ))
            .into()
    })
}

/// The error that an answer reports.
pub(super) fn error_in(answer: &Value) -> Option<String> {
    error_message(answer.get("error")?)
}

/// The message of an error: a sentence, or an object that has one.
pub(super) fn error_message(error: &Value) -> Option<String> {
    if error.is_null() {
        return None;
    }
    let said = error.as_str().or_else(|| error.get("message")?.as_str());
    Some(said.map_or_else(|| error.to_string(), str::to_owned))
}

/// Ends a stream after its first error.
pub(super) fn until_error(
    chunks: impl Stream<Item = Result<Value, ChatError>> + Send + 'static,
) -> ChatStream {
    chunks
        .scan(false, |failed, chunk| {
            let next = (!*failed).then_some(chunk);
            *failed |= matches!(next, Some(Err(_)));
            futures::future::ready(next)
        })
        .boxed()
}

/// Splits bytes into events, independent of the pieces they arrive in.
#[derive(Debug, Default)]
struct SseParser {
    buffer: Vec<u8>,
    name: String,
    data: Option<String>,
}

impl SseParser {
    fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next complete event: an empty line ends it. Events without data are ignored.
    fn next_event(&mut self) -> Option<Event> {
        while let Some(line) = self.next_line() {
            if line.is_empty() {
                let name = std::mem::take(&mut self.name);
                if let Some(data) = self.data.take().filter(|data| !data.is_empty()) {
                    return Some(Event { name, data });
                }
                continue;
            }
            let (field, value) = line.split_once(':').unwrap_or((&line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            match field {
                "event" => self.name = value.to_owned(),
                "data" => match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(value);
                    }
                    None => self.data = Some(value.to_owned()),
                },
                _ => {}
            }
        }
        None
    }

    fn next_line(&mut self) -> Option<String> {
        let end = self.buffer.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.buffer.drain(..=end).collect();
        let line = line.strip_suffix(b"\n").unwrap_or(&line);
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        Some(String::from_utf8_lossy(line).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_wherever_the_bytes_are_cut() {
        let text = ": hello\r\nevent: delta\r\ndata: {\"a\":\r\ndata: \"ü\"}\r\n\r\n\ndata:x\nid: 3\n\nevent: empty\n\ndata:\n\ndata: half";
        let expected = [("delta", "{\"a\":\n\"ü\"}"), ("", "x")];
        for step in 1..text.len() {
            let mut parser = SseParser::default();
            let mut found = Vec::new();
            for piece in text.as_bytes().chunks(step) {
                parser.push(piece);
                while let Some(event) = parser.next_event() {
                    found.push(event);
                }
            }
            let found: Vec<_> = found.iter().map(|e| (e.name.as_str(), e.data.as_str())).collect();
            assert_eq!(found, expected, "pieces of {step} bytes");
        }
    }
}
