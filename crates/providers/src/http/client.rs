//! Sending calls to one service.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use jiff::Timestamp;
use ragstone_core::backoff::{Backoff, RetryLimits};
use ragstone_core::call::{CallError, ErrorAnswer};
use ragstone_core::circuit_breaker::CircuitBreaker;
use ragstone_core::error::in_plain_words;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{Method, Response, StatusCode, Url, redirect};
use secrecy::ExposeSecret;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, timeout, timeout_at};

use super::address::{self, AddressRule, GuardedResolver};
use super::operation;
use super::retry::{self, CallFailure, SendState};
use super::secrets::{Secrets, basic_credentials};
use super::settings::{Auth, ClientSettings, Policy};
use crate::error::ConfigError;

const MAX_REDIRECTS: usize = 3;

pub type ByteStream = BoxStream<'static, Result<Bytes, CallError>>;

/// One logical request to a service.
#[derive(Debug, Clone)]
pub struct Call {
    method: Method,
    path: String,
    query: Vec<(&'static str, String)>,
    headers: Vec<(&'static str, String)>,
    body: Option<Bytes>,
    repeat: Repeat,
    breaking: Breaking,
    patience: Option<Duration>,
}

/// When a call may be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// It changes nothing: every failure of the service is worth another attempt, a plain 500 or 503
    /// included.
    Read,
    /// Idempotent: sending it twice has the effect of sending it once.
    Freely,
    /// Only if the service cannot have processed it.
    IfUnprocessed,
}

/// How a call and the circuit breaker affect each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breaking {
    Obeyed,
    /// Like the former, but only outages open the circuit, not other errors that the service answers with.
    ByOutages,
    /// A health check, which also runs while the circuit is open.
    Ignored,
}

impl Call {
    pub fn get(path: impl Into<String>) -> Self {
        Self::new(Method::GET, path).repeat(Repeat::Read)
    }

    pub fn post(path: impl Into<String>) -> Self {
        Self::new(Method::POST, path)
    }

    pub fn put(path: impl Into<String>) -> Self {
        Self::new(Method::PUT, path)
    }

    pub fn delete(path: impl Into<String>) -> Self {
        Self::new(Method::DELETE, path)
    }

    fn is_outage(&self, status: u16) -> bool {
        match self.breaking {
            Breaking::ByOutages => matches!(status, 502..=504),
            Breaking::Obeyed | Breaking::Ignored => status >= 500,
        }
    }

    /// `path` is relative to the base URL and already encoded.
    fn new(method: Method, path: impl Into<String>) -> Self {
        Self {
            method,
            path: path.into(),
            query: Vec::new(),
            headers: Vec::new(),
            body: None,
            repeat: Repeat::Freely,
            breaking: Breaking::Obeyed,
            patience: None,
        }
    }

    /// A timeout of its own, for work that may take longer than the policy's deadline.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = Some(patience);
        self
    }

    #[must_use]
    pub fn query(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.query.push((name, value.into()));
        self
    }

    #[must_use]
    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    /// The values of this crate can always be serialised; one that cannot is sent without a body.
    #[must_use]
    pub fn json(mut self, body: &impl Serialize) -> Self {
        self.body = serde_json::to_vec(body).ok().map(Bytes::from);
        self
    }

    #[must_use]
    pub fn repeat(mut self, repeat: Repeat) -> Self {
        self.repeat = repeat;
        self
    }

    #[must_use]
    pub fn breaking(mut self, breaking: Breaking) -> Self {
        self.breaking = breaking;
        self
    }
}

/// An answer with a status of success, read whole.
#[derive(Debug, Clone)]
pub struct HttpAnswer {
    pub status: u16,
    pub body: Bytes,
}

/// Sends calls to one service. Cheap to clone; clones share connections and circuit.
#[derive(Clone)]
pub struct ServiceClient(Arc<Inner>);

struct Inner {
    service: String,
    base_url: Url,
    policy: Policy,
    http: reqwest::Client,
    auth: HeaderMap,
    secrets: Secrets,
    breaker: CircuitBreaker,
    backoff: Backoff,
}

