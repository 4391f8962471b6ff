//! Reading requests: bodies, paths and query strings, with errors that name the fault.

use std::fmt;
use std::marker::PhantomData;

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::header;
use axum::http::request::Parts;
use bytes::BytesMut;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use ragstone_core::collection::CollectionName;
use ragstone_core::error::{InvalidInput, in_plain_words};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokio::sync::OwnedSemaphorePermit;

use super::error::ApiError;
use super::state::AppState;

/// Larger bodies are parsed off the async threads.
const PARSE_INLINE: usize = 64 * 1024;
/// Memory that a large body reserves at a time.
const RESERVE_STEP: usize = 256 * 1024;

/// A structure that must be a JSON object. serde alone would also accept a list, and take its elements for
/// the fields in the order of their declaration.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields))
            }
        }

        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

/// A list of objects, for fields of bodies.
pub(super) fn objects<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let list = Vec::<Object<T>>::deserialize(deserializer)?;
    Ok(list.into_iter().map(|Object(one)| one).collect())
}

/// The same for a field that may be null; one that may be absent also needs `default`.
pub(super) fn optional_objects<'de, D, T>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let list = Option::<Vec<Object<T>>>::deserialize(deserializer)?;
    Ok(list.map(|list| list.into_iter().map(|Object(one)| one).collect()))
}

/// A JSON object of at most the ordinary size, with any content type.
pub(super) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let bytes = read_body(request, state.limits.body_bytes, state).await?;
        parse_json(bytes).await.map(|Object(body)| Self(body))
    }
}

/// The same for JSON of any kind.
pub(super) struct AnyJsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for AnyJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let bytes = read_body(request, state.limits.body_bytes, state).await?;
        parse_json(bytes).await.map(Self)
    }
}

/// A large body of any type. It keeps its share of the budget until it is dropped.
pub(super) struct LargeBody {
    pub content_type: String,
    pub bytes: bytes::Bytes,
    _budget: Option<OwnedSemaphorePermit>,
}

impl LargeBody {
    pub(super) async fn json<T: DeserializeOwned + Send + 'static>(&self) -> Result<T, ApiError> {
        parse_json(self.bytes.clone()).await.map(|Object(body)| body)
    }
}

impl FromRequest<AppState> for LargeBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let content_type = request.headers().get(header::CONTENT_TYPE);
        let content_type = content_type
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        let (bytes, budget) = read_large(request, state).await?;
        Ok(Self {
            content_type,
            bytes,
            _budget: budget,
        })
    }
}

/// Reads a large body, and reserves memory as its bytes arrive: a client that sends only headers holds
/// nothing that others wait for.
pub(super) async fn read_large(
    request: Request,
    state: &AppState,
) -> Result<(bytes::Bytes, Option<OwnedSemaphorePermit>), ApiError> {
    let limit = state.limits.add_bytes;
    let expected = announced_length(&request, limit)?.unwrap_or(limit);
    refuse_encoded(&request)?;
    let mut body = Limited::new(request.into_body(), limit);
    let mut bytes = BytesMut::new();
    let mut budget: Option<OwnedSemaphorePermit> = None;
    let mut reserved = 0;
    let deadline = tokio::time::Instant::now() + state.limits.body_timeout;
    while let Some(frame) = tokio::time::timeout_at(deadline, body.frame())
        .await
        .map_err(|_| ApiError::timeout())?
    {
        let Ok(data) = frame.map_err(|error| body_error(&*error, limit))?.into_data() else {
            continue;
        };
        while bytes.len() + data.len() > reserved {
            let step = expected.saturating_sub(reserved).clamp(1, RESERVE_STEP);
            let more = state.body_budget.reserve(step).await?;
            reserved += step;
            match &mut budget {
                Some(budget) => budget.merge(more),
                None => budget = Some(more),
            }
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes.freeze(), budget))
}

/// The announced length of the body. One that is too long is refused before it arrives.
fn announced_length(request: &Request, limit: usize) -> Result<Option<usize>, ApiError> {
    let length = request.headers().get(header::CONTENT_LENGTH);
    match length.and_then(|length| length.to_str().ok()?.parse().ok()) {
        Some(length) if length > limit => Err(ApiError::too_large(limit)),
        length => Ok(length),
    }
}

pub(super) async fn read_body(
    request: Request,
    limit: usize,
    state: &AppState,
) -> Result<bytes::Bytes, ApiError> {
    announced_length(&request, limit)?;
    refuse_encoded(&request)?;
    let body = Limited::new(request.into_body(), limit);
    match tokio::time::timeout(state.limits.body_timeout, body.collect()).await {
        Err(_) => Err(ApiError::timeout()),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) => Err(body_error(&*error, limit)),
    }
}

/// A JSON object.
pub(super) async fn parse_object<T: DeserializeOwned + Send + 'static>(
    bytes: bytes::Bytes,
) -> Result<T, ApiError> {
    parse_json(bytes).await.map(|Object(body)| body)
}

