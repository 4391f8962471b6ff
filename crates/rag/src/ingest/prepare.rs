//! Reading, splitting and planning, on a thread of its own, ahead of the embedding.

mod incoming;
mod rows;

use std::collections::{BTreeMap, HashSet};
use std::io::{Cursor, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
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
use self::rows::{RowKeys, row_chunks};
use super::chunk::{Chunk, Origin, Splitter};
use super::kind::Kind;
use super::manifest::{self, Manifest};
use super::plan::{self, Change, Existing, Plan};
use super::read::{self, ReadOptions, Unreadable};
use super::report::{ChunkCounts, DocumentCounts, Progress};
use super::rows::rows as read_rows;
use super::walk::{is_gone, path_of, source_name};

/// Something to be ingested.
pub struct Input {
    pub source: String,
    /// Where the file is, absolute, whatever it is called here; absent for what is no file.
    pub origin: Option<PathBuf>,
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
    Part(Vec<u8>, Earlier),
}

/// What a part of a file has to know of the parts before it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Earlier {
    /// How many lines they have.
    pub lines: u64,
    /// Rows of this part that came before: what they are known by, and how often they came.
    pub rows: BTreeMap<String, u32>,
}

impl Content {
    /// How much there is to be read, where that is known.
    fn bytes(&self) -> u64 {
        match self {
            Self::File(path) => std::fs::metadata(path).map_or(0, |about| about.len()),
            Self::Memory(bytes) | Self::Part(bytes, _) => bytes.len() as u64,
            Self::Stream(_) => 0,
        }
    }
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
    pub(super) store: Arc<dyn Storage>,
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
    Store(StorageError),
}

