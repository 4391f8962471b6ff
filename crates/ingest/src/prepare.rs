//! The first stage of a run: reading, splitting and planning, on a thread of its own.

mod incoming;
mod rows;

use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use ragstone_core::collection::CollectionName;
use ragstone_core::document::{DocumentId, Metadata};
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::Records;
use ragstone_core::storage::{Storage, StorageError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::sync::mpsc;

pub use self::rows::{FileRows, ROWS_STAY};
use self::rows::{MAX_REPEATED_BYTES, RowContent, RowKeys, replaced_fields, row_chunks};
use super::chunk::{Chunk, DocumentInfo, Splitter, keys};
use super::kind::FileKind;
use super::manifest::{self, Manifest};
use super::plan::{self, ChunkChange, ChunkPlan, Existing};
use super::read::{self, DocumentReader, ReadOptions, Unreadable};
use super::report::{ChunkCounts, DocumentCounts, Progress};
use super::rows::{MAX_METADATA_BYTES, metadata_bytes, rows as read_rows};

/// A document, or a file of rows, to be ingested.
pub struct Input {
    pub source: String,
    pub kind: FileKind,
    pub content: Content,
    pub options: InputOptions,
}

/// Properties of a document that are given beside it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct InputOptions {
    /// Machine and absolute path that it was read from, see [`origin`](super::known::origin).
    #[serde(default)]
    pub origin: Option<String>,
    /// Metadata of every chunk. Fields of the document itself take precedence.
    #[serde(default)]
    pub metadata: Metadata,
    /// Store the cells of a CSV file as strings.
    #[serde(default)]
    pub csv_as_text: bool,
}

pub enum Content {
    /// Read when its turn comes.
    File(PathBuf),
    Memory(Vec<u8>),
    /// Rows that arrive as they are made. Rows that are missing are not removed.
    Stream(Box<dyn Read + Send>),
    /// Some rows of a source. The others are in other parts.
    Part(Vec<u8>, Earlier),
}

/// Context of a part of a file: the parts before it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    /// Number of their lines.
    pub lines: u64,
    /// Rows of this part that came before: their keys, and how often they came.
    pub rows: BTreeMap<String, u32>,
}

impl Content {
    /// Everything, where it is not too much.
    fn read(self, options: &ReadOptions) -> std::io::Result<Result<Vec<u8>, Unreadable>> {
        let mut bytes = Vec::new();
        match self {
            Self::File(path) => {
                if let Err(too_large) = read::check_size(std::fs::metadata(&path)?.len(), options) {
                    return Ok(Err(too_large));
                }
                bytes = std::fs::read(&path)?;
            }
            Self::Memory(memory) | Self::Part(memory, _) => bytes = memory,
            Self::Stream(reader) => {
                reader.take(options.max_bytes + 1).read_to_end(&mut bytes)?;
            }
        }
        Ok(Ok(bytes))
    }

    /// Size, where it is known.
    fn bytes(&self) -> u64 {
        match self {
            Self::File(path) => std::fs::metadata(path).map_or(0, |about| about.len()),
            Self::Memory(bytes) | Self::Part(bytes, _) => bytes.len() as u64,
            Self::Stream(_) => 0,
        }
    }
}

/// Work for the later stages, in this order.
pub(super) enum PipelineStep {
    Store(ChunkChange, Box<Chunk>),
    /// All chunks of a document, or of a group of rows, came before.
    Finish(Box<FinishedSource>),
}

#[derive(Default)]
pub(super) struct FinishedSource {
    pub(super) source: String,
    pub(super) remove: Vec<DocumentId>,
    pub(super) gone: Vec<String>,
    pub(super) manifest: Option<Manifest>,
    pub(super) documents: DocumentCounts,
    pub(super) chunks: ChunkCounts,
    pub(super) bytes: u64,
}

pub(super) struct Preparation {
    pub(super) store: Arc<dyn Storage>,
    pub(super) records: Arc<dyn Records>,
    pub(super) collection: CollectionName,
    /// See [`manifest::model_name`].
    pub(super) model: String,
    pub(super) splitter: Splitter,
    pub(super) chunk_tokens: usize,
    pub(super) reader: DocumentReader,
    pub(super) progress: Arc<Progress>,
    pub(super) runtime: Handle,
    pub(super) steps: mpsc::Sender<PipelineStep>,
}

/// The reason that preparing ends before the last input.
pub(super) enum Stop {
    /// The run was dropped.
    Cancelled,
    Store(StorageError),
}

impl From<StorageError> for Stop {
    fn from(error: StorageError) -> Self {
        Self::Store(error)
    }
}

