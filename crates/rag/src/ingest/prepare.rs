//! Reading, splitting and planning, on a thread of its own, ahead of the embedding.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use ragstone_core::collection::CollectionName;
use ragstone_core::document::{Document, DocumentId, Metadata};
use ragstone_core::records::Records;
use ragstone_core::store::{Store, StoreError};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::chunk::{Chunk, Origin, Splitter, chunk_id, content_hash, document_id, keys};
use super::kind::Kind;
use super::manifest::{self, Manifest};
use super::plan::{self, AllAgain, Change, Existing, Plan};
use super::read::{self, ReadOptions, Unreadable};
use super::report::{ChunkCounts, DocumentCounts, Progress};
use super::rows::{Row, rows};

/// Rows are compared with the collection in groups of this many, or of this much text.
const WINDOW_ROWS: usize = 256;
const WINDOW_BYTES: usize = 1 << 20;

/// Something to be ingested.
pub struct Input {
    pub source: String,
    pub kind: Kind,
    pub content: Content,
}

pub enum Content {
    /// Read when its turn comes.
    File(PathBuf),
    Memory(Vec<u8>),
    /// Rows that arrive as they are made; what is not among them is not taken for gone.
    Stream(Box<dyn Read + Send>),
    /// Some of the rows of a source, the others being elsewhere.
    Part(Vec<u8>),
}

/// What the later stages do, in this order.
pub(super) enum Step {
    Store(Change, Box<Chunk>),
    /// Everything of a document, or of a group of rows, was handed over before.
    Finish(Box<Finish>),
}

#[derive(Default)]
pub(super) struct Finish {
    pub(super) source: String,
    pub(super) remove: Vec<DocumentId>,
    pub(super) gone: Vec<String>,
    pub(super) manifest: Option<Manifest>,
    pub(super) documents: DocumentCounts,
    pub(super) chunks: ChunkCounts,
    pub(super) bytes: u64,
}

pub(super) struct Preparation {
    pub(super) store: Arc<dyn Store>,
    pub(super) records: Arc<dyn Records>,
    pub(super) collection: CollectionName,
    /// See [`manifest::model_name`].
    pub(super) model: String,
    pub(super) splitter: Splitter,
    pub(super) chunk_tokens: usize,
    pub(super) read: ReadOptions,
    pub(super) progress: Arc<Progress>,
    pub(super) runtime: Handle,
    pub(super) steps: mpsc::Sender<Step>,
}

/// Why preparing ends before the last input.
pub(super) enum Stop {
    /// Nobody wants the rest.
    Unwanted,
    Store(StoreError),
}

impl From<StoreError> for Stop {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// Why one input is not ingested; the others are.
enum Refused {
    Unreadable(String),
    Stop(Stop),
}

impl From<Unreadable> for Refused {
    fn from(error: Unreadable) -> Self {
        Self::Unreadable(error.0)
    }
}

impl From<std::io::Error> for Refused {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::Unreadable("it is no longer there".to_owned()),
            _ => Self::Unreadable(error.to_string()),
        }
    }
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self::Stop(Stop::Store(error))
    }
}

impl From<Stop> for Refused {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// The chunks of a document that is read as a whole, without looking at any collection.
pub fn chunks_of(
    input: &Input,
    splitter: &Splitter,
    options: &ReadOptions,
) -> Result<Vec<Chunk>, Unreadable> {
    let unreadable = |error: std::io::Error| Unreadable::new(error.to_string());
    let read_file;
    let bytes = match &input.content {
        Content::File(path) => {
            read::check_size(std::fs::metadata(path).map_err(unreadable)?.len(), options)?;
            read_file = std::fs::read(path).map_err(unreadable)?;
            &read_file
        }
        Content::Memory(bytes) | Content::Part(bytes) => bytes,
        Content::Stream(_) => return Err(Unreadable::new("a stream cannot be looked at before it is read")),
    };
    if input.kind.is_rows() {
        let mut keys = RowKeys::default();
        let mut chunks = Vec::new();
        for row in rows(input.kind, Cursor::new(bytes.clone()), options.max_row_bytes) {
            let row = row.map_err(|error| Unreadable::new(error.to_string()))?;
            let key = keys.key(&row).map_err(Unreadable::new)?;
            chunks.extend(row_chunks(splitter, &input.source, &key, row));
        }
        return Ok(chunks);
    }
    let text = read::read(input.kind, bytes, options)?;
    Ok(splitter.split(&origin(&input.source), &text))
}

fn origin(source: &str) -> Origin {
    let name = source.rsplit('/').next().unwrap_or(source);
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let title = if stem.is_empty() { name } else { stem };
    Origin {
        source: source.to_owned(),
        fallback_title: title.to_owned(),
    }
}

impl Preparation {
    pub(super) fn run(mut self, mut inputs: mpsc::Receiver<Input>) -> Result<(), Stop> {
        while let Some(input) = inputs.blocking_recv() {
            let source = input.source.clone();
            match self.prepare(input) {
                Ok(()) => {}
                Err(Refused::Unreadable(problem)) => {
                    self.progress.update(|report| report.fail(source, problem))
                }
                Err(Refused::Stop(stop)) => return Err(stop),
            }
        }
        Ok(())
    }

