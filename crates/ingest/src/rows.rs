//! Files with one document per row, read row by row: JSONL and CSV.

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Read};
use std::iter;
use std::rc::Rc;

use encoding_rs_io::DecodeReaderBytesBuilder;
use ragstone_core::document::Metadata;
use serde_json::Value;

use super::kind::FileKind;
use super::outline::DocType;
use super::read::decode_row;

/// One document of such a file.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceRow {
    /// Line of the file it begins at.
    pub line: u64,
    /// Its id in the file.
    pub id: Option<String>,
    pub title: Option<String>,
    pub text: String,
    pub metadata: Metadata,
    pub doc_type: DocType,
}

impl SourceRow {
    /// The row with metadata that it does not have itself.
    pub(super) fn with_defaults(mut self, defaults: &Metadata) -> Self {
        for (name, value) in defaults {
            if !self.metadata.contains_key(name) {
                self.metadata.insert(name.clone(), value.clone());
            }
        }
        self
    }
}

/// Every chunk of a row repeats the row's metadata.
pub(super) const MAX_METADATA_BYTES: usize = 64 << 10;
const MAX_ID_BYTES: usize = 512;
/// The delimiter of a CSV file is found in this much of its beginning.
const BEGINNING: u64 = 8192;

/// A row that cannot be used. It is the last one where the file cannot be read further.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct BadRow {
    pub line: u64,
    pub problem: String,
}

pub(super) type Rows = Box<dyn Iterator<Item = Result<SourceRow, BadRow>>>;

