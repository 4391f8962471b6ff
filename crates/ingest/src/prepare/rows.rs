//! Preparing files of many documents, row by row.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ragstone_core::collection::shorten;
use ragstone_core::document::{Document, DocumentId, Metadata};
use ragstone_core::storage::StorageError;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::incoming::{Incoming, NextDocument};
use super::{
    Content, Earlier, FinishedSource, Input, InputOptions, PipelineStep, Preparation, Refused, Stop,
    document_info,
};
use crate::chunk::{Chunk, Splitter, anchor, as_title, chunk_id, content_hash, keys};
use crate::kind::FileKind;
use crate::manifest::Manifest;
use crate::plan::{self, ChunkPlan, Existing};
use crate::rows::{BadRow, ColumnType, MAX_METADATA_BYTES, SourceRow, column_types, metadata_bytes, rows};

/// The reason that rows which are missing from a file are not removed.
pub const ROWS_STAY: &str =
    "rows of an earlier run that are missing now were not removed, because some rows cannot be read";
/// Rows are compared with the collection in groups of this many, or of this much text.
const WINDOW_ROWS: usize = 256;
const WINDOW_BYTES: usize = 1 << 20;
/// Number of chunks that are looked up beyond those of a row, in case it had more before.
const BEYOND: usize = 4;
/// Metadata of all chunks of one document.
pub(super) const MAX_REPEATED_BYTES: usize = 64 << 20;

/// A file of rows that is ready to be read.
pub(super) struct RowContent {
    pub(super) reader: Box<dyn Read + Send>,
    /// SHA-256 of the file; absent where it is not complete.
    digest: Option<Vec<u8>>,
    size: u64,
    pub(super) types: Vec<ColumnType>,
    earlier: Earlier,
    is_live: bool,
}

impl RowContent {
    pub(super) fn open(
        content: Content,
        kind: FileKind,
        options: &InputOptions,
        max_row_bytes: usize,
    ) -> std::io::Result<Self> {
        let infer = kind == FileKind::Csv && !options.csv_as_text;
        let mut opened = Self {
            reader: Box::new(std::io::empty()),
            digest: None,
            size: 0,
            types: Vec::new(),
            earlier: Earlier::default(),
            is_live: false,
        };
        match content {
            Content::File(path) => {
                let mut file = File::open(&path)?;
                let mut hash = Sha256::new();
                opened.size = std::io::copy(&mut file, &mut hash)?;
                opened.digest = Some(hash.finalize().to_vec());
                if infer {
                    file.rewind()?;
                    opened.types = column_types(file.try_clone()?.take(opened.size), max_row_bytes);
                }
                file.rewind()?;
                // Rows that are appended meanwhile are read next time.
                opened.reader = Box::new(file.take(opened.size));
            }
            Content::Memory(bytes) => {
                opened.size = bytes.len() as u64;
                opened.digest = Some(Sha256::digest(&bytes).to_vec());
                let bytes: Arc<[u8]> = bytes.into();
                if infer {
                    opened.types = column_types(Cursor::new(Arc::clone(&bytes)), max_row_bytes);
                }
                opened.reader = Box::new(Cursor::new(bytes));
            }
            Content::Part(bytes, earlier) => {
                opened.size = bytes.len() as u64;
                opened.earlier = earlier;
                opened.reader = Box::new(Cursor::new(bytes));
            }
            Content::Stream(reader) => {
                opened.is_live = true;
                opened.reader = reader;
            }
        }
        Ok(opened)
    }
}

