//! Files of many documents, read one at a time: JSONL and CSV.

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Read};
use std::iter;
use std::rc::Rc;

use ragstone_core::document::Metadata;
use serde_json::Value;

use super::kind::Kind;
use super::outline::DocType;
use super::read::{Utf16AsUtf8, decode_row};

/// One document of such a file.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Where in the file it begins.
    pub line: u64,
    /// What the file calls it, where it does.
    pub id: Option<String>,
    pub title: Option<String>,
    pub text: String,
    pub metadata: Metadata,
    pub doc_type: DocType,
}

/// Each chunk of a row carries all of these: what is long there would be stored many times over.
pub(super) const MAX_METADATA_BYTES: usize = 64 << 10;
const MAX_ID_BYTES: usize = 512;

/// A row that cannot be used. Where the file cannot be read any further, it is the last.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct BadRow {
    pub line: u64,
    pub problem: String,
}

pub type Rows = Box<dyn Iterator<Item = Result<Row, BadRow>>>;

/// Reads rows of the given kind; blank lines are no rows.
pub fn rows(kind: Kind, reader: impl Read + 'static, max_row_bytes: usize) -> Rows {
    let reader = Utf16AsUtf8::new(reader);
    match kind {
        Kind::Csv => Box::new(CsvRows::new(reader, max_row_bytes)),
        _ => Box::new(JsonLines {
            reader: BufReader::new(reader),
            line: 0,
            max_row_bytes,
            ended: false,
        }),
    }
}

struct JsonLines<R> {
    reader: BufReader<R>,
    line: u64,
    max_row_bytes: usize,
    ended: bool,
}

impl<R: Read> Iterator for JsonLines<R> {
    type Item = Result<Row, BadRow>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            self.line += 1;
            match self.read_line() {
                Ok(None) => self.ended = true,
                Ok(Some(bytes)) => {
                    let start = if self.line == 1 && bytes.starts_with(b"\xef\xbb\xbf") {
                        3
                    } else {
                        0
                    };
                    let line = decode_row(iter::once(&bytes[start..])).remove(0);
                    if !line.trim().is_empty() {
                        return Some(checked(parse_json(&line), self.line, line.len()));
                    }
                }
                Err(error) => {
                    self.ended = error.kind() != io::ErrorKind::InvalidData;
                    return Some(Err(BadRow {
                        line: self.line,
                        problem: error.to_string(),
                    }));
                }
            }
        }
        None
    }
}

