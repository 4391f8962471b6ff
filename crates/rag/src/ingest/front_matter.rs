//! What a Markdown file says of itself before its text.

use serde_json::{Map, Value};

/// Longer ones are text between two rules.
const MAX_BYTES: usize = 64 << 10;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FrontMatter {
    pub(super) title: Option<String>,
    /// Where the text begins.
    pub(super) end: usize,
}

/// Only what stands at the very beginning and reads as YAML or TOML is front matter: rules look the
/// same, and what is between them is text that must not be lost.
pub(super) fn front_matter(markdown: &str) -> FrontMatter {
    let found = fenced(markdown, "---", &["---", "..."])
        .and_then(|(inside, end)| Some((yaml_title(inside)?, end)))
        .or_else(|| {
            let (inside, end) = fenced(markdown, "+++", &["+++"])?;
            Some((toml_title(inside)?, end))
        });
    let (title, end) = found.unwrap_or_default();
    let title = title.map(|title| title.split_whitespace().collect::<Vec<_>>().join(" "));
    FrontMatter {
        title: title.filter(|title| !title.is_empty()),
        end,
    }
}

/// What is between the marks, and where the line after them begins.
fn fenced<'t>(markdown: &'t str, open: &str, close: &[&str]) -> Option<(&'t str, usize)> {
    let mut at = markdown.len() - markdown.trim_start_matches('\u{feff}').len();
    let mut lines = markdown[at..].split_inclusive('\n');
    let first = lines.next().filter(|line| line.trim_end() == open)?;
    at += first.len();
    let start = at;
    for line in lines {
        if close.contains(&line.trim_end()) {
            return Some((&markdown[start..at], at + line.len()));
        }
        at += line.len();
        if at - start > MAX_BYTES {
            return None;
        }
    }
    None
}

/// The title, if any, of what is a mapping.
fn yaml_title(yaml: &str) -> Option<Option<String>> {
    // A heading reads as a comment, and "Note: this" below it as a field; nobody begins front matter so.
    if yaml.starts_with(['#', '\r', '\n']) {
        return None;
    }
    let fields: Map<String, Value> = serde_saphyr::from_str(yaml).ok()?;
    if fields.is_empty() {
        return None;
    }
    Some(match fields.get("title") {
        Some(Value::String(title)) => Some(title.clone()),
        Some(Value::Number(title)) => Some(title.to_string()),
        _ => None,
    })
}

/// The title, if any, of what begins like TOML: with a field or a table.
fn toml_title(toml: &str) -> Option<Option<String>> {
    let mut lines = toml.lines().filter(|line| {
        let line = line.trim();
        !line.is_empty() && !line.starts_with('#')
    });
    let is_toml = |line: &str| {
        let key = line.split_once('=').map_or("", |(key, _)| key.trim());
        let plain = |c: char| c.is_alphanumeric() || "_-.\"'".contains(c);
        line.trim_start().starts_with('[') || (!key.is_empty() && key.chars().all(plain))
    };
    if !lines.clone().next().is_some_and(is_toml) {
        return None;
    }
    // Below the first table, a title is that of something else.
    let title = lines
        .by_ref()
        .take_while(|line| !line.trim_start().starts_with('['))
        .find_map(|line| {
            let (key, value) = line.split_once('=')?;
            (key.trim().trim_matches(['"', '\'']) == "title").then_some(value.trim())
        });
    Some(title.and_then(|value| toml_string(value, toml)))
}

/// A string that begins here; one of several lines goes on in `toml`.
fn toml_string(value: &str, toml: &str) -> Option<String> {
    for quotes in ["\"\"\"", "'''"] {
        if value.starts_with(quotes) {
            let (_, rest) = toml.split_once(value)?;
            let whole = format!("{value}{rest}");
            return Some(whole[quotes.len()..].split_once(quotes)?.0.to_owned());
        }
    }
    if let Some(literal) = value.strip_prefix('\'') {
        return Some(literal.split_once('\'')?.0.to_owned());
    }
    // Strings with escapes are spelled as in JSON, but for escapes that no title has.
    serde_json::Deserializer::from_str(value)
        .into_iter::<String>()
        .next()?
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn title_and_text(markdown: &str) -> (Option<String>, &str) {
        let front = front_matter(markdown);
        (front.title, &markdown[front.end..])
    }

    #[test]
    fn titles_are_read_as_yaml_and_toml_have_them() {
        for (front, title) in [
            ("---\ntitle: 'A guide'\n---\n", Some("A guide")),
            ("\u{feff}---\r\ntitle: \"Bom: T\" # c\r\n---\r\n", Some("Bom: T")),
            (
                "---\ntitle: >\n  folded\n  over lines\ntags: [a, b]\n\nx: 1\n...\n",
                Some("folded over lines"),
            ),
            ("---\ntitle: 2024\n---\n", Some("2024")),
            ("---\nauthor: {title: no}\ndate: 2024-01-02\n---\n", None),
            (
                "+++\n# c\ndate = 2024-01-02\ntitle = \"A \\\"T\\\"\" # c\n[x]\ntitle = \"no\"\n+++\n",
                Some("A \"T\""),
            ),
            (
                "+++\ntitle = 'C:\\x'\ntags = [\n  \"a\",\n]\n+++\n",
                Some("C:\\x"),
            ),
            ("+++\ntitle = \"\"\"\nTwo\nlines\"\"\"\n+++\n", Some("Two lines")),
            ("+++\n[menu]\ntitle = \"no\"\n+++\n", None),
        ] {
            let markdown = format!("{front}text\n\n---\nkey: value\n---\n");
            let text = "text\n\n---\nkey: value\n---\n";
            assert_eq!(
                title_and_text(&markdown),
                (title.map(str::to_owned), text),
                "{front}"
            );
        }
    }

    #[test]
    fn what_is_no_front_matter_is_text() {
        for markdown in [
            "---\n# Chapter 1\n\nMany words.\n\n---\n\n# Chapter 2\n",
            "---\n# Chapter 1\n---\n",
            "---\n# Chapter 1\n\nNote: all of it is text.\n\n---\n",
            "---\n\nNote: this, too.\n\n---\n",
            "---\n- a\n- b\n---\n",
            "---\n\n---\n",
            "---\ntitle: open\n",
            "---\ntitle: [\n---\n",
            "text\n---\ntitle: T\n---\n",
            "\n---\ntitle: T\n---\n",
            "+++\nMany words.\n+++\n",
            "+++\n+++\n",
        ] {
            assert_eq!(title_and_text(markdown), (None, markdown), "{markdown}");
        }
        let long = format!("---\nkey: {}\n---\n", "x ".repeat(MAX_BYTES));
        assert_eq!(title_and_text(&long), (None, long.as_str()));
    }
}
