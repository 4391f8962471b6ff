//! Routes that embed texts: OpenAI's interface, and a plain one.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use base64::Engine as _;
use ragstone_core::error::InvalidInput;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, Role};
use ragstone_core::models::embed_all;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::error::{ApiError, ErrorBody};
use super::extract::JsonBody;
use super::state::AppState;

const MAX_INPUTS: usize = 2048;
const TRUNCATED: HeaderName = HeaderName::from_static("x-ragstone-truncated");
/// The most indexes in that header.
const MAX_LISTED: usize = 200;

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"model": "minilm", "input": ["a text", "another"]}))]
pub(super) struct OpenAiBody {
    input: Input,
    /// The id of a loaded model; the first one by default.
    model: Option<String>,
    /// `float` (default) or `base64` (little-endian 32-bit floats).
    encoding_format: Option<String>,
    /// Truncate each vector to this many numbers and normalize it to length 1.
    dimensions: Option<usize>,
    /// `query` or `passage` (default), for models that embed them differently.
    input_type: Option<String>,
}

#[derive(Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of token ids, or a list of such lists"
)]
pub(super) enum Input {
    Text(String),
    Texts(Vec<String>),
    /// Token ids of the model's own vocabulary.
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Input {
    fn into_inputs(self) -> Vec<EmbedInput> {
        match self {
            Self::Text(text) => vec![EmbedInput::Text(text)],
            Self::Texts(texts) => texts.into_iter().map(EmbedInput::Text).collect(),
            Self::Tokens(tokens) => vec![EmbedInput::Tokens(tokens)],
            Self::TokenLists(lists) => lists.into_iter().map(EmbedInput::Tokens).collect(),
        }
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiAnswer {
    object: &'static str,
    data: Vec<OpenAiEmbedding>,
    model: String,
    usage: Usage,
}

#[derive(Serialize, ToSchema)]
pub(super) struct OpenAiEmbedding {
    object: &'static str,
    index: usize,
    embedding: Encoded,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum Encoded {
    Float(Vec<f32>),
    Base64(String),
}

#[derive(Serialize, ToSchema)]
pub(super) struct Usage {
    prompt_tokens: usize,
    total_tokens: usize,
}

/// Embed texts through OpenAI's interface.
#[utoipa::path(
    post, path = "/v1/embeddings", tag = "models", request_body = OpenAiBody,
    responses(
        (status = 200, body = OpenAiAnswer, headers(("x-ragstone-truncated" = String,
            description = "Only where inputs are longer than the model reads: the indexes of those of which only \
                the beginning was embedded, such as `0,3`; of many the first 200, and then `...`"))),
        (status = 400, body = ErrorBody, description = "The input is malformed"),
        (status = 404, body = ErrorBody, description = "No such model is loaded"),
        (status = 429, body = ErrorBody, description = "The model's queue is full; see Retry-After"),
        (status = 503, body = ErrorBody, description = "No model is loaded"),
    ),
)]
pub(super) async fn openai(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<OpenAiBody>,
) -> Result<(HeaderMap, Json<OpenAiAnswer>), ApiError> {
    let embedder = choose(&state, body.model.as_deref())?;
    let base64 = match body.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => {
            return Err(ApiError::bad_request(
                "'encoding_format' must be 'float' or 'base64'",
            ));
        }
    };
    let width = embedder.info().identity.dimensions;
    if let Some(wanted) = body.dimensions.filter(|wanted| !(1..=width).contains(wanted)) {
        return Err(ApiError::bad_request(format!(
            "'dimensions' must be from 1 to {width} for this model, not {wanted}"
        )));
    }
    let role = parse_role(body.input_type.as_deref())?;
    let mut embeddings = embed(&embedder, body.input.into_inputs(), role).await?;
    if let Some(wanted) = body.dimensions {
        for embedding in &mut embeddings {
            embedding.vector.truncate(wanted);
            normalise(&mut embedding.vector);
        }
    }
    let tokens = embeddings.iter().map(|embedding| embedding.tokens).sum();
    let headers = truncated_header(&truncated(&embeddings));
    let data = embeddings
        .into_iter()
        .enumerate()
        .map(|(index, embedding)| OpenAiEmbedding {
            object: "embedding",
            index,
            embedding: if base64 {
                Encoded::Base64(to_base64(&embedding.vector))
            } else {
                Encoded::Float(embedding.vector)
            },
        })
        .collect();
    let answer = OpenAiAnswer {
        object: "list",
        data,
        model: embedder.info().identity.id.clone(),
        usage: Usage {
            prompt_tokens: tokens,
            total_tokens: tokens,
        },
    };
    Ok((headers, Json(answer)))
}

#[derive(Deserialize, ToSchema)]
#[schema(example = json!({"texts": ["a text"], "normalize": true}))]
pub(super) struct EmbedBody {
    texts: Vec<String>,
    /// Normalize every vector to length 1. By default it stays as the model made it.
    normalize: Option<bool>,
    model: Option<String>,
    /// `query` or `passage` (default).
    role: Option<String>,
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"model": "minilm", "dim": 3, "embeddings": [[0.1, 0.2, 0.3]]}))]
pub(super) struct EmbedAnswer {
    model: String,
    dim: usize,
    embeddings: Vec<Vec<f32>>,
    /// Indexes of the texts that were truncated to the model's limit.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    truncated: Vec<usize>,
}

