//! The client of a running server, for all commands that use one.

use clap::Args;
use ragstone_core::call::{CallError, ErrorAnswer};
use ragstone_core::collection::CollectionName;
use ragstone_providers::http::ClientSettings;
use ragstone_providers::ragstone::RagstoneClient;
use secrecy::SecretString;
use serde_json::Value;

use super::printable;

/// Variable with the API key of a server.
pub(super) const KEY: &str = "RAGSTONE_API_KEY";
/// For the help of every command that can talk to a server.
pub(super) const REMOTE_ENVIRONMENT: &str = "Environment:\n  \
    RAGSTONE_API_KEY  API key of the server, if it requires one";

/// The server to use.
#[derive(Args)]
pub(super) struct RemoteArgs {
    /// Address of the server
    #[arg(
        long,
        conflicts_with_all = ["data_dir", "store"],
        value_name = "URL",
        env = "RAGSTONE_URL",
        default_value = "http://127.0.0.1:5006",
        value_parser = server_url
    )]
    url: String,
}

impl RemoteArgs {
    pub(super) fn at(url: String) -> Self {
        Self { url }
    }

    /// A client with the key from the environment. There is no flag for it, because other users of the
    /// machine can read flags.
    pub(super) fn client(&self) -> anyhow::Result<RagstoneClient> {
        self.client_with(&[KEY])
    }

    /// The key is that of the first of these variables that is set.
    pub(super) fn client_with(&self, keys: &[&str]) -> anyhow::Result<RagstoneClient> {
        let key = keys.iter().find_map(|name| crate::config::process_env(name));
        let key = key.map(SecretString::from);
        Ok(RagstoneClient::at(&self.url, key, "--url")?)
    }

    /// Searches a collection.
    pub(super) async fn query(&self, collection: &CollectionName, body: &Value) -> anyhow::Result<Value> {
        let answer = self.client()?.query_json(collection, body).await;
        answer.map_err(|error| self.explain(error))
    }

    /// Says what the server said, or that no server answers.
    pub(super) fn explain(&self, error: CallError) -> anyhow::Error {
        match error {
            CallError::Answered(answer) => anyhow::anyhow!(refusal(&answer, &[KEY])),
            error => no_server(error.into(), &self.url),
        }
    }
}

/// Adds a hint if no server answers.
pub(super) fn no_server(error: anyhow::Error, url: &str) -> anyhow::Error {
    match error.downcast_ref() {
        Some(CallError::Unreachable { .. }) => error.context(format!(
            "no server answers at {url}: start one with `ragstone serve`, or correct --url"
        )),
        _ => error,
    }
}

/// Parses the address of a server.
pub(super) fn server_url(text: &str) -> Result<String, String> {
    match ClientSettings::new("ragstone", text, "the address") {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// The message of an error response. For a refused key, the hint names these variables.
pub(super) fn refusal(answer: &ErrorAnswer, keys: &[&str]) -> String {
    if answer.status == 401 {
        let given = keys
            .iter()
            .find(|name| crate::config::process_env(name).is_some());
        return match given {
            Some(name) => format!("the server refuses the API key in {name}"),
            None => format!(
                "the server requires an API key: set {} to one of its keys",
                keys.join(" or ")
            ),
        };
    }
    let message = answer.message().map(|message| printable(&message));
    message.unwrap_or_else(|| format!("the server answered {}", answer.status))
}