    fn prepare(&mut self, input: Input) -> Result<(), Refused> {
        if input.kind.is_rows() {
            return self.prepare_rows(input);
        }
        let bytes = match input.content {
            Content::File(path) => {
                read::check_size(std::fs::metadata(&path)?.len(), &self.read)?;
                std::fs::read(&path)?
            }
            Content::Memory(bytes) | Content::Part(bytes) => bytes,
            Content::Stream(reader) => {
                let mut bytes = Vec::new();
                reader.take(self.read.max_bytes + 1).read_to_end(&mut bytes)?;
                bytes
            }
        };
        let size = bytes.len() as u64;
        let fingerprint = self.fingerprint(&Sha256::digest(&bytes), input.kind);
        let before = self.before(&input.source)?;
        if before.is_current(&fingerprint, &self.model) {
            return Ok(self.send_unchanged(&input.source, &before, size)?);
        }
        let text = read::read(input.kind, &bytes, &self.read)?;
        drop(bytes);
        let chunks = self.splitter.split(&origin(&input.source), &text);
        let existing = self.existing(&plan::of_source(&input.source), before.chunks)?;
        let total = chunks.len() as u64;
        let plan = Plan::new(chunks, existing, before.all_again(&self.model));
        let manifest = Manifest {
            fingerprint,
            model: self.model.clone(),
            chunks: total,
            documents: 1,
        };
        let documents = plan.document();
        Ok(self.send_plan(&input.source, plan, documents, Some(manifest), size)?)
    }

    fn prepare_rows(&mut self, input: Input) -> Result<(), Refused> {
        let Input {
            source,
            kind,
            content,
        } = input;
        let whole = matches!(content, Content::File(_) | Content::Memory(_));
        let (digest, size, reader): (Option<Vec<u8>>, u64, Box<dyn Read>) = match content {
            Content::File(path) => {
                let mut file = File::open(&path)?;
                let mut hash = Sha256::new();
                let size = std::io::copy(&mut file, &mut hash)?;
                file.rewind()?;
                // Only what was hashed: a file that grows meanwhile has its new rows next time.
                (Some(hash.finalize().to_vec()), size, Box::new(file.take(size)))
            }
            Content::Memory(bytes) => (
                Some(Sha256::digest(&bytes).to_vec()),
                bytes.len() as u64,
                Box::new(Cursor::new(bytes)),
            ),
            Content::Part(bytes) => (None, bytes.len() as u64, Box::new(Cursor::new(bytes))),
            Content::Stream(reader) => (None, 0, reader),
        };
        let fingerprint = digest.map(|digest| self.fingerprint(&digest, kind));
        let before = self.before(&source)?;
        if let Some(fingerprint) = &fingerprint
            && before.is_current(fingerprint, &self.model)
        {
            return Ok(self.send_unchanged(&source, &before, size)?);
        }

        let mut state = RowsState {
            source,
            again: before.all_again(&self.model),
            was_there: before.chunks,
            keys: RowKeys::default(),
            met: 0,
            chunks: 0,
            documents: 0,
            failed: 0,
        };
        let consumed = Rc::new(Cell::new(0));
        let reader = Counted {
            inner: reader,
            bytes: Rc::clone(&consumed),
        };
        let mut window = Vec::new();
        let mut window_bytes = 0;
        for row in rows(kind, reader, self.read.max_row_bytes) {
            match row {
                Ok(row) => {
                    window_bytes += row.text.len();
                    window.push(row);
                }
                Err(bad) => {
                    state.failed += 1;
                    self.progress
                        .update(|report| report.fail(state.source.clone(), bad.to_string()));
                }
            }
            if window.len() >= WINDOW_ROWS || window_bytes >= WINDOW_BYTES {
                self.send_rows(&mut state, std::mem::take(&mut window), consumed.take())?;
                window_bytes = 0;
            }
        }
        self.send_rows(&mut state, window, consumed.take())?;
        Ok(self.finish_rows(state, fingerprint.filter(|_| whole))?)
    }

