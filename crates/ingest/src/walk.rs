//! Finding files: paths, folders and patterns to the files below them.

use std::collections::HashSet;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use globset::{GlobBuilder, GlobMatcher, GlobSet, GlobSetBuilder};
use ragstone_core::error::InvalidInput;

use super::chunk::hex;
use super::kind::FileKind;
use super::read::{BINARY_WITHIN, is_binary};

/// Ending of a file that holds metadata for the file it is named after: `a.pdf.metadata.json`.
pub const SIDECAR: &str = ".metadata.json";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    pub path: PathBuf,
    /// Path relative to the root of the walk, which is the name of its documents.
    pub source: String,
    /// Absolute path: the real path of the folder that was walked, joined with the path below it.
    pub origin: PathBuf,
    /// `None` for a type that cannot be read.
    pub kind: Option<FileKind>,
    pub bytes: u64,
    /// Given as a path of its own, so that failing to read it is an error.
    pub named: bool,
    /// A file with metadata for this one.
    pub sidecar: Option<PathBuf>,
}

#[derive(Debug, Default)]
pub struct Walk {
    pub files: Vec<SourceFile>,
    /// Paths that could not be read, with the reason.
    pub problems: Vec<(String, String)>,
    /// Paths that were read completely: a file that is missing there is gone.
    pub covered: Vec<Covered>,
    /// Patterns that match no file.
    pub unmatched: Vec<String>,
}

/// A path or pattern that was walked completely.
#[derive(Debug, Clone)]
pub struct Covered {
    root: Root,
    on_disk: PathBuf,
}

impl Covered {
    /// Whether the file at this absolute path belongs to what was walked.
    pub fn covers(&self, origin: &Path) -> bool {
        let Ok(below) = origin.strip_prefix(&self.on_disk) else {
            return false;
        };
        match &self.root {
            Root::Path(_) => true,
            Root::Glob { base, matcher, .. } => matcher.is_match(source_name(&base.join(below))),
        }
    }
}

/// The outcome of walking one root.
#[derive(Default)]
struct RootWalk {
    /// Absolute path of the root, unless a part of it could not be read.
    covered: Option<PathBuf>,
    /// Whether any file matches, including files that another root found first.
    matched: bool,
}

/// Options of a walk beside its paths.
#[derive(Debug, Clone, Default)]
pub struct WalkOptions {
    /// Of files in folders, only those that match one of these patterns.
    pub include: Vec<String>,
    /// Of files in folders, none that matches one of these patterns.
    pub exclude: Vec<String>,
    /// Include files that `.gitignore` excludes, `node_modules` and build folders.
    pub no_ignore: bool,
}

/// Paths and patterns to walk, and which files under them to take.
pub struct Walker {
    roots: Vec<Root>,
    include: Option<GlobSet>,
    exclude: GlobSet,
    no_ignore: bool,
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

impl Walker {
    pub fn new(paths: &[String], options: &WalkOptions) -> Result<Self, InvalidInput> {
        let roots = paths
            .iter()
            .map(|path| Root::parse(path))
            .collect::<Result<_, _>>()?;
        let include = (!options.include.is_empty()).then(|| globs(&options.include));
        Ok(Self {
            roots,
            include: include.transpose()?,
            exclude: globs(&options.exclude)?,
            no_ignore: options.no_ignore,
        })
    }

    /// All files in a fixed order, each once. Hidden files, ignored files and symbolic links are
    /// skipped unless they are given as paths of their own.
    pub fn walk(&self) -> Walk {
        let mut walk = Walk::default();
        let mut seen = HashSet::new();
        let mut folders = Vec::new();
        for root in &self.roots {
            let walked = self.walk_root(root, &mut seen, &mut folders, &mut walk);
            walk.covered.extend(walked.covered.map(|on_disk| Covered {
                root: root.clone(),
                on_disk,
            }));
            if let Root::Glob { pattern, .. } = root
                && !walked.matched
            {
                walk.unmatched.push(pattern.clone());
            }
        }
        let root = common_folder(&folders);
        for file in &mut walk.files {
            file.source = source_name(file.origin.strip_prefix(&root).unwrap_or(&file.origin));
        }
        pair_sidecars(&mut walk.files);
        walk
    }

