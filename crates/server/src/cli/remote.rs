//! Talking to a running server, for the commands that use one.

use anyhow::Context;
use clap::Args;
use ragstone_core::provider::{CallError, ErrorAnswer};
use ragstone_providers::http::{Auth, Call, ClientSettings, ServiceClient};
use secrecy::SecretString;
use serde_json::Value;

/// Where the key is.
pub(super) const KEY: &str = "RAGSTONE_API_KEY";

/// What a server said, and where its key is looked for if that is what it wants.
pub(super) fn said(answer: &ErrorAnswer, keys: &[&str]) -> String {
    let message = answer
        .message()
        .unwrap_or_else(|| format!("the server answered {}", answer.status));
    match answer.status {
        401 | 403 => format!("{message} (the key comes from {})", keys.join(" or ")),
        _ => message,
    }
}

/// Which server to talk to.
#[derive(Args)]
pub(super) struct RemoteArgs {
    /// The server's address
    #[arg(
        long,
        value_name = "URL",
        env = "RAGSTONE_URL",
        default_value = "http://127.0.0.1:5006"
    )]
    url: String,
}

impl RemoteArgs {
    pub(super) fn at(url: String) -> Self {
        Self { url }
    }

    /// The key, where the server wants one, comes from the environment and never from a flag, which
    /// every user of the machine could read.
    pub(super) fn client(&self) -> anyhow::Result<ServiceClient> {
        self.client_with(&[KEY])
    }

    /// The key is that of the first of these variables that is set.
    pub(super) fn client_with(&self, keys: &[&str]) -> anyhow::Result<ServiceClient> {
        let mut settings = ClientSettings::new("ragstone", &self.url, "--url")?;
        if let Some(key) = keys.iter().find_map(|name| crate::config::process_env(name)) {
            settings.auth = Auth::Bearer(SecretString::from(key));
        }
        Ok(ServiceClient::new(settings)?)
    }

    pub(super) async fn ask(&self, call: Call) -> anyhow::Result<Value> {
        match self.client()?.call_json(call).await {
            Ok(answer) => Ok(answer),
            Err(CallError::Answered(answer)) => Err(anyhow::anyhow!(said(&answer, &[KEY]))),
            Err(error @ CallError::Unreachable { .. }) => Err(error).with_context(|| {
                format!(
                    "no server answers at {}: start one with `ragstone serve`",
                    self.url
                )
            }),
            Err(error) => Err(error.into()),
        }
    }
}