impl From<StorageError> for Stop {
    fn from(error: StorageError) -> Self {
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

/// The chunks of a document, without looking at any collection. Of a file of rows, those that cannot
/// be read are reported and the others are there.
pub fn chunks_of(
    input: &Input,
    splitter: &Splitter,
    options: &ReadOptions,
    bad_row: &mut dyn FnMut(String),
) -> Result<Vec<Chunk>, Unreadable> {
    let unreadable = |error: std::io::Error| Unreadable::new(error.to_string());
    let read_file;
    let bytes = match &input.content {
        Content::File(path) => {
            read::check_size(std::fs::metadata(path).map_err(unreadable)?.len(), options)?;
            read_file = std::fs::read(path).map_err(unreadable)?;
            &read_file
        }
        Content::Memory(bytes) | Content::Part(bytes, _) => bytes,
        Content::Stream(_) => return Err(Unreadable::new("a stream cannot be looked at before it is read")),
    };
    if input.kind.is_rows() {
        let mut keys = RowKeys::default();
        let mut chunks = Vec::new();
        for row in read_rows(input.kind, Cursor::new(bytes.clone()), options.max_row_bytes) {
            match row.and_then(|row| row_chunks(splitter, &input.source, &keys.key(&row)?, &row)) {
                Ok(of_row) => chunks.extend(of_row),
                Err(bad) => bad_row(bad.to_string()),
            }
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
            let bytes = input.content.bytes();
            // Parsers meet here what nobody thought of; one such document must not end the run.
            let prepared = catch_unwind(AssertUnwindSafe(|| self.prepare(input)));
            let gave_up = || {
                Err(Refused::Unreadable(
                    "it cannot be read: the parser gave up on it".to_owned(),
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
        let bytes = match input.content {
            Content::File(path) => {
                read::check_size(std::fs::metadata(&path)?.len(), &self.read)?;
                std::fs::read(&path)?
            }
            Content::Memory(bytes) | Content::Part(bytes, _) => bytes,
            Content::Stream(reader) => {
                let mut bytes = Vec::new();
                reader.take(self.read.max_bytes + 1).read_to_end(&mut bytes)?;
                bytes
            }
        };
        let size = bytes.len() as u64;
        let fingerprint = self.fingerprint(&Sha256::digest(&bytes), input.kind);
        let before = self.before(&input.source)?;
        before.check_origin(input.origin.as_deref())?;
        let on_disk = input.origin.as_deref().map(source_name);
        if before.is_current(&fingerprint, &self.model) {
            return Ok(self.send_unchanged(&input.source, on_disk, before, size)?);
        }
        let text = read::read(input.kind, &bytes, &self.read)?;
        drop(bytes);
        let chunks = self.splitter.split(&origin(&input.source), &text);
        let existing = self.existing(&input.source, before.chunks)?;
        let outdated = self.outdated(existing.keys().cloned().collect())?;
        let total = chunks.len() as u64;
        if total == 0 {
            self.progress
                .update(|report| report.warn(&input.source, "it has no text"));
        }
        let plan = Plan::new(chunks, existing, &outdated)
            .map_err(|id| Unreadable::new(format!("two parts of it would be document '{id}'")))?;
        let manifest = Manifest {
            source: input.source.clone(),
            origin: on_disk,
            fingerprint,
            model: self.model.clone(),
            chunks: total,
            documents: 1,
        };
        let mut documents = plan.document();
        if before.manifest.is_none() && total == 0 && documents.unchanged == 1 {
            // A document without any text is new like any other when it is first seen.
            (documents.added, documents.unchanged) = (1, 0);
        }
        Ok(self.send_plan(&input.source, plan, documents, Some(manifest), size)?)
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

    fn send_unchanged(
        &mut self,
        source: &str,
        origin: Option<String>,
        before: Before,
        bytes: u64,
    ) -> Result<(), Stop> {
        let documents = before.manifest.as_ref().map_or(1, |manifest| manifest.documents);
        // A checkout that was moved is at its new place from now on.
        let moved = before
            .manifest
            .filter(|manifest| origin.is_some() && (manifest.origin != origin || manifest.source != source))
            .map(|manifest| Manifest {
                source: source.to_owned(),
                origin,
                ..manifest
            });
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
            manifest: moved,
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

    fn before(&self, source: &str) -> Result<Before, StorageError> {
        self.runtime.block_on(async {
            let manifest = manifest::load(self.records.as_ref(), &self.collection, source).await?;
            let chunks = plan::count(self.store.as_ref(), &self.collection, &plan::of_source(source)).await?;
            Ok(Before { manifest, chunks })
        })
    }

    /// What the collection has of a source.
    fn existing(&self, source: &str, was_there: u64) -> Result<Existing, StorageError> {
        let mut existing = Existing::new();
        if was_there > 0 {
            self.each_existing(source, |id, metadata| {
                existing.insert(id, metadata);
            })?;
        }
        Ok(existing)
    }

    /// Those of these documents whose vectors are of another model, or of another version of it.
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

/// What is known of a source before it is read.
struct Before {
    manifest: Option<Manifest>,
    chunks: u64,
}

impl Before {
    /// Two files must not take turns in replacing each other under one name. A file that is no longer
    /// where it was gives its name to the one that is there now, and so does one of which nothing is
    /// left, because its documents were deleted, or the collection.
    fn check_origin(&self, origin: Option<&Path>) -> Result<(), Unreadable> {
        if self.chunks == 0 {
            return Ok(());
        }
        let known = self
            .manifest
            .as_ref()
            .and_then(|manifest| manifest.origin.as_deref());
        let (Some(known), Some(origin)) = (known.map(path_of), origin) else {
            return Ok(());
        };
        if known == origin || is_gone(&known) {
            return Ok(());
        }
        let same = |one: &Path, other: &Path| {
            std::fs::canonicalize(one)
                .is_ok_and(|one| std::fs::canonicalize(other).is_ok_and(|other| one == other))
        };
        if same(&known, origin) {
            return Ok(());
        }
        Err(Unreadable::new(format!(
            "it would replace what was ingested under the same name from {}; give --as NAME to keep them apart",
            known.display()
        )))
    }

    fn is_current(&self, fingerprint: &str, model: &str) -> bool {
        self.manifest.as_ref().is_some_and(|manifest| {
            manifest.fingerprint == fingerprint && manifest.model == model && manifest.chunks == self.chunks
        })
    }
}