/// Reads rows of the given kind, skipping blank lines. `types` are those of the columns of a CSV
/// file, which are text where absent.
pub(super) fn rows(
    kind: FileKind,
    reader: impl Read + 'static,
    max_row_bytes: usize,
    types: Vec<ColumnType>,
) -> Rows {
    let reader = as_utf8(reader);
    match kind {
        FileKind::Csv => Box::new(CsvRows::new(reader, max_row_bytes, types)),
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
    type Item = Result<SourceRow, BadRow>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            self.line += 1;
            match self.read_line() {
                Ok(None) => self.ended = true,
                Ok(Some(bytes)) => {
                    let line = decode_row(iter::once(&bytes[..])).remove(0);
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
    /// Reads a line. After one that is too long, reading goes on with the next.
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

/// Checks the limits of a row, which has so many bytes in the file.
fn checked(row: Result<SourceRow, String>, line: u64, bytes: usize) -> Result<SourceRow, BadRow> {
    let row = row.and_then(|row| {
        let id = row.id.as_ref().map_or(0, String::len);
        if id > MAX_ID_BYTES {
            return Err(format!(
                "its 'id' has {id} bytes; at most {MAX_ID_BYTES} are allowed"
            ));
        }
        // Metadata is measured only where it can be too long.
        let metadata = if bytes > MAX_METADATA_BYTES {
            metadata_bytes(&row.metadata)
        } else {
            0
        };
        if metadata > MAX_METADATA_BYTES {
            return Err(format!(
                "its metadata has {metadata} bytes; at most {MAX_METADATA_BYTES} are allowed"
            ));
        }
        Ok(row)
    });
    match row {
        Ok(row) => Ok(SourceRow { line, ..row }),
        Err(problem) => Err(BadRow { line, problem }),
    }
}

/// Takes `text` or `content`, an optional `id` or `_id`, and an optional `title`, which may be in
/// `metadata`. All other fields join the metadata.
fn parse_json(line: &str) -> Result<SourceRow, String> {
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
    Ok(SourceRow {
        line: 0,
        id,
        title,
        text,
        metadata: fields,
        doc_type: DocType::Paragraph,
    })
}

/// Takes a title that is a string and not blank.
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
    reader: csv::Reader<Watched<R>>,
    state: Rc<WatchState>,
    header: Option<csv::StringRecord>,
    types: Vec<ColumnType>,
    /// Lines before the header.
    lines_before: u64,
    record: csv::ByteRecord,
    ended: bool,
}

/// Limits how much is read for one row: a quote that is never closed makes one row of the rest.
struct Watched<R> {
    inner: io::Chain<io::Cursor<Vec<u8>>, R>,
    limit: usize,
    state: Rc<WatchState>,
}

#[derive(Default)]
struct WatchState {
    read_since_row: Cell<usize>,
    odd_quotes: Cell<bool>,
    at_end: Cell<bool>,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let state = &self.state;
        if state.read_since_row.get() > self.limit {
            return Err(io::Error::other(format!("it has more than {} bytes", self.limit)));
        }
        let count = self.inner.read(buffer)?;
        state.read_since_row.set(state.read_since_row.get() + count);
        let quotes = buffer[..count].iter().filter(|byte| **byte == b'"').count();
        state.odd_quotes.set(state.odd_quotes.get() ^ (quotes % 2 == 1));
        state.at_end.set(count == 0 && !buffer.is_empty());
        Ok(count)
    }
}

impl<R: Read> CsvRows<R> {
    fn new(reader: R, max_row_bytes: usize, types: Vec<ColumnType>) -> Self {
        let mut reader = reader;
        let mut beginning = Vec::new();
        // An error comes again when the first row is read.
        let _ = reader.by_ref().take(BEGINNING).read_to_end(&mut beginning);
        let (delimiter, skipped) = match stated_delimiter(&beginning) {
            Some((delimiter, line)) => (delimiter, line),
            None => (guess_delimiter(&beginning), 0),
        };
        beginning.drain(..skipped);
        let state = Rc::new(WatchState::default());
        let reader = csv::ReaderBuilder::new()
            .delimiter(delimiter)
            .flexible(true)
            .from_reader(Watched {
                inner: io::Cursor::new(beginning).chain(reader),
                limit: max_row_bytes,
                state: Rc::clone(&state),
            });
        Self {
            reader,
            state,
            header: None,
            types,
            lines_before: u64::from(skipped > 0),
            record: csv::ByteRecord::new(),
            ended: false,
        }
    }

    /// Whether the file ends within quotes, in the record that was read last.
    fn is_unclosed(&self) -> bool {
        let last = self.record.iter().next_back();
        self.state.at_end.get()
            && self.state.odd_quotes.get()
            && last.is_some_and(|cell| cell.contains(&b'\n'))
    }

    /// The next record as text, with its line.
    fn next_record(&mut self) -> Option<Result<(u64, csv::StringRecord), BadRow>> {
        if self.ended {
            return None;
        }
        let line = self.reader.position().line() + self.lines_before;
        let bad = |line: u64, problem: String| Some(Err(BadRow { line, problem }));
        self.state.read_since_row.set(0);
        if self.header.is_none() {
            match self.reader.byte_headers() {
                Ok(header) => self.header = Some(column_names(decode_row(header.iter()))),
                Err(error) => {
                    self.ended = true;
                    return bad(line, csv_problem(&error));
                }
            }
        }
        match self.reader.read_byte_record(&mut self.record) {
            Ok(true) => {
                let position = self.record.position();
                let line = position.map_or(line, |position| position.line() + self.lines_before);
                if self.is_unclosed() {
                    return bad(line, "a quote in it is never closed".to_owned());
                }
                Some(Ok((line, decode_row(self.record.iter()).into())))
            }
            Ok(false) => {
                self.ended = true;
                None
            }
            Err(error) => {
                self.ended = true;
                bad(line, csv_problem(&error))
            }
        }
    }
}

/// Reads a first line such as `sep=;`, which spreadsheets write: the delimiter and the line's length.
fn stated_delimiter(beginning: &[u8]) -> Option<(u8, usize)> {
    let end = beginning.iter().position(|byte| *byte == b'\n')?;
    let line = std::str::from_utf8(&beginning[..end]).ok()?;
    let line = line.trim_matches(['"', '\r']).to_ascii_lowercase();
    let delimiter = *line.strip_prefix("sep=")?.as_bytes().first()?;
    (line.len() == 5).then_some((delimiter, end + 1))
}

/// The delimiter that gives the header most columns.
fn guess_delimiter(beginning: &[u8]) -> u8 {
    let columns = |delimiter: u8| {
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(delimiter)
            .has_headers(false)
            .from_reader(beginning);
        let header = reader.byte_records().next();
        header.map_or(0, |header| header.map_or(0, |header| header.len()))
    };
    let delimiters = [b'|', b';', b'\t', b','].into_iter();
    delimiters
        .max_by_key(|delimiter| columns(*delimiter))
        .unwrap_or(b',')
}

/// The type of all cells of a CSV column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ColumnType {
    Text,
    Integer,
    Float,
    Boolean,
}

impl ColumnType {
    /// The narrowest type of a cell. Numbers whose spelling would be lost (`007`, `+1`) are text.
    fn of(cell: &str) -> Self {
        let digits = cell.strip_prefix('-').unwrap_or(cell);
        let is_padded = digits.len() > 1 && digits.starts_with('0') && !digits.starts_with("0.");
        if cell.eq_ignore_ascii_case("true") || cell.eq_ignore_ascii_case("false") {
            Self::Boolean
        } else if is_padded || !digits.starts_with(|c: char| c.is_ascii_digit()) {
            Self::Text
        } else if cell.parse::<i64>().is_ok() {
            Self::Integer
        } else if cell.contains(['.', 'e', 'E']) && cell.parse::<f64>().is_ok_and(f64::is_finite) {
            Self::Float
        } else {
            Self::Text
        }
    }

    /// The type that fits both.
    fn with(self, other: Self) -> Self {
        match (self, other) {
            (one, other) if one == other => one,
            (Self::Integer, Self::Float) | (Self::Float, Self::Integer) => Self::Float,
            _ => Self::Text,
        }
    }

    fn value(self, cell: &str) -> Value {
        let number = match self {
            Self::Text => None,
            Self::Boolean => Some(Value::from(cell.eq_ignore_ascii_case("true"))),
            Self::Integer => cell.parse::<i64>().ok().map(Value::from),
            Self::Float => cell.parse::<f64>().ok().map(Value::from),
        };
        number.unwrap_or_else(|| Value::from(cell))
    }
}

/// The types of a CSV file's columns, which every cell has that is not empty.
pub(super) fn column_types(reader: impl Read + 'static, max_row_bytes: usize) -> Vec<ColumnType> {
    let mut rows = CsvRows::new(as_utf8(reader), max_row_bytes, Vec::new());
    let mut types: Vec<Option<ColumnType>> = Vec::new();
    while let Some(record) = rows.next_record() {
        let Ok((_, record)) = record else { continue };
        if types.len() < record.len() {
            types.resize(record.len(), None);
        }
        for (known, cell) in types.iter_mut().zip(&record) {
            let cell = cell.trim();
            if !cell.is_empty() && *known != Some(ColumnType::Text) {
                let own = ColumnType::of(cell);
                *known = Some(known.map_or(own, |known| known.with(own)));
            }
        }
    }
    types
        .into_iter()
        .map(|known| known.unwrap_or(ColumnType::Text))
        .collect()
}

/// Decodes UTF-16 and drops byte order marks; other encodings are decoded row by row.
fn as_utf8(reader: impl Read) -> impl Read {
    DecodeReaderBytesBuilder::new()
        .strip_bom(true)
        .utf8_passthru(true)
        .build(reader)
}

/// Gives every column a name of its own: an unnamed column is called by its position, a repeated name
/// is numbered.
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
    type Item = Result<SourceRow, BadRow>;

    fn next(&mut self) -> Option<Self::Item> {
        let (line, record) = match self.next_record()? {
            Ok(record) => record,
            Err(bad) => return Some(Err(bad)),
        };
        let row = parse_csv(self.header.as_ref()?, &record, &self.types);
        Some(checked(row, line, self.record.as_slice().len()))
    }
}