/// The reason that one input is not ingested.
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

impl From<StorageError> for Refused {
    fn from(error: StorageError) -> Self {
        Self::Stop(Stop::Store(error))
    }
}

impl From<Stop> for Refused {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}

/// Visits the chunks of a document without looking at any collection. Rows that cannot be read are
/// reported to `bad_row`.
pub fn each_chunk(
    input: Input,
    splitter: &Splitter,
    reader: &mut DocumentReader,
    visit: &mut dyn FnMut(Chunk) -> std::io::Result<()>,
    bad_row: &mut dyn FnMut(String),
) -> Result<(), Unreadable> {
    let failed = |error: std::io::Error| Unreadable::new(error.to_string());
    if !input.kind.is_rows() {
        let bytes = input.content.read(&reader.options).map_err(failed)??;
        let text = reader.read(input.kind, bytes)?;
        let info = document_info(&input.source, input.options.metadata);
        return splitter
            .split(&info, &text)
            .into_iter()
            .try_for_each(visit)
            .map_err(failed);
    }
    let max_row_bytes = reader.options.max_row_bytes;
    let RowContent { reader, types, .. } =
        RowContent::open(input.content, input.kind, &input.options, max_row_bytes).map_err(failed)?;
    let mut keys = RowKeys::default();
    for row in read_rows(input.kind, reader, max_row_bytes, types) {
        let chunks = row.and_then(|row| {
            let row = row.with_defaults(&input.options.metadata);
            row_chunks(splitter, &input.source, &keys.key(&row)?, &row)
        });
        match chunks {
            Ok(chunks) => chunks.into_iter().try_for_each(&mut *visit).map_err(failed)?,
            Err(bad) => bad_row(bad.to_string()),
        }
    }
    Ok(())
}

fn document_info(source: &str, metadata: Metadata) -> DocumentInfo {
    let name = source.rsplit('/').next().unwrap_or(source);
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let title = if stem.is_empty() { name } else { stem };
    DocumentInfo {
        source: source.to_owned(),
        fallback_title: title.to_owned(),
        metadata,
    }
}

