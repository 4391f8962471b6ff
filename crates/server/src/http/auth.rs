//! Authorization: by API key, or, if there are none, for requests from this machine.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::error::ApiError;
use super::state::AppState;

/// Routes without a key: probes and the health page.
const OPEN_ROUTES: [&str; 3] = ["/livez", "/readyz", "/health"];

/// The API keys as digests. They have one length, so that comparing them in constant time reveals nothing,
/// and they cannot be printed by mistake.
#[derive(Default)]
pub struct ApiKeys(Vec<[u8; 32]>);

impl ApiKeys {
    pub fn new<'a>(keys: impl IntoIterator<Item = &'a str>) -> Self {
        Self(
            keys.into_iter()
                .map(|key| Sha256::digest(key.as_bytes()).into())
                .collect(),
        )
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn admits(&self, key: &[u8]) -> bool {
        let digest: [u8; 32] = Sha256::digest(key).into();
        let found = self
            .0
            .iter()
            .fold(Choice::from(0), |found, known| found | known.ct_eq(&digest));
        found.into()
    }
}

pub async fn require_key(State(state): State<AppState>, request: Request, next: Next) -> Response {
    if state.keys.is_empty() || OPEN_ROUTES.contains(&request.uri().path()) {
        return next.run(request).await;
    }
    if is_authorized(&state, request.headers()) {
        next.run(request).await
    } else {
        ApiError::unauthorized().into_response()
    }
}

/// Whether the request may see everything: always if the server has no keys.
pub(super) fn is_authorized(state: &AppState, headers: &HeaderMap) -> bool {
    state.keys.is_empty() || presented(headers).is_some_and(|key| state.keys.admits(key))
}

/// Refuses web pages of other sites on a server without keys, which listens on this machine only. Such a
/// page names itself in `Origin`, or in `Host` if it lets its own name point here (DNS rebinding).
pub async fn refuse_other_sites(State(state): State<AppState>, request: Request, next: Next) -> Response {
    if state.keys.is_empty() && state.only_this_machine && is_of_other_site(&request) {
        return ApiError::foreign_site().into_response();
    }
    next.run(request).await
}

fn is_of_other_site(request: &Request) -> bool {
    let text = |value: &HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let headers = request.headers();
    let host = headers.get(header::HOST).map(text);
    let host = host.map(|host| host.parse::<Authority>());
    let host = host.or_else(|| request.uri().authority().cloned().map(Ok));
    let named_elsewhere =
        host.is_some_and(|host| !host.is_ok_and(|host| is_address_or_localhost(host.host())));
    let asked_from_elsewhere = headers.get(header::ORIGIN).is_some_and(|origin| {
        let origin = text(origin).parse::<Uri>().ok();
        !origin.is_some_and(|origin| origin.host().is_some_and(is_this_machine))
    });
    named_elsewhere || asked_from_elsewhere
}

/// The owner of a name can let it point here; an address cannot be redirected.
fn is_address_or_localhost(host: &str) -> bool {
    is_this_machine(host) || host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
}

fn is_this_machine(host: &str) -> bool {
    let host = host.trim_matches(['[', ']']).to_ascii_lowercase();
    host == "localhost"
        || host.ends_with(".localhost")
        || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn presented(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes());
    }
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then(|| key.trim_ascii())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn pages_of_other_sites_are_told_from_this_machine() {
        let is_other = |host: Option<&str>, origin: Option<&str>| {
            let mut request = Request::new(Body::empty());
            for (name, value) in [(header::HOST, host), (header::ORIGIN, origin)] {
                if let Some(value) = value {
                    request.headers_mut().insert(name, value.parse().unwrap());
                }
            }
            is_of_other_site(&request)
        };
        for (host, origin) in [
            (None, None),
            (Some("localhost:5006"), None),
            (Some("127.0.0.1:5006"), Some("http://localhost:3000")),
            (Some("[::1]:5006"), Some("http://[::1]:3000")),
            (Some("172.17.0.1"), Some("https://app.localhost")),
        ] {
            assert!(!is_other(host, origin), "{host:?} {origin:?}");
        }
        for (host, origin) in [
            (Some("evil.example:5006"), None),
            (Some("localhost.evil.example"), None),
            (Some("localhost"), Some("https://evil.example")),
            (Some("localhost"), Some("http://192.168.1.7")),
            (Some("localhost"), Some("null")),
            (Some("localhost"), Some("")),
            (Some("a b"), None),
        ] {
            assert!(is_other(host, origin), "{host:?} {origin:?}");
        }
    }

    #[test]
    fn a_key_is_admitted_whole_or_not_at_all() {
        let keys = ApiKeys::new(["alpha", "beta"]);
        assert!(keys.admits(b"alpha") && keys.admits(b"beta"));
        for wrong in [&b""[..], b"alph", b"alphaa", b"ALPHA"] {
            assert!(!keys.admits(wrong));
        }
    }
}
