//! Sources of model files: a directory, the local cache, or the Hugging Face hub.
//!
//! The cache has the layout of `huggingface_hub` (`models--org--name/{blobs,refs,snapshots}`), in the
//! same place, so both use each other's downloads. A complete model is used without asking the hub. The
//! client is our own because the `hf-hub` crate neither resumes nor verifies a download, sets no
//! timeouts, has no offline mode, and brings a second transfer protocol with it.

mod download;
mod error;
mod layout;

use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::{Client, redirect};

pub(crate) use download::sha256_of;
pub use error::HubError;
pub(crate) use layout::RepositoryCache;

use crate::default_model;
use crate::files::weights;
use crate::modules::Layout;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";
pub const DEFAULT_REVISION: &str = "main";

#[derive(Clone)]
pub struct HubSettings {
    pub endpoint: String,
    pub token: Option<String>,
    /// Opens no connection; only cached models can be used.
    pub offline: bool,
    pub cache: PathBuf,
    pub connect_timeout: Duration,
}

/// The token stays out of logs.
impl std::fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HubSettings")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("offline", &self.offline)
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

impl HubSettings {
    /// `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`, and `HF_HUB_CACHE` or `HF_HOME`.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Self {
        let offline = get("HF_HUB_OFFLINE").map(|value| value.to_ascii_lowercase());
        let home = || {
            get("HOME")
                .or_else(|| get("USERPROFILE"))
                .map_or_else(PathBuf::new, PathBuf::from)
        };
        let cache_home = || get("XDG_CACHE_HOME").map_or_else(|| home().join(".cache"), PathBuf::from);
        let hub_home = || get("HF_HOME").map_or_else(|| cache_home().join("huggingface"), PathBuf::from);
        Self {
            endpoint: get("HF_ENDPOINT").map_or_else(
                || DEFAULT_ENDPOINT.to_owned(),
                |url| url.trim_end_matches('/').to_owned(),
            ),
            token: get("HF_TOKEN"),
            offline: matches!(offline.as_deref(), Some("1" | "true" | "yes" | "on")),
            cache: get("HF_HUB_CACHE").map_or_else(|| hub_home().join("hub"), PathBuf::from),
            connect_timeout: Duration::from_secs(5),
        }
    }
}

/// The progress of a download.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressEvent<'a> {
    /// `done` is more than 0 if an interrupted transfer is resumed.
    Started {
        file: &'a str,
        done: u64,
        total: Option<u64>,
    },
    Advanced {
        file: &'a str,
        done: u64,
        total: Option<u64>,
    },
    Finished {
        file: &'a str,
    },
    /// A message for the user, such as that another process is downloading.
    Note(&'a str),
}

pub type Progress<'a> = &'a (dyn Fn(ProgressEvent<'_>) + Send + Sync);

/// Reports no progress.
pub fn silent(_: ProgressEvent<'_>) {}

/// A model as a user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    Directory(PathBuf),
    Hub { id: String, revision: String },
}

impl ModelSource {
    /// A path that exists or looks like one; otherwise a hub id, `org/name` or
    /// `org/name@revision`.
    pub fn parse(text: &str) -> Self {
        let path = match text.strip_prefix("~/").zip(std::env::home_dir()) {
            Some((rest, home)) => home.join(rest),
            None => PathBuf::from(text),
        };
        if path.exists() || path.is_absolute() || text.starts_with(['.', '~']) || !is_hub_id(text) {
            return Self::Directory(path);
        }
        let (id, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        Self::Hub {
            id: id.to_owned(),
            revision: revision.to_owned(),
        }
    }
}

impl std::fmt::Display for ModelSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "{}", path.display()),
            Self::Hub { id, revision } if revision == DEFAULT_REVISION => f.write_str(id),
            Self::Hub { id, revision } => write!(f, "{id}@{revision}"),
        }
    }
}

/// Only these ids become part of a URL or of a path in the cache.
pub(crate) fn is_hub_id(text: &str) -> bool {
    let (id, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with(['.', '-'])
            && part.len() <= 96
            && !part.contains("..")
            && part
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    id.split('/').count() <= 2 && id.split('/').all(plain) && plain(revision)
}

pub struct Hub {
    settings: HubSettings,
    client: Client,
}

impl Hub {
    /// Opens no connection.
    pub fn new(settings: HubSettings) -> Result<Self, HubError> {
        let client = Client::builder()
            .user_agent(concat!("ragstone/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(settings.connect_timeout)
            .read_timeout(Duration::from_secs(30))
            .redirect(redirect::Policy::limited(5))
            .build()
            .map_err(|source| HubError::Client { source })?;
        Ok(Self { settings, client })
    }

    pub fn settings(&self) -> &HubSettings {
        &self.settings
    }

    /// The directory of a model's files. Downloads missing files.
    pub async fn model_directory(
        &self,
        source: &ModelSource,
        progress: Progress<'_>,
    ) -> Result<PathBuf, HubError> {
        match source {
            ModelSource::Directory(path) if path.is_dir() => Ok(path.clone()),
            ModelSource::Directory(path) if path.exists() => Err(HubError::NotADirectory(path.clone())),
            ModelSource::Directory(path) => Err(HubError::NoDirectory(path.clone())),
            ModelSource::Hub { id, revision } if id == default_model::ID && revision == DEFAULT_REVISION => {
                default_model::ensure(self, progress).await
            }
            ModelSource::Hub { id, revision } => match self.cached(id, revision) {
                Some(directory) => Ok(directory),
                None => self.pull(id, revision, progress).await,
            },
        }
    }

    /// The snapshot of a model in the cache, if all of its files are there.
    pub fn cached(&self, id: &str, revision: &str) -> Option<PathBuf> {
        let snapshot = RepositoryCache::new(&self.settings.cache, id).snapshot_of(revision)?;
        is_complete(&snapshot).then_some(snapshot)
    }

    /// Asks the hub for the current revision of the model and downloads missing files.
    pub async fn pull(&self, id: &str, revision: &str, progress: Progress<'_>) -> Result<PathBuf, HubError> {
        if self.settings.offline {
            return Err(HubError::Offline { id: id.to_owned() });
        }
        download::pull(self, id, revision, progress).await
    }
}

/// Whether all files are there that loading requires.
pub(crate) fn is_complete(directory: &Path) -> bool {
    // A model without a list of modules is a plain encoder. With a list, every module needs its
    // configuration.
    let Ok(layout) = Layout::read(directory) else {
        return false;
    };
    let parts = weights::weight_files(&layout.encoder).unwrap_or_default();
    let has = |file: &str| layout.encoder.join(file).is_file();
    !parts.is_empty()
        && parts.iter().all(|part| has(part))
        && has("config.json")
        && has("tokenizer.json")
        && layout.required_files().iter().all(|file| file.is_file())
}

#[cfg(test)]
mod tests;