impl<R: Read> JsonLines<R> {
    /// A line that is too long is an error of its own, and reading goes on after it.
    fn read_line(&mut self) -> io::Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        let limit = self.max_row_bytes as u64 + 1;
        if self.reader.by_ref().take(limit).read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        if line.len() as u64 == limit && line.last() != Some(&b'\n') {
            self.reader.skip_until(b'\n')?;
            let problem = format!("it has more than {} bytes", self.max_row_bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        Ok(Some(line))
    }
}

pub(super) fn metadata_bytes(metadata: &Metadata) -> usize {
    serde_json::to_vec(metadata).map_or(usize::MAX, |json| json.len())
}

/// A row that was read from this line, of so many bytes.
fn checked(row: Result<Row, String>, line: u64, bytes: usize) -> Result<Row, BadRow> {
    let row = row.and_then(|row| {
        let id = row.id.as_ref().map_or(0, String::len);
        if id > MAX_ID_BYTES {
            return Err(format!("its 'id' has {id} bytes; it may have {MAX_ID_BYTES}"));
        }
        // Hardly any row is long enough for its metadata to need measuring.
        let metadata = if bytes > MAX_METADATA_BYTES {
            metadata_bytes(&row.metadata)
        } else {
            0
        };
        if metadata > MAX_METADATA_BYTES {
            return Err(format!(
                "what it has beside its 'text' has {metadata} bytes; it may have {MAX_METADATA_BYTES}"
            ));
        }
        Ok(row)
    });
    match row {
        Ok(row) => Ok(Row { line, ..row }),
        Err(problem) => Err(BadRow { line, problem }),
    }
}

/// `text` or `content`, with an optional `id` (or `_id`), `title` (which may be in the metadata) and
/// `metadata`; what else is in the object joins the metadata.
fn parse_json(line: &str) -> Result<Row, String> {
    let value: Value =
        serde_json::from_str(line).map_err(|error| format!("it is not valid JSON: {error}"))?;
    let Value::Object(mut fields) = value else {
        return Err("it is not a JSON object".to_owned());
    };
    let text = match fields.remove("text").or_else(|| fields.remove("content")) {
        Some(Value::String(text)) => text.replace('\0', "\u{fffd}"),
        // As an empty cell of a CSV file.
        Some(Value::Null) => String::new(),
        Some(_) => return Err("its 'text' is not a string".to_owned()),
        None => return Err("it has no 'text'".to_owned()),
    };
    let id = match fields.remove("id").or_else(|| fields.remove("_id")) {
        Some(Value::String(id)) if !id.is_empty() => Some(id),
        Some(Value::Number(id)) => Some(id.to_string()),
        None | Some(Value::Null | Value::String(_)) => None,
        Some(_) => return Err("its 'id' is neither a string nor a number".to_owned()),
    };
    fields.remove("embedding");
    let mut metadata = match fields.remove("metadata") {
        Some(Value::Object(metadata)) => metadata,
        None | Some(Value::Null) => Metadata::new(),
        Some(_) => return Err("its 'metadata' is not a JSON object".to_owned()),
    };
    let title = take_title(&mut fields).or_else(|| take_title(&mut metadata));
    fields.remove("title");
    fields.extend(metadata);
    Ok(Row {
        line: 0,
        id,
        title,
        text,
        metadata: fields,
        doc_type: DocType::Paragraph,
    })
}

/// A title that says something; whatever else is called so stays where it is.
fn take_title(fields: &mut Metadata) -> Option<String> {
    let title = fields
        .get("title")?
        .as_str()
        .filter(|title| !title.trim().is_empty())?;
    let title = title.to_owned();
    fields.remove("title");
    Some(title)
}

struct CsvRows<R> {
    reader: csv::Reader<RowBound<R>>,
    read_since_row: Rc<Cell<usize>>,
    header: Option<csv::StringRecord>,
    /// Lines before the header.
    lines_before: u64,
    record: csv::ByteRecord,
    /// Whether the file ended between quotes.
    unclosed: Rc<Cell<bool>>,
    ended: bool,
}

/// A quote that is never closed would make one row of the whole rest: this ends it, and notices it.
struct RowBound<R> {
    inner: BufReader<R>,
    read: Rc<Cell<usize>>,
    limit: usize,
    delimiter: u8,
    quoting: Quoting,
    unclosed: Rc<Cell<bool>>,
}

/// Where in a cell a reader of CSV is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Quoting {
    Before,
    Plain,
    Quoted,
    /// After a quote that ends the cell, or begins a pair that stands for one.
    AfterQuote,
}

impl Quoting {
    fn after(self, byte: u8, delimiter: u8) -> Self {
        match (self, byte) {
            (Self::Quoted, b'"') => Self::AfterQuote,
            (Self::Quoted, _) | (Self::Before | Self::AfterQuote, b'"') => Self::Quoted,
            (_, b'\n' | b'\r') => Self::Before,
            (_, byte) if byte == delimiter => Self::Before,
            _ => Self::Plain,
        }
    }
}

impl<R: Read> Read for RowBound<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.read.get() > self.limit {
            return Err(io::Error::other(format!("it has more than {} bytes", self.limit)));
        }
        let count = self.inner.read(buffer)?;
        self.read.set(self.read.get() + count);
        self.quoting = buffer[..count]
            .iter()
            .fold(self.quoting, |quoting, byte| quoting.after(*byte, self.delimiter));
        self.unclosed
            .set(count == 0 && !buffer.is_empty() && self.quoting == Quoting::Quoted);
        Ok(count)
    }
}

