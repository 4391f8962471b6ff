//! Labelled collections in the layout of BEIR: `corpus.jsonl`, `queries.jsonl` and `qrels.tsv`.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use ragstone_core::document::{Document, DocumentId, Metadata, NewDocument};
use ragstone_core::error::InvalidInput;
use ragstone_core::measures::Judgements;
use serde::Deserialize;
use serde::de::DeserializeOwned;

const CORPUS: &str = "corpus.jsonl";
const QUERIES: &str = "queries.jsonl";
/// Where judgements are looked for: beside the other files, or where BEIR keeps those to report on.
const JUDGEMENTS: [&str; 2] = ["qrels.tsv", "qrels/test.tsv"];

/// What is searched, what for, and what should be found.
pub struct Benchmark {
    pub corpus: Corpus,
    /// Those that were judged, in the order of the file.
    pub queries: Vec<JudgedQuery>,
}

pub struct Corpus {
    pub documents: Vec<NewDocument>,
    /// How many had no text at all, which nothing can find; they are left out.
    pub empty: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub struct JudgedQuery {
    pub id: String,
    pub text: String,
    pub judgements: Judgements,
}

#[derive(Deserialize)]
struct CorpusLine {
    #[serde(rename = "_id")]
    id: String,
    #[serde(default)]
    title: String,
    text: String,
}

#[derive(Deserialize)]
struct QueryLine {
    #[serde(rename = "_id")]
    id: String,
    text: String,
}

pub fn read_benchmark(folder: &Path) -> Result<Benchmark, InvalidInput> {
    let mut judgements = read_judgements(folder)?;
    let mut queries = Vec::with_capacity(judgements.len());
    for (at, line) in read_lines::<QueryLine>(folder, QUERIES)? {
        // What nobody judged cannot be measured; sets come with more queries than they use.
        if let Some(judgements) = judgements.remove(&line.id) {
            if line.text.trim().is_empty() {
                return Err(at.problem(format!("query '{}' has no text", line.id)));
            }
            queries.push(JudgedQuery {
                id: line.id,
                text: line.text,
                judgements,
            });
        }
    }
    if let Some(unknown) = judgements.keys().min() {
        return Err(InvalidInput::new(format!(
            "the judgements name the query '{unknown}', which is not in {QUERIES}"
        )));
    }
    if queries.is_empty() {
        return Err(InvalidInput::new(format!(
            "{} has no judged queries",
            folder.display()
        )));
    }
    Ok(Benchmark {
        corpus: read_corpus(folder)?,
        queries,
    })
}

pub fn read_corpus(folder: &Path) -> Result<Corpus, InvalidInput> {
    let mut known = HashSet::new();
    let mut corpus = Corpus {
        documents: Vec::new(),
        empty: 0,
    };
    for (at, line) in read_lines::<CorpusLine>(folder, CORPUS)? {
        let text = titled(line.title.trim(), line.text.trim());
        if text.is_empty() {
            corpus.empty += 1;
            continue;
        }
        let id = DocumentId::parse(line.id).map_err(|error| at.problem(error))?;
        if !known.insert(id.clone()) {
            return Err(at.problem(format!("document '{id}' is there twice")));
        }
        corpus.documents.push(NewDocument {
            document: Document {
                id,
                text,
                metadata: Metadata::new(),
            },
            embedding: None,
        });
    }
    if corpus.documents.is_empty() {
        return Err(InvalidInput::new(format!(
            "{} has no documents with a text",
            folder.join(CORPUS).display()
        )));
    }
    Ok(corpus)
}

/// The title before the text, as is usual, unless the text begins with it anyway.
fn titled(title: &str, text: &str) -> String {
    if title.is_empty() || text.starts_with(title) {
        text.to_owned()
    } else {
        format!("{title} {text}").trim_end().to_owned()
    }
}

fn read_judgements(folder: &Path) -> Result<HashMap<String, Judgements>, InvalidInput> {
    let name = JUDGEMENTS
        .into_iter()
        .find(|name| folder.join(name).is_file())
        .unwrap_or(JUDGEMENTS[0]);
    let mut judgements: HashMap<String, Judgements> = HashMap::new();
    for (at, line) in lines(folder, name)? {
        let columns: Vec<&str> = line.split('\t').map(str::trim).collect();
        let &[query, document, grade] = columns.as_slice() else {
            return Err(at.problem("it must have three columns with tabs between: query, document, grade"));
        };
        match grade.parse::<i32>() {
            Ok(grade) => {
                judgements
                    .entry(query.to_owned())
                    .or_default()
                    .insert(document.to_owned(), grade);
            }
            // The first line may name the columns.
            Err(_) if at.line == 1 => {}
            Err(_) => return Err(at.problem(format!("'{grade}' is no grade, which is a whole number"))),
        }
    }
    Ok(judgements)
}

/// A line of a file, for messages.
pub(super) struct At {
    file: String,
    line: usize,
}

impl At {
    pub(super) fn problem(&self, problem: impl std::fmt::Display) -> InvalidInput {
        InvalidInput::new(format!("{}, line {}: {problem}", self.file, self.line))
    }
}

/// One JSON object a line; empty lines are passed over.
pub(super) fn read_lines<T: DeserializeOwned>(
    folder: &Path,
    name: &str,
) -> Result<Vec<(At, T)>, InvalidInput> {
    lines(folder, name)?
        .into_iter()
        .map(|(at, line)| match serde_json::from_str(&line) {
            Ok(read) => Ok((at, read)),
            Err(error) => Err(at.problem(without_line(&error))),
        })
        .collect()
}

/// The parser saw one line only, and its number is another one than that in the file.
fn without_line(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match message.strip_suffix(&place) {
        Some(what) => format!("{what} at column {}", error.column()),
        None => message,
    }
}

fn lines(folder: &Path, name: &str) -> Result<Vec<(At, String)>, InvalidInput> {
    let path = folder.join(name);
    let unreadable =
        |error: std::io::Error| InvalidInput::new(format!("{} cannot be read: {error}", path.display()));
    let file = BufReader::new(File::open(&path).map_err(unreadable)?);
    let mut read = Vec::new();
    for (number, line) in file.lines().enumerate() {
        let line = line.map_err(unreadable)?;
        if !line.trim().is_empty() {
            let at = At {
                file: name.to_owned(),
                line: number + 1,
            };
            read.push((at, line));
        }
    }
    Ok(read)
}
