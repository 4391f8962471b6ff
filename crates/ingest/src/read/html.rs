//! HTML, converted to Markdown.

use std::ops::Range;
use std::rc::Rc;

use htmd::element_handler::{HandlerResult, Handlers};
use htmd::{Element, HtmlToMarkdown, Node};
use html5ever::ParseOpts;
use html5ever::tendril::TendrilSink;
use markup5ever_rcdom::{NodeData, RcDom};
use pulldown_cmark::{Event, Tag};

use super::decode::decode_page;
use super::{DocumentText, TextBody, Unreadable};
use crate::edits::Edits;
use crate::outline::events;

/// The deepest nesting that is converted, which is the limit of browsers. The converter works
/// recursively.
const MAX_DEPTH: usize = 512;
const PIECE_BYTES: usize = 4096;
/// Stack of the converter, enough for the deepest page in a debug build.
const STACK: usize = 64 << 20;
/// Markdown repeats the marks of nested quotes and lists on every line. A page that grows by more than
/// this is made to exhaust memory.
const MAX_GROWTH: usize = 16;
const MIN_GROWN_BYTES: usize = 1 << 20;

const SKIPPED: [&str; 10] = [
    "script", "style", "noscript", "template", "svg", "iframe", "nav", "footer", "head", "form",
];

/// Parses a page in this process. Time and memory are for the caller to limit.
pub(super) fn parse(bytes: &[u8]) -> Result<DocumentText, Unreadable> {
    let html = &decode_page(bytes)?;
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, || convert(html));
        let thread = thread.map_err(|error| Unreadable::new(format!("no thread to read it in: {error}")))?;
        thread.join().unwrap_or_else(|_| {
            Err(Unreadable::new(
                "this HTML cannot be read: the parser gave up on it",
            ))
        })
    })
}

fn convert(html: &str) -> Result<DocumentText, Unreadable> {
    let converter = HtmlToMarkdown::builder()
        .skip_tags(SKIPPED.to_vec())
        .add_handler(vec!["pre"], code_block)
        .add_handler(vec!["img"], image)
        .build();
    let tree = parse_tree(html)?;
    let markdown = converter.tree_to_markdown(&tree);
    if markdown.len() > MIN_GROWN_BYTES.max(html.len() * MAX_GROWTH) {
        return Err(Unreadable::new(
            "its elements are nested and repeated beyond what is safe to read",
        ));
    }
    Ok(DocumentText {
        title: title(&tree),
        body: TextBody::Page(markdown),
    })
}

/// Builds the tree piece by piece. The parser searches all open elements for every tag, so that a page
/// which is nested too deeply is refused early.
fn parse_tree(html: &str) -> Result<Rc<Node>, Unreadable> {
    let too_deep = || {
        Unreadable::new(format!(
            "its elements are nested more than {MAX_DEPTH} deep; simplify the page"
        ))
    };
    let mut parser = html5ever::parse_document(RcDom::default(), ParseOpts::default());
    let mut rest = html;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(rest.floor_char_boundary(PIECE_BYTES));
        parser.process(piece.into());
        if is_deep_at_end(&parser.tokenizer.sink.sink.document) {
            return Err(too_deep());
        }
        rest = after;
    }
    let tree = parser.finish().document;
    if is_deep(&tree) { Err(too_deep()) } else { Ok(tree) }
}

/// Whether the last element is nested too deeply.
fn is_deep_at_end(tree: &Rc<Node>) -> bool {
    let last = |node: &Rc<Node>| node.children.borrow().last().cloned();
    std::iter::successors(Some(Rc::clone(tree)), last)
        .nth(MAX_DEPTH + 1)
        .is_some()
}

fn is_deep(tree: &Rc<Node>) -> bool {
    let mut open = vec![(Rc::clone(tree), 0)];
    while let Some((node, depth)) = open.pop() {
        if depth > MAX_DEPTH {
            return true;
        }
        let children = node.children.borrow();
        open.extend(children.iter().map(|child| (Rc::clone(child), depth + 1)));
    }
    false
}

