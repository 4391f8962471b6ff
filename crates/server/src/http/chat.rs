//! `/v1/chat/completions`: OpenAI's chat interface in front of the configured provider, with what
//! memory knows about the question in the system prompt.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ragstone_core::call::{CallError, ErrorAnswer};
use ragstone_core::chat::{ChatError, ChatRequest, ChatStream, SentFields};
use ragstone_rag::chat::{Prepared, Source};
use serde_json::{Map, Value, json};

use super::error::{ApiError, ErrorBody};
use super::extract::JsonBody;
use super::state::AppState;

/// What was put into the prompt, as `collection/id`, separated by commas.
const SOURCES: HeaderName = HeaderName::from_static("x-ragstone-sources");
/// Which session's observations and reflections may be put into the prompt.
const SESSION: HeaderName = HeaderName::from_static("x-ragstone-session");
/// Clients give up on longer headers.
const MAX_SOURCES_BYTES: usize = 4096;
/// What stands for itself in an id.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b':')
    .remove(b'/');

const NOT_CONFIGURED: &str = "No chat provider is configured: set chat.providerID to an entry of providers, and chat.model, in the configuration file";

/// Continue a conversation, in the shape of OpenAI's interface.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "memory",
    request_body(content = Object, description = "A chat request as OpenAI's interface has it; `model` may be left out", example = json!({
        "messages": [{"role": "user", "content": "When do we deploy?"}], "stream": false,
    })),
    params(("x-ragstone-session" = Option<String>, Header, description = "Only this session's observations and reflections go into the prompt")),
    responses(
        (status = 200, description = "A `chat.completion`, or with `stream` a stream of `chat.completion.chunk` events",
            content((Object = "application/json"), (String = "text/event-stream")),
            headers(("x-ragstone-sources" = String, description = "What was put into the prompt, as `collection/id`, separated by commas; absent where nothing was"))),
        (status = 400, body = ErrorBody, description = "Not a chat request, or one that the provider cannot do"),
        (status = 429, body = ErrorBody, description = "The provider is asked too often; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The provider gave no usable answer, or does not take the configured key"),
        (status = 503, body = ErrorBody, description = "No chat provider is configured"),
        (status = 504, body = ErrorBody, description = "The provider did not answer in time"),
    ),
)]
pub(super) async fn completions(
    State(state): State<AppState>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<SentFields>,
) -> Result<Response, ApiError> {
    let Some(model) = &state.agent.chat else {
        return Err(ApiError::not_configured(NOT_CONFIGURED));
    };
    let request = ChatRequest::from_sent(body)?;
    let streams = match request.options().get("stream") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(streams)) => *streams,
        Some(_) => return Err(ApiError::bad_request("'stream' must be true or false")),
    };
    let session = session_key(&headers)?;
    let Prepared { request, sources } = match &state.agent.context {
        Some(context) => context.prepare(request, session).await,
        None => Prepared {
            request,
            sources: Vec::new(),
        },
    };
    let mut response = if streams {
        events(model.stream(request).await.map_err(refusal)?).into_response()
    } else {
        Json(model.complete(request).await.map_err(refusal)?).into_response()
    };
    if let Some(list) = sources_header(&sources) {
        response.headers_mut().insert(SOURCES, list);
    }
    Ok(response)
}

/// A session that cannot be read must not become all sessions.
fn session_key(headers: &HeaderMap) -> Result<Option<&str>, ApiError> {
    let Some(value) = headers.get(SESSION) else {
        return Ok(None);
    };
    match std::str::from_utf8(value.as_bytes()) {
        Ok(key) => Ok(Some(key).filter(|key| !key.is_empty())),
        Err(_) => Err(ApiError::bad_request(
            "The header 'x-ragstone-session' is not valid UTF-8",
        )),
    }
}

fn refusal(error: ChatError) -> ApiError {
    match error {
        ChatError::Invalid(invalid) => invalid.into(),
        ChatError::Call(CallError::Answered(answer)) => refused(answer),
        ChatError::Call(error) => error.into(),
    }
}