impl<R: Read> CsvRows<R> {
    fn new(reader: R, max_row_bytes: usize) -> Self {
        let mut inner = BufReader::new(reader);
        let (delimiter, before, lines_before) = match inner.fill_buf() {
            Ok(beginning) => {
                let mark = if beginning.starts_with(b"\xef\xbb\xbf") {
                    3
                } else {
                    0
                };
                let beginning = &beginning[mark..];
                match stated_delimiter(beginning) {
                    Some((delimiter, line)) => (delimiter, mark + line, 1),
                    None => (guess_delimiter(beginning), mark, 0),
                }
            }
            // The same error comes again when the first row is read.
            Err(_) => (b',', 0, 0),
        };
        inner.consume(before);
        let read = Rc::new(Cell::new(0));
        let unclosed = Rc::new(Cell::new(false));
        let bound = RowBound {
            inner,
            read: Rc::clone(&read),
            limit: max_row_bytes,
            delimiter,
            quoting: Quoting::Before,
            unclosed: Rc::clone(&unclosed),
        };
        let reader = csv::ReaderBuilder::new()
            .delimiter(delimiter)
            .flexible(true)
            .from_reader(bound);
        Self {
            reader,
            read_since_row: read,
            header: None,
            lines_before,
            record: csv::ByteRecord::new(),
            unclosed,
            ended: false,
        }
    }
}

/// What a first line such as `sep=;` says, which spreadsheets write for each other, and the length of
/// that line.
fn stated_delimiter(beginning: &[u8]) -> Option<(u8, usize)> {
    let end = beginning.iter().position(|b| *b == b'\n')?;
    let line = beginning[..end].trim_ascii_start();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let unquoted = line.strip_prefix(b"\"").and_then(|line| line.strip_suffix(b"\""));
    match unquoted.unwrap_or(line) {
        [s, e, p, b'=', delimiter] if [*s, *e, *p].eq_ignore_ascii_case(b"sep") => {
            let separates = b"\t ".contains(delimiter) || delimiter.is_ascii_punctuation();
            (separates && *delimiter != b'"').then_some((*delimiter, end + 1))
        }
        _ => None,
    }
}

/// Whichever of comma, tab, semicolon and stroke the header has most of, outside of quotes.
fn guess_delimiter(beginning: &[u8]) -> u8 {
    let count = |delimiter: u8| {
        let mut quoting = Quoting::Before;
        let mut count = 0;
        for byte in beginning {
            if *byte == b'\n' && quoting != Quoting::Quoted {
                break;
            }
            count += usize::from(*byte == delimiter && quoting != Quoting::Quoted);
            quoting = quoting.after(*byte, delimiter);
        }
        count
    };
    [b'|', b';', b'\t', b',']
        .into_iter()
        .max_by_key(|d| count(*d))
        .unwrap_or(b',')
}

/// Every column with a name of its own, so that no cell is lost: a column without one is called by its
/// place, and a name that comes again is counted.
fn column_names(header: Vec<String>) -> csv::StringRecord {
    let mut taken: HashSet<String> = header.iter().map(|name| name.trim().to_owned()).collect();
    let mut seen = HashSet::new();
    let names = header.into_iter().enumerate().map(|(index, name)| {
        let name = name.trim();
        if !name.is_empty() && seen.insert(name.to_owned()) {
            return name.to_owned();
        }
        let (base, first) = match name {
            "" => ("column", index + 1),
            _ => (name, 2),
        };
        let mut free = (first..).map(|count| format!("{base}_{count}"));
        free.find(|name| taken.insert(name.clone())).unwrap_or_default()
    });
    names.collect()
}

impl<R: Read> Iterator for CsvRows<R> {
    type Item = Result<Row, BadRow>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let line = self.reader.position().line() + self.lines_before;
        self.read_since_row.set(0);
        if self.header.is_none() {
            match self.reader.byte_headers() {
                Ok(header) => self.header = Some(column_names(decode_row(header.iter()))),
                Err(error) => {
                    self.ended = true;
                    return Some(Err(BadRow {
                        line,
                        problem: csv_problem(&error),
                    }));
                }
            }
        }
        match self.reader.read_byte_record(&mut self.record) {
            Ok(true) => {
                let position = self.record.position();
                let line = position.map_or(line, |position| position.line() + self.lines_before);
                let header = self.header.as_ref()?;
                if self.unclosed.get() {
                    return Some(Err(BadRow {
                        line,
                        problem: "a quote in it is never closed".to_owned(),
                    }));
                }
                let row = decode_row(self.record.iter()).into();
                Some(checked(
                    parse_csv(header, &row),
                    line,
                    self.record.as_slice().len(),
                ))
            }
            Ok(false) => {
                self.ended = true;
                None
            }
            Err(error) => {
                self.ended = true;
                Some(Err(BadRow {
                    line,
                    problem: csv_problem(&error),
                }))
            }
        }
    }
}

