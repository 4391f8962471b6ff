//! Compatibility with clients of OpenAI and Cohere, for every route of theirs.

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use serde::Serialize;
use serde_json::json;
use utoipa::ToSchema;

use super::error::Explained;
use super::state::AppState;

/// Repeats the detail of an error in the fields where OpenAI's and Cohere's clients look for it.
pub(super) async fn explain_errors(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let (openai, cohere) = (path.starts_with("/v1/"), path.starts_with("/v2/"));
    let mut response = next.run(request).await;
    if !openai && !cohere {
        return response;
    }
    let Some(Explained(detail)) = response.extensions_mut().remove() else {
        return response;
    };
    let kind = match response.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "server_error",
    };
    let mut body = json!({
        "error": {"message": &detail, "type": kind, "param": null, "code": null},
        "detail": &detail,
    });
    if cohere {
        body["message"] = detail.into();
    }
    *response.body_mut() = Body::from(body.to_string());
    response
}

#[derive(Serialize, ToSchema)]
#[schema(example = json!({"object": "list", "data": [{"id": "minilm", "object": "model", "created": 0, "owned_by": "ragstone"}]}))]
pub(super) struct ModelList {
    object: &'static str,
    data: Vec<ListedModel>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct ListedModel {
    id: String,
    object: &'static str,
    /// Unknown; present because OpenAI's clients expect it.
    created: u64,
    owned_by: &'static str,
}

/// The loaded embedding models, as OpenAI's API lists them.
#[utoipa::path(get, path = "/v1/models", tag = "models", responses((status = 200, body = ModelList)))]
pub(super) async fn models(State(state): State<AppState>) -> Json<ModelList> {
    let listed = |id: &str| ListedModel {
        id: id.to_owned(),
        object: "model",
        created: 0,
        owned_by: "ragstone",
    };
    let embedders = state.service.models.embedders();
    Json(ModelList {
        object: "list",
        data: embedders
            .map(|embedder| listed(&embedder.info().identity.id))
            .collect(),
    })
}
