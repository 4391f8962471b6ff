//! HTML, by way of Markdown.

use std::ops::Range;

use htmd::HtmlToMarkdown;
use pulldown_cmark::{Event, Tag};

use super::decode::decode_page;
use super::{Body, ReadOptions, Text, Unreadable};
use crate::ingest::edits::Edits;
use crate::ingest::kind::Kind;
use crate::ingest::outline::events;

/// Tags times nesting, at most, for a page that is parsed in this process. A parser that repairs
/// what was left open may make that many nodes of it; real pages stay far below.
const HARMLESS: usize = 4_000_000;
/// Nobody nests a page that deep by hand.
const MAX_DEPTH: usize = 2_000;
/// What the walk over a page needs on the stack, with room to spare.
const STACK: usize = 256 << 20;

const MAX_TITLE_BYTES: usize = 2048;

const SKIPPED: [&str; 10] = [
    "script", "style", "noscript", "template", "svg", "iframe", "nav", "footer", "head", "form",
];

/// Elements without content, and those that the next of their kind closes: they do not nest.
const FLAT: [&str; 26] = [
    "area", "base", "br", "col", "dd", "dt", "embed", "hr", "img", "input", "li", "link", "meta", "optgroup",
    "option", "p", "param", "source", "tbody", "td", "tfoot", "th", "thead", "tr", "track", "wbr",
];

pub(super) fn read(bytes: &[u8], options: &ReadOptions) -> Result<Text, Unreadable> {
    let html = decode_page(bytes)?;
    let shape = measure(&html);
    if shape.depth > MAX_DEPTH {
        return Err(Unreadable::new(format!(
            "its elements are nested {} deep; at most {MAX_DEPTH} are read",
            shape.depth
        )));
    }
    let title = title(&html);
    let markdown = if shape.depth.saturating_mul(shape.tags) <= HARMLESS {
        on_large_stack(&html)?
    } else if let Some(isolated) = &options.isolated {
        isolated.read(Kind::Html, bytes)?
    } else {
        return Err(Unreadable::new(
            "its elements are nested and repeated beyond what is safe to read",
        ));
    };
    Ok(Text {
        title,
        body: Body::Page(markdown),
    })
}

/// Converts without looking at the shape first: for a process that may die of it.
pub(super) fn convert(bytes: &[u8]) -> Result<String, Unreadable> {
    on_large_stack(&decode_page(bytes)?)
}

fn on_large_stack(html: &str) -> Result<String, Unreadable> {
    let html = &code_in_pre(html);
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, || {
                HtmlToMarkdown::builder()
                    .skip_tags(SKIPPED.to_vec())
                    .build()
                    .convert(html)
            });
        let thread = thread.map_err(|error| Unreadable::new(format!("no thread to read it in: {error}")))?;
        match thread.join() {
            Ok(Ok(markdown)) => Ok(markdown),
            Ok(Err(error)) => Err(Unreadable::new(format!("this HTML cannot be read: {error}"))),
            Err(_) => Err(Unreadable::new(
                "this HTML cannot be read: the parser gave up on it",
            )),
        }
    })
}

/// The converter takes `<pre>` for code only where a `<code>` stands in it, which on many pages it
/// does not.
fn code_in_pre(html: &str) -> String {
    let lower = html.to_ascii_lowercase();
    let mut out = String::with_capacity(html.len());
    let mut copied = 0;
    let mut at = 0;
    while let Some(start) = lower[at..].find("<pre").map(|start| at + start) {
        let Some(inside) = lower[start..].find('>').map(|end| start + end + 1) else {
            break;
        };
        at = inside;
        let is_pre = lower[start + 4..].starts_with([' ', '>', '\n', '\t', '\r']);
        let Some(end) = lower[inside..].find("</pre").map(|end| inside + end) else {
            break;
        };
        if is_pre && !lower[inside..end].contains("<code") {
            out.push_str(&html[copied..inside]);
            out.push_str("<code>");
            out.push_str(&html[inside..end]);
            out.push_str("</code>");
            copied = end;
            at = end;
        }
    }
    out.push_str(&html[copied..]);
    out
}

/// What the converter wrote so that Markdown would not take it for a mark, as it stands on the page:
/// backslashes, of which there are none in code, and strokes in the cells of tables.
pub(in crate::ingest) fn unescapes(markdown: &str) -> Edits {
    const STROKE: &str = "&#124;";
    let mut found = Vec::new();
    let mut code: Vec<Range<usize>> = Vec::new();
    for (event, range) in events(markdown) {
        match event {
            Event::Start(Tag::CodeBlock(_)) | Event::Code(_) => code.push(range),
            Event::Start(Tag::Table(_)) => {
                let strokes = markdown[range.clone()].match_indices(STROKE);
                found.extend(strokes.map(|(at, stroke)| {
                    let at = range.start + at;
                    (at..at + stroke.len(), "|")
                }));
            }
            _ => {}
        }
    }
    let bytes = markdown.as_bytes();
    let mut code = code.into_iter().peekable();
    let mut at = 0;
    while let Some(backslash) = markdown[at..].find('\\').map(|found| at + found) {
        at = backslash + 1;
        while code.next_if(|code| code.end <= backslash).is_some() {}
        if let Some(code) = code.peek().filter(|code| code.start <= backslash) {
            at = code.end;
        } else if bytes.get(at).is_some_and(u8::is_ascii_punctuation) {
            found.push((backslash..at, ""));
            // What it stands before may be another backslash.
            at += 1;
        }
    }
    Edits::new(found)
}

