//! A run: a pipeline that prepares, embeds and stores.
//!
//! One thread reads, splits and compares with the collection. One task gathers new chunks into batches
//! and hands several at a time to the model. One task stores finished batches in their order. Short
//! queues between them bound memory to a few batches.
//!
//! Dropping the run at any moment leaves a consistent collection: a batch is stored in one
//! transaction, and the manifest of a source is written after all of its chunks.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use ragstone_core::collection::{Collection, CollectionName};
use ragstone_core::document::DocumentId;
use ragstone_core::filter::{Filter, Scalar, Test};
use ragstone_core::model::{Embedder, Embedding, ModelError, ModelIdentity};
use ragstone_core::records::Records;
use ragstone_core::storage::{DocumentBatch, Page, Selection, StorageError, StoredDocument};
use serde_json::Value;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::chunk::{Chunk, Splitter, keys};
use super::embed::embed;
use super::manifest;
use super::plan::ChunkChange;
use super::prepare::{FinishedSource, Input, PipelineStep, Preparation, Stop};
use super::read::{DocumentReader, ReadOptions};
use super::report::{ChunkCounts, Progress};
use super::size::{self, TokenSizer};
use crate::ledger::{Ledger, LedgerEntry, LedgerKey, LedgerScope};
use ragstone_core::backend::BackendError;
use ragstone_core::error::InvalidInput;
use ragstone_core::service::Service;

/// A batch is about a second of work for a small model on a small machine.
const BATCH_TOKENS: usize = 8192;
const BATCH_CHUNKS: usize = 256;
/// Sources without a new chunk are recorded in groups of this many.
const BATCH_FINISHES: usize = 128;
/// A batch that is not full waits this long for more.
const BATCH_WINDOW: Duration = Duration::from_millis(20);
const STEPS_AHEAD: usize = 512;
/// Batches that are being embedded or wait to be stored.
const BATCHES_AHEAD: usize = 2;

/// With more collections than this, vectors are not checked for use elsewhere.
const MAX_LOOKED_INTO: usize = 64;

/// The store, models and settings of ingestion.
#[derive(Clone)]
pub struct Ingestion {
    pub service: Service,
    pub records: Arc<dyn Records>,
    /// Shared by all runs, so that content of two of them is embedded once.
    pub ledger: Ledger,
    pub read: ReadOptions,
    /// Attempts to reach a model that is busy or unavailable.
    pub attempts: u32,
}

#[derive(Debug, Clone)]
pub struct IngestTarget {
    pub collection: CollectionName,
    /// Default: up to 256, as far as the model reads.
    pub chunk_tokens: Option<usize>,
}

/// A run whose settings are checked.
pub struct PreparedTarget {
    embedder: Arc<dyn Embedder>,
    chunk_tokens: usize,
    collection: CollectionName,
}

impl Ingestion {
    /// Checks that the collection, its model and the chunk size fit together.
    pub async fn check(&self, target: &IngestTarget) -> Result<PreparedTarget, BackendError> {
        let collection = self.service.store.collection(&target.collection).await?;
        let embedder = Arc::clone(self.service.models.for_collection(&collection)?);
        check_width(&collection, &embedder.info().identity)?;
        let chunk_tokens = chunk_tokens(embedder.as_ref(), target.chunk_tokens)?;
        Ok(PreparedTarget {
            embedder,
            chunk_tokens,
            collection: target.collection.clone(),
        })
    }

