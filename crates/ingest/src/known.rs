//! Identity of files: the same file on the same machine keeps its name in a collection, whichever
//! path leads to it.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use super::prune::IngestedSource;
use super::read::Unreadable;
use super::walk::{Covered, is_gone, path_of, source_name};

/// A file on a machine, as a manifest keeps it.
pub fn origin(machine: &str, path: &Path) -> String {
    format!("{machine}:{}", source_name(path))
}

/// The path of an origin on this machine. Origins of older versions have no machine.
fn path_on(machine: &str, origin: &str) -> Option<PathBuf> {
    let own = origin
        .strip_prefix(machine)
        .and_then(|path| path.strip_prefix(':'));
    let path = own.or_else(|| origin.starts_with('/').then_some(origin))?;
    Some(path_of(path))
}

/// Files of this machine that a collection was made of.
#[derive(Debug, Default)]
pub struct KnownFiles {
    names: HashMap<PathBuf, Vec<String>>,
    /// Files of sources that have documents.
    paths: HashMap<String, PathBuf>,
}

impl KnownFiles {
    pub fn new(machine: &str, sources: Vec<IngestedSource>) -> Self {
        let mut known = Self::default();
        for source in sources {
            let path = source
                .origin
                .as_deref()
                .and_then(|origin| path_on(machine, origin));
            let Some(path) = path else { continue };
            known
                .names
                .entry(path.clone())
                .or_default()
                .push(source.source.clone());
            if !source.empty {
                known.paths.insert(source.source, path);
            }
        }
        known
    }

    /// The name for the documents of a file: the one it has in the collection, or the wanted one. With
    /// a prefix, only names that begin with it count. A name that belongs to another file which still
    /// exists is an error.
    pub fn name(&self, path: &Path, wanted: &str, prefix: Option<&str>) -> Result<String, Unreadable> {
        let names = self.names.get(path).map_or(&[][..], Vec::as_slice);
        let fits = |name: &&String| match prefix {
            Some(prefix) => name
                .strip_prefix(prefix)
                .is_some_and(|rest| rest.starts_with('/')),
            None => true,
        };
        if names.iter().any(|name| name == wanted) {
            return Ok(wanted.to_owned());
        }
        if let Some(name) = names.iter().find(fits) {
            return Ok(name.clone());
        }
        match self.paths.get(wanted) {
            Some(other) if other != path && !is_gone(other) && !is_same(other, path) => {
                Err(Unreadable::new(format!(
                    "its name '{wanted}' belongs to {}; give --as NAME to keep both",
                    other.display()
                )))
            }
            _ => Ok(wanted.to_owned()),
        }
    }

    /// Sources whose files are gone from where they were read, in order.
    pub fn gone(&self, covered: &[Covered]) -> Vec<String> {
        let mut gone: Vec<String> = self
            .names
            .iter()
            .filter(|(path, _)| covered.iter().any(|covered| covered.covers(path)) && is_gone(path))
            .flat_map(|(_, names)| names.iter().cloned())
            .collect();
        gone.sort();
        gone
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| std::fs::canonicalize(path).ok();
    real(one).is_some_and(|one| real(other) == Some(one))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::walk::{WalkOptions, Walker};

    fn source(name: &str, origin: Option<String>) -> IngestedSource {
        IngestedSource {
            source: name.to_owned(),
            origin,
            empty: false,
        }
    }

    #[test]
    fn a_file_keeps_its_name_and_takes_no_name_of_another() {
        let folder = tempfile::tempdir().unwrap();
        let at = std::fs::canonicalize(folder.path()).unwrap();
        let (one, two) = (at.join("one.md"), at.join("two.md"));
        std::fs::write(&one, "").unwrap();
        std::fs::write(&two, "").unwrap();
        let known = || {
            KnownFiles::new(
                "here",
                vec![
                    source("docs/one.md", Some(origin("here", &one))),
                    source("taken.md", Some(one.display().to_string())),
                    source("there.md", Some(origin("there", &one))),
                    source("sent.md", None),
                ],
            )
        };
        let name = |path: &Path, wanted: &str, prefix| known().name(path, wanted, prefix).ok();
        assert_eq!(name(&one, "one.md", None).as_deref(), Some("docs/one.md"));
        assert_eq!(name(&one, "taken.md", None).as_deref(), Some("taken.md"));
        assert_eq!(
            name(&one, "new/one.md", Some("new")).as_deref(),
            Some("new/one.md")
        );
        assert_eq!(
            name(&one, "docs/x/one.md", Some("docs")).as_deref(),
            Some("docs/one.md")
        );
        for free in ["two.md", "there.md", "sent.md"] {
            assert_eq!(name(&two, free, None).as_deref(), Some(free));
        }
        let refused = known().name(&two, "taken.md", None).unwrap_err();
        assert!(
            refused.0.contains("one.md") && refused.0.contains("--as NAME"),
            "{refused}"
        );
        std::fs::remove_file(&one).unwrap();
        assert_eq!(name(&two, "taken.md", None).as_deref(), Some("taken.md"));
    }

    #[test]
    fn only_files_of_this_machine_are_gone() {
        let folder = tempfile::tempdir().unwrap();
        let at = std::fs::canonicalize(folder.path()).unwrap();
        std::fs::write(at.join("there.md"), "").unwrap();
        let file = |machine: &str, name: &str| Some(origin(machine, &at.join(name)));
        let known = KnownFiles::new(
            "here",
            vec![
                source("b", file("here", "gone.md")),
                source("second/b", file("here", "gone.md")),
                source("c", file("here", "there.md")),
                source("d", file("there", "other.md")),
                source("e", Some(origin("here", Path::new("/elsewhere/gone.md")))),
                source("f", None),
            ],
        );
        let walk = Walker::new(&[at.display().to_string()], &WalkOptions::default())
            .unwrap()
            .walk();
        assert_eq!(known.gone(&walk.covered), ["b", "second/b"]);
    }
}
