//! `/v1/chat/completions`: OpenAI's chat API in front of the configured provider, with context from agent
//! memory in the system prompt.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::{FromRequest, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ragstone_core::call::{CallError, ErrorAnswer};
use ragstone_core::chat::{ChatError, ChatRequest, ChatStream, SentFields};
use ragstone_memory::chat::{ContextSource, PreparedChat};
use serde_json::{Map, Value, json};

use super::error::{ApiError, ErrorBody};
use super::extract::JsonBody;
use super::state::AppState;

/// Documents put into the prompt, as `collection/id`, separated by commas.
const SOURCES: HeaderName = HeaderName::from_static("x-ragstone-sources");
/// Session whose observations and reflections may be put into the prompt.
const SESSION: HeaderName = HeaderName::from_static("x-ragstone-session");
/// Clients refuse longer headers.
const MAX_SOURCES_BYTES: usize = 4096;
/// Characters of an id that are escaped.
const ESCAPED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b':')
    .remove(b'/');

const NOT_CONFIGURED: &str = "No chat provider is configured: set chat.providerID to an entry of providers, and chat.model, in the configuration file";

/// Complete a chat, as OpenAI's API does.
#[utoipa::path(
    post, path = "/v1/chat/completions", tag = "memory",
    request_body(content = Object, description = "A chat request of OpenAI's API; `model` is optional", example = json!({
        "messages": [{"role": "user", "content": "When do we deploy?"}], "stream": false,
    })),
    params(("x-ragstone-session" = Option<String>, Header, description = "Put only the observations and reflections of this session into the prompt")),
    responses(
        (status = 200, description = "A `chat.completion`, or with `stream` a stream of `chat.completion.chunk` events",
            content((Object = "application/json"), (String = "text/event-stream")),
            headers(("x-ragstone-sources" = String, description = "Documents put into the prompt, as `collection/id`, separated by commas; absent if there are none"))),
        (status = 400, body = ErrorBody, description = "Invalid chat request, or one that the provider does not support"),
        (status = 429, body = ErrorBody, description = "The provider's rate limit is exceeded; see Retry-After"),
        (status = 502, body = ErrorBody, description = "The provider gave no usable answer, or refuses the configured key"),
        (status = 503, body = ErrorBody, description = "No chat provider is configured"),
        (status = 504, body = ErrorBody, description = "The provider did not answer in time"),
    ),
)]
pub(super) async fn completions(
    State(state): State<AppState>,
    request: Request,
) -> Result<Response, ApiError> {
    // Before the body is read: without a provider it is not worth parsing.
    let Some(model) = &state.agent.chat else {
        return Err(ApiError::not_configured(NOT_CONFIGURED));
    };
    let headers = request.headers().clone();
    let JsonBody(body) = JsonBody::<SentFields>::from_request(request, &state).await?;
    let request = ChatRequest::from_sent(body)?;
    let streams = match request.options().get("stream") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(streams)) => *streams,
        Some(_) => return Err(ApiError::bad_request("'stream' must be true or false")),
    };
    let session = session_key(&headers)?;
    let PreparedChat { request, sources } = match &state.agent.context {
        Some(context) => context.prepare(request, session).await,
        None => PreparedChat {
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

/// An unreadable session must not widen retrieval to all sessions.
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

/// A refused key and an address where something else answers are errors of this server's configuration,
/// not of the client. The details go to the log only.
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
        format!("Provider '{service}' answered with status {status} and no JSON: check its baseUrl")
    };
    tracing::warn!(%service, reason = %CallError::Answered(answer.clone()), "a provider refused a chat request");
    ApiError::bad_gateway(ours)
}

/// The error of a provider with all its members, repeated in the fields where clients of this server and of
/// OpenAI look for it; `None` if it is not JSON.
fn explained(answer: &ErrorAnswer) -> Option<Vec<u8>> {
    let said = match serde_json::from_slice(&answer.body) {
        Ok(Value::Object(said)) => Some(said),
        // Google answers a streaming request with a list.
        Ok(Value::Array(list)) => list.into_iter().find_map(|first| match first {
            Value::Object(said) => Some(said),
            _ => None,
        }),
        _ => None,
    };
    let mut said = match (said, answer.status) {
        (Some(said), _) => said,
        // A proxy before the provider limits the rate.
        (None, 429) => Map::new(),
        (None, _) => return None,
    };
    let message = answer.message().unwrap_or_else(|| {
        let ErrorAnswer { service, status, .. } = answer;
        format!("Provider '{service}' refused the request (status {status})")
    });
    if !said.get("detail").is_some_and(Value::is_string) {
        said.insert("detail".to_owned(), message.clone().into());
    }
    said.entry("error")
        .or_insert_with(|| json!({"message": message, "type": "upstream_error", "code": null}));
    serde_json::to_vec(&said).ok()
}

/// Chunks as server-sent events, terminated like OpenAI's. An error is an event of its own, which the
/// official clients raise.
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

fn sources_header(sources: &[ContextSource]) -> Option<HeaderValue> {
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

    fn source(id: &str) -> ContextSource {
        ContextSource {
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
        let many: Vec<ContextSource> = (0..100).map(|_| source(&"é".repeat(200))).collect();
        assert!(sources_header(&many).unwrap().len() <= MAX_SOURCES_BYTES);
    }
}
