//! Lists, shows and removes downloaded models.

use std::path::{Path, PathBuf};

use crate::encoder::config::RawConfig;
use crate::error::LoadError;
use crate::hub::{self, DEFAULT_REVISION, HubError, ModelSource, RepositoryCache};
use crate::modules::Layout;
use crate::{default_model, inspect_cross_encoder, inspect_embedder};

/// One model in the cache, which other programs may have downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    pub id: String,
    /// The commit of its files, or the package they came from.
    pub revision: String,
    pub directory: PathBuf,
    /// Size on disk, including all revisions and unfinished downloads.
    pub bytes: u64,
    /// `model_type` of `config.json`, if there is one.
    pub architecture: Option<String>,
    pub kind: ModelKind,
    /// Why it cannot be loaded, as far as that is known without reading its weights.
    pub problem: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelKind {
    Embedding,
    CrossEncoder,
    /// Another task, or an unsupported architecture.
    Other,
}

/// Lists all models in a cache directory, sorted by id.
pub fn list(cache: &Path) -> Result<Vec<CachedModel>, HubError> {
    let mut models = Vec::new();
    let entries = match std::fs::read_dir(cache) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(models),
        Err(source) => {
            return Err(HubError::Cache {
                path: cache.to_owned(),
                source,
            });
        }
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(id) = name.strip_prefix("models--") {
            models.extend(describe(cache, &id.replacen("--", "/", 1)));
        }
    }
    models.extend(package(cache));
    models.sort_by(|a, b| (&a.id, &a.revision).cmp(&(&b.id, &b.revision)));
    Ok(models)
}

/// Describes one model by its id or directory. `None` if the cache has no such model.
pub fn show(cache: &Path, id: &str) -> Result<Option<CachedModel>, LoadError> {
    match ModelSource::parse(id) {
        ModelSource::Directory(path) if !path.exists() => Err(HubError::NoDirectory(path).into()),
        ModelSource::Directory(path) if !path.is_dir() => Err(HubError::NotADirectory(path).into()),
        ModelSource::Directory(directory) => {
            RawConfig::read(&Layout::read(&directory)?.encoder)?;
            Ok(Some(CachedModel {
                bytes: size_of(&directory),
                ..inspect(id, String::new(), directory)
            }))
        }
        ModelSource::Hub { id, revision } if revision != DEFAULT_REVISION => {
            Ok(revision_of(cache, &id, &revision))
        }
        ModelSource::Hub { id, .. } => {
            let package = || package(cache).filter(|_| id == default_model::ID);
            Ok(describe(cache, &id).or_else(package))
        }
    }
}

/// Why the model in a directory cannot be loaded, as far as that is known without reading its weights.
pub fn problem(directory: &Path) -> Option<String> {
    inspect("", String::new(), directory.to_owned()).problem
}

/// Deletes a model with all its revisions, or only the revision of `ID@revision`. Returns the number of
/// bytes freed, 0 if there was no such model.
pub fn remove(cache: &Path, id: &str) -> Result<u64, HubError> {
    if let Some((name, revision)) = id.split_once('@').filter(|_| hub::is_hub_id(id)) {
        return remove_revision(cache, name, revision);
    }
    let repository = RepositoryCache::new(cache, id);
    let mut directories = vec![repository.root().to_owned(), repository.locks().to_owned()];
    if id == default_model::ID {
        directories.push(default_model::package_directory(cache));
    }
    let mut freed = 0;
    for directory in directories.iter().filter(|directory| directory.is_dir()) {
        // The id determines the path; never delete outside of the cache.
        if directory.parent().is_none_or(|parent| !parent.starts_with(cache)) {
            continue;
        }
        freed += size_of(directory);
        let unwritable = |source| HubError::Cache {
            path: directory.clone(),
            source,
        };
        std::fs::remove_dir_all(directory).map_err(unwritable)?;
    }
    Ok(freed)
}

fn remove_revision(cache: &Path, id: &str, revision: &str) -> Result<u64, HubError> {
    let repository = RepositoryCache::new(cache, id);
    let root = repository.root();
    let before = size_of(root);
    repository.remove(revision).map_err(|source| HubError::Cache {
        path: root.to_owned(),
        source,
    })?;
    if newest_snapshot(root).is_none() && before > 0 {
        return remove(cache, id).map(|_| before);
    }
    Ok(before.saturating_sub(size_of(root)))
}