fn csv_problem(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Io(error) => error.to_string(),
        _ => error.to_string(),
    }
}

/// A column `text` or `content` is the text and the others are metadata; without one, the text is
/// every cell under its column's name.
fn parse_csv(header: &csv::StringRecord, row: &csv::StringRecord) -> Result<Row, String> {
    let column = |names: &[&str]| {
        header
            .iter()
            .position(|h| names.iter().any(|n| h.trim().eq_ignore_ascii_case(n)))
    };
    let id_column = column(&["id", "_id"]);
    let title_column = column(&["title"]);
    let text_column = column(&["text", "content"]);
    let cell = |index: Option<usize>| {
        index
            .and_then(|i| row.get(i))
            .map(str::trim)
            .filter(|c| !c.is_empty())
    };
    if row.iter().skip(header.len()).any(|cell| !cell.trim().is_empty()) {
        return Err(format!(
            "it has {} cells, and the header names only {}",
            row.len(),
            header.len()
        ));
    }
    let mut metadata = Metadata::new();
    let mut lines = Vec::new();
    for (index, value) in row.iter().enumerate() {
        let (name, value) = (header.get(index).unwrap_or_default().trim(), value.trim());
        if name.is_empty() || value.is_empty() {
            continue;
        }
        if text_column.is_none() {
            lines.push(format!("{name}: {value}"));
        }
        if [id_column, title_column, text_column].contains(&Some(index)) {
            continue;
        }
        metadata.insert(name.to_owned(), Value::from(value));
    }
    let (text, doc_type) = match text_column {
        Some(_) => (
            cell(text_column).unwrap_or_default().to_owned(),
            DocType::Paragraph,
        ),
        None => (lines.join("\n"), DocType::Table),
    };
    Ok(Row {
        line: 0,
        id: cell(id_column).map(str::to_owned),
        title: cell(title_column).map(str::to_owned),
        text: text.replace('\0', "\u{fffd}"),
        metadata,
        doc_type,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(kind: Kind, bytes: &[u8], limit: usize) -> Vec<Result<Row, BadRow>> {
        rows(kind, io::Cursor::new(bytes.to_vec()), limit).collect()
    }

    #[test]
    fn lines_are_documents_and_bad_ones_do_not_stop_the_rest() {
        let long = format!("{{\"text\":\"{}\"}}", "x".repeat(200));
        let file = format!(
            "\u{feff}{{\"_id\":7,\"text\":\"a\",\"title\":\"T\",\"url\":\"u\",\"metadata\":{{\"n\":1}}}}\n\n\
             not json\n{long}\n[1]\n{{\"content\":\"b\"}}"
        );
        let rows = read(Kind::JsonLines, file.as_bytes(), 100);
        let first = rows[0].clone().unwrap();
        assert_eq!(
            (first.id.as_deref(), first.title.as_deref()),
            (Some("7"), Some("T"))
        );
        assert_eq!(
            Value::Object(first.metadata),
            serde_json::json!({"url": "u", "n": 1})
        );
        let problems: Vec<String> = rows[1..4]
            .iter()
            .map(|row| row.clone().unwrap_err().to_string())
            .collect();
        assert!(
            problems[0].starts_with("line 3: it is not valid JSON"),
            "{problems:?}"
        );
        assert_eq!(problems[1], "line 4: it has more than 100 bytes");
        assert_eq!(problems[2], "line 5: it is not a JSON object");
        assert_eq!(rows[4].clone().unwrap().text, "b");
        assert_eq!(rows.len(), 5);
    }

    #[test]
    fn cells_are_metadata_or_the_text() {
        let rows = read(Kind::Csv, b"id;text;lang\n1;\"a;b\";en\n2;c\n", 1000);
        let (first, second) = (rows[0].clone().unwrap(), rows[1].clone().unwrap());
        assert_eq!((first.id.as_deref(), first.text.as_str()), (Some("1"), "a;b"));
        assert_eq!(first.metadata["lang"], "en");
        assert_eq!(second.text, "c");
        let rows = read(Kind::Csv, b"id,text\n1,a,b\n2,c,\n", 1000);
        let refused = rows[0].clone().unwrap_err().to_string();
        assert_eq!(refused, "line 2: it has 3 cells, and the header names only 2");
        assert_eq!(rows[1].clone().unwrap().text, "c");
        let rows = read(Kind::Csv, b"name\tage\nAda\t36\n", 1000);
        assert_eq!(rows[0].clone().unwrap().text, "name: Ada\nage: 36");
        assert_eq!(rows[0].clone().unwrap().doc_type, DocType::Table);
    }

    #[test]
    fn a_quote_that_never_closes_is_ended_by_the_limit() {
        let mut file = b"text\n\"".to_vec();
        file.extend(std::iter::repeat_n(b'x', 1 << 20));
        let rows = read(Kind::Csv, &file, 10_000);
        assert_eq!(rows.len(), 1);
        assert!(
            rows[0]
                .clone()
                .unwrap_err()
                .problem
                .contains("more than 10000 bytes")
        );
    }

    #[test]
    fn rows_of_other_encodings_are_read_and_open_quotes_are_errors() {
        let rows = read(Kind::Csv, b"id,text\n1,caf\xe9\n", 1000);
        assert_eq!(rows[0].clone().unwrap().text, "caf\u{e9}");
        let line = "{\"text\":\"h\u{e9}\"}\n".encode_utf16();
        let utf16: Vec<u8> = [0xff, 0xfe]
            .into_iter()
            .chain(line.flat_map(u16::to_le_bytes))
            .collect();
        assert_eq!(
            read(Kind::JsonLines, &utf16, 1000)[0].clone().unwrap().text,
            "h\u{e9}"
        );
        let rows = read(Kind::Csv, b"id,text\n1,a\n2,\"b\n3,c\n", 1000);
        assert_eq!(
            rows[1].clone().unwrap_err().to_string(),
            "line 3: a quote in it is never closed"
        );
    }

    #[test]
    fn delimiters_are_those_of_the_header_or_what_the_file_says() {
        for (file, metadata) in [
            ("\"Name; first; last\",text\nAda,t\n", "Name; first; last"),
            ("\u{feff}\"a,b,c\"|text\nx|t\n", "a,b,c"),
            ("\"two\n;;lines\",text\nx,t\n", "two\n;;lines"),
            ("sep=;\r\na,b;text\r\nx;t\r\n", "a,b"),
            ("\u{feff}\"SEP=|\"\na,b,c|text\nx|t\n", "a,b,c"),
        ] {
            let row = read(Kind::Csv, file.as_bytes(), 1000).remove(0).unwrap();
            assert_eq!(row.text, "t", "{file}");
            let names: Vec<&String> = row.metadata.keys().collect();
            assert_eq!(names, [metadata], "{file}");
        }
        let rows = read(Kind::Csv, b"sep=;\ntext;b\nt;1\nt;2;3\n", 1000);
        assert_eq!(rows[0].clone().unwrap().line, 3);
        assert_eq!(rows[1].clone().unwrap_err().line, 4);
    }

    #[test]
    fn every_column_has_a_name_of_its_own() {
        let file = b"note,,note,note_2,,text\n1,2,3,4,5,t\n";
        let row = read(Kind::Csv, file, 1000).remove(0).unwrap();
        assert_eq!(
            Value::Object(row.metadata),
            serde_json::json!({"note": "1", "column_2": "2", "note_3": "3", "note_2": "4", "column_5": "5"})
        );
    }
}