    /// Ingests all inputs. Inputs that cannot be read are reported in the progress. An error means that
    /// the store or the model failed, and that the run can be repeated.
    pub async fn run(
        &self,
        prepared: PreparedTarget,
        inputs: mpsc::Receiver<Input>,
        progress: Arc<Progress>,
    ) -> Result<(), BackendError> {
        let (step_sender, steps) = mpsc::channel(STEPS_AHEAD);
        let is_dropped = {
            let steps = step_sender.clone();
            move || steps.is_closed()
        };
        let (batch_sender, batches) = mpsc::channel(BATCHES_AHEAD);
        let model = prepared.embedder.info().identity.clone();
        let run = Arc::new(IngestRun {
            service: self.service.clone(),
            records: Arc::clone(&self.records),
            ledger: self.ledger.clone(),
            collection: prepared.collection.clone(),
            embedder: Arc::clone(&prepared.embedder),
            model: model.clone(),
            progress: Arc::clone(&progress),
            attempts: self.attempts,
        });
        let preparation = Preparation {
            store: Arc::clone(&self.service.store),
            records: Arc::clone(&self.records),
            collection: prepared.collection,
            model: manifest::model_name(&model),
            splitter: Splitter::new(
                TokenSizer::new(prepared.embedder, prepared.chunk_tokens),
                prepared.chunk_tokens,
            )
            .cancelled_by(is_dropped.clone()),
            chunk_tokens: prepared.chunk_tokens,
            reader: DocumentReader::new(self.read.clone(), is_dropped),
            progress,
            runtime: Handle::current(),
            steps: step_sender,
        };
        let (ended_sender, ended) = oneshot::channel();
        // A thread outside of the runtime: it may wait for standard input, and must not delay the end
        // of the program. It ends when its steps are not received any more.
        std::thread::Builder::new()
            .name("ingest".to_owned())
            .spawn(move || {
                let _ = ended_sender.send(preparation.run(inputs));
            })
            .map_err(|error| ModelError::Unavailable(format!("no thread to read documents in: {error}")))?;
        let preparing = async {
            match ended.await {
                Ok(Ok(()) | Err(Stop::Cancelled)) => Ok(()),
                Ok(Err(Stop::Store(error))) => Err(BackendError::from(error)),
                Err(_) => Err(ModelError::Failed("reading documents ended unexpectedly".to_owned()).into()),
            }
        };
        tokio::try_join!(
            preparing,
            embed_batches(&run, steps, batch_sender),
            store_batches(&run, batches)
        )?;
        Ok(())
    }
}

pub fn chunk_tokens(embedder: &dyn Embedder, wanted: Option<usize>) -> Result<usize, InvalidInput> {
    let Some(wanted) = wanted else {
        return Ok(size::default_tokens(embedder));
    };
    let max = size::max_tokens(embedder).unwrap_or(8192);
    if (size::MIN_TOKENS..=max).contains(&wanted) {
        return Ok(wanted);
    }
    Err(InvalidInput::new(format!(
        "chunk_tokens must be from {} to {max} for model '{}', not {wanted}",
        size::MIN_TOKENS,
        embedder.info().identity.id
    )))
}

fn check_width(collection: &Collection, model: &ModelIdentity) -> Result<(), InvalidInput> {
    match collection.dimensions {
        Some(width) if width != model.dimensions => Err(InvalidInput::new(format!(
            "Embedding dimension mismatch: collection '{}' holds vectors of {width} dimensions, its model '{}' makes {}",
            collection.name, model.id, model.dimensions
        ))),
        _ => Ok(()),
    }
}

struct IngestRun {
    service: Service,
    records: Arc<dyn Records>,
    ledger: Ledger,
    collection: CollectionName,
    embedder: Arc<dyn Embedder>,
    model: ModelIdentity,
    progress: Arc<Progress>,
    attempts: u32,
}

#[derive(Default)]
struct ChunkBatch {
    chunks: Vec<(ChunkChange, Chunk)>,
    finishes: Vec<FinishedSource>,
    tokens: usize,
}

impl ChunkBatch {
    fn is_full(&self) -> bool {
        self.tokens >= BATCH_TOKENS
            || self.chunks.len() >= BATCH_CHUNKS
            || self.finishes.len() >= BATCH_FINISHES
    }

    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.finishes.is_empty()
    }

    fn add(&mut self, step: PipelineStep) {
        match step {
            PipelineStep::Store(change, chunk) => {
                self.tokens += chunk.tokens;
                self.chunks.push((change, *chunk));
            }
            PipelineStep::Finish(finish) => self.finishes.push(*finish),
        }
    }
}

