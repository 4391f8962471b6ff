//! Paths in the cache, as `huggingface_hub` lays them out.

use std::io;
use std::path::{Path, PathBuf};

pub(crate) struct RepositoryCache {
    root: PathBuf,
    locks: PathBuf,
}

impl RepositoryCache {
    pub(crate) fn new(cache: &Path, id: &str) -> Self {
        let name = format!("models--{}", id.replace('/', "--"));
        Self {
            root: cache.join(&name),
            locks: cache.join(".locks").join(name),
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn blob(&self, name: &str) -> PathBuf {
        self.root.join("blobs").join(name)
    }

    pub(crate) fn incomplete(&self, name: &str) -> PathBuf {
        self.root.join("blobs").join(format!("{name}.incomplete"))
    }

    pub(crate) fn lock(&self, name: &str) -> PathBuf {
        self.locks.join(format!("{name}.lock"))
    }

    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub(crate) fn locks(&self) -> &Path {
        &self.locks
    }

    /// The snapshot that a branch, tag or commit points to.
    pub(crate) fn snapshot_of(&self, revision: &str) -> Option<PathBuf> {
        let commit = std::fs::read_to_string(self.root.join("refs").join(revision));
        let commit = commit.map_or_else(|_| revision.to_owned(), |commit| commit.trim().to_owned());
        let plain = !commit.is_empty() && !commit.contains(['/', '\\']) && !commit.starts_with('.');
        let snapshot = self.snapshot(&commit);
        (plain && snapshot.is_dir()).then_some(snapshot)
    }

    /// Deletes the files that only this revision uses. Another name of its commit keeps them.
    pub(crate) fn remove(&self, revision: &str) -> io::Result<()> {
        let Some(snapshot) = self.snapshot_of(revision) else {
            return Ok(());
        };
        let name = self.root.join("refs").join(revision);
        let commit = snapshot.file_name().unwrap_or_default().to_string_lossy();
        let names = names_of(&self.root.join("refs"), &commit);
        if names.contains(&name) && names.len() > 1 {
            return std::fs::remove_file(name);
        }
        for name in names {
            std::fs::remove_file(name)?;
        }
        std::fs::remove_dir_all(snapshot)?;
        let mut used = Vec::new();
        targets(&self.root.join("snapshots"), &mut used);
        for blob in std::fs::read_dir(self.root.join("blobs"))?.flatten() {
            if !used.contains(&blob.path().canonicalize()?) {
                std::fs::remove_file(blob.path())?;
            }
        }
        Ok(())
    }

    pub(crate) fn create(&self, commit: &str) -> io::Result<()> {
        for directory in [
            &self.root.join("blobs"),
            &self.root.join("refs"),
            &self.snapshot(commit),
            &self.locks,
        ] {
            std::fs::create_dir_all(directory)?;
        }
        Ok(())
    }

    pub(crate) fn point(&self, revision: &str, commit: &str) -> io::Result<()> {
        replace(&self.root.join("refs").join(revision), |path| {
            std::fs::write(path, commit)
        })
    }

    /// Makes `file` of a snapshot refer to a blob.
    pub(crate) fn link(&self, commit: &str, file: &str, blob: &str) -> io::Result<()> {
        let link = self.snapshot(commit).join(file);
        if let Some(parent) = link.parent() {
            std::fs::create_dir_all(parent)?;
        }
        let up = "../".repeat(2 + file.matches('/').count());
        replace(&link, |path| {
            link_to(&format!("{up}blobs/{blob}"), &self.blob(blob), path)
        })
    }
}

fn names_of(refs: &Path, commit: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(refs).into_iter().flatten().flatten();
    let names = |path: &PathBuf| std::fs::read_to_string(path).is_ok_and(|text| text.trim() == commit);
    entries.map(|entry| entry.path()).filter(names).collect()
}

/// The targets of the links below a directory.
fn targets(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => targets(&path, found),
            path => found.extend(path.canonicalize()),
        }
    }
}

#[cfg(unix)]
fn link_to(relative: &str, _: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(relative, link)
}

/// Windows allows symbolic links to few users.
#[cfg(not(unix))]
fn link_to(_: &str, blob: &Path, link: &Path) -> io::Result<()> {
    std::fs::hard_link(blob, link).or_else(|_| std::fs::copy(blob, link).map(drop))
}

/// Creates an entry under a temporary name and renames it, so that no reader sees half of it.
fn replace(path: &Path, make: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = PathBuf::from(temporary);
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    make(&temporary)?;
    std::fs::rename(&temporary, path)
}