/// One revision of a model, if it is in the cache.
fn revision_of(cache: &Path, id: &str, revision: &str) -> Option<CachedModel> {
    let repository = RepositoryCache::new(cache, id);
    let directory = repository.snapshot_of(revision)?;
    let commit = directory.file_name()?.to_string_lossy().into_owned();
    Some(CachedModel {
        bytes: size_of(repository.root()),
        ..inspect(id, commit, directory)
    })
}

fn describe(cache: &Path, id: &str) -> Option<CachedModel> {
    let repository = RepositoryCache::new(cache, id);
    if !repository.root().is_dir() {
        return None;
    }
    let snapshot = repository
        .snapshot_of(DEFAULT_REVISION)
        .or_else(|| newest_snapshot(repository.root()));
    let revision = snapshot
        .as_ref()
        .and_then(|path| path.file_name())
        .map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let directory = snapshot.unwrap_or_else(|| repository.root().to_owned());
    Some(CachedModel {
        bytes: size_of(repository.root()),
        ..inspect(id, revision, directory)
    })
}

fn package(cache: &Path) -> Option<CachedModel> {
    let directory = default_model::package_directory(cache);
    if !directory.is_dir() {
        return None;
    }
    let revision = default_model::PACKAGE.to_owned();
    Some(CachedModel {
        bytes: size_of(&directory),
        ..inspect(default_model::ID, revision, directory)
    })
}

fn inspect(id: &str, revision: String, directory: PathBuf) -> CachedModel {
    let config = Layout::read(&directory).and_then(|layout| RawConfig::read(&layout.encoder));
    let (kind, error) = match &config {
        Err(error) => (ModelKind::Other, Some(error.to_string())),
        Ok(config) => match config.encoder(&directory) {
            Err(error) => (ModelKind::Other, Some(error.to_string())),
            Ok(_) if config.is_classifier() => {
                let checked = inspect_cross_encoder(&directory);
                (
                    ModelKind::CrossEncoder,
                    checked.err().map(|error| error.to_string()),
                )
            }
            Ok(_) => {
                let checked = inspect_embedder(&directory);
                (ModelKind::Embedding, checked.err().map(|error| error.to_string()))
            }
        },
    };
    CachedModel {
        id: id.to_owned(),
        revision,
        bytes: 0,
        architecture: config
            .ok()
            .and_then(|config| config.model_type().map(str::to_owned)),
        kind,
        problem: error,
        directory,
    }
}

fn newest_snapshot(root: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(root.join("snapshots")).ok()?;
    let dated = entries
        .flatten()
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())));
    dated.max_by_key(|(time, _)| *time).map(|(_, path)| path)
}

