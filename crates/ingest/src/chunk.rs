//! Splitting a text into chunks that know their section.
//!
//! A chunk never crosses a section. Its id is made of the source, the section and its position in
//! the section: text under the same heading keeps its id when other parts of the document change, and
//! changed text replaces the text that was there.

use std::collections::HashMap;
use std::ops::Range;

use ragstone_core::document::{Document, DocumentId, Metadata};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::edits::Edits;
use super::outline::{DocType, MarkdownSection, Outline, comments, outline};
use super::pieces::{Passage, TextPiece, windows};
use super::read::{DocumentText, TextBody, html};
use super::size::TokenSizer;

/// Metadata keys. Filters and sibling gathering rely on the names.
pub mod keys {
    pub const SOURCE: &str = "source";
    pub const TITLE: &str = "title";
    pub const SECTION_ID: &str = "section_id";
    pub const SECTION_PATH: &str = "section_path";
    pub const CHAPTER_ID: &str = "chapter_id";
    pub const DOC_TYPE: &str = "doc_type";
    pub const POSITION: &str = "position";
    pub const CONTENT_HASH: &str = "content_hash";
    /// Id of a row in its file. Document ids begin with the source, because two files may use the same
    /// row ids.
    pub const ROW_ID: &str = "row_id";

    pub const ALL: [&str; 9] = [
        SOURCE,
        TITLE,
        SECTION_ID,
        SECTION_PATH,
        CHAPTER_ID,
        DOC_TYPE,
        POSITION,
        CONTENT_HASH,
        ROW_ID,
    ];
}

const MAX_ID_BYTES: usize = 512;
const MAX_SLUG_CHARS: usize = 60;
/// Titles and headings are repeated in every chunk below them.
const MAX_TITLE_BYTES: usize = 512;

/// One piece of a document, ready to be embedded and stored.
#[derive(Debug, Clone, PartialEq)]
pub struct Chunk {
    pub document: Document,
    pub content_hash: String,
    /// Approximate number of the model's tokens.
    pub tokens: usize,
}

/// Properties of a document that its chunks share.
#[derive(Debug, Clone, Default)]
pub struct DocumentInfo {
    pub source: String,
    /// The title of a text that has none itself.
    pub fallback_title: String,
    /// Given beside the text. Fields of front matter take precedence.
    pub metadata: Metadata,
}

impl DocumentInfo {
    /// The title of a text without one: given in the metadata, or made of the file name.
    fn title(&self) -> &str {
        let given = self.metadata.get(keys::TITLE).and_then(Value::as_str);
        let given = given.filter(|title| !title.trim().is_empty());
        given.unwrap_or(&self.fallback_title)
    }
}

pub struct Splitter {
    pub(super) sizer: TokenSizer,
    pub(super) chunk_tokens: usize,
    is_cancelled: Box<dyn Fn() -> bool + Send>,
}

/// A part of a text with the metadata that its chunks share.
struct SectionPart<'a> {
    text: &'a str,
    section_id: String,
    section_path: Vec<String>,
    chapter_id: String,
    blocks: Blocks<'a>,
}

enum Blocks<'a> {
    /// Of one kind throughout.
    All(DocType),
    /// Relative to the text they stand in, whose part begins at `offset`.
    Markdown {
        blocks: &'a [(DocType, Range<usize>)],
        offset: usize,
        edits: &'a Edits,
    },
}

impl Splitter {
    pub fn new(sizer: TokenSizer, chunk_tokens: usize) -> Self {
        Self {
            sizer,
            chunk_tokens,
            is_cancelled: Box::new(|| false),
        }
    }

    /// Stops splitting, without a complete result, once the chunks are not wanted any more.
    #[must_use]
    pub fn cancelled_by(self, is_cancelled: impl Fn() -> bool + Send + 'static) -> Self {
        Self {
            is_cancelled: Box::new(is_cancelled),
            ..self
        }
    }