    /// Compares a group of rows with the collection and sends what is to be done.
    fn send_rows(&mut self, state: &mut RowsState, window: Vec<Row>, bytes: u64) -> Result<(), Stop> {
        let mut documents = Vec::with_capacity(window.len());
        let mut sections = Vec::with_capacity(window.len());
        for row in window {
            match state.keys.key(&row) {
                Ok(key) => {
                    let chunks = row_chunks(&self.splitter, &state.source, &key, row);
                    sections.push(section_id(&state.source, &key));
                    documents.push(chunks);
                }
                Err(problem) => {
                    state.failed += 1;
                    self.progress
                        .update(|report| report.fail(state.source.clone(), problem));
                }
            }
        }
        let existing = self.existing(&plan::of_sections(&state.source, &sections), state.was_there)?;
        state.met += existing.len() as u64;
        let mut existing = by_section(existing);
        let mut group = Finish {
            source: state.source.clone(),
            bytes,
            ..Finish::default()
        };
        for (section, chunks) in sections.into_iter().zip(documents) {
            let own = existing.remove(&section).unwrap_or_default();
            state.documents += 1;
            state.chunks += chunks.len() as u64;
            let plan = Plan::new(chunks, own, state.again);
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
                self.send(Step::Store(change, Box::new(chunk)))?;
            }
        }
        self.send(Step::Finish(Box::new(group)))
    }

    /// Rows that were there before and are no longer in the file go, unless a row could not be read:
    /// then nobody knows whether it was one of them.
    fn finish_rows(&mut self, state: RowsState, fingerprint: Option<String>) -> Result<(), Stop> {
        let Some(fingerprint) = fingerprint.filter(|_| state.failed == 0) else {
            return Ok(());
        };
        let mut finish = Finish {
            source: state.source.clone(),
            ..Finish::default()
        };
        if state.was_there > state.met {
            let existing = self.existing(&plan::of_source(&state.source), state.was_there)?;
            let mut vanished = std::collections::HashSet::new();
            for (id, metadata) in existing {
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
            }
            finish.chunks.removed = finish.remove.len() as u64;
            finish.documents.removed = vanished.len() as u64;
        }
        finish.manifest = Some(Manifest {
            fingerprint,
            model: self.model.clone(),
            chunks: state.chunks,
            documents: state.documents,
        });
        self.send(Step::Finish(Box::new(finish)))
    }

    fn send_plan(
        &mut self,
        source: &str,
        plan: Plan,
        documents: DocumentCounts,
        manifest: Option<Manifest>,
        bytes: u64,
    ) -> Result<(), Stop> {
        let finish = Finish {
            source: source.to_owned(),
            chunks: plan.counts(),
            remove: plan.remove,
            gone: plan.gone,
            manifest,
            documents,
            bytes,
        };
        for (change, chunk) in plan.store {
            self.send(Step::Store(change, Box::new(chunk)))?;
        }
        self.send(Step::Finish(Box::new(finish)))
    }

    fn send_unchanged(&mut self, source: &str, before: &Before, bytes: u64) -> Result<(), Stop> {
        let documents = before.manifest.as_ref().map_or(1, |manifest| manifest.documents);
        self.send(Step::Finish(Box::new(Finish {
            source: source.to_owned(),
            documents: DocumentCounts {
                unchanged: documents,
                ..DocumentCounts::default()
            },
            chunks: ChunkCounts {
                unchanged: before.chunks,
                ..ChunkCounts::default()
            },
            bytes,
            ..Finish::default()
        })))
    }

    fn send(&self, step: Step) -> Result<(), Stop> {
        self.steps.blocking_send(step).map_err(|_| Stop::Unwanted)
    }

    fn fingerprint(&self, digest: &[u8], kind: Kind) -> String {
        manifest::fingerprint(digest, kind.name(), self.chunk_tokens)
    }

    fn before(&self, source: &str) -> Result<Before, StoreError> {
        self.runtime.block_on(async {
            let manifest = manifest::load(self.records.as_ref(), &self.collection, source).await?;
            let chunks = plan::count(self.store.as_ref(), &self.collection, &plan::of_source(source)).await?;
            Ok(Before { manifest, chunks })
        })
    }