/// A batch whose new content is being embedded.
struct EmbeddingBatch {
    batch: ChunkBatch,
    known: HashMap<LedgerKey, LedgerEntry>,
    new: Vec<LedgerKey>,
    vectors: AbortOnDrop<Result<Vec<Option<Embedding>>, BackendError>>,
}

/// A task that is aborted when dropped.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn embed_batches(
    run: &Arc<IngestRun>,
    mut steps: mpsc::Receiver<PipelineStep>,
    batches: mpsc::Sender<EmbeddingBatch>,
) -> Result<(), BackendError> {
    let mut batch = ChunkBatch::default();
    loop {
        let step = if batch.is_empty() {
            Ok(steps.recv().await)
        } else {
            tokio::time::timeout(BATCH_WINDOW, steps.recv()).await
        };
        let ended = matches!(step, Ok(None));
        let is_due = step.is_err();
        if let Ok(Some(step)) = step {
            batch.add(step);
        }
        // A batch grows while the model is busy.
        let idle = || batches.capacity() > 0;
        if (batch.is_full() || ended || (is_due && idle())) && !batch.is_empty() {
            let started = run.start(std::mem::take(&mut batch)).await?;
            if batches.send(started).await.is_err() {
                return Ok(());
            }
        }
        if ended {
            return Ok(());
        }
    }
}

async fn store_batches(
    run: &Arc<IngestRun>,
    mut batches: mpsc::Receiver<EmbeddingBatch>,
) -> Result<(), BackendError> {
    while let Some(started) = batches.recv().await {
        run.finish(started).await?;
    }
    Ok(())
}

impl IngestRun {
    fn key(&self, chunk: &Chunk) -> LedgerKey {
        LedgerKey::new(LedgerScope::Ingestion, &chunk.content_hash, &self.model)
    }

    /// Looks up known content and hands the rest to the model, each content once. Content that another
    /// batch is embedding, of this run or another, is taken from the ledger later.
    async fn start(self: &Arc<Self>, batch: ChunkBatch) -> Result<EmbeddingBatch, BackendError> {
        let keys: Vec<LedgerKey> = batch.chunks.iter().map(|(_, chunk)| self.key(chunk)).collect();
        // Claimed before the lookup, which then finds everything that was embedded until now.
        let mut turn = self.ledger.claim(&keys);
        let known = self.ledger.find(&keys).await?;
        turn.keep(|key| !known.contains_key(key));
        let mut new = Vec::new();
        let mut texts = Vec::new();
        for (key, (_, chunk)) in keys.into_iter().zip(&batch.chunks) {
            if turn.has(&key) && !new.contains(&key) {
                new.push(key);
                texts.push(chunk.document.text.clone());
            }
        }
        let (run, of_turn) = (Arc::clone(self), new.clone());
        let vectors = AbortOnDrop(tokio::spawn(async move {
            // Held until the vectors are in the ledger, and not until they are stored.
            let _turn = turn;
            let vectors = embed(run.embedder.as_ref(), texts, run.attempts).await?;
            run.ledger.record(entries(&of_turn, &vectors)).await?;
            Ok(vectors)
        }));
        Ok(EmbeddingBatch {
            batch,
            known,
            new,
            vectors,
        })
    }