/// Embed texts.
#[utoipa::path(
    post, path = "/embed", tag = "models", request_body = EmbedBody,
    responses(
        (status = 200, body = EmbedAnswer), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 429, body = ErrorBody), (status = 503, body = ErrorBody, description = "No model is loaded"),
    ),
)]
pub(super) async fn plain(
    State(state): State<AppState>,
    JsonBody(body): JsonBody<EmbedBody>,
) -> Result<Json<EmbedAnswer>, ApiError> {
    let embedder = choose(&state, body.model.as_deref())?;
    let role = parse_role(body.role.as_deref())?;
    let inputs = body.texts.into_iter().map(EmbedInput::Text).collect();
    let mut embeddings = embed(&embedder, inputs, role).await?;
    if body.normalize.unwrap_or(false) {
        embeddings
            .iter_mut()
            .for_each(|embedding| normalise(&mut embedding.vector));
    }
    Ok(Json(EmbedAnswer {
        model: embedder.info().identity.id.clone(),
        dim: embedder.info().identity.dimensions,
        truncated: truncated(&embeddings),
        embeddings: embeddings.into_iter().map(|embedding| embedding.vector).collect(),
    }))
}

/// The indexes of truncated texts.
fn truncated(embeddings: &[Embedding]) -> Vec<usize> {
    let cut = embeddings.iter().enumerate().filter(|(_, e)| e.truncated);
    cut.map(|(index, _)| index).collect()
}

/// The header for truncated texts: OpenAI's answer has no field for them. Proxies refuse headers of many
/// kilobytes, so the list is bounded.
pub(super) fn truncated_header(indexes: &[usize]) -> HeaderMap {
    let mut listed: Vec<String> = indexes.iter().take(MAX_LISTED).map(usize::to_string).collect();
    if indexes.len() > MAX_LISTED {
        listed.push("...".to_owned());
    }
    let value = HeaderValue::from_str(&listed.join(",")).ok();
    value
        .filter(|_| !indexes.is_empty())
        .map(|value| (TRUNCATED, value))
        .into_iter()
        .collect()
}

async fn embed(
    embedder: &Arc<dyn Embedder>,
    inputs: Vec<EmbedInput>,
    role: Role,
) -> Result<Vec<Embedding>, ApiError> {
    if inputs.len() > MAX_INPUTS {
        return Err(ApiError::bad_request(format!(
            "{} inputs; at most {MAX_INPUTS} are allowed at once",
            inputs.len()
        )));
    }
    Ok(embed_all(embedder.as_ref(), inputs, role).await?)
}

/// Finds a model by its id, or by the name it was loaded from.
fn choose(state: &AppState, wanted: Option<&str>) -> Result<Arc<dyn Embedder>, ApiError> {
    let models = &state.service.models;
    let Some(wanted) = wanted else {
        return models.default_embedder().cloned().ok_or_else(no_model);
    };
    models.named(wanted).cloned().ok_or_else(|| {
        ApiError::not_found(format!(
            "Embedding model '{}' not loaded. Available models: {}",
            ragstone_core::collection::shorten(wanted),
            models.available()
        ))
    })
}

fn no_model() -> ApiError {
    ApiError::busy(
        "No embedding model is loaded: start the server with --embeddings-config",
        std::time::Duration::from_secs(60),
    )
}

fn parse_role(role: Option<&str>) -> Result<Role, InvalidInput> {
    match role {
        None | Some("passage" | "document" | "search_document") => Ok(Role::Passage),
        Some("query" | "search_query") => Ok(Role::Query),
        Some(_) => Err(InvalidInput::new(
            "the role of a text must be 'query' or 'passage'",
        )),
    }
}

fn normalise(vector: &mut [f32]) {
    let norm = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    if norm > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
}

fn to_base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    base64::engine::general_purpose::STANDARD.encode(bytes)
}