impl Preparation {
    pub(super) fn prepare_rows(&mut self, input: Input) -> Result<(), Refused> {
        let Input {
            source,
            kind,
            content,
            options,
        } = input;
        let max_row_bytes = self.reader.options.max_row_bytes;
        let RowContent {
            reader,
            digest,
            size,
            types,
            earlier,
            is_live,
        } = RowContent::open(content, kind, &options, max_row_bytes)?;
        let whole = digest.is_some();
        let fingerprint = digest.map(|digest| self.fingerprint(&digest, kind, &options));
        let before = self.before(&source)?;
        let InputOptions { origin, metadata, .. } = options;
        if let Some(fingerprint) = &fingerprint
            && before.is_current(fingerprint, &self.model)
        {
            return Ok(self.send_unchanged(&source, origin, before, size)?);
        }
        if whole && before.manifest.is_none() {
            // The origin of the rows is known even if this run is interrupted.
            self.send(PipelineStep::Finish(Box::new(FinishedSource {
                source: source.clone(),
                manifest: Some(Manifest::begun(&source, origin.clone(), &self.model)),
                ..FinishedSource::default()
            })))?;
        }

        let mut state = RowsState {
            source,
            origin,
            was_there: before.chunks,
            keys: RowKeys::after(&earlier),
            lines_before: earlier.lines,
            replaced: BTreeSet::new(),
            met: 0,
            chunks: 0,
            documents: 0,
            failed: 0,
            without_text: 0,
        };
        let consumed = Arc::new(AtomicU64::new(0));
        let reader = Counted {
            inner: reader,
            bytes: Arc::clone(&consumed),
        };
        let mut incoming = if is_live {
            Incoming::live(kind, reader, max_row_bytes)?
        } else {
            Incoming::Ready(rows(kind, reader, max_row_bytes, types))
        };
        let mut window = Vec::new();
        let mut window_bytes = 0;
        let mut since = None;
        loop {
            let mut is_due = false;
            match incoming.next(since) {
                NextDocument::Row(Ok(row)) => {
                    let row = row.with_defaults(&metadata);
                    since.get_or_insert_with(Instant::now);
                    window_bytes += row.text.len();
                    window.push(row);
                }
                NextDocument::Row(Err(bad)) => self.bad_row(&mut state, bad),
                NextDocument::Later => is_due = !window.is_empty(),
                NextDocument::End => break,
            }
            if is_due || window.len() >= WINDOW_ROWS || window_bytes >= WINDOW_BYTES {
                let bytes = consumed.swap(0, Ordering::Relaxed);
                self.send_rows(&mut state, std::mem::take(&mut window), bytes)?;
                (window_bytes, since) = (0, None);
            }
        }
        self.send_rows(&mut state, window, consumed.swap(0, Ordering::Relaxed))?;
        if !state.replaced.is_empty() {
            let names: Vec<&str> = state.replaced.iter().copied().collect();
            let warning = replaced_fields(&names);
            self.progress
                .update(|report| report.warn(state.source.clone(), warning));
        }
        if state.without_text > 0 {
            let warning = format!("{} of its rows have no text and are left out", state.without_text);
            self.progress
                .update(|report| report.warn(state.source.clone(), warning));
        }
        Ok(self.finish_rows(state, fingerprint.filter(|_| whole))?)
    }

    fn bad_row(&self, state: &mut RowsState, mut bad: BadRow) {
        state.failed += 1;
        bad.line += state.lines_before;
        self.progress
            .update(|report| report.fail(state.source.clone(), bad.to_string()));
    }