    fn existing(&self, filter: &ragstone_core::Filter, was_there: u64) -> Result<Existing, StoreError> {
        if was_there == 0 {
            return Ok(Existing::new());
        }
        self.runtime
            .block_on(plan::existing(self.store.as_ref(), &self.collection, filter))
    }
}

/// What is known of a source before it is read.
struct Before {
    manifest: Option<Manifest>,
    chunks: u64,
}

impl Before {
    fn is_current(&self, fingerprint: &str, model: &str) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| {
            manifest.fingerprint == fingerprint && manifest.model == model && manifest.chunks == self.chunks
        })
    }

    fn all_again(&self, model: &str) -> AllAgain {
        match &self.manifest {
            Some(manifest) if manifest.model != model => AllAgain::Yes,
            _ => AllAgain::No,
        }
    }
}

struct RowsState {
    source: String,
    again: AllAgain,
    /// Chunks of the source in the collection before this run, and how many of them were met again.
    was_there: u64,
    met: u64,
    keys: RowKeys,
    chunks: u64,
    documents: u64,
    failed: u64,
}

/// Counts what is read through it.
struct Counted<R> {
    inner: R,
    bytes: Rc<Cell<u64>>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.bytes.set(self.bytes.get() + count as u64);
        Ok(count)
    }
}

/// Gives every row a key that is its own within the file, and remembers them in few bytes each.
#[derive(Default)]
struct RowKeys(HashMap<u64, u32>);

impl RowKeys {
    /// The row's own id; or, without one, its content, counted where it comes again.
    fn key(&mut self, row: &Row) -> Result<String, String> {
        let (key, own) = match &row.id {
            Some(id) => (id.clone(), true),
            None => (content_hash(&row.text)[..16].to_owned(), false),
        };
        let count = self.0.entry(short_hash(&key)).or_default();
        *count += 1;
        match (*count, own) {
            (1, _) => Ok(key),
            (_, true) => Err(format!(
                "the id '{}' comes more than once",
                ragstone_core::collection::shorten(&key)
            )),
            (count, false) => {
                let key = format!("{key}-{count}");
                self.0.entry(short_hash(&key)).or_insert(1);
                Ok(key)
            }
        }
    }

    fn has_section(&self, source: &str, section: &str) -> bool {
        let key = section
            .strip_prefix(source)
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
    format!("{source}#{key}")
}

fn by_section(existing: Existing) -> HashMap<String, Existing> {
    let mut sections: HashMap<String, Existing> = HashMap::new();
    for (id, metadata) in existing {
        let section = metadata
            .get(keys::SECTION_ID)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        sections.entry(section).or_default().insert(id, metadata);
    }
    sections
}

/// A row's own metadata stays; what sibling gathering needs is added, and wins.
fn row_chunks(splitter: &Splitter, source: &str, key: &str, row: Row) -> Vec<Chunk> {
    let section = section_id(source, key);
    let pieces = splitter.pieces(&row.text);
    let alone = pieces.len() == 1;
    pieces
        .into_iter()
        .enumerate()
        .map(|(position, piece)| {
            let content_hash = content_hash(piece);
            let mut metadata: Metadata = row.metadata.clone();
            metadata.insert(keys::SOURCE.to_owned(), Value::from(source));
            if let Some(title) = &row.title {
                metadata.insert(keys::TITLE.to_owned(), Value::from(title.as_str()));
            }
            metadata.insert(keys::SECTION_ID.to_owned(), Value::from(section.as_str()));
            let path: Vec<Value> = row
                .title
                .iter()
                .map(|title| Value::from(title.as_str()))
                .collect();
            metadata.insert(keys::SECTION_PATH.to_owned(), Value::from(path));
            metadata.insert(keys::CHAPTER_ID.to_owned(), Value::from(source));
            metadata.insert(keys::DOC_TYPE.to_owned(), Value::from(row.doc_type.name()));
            metadata.insert(keys::POSITION.to_owned(), Value::from(position));
            metadata.insert(keys::CONTENT_HASH.to_owned(), Value::from(content_hash.as_str()));
            // A document that brought its id and was not cut is found under that id.
            let id = match &row.id {
                Some(id) if alone => document_id(id),
                _ => chunk_id(&section, position),
            };
            let document = Document {
                id,
                text: piece.to_owned(),
                metadata,
            };
            Chunk {
                document,
                content_hash,
                tokens: splitter.tokens(piece),
            }
        })
        .collect()
}
