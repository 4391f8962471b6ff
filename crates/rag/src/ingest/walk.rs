//! From what was typed to the files that are meant.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher, GlobSet, GlobSetBuilder};
use ragstone_core::error::InvalidInput;
use walkdir::WalkDir;

use super::chunk::hex;
use super::kind::Kind;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFile {
    pub path: PathBuf,
    /// The path as it was typed, tidied: what the documents are known by.
    pub source: String,
    /// Where it is on the disk, absolute: the real path of what was typed, and what is below it.
    pub origin: PathBuf,
    /// `None` where the name says that it is not text.
    pub kind: Option<Kind>,
    pub bytes: u64,
    /// Named by itself and not found in a folder, so that not reading it is an error.
    pub named: bool,
}

#[derive(Debug, Default)]
pub struct Found {
    pub files: Vec<FoundFile>,
    /// What could not be looked into, and why.
    pub problems: Vec<(String, String)>,
    /// What was looked into from end to end: whatever is not there is gone.
    pub covered: Vec<Covered>,
    /// Patterns as typed that no file matches.
    pub unmatched: Vec<String>,
}

/// A path or pattern as typed, and where it is.
#[derive(Debug, Clone)]
pub struct Covered {
    root: Root,
    on_disk: PathBuf,
}

impl Covered {
    /// Whether a file of an earlier run stood here, by where it was.
    pub fn covers(&self, origin: &Path) -> bool {
        let Ok(below) = origin.strip_prefix(&self.on_disk) else {
            return false;
        };
        match &self.root {
            Root::Path(_) => true,
            Root::Glob { base, matcher, .. } => matcher.is_match(source_name(&base.join(below))),
        }
    }

    /// The same by the name it was given, where no more is known.
    pub fn covers_name(&self, source: &str) -> bool {
        self.root.covers(source)
    }
}

/// What came of looking below one root.
#[derive(Default)]
struct Walked {
    /// Where the base is, unless some of what is below it could not be looked into.
    covered: Option<PathBuf>,
    /// Whether a file is wanted, be it one that another root brought before.
    matched: bool,
}

/// Paths and patterns as typed, and which of the files under them are wanted.
pub struct Selection {
    roots: Vec<Root>,
    include: Option<GlobSet>,
    exclude: GlobSet,
}

#[derive(Debug, Clone)]
enum Root {
    Path(PathBuf),
    Glob {
        pattern: String,
        base: PathBuf,
        matcher: GlobMatcher,
    },
}

impl Selection {
    pub fn new(paths: &[String], include: &[String], exclude: &[String]) -> Result<Self, InvalidInput> {
        let roots = paths
            .iter()
            .map(|path| Root::parse(path))
            .collect::<Result<_, _>>()?;
        let include = (!include.is_empty()).then(|| globs(include)).transpose()?;
        Ok(Self {
            roots,
            include,
            exclude: globs(exclude)?,
        })
    }

    /// All files, in a fixed order, each once however many ways lead to it. Hidden files and folders
    /// are left out unless they are named.
    pub fn find(&self) -> Found {
        let mut found = Found::default();
        let mut seen = HashSet::new();
        for root in &self.roots {
            let (base, matcher) = match root {
                Root::Path(path) => (path, None),
                Root::Glob { base, matcher, .. } => (base, Some(matcher)),
            };
            let walked = self.walk(base, matcher, &mut seen, &mut found);
            found.covered.extend(walked.covered.map(|on_disk| Covered {
                root: root.clone(),
                on_disk,
            }));
            if let Root::Glob { pattern, .. } = root
                && !walked.matched
            {
                found.unmatched.push(pattern.clone());
            }
        }
        found
    }