fn csv_problem(error: &csv::Error) -> String {
    match error.kind() {
        csv::ErrorKind::Io(error) => error.to_string(),
        _ => error.to_string(),
    }
}

/// The column `text` or `content` is the text and the others are metadata. Without one, the text is
/// a line `name: value` for every cell.
fn parse_csv(
    header: &csv::StringRecord,
    row: &csv::StringRecord,
    types: &[ColumnType],
) -> Result<SourceRow, String> {
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
        let column_type = types.get(index).copied().unwrap_or(ColumnType::Text);
        metadata.insert(name.to_owned(), column_type.value(value));
    }
    let (text, doc_type) = match text_column {
        Some(_) => (
            cell(text_column).unwrap_or_default().to_owned(),
            DocType::Paragraph,
        ),
        None => (lines.join("\n"), DocType::Table),
    };
    Ok(SourceRow {
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

    fn read(kind: FileKind, bytes: &[u8], limit: usize) -> Vec<Result<SourceRow, BadRow>> {
        let file = || io::Cursor::new(bytes.to_vec());
        let types = column_types(file(), limit);
        rows(kind, file(), limit, types).collect()
    }

    #[test]
    fn columns_have_the_type_that_all_their_cells_have() {
        let file = "text,int,float,flag,zip,mixed,date,big,empty\n\
                    a,30,1,true,01234,1,2024-01-02,99999999999999999999,\n\
                    b,-7,2.5,FALSE,50000,x,2024-01-03,1,\n\
                    c,,,,,,,,\n";
        let rows = read(FileKind::Csv, file.as_bytes(), 1000);
        let metadata = |row: usize| Value::Object(rows[row].clone().unwrap().metadata);
        assert_eq!(
            metadata(0),
            serde_json::json!({"int": 30, "float": 1.0, "flag": true, "zip": "01234", "mixed": "1",
                "date": "2024-01-02", "big": "99999999999999999999"})
        );
        assert_eq!(
            metadata(1),
            serde_json::json!({"int": -7, "float": 2.5, "flag": false, "zip": "50000", "mixed": "x",
                "date": "2024-01-03", "big": "1"})
        );
        assert_eq!(metadata(2), serde_json::json!({}));
    }

    #[test]
    fn lines_are_documents_and_bad_ones_do_not_stop_the_rest() {
        let long = format!("{{\"text\":\"{}\"}}", "x".repeat(200));
        let file = format!(
            "\u{feff}{{\"_id\":7,\"text\":\"a\",\"title\":\"T\",\"url\":\"u\",\"metadata\":{{\"n\":1}}}}\n\n\
             not json\n{long}\n[1]\n{{\"content\":\"b\"}}"
        );
        let rows = read(FileKind::JsonLines, file.as_bytes(), 100);
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
        let rows = read(FileKind::Csv, b"id;text;lang\n1;\"a;b\";en\n2;c\n", 1000);
        let (first, second) = (rows[0].clone().unwrap(), rows[1].clone().unwrap());
        assert_eq!((first.id.as_deref(), first.text.as_str()), (Some("1"), "a;b"));
        assert_eq!(first.metadata["lang"], "en");
        assert_eq!(second.text, "c");
        let rows = read(FileKind::Csv, b"id,text\n1,a,b\n2,c,\n", 1000);
        let refused = rows[0].clone().unwrap_err().to_string();
        assert_eq!(refused, "line 2: it has 3 cells, and the header names only 2");
        assert_eq!(rows[1].clone().unwrap().text, "c");
        let rows = read(FileKind::Csv, b"name\tage\nAda\t36\n", 1000);
        assert_eq!(rows[0].clone().unwrap().text, "name: Ada\nage: 36");
        assert_eq!(rows[0].clone().unwrap().doc_type, DocType::Table);
    }

    #[test]
    fn a_quote_that_never_closes_is_ended_by_the_limit() {
        let mut file = b"text\n\"".to_vec();
        file.extend(std::iter::repeat_n(b'x', 1 << 20));
        let rows = read(FileKind::Csv, &file, 10_000);
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
        let rows = read(FileKind::Csv, b"id,text\n1,caf\xe9\n", 1000);
        assert_eq!(rows[0].clone().unwrap().text, "caf\u{e9}");
        let line = "{\"text\":\"h\u{e9}\"}\n".encode_utf16();
        let utf16: Vec<u8> = [0xff, 0xfe]
            .into_iter()
            .chain(line.flat_map(u16::to_le_bytes))
            .collect();
        assert_eq!(
            read(FileKind::JsonLines, &utf16, 1000)[0].clone().unwrap().text,
            "h\u{e9}"
        );
        let rows = read(FileKind::Csv, b"id,text\n1,a\n2,\"b\n3,c\n", 1000);
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
            let row = read(FileKind::Csv, file.as_bytes(), 1000).remove(0).unwrap();
            assert_eq!(row.text, "t", "{file}");
            let names: Vec<&String> = row.metadata.keys().collect();
            assert_eq!(names, [metadata], "{file}");
        }
        let rows = read(FileKind::Csv, b"sep=;\ntext;b\nt;1\nt;2;3\n", 1000);
        assert_eq!(rows[0].clone().unwrap().line, 3);
        assert_eq!(rows[1].clone().unwrap_err().line, 4);
    }

    #[test]
    fn every_column_has_a_name_of_its_own() {
        let file = b"note,,note,note_2,,text\n1,2,3,4,5,t\n";
        let row = read(FileKind::Csv, file, 1000).remove(0).unwrap();
        assert_eq!(
            Value::Object(row.metadata),
            serde_json::json!({"note": 1, "column_2": 2, "note_3": 3, "note_2": 4, "column_5": 5})
        );
    }
}
