//! Results of a search as cards in a terminal.

use std::collections::HashSet;

use ragstone_core::analysis::{analyze_document, analyze_query};
use ragstone_ingest::chunk::keys;
use serde_json::Value;

use super::super::printable;

/// Words of a snippet.
const SNIPPET_WORDS: usize = 45;
const INDENT: &str = "   ";

pub(super) struct Style {
    pub width: usize,
    /// Show whole texts and all metadata.
    pub full: bool,
}

pub(super) fn terminal_width() -> usize {
    let given = std::env::var("COLUMNS")
        .ok()
        .and_then(|columns| columns.parse().ok());
    given.unwrap_or(100).clamp(40, 120)
}

fn bold(text: &str) -> String {
    format!("\x1b[1m{text}\x1b[0m")
}

fn dim(text: &str) -> String {
    format!("\x1b[2m{text}\x1b[0m")
}

/// Shows one card per result, then warnings and timings.
pub(super) fn cards(answer: &Value, query: &str, style: &Style) -> String {
    let terms: HashSet<String> = analyze_query(query).into_iter().map(|term| term.text).collect();
    let results = answer["results"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    let mut out = String::new();
    if results.is_empty() {
        out.push_str("Nothing found.\n");
    }
    for (index, result) in results.iter().enumerate() {
        out.push_str(&card(index + 1, result, &terms, style));
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

fn card(number: usize, result: &Value, terms: &HashSet<String>, style: &Style) -> String {
    let metadata = &result["metadata"];
    let id = text(&result["id"]);
    let title = [text(&metadata[keys::TITLE]), section(metadata)];
    let title: Vec<String> = title.into_iter().filter(|part| !part.is_empty()).collect();
    let heading = if style.full || title.is_empty() {
        id
    } else {
        title.join(" › ")
    };
    let mut out = format!(
        "{}  {}\n",
        bold(&format!("{number}. {heading}")),
        dim(&scores(result))
    );
    let source = text(&metadata[keys::SOURCE]);
    if !style.full && !source.is_empty() {
        out.push_str(&dim(&wrapped(
            source.split_whitespace().map(str::to_owned),
            style.width,
        )));
    }
    let whole = text(&result["text"]);
    out.push_str(&wrapped(snippet(&whole, terms, style.full), style.width));
    if let Some(metadata) = metadata.as_object().filter(|all| style.full && !all.is_empty()) {
        let pairs = metadata
            .iter()
            .map(|(key, value)| printable(&format!("{key}={value}")));
        out.push_str(&dim(&wrapped(pairs, style.width)));
    }
    for sibling in result["siblings"].as_array().into_iter().flatten() {
        let words = snippet(&text(&sibling["text"]), terms, style.full);
        out.push_str(&wrapped(
            std::iter::once("│".to_owned()).chain(words),
            style.width,
        ));
    }
    if let Some(stages) = result["explain"].as_object() {
        let trail = stages.iter().map(|(stage, rank)| {
            let score = rank["score"].as_f64().unwrap_or_default();
            printable(&format!("{stage} #{} ({score:.4})", rank["rank"]))
        });
        out.push_str(&wrapped(trail, style.width));
    }
    out
}

fn text(value: &Value) -> String {
    printable(value.as_str().unwrap_or_default())
}

/// The headings above the text, as a path.
fn section(metadata: &Value) -> String {
    match &metadata[keys::SECTION_PATH] {
        Value::Array(parts) => {
            let parts: Vec<String> = parts.iter().map(text).collect();
            parts.join(" › ")
        }
        other => text(other),
    }
}

fn scores(result: &Value) -> String {
    let scores: Vec<String> = ["distance", "keyword_score", "rerank_score"]
        .into_iter()
        .filter_map(|key| Some((key, result[key].as_f64()?)))
        .map(|(key, score)| format!("{} {score:.4}", key.replace('_', " ")))
        .collect();
    scores.join(", ")
}

/// The words with most matches, or all of them. Matches are marked.
fn snippet(whole: &str, terms: &HashSet<String>, full: bool) -> Vec<String> {
    let words: Vec<(&str, bool)> = whole
        .split_whitespace()
        .map(|word| {
            (
                word,
                analyze_document(word)
                    .counts
                    .keys()
                    .any(|term| terms.contains(term)),
            )
        })
        .collect();
    let length = if full {
        words.len()
    } else {
        SNIPPET_WORDS.min(words.len())
    };
    let start = best_window(&words, length);
    let mut shown: Vec<String> = words[start..start + length]
        .iter()
        .map(|(word, matches)| {
            if *matches {
                format!("\x1b[1;33m{word}\x1b[0m")
            } else {
                (*word).to_owned()
            }
        })
        .collect();
    if start > 0 {
        shown.insert(0, "…".to_owned());
    }
    if start + length < words.len() {
        shown.push("…".to_owned());
    }
    shown
}

/// The first window of this length with the most matches.
fn best_window(words: &[(&str, bool)], length: usize) -> usize {
    let is_match = |index: usize| usize::from(words[index].1);
    let mut count: usize = (0..length).map(is_match).sum();
    let (mut best, mut most) = (0, count);
    for start in 1..=words.len() - length {
        count = count + is_match(start + length - 1) - is_match(start - 1);
        if count > most {
            (best, most) = (start, count);
        }
    }
    // Some words before the first match, for context.
    let first = (best..best + length)
        .find(|index| words[*index].1)
        .unwrap_or(best);
    best.min(first.saturating_sub(SNIPPET_WORDS / 4))
}

/// Wraps at words and indents. Escape sequences take no room.
fn wrapped(words: impl IntoIterator<Item = String>, width: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in words {
        let length = visible_length(&word);
        if column > 0 && column + 1 + length > width {
            out.push('\n');
            column = 0;
        }
        if column == 0 {
            out.push_str(INDENT);
            column = INDENT.len();
        } else {
            out.push(' ');
            column += 1;
        }
        out.push_str(&word);
        column += length;
    }
    out.push('\n');
    out
}

/// Input is printable, so escape sequences are those of [`snippet`].
fn visible_length(word: &str) -> usize {
    word.split('\x1b')
        .enumerate()
        .map(|(index, part)| match part.split_once('m') {
            Some((_, rest)) if index > 0 => rest.chars().count(),
            _ => part.chars().count(),
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn style(full: bool) -> Style {
        Style { width: 80, full }
    }

    fn plain(shown: &str) -> String {
        let mut out = String::new();
        for (index, part) in shown.split('\x1b').enumerate() {
            out.push_str(if index == 0 {
                part
            } else {
                part.split_once('m').unwrap().1
            });
        }
        out
    }

    #[test]
    fn a_card_shows_title_section_source_and_a_marked_snippet() {
        let filler = "filler ".repeat(100);
        let answer = json!({"results": [{
            "id": "guide.md#3", "distance": 0.25, "text": format!("{filler} The domes are closing now. {filler}"),
            "metadata": {"title": "Guide", "section_path": "Dome › Rain", "source": "docs/guide.md",
                "content_hash": "abc", "position": 3},
        }]});
        let shown = cards(&answer, "close the dome", &style(false));
        let text = plain(&shown);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "1. Guide › Dome › Rain  distance 0.2500");
        assert_eq!(lines[1], "   docs/guide.md");
        assert!(lines[2].starts_with("   … filler"), "{text}");
        assert!(
            !text.contains("content_hash") && !text.contains("guide.md#3"),
            "{text}"
        );
        for marked in ["domes", "closing"] {
            assert!(shown.contains(&format!("\x1b[1;33m{marked}\x1b[0m")), "{shown}");
        }
        assert!(text.split_whitespace().filter(|word| *word == "filler").count() < 50);
        let full = plain(&cards(&answer, "close the dome", &style(true)));
        assert!(full.starts_with("1. guide.md#3  distance 0.2500\n"), "{full}");
        assert!(
            full.contains("content_hash=\"abc\"") && full.contains("position=3"),
            "{full}"
        );
        assert_eq!(
            full.split_whitespace().filter(|word| *word == "filler").count(),
            200
        );
    }

    #[test]
    fn control_characters_are_not_shown() {
        let answer = json!({"results": [{"id": "a\u{1b}]0;b\u{7}\nc", "text": "one\u{1b}[31m two", "metadata": {"n": 1}, "distance": 0.25}],
            "warnings": ["Reranking was skipped\u{1b}[2J"]});
        let shown = cards(&answer, "x", &style(true));
        assert!(
            !shown.contains("\u{1b}]") && !shown.contains("\u{1b}[2J") && !shown.contains("\u{1b}[31m"),
            "{shown:?}"
        );
        assert!(shown.contains("1. a ]0;b  c") && shown.contains("n=1"), "{shown}");
        assert!(shown.contains("one [31m two") && shown.contains("Note: Reranking was skipped"));
        assert_eq!(
            cards(&json!({"results": []}), "x", &style(false)),
            "Nothing found.\n"
        );
    }

    #[test]
    fn long_lines_are_wrapped() {
        let words = || std::iter::repeat_n("\x1b[1;33mword\x1b[0m".to_owned(), 40);
        let lines = plain(&wrapped(words(), 40));
        assert_eq!(lines.split_whitespace().count(), 40, "{lines}");
        let lengths: Vec<usize> = lines.lines().map(|line| line.chars().count()).collect();
        assert!(lengths.iter().all(|length| *length <= 40), "{lines}");
        assert!(lengths.len() == 6, "as few lines as possible: {lines}");
    }
}