    fn walk(
        &self,
        base: &Path,
        matcher: Option<&GlobMatcher>,
        seen: &mut HashSet<PathBuf>,
        found: &mut Found,
    ) -> Walked {
        let start = if base.as_os_str().is_empty() {
            Path::new(".")
        } else {
            base
        };
        let looked_at = std::fs::metadata(start).and_then(|about| Ok((about, on_disk(start)?)));
        let (named, on_disk) = match looked_at {
            // Its rows could not be read twice, and a device may have no end.
            Ok((about, _)) if matcher.is_none() && !about.is_file() && !about.is_dir() => {
                let problem = "it is not a regular file; `-` reads JSONL from standard input";
                found.problems.push((source_name(start), problem.to_owned()));
                return Walked::default();
            }
            Ok((about, on_disk)) => (about.is_file() && matcher.is_none(), on_disk),
            // A pattern under a folder that is not there matches nothing, as any other pattern may.
            Err(error) if matcher.is_some() && error.kind() == ErrorKind::NotFound => {
                return Walked::default();
            }
            Err(error) => {
                found.problems.push((source_name(start), error.to_string()));
                return Walked::default();
            }
        };
        let (mut complete, mut matched) = (true, false);
        let wanted = |source: &str| {
            matcher.is_none_or(|matcher| matcher.is_match(source)) && (named || self.wants(source))
        };
        let walk = WalkDir::new(start)
            .follow_links(true)
            .sort_by_file_name()
            .into_iter();
        let visible = |entry: &walkdir::DirEntry| {
            entry.depth() == 0 || !entry.file_name().as_encoded_bytes().starts_with(b".")
        };
        for entry in walk.filter_entry(visible) {
            let entry = match entry {
                Ok(entry) => entry,
                // Whatever the link leads back to is visited anyway.
                Err(error) if error.loop_ancestor().is_some() => continue,
                Err(error) => {
                    let path = error.path().map(source_name).unwrap_or_default();
                    // A link that leads nowhere is nobody's loss where it would not have been read.
                    let is_link = error.path().is_some_and(Path::is_symlink);
                    if is_link && !wanted(&path) {
                        continue;
                    }
                    let problem = error
                        .io_error()
                        .map_or_else(|| error.to_string(), ToString::to_string);
                    found.problems.push((path, problem));
                    // Nothing is hidden behind a link that leads nowhere.
                    let no_target = error.io_error().is_some_and(|e| e.kind() == ErrorKind::NotFound);
                    complete &= is_link && no_target;
                    continue;
                }
            };
            if !entry.file_type().is_file() {
                continue;
            }
            let source = source_name(entry.path());
            if !wanted(&source) {
                continue;
            }
            matched = true;
            if !std::fs::canonicalize(entry.path()).is_ok_and(|path| seen.insert(path)) {
                continue;
            }
            let origin = match entry.path().strip_prefix(start) {
                Ok(below) if !below.as_os_str().is_empty() => on_disk.join(below),
                _ => on_disk.clone(),
            };
            found.files.push(FoundFile {
                kind: Kind::of_path(entry.path()),
                origin,
                bytes: entry.metadata().map_or(0, |about| about.len()),
                path: entry.into_path(),
                source,
                named,
            });
        }
        Walked {
            covered: complete.then_some(on_disk),
            matched,
        }
    }

    fn wants(&self, source: &str) -> bool {
        let name = source.rsplit('/').next().unwrap_or(source);
        let any = |set: &GlobSet| set.is_match(source) || set.is_match(name);
        self.include.as_ref().is_none_or(any) && !any(&self.exclude)
    }
}

impl Root {
    /// What exists under the typed name is that file or folder, whatever characters the name has.
    fn parse(text: &str) -> Result<Self, InvalidInput> {
        if Path::new(text).exists() || !text.contains(['*', '?', '[', '{']) {
            return Ok(Self::Path(text.into()));
        }
        let fixed: PathBuf = Path::new(text)
            .components()
            .take_while(|part| !part.as_os_str().to_string_lossy().contains(['*', '?', '[', '{']))
            .collect();
        let pattern = source_name(Path::new(text));
        Ok(Self::Glob {
            pattern: text.to_owned(),
            base: fixed,
            matcher: glob(&pattern)?.compile_matcher(),
        })
    }

