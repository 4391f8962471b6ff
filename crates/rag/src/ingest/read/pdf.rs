//! PDF, page by page.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pdf_extract::{Document, PlainTextOutput, output_doc_page};

use super::{Body, ReadOptions, Text, Unreadable};
use crate::ingest::kind::Kind;

/// Between two pages in the text that an isolated reader hands over.
pub(super) const PAGE_BREAK: char = '\u{c}';

pub(super) fn read(bytes: &[u8], options: &ReadOptions) -> Result<Text, Unreadable> {
    if !bytes[..bytes.len().min(1024)]
        .windows(5)
        .any(|window| window == b"%PDF-")
    {
        return Err(Unreadable::new("it does not begin like a PDF file"));
    }
    let text = match &options.isolated {
        Some(isolated) => isolated.read(Kind::Pdf, bytes)?,
        None => extract(bytes, options)?,
    };
    let pages: Vec<String> = text.split(PAGE_BREAK).map(tidy).collect();
    if pages.iter().all(String::is_empty) {
        return Err(Unreadable::new(
            "it has no text; it may be made of scanned pictures",
        ));
    }
    Ok(Text::of(Body::Pages(pages)))
}

/// Extracts in this process. The parser panics on many files that are merely odd; memory and time
/// are for the caller to limit.
pub(super) fn extract(bytes: &[u8], options: &ReadOptions) -> Result<String, Unreadable> {
    catch_unwind(AssertUnwindSafe(|| pages(bytes, options))).unwrap_or_else(|_| {
        Err(Unreadable::new(
            "this PDF cannot be read: the parser gave up on it",
        ))
    })
}

fn pages(bytes: &[u8], options: &ReadOptions) -> Result<String, Unreadable> {
    let unreadable =
        |error: &dyn std::fmt::Display| Unreadable::new(format!("this PDF cannot be read: {error}"));
    let mut document = Document::load_mem(bytes).map_err(|e| unreadable(&e))?;
    if document.is_encrypted() {
        document
            .decrypt("")
            .map_err(|_| Unreadable::new("this PDF is protected by a password"))?;
    }
    let numbers: Vec<u32> = document.get_pages().keys().copied().collect();
    if numbers.len() > options.max_pages {
        return Err(Unreadable::new(format!(
            "it has {} pages; at most {} are read",
            numbers.len(),
            options.max_pages
        )));
    }
    let mut text = String::new();
    for (index, number) in numbers.iter().enumerate() {
        if index > 0 {
            text.push(PAGE_BREAK);
        }
        let mut page = String::new();
        let mut output = PlainTextOutput::new(&mut page);
        output_doc_page(&document, &mut output, *number).map_err(|e| unreadable(&e))?;
        text.push_str(&page.replace(PAGE_BREAK, "\n"));
        if text.len() as u64 > options.max_bytes {
            return Err(Unreadable::new(format!(
                "it has more than {} MB of text",
                options.max_bytes >> 20
            )));
        }
    }
    Ok(text)
}

/// Trailing blanks go, and so do empty lines beyond one.
fn tidy(page: &str) -> String {
    let mut tidy = String::with_capacity(page.len());
    let mut empty = 0;
    for line in page.lines().map(str::trim_end) {
        empty = if line.is_empty() { empty + 1 } else { 0 };
        if empty <= 1 {
            tidy.push_str(line);
            tidy.push('\n');
        }
    }
    tidy.trim().replace('\0', "\u{fffd}")
}
