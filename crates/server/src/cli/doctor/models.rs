//! The models that run in this process, and those behind providers that collections name.

use std::path::Path;

use ragstone_models::config::{EmbeddingsConfig, ModelEntry, RemoteEntry};
use ragstone_models::default_model;
use ragstone_models::hub::{Hub, HubSettings, ModelSource};
use ragstone_providers::config::ProviderEntry;
use ragstone_providers::embedding::{self, CONTRACT_TYPE, ContractClient};

use super::Check;
use crate::config::{self, CrossEncoderChoice, EmbeddingsChoice, Settings};

pub(super) fn embeddings(settings: &Settings) -> Vec<Check> {
    let name = "Embedding models";
    let path = match &settings.embeddings {
        EmbeddingsChoice::File(path) => path,
        EmbeddingsChoice::None | EmbeddingsChoice::Unset => {
            let message = "no file is named; `serve` needs --embeddings-config FILE, or --no-embeddings";
            return vec![Check::skip(name, message)];
        }
    };
    match EmbeddingsConfig::from_file(path) {
        Err(error) => vec![Check::fail(
            name,
            format!("{}: {error}: correct this file", path.display()),
        )],
        Ok(config) => config
            .embeddings
            .iter()
            .map(|entry| embedding_model(entry, settings))
            .collect(),
    }
}

fn embedding_model(entry: &ModelEntry, settings: &Settings) -> Check {
    let name = format!("Embedding model {}", entry.id());
    match entry {
        ModelEntry::Local(local) => files(name, &ModelSource::parse(&local.path)),
        ModelEntry::Remote(remote) => {
            if let Some(service) = settings.providers.get(&remote.provider)
                && service.provider_type == CONTRACT_TYPE
            {
                return embedding_service(name, remote, service);
            }
            let made = embedding::from_entry(
                &remote.id,
                &remote.provider,
                &remote.model,
                Some(remote.dimensions),
                remote.version.as_deref(),
                &settings.providers,
                &config::process_env,
            );
            match made {
                Ok(_) => Check::pass(
                    name,
                    format!("{} of provider '{}'", remote.model, remote.provider),
                ),
                Err(error) => Check::fail(
                    name,
                    format!("{error}: correct 'provider' or the providers section"),
                ),
            }
        }
    }
}

fn embedding_service(name: String, entry: &RemoteEntry, service: &ProviderEntry) -> Check {
    let client = ContractClient::from_entry(&entry.provider, service, &config::process_env);
    match (client, &entry.version) {
        (Err(error), _) => Check::fail(name, format!("{error}: correct the providers section")),
        (Ok(_), None) => Check::fail(
            name,
            "lacks 'version': give the version that the embedding service answers with",
        ),
        (Ok(_), Some(_)) => Check::pass(
            name,
            format!("{} of embedding service '{}'", entry.model, entry.provider),
        ),
    }
}

pub(super) fn cross_encoder(settings: &Settings) -> Check {
    let name = "Cross-encoder";
    match &settings.cross_encoder {
        None => Check::skip(name, "none is configured; reranking is off"),
        Some(CrossEncoderChoice::Directory(path)) => {
            files(name.to_owned(), &ModelSource::Directory(path.clone()))
        }
        Some(CrossEncoderChoice::Hub(id)) => files(name.to_owned(), &ModelSource::parse(id)),
    }
}

fn files(name: String, source: &ModelSource) -> Check {
    match source {
        ModelSource::Directory(path) => match missing_file(path) {
            None => Check::pass(name, format!("{} is complete", path.display())),
            Some(missing) => Check::fail(
                name,
                format!(
                    "{} lacks {missing}: put the model's files there, or correct the path",
                    path.display()
                ),
            ),
        },
        ModelSource::Hub { id, revision } => {
            let hub = match Hub::new(HubSettings::from_env()) {
                Ok(hub) => hub,
                Err(error) => return Check::fail(name, error.to_string()),
            };
            let cached = if id == default_model::ID {
                default_model::cached(&hub)
            } else {
                hub.cached(id, revision)
            };
            match cached {
                Some(path) => Check::pass(name, format!("{id} is in the cache, at {}", path.display())),
                None => Check::warn(
                    name,
                    format!(
                        "{id} is not in the cache: the next start downloads it, or fetch it now with `ragstone models pull {id}`"
                    ),
                ),
            }
        }
    }
}

/// What no model can be loaded without.
fn missing_file(directory: &Path) -> Option<&'static str> {
    if !directory.is_dir() {
        return Some("everything, for there is no such directory");
    }
    // The encoder may be in a folder of its own.
    let places = [directory.to_owned(), directory.join("0_Transformer")];
    let has = |files: &[&str]| {
        places
            .iter()
            .any(|place| files.iter().any(|file| place.join(file).is_file()))
    };
    [
        ("config.json", &["config.json"][..]),
        ("tokenizer.json", &["tokenizer.json"]),
        (
            "model.safetensors",
            &["model.safetensors", "model.safetensors.index.json"],
        ),
    ]
    .into_iter()
    .find_map(|(name, files)| (!has(files)).then_some(name))
}
