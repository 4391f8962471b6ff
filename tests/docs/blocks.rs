//! Code blocks and links of a Markdown document.

use pulldown_cmark::{CodeBlockKind, Event, Parser, Tag, TagEnd};

#[derive(Debug)]
pub struct Block {
    pub line: usize,
    pub language: String,
    /// The second word of the info string.
    pub option: Option<String>,
    pub text: String,
    /// The reason, where the document says that the block cannot run.
    pub not_run: Option<String>,
}

pub fn of(markdown: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut not_run = None;
    let mut inside = false;
    for (event, range) in Parser::new(markdown).into_offset_iter() {
        match event {
            Event::Html(html) => {
                let comment = html.trim().strip_prefix("<!-- not run:");
                not_run = comment.map(|reason| reason.trim_end_matches("-->").trim().to_owned());
                assert_ne!(
                    not_run.as_deref(),
                    Some(""),
                    "a block that does not run needs a reason"
                );
            }
            Event::Start(Tag::CodeBlock(kind)) => {
                let info = match kind {
                    CodeBlockKind::Fenced(info) => info.to_string(),
                    CodeBlockKind::Indented => String::new(),
                };
                let mut words = info.split_whitespace().map(str::to_owned);
                inside = true;
                blocks.push(Block {
                    line: markdown[..range.start].lines().count() + 1,
                    language: words.next().unwrap_or_default(),
                    option: words.next(),
                    text: String::new(),
                    not_run: not_run.take(),
                });
            }
            Event::Text(text) if inside => blocks.last_mut().expect("a block").text.push_str(&text),
            Event::End(TagEnd::CodeBlock) => inside = false,
            _ => {}
        }
    }
    blocks
}

/// Links to files, without those to other sites and within the page.
pub fn links(markdown: &str) -> Vec<String> {
    Parser::new(markdown)
        .filter_map(|event| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                Some(dest_url.to_string())
            }
            _ => None,
        })
        .filter(|url| !url.contains("://") && !url.starts_with('#') && !url.starts_with("mailto:"))
        .collect()
}
