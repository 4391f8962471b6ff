//! Settings of a client: address, credentials, timeouts and limits.

use std::time::Duration;

use reqwest::Url;
use secrecy::SecretString;

use super::address::AddressRule;
use crate::error::ConfigError;

#[derive(Debug, Clone)]
pub struct ClientSettings {
    /// The name of the service in errors and logs.
    pub service: String,
    pub base_url: Url,
    pub auth: Auth,
    pub policy: Policy,
    pub addresses: AddressRule,
}

impl ClientSettings {
    /// `field` is the setting that the URL comes from, for the error message.
    pub fn new(service: impl Into<String>, base_url: &str, field: &str) -> Result<Self, ConfigError> {
        Ok(Self {
            service: service.into(),
            base_url: parse_base_url(base_url).map_err(|message| ConfigError::field(field, message))?,
            auth: Auth::None,
            policy: Policy::default(),
            addresses: AddressRule::default(),
        })
    }
}

/// Credentials, sent with every request. Debug output hides them.
#[derive(Debug, Clone)]
pub enum Auth {
    None,
    Bearer(SecretString),
    Basic {
        username: String,
        password: SecretString,
    },
    Header {
        name: String,
        key: SecretString,
    },
}

/// Timeouts, retries and limits of calls.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Covers a whole call: every attempt, every delay between them, and reading the answer. For a
    /// stream: the time until it begins, and then between any two chunks.
    pub deadline: Duration,
    pub connect_timeout: Duration,
    /// Limit of attempts of a call.
    pub max_attempts: u32,
    /// The delay before the second attempt is a random part of this; it doubles with every attempt.
    pub first_delay: Duration,
    pub max_answer_bytes: u64,
    /// This many consecutive failed calls open the circuit.
    pub failures_to_open: u32,
    /// An open circuit lets one call through after this long.
    pub cooldown: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(5),
            max_attempts: 3,
            first_delay: Duration::from_millis(500),
            max_answer_bytes: 64 << 20,
            failures_to_open: 5,
            cooldown: Duration::from_secs(10),
        }
    }
}

/// A base URL always ends with a slash, so that paths are joined below it.
fn parse_base_url(text: &str) -> Result<Url, String> {
    let mut url = Url::parse(text.trim()).map_err(|e| format!("this is not a URL ({e})"))?;
    if !matches!(url.scheme(), "http" | "https") || url.host().is_none() {
        return Err("the URL must begin with http:// or https:// and name a host".into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("the URL must not contain credentials; give them as 'auth' or 'apiKey'".into());
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("the URL must have no '?' or '#' part".into());
    }
    if !url.path().ends_with('/') {
        let path = format!("{}/", url.path());
        url.set_path(&path);
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_end_with_a_slash() {
        assert_eq!(
            parse_base_url("http://h:1/v1").unwrap().as_str(),
            "http://h:1/v1/"
        );
        assert_eq!(parse_base_url("https://h").unwrap().as_str(), "https://h/");
    }

    #[test]
    fn what_is_no_base_url_is_refused_without_showing_it() {
        for bad in [
            "h:1",
            "ftp://h",
            "not a url",
            "http://u:hunter2@h",
            "http://h/?key=hunter2",
        ] {
            let message = parse_base_url(bad).unwrap_err();
            assert!(!message.contains("hunter2"), "{message}");
        }
    }
}