/// A key that the provider does not take is ours, not the client's, and so is an address at which
/// something else answers. What the provider said of it is for the log.
fn refused(mut answer: Box<ErrorAnswer>) -> ApiError {
    let (service, status) = (&answer.service, answer.status);
    let passes_on = (400..500).contains(&status) || answer.is_considered();
    let ours = if answer.refuses_our_key() {
        let key = if status == 403 {
            "key or its permissions"
        } else {
            "apiKey"
        };
        format!("Provider '{service}' refuses the configured {key} (status {status})")
    } else if !passes_on {
        return CallError::Answered(answer).into();
    } else if let Some(body) = explained(&answer) {
        answer.body = body;
        answer.content_type = None;
        return CallError::Answered(answer).into();
    } else {
        format!(
            "Provider '{service}' answered with status {status} and with what is no JSON; is its baseUrl right?"
        )
    };
    tracing::warn!(%service, reason = %CallError::Answered(answer.clone()), "a provider refuses a chat");
    ApiError::bad_gateway(ours)
}

/// What a provider says went wrong, with all its members, also where clients of this server and those
/// of OpenAI look for it; `None` where it does not speak JSON.
fn explained(answer: &ErrorAnswer) -> Option<Vec<u8>> {
    let said = match serde_json::from_slice(&answer.body) {
        Ok(Value::Object(said)) => Some(said),
        // As Google has it where a stream was asked for.
        Ok(Value::Array(list)) => list.into_iter().find_map(|first| match first {
            Value::Object(said) => Some(said),
            _ => None,
        }),
        _ => None,
    };
    let mut said = match (said, answer.status) {
        (Some(said), _) => said,
        // Whatever stands before the provider, and counts.
        (None, 429) => Map::new(),
        (None, _) => return None,
    };
    let message = answer.message().unwrap_or_else(|| {
        let ErrorAnswer { service, status, .. } = answer;
        format!("Provider '{service}' refuses this (status {status})")
    });
    if !said.get("detail").is_some_and(Value::is_string) {
        said.insert("detail".to_owned(), message.clone().into());
    }
    said.entry("error")
        .or_insert_with(|| json!({"message": message, "type": "upstream_error", "code": null}));
    serde_json::to_vec(&said).ok()
}

/// Chunks as server-sent events, ended as OpenAI ends them. An error in the middle is an event of
/// its own, which the official clients raise.
fn events(stream: ChatStream) -> impl IntoResponse {
    let chunks = stream.map(|chunk| match chunk {
        Ok(chunk) => chunk,
        Err(error) => {
            let message = refusal(error).into_detail();
            json!({"error": {"message": message, "type": "upstream_error", "code": null}})
        }
    });
    let events = chunks
        .map(|chunk| Event::default().data(chunk.to_string()))
        .chain(futures::stream::once(async { Event::default().data("[DONE]") }))
        .map(Ok::<_, Infallible>);
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15)))
}

fn sources_header(sources: &[Source]) -> Option<HeaderValue> {
    let mut list = String::new();
    for source in sources {
        let id = utf8_percent_encode(&source.id, ESCAPED);
        let item = format!("{}/{id}", source.collection);
        if list.len() + item.len() + 2 > MAX_SOURCES_BYTES {
            break;
        }
        if !list.is_empty() {
            list.push_str(", ");
        }
        list.push_str(&item);
    }
    HeaderValue::from_str(&list).ok().filter(|_| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(id: &str) -> Source {
        Source {
            collection: "knowledge".to_owned(),
            id: id.to_owned(),
        }
    }

    #[test]
    fn the_header_lists_sources_and_stays_a_header() {
        let header = sources_header(&[source("a-1"), source("b, c\r\nx: é")]).unwrap();
        assert_eq!(
            header.to_str().unwrap(),
            "knowledge/a-1, knowledge/b%2C%20c%0D%0Ax:%20%C3%A9"
        );
        assert!(sources_header(&[]).is_none());
        let many: Vec<Source> = (0..100).map(|_| source(&"é".repeat(200))).collect();
        assert!(sources_header(&many).unwrap().len() <= MAX_SOURCES_BYTES);
    }
}