    /// Compares a group of rows with the collection and sends the changes.
    fn send_rows(&mut self, state: &mut RowsState, window: Vec<SourceRow>, bytes: u64) -> Result<(), Stop> {
        let mut documents = Vec::with_capacity(window.len());
        let mut sections = Vec::with_capacity(window.len());
        for row in window {
            let split = state.keys.key(&row).and_then(|key| {
                let chunks = row_chunks(&self.splitter, &state.source, &key, &row)?;
                Ok((section_id(&state.source, &key), chunks))
            });
            match split {
                Ok((section, chunks)) => {
                    state.replaced.extend(replaced(&row));
                    sections.push(section);
                    documents.push(chunks);
                }
                Err(bad) => self.bad_row(state, bad),
            }
        }
        let existing = if state.was_there > 0 {
            self.existing_rows(&state.source, &sections, &documents)?
        } else {
            vec![Existing::new(); sections.len()]
        };
        // Rows of a stream or a part have no manifest that names their model.
        let ids = existing.iter().flat_map(HashMap::keys).cloned();
        let outdated = self.outdated(ids.collect())?;
        state.met += existing.iter().map(|of_row| of_row.len() as u64).sum::<u64>();
        let mut group = FinishedSource {
            source: state.source.clone(),
            bytes,
            ..FinishedSource::default()
        };
        for (own, chunks) in existing.into_iter().zip(documents) {
            let count = chunks.len() as u64;
            state.without_text += u64::from(count == 0);
            if count == 0 && own.is_empty() {
                // Nothing is stored of it, so that it would count as added again next time.
                continue;
            }
            let plan = match ChunkPlan::new(chunks, own, &outdated) {
                Ok(plan) => plan,
                Err(id) => {
                    state.failed += 1;
                    let problem = format!("two chunks of a row have the same id '{id}'");
                    self.progress
                        .update(|report| report.fail(state.source.clone(), problem));
                    continue;
                }
            };
            state.documents += 1;
            state.chunks += count;
            let (counts, document) = (plan.counts(), plan.document());
            group.chunks.added += counts.added;
            group.chunks.changed += counts.changed;
            group.chunks.unchanged += counts.unchanged;
            group.chunks.removed += counts.removed;
            group.documents.added += document.added;
            group.documents.changed += document.changed;
            group.documents.unchanged += document.unchanged;
            group.remove.extend(plan.remove);
            group.gone.extend(plan.gone);
            for (change, chunk) in plan.store {
                self.send(PipelineStep::Store(change, Box::new(chunk)))?;
            }
        }
        self.send(PipelineStep::Finish(Box::new(group)))
    }

    /// The chunks of each row in the collection, found by id: any other index would have to be held in
    /// memory.
    fn existing_rows(
        &self,
        source: &str,
        sections: &[String],
        chunks: &[Vec<Chunk>],
    ) -> Result<Vec<Existing>, StorageError> {
        let mut existing = vec![Existing::new(); sections.len()];
        let mut wanted: Vec<(usize, Range<usize>)> = chunks
            .iter()
            .map(|chunks| 0..chunks.len() + BEYOND)
            .enumerate()
            .collect();
        while !wanted.is_empty() {
            let rows_by_id: HashMap<DocumentId, usize> = wanted
                .iter()
                .flat_map(|(row, places)| {
                    places
                        .clone()
                        .map(|place| (chunk_id(&sections[*row], place), *row))
                })
                .collect();
            let ids: Vec<DocumentId> = rows_by_id.keys().cloned().collect();
            let found = self
                .runtime
                .block_on(self.store.documents_by_id(&self.collection, &ids))?;
            for document in found {
                if let Some(row) = rows_by_id.get(&document.id)
                    && plan::is_of_source(&document.metadata, source)
                {
                    existing[*row].insert(document.id, document.metadata);
                }
            }
            // A row that had more chunks than were looked up may have still more.
            wanted.retain_mut(|(row, places)| {
                let mut last = places.end - BEYOND..places.end;
                let has_more =
                    last.any(|place| existing[*row].contains_key(&chunk_id(&sections[*row], place)));
                *places = places.end..2 * places.end + BEYOND;
                has_more
            });
        }
        Ok(existing)
    }

