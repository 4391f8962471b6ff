//! The API document and the page that shows it. The page is part of the binary and loads nothing
//! from elsewhere.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{Html, IntoResponse};
use utoipa::openapi::OpenApi;

static OPENAPI: LazyLock<String> = LazyLock::new(|| {
    super::openapi()
        .to_pretty_json()
        .unwrap_or_else(|error| format!("{{\"error\": {:?}}}", error.to_string()))
});

pub(super) async fn openapi_json() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI.as_str())
}

pub(super) async fn page() -> Html<&'static str> {
    Html(include_str!("../../../../web/docs.html"))
}

/// Gives every operation an id of its own, made of its method and path: handlers in different modules
/// have the same names, and generators of clients want ids to be unique.
pub(super) fn name_operations(api: &mut OpenApi) {
    for (path, item) in &mut api.paths.paths {
        let words: Vec<&str> = path
            .split(|c: char| !c.is_ascii_alphanumeric())
            .filter(|word| !word.is_empty())
            .collect();
        let operations = [
            ("get", &mut item.get),
            ("post", &mut item.post),
            ("put", &mut item.put),
            ("delete", &mut item.delete),
        ];
        for (method, operation) in operations {
            if let Some(operation) = operation {
                operation.operation_id = Some(format!("{method}_{}", words.join("_")));
            }
        }
    }
}