struct Shape {
    tags: usize,
    depth: usize,
}

/// An upper estimate from the tags alone, without building anything.
fn measure(html: &str) -> Shape {
    let mut shape = Shape { tags: 0, depth: 0 };
    let mut open: usize = 0;
    for piece in html.split('<').skip(1) {
        let (closing, rest) = match piece.strip_prefix('/') {
            Some(rest) => (true, rest),
            None => (false, piece),
        };
        let end = rest
            .find(|c: char| !c.is_ascii_alphanumeric())
            .unwrap_or(rest.len());
        let name = &rest[..end];
        if name.is_empty() {
            continue;
        }
        shape.tags += 1;
        if FLAT.iter().any(|flat| flat.eq_ignore_ascii_case(name)) {
            continue;
        }
        open = if closing { open.saturating_sub(1) } else { open + 1 };
        shape.depth = shape.depth.max(open);
    }
    shape
}

fn title(html: &str) -> Option<String> {
    // Found by ASCII letters alone, so that positions hold for the text as it is.
    let lower = html.to_ascii_lowercase();
    let start = lower.find("<title")?;
    let start = start + lower[start..].find('>')? + 1;
    let end = start + lower[start..].find("</title")?;
    let mut end = end.min(start + MAX_TITLE_BYTES);
    while !html.is_char_boundary(end) {
        end -= 1;
    }
    let markdown = htmd::convert(html.get(start..end)?).ok()?;
    let title = markdown.split_whitespace().collect::<Vec<_>>().join(" ");
    (!title.is_empty()).then_some(title)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_becomes_markdown_and_the_title_is_kept() {
        let page = "<html><head><title>A &amp; B</title><style>p{}</style></head><body><nav>menu</nav>\
                    <h1>Top</h1><p>one<p>two<ul><li>x<li>y</ul><script>bad()</script></body></html>";
        let text = read(page.as_bytes(), &ReadOptions::default()).unwrap();
        assert_eq!(text.title.as_deref(), Some("A & B"));
        let Body::Page(markdown) = text.body else {
            panic!("a page is expected")
        };
        assert!(markdown.starts_with("# Top\n\none\n\ntwo"), "{markdown}");
        assert!(
            !markdown.contains("bad") && !markdown.contains("menu"),
            "{markdown}"
        );
    }

    #[test]
    fn preformatted_text_is_code_and_marks_are_as_on_the_page() {
        let page = "<p>a_b * [x] 1. \\ `</p><PRE class=x>p_q *r* &lt;x&gt;</PRE><pre><code>s_t</code></pre>\
                    <p>use <code>u_v\\_</code> and w_w</p><preface>";
        let Body::Page(markdown) = read(page.as_bytes(), &ReadOptions::default()).unwrap().body else {
            panic!("a page is expected")
        };
        let text = unescapes(&markdown).applied(0, &markdown).into_owned();
        assert!(text.contains("a_b * [x] 1. \\ `"), "{text}");
        assert!(text.contains("```\np_q *r* <x>\n```"), "{text}");
        assert!(text.contains("```\ns_t\n```"), "{text}");
        assert!(text.contains("use `u_v\\_` and w_w"), "{text}");
    }

    #[test]
    fn a_page_nested_without_end_is_refused() {
        let bomb = "<div>".repeat(1_000_000);
        let refused = read(bomb.as_bytes(), &ReadOptions::default()).unwrap_err();
        assert!(refused.0.contains("nested 1000000 deep"), "{refused}");
    }

    #[test]
    fn a_page_that_multiplies_when_it_is_repaired_is_refused() {
        // Every paragraph takes over all the fonts that were left open in the one before: a small
        // file, millions of nodes.
        let fonts: String = (0..1_000).map(|n| format!("<font size={n}>")).collect();
        let bomb = format!("<p>{fonts}{}", "<p>x".repeat(100_000));
        let refused = read(bomb.as_bytes(), &ReadOptions::default()).unwrap_err();
        assert!(refused.0.contains("beyond what is safe"), "{refused}");
    }

    #[test]
    fn an_old_page_without_closing_tags_is_read() {
        let old = format!("<html><body>{}", "<p>text<br>more<li>item".repeat(20_000));
        assert!(read(old.as_bytes(), &ReadOptions::default()).is_ok());
    }
}