    /// Whether a source of an earlier run stood here, by its name.
    fn covers(&self, source: &str) -> bool {
        match self {
            Self::Path(path) => {
                let base = source_name(path);
                let below = |rest: &str| rest.is_empty() || rest.starts_with('/');
                if base == "." {
                    !source.starts_with('/') && !source.starts_with("../")
                } else {
                    source
                        .strip_prefix(&base)
                        .is_some_and(|rest| base.ends_with('/') || below(rest))
                }
            }
            Self::Glob { matcher, .. } => matcher.is_match(source),
        }
    }
}

/// The real path of a folder, or of the folder that a file is in with the file's name: a link to a
/// file is where the link is.
fn on_disk(path: &Path) -> std::io::Result<PathBuf> {
    match path.file_name() {
        Some(name) if !path.is_dir() => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            Ok(std::fs::canonicalize(folder.unwrap_or(Path::new(".")))?.join(name))
        }
        _ => std::fs::canonicalize(path),
    }
}

/// Certainly no longer there. What cannot be looked at may still be.
pub fn is_gone(path: &Path) -> bool {
    std::fs::metadata(path)
        .is_err_and(|error| matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}

fn glob(pattern: &str) -> Result<globset::Glob, InvalidInput> {
    // A single star stays within a folder, as in a shell.
    GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .map_err(|error| {
            InvalidInput::new(format!(
                "'{}' is not a file pattern: {}",
                error.glob().unwrap_or(pattern),
                error.kind()
            ))
        })
}

fn globs(patterns: &[String]) -> Result<GlobSet, InvalidInput> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(glob(pattern)?);
    }
    set.build()
        .map_err(|error| InvalidInput::new(format!("the file patterns are too many or too large: {error}")))
}

/// `./a//b/../c` is `a/c`, and separators are those of Unix everywhere. Bytes that are no text are
/// spelled as a replacement character and two digits, and [`path_of`] finds the way back.
pub fn source_name(path: &Path) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut root = String::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir if parts.last().is_some_and(|last| last != "..") => {
                parts.pop();
            }
            Component::ParentDir => parts.push("..".to_owned()),
            Component::RootDir => root.push('/'),
            Component::Prefix(prefix) => root.push_str(&prefix.as_os_str().to_string_lossy()),
            Component::Normal(name) => parts.push(spelled(name.as_encoded_bytes())),
        }
    }
    let name = format!("{root}{}", parts.join("/"));
    if name.is_empty() { ".".to_owned() } else { name }
}

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