impl std::fmt::Debug for ServiceClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceClient")
            .field("service", &self.0.service)
            .field("base_url", &self.0.base_url.as_str())
            .finish_non_exhaustive()
    }
}

impl ServiceClient {
    pub fn new(settings: ClientSettings) -> Result<Self, ConfigError> {
        let ClientSettings {
            service,
            base_url,
            auth,
            policy,
            addresses,
        } = settings;
        addresses
            .check_url(&base_url)
            .map_err(|message| ConfigError::field("url", message))?;
        // A proxy would resolve names itself, beyond the rule for URLs of clients.
        let is_foreign = matches!(addresses, AddressRule::Foreign { .. });
        let mut builder = reqwest::Client::builder()
            .user_agent(concat!("ragstone/", env!("CARGO_PKG_VERSION")))
            .redirect(redirect::Policy::none())
            .connect_timeout(policy.connect_timeout.min(policy.deadline))
            .dns_resolver(Arc::new(GuardedResolver {
                rule: addresses,
                port: base_url.port_or_known_default(),
            }));
        if is_foreign || address::is_local(&base_url) {
            builder = builder.no_proxy();
        }
        if base_url.scheme() == "http" {
            // Without TLS, a machine without certificates is no reason to fail.
            builder = builder.tls_certs_only([]);
        }
        let http = builder.build().map_err(|e| ConfigError::Client(innermost(&e)))?;
        Ok(Self(Arc::new(Inner {
            breaker: CircuitBreaker::new(policy.failures_to_open),
            backoff: retry::backoff(&policy),
            secrets: Secrets::of(&auth),
            auth: auth_headers(&auth)?,
            service,
            base_url,
            policy,
            http,
        })))
    }

    pub fn service(&self) -> &str {
        &self.0.service
    }

    /// Sends a call and reads the answer whole.
    pub async fn call(&self, call: Call) -> Result<HttpAnswer, CallError> {
        let mut body = Vec::new();
        let response = self.0.guarded(&call, Some(&mut body)).await?;
        Ok(HttpAnswer {
            status: response.status().as_u16(),
            body: body.into(),
        })
    }

    /// Sends a call and parses the answer as JSON.
    pub async fn call_json<T: DeserializeOwned>(&self, call: Call) -> Result<T, CallError> {
        let answer = self.call(call).await?;
        self.read_json(&answer.body)
    }

    /// [`ServiceClient::call_json`] for an answer that is shown to people: credentials in it are masked.
    pub async fn call_json_to_show<T: DeserializeOwned>(&self, call: Call) -> Result<T, CallError> {
        let answer = self.call(call).await?;
        self.read_json(&self.0.secrets.hide_in_bytes(answer.body.into()))
    }

    fn read_json<T: DeserializeOwned>(&self, body: &[u8]) -> Result<T, CallError> {
        serde_json::from_slice(body).map_err(|e| {
            let reason = in_plain_words(&e.to_string());
            self.bad_answer(format!("it is not the JSON that was expected ({reason})"))
        })
    }

    /// Sends a call and streams the answer.
    pub async fn open(&self, call: Call) -> Result<ByteStream, CallError> {
        let response = self.0.guarded(&call, None).await?;
        Ok(self.limited(response))
    }

    /// An error for an answer with unusable content.
    pub fn bad_answer(&self, reason: impl Into<String>) -> CallError {
        self.0.bad_answer(reason.into())
    }

    /// Limits a stream to the size of an answer, and each wait for its next chunk to the deadline.
    fn limited(&self, response: Response) -> ByteStream {
        let client = self.clone();
        let state = (response, 0_u64);
        futures::stream::try_unfold(state, move |(mut response, read)| {
            let client = client.clone();
            async move {
                let inner = &*client.0;
                let chunk = timeout(inner.policy.deadline, response.chunk())
                    .await
                    .map_err(|_| inner.deadline_exceeded(inner.policy.deadline))?
                    .map_err(|e| inner.unreachable(&e))?;
                let Some(chunk) = chunk else { return Ok(None) };
                let read = read + chunk.len() as u64;
                if read > inner.policy.max_answer_bytes {
                    return Err(inner.too_large());
                }
                Ok(Some((chunk, (response, read))))
            }
        })
        .boxed()
    }
}

