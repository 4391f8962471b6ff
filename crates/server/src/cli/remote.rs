//! Talking to a running server, for the commands that use one.

use anyhow::Context;
use clap::Args;
use ragstone_core::provider::CallError;
use ragstone_providers::http::{Auth, Call, ClientSettings, ServiceClient};
use secrecy::SecretString;
use serde_json::Value;

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

    /// The key, where the server wants one, comes from `RAGSTONE_API_KEY` and never from a flag,
    /// which every user of the machine could read.
    pub(super) fn client(&self) -> anyhow::Result<ServiceClient> {
        let mut settings = ClientSettings::new("ragstone", &self.url, "--url")?;
        if let Some(key) = crate::config::process_env("RAGSTONE_API_KEY") {
            settings.auth = Auth::Bearer(SecretString::from(key));
        }
        Ok(ServiceClient::new(settings)?)
    }

    pub(super) async fn ask(&self, call: Call) -> anyhow::Result<Value> {
        match self.client()?.call_json(call).await {
            Ok(answer) => Ok(answer),
            Err(CallError::Answered(answer)) => Err(anyhow::anyhow!(
                answer
                    .message()
                    .unwrap_or_else(|| format!("the server answered {}", answer.status))
            )),
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
