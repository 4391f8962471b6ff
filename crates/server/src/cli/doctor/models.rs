//! Checks of models in this process and of those served by providers.

use std::path::Path;
use std::sync::Arc;

use ragstone_core::collection::EMBEDDING_MODEL;
use ragstone_core::model::Embedder;
use ragstone_ingest::ledger::ContractSettings;
use ragstone_models::config::{EmbeddingsConfig, ModelEntry, RemoteEntry};
use ragstone_models::hub::{Hub, HubSettings, ModelSource};
use ragstone_models::{LoadError, default_model, inspect_cross_encoder, inspect_embedder};
use ragstone_providers::config::ProviderEntry;
use ragstone_providers::embedding::{self, CONTRACT_TYPE, ContractClient};
use ragstone_store::InspectedCollection;

use super::Check;
use crate::config::{self, CrossEncoderChoice, EmbeddingsChoice, Settings};
use crate::startup::contract_settings;

pub(super) fn embeddings(settings: &Settings, stored: &[InspectedCollection]) -> Vec<Check> {
    let name = "Embedding models";
    let path = match &settings.embeddings {
        EmbeddingsChoice::File(path) => path,
        EmbeddingsChoice::None => return vec![Check::skip(name, "disabled by --no-embeddings")],
        EmbeddingsChoice::Unset => {
            let message = "no file is named; `serve` requires --embeddings-config FILE or --no-embeddings";
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
            .map(|entry| embedding_model(entry, settings, stored))
            .collect(),
    }
}

fn embedding_model(entry: &ModelEntry, settings: &Settings, stored: &[InspectedCollection]) -> Check {
    let name = format!("Embedding model {}", entry.id());
    let (message, width) = match entry {
        ModelEntry::Local(local) => match files(&ModelSource::parse(&local.path), inspect_embedder) {
            Files::Sound(place, width) => (place, width),
            Files::NotYet(message) => return Check::warn(name, message),
            Files::Wrong(message) => return Check::fail(name, message),
        },
        ModelEntry::Remote(remote) => match configured(remote, settings) {
            Ok(()) => {
                let message = format!("{} of provider '{}'", remote.model, remote.provider);
                (message, remote.dimensions)
            }
            Err(error) => {
                let message = format!("{error}: correct 'provider', 'model' or the providers section");
                return Check::fail(name, message);
            }
        },
    };
    let of_other_width = stored.iter().find_map(|collection| {
        let named = collection.metadata.get(EMBEDDING_MODEL)?.as_str()?;
        let dimensions = collection.dimensions.filter(|stored| *stored != width)?;
        (named == entry.id() && !collection.name.starts_with('.')).then_some((&collection.name, dimensions))
    });
    match of_other_width {
        Some((collection, dimensions)) => Check::fail(
            name,
            format!(
                "it has {width} dimensions, but the vectors of collection '{collection}' have {dimensions}: configure the model that made them, or ingest the collection again"
            ),
        ),
        None => Check::pass(name, message),
    }
}

/// Checks the configuration of a model served by a provider.
fn configured(entry: &RemoteEntry, settings: &Settings) -> Result<(), String> {
    match settings.providers.get(&entry.provider) {
        Some(service) if service.provider_type == CONTRACT_TYPE => {
            of_embedding_service(entry, service).map(drop)
        }
        _ => remote_embedder(entry, settings)
            .map(drop)
            .map_err(|error| error.to_string()),
    }
}

pub(super) fn of_embedding_service(
    entry: &RemoteEntry,
    service: &ProviderEntry,
) -> Result<(ContractClient, ContractSettings), String> {
    let client = ContractClient::from_entry(&entry.provider, service, &config::process_env)
        .map_err(|error| error.to_string())?;
    let settings = contract_settings(entry)
        .ok_or("'version' is required: the version in the answers of the embedding service")?;
    Ok((client, settings))
}

pub(super) fn remote_embedder(
    entry: &RemoteEntry,
    settings: &Settings,
) -> Result<Arc<dyn Embedder>, ragstone_providers::ConfigError> {
    embedding::from_entry(
        &entry.id,
        &entry.provider,
        &entry.model,
        Some(entry.dimensions),
        entry.version.as_deref(),
        &settings.providers,
        &config::process_env,
    )
}

/// The dimensions of a model, if its files are usable.
pub(super) fn width(entry: &ModelEntry) -> Option<usize> {
    match entry {
        ModelEntry::Remote(remote) => Some(remote.dimensions),
        ModelEntry::Local(local) => match files(&ModelSource::parse(&local.path), inspect_embedder) {
            Files::Sound(_, width) => Some(width),
            Files::NotYet(_) | Files::Wrong(_) => None,
        },
    }
}

pub(super) fn cross_encoder(settings: &Settings) -> Check {
    let name = "Cross-encoder";
    let source = match &settings.cross_encoder {
        None => return Check::skip(name, "not configured; reranking is disabled"),
        Some(CrossEncoderChoice::Directory(path)) => ModelSource::Directory(path.clone()),
        Some(CrossEncoderChoice::Hub(id)) => ModelSource::parse(id),
    };
    match files(&source, inspect_cross_encoder) {
        Files::Sound(place, ()) => Check::pass(name, place),
        Files::NotYet(message) => Check::warn(name, message),
        Files::Wrong(message) => Check::fail(name, message),
    }
}

/// The state of a model's files, with the result of inspecting them.
enum Files<T> {
    Sound(String, T),
    NotYet(String),
    Wrong(String),
}

fn files<T>(source: &ModelSource, look: impl Fn(&Path) -> Result<T, LoadError>) -> Files<T> {
    match source {
        ModelSource::Directory(path) => match look(path) {
            Ok(facts) => Files::Sound(format!("{} is complete", path.display()), facts),
            Err(error) => Files::Wrong(format!(
                "{error}: put the model's files there, or correct the path"
            )),
        },
        ModelSource::Hub { id, revision } => {
            let hub = match Hub::new(HubSettings::from_env()) {
                Ok(hub) => hub,
                Err(error) => return Files::Wrong(error.to_string()),
            };
            let cached = if id == default_model::ID {
                default_model::cached(&hub)
            } else {
                hub.cached(id, revision)
            };
            let Some(path) = cached else {
                return Files::NotYet(format!(
                    "{id} is not in the cache: the next start downloads it, or download it now with `ragstone models pull {id}`"
                ));
            };
            match look(&path) {
                Ok(facts) => Files::Sound(format!("{id} is in the cache, at {}", path.display()), facts),
                Err(error) => Files::Wrong(format!(
                    "{error}: download it again with `ragstone models remove {id}` and `ragstone models pull {id}`"
                )),
            }
        }
    }
}