impl Inner {
    /// Puts deadline, circuit and retries around the attempts of a call. Where the body of a
    /// response of success is wanted, reading it is part of the attempt.
    async fn guarded(&self, call: &Call, body: Option<&mut Vec<u8>>) -> Result<Response, CallError> {
        let now = || Instant::now().into_std();
        let permit = match call.breaking {
            Breaking::Ignored => self.breaker.enter_anyway(now()),
            Breaking::Obeyed | Breaking::ByOutages => {
                self.breaker
                    .enter(now())
                    .map_err(|retry_after| CallError::CircuitOpen {
                        service: self.service.clone(),
                        retry_after,
                    })?
            }
        };
        let patience = operation::patience(call.patience.unwrap_or(self.policy.deadline));
        let deadline = operation::deadline(patience);
        // A call that others of its operation left little time to says nothing about the service.
        let is_cut = deadline < retry::after(patience / 2);
        let outcome = timeout_at(deadline, self.attempts(call, deadline, body))
            .await
            .unwrap_or_else(|_| Err(self.deadline_exceeded(patience)));
        match &outcome {
            Err(CallError::DeadlineExceeded { .. }) if is_cut => {}
            Err(CallError::Unreachable { .. } | CallError::DeadlineExceeded { .. }) => {
                permit.failed(now(), self.policy.cooldown);
            }
            Err(error)
                if error.status().is_some_and(|status| call.is_outage(status)) && !error.is_considered() =>
            {
                permit.failed(now(), self.policy.cooldown);
            }
            _ => permit.succeeded(now()),
        }
        outcome
    }

    async fn attempts(
        &self,
        call: &Call,
        deadline: Instant,
        mut body: Option<&mut Vec<u8>>,
    ) -> Result<Response, CallError> {
        let mut attempt = 1;
        loop {
            let failure = match self.attempt(call, body.as_deref_mut()).await {
                Ok(response) => return Ok(response),
                Err(failure) => failure,
            };
            if !failure.is_worth_retrying(call.repeat) {
                return Err(failure.error);
            }
            let limits = RetryLimits {
                retry_after: failure.retry_after(),
                time_left: deadline.saturating_duration_since(Instant::now()),
            };
            let Some(delay) = self.backoff.retry(attempt, fastrand::f64(), limits) else {
                return Err(failure.error);
            };
            tracing::debug!(service = %self.service, attempt, ?delay, error = %failure.error, "retrying");
            tokio::time::sleep(delay).await;
            attempt += 1;
        }
    }

    async fn attempt(&self, call: &Call, body: Option<&mut Vec<u8>>) -> Result<Response, CallFailure> {
        let mut response = self.send(call).await?;
        if response.status().is_success() {
            if let Some(body) = body {
                *body = self.read_body(&mut response).await?;
            }
            return Ok(response);
        }
        let status = response.status();
        let header = |name| Some(response.headers().get(name)?.to_str().ok()?.to_owned());
        let content_type = header(CONTENT_TYPE);
        let retry_after: Option<String> = header(RETRY_AFTER);
        let body = self.read_body(&mut response).await?;
        Err(CallFailure {
            error: CallError::Answered(Box::new(ErrorAnswer {
                service: self.service.clone(),
                status: status.as_u16(),
                content_type: content_type.map(|value| self.secrets.hide(value)),
                body: self.secrets.hide_in_bytes(body),
                retry_after: retry_after.and_then(|value| retry::parse_retry_after(&value, Timestamp::now())),
            })),
            sent: SendState::Answered,
        })
    }

