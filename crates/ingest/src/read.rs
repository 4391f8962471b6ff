//! Reading: from bytes to text that can be split.
//!
//! Documents may be broken or malicious. Sizes are limited before anything is parsed, and HTML and PDF
//! are parsed in a process of their own, with limits on time and memory.

mod decode;
pub(super) mod html;
mod isolated;
mod pdf;

pub use decode::decode;
pub(super) use decode::{BINARY_WITHIN, decode_row, is_binary};
use isolated::ReaderProcess;
pub use isolated::{IsolatedReader, serve};
use serde::{Deserialize, Serialize};

use super::kind::FileKind;

/// The reason that a document cannot be read, for the person who sent it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreadable(pub String);

impl Unreadable {
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

#[derive(Debug, Clone)]
pub struct ReadOptions {
    /// The largest file that is read as a whole.
    pub max_bytes: u64,
    /// The longest line of JSONL and the longest row of CSV.
    pub max_row_bytes: usize,
    /// The process that parses HTML and PDF. Without one they are parsed in this process, which is
    /// only for documents that are trusted.
    pub isolated: Option<IsolatedReader>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_row_bytes: 16 << 20,
            isolated: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum TextBody {
    Markdown(String),
    /// Markdown made of HTML, with escapes that are not on the page.
    Page(String),
    Plain(String),
    Code(String),
    /// Plain text, page by page.
    Pages(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentText {
    /// A title that the document has beside its body.
    pub title: Option<String>,
    pub body: TextBody,
}

impl DocumentText {
    fn of(body: TextBody) -> Self {
        Self { title: None, body }
    }
}

/// Reads documents, one after another.
pub struct DocumentReader {
    pub(super) options: ReadOptions,
    process: Option<ReaderProcess>,
    /// Whether the document is not wanted any more.
    is_cancelled: Box<dyn Fn() -> bool + Send>,
}

impl DocumentReader {
    pub fn new(options: ReadOptions, is_cancelled: impl Fn() -> bool + Send + 'static) -> Self {
        Self {
            options,
            process: None,
            is_cancelled: Box::new(is_cancelled),
        }
    }

    /// Reads a document that is in memory. Rows are read by [`super::rows`].
    pub fn read(&mut self, kind: FileKind, bytes: Vec<u8>) -> Result<DocumentText, Unreadable> {
        check_size(bytes.len() as u64, &self.options)?;
        let body = match kind {
            FileKind::Markdown => TextBody::Markdown(without_data_uris(decode(&bytes)?)),
            FileKind::Plain | FileKind::JsonLines | FileKind::Csv => TextBody::Plain(decode(&bytes)?),
            FileKind::Code => TextBody::Code(decode(&bytes)?),
            FileKind::Pdf if !pdf::is_pdf(&bytes) => {
                return Err(Unreadable::new("it does not begin like a PDF file"));
            }
            FileKind::Html | FileKind::Pdf => {
                let mut text = match &self.options.isolated {
                    Some(isolated) => isolated.read(&mut self.process, kind, bytes, &self.is_cancelled)?,
                    None => parse(kind, &bytes)?,
                };
                if let TextBody::Page(markdown) = text.body {
                    text.body = TextBody::Page(without_data_uris(markdown));
                }
                return Ok(text);
            }
        };
        Ok(DocumentText::of(body))
    }
}

/// Parses HTML or PDF in this process.
fn parse(kind: FileKind, bytes: &[u8]) -> Result<DocumentText, Unreadable> {
    match kind {
        FileKind::Pdf => pdf::parse(bytes),
        FileKind::Html => html::parse(bytes),
        other => Err(Unreadable::new(format!(
            "{} is not read in a process of its own",
            other.name()
        ))),
    }
}

/// Shorter `data:` URIs are examples of such.
const MIN_DATA_URI: usize = 128;

/// Removes the bytes of images that are part of a text: they say nothing and fill many chunks.
fn without_data_uris(text: String) -> String {
    const SCHEME: &str = "data:";
    let mut out = String::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find(SCHEME) {
        let uri = &rest[at..];
        let ends = |c: char| c.is_whitespace() || "\"'<>()[]`".contains(c);
        let end = uri.find(ends).unwrap_or(uri.len());
        let media_type = uri[SCHEME.len()..end]
            .split_once(',')
            .map_or("", |(media, _)| media);
        let is_data =
            end >= MIN_DATA_URI && media_type.contains(['/', ';']) && media_type.len() < MIN_DATA_URI;
        let kept = if is_data { at } else { at + end };
        out.push_str(&rest[..kept]);
        rest = &rest[at + end..];
    }
    if out.is_empty() {
        return if rest.len() == text.len() {
            text
        } else {
            rest.to_owned()
        };
    }
    out.push_str(rest);
    out
}

pub fn check_size(bytes: u64, options: &ReadOptions) -> Result<(), Unreadable> {
    if bytes <= options.max_bytes {
        return Ok(());
    }
    Err(Unreadable::new(format!(
        "it has {} MB; at most {} MB are allowed for its type",
        bytes.div_ceil(1 << 20),
        options.max_bytes >> 20
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_within_a_text_are_removed() {
        let uri = format!("data:image/png;base64,{}", "iVBOR/+=".repeat(5_000));
        let text =
            |uri: &str| format!("a ![dome]({uri}) b\n\n[image1]: <{uri}>\n\n<img src=\"{uri}\"> data: c");
        assert_eq!(without_data_uris(text(&uri)), text(""));
        assert_eq!(without_data_uris(uri.clone()), "");
        for kept in ["metadata: none", "data:image/png;base64,AAAA", "data:", ""] {
            assert_eq!(without_data_uris(kept.to_owned()), kept);
        }
        let sentence = format!("data:{}, and so on", "x".repeat(500));
        assert_eq!(without_data_uris(sentence.clone()), sentence);
    }
}
