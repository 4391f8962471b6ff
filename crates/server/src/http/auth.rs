//! API keys.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::error::ApiError;
use super::state::AppState;

/// Routes that need no key: probes and the health page.
const OPEN_ROUTES: [&str; 3] = ["/livez", "/readyz", "/health"];

/// The keys that open the service, kept as digests: all of one length, so that comparing them in
/// constant time says nothing about a key, and nothing that could be printed by mistake.
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
    match presented(request.headers()) {
        Some(key) if state.keys.admits(key) => next.run(request).await,
        _ => ApiError::unauthorized().into_response(),
    }
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
    use super::*;

    #[test]
    fn a_key_is_admitted_whole_or_not_at_all() {
        let keys = ApiKeys::new(["alpha", "beta"]);
        assert!(keys.admits(b"alpha") && keys.admits(b"beta"));
        for wrong in [&b""[..], b"alph", b"alphaa", b"ALPHA"] {
            assert!(!keys.admits(wrong));
        }
    }
}