    /// Removes rows that are no longer in the file, unless a row could not be read, which might be one
    /// of them.
    fn finish_rows(&mut self, state: RowsState, fingerprint: Option<String>) -> Result<(), Stop> {
        let Some(fingerprint) = fingerprint else {
            return Ok(());
        };
        if state.failed > 0 {
            if state.was_there > state.met {
                self.progress
                    .update(|report| report.warn(state.source, ROWS_STAY));
            }
            return Ok(());
        }
        let mut finish = FinishedSource {
            source: state.source.clone(),
            ..FinishedSource::default()
        };
        if state.was_there > state.met {
            let mut vanished = HashSet::new();
            self.each_existing(&state.source, |id, metadata| {
                let section = metadata
                    .get(keys::SECTION_ID)
                    .and_then(Value::as_str)
                    .unwrap_or_default();
                if !state.keys.has_section(&state.source, section) {
                    vanished.insert(section.to_owned());
                    finish.gone.extend(
                        metadata
                            .get(keys::CONTENT_HASH)
                            .and_then(Value::as_str)
                            .map(str::to_owned),
                    );
                    finish.remove.push(id);
                }
            })?;
            finish.chunks.removed = finish.remove.len() as u64;
            finish.documents.removed = vanished.len() as u64;
        }
        finish.manifest = Some(Manifest {
            source: state.source,
            origin: state.origin,
            fingerprint,
            model: self.model.clone(),
            chunks: state.chunks,
            documents: state.documents,
        });
        self.send(PipelineStep::Finish(Box::new(finish)))
    }
}

struct RowsState {
    source: String,
    origin: Option<String>,
    /// Chunks of the source in the collection before this run, and how many of them were met again.
    was_there: u64,
    met: u64,
    keys: RowKeys,
    /// Lines of the file before the rows that are read here.
    lines_before: u64,
    /// Metadata fields of rows that ingestion replaced.
    replaced: BTreeSet<&'static str>,
    chunks: u64,
    documents: u64,
    failed: u64,
    without_text: u64,
}

/// Counts the bytes that are read.
struct Counted<R> {
    inner: R,
    bytes: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.bytes.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// The keys of a file's rows, as short hashes.
#[derive(Default)]
pub(super) struct RowKeys(HashMap<u64, u32>);

/// The row's own id; or, without one, its content.
fn first_key(row: &SourceRow) -> (String, bool) {
    match &row.id {
        Some(id) => (id.clone(), true),
        None => (content_hash(&row.text)[..16].to_owned(), false),
    }
}

/// The rows of a file that is sent in parts.
#[derive(Default)]
pub struct FileRows {
    keys: RowKeys,
    lines: u64,
    failed: u64,
}

impl FileRows {
    /// Notes the rows of the next part, and returns its context.
    pub fn part(&mut self, kind: FileKind, bytes: &[u8], max_row_bytes: usize) -> Earlier {
        let mut earlier = Earlier {
            lines: self.lines,
            ..Earlier::default()
        };
        let mut met = HashSet::new();
        for row in rows(kind, Cursor::new(bytes.to_vec()), max_row_bytes, Vec::new()) {
            let Ok(row) = row else {
                self.failed += 1;
                continue;
            };
            let (key, _) = first_key(&row);
            let hash = short_hash(&key);
            if met.insert(hash)
                && let Some(count) = self.keys.0.get(&hash)
            {
                earlier.rows.insert(key, *count);
            }
            self.failed += u64::from(self.keys.key(&row).is_err());
        }
        self.lines += bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
        earlier
    }

    /// Whether any row cannot be used.
    pub fn has_bad(&self) -> bool {
        self.failed > 0
    }

    /// Whether a section of the source is one of the rows.
    pub fn has_section(&self, source: &str, section: &str) -> bool {
        self.keys.has_section(source, section)
    }
}

impl RowKeys {
    fn after(earlier: &Earlier) -> Self {
        let counts = earlier.rows.iter();
        Self(counts.map(|(key, count)| (short_hash(key), *count)).collect())
    }

    /// A key that no row before this one has, counted up where content without an id comes again.
    pub(super) fn key(&mut self, row: &SourceRow) -> Result<String, BadRow> {
        let (key, own) = first_key(row);
        let mut free = key.clone();
        while self.0.contains_key(&short_hash(&free)) {
            if own {
                return Err(BadRow {
                    line: row.line,
                    problem: format!("the id '{}' comes more than once", shorten(&key)),
                });
            }
            let count = self.0.entry(short_hash(&key)).or_default();
            *count += 1;
            free = format!("{key}-{count}");
        }
        self.0.insert(short_hash(&free), 1);
        Ok(free)
    }

