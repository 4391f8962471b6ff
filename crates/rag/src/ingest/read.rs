//! From bytes to text that can be split.
//!
//! Whatever comes from outside may be broken or made to do harm: sizes are limited before anything
//! is parsed, and the two parsers that can be driven into the ground (PDF, and HTML that is nested
//! or repeated beyond reason) run in a process of their own where one is configured.

mod decode;
pub(super) mod html;
mod isolated;
mod pdf;

pub use decode::decode;
pub(super) use decode::{Utf16AsUtf8, decode_row};
pub use isolated::{IsolatedReader, confined};

use super::kind::Kind;

/// Why a document cannot be read, in a sentence for the person who sent it.
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
    pub max_pages: usize,
    /// Where PDF and suspicious HTML are parsed; in this process, or not at all, when absent.
    pub isolated: Option<IsolatedReader>,
}

impl Default for ReadOptions {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_row_bytes: 16 << 20,
            max_pages: 5_000,
            isolated: None,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Body {
    Markdown(String),
    /// Markdown made of HTML, with backslashes that are not on the page.
    Page(String),
    Plain(String),
    Code(String),
    /// Plain text, page by page.
    Pages(Vec<String>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// What the document calls itself, where it says so outside its body.
    pub title: Option<String>,
    pub body: Body,
}

impl Text {
    fn of(body: Body) -> Self {
        Self { title: None, body }
    }
}

/// Reads a document that is held in memory. Rows are not read here, see [`super::rows`].
pub fn read(kind: Kind, bytes: &[u8], options: &ReadOptions) -> Result<Text, Unreadable> {
    check_size(bytes.len() as u64, options)?;
    match kind {
        Kind::Markdown => Ok(Text::of(Body::Markdown(decode(bytes)?))),
        Kind::Plain | Kind::JsonLines | Kind::Csv => Ok(Text::of(Body::Plain(decode(bytes)?))),
        Kind::Code => Ok(Text::of(Body::Code(decode(bytes)?))),
        Kind::Html => html::read(bytes, options),
        Kind::Pdf => pdf::read(bytes, options),
    }
}

pub fn check_size(bytes: u64, options: &ReadOptions) -> Result<(), Unreadable> {
    if bytes <= options.max_bytes {
        return Ok(());
    }
    Err(Unreadable::new(format!(
        "it has {} MB; a file that is read as a whole may have {}",
        bytes.div_ceil(1 << 20),
        options.max_bytes >> 20
    )))
}