/// Nodes of a tree in document order.
fn nodes(tree: &Rc<Node>) -> impl Iterator<Item = Rc<Node>> {
    let mut open = vec![Rc::clone(tree)];
    std::iter::from_fn(move || {
        let node = open.pop()?;
        open.extend(node.children.borrow().iter().rev().map(Rc::clone));
        Some(node)
    })
}

fn tag(node: &Node) -> Option<&str> {
    match &node.data {
        NodeData::Element { name, .. } => Some(&name.local),
        _ => None,
    }
}

/// The text of a tree without any markup.
fn plain_text(tree: &Rc<Node>) -> String {
    let mut text = String::new();
    for node in nodes(tree) {
        match &node.data {
            NodeData::Text { contents } => text.push_str(&contents.borrow()),
            NodeData::Element { .. } if tag(&node) == Some("br") => text.push('\n'),
            _ => {}
        }
    }
    text
}

fn title(tree: &Rc<Node>) -> Option<String> {
    let title = nodes(tree).find(|node| tag(node) == Some("title"))?;
    let title = plain_text(&title);
    let title = title.split_whitespace().collect::<Vec<_>>().join(" ");
    (!title.is_empty()).then_some(title)
}

/// A fenced code block of all text within `<pre>`, whatever elements mark it up.
fn code_block(_: &dyn Handlers, element: Element<'_>) -> Option<HandlerResult> {
    let text = plain_text(element.node);
    let code = text.trim_matches('\n').trim_end();
    if code.is_empty() {
        return None;
    }
    let runs = code.split(|c| c != '`').map(str::len);
    let fence = "`".repeat(runs.max().unwrap_or_default().max(2) + 1);
    let language = nodes(element.node)
        .find_map(|node| language(&node))
        .unwrap_or_default();
    Some(format!("\n\n{fence}{language}\n{code}\n{fence}\n\n").into())
}

/// The language in a class such as `language-rust`.
fn language(node: &Node) -> Option<String> {
    let NodeData::Element { attrs, .. } = &node.data else {
        return None;
    };
    let attrs = attrs.borrow();
    let class = attrs.iter().find(|attribute| &*attribute.name.local == "class")?;
    let names = class.value.split_whitespace();
    let mut languages = names.filter_map(|name| name.strip_prefix("language-"));
    languages.next().map(|language| language.replace('`', ""))
}

/// Keeps the description of an image that is part of the page itself, and drops its bytes.
fn image(handlers: &dyn Handlers, element: Element<'_>) -> Option<HandlerResult> {
    let attribute = |name: &str| {
        let found = element
            .attrs
            .iter()
            .find(|attribute| &*attribute.name.local == name);
        found.map(|attribute| attribute.value.trim())
    };
    let is_inline = attribute("src").is_some_and(|source| {
        source
            .get(..5)
            .is_some_and(|scheme| scheme.eq_ignore_ascii_case("data:"))
    });
    if is_inline {
        return Some(attribute("alt").unwrap_or_default().into());
    }
    handlers.fallback(element)
}

