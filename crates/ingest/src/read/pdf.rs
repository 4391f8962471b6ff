//! PDF, page by page.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pdf_extract::{Document, PlainTextOutput, output_doc_page};

use super::{DocumentText, TextBody, Unreadable};

/// The largest text of a document.
const MAX_TEXT_BYTES: usize = 64 << 20;
const MAX_PAGES: usize = 5_000;

/// Parses a document in this process. The parser panics on files that are merely unusual. Time and
/// memory are for the caller to limit.
pub(super) fn parse(bytes: &[u8]) -> Result<DocumentText, Unreadable> {
    let pages = catch_unwind(AssertUnwindSafe(|| pages(bytes))).unwrap_or_else(|_| {
        Err(Unreadable::new(
            "this PDF cannot be read: the parser gave up on it",
        ))
    })?;
    if pages.iter().all(String::is_empty) {
        return Err(Unreadable::new("it has no text; its pages may be scanned images"));
    }
    Ok(DocumentText::of(TextBody::Pages(pages)))
}

/// Whether a file begins like a PDF.
pub(super) fn is_pdf(bytes: &[u8]) -> bool {
    let head = &bytes[..bytes.len().min(1024)];
    head.windows(5).any(|window| window == b"%PDF-")
}

fn pages(bytes: &[u8]) -> Result<Vec<String>, Unreadable> {
    let unreadable =
        |error: &dyn std::fmt::Display| Unreadable::new(format!("this PDF cannot be read: {error}"));
    let mut document = Document::load_mem(bytes).map_err(|e| unreadable(&e))?;
    if document.is_encrypted() {
        document
            .decrypt("")
            .map_err(|_| Unreadable::new("this PDF is protected by a password"))?;
    }
    let numbers: Vec<u32> = document.get_pages().keys().copied().collect();
    if numbers.len() > MAX_PAGES {
        return Err(Unreadable::new(format!(
            "it has {} pages; at most {MAX_PAGES} are allowed",
            numbers.len()
        )));
    }
    let mut pages = Vec::with_capacity(numbers.len());
    let mut bytes = 0;
    for number in numbers {
        let mut page = String::new();
        let mut output = PlainTextOutput::new(&mut page);
        output_doc_page(&document, &mut output, number).map_err(|e| unreadable(&e))?;
        bytes += page.len();
        if bytes > MAX_TEXT_BYTES {
            return Err(Unreadable::new(format!(
                "it has more than {} MB of text",
                MAX_TEXT_BYTES >> 20
            )));
        }
        pages.push(tidy(&page));
    }
    Ok(pages)
}

/// Removes trailing blanks and repeated empty lines.
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
