//! `ragstone query`: ask a running server from the command line.

use std::io::{IsTerminal, Write};

use clap::Args;
use clap::builder::PossibleValuesParser;
use ragstone_core::collection::CollectionName;
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::Filter;
use ragstone_core::search::SearchMode;
use serde_json::{Map, Value, json};

use super::remote::{REMOTE_ENVIRONMENT, RemoteArgs};
use super::{block_on, printable};

#[derive(Args)]
#[command(after_help = REMOTE_ENVIRONMENT)]
pub(super) struct QueryArgs {
    /// The collection to search
    #[arg(value_parser = collection)]
    collection: CollectionName,
    /// What to search for
    #[arg(value_parser = some_text)]
    text: String,
    /// Only documents that pass this filter, as JSON
    #[arg(long = "where", value_name = "JSON", value_parser = filter)]
    filter: Option<Value>,
    /// What results are ranked by: meaning, words, or both
    #[arg(long, default_value = SearchMode::Dense.name(), value_parser = PossibleValuesParser::new(SearchMode::ALL.map(SearchMode::name)))]
    mode: String,
    /// How many results
    #[arg(long, short = 'k', default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    top_k: u64,
    /// Reorder by the cross-encoder
    #[arg(long)]
    rerank: bool,
    /// Also show the documents that share this metadata field with a result
    #[arg(long, value_name = "FIELD")]
    expand: Option<String>,
    /// Leave out results farther away than this
    #[arg(long)]
    max_distance: Option<f32>,
    /// Show ranks and timings of every stage
    #[arg(long)]
    explain: bool,
    /// JSON even in a terminal; in a pipe it always is
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

fn collection(text: &str) -> Result<CollectionName, InvalidInput> {
    CollectionName::parse(text)
}

fn some_text(text: &str) -> Result<String, &'static str> {
    if text.trim().is_empty() {
        return Err("there must be something to search for");
    }
    Ok(text.to_owned())
}

/// Checked here as the server would, so that a mistake is one in the arguments.
fn filter(text: &str) -> Result<Value, String> {
    let filter: Value = serde_json::from_str(text).map_err(|error| format!("it must be JSON: {error}"))?;
    Filter::parse(&filter).map_err(|error| error.to_string())?;
    Ok(filter)
}

pub(super) fn run(args: &QueryArgs) -> anyhow::Result<()> {
    let answer = block_on(async {
        let client = args.remote.client()?;
        let answer = client.query_json(&args.collection, &body(args)).await;
        answer.map_err(|error| args.remote.explain(error))
    })?;
    let mut out = std::io::stdout().lock();
    if args.json || !out.is_terminal() {
        writeln!(out, "{}", serde_json::to_string_pretty(&answer)?)?;
    } else {
        write!(out, "{}", cards(&answer, terminal_width()))?;
    }
    Ok(())
}

fn body(args: &QueryArgs) -> Value {
    let mut body = Map::from_iter([
        ("query".to_owned(), json!(args.text)),
        ("mode".to_owned(), json!(args.mode)),
        ("top_k".to_owned(), json!(args.top_k)),
        ("rerank".to_owned(), json!(args.rerank)),
        ("explain".to_owned(), json!(args.explain)),
    ]);
    if let Some(filter) = &args.filter {
        body.insert("where".to_owned(), filter.clone());
    }
    if let Some(field) = &args.expand {
        body.insert("expand".to_owned(), json!(field));
    }
    if let Some(distance) = args.max_distance {
        body.insert("max_distance".to_owned(), json!(distance));
    }
    Value::Object(body)
}

fn terminal_width() -> usize {
    let given = std::env::var("COLUMNS")
        .ok()
        .and_then(|columns| columns.parse().ok());
    given.unwrap_or(100).clamp(40, 120)
}

/// One card a result: a line of numbers, the text, its metadata.
fn cards(answer: &Value, width: usize) -> String {
    let mut out = String::new();
    let results = answer["results"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    if results.is_empty() {
        out.push_str("Nothing found.\n");
    }
    for (place, result) in results.iter().enumerate() {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let mut numbers = Vec::new();
        for key in ["distance", "keyword_score", "rerank_score"] {
            if let Some(number) = result[key].as_f64() {
                numbers.push(format!("{} {number:.4}", key.replace('_', " ")));
            }
        }
        out.push_str(&format!(
            "\x1b[1m{}. {}\x1b[0m  \x1b[2m{}\x1b[0m\n",
            place + 1,
            printable(&text(&result["id"])),
            numbers.join(", ")
        ));
        out.push_str(&indented(&text(&result["text"]), width));
        if let Some(metadata) = result["metadata"]
            .as_object()
            .filter(|metadata| !metadata.is_empty())
        {
            let pairs: Vec<String> = metadata
                .iter()
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            out.push_str(&format!("\x1b[2m{}\x1b[0m", indented(&pairs.join("  "), width)));
        }
        for sibling in result["siblings"].as_array().into_iter().flatten() {
            out.push_str(&indented(&format!("│ {}", text(&sibling["text"])), width));
        }
        if let Some(stages) = result["explain"].as_object() {
            let trail: Vec<String> = stages
                .iter()
                .map(|(stage, place)| {
                    format!(
                        "{stage} #{} ({:.4})",
                        place["rank"],
                        place["score"].as_f64().unwrap_or_default()
                    )
                })
                .collect();
            out.push_str(&indented(&trail.join("  "), width));
        }
        out.push('\n');
    }
    for warning in answer["warnings"].as_array().into_iter().flatten() {
        let warning = warning.as_str().unwrap_or_default();
        out.push_str(&format!("Note: {}\n", printable(warning)));
    }
    if let Some(timings) = answer["timings_ms"].as_object() {
        let parts: Vec<String> = timings
            .iter()
            .map(|(stage, ms)| format!("{stage} {ms} ms"))
            .collect();
        out.push_str(&format!("{}\n", printable(&parts.join(", "))));
    }
    out
}

/// Wraps at words and sets in by three.
fn indented(text: &str, width: usize) -> String {
    let clean = printable(text);
    let mut out = String::new();
    let mut column = 0;
    for word in clean.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            out.push('\n');
            column = 0;
        }
        if column == 0 {
            out.push_str("   ");
            column = 3;
        } else {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += length;
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_show_results_and_never_control_characters() {
        let answer = json!({"results": [{"id": "a\u{1b}]0;b\u{7}\nc", "text": "one\u{1b}[31m two", "metadata": {"n": 1}, "distance": 0.25}],
            "warnings": ["Reranking was skipped\u{1b}[2J"]});
        let shown = cards(&answer, 80);
        assert!(
            !shown.contains("\u{1b}]") && !shown.contains("\u{1b}[2J"),
            "{shown:?}"
        );
        assert!(shown.contains("1. a ]0;b  c") && shown.contains("distance 0.2500") && shown.contains("n=1"));
        assert!(shown.contains("one [31m two") && shown.contains("Note: Reranking was skipped"));
        assert!(cards(&json!({"results": []}), 80).contains("Nothing found"));
    }

    #[test]
    fn long_lines_are_wrapped() {
        let lines = indented(&"word ".repeat(40), 40);
        assert!(lines.lines().all(|line| line.chars().count() <= 40), "{lines}");
    }
}
