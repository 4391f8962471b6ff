//! Reading requests: bodies, paths and query strings, with refusals that name what is wrong.

use std::fmt;
use std::marker::PhantomData;

use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::header;
use axum::http::request::Parts;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use ragstone_core::collection::CollectionName;
use ragstone_core::error::{InvalidInput, in_plain_words};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use tokio::sync::OwnedSemaphorePermit;

use super::error::ApiError;
use super::state::AppState;

/// Above this size a body is parsed off the async threads.
const PARSE_INLINE: usize = 64 * 1024;

/// Something with named fields that must be a JSON object. Without this a list would do as well,
/// its elements taken for the fields in the order of their declaration.
struct Object<T>(T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = T;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON object")
            }

            fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(fields))
            }
        }

        deserializer.deserialize_map(Fields(PhantomData)).map(Self)
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

/// A JSON object of at most the ordinary size, whatever its content type says.
pub(super) struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for JsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let bytes = read_body(request, state.limits.body_bytes, state).await?;
        parse_json(bytes).await.map(|Object(body)| Self(body))
    }
}

/// The same for a body that may be anything its type can be read from.
pub(super) struct AnyJsonBody<T>(pub T);

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for AnyJsonBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &AppState) -> Result<Self, ApiError> {
        let bytes = read_body(request, state.limits.body_bytes, state).await?;
        parse_json(bytes).await.map(Self)
    }
}

/// A large body of any type, which keeps its share of the budget until it is dropped.
pub(super) struct LargeBody {
    pub content_type: String,
    pub bytes: bytes::Bytes,
    _budget: OwnedSemaphorePermit,
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

pub(super) async fn read_large(
    request: Request,
    state: &AppState,
) -> Result<(bytes::Bytes, OwnedSemaphorePermit), ApiError> {
    let limit = state.limits.add_bytes;
    let announced = announced_length(&request, limit)?;
    let budget = state.body_budget.reserve(announced.unwrap_or(limit)).await?;
    Ok((read_body(request, limit, state).await?, budget))
}

/// How long the body says it is. One that is too long need not be waited for.
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
    if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING)
        && encoding != "identity"
    {
        return Err(ApiError::unsupported_encoding(encoding));
    }
    let body = Limited::new(request.into_body(), limit);
    match tokio::time::timeout(state.limits.body_timeout, body.collect()).await {
        Err(_) => Err(ApiError::timeout()),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::too_large(limit)),
        Ok(Err(_)) => Err(ApiError::bad_request("The request body broke off before its end")),
    }
}

/// A JSON object.
pub(super) async fn parse_object<T: DeserializeOwned + Send + 'static>(
    bytes: bytes::Bytes,
) -> Result<T, ApiError> {
    parse_json(bytes).await.map(|Object(body)| body)
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

/// Turns serde's wording into a sentence for whoever wrote the request. The body is read again to
/// find where in it the fault is, which only a faulty body pays for.
fn explain<T: DeserializeOwned>(error: &serde_json::Error, bytes: &[u8]) -> String {
    // The parser counts a number that does not fit its type as a fault of the syntax.
    let out_of_range = error.to_string().starts_with("number out of range");
    if error.to_string().starts_with("recursion limit exceeded") {
        return "The request body is nested too deeply: at most 127 lists and objects may stand in one another"
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

/// The collection that the path names. A name that breaks the rule cannot exist, and the message
/// of a lookup says so in the usual words.
pub(super) struct CollectionPath(pub CollectionName);

impl FromRequestParts<AppState> for CollectionPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = path_segments(parts, state).await?;
        let name = segments.first().cloned().unwrap_or_default();
        Ok(Self(CollectionName::parse(name)?))
    }
}

/// The collection and the document that the path names.
pub(super) struct DocumentPath(pub CollectionName, pub String);

impl FromRequestParts<AppState> for DocumentPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &AppState) -> Result<Self, ApiError> {
        let segments = path_segments(parts, state).await?;
        let [name, id] = <[String; 2]>::try_from(segments).map_err(|_| ApiError::route_not_found())?;
        Ok(Self(CollectionName::parse(name)?, id))
    }
}

/// The one thing that the path names, whatever it is called.
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

/// The query string, decoded and looked up by name; of repeated parameters the last counts.
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
            // More than can be counted is as good as the most that can be.
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
