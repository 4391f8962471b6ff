//! Runs every code block of README.md and docs/ against the built program.
//!
//! The blocks of a document run in order, in one temporary directory. The info string selects the action:
//!
//! - `sh`: run it; it must succeed.
//! - `sh server`: start it in the background and wait until the server answers.
//! - `console`: run the lines after `$ ` (continued after `> `) and compare their standard output with the
//!   lines below. Whitespace is ignored, `…` matches anything, decimal fractions may differ by 0.01, and
//!   durations, times and generated ids are not compared.
//! - `python`: run it with the test interpreter.
//! - `json`: parse it. `yaml`: check it with `ragstone doctor`.
//! - A second word with a dot is a file name: the block is written to that file, and a script is not run.
//!
//! A block after `<!-- not run: REASON -->` is only counted.

mod blocks;
mod compare;
mod workspace;

use std::path::{Path, PathBuf};

use blocks::Block;
use workspace::Workspace;

/// Blocks that no test runs, each with a reason in its document.
const NOT_RUN: usize = 3;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(document: &str) -> String {
    std::fs::read_to_string(root().join(document)).unwrap_or_else(|error| panic!("{document}: {error}"))
}

fn run(document: &str) {
    let mut workspace = Workspace::new();
    for block in blocks::of(&read(document)) {
        workspace
            .run(&block)
            .unwrap_or_else(|problem| panic!("{document}:{}: {problem}", block.line));
    }
}

macro_rules! documents {
    ($($name:ident: $path:literal),+ $(,)?) => {
        const DOCUMENTS: &[&str] = &[$($path),+];
        $(#[test]
        fn $name() {
            run($path);
        })+
    };
}

documents! {
    readme: "README.md",
    contents: "docs/README.md",
    collections: "docs/guide/collections.md",
    conversations: "docs/guide/conversations.md",
    gateway: "docs/guide/gateway.md",
    ingestion: "docs/guide/ingestion.md",
    memory: "docs/guide/memory.md",
    models: "docs/guide/models.md",
    operations: "docs/guide/operations.md",
    search: "docs/guide/search.md",
    security: "docs/guide/security.md",
    command_line: "docs/reference/cli.md",
    configuration: "docs/reference/configuration.md",
    export_format: "docs/reference/export-format.md",
    filters: "docs/reference/filters.md",
    cohere: "docs/recipes/cohere.md",
    openai: "docs/recipes/openai.md",
}

fn markdown_files(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            markdown_files(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
}

#[test]
fn every_document_is_tested() {
    let mut files = vec![root().join("README.md")];
    markdown_files(&root().join("docs"), &mut files);
    for file in files {
        let name = file.strip_prefix(root()).expect("a file of the project");
        assert!(
            DOCUMENTS.iter().any(|document| Path::new(document) == name),
            "{} is not in DOCUMENTS",
            name.display()
        );
    }
}

#[test]
fn blocks_that_do_not_run_are_counted() {
    let reasons: Vec<String> = DOCUMENTS
        .iter()
        .flat_map(|document| {
            blocks::of(&read(document))
                .into_iter()
                .map(move |block| (document, block))
        })
        .filter_map(|(document, Block { line, not_run, .. })| {
            Some(format!("{document}:{line}: {}", not_run?))
        })
        .collect();
    assert_eq!(reasons.len(), NOT_RUN, "{reasons:#?}");
}

#[test]
fn links_between_documents_resolve() {
    let more = [
        "ARCHITECTURE.md",
        "BENCHMARKS.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "RESILIENCE.md",
        "SECURITY.md",
        "STYLE.md",
    ];
    for document in DOCUMENTS.iter().chain(&more) {
        let folder = root().join(document);
        for link in blocks::links(&read(document)) {
            let path = link.split('#').next().unwrap_or_default();
            let target = folder.with_file_name("").join(path);
            assert!(target.exists(), "{document}: the link {link} leads nowhere");
        }
    }
}