    fn has_section(&self, source: &str, section: &str) -> bool {
        let key = section
            .strip_prefix(&anchor(source))
            .and_then(|rest| rest.strip_prefix('#'));
        key.is_some_and(|key| self.0.contains_key(&short_hash(key)))
    }
}

fn short_hash(key: &str) -> u64 {
    let digest = Sha256::digest(key);
    digest
        .first_chunk::<8>()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn section_id(source: &str, key: &str) -> String {
    format!("{}#{key}", anchor(source))
}

/// A warning for metadata fields with names that ingestion uses itself.
pub(super) fn replaced_fields(names: &[&str]) -> String {
    format!(
        "metadata fields were replaced: {}. Ingestion uses these names; rename the fields to keep them",
        names.join(", ")
    )
}

/// Fields of a row's own metadata that [`row_chunks`] replaces.
fn replaced(row: &SourceRow) -> impl Iterator<Item = &'static str> {
    let own_id = row.id.is_none().then_some(keys::ROW_ID);
    let names = keys::ALL
        .into_iter()
        .filter(|name| row.metadata.contains_key(*name));
    names.filter(move |name| Some(*name) != own_id)
}

/// Splits a row. Ingestion's own fields replace those of the row.
pub(super) fn row_chunks(
    splitter: &Splitter,
    source: &str,
    key: &str,
    row: &SourceRow,
) -> Result<Vec<Chunk>, BadRow> {
    let pieces = splitter.pieces(&row.text);
    check_repeated(row, pieces.len())?;
    let section = section_id(source, key);
    let own_title = row.title.as_deref().map(as_title);
    let title = match own_title {
        Some(title) => title.to_owned(),
        None => document_info(source, Metadata::new()).fallback_title,
    };
    let chunks = pieces
        .into_iter()
        .enumerate()
        .map(|(position, piece)| {
            let content_hash = content_hash(piece);
            let mut metadata: Metadata = row.metadata.clone();
            metadata.insert(keys::SOURCE.to_owned(), Value::from(source));
            metadata.insert(keys::TITLE.to_owned(), Value::from(title.as_str()));
            if let Some(id) = &row.id {
                metadata.insert(keys::ROW_ID.to_owned(), Value::from(id.as_str()));
            }
            metadata.insert(keys::SECTION_ID.to_owned(), Value::from(section.as_str()));
            let path: Vec<Value> = own_title.into_iter().map(Value::from).collect();
            metadata.insert(keys::SECTION_PATH.to_owned(), Value::from(path));
            metadata.insert(keys::CHAPTER_ID.to_owned(), Value::from(anchor(source)));
            metadata.insert(keys::DOC_TYPE.to_owned(), Value::from(row.doc_type.name()));
            metadata.insert(keys::POSITION.to_owned(), Value::from(position));
            metadata.insert(keys::CONTENT_HASH.to_owned(), Value::from(content_hash.as_str()));
            let document = Document {
                id: chunk_id(&section, position),
                text: piece.to_owned(),
                metadata,
            };
            Chunk {
                document,
                content_hash,
                tokens: splitter.tokens(piece),
            }
        })
        .collect();
    Ok(chunks)
}

/// Every chunk repeats the metadata of its row, and all chunks of a row are in memory together.
fn check_repeated(row: &SourceRow, chunks: usize) -> Result<(), BadRow> {
    if chunks <= MAX_REPEATED_BYTES / MAX_METADATA_BYTES {
        return Ok(());
    }
    let bytes = metadata_bytes(&row.metadata);
    if bytes.saturating_mul(chunks) <= MAX_REPEATED_BYTES {
        return Ok(());
    }
    Err(BadRow {
        line: row.line,
        problem: format!("its metadata has {bytes} bytes, which each of its {chunks} chunks repeats"),
    })
}
