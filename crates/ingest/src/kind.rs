//! Types of files, by media type or name.

use std::path::Path;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FileKind {
    Markdown,
    Html,
    Plain,
    Code,
    Pdf,
    /// One JSON object a line, each a document.
    JsonLines,
    /// One row a document.
    Csv,
}

/// The reason for a file of no kind.
pub const UNKNOWN_TYPE: &str = "its type cannot be read; supported are Markdown, HTML, plain text, PDF, JSONL, CSV \
                                and source code";

const MARKDOWN: [&str; 5] = ["md", "markdown", "mdown", "mdx", "mkd"];
const HTML: [&str; 3] = ["html", "htm", "xhtml"];
const JSON_LINES: [&str; 2] = ["jsonl", "ndjson"];
const CODE: [&str; 47] = [
    "asm", "bash", "c", "cc", "clj", "cpp", "cs", "css", "dart", "el", "erl", "ex", "exs", "f90", "fs", "go",
    "gradle", "groovy", "h", "hpp", "hs", "java", "jl", "js", "json", "jsx", "kt", "lua", "m", "ml", "nix",
    "php", "pl", "proto", "ps1", "py", "r", "rb", "rs", "scala", "sh", "sql", "swift", "tf", "ts", "tsx",
    "zig",
];
/// Plain text by convention.
const TEXT: [&str; 9] = [
    "adoc", "asciidoc", "log", "org", "rst", "srt", "tex", "text", "txt",
];
/// Never text, so that a folder's pictures are not opened to find out.
const NOT_TEXT: [&str; 40] = [
    "7z",
    "a",
    "avi",
    "bin",
    "bmp",
    "bz2",
    "class",
    "db",
    "dll",
    "doc",
    "docx",
    "exe",
    "gif",
    "gz",
    "ico",
    "jar",
    "jpeg",
    "jpg",
    "mkv",
    "mov",
    "mp3",
    "mp4",
    "o",
    "odt",
    "ogg",
    "onnx",
    "parquet",
    "png",
    "ppt",
    "pptx",
    "pyc",
    "rar",
    "safetensors",
    "so",
    "tar",
    "wasm",
    "webp",
    "xls",
    "xlsx",
    "zip",
];

impl FileKind {
    /// `None` for a file that is known not to be text. Unknown and missing extensions mean plain text.
    pub fn of_path(path: &Path) -> Option<Self> {
        let extension = path
            .extension()
            .and_then(|e| e.to_str())
            .map(str::to_ascii_lowercase)
            .unwrap_or_default();
        let extension = extension.as_str();
        match extension {
            "pdf" => Some(Self::Pdf),
            "csv" | "tsv" => Some(Self::Csv),
            _ if MARKDOWN.contains(&extension) => Some(Self::Markdown),
            _ if HTML.contains(&extension) => Some(Self::Html),
            _ if JSON_LINES.contains(&extension) => Some(Self::JsonLines),
            _ if CODE.contains(&extension) => Some(Self::Code),
            _ if NOT_TEXT.contains(&extension) => None,
            _ => Some(Self::Plain),
        }
    }

    /// Whether the name states the type, so that a file of another type is broken.
    pub fn is_stated(path: &Path) -> bool {
        let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
        Self::of_path(path) != Some(Self::Plain) || TEXT.contains(&extension.to_ascii_lowercase().as_str())
    }

    /// `None` for a media type that cannot be read.
    pub fn of_media_type(media_type: &str) -> Option<Self> {
        let essence = media_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
            .to_ascii_lowercase();
        match essence.as_str() {
            "text/markdown" | "text/x-markdown" => Some(Self::Markdown),
            "text/html" | "application/xhtml+xml" => Some(Self::Html),
            "application/pdf" => Some(Self::Pdf),
            "application/jsonl"
            | "application/x-ndjson"
            | "application/ndjson"
            | "application/x-jsonlines" => Some(Self::JsonLines),
            "text/csv" | "text/tab-separated-values" => Some(Self::Csv),
            "application/json" | "application/javascript" | "text/javascript" => Some(Self::Code),
            other if other.starts_with("text/x-") => Some(Self::Code),
            other if other.starts_with("text/") => Some(Self::Plain),
            _ => None,
        }
    }

    /// Read record by record, never as a whole.
    pub fn is_rows(self) -> bool {
        matches!(self, Self::JsonLines | Self::Csv)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Markdown => "markdown",
            Self::Html => "html",
            Self::Plain => "text",
            Self::Code => "code",
            Self::Pdf => "pdf",
            Self::JsonLines => "jsonl",
            Self::Csv => "csv",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_media_types_decide_the_kind() {
        for (path, kind) in [
            ("a/README.MD", Some(FileKind::Markdown)),
            ("page.mdx", Some(FileKind::Markdown)),
            ("x.htm", Some(FileKind::Html)),
            ("x.pdf", Some(FileKind::Pdf)),
            ("x.tsv", Some(FileKind::Csv)),
            ("x.ndjson", Some(FileKind::JsonLines)),
            ("main.rs", Some(FileKind::Code)),
            ("LICENSE", Some(FileKind::Plain)),
            ("x.log", Some(FileKind::Plain)),
            ("x.png", None),
        ] {
            assert_eq!(FileKind::of_path(Path::new(path)), kind, "{path}");
        }
        assert_eq!(
            FileKind::of_media_type("text/markdown; charset=utf-8"),
            Some(FileKind::Markdown)
        );
        assert_eq!(FileKind::of_media_type("text/x-rust"), Some(FileKind::Code));
        assert_eq!(FileKind::of_media_type("application/octet-stream"), None);
    }

    #[test]
    fn no_extension_is_listed_twice() {
        let lists: [&[&str]; 6] = [&MARKDOWN, &HTML, &JSON_LINES, &CODE, &TEXT, &NOT_TEXT];
        let all: Vec<&str> = lists.concat();
        let unique: std::collections::HashSet<&str> = all.iter().copied().collect();
        assert_eq!(all.len(), unique.len());
    }
}
