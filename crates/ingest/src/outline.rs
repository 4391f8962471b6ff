//! The sections and blocks of a Markdown text.

use std::ops::Range;

use pulldown_cmark::{Event, HeadingLevel, OffsetIter, Options, Parser, Tag, TagEnd};
use ragstone_core::document::Metadata;

use super::edits::Edits;
use super::front_matter::front_matter;

/// The type of a piece of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DocType {
    Heading,
    Paragraph,
    Code,
    List,
    Table,
}

impl DocType {
    pub fn name(self) -> &'static str {
        match self {
            Self::Heading => "heading",
            Self::Paragraph => "paragraph",
            Self::Code => "code",
            Self::List => "list",
            Self::Table => "table",
        }
    }
}

/// A heading and the text under it, up to the next heading of any level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MarkdownSection {
    /// 1 to 6; 0 for text before the first heading.
    pub level: usize,
    pub heading: String,
    pub range: Range<usize>,
    /// Its top-level blocks, beginning with the heading.
    pub blocks: Vec<(DocType, Range<usize>)>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Outline {
    /// Title in the front matter.
    pub title: Option<String>,
    /// Other fields of the front matter.
    pub metadata: Metadata,
    /// Sections with any block, in order; their ranges do not overlap.
    pub sections: Vec<MarkdownSection>,
}

/// Markdown events with their ranges in the text.
pub(super) fn events(markdown: &str) -> OffsetIter<'_> {
    let options = Options::ENABLE_TABLES
        | Options::ENABLE_TASKLISTS
        | Options::ENABLE_FOOTNOTES
        | Options::ENABLE_STRIKETHROUGH;
    Parser::new_ext(markdown, options).into_offset_iter()
}

pub fn outline(markdown: &str) -> Outline {
    let front = front_matter(markdown);
    let mut outline = Outline {
        title: front.title,
        metadata: front.metadata,
        sections: Vec::new(),
    };
    let mut depth = 0usize;
    // The heading that is being read, as text.
    let mut text: Option<String> = None;
    for (event, range) in events(&markdown[front.end..]) {
        let range = range.start + front.end..range.end + front.end;
        match event {
            Event::Start(tag) => {
                if depth == 0 {
                    open(&mut outline, &tag, &range);
                    text = matches!(tag, Tag::Heading { .. }).then(String::new);
                }
                depth += 1;
            }
            Event::End(end) => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    close(&mut outline, &end, text.take());
                }
            }
            Event::Text(piece) | Event::Code(piece) | Event::InlineMath(piece) => {
                if let Some(text) = &mut text {
                    text.push_str(&piece);
                }
            }
            Event::SoftBreak | Event::HardBreak => {
                if let Some(text) = &mut text {
                    text.push(' ');
                }
            }
            _ => {}
        }
    }
    end_sections(&mut outline.sections, markdown.len());
    outline
}

/// Edits that remove comments.
pub(super) fn comments(markdown: &str) -> Edits {
    const OPEN: &str = "<!--";
    if !markdown.contains(OPEN) {
        return Edits::default();
    }
    let mut found = Vec::new();
    for (event, range) in events(markdown) {
        let is_html = matches!(event, Event::Start(Tag::HtmlBlock) | Event::InlineHtml(_));
        if !is_html {
            continue;
        }
        let mut at = range.start;
        while let Some(start) = markdown[at..range.end].find(OPEN).map(|start| at + start) {
            let inside = start + OPEN.len();
            // An unclosed comment must not swallow the rest of the text.
            let Some(end) = markdown[inside..range.end].find("-->") else {
                break;
            };
            at = inside + end + "-->".len();
            found.push((start..at, ""));
        }
    }
    Edits::new(found)
}

fn open(outline: &mut Outline, tag: &Tag<'_>, range: &Range<usize>) {
    let kind = match tag {
        Tag::Heading { level, .. } => {
            outline.sections.push(MarkdownSection {
                level: level_number(*level),
                heading: String::new(),
                range: range.clone(),
                blocks: Vec::new(),
            });
            DocType::Heading
        }
        Tag::CodeBlock(_) => DocType::Code,
        Tag::List(_) => DocType::List,
        Tag::Table(_) => DocType::Table,
        _ => DocType::Paragraph,
    };
    if outline.sections.is_empty() {
        outline.sections.push(MarkdownSection {
            level: 0,
            heading: String::new(),
            range: range.clone(),
            blocks: Vec::new(),
        });
    }
    if let Some(section) = outline.sections.last_mut() {
        section.blocks.push((kind, range.clone()));
    }
}

fn close(outline: &mut Outline, end: &TagEnd, text: Option<String>) {
    if let (TagEnd::Heading(_), Some(text), Some(section)) = (end, text, outline.sections.last_mut()) {
        section.heading = text.split_whitespace().collect::<Vec<_>>().join(" ");
    }
}

/// Extends every section to the beginning of the next, so that no text between blocks is lost.
fn end_sections(sections: &mut [MarkdownSection], end: usize) {
    let starts: Vec<usize> = sections
        .iter()
        .skip(1)
        .map(|s| s.range.start)
        .chain([end])
        .collect();
    for (section, end) in sections.iter_mut().zip(starts) {
        section.range.end = end;
    }
}

fn level_number(level: HeadingLevel) -> usize {
    match level {
        HeadingLevel::H1 => 1,
        HeadingLevel::H2 => 2,
        HeadingLevel::H3 => 3,
        HeadingLevel::H4 => 4,
        HeadingLevel::H5 => 5,
        HeadingLevel::H6 => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fall_under_their_headings() {
        let markdown = "---\ntitle: 'A guide'\n---\nbefore\n\n# Top `x`\n\ntext\n\n- a\n- b\n\n## Sub\n\n```\n# no heading\n```\n\n\
                        > # quoted, no heading\n\n|a|b|\n|-|-|\n|1|2|\n";
        let outline = outline(markdown);
        assert_eq!(outline.title.as_deref(), Some("A guide"));
        let shape: Vec<(usize, &str, Vec<DocType>)> = outline
            .sections
            .iter()
            .map(|s| {
                (
                    s.level,
                    s.heading.as_str(),
                    s.blocks.iter().map(|b| b.0).collect(),
                )
            })
            .collect();
        use DocType::{Code, Heading, List, Paragraph, Table};
        assert_eq!(
            shape,
            [
                (0, "", vec![Paragraph]),
                (1, "Top x", vec![Heading, Paragraph, List]),
                (2, "Sub", vec![Heading, Code, Paragraph, Table]),
            ]
        );
        assert!(
            outline
                .sections
                .windows(2)
                .all(|w| w[0].range.end == w[1].range.start)
        );
    }

    #[test]
    fn comments_are_found_where_they_are_html() {
        let markdown =
            "a <!-- b --> c\n\n<!-- d\n\ne -->\n\n`<!-- f -->`\n\n    <!-- g -->\n\n<p>\n<!-- h\n-->\n</p>\n";
        let text = comments(markdown).applied(0, markdown).into_owned();
        assert_eq!(
            text,
            "a  c\n\n\n\n`<!-- f -->`\n\n    <!-- g -->\n\n<p>\n\n</p>\n"
        );
    }
}