    /// Waits for the vectors, stores the chunks, then records finished sources.
    async fn finish(&self, mut started: EmbeddingBatch) -> Result<(), BackendError> {
        let vectors = match (&mut started.vectors.0).await {
            Ok(vectors) => vectors?,
            Err(error) => {
                return Err(ModelError::Failed(format!("embedding was interrupted: {error}")).into());
            }
        };
        let EmbeddingBatch {
            batch,
            mut known,
            new,
            ..
        } = started;
        let tokens: u64 = vectors
            .iter()
            .flatten()
            .map(|embedding| embedding.tokens as u64)
            .sum();
        let embedded = vectors.iter().flatten().count() as u64;
        known.extend(entries(&new, &vectors));
        self.find_missing(&batch, &new, &mut known).await?;

        let mut refused: HashSet<String> = HashSet::new();
        let mut documents: HashMap<DocumentId, StoredDocument> = HashMap::with_capacity(batch.chunks.len());
        let mut order = Vec::with_capacity(batch.chunks.len());
        let mut stored = ChunkCounts::default();
        for (change, chunk) in batch.chunks {
            let Some(entry) = known.get(&self.key(&chunk)) else {
                refused.extend(source_of(&chunk));
                continue;
            };
            match change {
                ChunkChange::Added => stored.added += 1,
                ChunkChange::Changed => stored.changed += 1,
            }
            let id = chunk.document.id.clone();
            let document = StoredDocument {
                document: chunk.document,
                vector: entry.vector.clone(),
            };
            if documents.insert(id.clone(), document).is_none() {
                order.push(id);
            }
        }
        let documents: Vec<StoredDocument> = order.iter().filter_map(|id| documents.remove(id)).collect();
        self.progress.update(|report| {
            for source in &refused {
                report.fail(source, "the model could not embed a part of it");
            }
        });
        let batch_of_documents = DocumentBatch {
            documents,
            model: Some(self.model.clone()),
        };
        let (store, collection) = (Arc::clone(&self.service.store), self.collection.clone());
        let (progress, write) = (Arc::clone(&self.progress), self.progress.begin_write());
        // A task of its own: a batch that is stored while the run is dropped is counted all the same.
        let stored = tokio::spawn(async move {
            if !batch_of_documents.documents.is_empty() {
                store.upsert(&collection, batch_of_documents).await?;
            }
            progress.update(|report| {
                let chunks = stored.added + stored.changed;
                report.tokens += tokens;
                report.chunks.added += stored.added;
                report.chunks.changed += stored.changed;
                report.chunks.embedded += embedded;
                report.chunks.reused += chunks - embedded.min(chunks);
            });
            drop(write);
            Ok::<_, StorageError>(())
        });
        match stored.await {
            Ok(stored) => stored?,
            Err(error) => return Err(StorageError::Failed(Box::new(error)).into()),
        }
        self.note_finished(batch.finishes, &refused).await
    }

    /// Waits for content that another batch has in flight. Content that is not in the ledger then
    /// (because the model refused it, or its last document was removed) is embedded here.
    async fn find_missing(
        &self,
        batch: &ChunkBatch,
        tried: &[LedgerKey],
        known: &mut HashMap<LedgerKey, LedgerEntry>,
    ) -> Result<(), BackendError> {
        let mut missing: HashMap<LedgerKey, &str> = batch
            .chunks
            .iter()
            .map(|(_, chunk)| (self.key(chunk), chunk.document.text.as_str()))
            .filter(|(key, _)| !known.contains_key(key) && !tried.contains(key))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let keys: Vec<LedgerKey> = missing.keys().cloned().collect();
        let _turn = self.ledger.turn(keys.clone()).await;
        for (key, entry) in self.ledger.find(&keys).await? {
            missing.remove(&key);
            known.insert(key, entry);
        }
        let (keys, texts): (Vec<LedgerKey>, Vec<String>) = missing
            .into_iter()
            .map(|(key, text)| (key, text.to_owned()))
            .unzip();
        let vectors = embed(self.embedder.as_ref(), texts, self.attempts).await?;
        let entries = entries(&keys, &vectors);
        self.ledger.record(entries.clone()).await?;
        known.extend(entries);
        Ok(())
    }