    fn walk_root(
        &self,
        root: &Root,
        seen: &mut HashSet<PathBuf>,
        folders: &mut Vec<PathBuf>,
        walk: &mut Walk,
    ) -> RootWalk {
        let (base, matcher) = match root {
            Root::Path(path) => (path, None),
            Root::Glob { base, matcher, .. } => (base, Some(matcher)),
        };
        let start = if base.as_os_str().is_empty() {
            Path::new(".")
        } else {
            base
        };
        let looked_at = std::fs::metadata(start).and_then(|about| Ok((about, on_disk(start)?)));
        let (named, on_disk) = match looked_at {
            // Rows are read twice, and a device may have no end.
            Ok((about, _)) if matcher.is_none() && !about.is_file() && !about.is_dir() => {
                let problem = "it is not a regular file; `-` reads JSONL from standard input";
                walk.problems.push((source_name(start), problem.to_owned()));
                return RootWalk::default();
            }
            Ok((about, on_disk)) => (about.is_file() && matcher.is_none(), on_disk),
            // A pattern below a missing folder matches nothing, like any other pattern may.
            Err(error) if matcher.is_some() && error.kind() == ErrorKind::NotFound => {
                return RootWalk::default();
            }
            Err(error) => {
                walk.problems.push((source_name(start), error.to_string()));
                return RootWalk::default();
            }
        };
        let folder = if named { on_disk.parent() } else { Some(&*on_disk) };
        folders.extend(folder.map(Path::to_path_buf));
        let (mut complete, mut matched) = (true, false);
        for entry in self.entries(start) {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    let (path, problem) = describe(&error);
                    walk.problems
                        .push((path.unwrap_or_else(|| source_name(start)), problem));
                    complete = false;
                    continue;
                }
            };
            // A link is followed only where it is given as a path of its own.
            let is_file = entry.file_type().is_some_and(|kind| kind.is_file());
            if !(is_file || named) {
                continue;
            }
            let below = entry.path().strip_prefix(start).unwrap_or(entry.path());
            let typed = source_name(entry.path());
            let matches = matcher.is_none_or(|matcher| matcher.is_match(&typed));
            if !matches || !(named || self.wants(&typed, &source_name(below))) {
                continue;
            }
            matched = true;
            if !std::fs::canonicalize(entry.path()).is_ok_and(|path| seen.insert(path)) {
                continue;
            }
            let origin = if below.as_os_str().is_empty() {
                on_disk.clone()
            } else {
                on_disk.join(below)
            };
            let about = std::fs::metadata(entry.path());
            walk.files.push(SourceFile {
                kind: kind_of(entry.path(), named),
                origin,
                bytes: about.map_or(0, |about| about.len()),
                path: entry.into_path(),
                source: String::new(),
                named,
                sidecar: None,
            });
        }
        RootWalk {
            covered: complete.then_some(on_disk),
            matched,
        }
    }

    fn entries(&self, start: &Path) -> ignore::Walk {
        let no_ignore = self.no_ignore;
        let mut builder = ignore::WalkBuilder::new(start);
        builder
            .standard_filters(!no_ignore)
            .hidden(true)
            // A checkout without its `.git` folder is ignored in the same way.
            .require_git(false)
            .sort_by_file_name(std::ffi::OsStr::cmp)
            .filter_entry(move |entry| no_ignore || entry.depth() == 0 || !is_generated(entry));
        builder.build()
    }

    fn wants(&self, typed: &str, below: &str) -> bool {
        let name = below.rsplit('/').next().unwrap_or(below);
        let any = |set: &GlobSet| [typed, below, name].iter().any(|path| set.is_match(path));
        self.include.as_ref().is_none_or(any) && !any(&self.exclude)
    }
}

/// Dependencies and build output: `node_modules`, and `target` of Cargo or Maven.
fn is_generated(entry: &ignore::DirEntry) -> bool {
    let is_folder = entry.file_type().is_some_and(|kind| kind.is_dir());
    let beside = |name: &str| entry.path().with_file_name(name).exists();
    is_folder
        && match entry.file_name().to_str() {
            Some("node_modules") => true,
            Some("target") => {
                beside("Cargo.toml") || beside("pom.xml") || entry.path().join("CACHEDIR.TAG").exists()
            }
            _ => false,
        }
}

/// The kind of a file. A file in a folder whose name says nothing is skipped when it is binary.
fn kind_of(path: &Path, named: bool) -> Option<FileKind> {
    let kind = FileKind::of_path(path)?;
    (named || FileKind::is_stated(path) || !looks_binary(path)).then_some(kind)
}

fn looks_binary(path: &Path) -> bool {
    let mut head = Vec::new();
    let read =
        std::fs::File::open(path).and_then(|file| file.take(BINARY_WITHIN as u64).read_to_end(&mut head));
    read.is_ok() && is_binary(&head)
}

/// The deepest folder that contains all of these.
fn common_folder(folders: &[PathBuf]) -> PathBuf {
    let mut folders = folders.iter();
    let first = folders.next().cloned().unwrap_or_default();
    folders.fold(first, |common, folder| {
        let shared = common.components().zip(folder.components());
        shared
            .take_while(|(one, other)| one == other)
            .map(|(one, _)| one)
            .collect()
    })
}

