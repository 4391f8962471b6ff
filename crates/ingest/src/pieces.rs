//! Cutting a text into pieces of at most the chunk size.

use std::ops::Range;

use text_splitter::{ChunkConfig, MarkdownSplitter, TextSplitter};

use super::chunk::Splitter;
use super::edits::Edits;
use super::outline::DocType;

/// A section of a Markdown text.
pub(super) struct Passage<'a> {
    pub(super) text: &'a str,
    /// Offset in the whole text, which `blocks` and `edits` refer to.
    pub(super) offset: usize,
    pub(super) blocks: &'a [(DocType, Range<usize>)],
    pub(super) edits: &'a Edits,
}

pub(super) struct TextPiece {
    /// Range in its passage.
    pub(super) range: Range<usize>,
    pub(super) text: String,
}

impl TextPiece {
    fn of(text: &str, range: Range<usize>) -> Self {
        Self {
            text: text[range.clone()].to_owned(),
            range,
        }
    }
}

/// A piece before its edits.
enum Cut {
    Slice(Range<usize>),
    /// A piece of a code block or table, with the fences or the header repeated.
    Framed(Range<usize>, String),
}

impl Splitter {
    /// The pieces of a text without structure, at most as large as a chunk may be.
    pub fn pieces<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let ranges = self.text_ranges(text, self.chunk_tokens);
        ranges.into_iter().map(|range| &text[range]).collect()
    }

    pub(super) fn text_pieces(&self, text: &str) -> Vec<TextPiece> {
        let ranges = self.text_ranges(text, self.chunk_tokens);
        ranges
            .into_iter()
            .map(|range| TextPiece::of(text, range))
            .collect()
    }

    /// The pieces of source code, whose first lines keep their indentation.
    pub(super) fn code_pieces(&self, code: &str) -> Vec<TextPiece> {
        let ranges = self.code_ranges(code, self.chunk_tokens);
        ranges
            .into_iter()
            .map(|range| TextPiece::of(code, range))
            .collect()
    }

    fn text_ranges(&self, text: &str, room: usize) -> Vec<Range<usize>> {
        // A text has no more tokens than bytes.
        if text.len() <= room {
            return Some(trimmed(text, 0..text.len()))
                .filter(|range| !range.is_empty())
                .into_iter()
                .collect();
        }
        let splitter = TextSplitter::new(ChunkConfig::new(room).with_sizer(&self.sizer));
        let mut ranges = Vec::new();
        for (start, window) in self.windows(text) {
            let found = splitter.chunk_indices(window);
            ranges.extend(found.map(|(at, piece)| start + at..start + at + piece.len()));
        }
        ranges
    }

    fn code_ranges(&self, code: &str, room: usize) -> Vec<Range<usize>> {
        let mut ranges = self.text_ranges(code, room);
        for range in &mut ranges {
            let before = &code[..range.start];
            let line = before.trim_end_matches([' ', '\t']).len();
            let begins_line = line == 0 || code[..line].ends_with('\n');
            if begins_line && self.tokens(&code[line..range.end]) <= room {
                range.start = line;
            }
        }
        ranges
    }

    /// The pieces of a Markdown section. The heading stays with the text that follows it. Pieces of a long
    /// code block or table are complete blocks themselves.
    pub(super) fn markdown_pieces(&self, passage: &Passage<'_>) -> Vec<TextPiece> {
        let Passage {
            text, offset, blocks, ..
        } = *passage;
        let heading = match blocks.first() {
            Some((DocType::Heading, range)) if blocks.len() > 1 => range.end - offset,
            _ => 0,
        };
        let heading_tokens = self.tokens(&text[..heading]);
        let (body, room) = if heading_tokens <= self.chunk_tokens / 4 {
            (heading, self.chunk_tokens - heading_tokens)
        } else {
            (0, self.chunk_tokens)
        };
        let mut cuts = Vec::new();
        let mut done = body;
        for (kind, range) in blocks {
            let range = range.start - offset..range.end - offset;
            let framable = matches!(kind, DocType::Code | DocType::Table);
            // No more tokens than bytes.
            let fits = |range: Range<usize>| range.len() <= room || self.tokens(&text[range]) <= room;
            if !framable || range.start < done || fits(range.clone()) {
                continue;
            }
            let framed = match kind {
                DocType::Code => self.framed_code(&text[range.clone()], room),
                _ => self.framed_table(passage, range.clone(), room),
            };
            if let Some(framed) = framed {
                self.cut_run(text, done..range.start, room, &mut cuts);
                let within = |at: Range<usize>| range.start + at.start..range.start + at.end;
                cuts.extend(
                    framed
                        .into_iter()
                        .map(|(at, piece)| Cut::Framed(within(at), piece)),
                );
                done = range.end;
            }
        }
        self.cut_run(text, done..text.len(), room, &mut cuts);
        if body > 0 {
            put_heading(passage, body, &mut cuts);
        }
        let pieces = cuts.into_iter().map(|cut| match cut {
            Cut::Slice(range) => TextPiece {
                text: passage.as_read(range.clone()),
                range,
            },
            Cut::Framed(range, text) => TextPiece { range, text },
        });
        pieces.filter(|piece| !piece.text.is_empty()).collect()
    }

    /// Cuts text outside of code blocks and tables. Markup that was cut off from its text joins the next
    /// piece, or is dropped if there is no room.
    fn cut_run(&self, text: &str, run: Range<usize>, room: usize, cuts: &mut Vec<Cut>) {
        let splitter = MarkdownSplitter::new(ChunkConfig::new(room).with_sizer(&self.sizer));
        let mut mark: Option<usize> = None;
        for (start, window) in self.windows(&text[run.clone()]) {
            for (at, piece) in splitter.chunk_indices(window) {
                let start = run.start + start + at;
                let end = start + piece.len();
                if is_mark(piece) {
                    mark.get_or_insert(start);
                    continue;
                }
                let joined = mark.take().filter(|from| self.tokens(&text[*from..end]) <= room);
                cuts.push(Cut::Slice(joined.unwrap_or(start)..end));
            }
        }
    }

    /// The pieces of a fenced block, each fenced like the whole.
    fn framed_code(&self, block: &str, room: usize) -> Option<Vec<(Range<usize>, String)>> {
        let (first, inside) = block.split_once('\n')?;
        let open = first.trim();
        let mark = open.chars().next().filter(|mark| "`~".contains(*mark))?;
        let fence = &open[..open.len() - open.trim_start_matches(mark).len()];
        if fence.len() < 3 {
            return None;
        }
        let last = inside.trim_end().rsplit('\n').next().unwrap_or_default();
        let closes = last.trim().len() >= fence.len() && last.trim().chars().all(|c| c == mark);
        let code = match inside.trim_end().len() {
            end if closes => &inside[..end - last.len()],
            _ => inside,
        };
        let frame = self.tokens(open) + self.tokens(fence);
        if frame > room / 2 {
            return None;
        }
        let start = first.len() + 1;
        let ranges = self.code_ranges(code, room - frame).into_iter();
        let framed = ranges.map(|at| {
            let piece = format!("{open}\n{}\n{fence}", &code[at.clone()]);
            (start + at.start..start + at.end, piece)
        });
        Some(framed.collect())
    }

    /// Groups of rows, each below the header of the table.
    fn framed_table(
        &self,
        passage: &Passage<'_>,
        range: Range<usize>,
        room: usize,
    ) -> Option<Vec<(Range<usize>, String)>> {
        let table = &passage.text[range.clone()];
        let mut lines = table.split_inclusive('\n');
        let head = lines.next()?.len() + lines.next()?.len();
        let head_tokens = self.tokens(&table[..head]);
        if head_tokens > room / 2 {
            return None;
        }
        let room = room - head_tokens;
        let mut groups: Vec<Range<usize>> = Vec::new();
        // Whether the last group has rows that are whole.
        let mut is_open = false;
        let mut tokens = 0;
        let mut at = head;
        for line in lines {
            let row = at..at + line.len();
            at = row.end;
            let row_tokens = self.tokens(line);
            match groups.last_mut() {
                Some(group) if is_open && tokens + row_tokens <= room => {
                    group.end = row.end;
                    tokens += row_tokens;
                }
                _ if row_tokens <= room => {
                    groups.push(row);
                    (is_open, tokens) = (true, row_tokens);
                }
                _ => {
                    let parts = self.text_ranges(line, room).into_iter();
                    groups.extend(parts.map(|part| row.start + part.start..row.start + part.end));
                    is_open = false;
                }
            }
        }
        let read = |at: Range<usize>| passage.as_read(range.start + at.start..range.start + at.end);
        let head = read(0..head);
        let framed = groups.into_iter().map(|group| {
            let rows = read(group.clone());
            (group, format!("{head}\n{rows}"))
        });
        Some(framed.collect())
    }

    /// The splitter scans the rest of the text for every piece, so that long texts are split in windows
    /// of many chunks each.
    pub(super) fn window(&self) -> usize {
        self.chunk_tokens * 128
    }
}

