//! Middleware around every request: an id, a log line, metrics, a deadline, and a response even when a
//! handler panics.

use std::any::Any;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;
use utoipa::openapi::{Content, OpenApi, Ref, RefOr, ResponseBuilder};

use super::error::ApiError;
use super::state::AppState;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const MAX_ID_BYTES: usize = 128;

/// Gives the request an id (the client's own, if it is printable), logs it and counts it.
pub(super) async fn request(request: Request, next: Next) -> Response {
    let id = request
        .headers()
        .get(REQUEST_ID)
        .and_then(|id| id.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= MAX_ID_BYTES && id.bytes().all(|b| b.is_ascii_graphic()))
        .map_or_else(|| uuid::Uuid::new_v4().to_string(), str::to_owned);
    let method = request.method().clone();
    // The pattern, not the path, because label values must come from a fixed set.
    let route = request
        .extensions()
        .get::<MatchedPath>()
        .map_or_else(|| "unmatched".to_owned(), |path| path.as_str().to_owned());
    let path = request.uri().path().to_owned();
    let span = tracing::info_span!("request", id = %id, %method, %path);
    let start = Instant::now();
    let mut response = next.run(request).instrument(span.clone()).await;
    let took = start.elapsed();
    let status = response.status();
    let labels = [
        ("method", method_label(&method).to_owned()),
        ("route", route),
        ("status", status_label(status)),
    ];
    metrics::counter!("ragstone_http_requests_total", &labels).increment(1);
    metrics::histogram!("ragstone_http_request_seconds", &labels[..2]).record(took.as_secs_f64());
    span.in_scope(|| {
        tracing::debug!(
            status = status.as_u16(),
            ms = took.as_secs_f64() * 1e3,
            "answered"
        );
    });
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Clients can invent methods, and every new label value takes memory for ever.
fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// Statuses of other services are passed on, and those can be invented too.
fn status_label(status: StatusCode) -> String {
    match status.canonical_reason() {
        Some(_) => status.as_u16().to_string(),
        None => "other".to_owned(),
    }
}

/// Aborts a request that takes too long, with all of its work that can be cancelled.
pub(super) async fn deadline(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let limit = state.limits.request_timeout;
    match tokio::time::timeout(limit, next.run(request)).await {
        Ok(response) => response,
        Err(_) => {
            let detail = format!(
                "The request took longer than {} s and was aborted",
                limit.as_secs()
            );
            ApiError::busy(detail, std::time::Duration::from_secs(5)).into_response()
        }
    }
}

/// Answers for a handler that panicked. The message goes to the log only.
pub(super) fn after_panic(panic: Box<dyn Any + Send>) -> Response {
    let message = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without a message");
    ApiError::internal(&std::io::Error::other(message.to_owned())).into_response()
}

/// Describes the errors that any route can return, for every route.
pub(super) fn describe_common_errors(api: &mut OpenApi) {
    let common = [
        (StatusCode::UNAUTHORIZED, "The API key is missing or wrong"),
        (
            StatusCode::FORBIDDEN,
            "The server has no API keys, and the request comes from another site",
        ),
        (
            StatusCode::INTERNAL_SERVER_ERROR,
            "Internal error; see the server's log",
        ),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "The service is unavailable; see Retry-After",
        ),
    ];
    let too_large = (StatusCode::PAYLOAD_TOO_LARGE, "The request body is too large");
    let encoded = (
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        "The request body is compressed, which is not supported",
    );
    let bad_request = (StatusCode::BAD_REQUEST, "Invalid request; see `detail`");
    const OPEN: [&str; 3] = ["/health", "/livez", "/readyz"];
    for (path, item) in &mut api.paths.paths {
        let operations = [&mut item.get, &mut item.post, &mut item.put, &mut item.delete];
        for operation in operations.into_iter().flatten() {
            let has_body = operation.request_body.is_some();
            let of_some = [
                has_body.then_some(too_large),
                has_body.then_some(encoded),
                (has_body || path.contains('{')).then_some(bad_request),
            ];
            for (status, description) in common.into_iter().chain(of_some.into_iter().flatten()) {
                if status == StatusCode::UNAUTHORIZED && OPEN.contains(&path.as_str()) {
                    continue;
                }
                let schema = RefOr::Ref(Ref::from_schema_name("ErrorBody"));
                let response = ResponseBuilder::new()
                    .description(description)
                    .content("application/json", Content::new(Some(schema)))
                    .build();
                operation
                    .responses
                    .responses
                    .entry(status.as_u16().to_string())
                    .or_insert(RefOr::T(response));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_come_from_fixed_sets() {
        assert_eq!(method_label(&Method::DELETE), "DELETE");
        for invented in ["BREW", "get", "M-SEARCH"] {
            let method = Method::from_bytes(invented.as_bytes()).unwrap();
            assert_eq!(method_label(&method), "other");
        }
        assert_eq!(status_label(StatusCode::NOT_FOUND), "404");
        assert_eq!(status_label(StatusCode::from_u16(799).unwrap()), "other");
    }

    #[tokio::test]
    async fn the_message_of_a_panic_is_not_in_the_response() {
        for panic in [
            Box::new("the key is canary") as Box<dyn Any + Send>,
            Box::new("the key is canary".to_owned()),
            Box::new(7),
        ] {
            let response = after_panic(panic);
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            let body = axum::body::to_bytes(response.into_body(), usize::MAX).await;
            let body = String::from_utf8_lossy(&body.unwrap_or_default()).into_owned();
            assert!(body.contains("detail") && !body.contains("canary"), "{body}");
        }
    }
}
