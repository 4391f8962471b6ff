//! Metadata at the beginning of a Markdown file.

use ragstone_core::document::Metadata;
use serde_json::Value;

/// A longer block is text between two rules.
const MAX_BYTES: usize = 64 << 10;

#[derive(Debug, Default, PartialEq)]
pub(super) struct FrontMatter {
    pub(super) title: Option<String>,
    /// All fields but the title.
    pub(super) metadata: Metadata,
    /// Offset of the text that follows.
    pub(super) end: usize,
}

/// Reads front matter. Only a block at the very beginning that parses as YAML or TOML counts: rules
/// look the same, and text between them must not be lost.
pub(super) fn front_matter(markdown: &str) -> FrontMatter {
    let found = fenced(markdown, "---", &["---", "..."])
        .and_then(|(inside, end)| Some((yaml(inside)?, end)))
        .or_else(|| {
            let (inside, end) = fenced(markdown, "+++", &["+++"])?;
            Some((toml(inside)?, end))
        });
    let Some((mut metadata, end)) = found else {
        return FrontMatter::default();
    };
    let title = match metadata.get("title") {
        Some(Value::String(title)) => title.split_whitespace().collect::<Vec<_>>().join(" "),
        Some(Value::Number(title)) => title.to_string(),
        _ => String::new(),
    };
    if !title.is_empty() {
        metadata.remove("title");
    }
    FrontMatter {
        title: (!title.is_empty()).then_some(title),
        metadata,
        end,
    }
}

/// The text between the marks, and the offset of the line after them.
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

fn yaml(yaml: &str) -> Option<Metadata> {
    // A heading reads as a comment, and "Note: this" below it as a field; no front matter begins so.
    if yaml.starts_with(['#', '\r', '\n']) {
        return None;
    }
    let fields: Metadata = serde_saphyr::from_str(yaml).ok()?;
    (!fields.is_empty()).then_some(fields)
}

fn toml(toml: &str) -> Option<Metadata> {
    let table: toml::Table = toml::from_str(toml).ok()?;
    let fields = table.into_iter().map(|(name, value)| (name, from_toml(value)));
    Some(fields.collect::<Metadata>()).filter(|fields| !fields.is_empty())
}

/// A TOML value as JSON, with dates as strings.
fn from_toml(value: toml::Value) -> Value {
    match value {
        toml::Value::String(text) => text.into(),
        toml::Value::Integer(number) => number.into(),
        toml::Value::Float(number) => number.into(),
        toml::Value::Boolean(flag) => flag.into(),
        toml::Value::Datetime(date) => date.to_string().into(),
        toml::Value::Array(list) => list.into_iter().map(from_toml).collect(),
        toml::Value::Table(table) => {
            let fields = table.into_iter().map(|(name, value)| (name, from_toml(value)));
            Value::Object(fields.collect())
        }
    }
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
            ("---\ntitle: [a]\n---\n", None),
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
    fn other_fields_are_metadata() {
        let expected =
            serde_json::json!({"draft": true, "weight": 3, "date": "2024-01-02", "tags": ["a", "b"]});
        for markdown in [
            "---\ntitle: T\ndraft: true\nweight: 3\ndate: 2024-01-02\ntags: [a, b]\n---\n",
            "+++\ntitle = 'T'\ndraft = true\nweight = 3\ndate = 2024-01-02\ntags = ['a', 'b']\n+++\n",
        ] {
            let front = front_matter(markdown);
            assert_eq!(Value::Object(front.metadata), expected, "{markdown}");
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
            "+++\ntitle = open\n+++\n",
        ] {
            assert_eq!(title_and_text(markdown), (None, markdown), "{markdown}");
        }
        let long = format!("---\nkey: {}\n---\n", "x ".repeat(MAX_BYTES));
        assert_eq!(title_and_text(&long), (None, long.as_str()));
    }
}