fn refuse_encoded(request: &Request) -> Result<(), ApiError> {
    match request.headers().get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => Err(ApiError::unsupported_encoding(encoding)),
        _ => Ok(()),
    }
}

fn body_error(error: &(dyn std::error::Error + Send + Sync + 'static), limit: usize) -> ApiError {
    if error.is::<LengthLimitError>() {
        return ApiError::too_large(limit);
    }
    ApiError::bad_request("The request body ended early")
}

async fn parse_json<T: DeserializeOwned + Send + 'static>(bytes: bytes::Bytes) -> Result<T, ApiError> {
    if bytes.len() <= PARSE_INLINE {
        return parse(&bytes);
    }
    match tokio::task::spawn_blocking(move || parse(&bytes)).await {
        Ok(parsed) => parsed,
        Err(error) => Err(ApiError::internal(&error)),
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(ApiError::bad_request(
            "The request body is empty: a JSON body is required",
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| ApiError::bad_request(explain::<T>(&error, bytes)))
}

/// Rewrites an error of serde for the author of the request. Only a faulty body is parsed again, to locate
/// the fault.
fn explain<T: DeserializeOwned>(error: &serde_json::Error, bytes: &[u8]) -> String {
    // The parser reports a number that does not fit its type as a syntax error.
    let out_of_range = error.to_string().starts_with("number out of range");
    if error.to_string().starts_with("recursion limit exceeded") {
        return "The request body is nested too deeply: at most 127 levels of lists and objects are allowed"
            .to_owned();
    }
    if !error.is_data() && !out_of_range {
        return format!("The request body is not valid JSON: {error}");
    }
    let reader = &mut serde_json::Deserializer::from_slice(bytes);
    let Err(located) = serde_path_to_error::deserialize::<_, T>(reader) else {
        return format!("Invalid request body: {error}");
    };
    let message = located.inner().to_string();
    let message = message.split(" at line ").next().unwrap_or_default();
    if let Some(field) = message
        .strip_prefix("missing field `")
        .and_then(|rest| rest.split('`').next())
    {
        return format!("Field '{field}' is required");
    }
    let message = in_plain_words(message);
    match located.path().to_string().as_str() {
        "." => format!("Invalid request body: {message}"),
        path => format!("Invalid field '{path}': {message}"),
    }
}

/// The collection named by the path.
pub(super) struct CollectionPath(pub CollectionName);

impl FromRequestParts<AppState> for CollectionPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = path_segments(parts, state).await?;
        let name = segments.first().cloned().unwrap_or_default();
        Ok(Self(CollectionName::parse(name)?))
    }
}

/// The collection and the document named by the path.
pub(super) struct DocumentPath(pub CollectionName, pub String);

impl FromRequestParts<AppState> for DocumentPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = path_segments(parts, state).await?;
        let [name, id] = <[String; 2]>::try_from(segments).map_err(|_| ApiError::route_not_found())?;
        Ok(Self(CollectionName::parse(name)?, id))
    }
}

/// The only parameter of the path.
pub(super) struct PathText(pub String);

impl FromRequestParts<AppState> for PathText {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = path_segments(parts, state).await?;
        Ok(Self(segments.into_iter().next().unwrap_or_default()))
    }
}

async fn path_segments(parts: &mut Parts, state: &AppState) -> Result<Vec<String>, ApiError> {
    use axum::extract::Path;
    let Path(segments) = Path::<Vec<String>>::from_request_parts(parts, state)
        .await
        .map_err(|_| ApiError::bad_request("The path is not valid percent-encoded UTF-8"))?;
    Ok(segments)
}

/// The decoded query string. The last of repeated parameters counts.
pub(super) struct Params(Vec<(String, String)>);

impl<S: Send + Sync> FromRequestParts<S> for Params {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        use axum::extract::Query;
        let Query(pairs) = Query::<Vec<(String, String)>>::from_request_parts(parts, state)
            .await
            .map_err(|_| ApiError::bad_request("The query string is not valid percent-encoded UTF-8"))?;
        Ok(Self(pairs))
    }
}

impl Params {
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .rev()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// A whole number, zero or more.
    pub(super) fn count(&self, name: &str, default: u64) -> Result<u64, InvalidInput> {
        let Some(text) = self.get(name) else {
            return Ok(default);
        };
        let text = text.trim();
        if text.len() > 1 && text.bytes().all(|b| b.is_ascii_digit()) {
            // A number that overflows is as good as the largest.
            return Ok(text.parse().unwrap_or(u64::MAX));
        }
        text.parse().map_err(|_| {
            InvalidInput::new(format!(
                "Query parameter '{name}' must be a whole number, zero or more, not {:?}",
                ragstone_core::collection::shorten(text)
            ))
        })
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, InvalidInput> {
        match self.get(name) {
            None => Ok(None),
            Some("true" | "1") => Ok(Some(true)),
            Some("false" | "0") => Ok(Some(false)),
            Some(other) => Err(InvalidInput::new(format!(
                "Query parameter '{name}' must be true or false, not {:?}",
                ragstone_core::collection::shorten(other)
            ))),
        }
    }
}