impl Passage<'_> {
    /// A range of it with the edits applied.
    fn as_read(&self, range: Range<usize>) -> String {
        let text = self.edits.applied(self.offset + range.start, &self.text[range]);
        text.trim().to_owned()
    }
}

fn put_heading(passage: &Passage<'_>, body: usize, cuts: &mut Vec<Cut>) {
    let heading = || passage.as_read(0..body);
    match cuts.first_mut() {
        Some(Cut::Slice(range)) if passage.text[body..range.start].trim().is_empty() => range.start = 0,
        // Markup was dropped between them.
        Some(Cut::Slice(range)) => {
            let text = format!("{}\n\n{}", heading(), passage.as_read(range.clone()));
            cuts[0] = Cut::Framed(0..range.end, text);
        }
        Some(Cut::Framed(range, text)) => {
            *text = format!("{}\n\n{text}", heading());
            range.start = 0;
        }
        None => cuts.push(Cut::Slice(0..body)),
    }
}

/// Whether a piece is only markup.
fn is_mark(piece: &str) -> bool {
    piece
        .chars()
        .all(|c| c.is_whitespace() || "#`~*_-+=>|:".contains(c))
}

fn trimmed(text: &str, range: Range<usize>) -> Range<usize> {
    let piece = &text[range.clone()];
    let start = range.start + piece.len() - piece.trim_start().len();
    start..start + piece.trim().len()
}

/// Cuts a text that is much longer than `size` between paragraphs, lines, sentences or words, and only
/// then anywhere.
pub(super) fn windows(text: &str, size: usize) -> Vec<(usize, &str)> {
    let mut windows = Vec::new();
    let mut start = 0;
    while text.len() - start > 2 * size {
        let mut end = start + size;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let window = &text[start..end];
        let cut = ["\n\n", "\n", ". ", " "].iter().find_map(|mark| {
            let at = window.rfind(mark)? + mark.len();
            (at > window.len() / 2).then_some(at)
        });
        let cut = cut.unwrap_or(window.len());
        windows.push((start, &window[..cut]));
        start += cut;
    }
    windows.push((start, &text[start..]));
    windows
}