    /// Sends once, following redirects within the same origin.
    async fn send(&self, call: &Call) -> Result<Response, CallFailure> {
        let mut url = self.url(call)?;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self
                .http
                .request(call.method.clone(), url.clone())
                .headers(self.auth.clone());
            for (name, value) in &call.headers {
                request = request.header(*name, value);
            }
            if let Some(body) = &call.body {
                request = request
                    .header(CONTENT_TYPE, "application/json")
                    .body(body.clone());
            }
            let response = request.send().await.map_err(|e| CallFailure {
                sent: if e.is_connect() {
                    SendState::No
                } else {
                    SendState::Perhaps
                },
                error: self.unreachable(&e),
            })?;
            match self.redirect_target(call, &url, &response)? {
                Some(target) => url = target,
                None => return Ok(response),
            }
        }
        Err(self.refused("it redirects too often"))
    }

    /// The target of a redirect. One that would change the method or leave the origin is refused.
    fn redirect_target(
        &self,
        call: &Call,
        from: &Url,
        response: &Response,
    ) -> Result<Option<Url>, CallFailure> {
        let keeps_the_method = match response.status() {
            StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT => true,
            StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND | StatusCode::SEE_OTHER => {
                call.method == Method::GET
            }
            _ => return Ok(None),
        };
        let target = response
            .headers()
            .get(LOCATION)
            .and_then(|location| from.join(location.to_str().ok()?).ok())
            .ok_or_else(|| self.refused("it redirects to nowhere"))?;
        if target.origin() != from.origin() {
            return Err(self.refused("it redirects to another host, which is not followed"));
        }
        if !keeps_the_method {
            let reason = format!(
                "it redirects a {}, which is not followed: configure the address it redirects to",
                call.method
            );
            return Err(self.refused(&reason));
        }
        Ok(Some(target))
    }

    fn url(&self, call: &Call) -> Result<Url, CallFailure> {
        let mut url = self
            .base_url
            .join(&call.path)
            .map_err(|_| self.refused("its address cannot be built"))?;
        if !call.query.is_empty() {
            url.query_pairs_mut()
                .extend_pairs(call.query.iter().map(|(name, value)| (*name, value.as_str())));
        }
        Ok(url)
    }

    async fn read_body(&self, response: &mut Response) -> Result<Vec<u8>, CallFailure> {
        let limit = self.policy.max_answer_bytes;
        let cut = || CallFailure {
            error: self.too_large(),
            sent: SendState::Final,
        };
        let announced = response.content_length().unwrap_or(0);
        if announced > limit {
            return Err(cut());
        }
        let mut body = Vec::with_capacity(announced.min(1 << 20) as usize);
        while let Some(chunk) = response.chunk().await.map_err(|e| CallFailure {
            error: self.unreachable(&e),
            sent: SendState::Perhaps,
        })? {
            if (body.len() + chunk.len()) as u64 > limit {
                return Err(cut());
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body)
    }

    fn refused(&self, reason: &str) -> CallFailure {
        CallFailure {
            error: self.bad_answer(reason.to_owned()),
            sent: SendState::Final,
        }
    }

    fn bad_answer(&self, reason: String) -> CallError {
        CallError::BadAnswer {
            service: self.service.clone(),
            reason: self.secrets.hide(reason),
        }
    }

    fn unreachable(&self, error: &reqwest::Error) -> CallError {
        CallError::Unreachable {
            service: self.service.clone(),
            reason: self.secrets.hide(innermost(error)),
        }
    }

    fn deadline_exceeded(&self, after: Duration) -> CallError {
        CallError::DeadlineExceeded {
            service: self.service.clone(),
            after,
        }
    }

    fn too_large(&self) -> CallError {
        CallError::TooLarge {
            service: self.service.clone(),
            limit: self.policy.max_answer_bytes,
        }
    }
}

/// The innermost cause of an error: the outer ones repeat the URL and say less.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

fn auth_headers(auth: &Auth) -> Result<HeaderMap, ConfigError> {
    let (name, value) = match auth {
        Auth::None => return Ok(HeaderMap::new()),
        Auth::Bearer(token) => ("authorization", format!("Bearer {}", token.expose_secret())),
        Auth::Basic { username, password } => (
            "authorization",
            format!("Basic {}", basic_credentials(username, password)),
        ),
        Auth::Header { name, key } => (name.as_str(), key.expose_secret().to_owned()),
    };
    let name = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| ConfigError::field("auth.header", "this is no name of an HTTP header"))?;
    let mut value = HeaderValue::from_str(&value)
        .map_err(|_| ConfigError::field("auth", "the key has characters that cannot be sent in a header"))?;
    value.set_sensitive(true);
    Ok(HeaderMap::from_iter([(name, value)]))
}