impl Preparation {
    pub(super) fn run(mut self, mut inputs: mpsc::Receiver<Input>) -> Result<(), Stop> {
        while let Some(input) = inputs.blocking_recv() {
            let source = input.source.clone();
            let bytes = input.content.bytes();
            // A parser that panics must not end the run.
            let prepared = catch_unwind(AssertUnwindSafe(|| self.prepare(input)));
            let gave_up = || {
                Err(Refused::Unreadable(
                    "it cannot be read: the parser failed".to_owned(),
                ))
            };
            match prepared.unwrap_or_else(|_| gave_up()) {
                Ok(()) => {}
                Err(Refused::Unreadable(problem)) => {
                    self.progress.update(|report| {
                        report.bytes += bytes;
                        report.failed_bytes += bytes;
                        report.fail(source, problem);
                    });
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
        let bytes = input.content.read(&self.reader.options)??;
        let size = bytes.len() as u64;
        let fingerprint = self.fingerprint(&Sha256::digest(&bytes), input.kind, &input.options);
        let before = self.before(&input.source)?;
        let InputOptions { origin, metadata, .. } = input.options;
        if before.is_current(&fingerprint, &self.model) {
            return Ok(self.send_unchanged(&input.source, origin, before, size)?);
        }
        let text = self.reader.read(input.kind, bytes)?;
        let info = document_info(&input.source, metadata);
        let chunks = self.splitter.split(&info, &text);
        self.check_metadata(&info, &chunks)?;
        let existing = self.existing(&input.source, before.chunks)?;
        let outdated = self.outdated(existing.keys().cloned().collect())?;
        let total = chunks.len() as u64;
        if total == 0 {
            self.progress
                .update(|report| report.warn(&input.source, "it has no text"));
        }
        let plan = ChunkPlan::new(chunks, existing, &outdated)
            .map_err(|id| Unreadable::new(format!("two of its chunks have the same id '{id}'")))?;
        let manifest = Manifest {
            source: input.source.clone(),
            origin,
            fingerprint,
            model: self.model.clone(),
            chunks: total,
            documents: 1,
        };
        let mut documents = plan.document();
        if before.manifest.is_none() && total == 0 && documents.unchanged == 1 {
            // A document without text counts as added when it is first seen.
            (documents.added, documents.unchanged) = (1, 0);
        }
        Ok(self.send_plan(&input.source, plan, documents, Some(manifest), size)?)
    }

    /// Every chunk repeats the metadata, and all chunks of a document are in memory together.
    fn check_metadata(&self, info: &DocumentInfo, chunks: &[Chunk]) -> Result<(), Unreadable> {
        let Some(first) = chunks.first() else {
            return Ok(());
        };
        let bytes = metadata_bytes(&first.document.metadata);
        if bytes > MAX_METADATA_BYTES || bytes.saturating_mul(chunks.len()) > MAX_REPEATED_BYTES {
            return Err(Unreadable::new(format!(
                "its metadata has {bytes} bytes, which each of its {} chunks repeats",
                chunks.len()
            )));
        }
        let replaced = |name: &&&str| **name != keys::TITLE && info.metadata.contains_key(**name);
        let replaced: Vec<&str> = keys::ALL.iter().filter(replaced).copied().collect();
        if !replaced.is_empty() {
            let warning = replaced_fields(&replaced);
            self.progress.update(|report| report.warn(&info.source, warning));
        }
        Ok(())
    }

    fn send_plan(
        &mut self,
        source: &str,
        plan: ChunkPlan,
        documents: DocumentCounts,
        manifest: Option<Manifest>,
        bytes: u64,
    ) -> Result<(), Stop> {
        let finish = FinishedSource {
            source: source.to_owned(),
            chunks: plan.counts(),
            remove: plan.remove,
            gone: plan.gone,
            manifest,
            documents,
            bytes,
        };
        for (change, chunk) in plan.store {
            self.send(PipelineStep::Store(change, Box::new(chunk)))?;
        }
        self.send(PipelineStep::Finish(Box::new(finish)))
    }

    fn send_unchanged(
        &mut self,
        source: &str,
        origin: Option<String>,
        before: Before,
        bytes: u64,
    ) -> Result<(), Stop> {
        let documents = before.manifest.as_ref().map_or(1, |manifest| manifest.documents);
        // A folder that was moved is found at its new path from now on.
        let moved = before
            .manifest
            .filter(|manifest| origin.is_some() && (manifest.origin != origin || manifest.source != source))
            .map(|manifest| Manifest {
                source: source.to_owned(),
                origin,
                ..manifest
            });
        self.send(PipelineStep::Finish(Box::new(FinishedSource {
            source: source.to_owned(),
            documents: DocumentCounts {
                unchanged: documents,
                ..DocumentCounts::default()
            },
            chunks: ChunkCounts {
                unchanged: before.chunks,
                ..ChunkCounts::default()
            },
            manifest: moved,
            bytes,
            ..FinishedSource::default()
        })))
    }

    fn send(&self, step: PipelineStep) -> Result<(), Stop> {
        self.steps.blocking_send(step).map_err(|_| Stop::Cancelled)
    }

    fn fingerprint(&self, digest: &[u8], kind: FileKind, options: &InputOptions) -> String {
        manifest::fingerprint(digest, kind.name(), self.chunk_tokens, options)
    }

    fn before(&self, source: &str) -> Result<Before, StorageError> {
        self.runtime.block_on(async {
            let manifest = manifest::load(self.records.as_ref(), &self.collection, source).await?;
            let chunks = plan::count(self.store.as_ref(), &self.collection, &plan::of_source(source)).await?;
            Ok(Before { manifest, chunks })
        })
    }

    /// The chunks of a source in the collection.
    fn existing(&self, source: &str, was_there: u64) -> Result<Existing, StorageError> {
        let mut existing = Existing::new();
        if was_there > 0 {
            self.each_existing(source, |id, metadata| {
                existing.insert(id, metadata);
            })?;
        }
        Ok(existing)
    }

    /// Those of the documents whose vectors are of another model or version.
    fn outdated(&self, ids: Vec<DocumentId>) -> Result<HashSet<DocumentId>, StorageError> {
        if ids.is_empty() {
            return Ok(HashSet::new());
        }
        let made_by = self.store.models_by_id(&self.collection, &ids);
        let made_by = self.runtime.block_on(made_by)?;
        let is_other = |model: Option<ModelIdentity>| {
            model.is_none_or(|model| manifest::model_name(&model) != self.model)
        };
        let outdated = made_by
            .into_iter()
            .filter_map(|(id, model)| is_other(model).then_some(id));
        Ok(outdated.collect())
    }

    fn each_existing(
        &self,
        source: &str,
        visit: impl FnMut(DocumentId, Metadata) + Send,
    ) -> Result<(), StorageError> {
        let filter = plan::of_source(source);
        let visits = plan::each(self.store.as_ref(), &self.collection, &filter, visit);
        self.runtime.block_on(visits)
    }
}

/// The state of a source before it is read.
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
}
