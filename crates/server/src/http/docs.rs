//! The API document and the page that shows it. The page is part of the binary and loads nothing
//! from elsewhere.

use std::sync::LazyLock;

use axum::http::header;
use axum::response::{Html, IntoResponse};

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