    /// Windows of a long text, until splitting is cancelled.
    pub(super) fn windows<'t>(&self, text: &'t str) -> impl Iterator<Item = (usize, &'t str)> {
        windows(text, self.window())
            .into_iter()
            .take_while(|_| !(self.is_cancelled)())
    }

    pub fn split(&self, info: &DocumentInfo, text: &DocumentText) -> Vec<Chunk> {
        match &text.body {
            TextBody::Markdown(markdown) => self.split_markdown(info, text, markdown, &comments(markdown)),
            TextBody::Page(markdown) => self.split_markdown(info, text, markdown, &html::unescapes(markdown)),
            TextBody::Plain(plain) => self.split_whole(info, text, plain, DocType::Paragraph),
            TextBody::Code(code) => self.split_whole(info, text, code, DocType::Code),
            TextBody::Pages(pages) => self.split_pages(info, text, pages),
        }
    }

    pub fn tokens(&self, text: &str) -> usize {
        text_splitter::ChunkSizer::size(&self.sizer, text)
    }

    fn split_whole(&self, info: &DocumentInfo, text: &DocumentText, body: &str, kind: DocType) -> Vec<Chunk> {
        let title = text.title.as_deref().unwrap_or(info.title());
        let part = SectionPart {
            text: body,
            section_id: anchor(&info.source),
            section_path: Vec::new(),
            chapter_id: anchor(&info.source),
            blocks: Blocks::All(kind),
        };
        let mut chunks = Vec::new();
        self.add_part(&mut chunks, info, title, &part);
        chunks
    }

    fn split_pages(&self, info: &DocumentInfo, text: &DocumentText, pages: &[String]) -> Vec<Chunk> {
        let title = text.title.as_deref().unwrap_or(info.title());
        let mut chunks = Vec::new();
        for (index, page) in pages.iter().enumerate() {
            let number = index + 1;
            let part = SectionPart {
                text: page,
                section_id: format!("{}#page-{number}", anchor(&info.source)),
                section_path: vec![format!("Page {number}")],
                chapter_id: anchor(&info.source),
                blocks: Blocks::All(DocType::Paragraph),
            };
            self.add_part(&mut chunks, info, title, &part);
        }
        chunks
    }

    fn split_markdown(
        &self,
        info: &DocumentInfo,
        text: &DocumentText,
        markdown: &str,
        edits: &Edits,
    ) -> Vec<Chunk> {
        let outline = outline(markdown);
        let given = info.metadata.get(keys::TITLE).is_some().then(|| info.title());
        let title = text
            .title
            .as_deref()
            .or(outline.title.as_deref())
            .or(given)
            .or_else(|| first_heading(&outline))
            .unwrap_or(info.title());
        let mut with_front_matter = info.clone();
        with_front_matter.metadata.extend(outline.metadata.clone());
        let info = &with_front_matter;
        let titled = has_title_heading(&outline.sections);
        let mut tree = SectionTree::new(&info.source, titled);
        let mut chunks = Vec::new();
        for section in &outline.sections {
            let ids = tree.enter(section);
            let part = SectionPart {
                text: &markdown[section.range.clone()],
                section_id: ids.section_id,
                section_path: ids.path,
                chapter_id: ids.chapter_id,
                blocks: Blocks::Markdown {
                    blocks: &section.blocks,
                    offset: section.range.start,
                    edits,
                },
            };
            self.add_part(&mut chunks, info, title, &part);
        }
        chunks
    }

    fn add_part(&self, chunks: &mut Vec<Chunk>, info: &DocumentInfo, title: &str, part: &SectionPart<'_>) {
        let pieces: Vec<TextPiece> = match part.blocks {
            Blocks::Markdown {
                blocks,
                offset,
                edits,
            } => self.markdown_pieces(&Passage {
                text: part.text,
                offset,
                blocks,
                edits,
            }),
            Blocks::All(DocType::Code) => self.code_pieces(part.text),
            Blocks::All(_) => self.text_pieces(part.text),
        };
        let title = as_title(title);
        for (in_section, piece) in pieces.into_iter().enumerate() {
            let content_hash = content_hash(&piece.text);
            let doc_type = part.blocks.kind_of(&piece.range);
            let tokens = self.tokens(&piece.text);
            let mut metadata = info.metadata.clone();
            metadata.extend([
                (keys::SOURCE.to_owned(), Value::from(info.source.as_str())),
                (keys::TITLE.to_owned(), Value::from(title)),
                (keys::SECTION_ID.to_owned(), Value::from(part.section_id.as_str())),
                (
                    keys::SECTION_PATH.to_owned(),
                    Value::from(part.section_path.clone()),
                ),
                (keys::CHAPTER_ID.to_owned(), Value::from(part.chapter_id.as_str())),
                (keys::DOC_TYPE.to_owned(), Value::from(doc_type.name())),
                (keys::POSITION.to_owned(), Value::from(chunks.len())),
                (keys::CONTENT_HASH.to_owned(), Value::from(content_hash.as_str())),
            ]);
            let document = Document {
                id: chunk_id(&part.section_id, in_section),
                text: piece.text,
                metadata,
            };
            chunks.push(Chunk {
                document,
                content_hash,
                tokens,
            });
        }
    }
}

impl Blocks<'_> {
    /// The type of most of a piece. A heading counts only where it is alone.
    fn kind_of(&self, piece: &Range<usize>) -> DocType {
        let (blocks, offset) = match self {
            Self::All(kind) => return *kind,
            Self::Markdown { blocks, offset, .. } => (blocks, offset),
        };
        let (start, end) = (offset + piece.start, offset + piece.end);
        let mut bytes: HashMap<DocType, usize> = HashMap::new();
        // Blocks are in order. A search keeps sections of very many blocks from taking quadratic time.
        let first = blocks.partition_point(|(_, range)| range.end <= start);
        for (kind, range) in blocks[first..].iter().take_while(|(_, range)| range.start < end) {
            let shared = range.end.min(end).saturating_sub(range.start.max(start));
            if shared > 0 && *kind != DocType::Heading {
                *bytes.entry(*kind).or_default() += shared;
            }
        }
        bytes
            .into_iter()
            .max_by_key(|(kind, shared)| (*shared, std::cmp::Reverse(*kind)))
            .map_or(DocType::Heading, |(kind, _)| kind)
    }
}