/// Moves files that hold metadata to the files they are named after.
fn pair_sidecars(files: &mut Vec<SourceFile>) {
    let main_of = |path: &Path| {
        let name = path.file_name()?.to_str()?.strip_suffix(SIDECAR)?;
        Some(path.with_file_name(name))
    };
    for file in files.iter_mut() {
        let mut name = file.path.file_name().unwrap_or_default().to_owned();
        name.push(SIDECAR);
        let sidecar = file.path.with_file_name(name);
        file.sidecar = sidecar.is_file().then_some(sidecar);
    }
    files.retain(|file| !main_of(&file.path).is_some_and(|main| main.is_file()));
}

/// The path and the reason of an error of the walk.
fn describe(error: &ignore::Error) -> (Option<String>, String) {
    match error {
        ignore::Error::WithPath { path, err } => (Some(source_name(path)), describe(err).1),
        ignore::Error::WithDepth { err, .. } | ignore::Error::WithLineNumber { err, .. } => describe(err),
        other => {
            let reason = other.io_error().map(ToString::to_string);
            (None, reason.unwrap_or_else(|| other.to_string()))
        }
    }
}

impl Root {
    /// A name that exists is that file or folder, whatever characters it has.
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
}

/// The real path of a folder. For a file, the real path of its folder joined with its name, so that
/// a link to a file is where the link is.
fn on_disk(path: &Path) -> std::io::Result<PathBuf> {
    match path.file_name() {
        Some(name) if !path.is_dir() => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            Ok(std::fs::canonicalize(folder.unwrap_or(Path::new(".")))?.join(name))
        }
        _ => std::fs::canonicalize(path),
    }
}

/// Whether a file certainly no longer exists. One that cannot be accessed may still exist.
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

/// A normalized path with Unix separators: `./a//b/../c` is `a/c`. Bytes that are not UTF-8 are
/// spelled as a replacement character and two hexadecimal digits; [`path_of`] is the inverse.
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
                // A replacement character in the name itself is escaped as well.
                REPLACEMENT => escape(&mut text, REPLACEMENT.encode_utf8(&mut [0; 4]).as_bytes()),
                _ => text.push(c),
            }
        }
        escape(&mut text, chunk.invalid());
    }
    text
}