/// Edits that undo the converter's escapes: backslashes outside of code, and pipes in table cells.
pub(crate) fn unescapes(markdown: &str) -> Edits {
    const PIPE: &str = "&#124;";
    let mut found = Vec::new();
    let mut code: Vec<Range<usize>> = Vec::new();
    for (event, range) in events(markdown) {
        match event {
            Event::Start(Tag::CodeBlock(_)) | Event::Code(_) => code.push(range),
            Event::Start(Tag::Table(_)) => {
                let pipes = markdown[range.clone()].match_indices(PIPE);
                found.extend(pipes.map(|(at, pipe)| {
                    let at = range.start + at;
                    (at..at + pipe.len(), "|")
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
            // The escaped character may be a backslash itself.
            at += 1;
        }
    }
    Edits::new(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(html: &str) -> String {
        match parse(html.as_bytes()).unwrap().body {
            TextBody::Page(markdown) => unescapes(&markdown).applied(0, &markdown).into_owned(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_body_becomes_markdown_and_the_title_is_kept() {
        let html = "<html><head><title>A &amp; B</title><style>p{}</style></head><body><nav>menu</nav>\
                    <h1>Top</h1><p>one<p>two<ul><li>x<li>y</ul><script>bad()</script></body></html>";
        assert_eq!(parse(html.as_bytes()).unwrap().title.as_deref(), Some("A & B"));
        let markdown = page(html);
        assert!(markdown.starts_with("# Top\n\none\n\ntwo"), "{markdown}");
        assert!(
            !markdown.contains("bad") && !markdown.contains("menu"),
            "{markdown}"
        );
    }

    #[test]
    fn preformatted_text_is_code_and_marks_are_as_on_the_page() {
        let text = page(
            "<p>a_b * [x] 1. \\ `</p><PRE class=x>p_q *r* &lt;x&gt;</PRE><pre><code>s_t</code></pre>\
             <p>use <code>u_v\\_</code> and w_w</p><preface>",
        );
        assert!(text.contains("a_b * [x] 1. \\ `"), "{text}");
        assert!(text.contains("```\np_q *r* <x>\n```"), "{text}");
        assert!(text.contains("```\ns_t\n```"), "{text}");
        assert!(text.contains("use `u_v\\_` and w_w"), "{text}");
    }

    #[test]
    fn markup_within_preformatted_text_leaves_one_closed_fence() {
        for (html, code) in [
            (
                "<pre class=screen><code class=prompt># </code><strong><code>apt update</code></strong>\nHit:1</pre>",
                "```\n# apt update\nHit:1\n```",
            ),
            ("<pre><span>a</span><br>b <em>c</em></pre>", "```\na\nb c\n```"),
            (
                "<pre><code class='hl language-rust'>fn <b>main</b>() {}</code></pre>",
                "```rust\nfn main() {}\n```",
            ),
            ("<pre>a ``` b</pre>", "````\na ``` b\n````"),
        ] {
            let text = page(&format!("<h2>One</h2>{html}<h2>Two</h2><p>text"));
            assert_eq!(text, format!("## One\n\n{code}\n\n## Two\n\ntext"));
        }
    }

    #[test]
    fn self_closing_elements_of_drawings_do_not_nest() {
        let paths = "<path d='M0 0'/><g/><circle r=1 />".repeat(10_000);
        assert_eq!(
            page(&format!("<p>before</p><svg>{paths}</svg><p>after")),
            "before\n\nafter"
        );
    }

    #[test]
    fn images_within_the_page_keep_their_description_only() {
        let pixels = "A".repeat(40_000);
        let text = page(&format!(
            "<p>x <img alt='a dome' src='DATA:image/png;base64,{pixels}'> <img alt=far src=dome.png> y"
        ));
        assert_eq!(text, "x a dome ![far](dome.png) y");
    }

    #[test]
    fn a_page_nested_without_end_is_refused() {
        for html in [
            "<div>".repeat(100_000),
            // Closing tags that match nothing close nothing.
            format!("<pre>{}", "<object></q>".repeat(100_000)),
            format!("{}text", "<div>".repeat(MAX_DEPTH - 2)),
            format!("{}{}", "<div>".repeat(600), "</div>".repeat(600)),
        ] {
            let refused = parse(html.as_bytes()).unwrap_err();
            assert!(refused.0.contains("nested more than 512 deep"), "{refused}");
        }
    }

    #[test]
    fn the_deepest_page_is_converted() {
        let deep = MAX_DEPTH - 3;
        let text = page(&format!("{}text", "<div>".repeat(deep)));
        assert_eq!(text, "text");
    }

    #[test]
    fn a_page_that_multiplies_when_it_is_converted_is_refused() {
        let html = format!("{}{}", "<blockquote>".repeat(500), "<p>x".repeat(20_000));
        let refused = parse(html.as_bytes()).unwrap_err();
        assert!(refused.0.contains("beyond what is safe"), "{refused}");
    }

    #[test]
    fn an_old_page_without_closing_tags_is_read() {
        let text = page(&format!(
            "<html><body>{}",
            "<p>text<br>more<li>item".repeat(20_000)
        ));
        assert_eq!(text.matches("text").count(), 20_000);
        assert_eq!(text.matches("more").count(), 20_000);
        assert_eq!(text.matches("item").count(), 20_000);
    }
}