fn first_heading(outline: &Outline) -> Option<&str> {
    let mut headings = outline.sections.iter().filter(|section| section.level > 0);
    headings
        .find(|section| !section.heading.is_empty())
        .map(|section| section.heading.as_str())
}

/// One heading of the first level, before all others, is the title of the document.
fn has_title_heading(sections: &[MarkdownSection]) -> bool {
    let mut headings = sections.iter().filter(|s| s.level > 0);
    headings.next().is_some_and(|first| first.level == 1) && !headings.any(|s| s.level == 1)
}

struct SectionIds {
    section_id: String,
    path: Vec<String>,
    chapter_id: String,
}

/// The open headings of a document while its sections are visited in order.
struct SectionTree {
    /// See [`anchor`].
    anchor: String,
    /// The outermost heading is the document's title, so that chapters begin below it.
    titled: bool,
    /// The headings that are open: level, text, section id.
    open: Vec<(usize, String, String)>,
    /// Ids of sections, with the last number that was given out after each.
    taken: HashMap<String, usize>,
}

impl SectionTree {
    fn new(source: &str, titled: bool) -> Self {
        Self {
            anchor: anchor(source),
            titled,
            open: Vec::new(),
            taken: HashMap::new(),
        }
    }

    /// The wanted id, or the first of `wanted-2`, `wanted-3`… that is free: a heading may itself read
    /// like one of these.
    fn free(&mut self, wanted: String) -> String {
        let mut id = wanted.clone();
        while self.taken.contains_key(&id) {
            let count = self.taken.entry(wanted.clone()).or_default();
            *count += 1;
            id = format!("{wanted}-{count}");
        }
        self.taken.insert(id.clone(), 1);
        id
    }

    fn enter(&mut self, section: &MarkdownSection) -> SectionIds {
        if section.level == 0 {
            let id = self.anchor.clone();
            return SectionIds {
                section_id: id.clone(),
                path: Vec::new(),
                chapter_id: id,
            };
        }
        while self
            .open
            .last()
            .is_some_and(|(level, _, _)| *level >= section.level)
        {
            self.open.pop();
        }
        let slug = slug(&section.heading);
        let parent = self
            .open
            .iter()
            .skip(usize::from(self.titled))
            .map(|(_, _, id)| id.as_str())
            .next_back();
        let wanted = match parent {
            Some(parent) => format!("{parent}/{slug}"),
            None => format!("{}#{slug}", self.anchor),
        };
        let id = self.free(wanted);
        self.open
            .push((section.level, as_title(&section.heading).to_owned(), id.clone()));
        let chapter = self.open.get(usize::from(self.titled)).or(self.open.first());
        SectionIds {
            chapter_id: chapter.map_or_else(|| id.clone(), |(_, _, id)| id.clone()),
            path: self.open.iter().map(|(_, heading, _)| heading.clone()).collect(),
            section_id: id,
        }
    }
}

/// The beginning of the ids of a source's sections and chunks. `#` is escaped, so that a file `a.md#b`
/// is never taken for section `b` of `a.md`.
pub(super) fn anchor(source: &str) -> String {
    if source.contains('#') || source.contains("%2") {
        source.replace('%', "%25").replace('#', "%23")
    } else {
        source.to_owned()
    }
}

/// Truncates a title or heading for the metadata of chunks.
pub(super) fn as_title(text: &str) -> &str {
    beginning(text, MAX_TITLE_BYTES)
}

fn beginning(text: &str, most: usize) -> &str {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

/// Lower-case letters and digits of any script, joined by dashes.
fn slug(heading: &str) -> String {
    let mut slug = String::new();
    for c in heading.chars().flat_map(char::to_lowercase) {
        if c.is_alphanumeric() {
            slug.push(c);
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
    }
    let cut: String = slug.trim_end_matches('-').chars().take(MAX_SLUG_CHARS).collect();
    if cut.is_empty() { "section".to_owned() } else { cut }
}

/// SHA-256 of the text.
pub fn content_hash(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes
        .iter()
        .fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}

/// A readable id, truncated and made unique by a hash where it is too long.
pub fn chunk_id(section_id: &str, index: usize) -> DocumentId {
    let id = format!("{section_id}:{index}");
    document_id(&id)
}

/// Any text as a document id.
pub fn document_id(text: &str) -> DocumentId {
    DocumentId::parse(text).unwrap_or_else(|_| {
        let hash = &content_hash(text)[..32];
        let room = MAX_ID_BYTES - hash.len() - 1;
        let cut = format!("{}~{hash}", beginning(text, room));
        DocumentId::parse(cut).unwrap_or_else(|_| DocumentId::generate())
    })
}