/// The path that [`source_name`] spelled.
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
            write(folder.path(), name, "text");
        }
        folder
    }

    fn write(folder: &Path, name: &str, content: &str) {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }

    fn walk(at: &Path, paths: &[&str], options: &WalkOptions) -> Walk {
        let typed: Vec<String> = paths
            .iter()
            .map(|path| at.join(path).display().to_string())
            .collect();
        Walker::new(&typed, options).unwrap().walk()
    }

    fn names(at: &Path, paths: &[&str], include: &[&str], exclude: &[&str]) -> Vec<String> {
        let list = |patterns: &[&str]| patterns.iter().map(|&pattern| pattern.to_owned()).collect();
        let options = WalkOptions {
            include: list(include),
            exclude: list(exclude),
            ..WalkOptions::default()
        };
        sources(&walk(at, paths, &options))
    }

    fn sources(walk: &Walk) -> Vec<String> {
        walk.files.iter().map(|file| file.source.clone()).collect()
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
        assert_eq!(names(at, &[""], &["*.md"], &["sub/**"]), ["a.md"]);
        assert_eq!(
            names(at, &["a.md", "", ".hidden.md"], &["*.md"], &[]),
            ["a.md", "sub/c.md", ".hidden.md"]
        );
        let missing = walk(at, &["none", "a.md"], &WalkOptions::default());
        assert!(missing.problems[0].0.ends_with("/none"), "{:?}", missing.problems);
        assert_eq!(missing.files.len(), 1, "the rest is found");
        let invalid = WalkOptions {
            include: vec!["[".into()],
            ..WalkOptions::default()
        };
        assert!(Walker::new(&["a".into()], &invalid).is_err());
        let unmatched = walk(at, &["*.md", "*.x", "none/*"], &WalkOptions::default()).unmatched;
        assert_eq!(
            unmatched,
            ["*.x", "none/*"].map(|name| at.join(name).display().to_string())
        );
    }

    #[test]
    fn names_are_relative_to_the_folder_that_contains_all_paths() {
        let folder = folder();
        let at = folder.path();
        assert_eq!(names(at, &["sub"], &["*.md"], &[]), ["c.md"]);
        assert_eq!(names(at, &["sub/c.md"], &[], &[]), ["c.md"]);
        assert_eq!(
            names(at, &["sub/deep/e.MD", "sub/c.md"], &[], &[]),
            ["deep/e.MD", "c.md"]
        );
        assert_eq!(
            names(at, &["sub/deep", "a.md"], &[], &[]),
            ["sub/deep/e.MD", "a.md"]
        );
    }

    #[test]
    fn ignored_files_and_build_output_are_skipped_unless_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for (name, content) in [
            (".gitignore", "*.tmp\n/out/\n"),
            ("a.md", ""),
            ("b.tmp", ""),
            ("out/c.md", ""),
            ("docs/target/kept.md", ""),
            ("crate/Cargo.toml", ""),
            ("crate/target/d.md", ""),
            ("web/node_modules/e.md", ""),
        ] {
            write(at, name, content);
        }
        assert_eq!(
            names(at, &[""], &[], &[]),
            ["a.md", "crate/Cargo.toml", "docs/target/kept.md"]
        );
        let all = WalkOptions {
            no_ignore: true,
            ..WalkOptions::default()
        };
        assert_eq!(
            sources(&walk(at, &[""], &all)),
            [
                "a.md",
                "b.tmp",
                "crate/Cargo.toml",
                "crate/target/d.md",
                "docs/target/kept.md",
                "out/c.md",
                "web/node_modules/e.md"
            ]
        );
    }

    #[test]
    fn a_file_of_metadata_goes_with_the_file_it_is_named_after() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for name in ["a.pdf", "a.pdf.metadata.json", "b.metadata.json"] {
            write(at, name, "{}");
        }
        let walk = walk(at, &[""], &WalkOptions::default());
        assert_eq!(sources(&walk), ["a.pdf", "b.metadata.json"]);
        assert_eq!(
            walk.files[0].sidecar,
            Some(walk.files[0].path.with_file_name("a.pdf.metadata.json"))
        );
        assert_eq!(walk.files[1].sidecar, None);
    }

    #[test]
    fn binary_files_whose_names_say_nothing_are_of_no_kind() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        for (name, content) in [("a.dat", "\0"), ("b.dat", "text"), ("c.txt", "\0"), ("d", "\0")] {
            write(at, name, content);
        }
        let kinds = |paths: &[&str]| -> Vec<bool> {
            let files = walk(at, paths, &WalkOptions::default()).files;
            files.iter().map(|file| file.kind.is_some()).collect()
        };
        assert_eq!(kinds(&[""]), [false, true, true, false]);
        assert_eq!(
            kinds(&["a.dat"]),
            [true],
            "reading a file that was named fails with a reason"
        );
    }

    #[cfg(unix)]
    #[test]
    fn what_is_named_and_no_file_is_a_problem() {
        let found = Walker::new(&["/dev/null".into()], &WalkOptions::default())
            .unwrap()
            .walk();
        assert!(found.files.is_empty() && found.covered.is_empty());
        assert!(
            found.problems[0].1.starts_with("it is not a regular file"),
            "{:?}",
            found.problems
        );
    }

    #[cfg(unix)]
    #[test]
    fn symbolic_links_are_followed_only_where_they_are_given_as_paths() {
        use std::os::unix::fs::symlink;
        let (inside, outside) = (folder(), tempfile::tempdir().unwrap());
        let at = inside.path();
        write(outside.path(), "secret.md", "text");
        symlink(at, at.join("sub/back")).unwrap();
        symlink(outside.path(), at.join("folder")).unwrap();
        symlink(outside.path().join("secret.md"), at.join("link.md")).unwrap();
        symlink(at.join("nowhere"), at.join("broken")).unwrap();
        let walked = walk(at, &[""], &WalkOptions::default());
        assert_eq!(
            sources(&walked),
            ["a.md", "b.txt", "sub/c.md", "sub/deep/e.MD", "sub/x.png"]
        );
        assert_eq!(walked.problems, []);
        assert_eq!(names(at, &["link.md"], &[], &[]), ["link.md"]);
        assert_eq!(names(at, &["folder"], &[], &[]), ["secret.md"]);
    }

    #[test]
    fn paths_are_normalized() {
        assert_eq!(source_name(Path::new("./a//b/../c.md")), "a/c.md");
        assert_eq!(source_name(Path::new("../x/../../y")), "../../y");
        assert_eq!(source_name(Path::new("./")), ".");
    }

    #[test]
    fn a_root_covers_the_files_below_it() {
        let folder = folder();
        let at = std::fs::canonicalize(folder.path()).unwrap();
        let covers = |path: &str, file: &str| {
            let covered = walk(&at, &[path], &WalkOptions::default()).covered;
            covered.iter().any(|covered| covered.covers(&at.join(file)))
        };
        assert!(covers("sub", "sub/gone.md") && !covers("sub", "sub2/gone.md") && !covers("sub", "gone.md"));
        assert!(covers("a.md", "a.md") && !covers("a.md", "b.txt"));
        assert!(covers("sub/**/*.md", "sub/x/gone.md") && !covers("sub/**/*.md", "sub/gone.txt"));
    }
}