/// Does not follow links, so that a blob counts once.
fn size_of(path: &Path) -> u64 {
    let Ok(metadata) = std::fs::symlink_metadata(path) else {
        return 0;
    };
    if !metadata.is_dir() {
        return if metadata.is_file() { metadata.len() } else { 0 };
    }
    let Ok(entries) = std::fs::read_dir(path) else {
        return 0;
    };
    entries.flatten().map(|entry| size_of(&entry.path())).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache with one model laid out as a download leaves it.
    fn cache() -> tempfile::TempDir {
        let cache = tempfile::tempdir().unwrap();
        let repository = RepositoryCache::new(cache.path(), "org/name");
        repository.create("abc1234").unwrap();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/cross-bert");
        for (number, file) in ["config.json", "tokenizer.json", "model.safetensors"]
            .into_iter()
            .enumerate()
        {
            let blob = format!("blob{number}");
            std::fs::copy(fixture.join(file), repository.blob(&blob)).unwrap();
            repository.link("abc1234", file, &blob).unwrap();
        }
        repository.point(DEFAULT_REVISION, "abc1234").unwrap();
        cache
    }

    #[test]
    fn a_downloaded_model_is_listed_and_shown() {
        let cache = cache();
        let models = list(cache.path()).unwrap();
        assert_eq!(models.len(), 1);
        let model = &models[0];
        assert_eq!(
            (model.id.as_str(), model.revision.as_str()),
            ("org/name", "abc1234")
        );
        assert_eq!((model.kind, &model.problem), (ModelKind::CrossEncoder, &None));
        assert_eq!(model.architecture.as_deref(), Some("bert"));
        assert!(model.bytes > 50_000);
        let shown = |id: &str| show(cache.path(), id).unwrap();
        assert_eq!(shown("org/name").as_ref(), Some(model));
        assert_eq!(shown("org/other"), None);
        let problem = || shown("org/name").unwrap().problem.unwrap();
        let weights = RepositoryCache::new(cache.path(), "org/name").blob("blob2");
        let whole = std::fs::read(&weights).unwrap();
        std::fs::write(&weights, &whole[..whole.len() - 1]).unwrap();
        assert!(problem().contains("an interrupted download?"), "{}", problem());
        std::fs::remove_file(&weights).unwrap();
        assert!(problem().contains("model.safetensors"), "{}", problem());
    }

    #[test]
    fn a_directory_is_shown_as_it_would_be_loaded() {
        let cache = cache();
        let fixture = Path::new("tests/fixtures/bert");
        let shown = show(cache.path(), fixture.to_str().unwrap()).unwrap().unwrap();
        assert_eq!((shown.kind, shown.problem), (ModelKind::Embedding, None));
        for (other, says) in [
            (cache.path().to_owned(), "has no config.json"),
            (fixture.join("config.json"), "is a file"),
            (cache.path().join("nothing"), "does not exist"),
        ] {
            let error = show(cache.path(), other.to_str().unwrap())
                .unwrap_err()
                .to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn removing_frees_the_space_and_touches_nothing_else() {
        let cache = cache();
        let beside = cache.path().join("beside.txt");
        std::fs::write(&beside, "stays").unwrap();
        assert_eq!(remove(cache.path(), "org/other").unwrap(), 0);
        assert!(remove(cache.path(), "org/name").unwrap() > 50_000);
        assert!(list(cache.path()).unwrap().is_empty() && beside.exists());
        assert_eq!(remove(cache.path(), "..").unwrap(), 0);
    }

    #[test]
    fn a_revision_is_shown_and_removed_by_itself() {
        let cache = cache();
        let repository = RepositoryCache::new(cache.path(), "org/name");
        // A second commit that has another tokenizer, and the first under a second name.
        repository.create("def5678").unwrap();
        std::fs::copy(repository.blob("blob1"), repository.blob("blob3")).unwrap();
        for (file, blob) in [
            ("config.json", "blob0"),
            ("tokenizer.json", "blob3"),
            ("model.safetensors", "blob2"),
        ] {
            repository.link("def5678", file, blob).unwrap();
        }
        repository.point("v1", "def5678").unwrap();
        repository.point("stable", "abc1234").unwrap();
        let commit = |id: &str| show(cache.path(), id).unwrap().map(|model| model.revision);
        assert_eq!(commit("org/name").as_deref(), Some("abc1234"));
        assert_eq!(commit("org/name@v1").as_deref(), Some("def5678"));
        assert_eq!(commit("org/name@def5678").as_deref(), Some("def5678"));
        assert_eq!(commit("org/name@v2"), None);
        let remove = |id: &str| remove(cache.path(), id).unwrap();
        assert_eq!(remove("org/name@v2"), 0);
        assert!(remove("org/name@v1") > 1_000);
        assert_eq!(commit("org/name@v1"), None);
        assert!(!repository.blob("blob3").exists(), "nothing else uses it");
        assert_eq!(show(cache.path(), "org/name").unwrap().unwrap().problem, None);
        // A name of two goes alone, and the last one with everything.
        assert!(remove("org/name@stable") > 0);
        assert_eq!(commit("org/name").as_deref(), Some("abc1234"));
        assert!(remove("org/name@main") > 50_000);
        assert!(list(cache.path()).unwrap().is_empty() && !repository.root().exists());
    }

    #[test]
    fn a_cache_that_is_not_there_is_empty() {
        assert!(list(Path::new("/nonexistent/cache")).unwrap().is_empty());
    }
}