fn spelled(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    let escape = |text: &mut String, bytes: &[u8]| {
        for byte in bytes {
            text.push(REPLACEMENT);
            text.push_str(&hex(&[*byte]));
        }
    };
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                // One that is really in the name must not be taken for an escape.
                REPLACEMENT => escape(&mut text, REPLACEMENT.encode_utf8(&mut [0; 4]).as_bytes()),
                _ => text.push(c),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

/// The path that [`source_name`] made a name of.
pub fn path_of(source: &str) -> PathBuf {
    #[cfg(unix)]
    if source.contains(REPLACEMENT) {
        use std::os::unix::ffi::OsStringExt;
        let mut parts = source.split(REPLACEMENT);
        let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
        for part in parts {
            let escaped = part.get(..2).and_then(|two| u8::from_str_radix(two, 16).ok());
            match escaped {
                Some(byte) => {
                    bytes.push(byte);
                    bytes.extend(part[2..].bytes());
                }
                None => bytes.extend(format!("{REPLACEMENT}{part}").bytes()),
            }
        }
        return std::ffi::OsString::from_vec(bytes).into();
    }
    PathBuf::from(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "a.md",
            "b.txt",
            ".hidden.md",
            "sub/c.md",
            "sub/.git/d.md",
            "sub/deep/e.MD",
            "sub/x.png",
        ] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        folder
    }

    fn names(folder: &Path, paths: &[&str], include: &[&str], exclude: &[&str]) -> Vec<String> {
        let own = |list: &[&str]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        let paths: Vec<String> = paths
            .iter()
            .map(|p| folder.join(p).display().to_string())
            .collect();
        let found = Selection::new(&paths, &own(include), &own(exclude))
            .unwrap()
            .find();
        let prefix = format!("{}/", source_name(folder));
        found
            .files
            .iter()
            .map(|f| f.source.strip_prefix(&prefix).unwrap_or(&f.source).to_owned())
            .collect()
    }

    #[test]
    fn folders_files_and_patterns() {
        let folder = folder();
        let at = folder.path();
        assert_eq!(
            names(at, &[""], &[], &[]),
            ["a.md", "b.txt", "sub/c.md", "sub/deep/e.MD", "sub/x.png"]
        );
        assert_eq!(names(at, &["*.md"], &[], &[]), ["a.md"]);
        assert_eq!(names(at, &["**/*.md"], &[], &[]), ["a.md", "sub/c.md"]);
        assert_eq!(names(at, &[""], &["*.md"], &["**/sub/**"]), ["a.md"]);
        assert_eq!(
            names(at, &["a.md", "", ".hidden.md"], &["*.md"], &[]),
            ["a.md", "sub/c.md", ".hidden.md"]
        );
        let typed = ["none", "a.md"].map(|name| at.join(name).display().to_string());
        let missing = Selection::new(&typed, &[], &[]).unwrap().find();
        assert!(missing.problems[0].0.ends_with("/none"), "{:?}", missing.problems);
        assert_eq!(missing.files.len(), 1, "the rest is found");
        assert!(Selection::new(&["a".into()], &["[".into()], &[]).is_err());
        let typed = ["*.md", "*.x", "none/*"].map(|name| at.join(name).display().to_string());
        let unmatched = Selection::new(&typed, &[], &[]).unwrap().find().unmatched;
        assert_eq!(unmatched, typed[1..]);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_named_and_no_file_is_a_problem() {
        let found = Selection::new(&["/dev/null".into()], &[], &[]).unwrap().find();
        assert!(found.files.is_empty() && found.covered.is_empty());
        assert!(
            found.problems[0].1.starts_with("it is not a regular file"),
            "{:?}",
            found.problems
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_symlink_loop_ends_and_nothing_comes_twice() {
        let folder = folder();
        let at = folder.path();
        std::os::unix::fs::symlink(at, at.join("sub/back")).unwrap();
        std::os::unix::fs::symlink(at.join("sub"), at.join("z-other")).unwrap();
        std::os::unix::fs::symlink(at.join("nowhere"), at.join("broken")).unwrap();
        let problems = |exclude: &[String]| {
            let found = Selection::new(&[at.display().to_string()], &[], exclude)
                .unwrap()
                .find();
            found.problems.len()
        };
        assert_eq!((problems(&[]), problems(&["broken".to_owned()])), (1, 0));
        assert_eq!(
            names(at, &[""], &[], &[]),
            ["a.md", "b.txt", "sub/c.md", "sub/deep/e.MD", "sub/x.png"]
        );
    }

    #[test]
    fn names_are_tidied_and_roots_know_what_is_theirs() {
        assert_eq!(source_name(Path::new("./a//b/../c.md")), "a/c.md");
        assert_eq!(source_name(Path::new("../x/../../y")), "../../y");
        assert_eq!(source_name(Path::new("./")), ".");
        let covers = |root: &str, source: &str| Root::parse(root).unwrap().covers(source);
        assert!(covers("docs/", "docs/a.md") && covers("docs", "docs") && !covers("docs", "docs2/a.md"));
        assert!(covers(".", "docs/a.md") && !covers(".", "/docs/a.md") && !covers(".", "../a.md"));
        assert!(covers("docs/**/*.md", "docs/x/a.md") && !covers("docs/**/*.md", "docs/a.txt"));
        assert!(covers("/", "/a"));
    }
}