    async fn note_finished(
        &self,
        finishes: Vec<FinishedSource>,
        refused: &HashSet<String>,
    ) -> Result<(), BackendError> {
        let mut remove = Vec::new();
        let mut gone = BTreeSet::new();
        let mut notes = Vec::new();
        for finish in &finishes {
            remove.extend(finish.remove.iter().cloned());
            gone.extend(finish.gone.iter().cloned());
            if let Some(note) = finish
                .manifest
                .as_ref()
                .filter(|_| !refused.contains(&finish.source))
            {
                notes.push(manifest::put(&self.collection, &finish.source, note));
            }
        }
        if !remove.is_empty() {
            self.service
                .store
                .delete_documents(&self.collection, Selection::Ids(remove))
                .await?;
        }
        self.forget_unused(gone).await?;
        if !notes.is_empty() {
            self.records.apply(notes).await?;
        }
        self.progress.update(|report| {
            for finish in &finishes {
                report.bytes += finish.bytes;
                report.chunks.unchanged += finish.chunks.unchanged;
                report.chunks.removed += finish.chunks.removed;
                report.documents.removed += finish.documents.removed;
                if !refused.contains(&finish.source) {
                    report.documents.added += finish.documents.added;
                    report.documents.changed += finish.documents.changed;
                    report.documents.unchanged += finish.documents.unchanged;
                }
            }
        });
        Ok(())
    }
}

impl IngestRun {
    /// Removes vectors of texts that no document has any more, in any collection: a vector reveals
    /// much of its text. Where that cannot be decided (a write-only process has no index of contents)
    /// or would take long, vectors stay.
    async fn forget_unused(&self, mut hashes: BTreeSet<String>) -> Result<(), BackendError> {
        if hashes.is_empty() {
            return Ok(());
        }
        let collections = self.service.store.collections().await?;
        if collections.len() > MAX_LOOKED_INTO {
            return Ok(());
        }
        for collection in collections {
            match self.drop_used(&collection.name, &mut hashes).await {
                // Deleted meanwhile, with its documents.
                Ok(()) | Err(StorageError::CollectionNotFound(_)) => {}
                Err(StorageError::Unsupported(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        let keys = hashes
            .iter()
            .map(|hash| LedgerKey::new(LedgerScope::Ingestion, hash, &self.model));
        Ok(self.ledger.forget(keys.collect()).await?)
    }

    /// Keeps the hashes of contents that no document of the collection has.
    async fn drop_used(
        &self,
        collection: &CollectionName,
        hashes: &mut BTreeSet<String>,
    ) -> Result<(), StorageError> {
        while !hashes.is_empty() {
            let filter = Filter::Field {
                name: keys::CONTENT_HASH.to_owned(),
                test: Test::OneOf(
                    hashes
                        .iter()
                        .map(|hash| Scalar::Text(hash.as_str().into()))
                        .collect(),
                ),
            };
            let page = Page {
                limit: hashes.len(),
                offset: 0,
            };
            let found = self.service.store.documents(collection, &filter, page).await?;
            for document in &found.documents {
                if let Some(hash) = document.metadata.get(keys::CONTENT_HASH).and_then(Value::as_str) {
                    hashes.remove(hash);
                }
            }
            if found.documents.len() as u64 >= found.total {
                break;
            }
        }
        Ok(())
    }
}

/// Ledger entries, without texts that the model refused.
fn entries(keys: &[LedgerKey], vectors: &[Option<Embedding>]) -> Vec<(LedgerKey, LedgerEntry)> {
    let entry = |(key, embedding): (&LedgerKey, &Option<Embedding>)| {
        let entry = LedgerEntry {
            embedding_id: key.embedding_id(),
            vector: embedding.as_ref()?.vector.clone(),
        };
        Some((key.clone(), entry))
    };
    keys.iter().zip(vectors).filter_map(entry).collect()
}

fn source_of(chunk: &Chunk) -> Option<String> {
    chunk
        .document
        .metadata
        .get(keys::SOURCE)
        .and_then(|s| s.as_str())
        .map(str::to_owned)
}
