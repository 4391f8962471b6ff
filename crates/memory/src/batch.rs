//! One round of embedding: calls, vectors, and the new state of the entries.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt};
use ragstone_core::document::{Document, Metadata};
use ragstone_core::model::{CallLimits, EmbedInput, ModelError, RemoteFailure, RemoteFault, Role};
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange};
use ragstone_core::storage::{DocumentBatch, StorageError, StoredDocument};
use tokio::time::Instant;

use super::buffer::EmbedWorker;
use super::circuit::{Attempt, Failed};
use super::entry::MemoryKind;
use super::removal;
use super::stored::{EntryRecord, FAILED, forget_note, note_key, vector_id};
use ragstone_lease::{Leased, millis, now};

/// This part of the lease is reserved for storing vectors after the embedder has answered.
const STORING_PART: u32 = 6;
/// No model refuses this text by itself. A provider that does refuses everything.
const HARMLESS: &str = "ragstone";
/// A text that the model refuses is retried, but not often.
const REFUSED_DELAY_FACTOR: u32 = 24;

/// An entry that this process has the lease of.
#[derive(Debug, Clone)]
pub(super) struct Claimed {
    key: String,
    version: u64,
    stored: EntryRecord,
}

impl Claimed {
    /// A damaged record stays where it is, and is logged.
    pub(super) fn read(record: Record) -> Option<Self> {
        match EntryRecord::read(&record) {
            Ok(stored) => Some(Self {
                key: record.key,
                version: record.version,
                stored,
            }),
            Err(error) => {
                tracing::error!(id = %record.key, %error, "an entry of agent memory is damaged");
                None
            }
        }
    }

    fn kind(&self) -> MemoryKind {
        self.stored.entry.kind()
    }
}

impl Leased for Claimed {
    fn put(&self, run_at: Option<Millis>) -> Result<RecordChange, StorageError> {
        self.stored.put(&self.key, run_at, Expect::Version(self.version))
    }

    fn set_version(&mut self, version: u64) {
        self.version = version;
    }
}

/// The reason why an entry has no vector yet.
#[derive(Debug, Clone)]
struct BatchFailure {
    message: String,
    cause: Cause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The model refuses this very text.
    Text,
    /// The provider is down or misconfigured, or the store is unavailable. The text is not at fault.
    /// The duration is how long to wait at least.
    Outage(Duration),
    /// Another failure that may pass.
    Passing,
}

#[derive(Default)]
struct BatchOutcome {
    vectors: Vec<(Claimed, Vec<f32>)>,
    failures: Vec<(Claimed, BatchFailure)>,
    /// The first failure for which no text is to blame.
    down: Option<BatchFailure>,
}

impl BatchFailure {
    fn retry_after(&self) -> Duration {
        match self.cause {
            Cause::Outage(retry_after) => retry_after,
            Cause::Text | Cause::Passing => Duration::ZERO,
        }
    }
}

/// Embeds claimed entries, a few calls at a time. Returns the kinds of entries that were left.
///
/// The vectors of one call are stored even if others fail. No call begins after half of the time, for
/// it would not end in the other half, nor after another has failed.
pub(super) async fn round(
    worker: Arc<EmbedWorker>,
    claimed: Vec<Claimed>,
    lease_ends: Instant,
) -> Vec<MemoryKind> {
    let began = Instant::now();
    let storing = worker.options.lease / STORING_PART;
    let deadline = lease_ends.checked_sub(storing).unwrap_or(lease_ends);
    let last_start = began + deadline.saturating_duration_since(began) / 2;
    let mut limits = worker.embedder.limits();
    limits.texts = limits.texts.min(worker.options.batch);
    let worker = worker.as_ref();
    let left: Vec<Claimed> = stream::iter(into_batches(claimed, limits))
        .map(|batch| async move {
            if Instant::now() > last_start {
                return batch;
            }
            let Some(attempt) = worker.circuit.enter() else {
                return batch;
            };
            embed_and_store(worker, batch, attempt, deadline).await;
            Vec::new()
        })
        .buffer_unordered(worker.calls_at_once())
        .concat()
        .await;
    if left.is_empty() {
        worker.circuit.round_done(began);
        return Vec::new();
    }
    let records = worker.records.as_ref();
    let saved_at = |claimed: &Claimed| claimed.stored.saved_at;
    if let Err(error) = worker.leases.release(records, &left, saved_at).await {
        // They are due again when their lease runs out.
        tracing::warn!(%error, "entries that were not embedded could not be released");
    }
    let mut kinds: Vec<MemoryKind> = left.iter().map(Claimed::kind).collect();
    kinds.dedup();
    kinds
}

/// Stores each batch as soon as it is embedded: short writes let others in between.
async fn embed_and_store(worker: &EmbedWorker, batch: Vec<Claimed>, attempt: Attempt<'_>, deadline: Instant) {
    let oldest = |entries: &[Claimed]| entries.iter().map(|claimed| claimed.stored.saved_at).min();
    let oldest_of_batch = oldest(&batch);
    let mut outcome = embed(worker, batch, deadline).await;
    let embedded = outcome.vectors.len();
    let mut failed = outcome.down.take().map(|failure| (failure, oldest_of_batch));
    if let Err((claimed, error)) = store_vectors(worker, outcome.vectors).await {
        tracing::error!(%error, "vectors of agent memory could not be stored");
        let message = "the vector could not be stored";
        let failure = match error {
            StorageError::Unavailable { retry_after, .. } => {
                let failure = outage(&message, retry_after);
                failed.get_or_insert((failure.clone(), oldest(&claimed)));
                failure
            }
            _ => passing(&message),
        };
        outcome
            .failures
            .extend(claimed.into_iter().map(|claimed| (claimed, failure.clone())));
    } else {
        metrics::counter!("ragstone_memory_embedded_total").increment(embedded as u64);
    }
    match failed {
        None => attempt.succeeded(),
        Some((failure, oldest)) => attempt.failed(Failed {
            error: &failure.message,
            retry_after: failure.retry_after(),
            oldest,
        }),
    }
    if !outcome.failures.is_empty() {
        note_failures(worker, outcome.failures).await;
    }
}

/// Batches within the limits, of about equal size if their texts are short. A text above the limit is
/// a batch of its own.
fn into_batches(claimed: Vec<Claimed>, limits: CallLimits) -> Vec<Vec<Claimed>> {
    let count = claimed.len().div_ceil(limits.texts.max(1)).max(1);
    let size = claimed.len().div_ceil(count);
    let mut batches: Vec<Vec<Claimed>> = Vec::with_capacity(count);
    let mut bytes = 0_usize;
    for entry in claimed {
        let length = entry.stored.entry.content().len();
        match batches.last_mut() {
            Some(batch) if batch.len() < size && bytes + length <= limits.bytes => {
                bytes += length;
                batch.push(entry);
            }
            _ => {
                bytes = length;
                batches.push(vec![entry]);
            }
        }
    }
    batches
}

/// Embeds a batch in one call. If the model refuses the input, tries halves of it until the texts at
/// fault are alone.
async fn embed(worker: &EmbedWorker, batch: Vec<Claimed>, deadline: Instant) -> BatchOutcome {
    let mut outcome = BatchOutcome::default();
    let mut waiting = vec![batch];
    let mut takes_others = false;
    while let Some(mut batch) = waiting.pop() {
        let texts = batch
            .iter()
            .map(|claimed| claimed.stored.entry.content())
            .collect();
        let mut answer = call(worker, texts, deadline).await;
        if let Err(Refusal::OfProvider(failure)) = &answer
            && !takes_others
        {
            match call(worker, vec![HARMLESS.to_owned()], deadline).await {
                Ok(_) => takes_others = true,
                Err(_) => answer = Err(Refusal::Other(outage(failure, Duration::ZERO))),
            }
        }
        let failure = match answer {
            Ok(vectors) => {
                outcome.vectors.extend(batch.into_iter().zip(vectors));
                continue;
            }
            Err(Refusal::OfProvider(failure)) => text_at_fault(&failure),
            Err(Refusal::Other(failure)) => failure,
        };
        if failure.cause == Cause::Text && batch.len() > 1 {
            let rest = batch.split_off(batch.len() / 2);
            waiting.extend([rest, batch]);
            continue;
        }
        if failure.cause != Cause::Text {
            outcome.down.get_or_insert_with(|| failure.clone());
        }
        let failures = batch.into_iter().map(|claimed| (claimed, failure.clone()));
        outcome.failures.extend(failures);
    }
    outcome
}

/// A call without vectors.
enum Refusal {
    /// The provider refuses the request, because of a text in it or of its configuration.
    OfProvider(RemoteFailure),
    Other(BatchFailure),
}

fn text_at_fault(error: &impl ToString) -> BatchFailure {
    BatchFailure {
        message: error.to_string(),
        cause: Cause::Text,
    }
}

fn outage(error: &impl ToString, at_least: Duration) -> BatchFailure {
    BatchFailure {
        message: error.to_string(),
        cause: Cause::Outage(at_least),
    }
}

fn passing(error: &impl ToString) -> BatchFailure {
    BatchFailure {
        message: error.to_string(),
        cause: Cause::Passing,
    }
}

async fn call(worker: &EmbedWorker, texts: Vec<String>, deadline: Instant) -> Result<Vec<Vec<f32>>, Refusal> {
    let late = || {
        let late = "the embedding model did not answer in time";
        Err(Refusal::Other(outage(&late, Duration::ZERO)))
    };
    if Instant::now() >= deadline {
        return late();
    }
    let count = texts.len();
    let inputs: Vec<EmbedInput> = texts.into_iter().map(EmbedInput::Text).collect();
    metrics::counter!("ragstone_memory_embed_calls_total").increment(1);
    metrics::histogram!("ragstone_memory_embed_texts").record(count as f64);
    let started = Instant::now();
    let answer = tokio::time::timeout_at(deadline, worker.embedder.embed(inputs, Role::Passage)).await;
    metrics::histogram!("ragstone_memory_embed_seconds").record(started.elapsed().as_secs_f64());
    let Ok(answer) = answer else { return late() };
    match answer {
        Ok(embeddings) if embeddings.len() == count => {
            Ok(embeddings.into_iter().map(|embedding| embedding.vector).collect())
        }
        Ok(embeddings) => Err(Refusal::Other(passing(&format!(
            "the embedding model gave {} vectors for {count} texts",
            embeddings.len()
        )))),
        Err(ModelError::Remote(failure)) if matches!(failure.fault, RemoteFault::Refused { .. }) => {
            Err(Refusal::OfProvider(failure))
        }
        Err(error) => Err(Refusal::Other(match (&error, error.retry_after()) {
            (_, Some(at_least)) => outage(&error, at_least),
            (ModelError::InvalidInput(_), None) => text_at_fault(&error),
            (ModelError::Remote(failure), None) if failure.fault != RemoteFault::BadAnswer => {
                outage(&error, Duration::ZERO)
            }
            _ => passing(&error),
        })),
    }
}

/// Stores the vectors, then marks their entries done. Returns the entries if that fails.
async fn store_vectors(
    worker: &EmbedWorker,
    vectors: Vec<(Claimed, Vec<f32>)>,
) -> Result<(), (Vec<Claimed>, StorageError)> {
    let mut batches: HashMap<MemoryKind, Vec<StoredDocument>> = HashMap::new();
    let mut claimed = Vec::with_capacity(vectors.len());
    for (entry, vector) in vectors {
        match vector_document(&entry, vector) {
            Ok(document) => batches.entry(entry.kind()).or_default().push(document),
            Err(error) => return Err((vec![entry], error)),
        }
        claimed.push(entry);
    }
    let model = &worker.embedder.info().identity;
    let upserts = batches.into_iter().map(|(kind, documents)| async move {
        let batch = DocumentBatch {
            documents,
            model: Some(model.clone()),
        };
        worker.store.upsert(&kind.vectors(), batch).await
    });
    if let Err(error) = futures::future::try_join_all(upserts).await {
        return Err((claimed, error));
    }
    match mark_done(worker, &claimed, &model.version).await {
        Ok(()) => Ok(()),
        Err(error) => Err((claimed, error)),
    }
}

/// The text stays in the source store only: a vector leads to it by its id.
fn vector_document(claimed: &Claimed, vector: Vec<f32>) -> Result<StoredDocument, StorageError> {
    let metadata: Metadata = claimed.stored.entry.metadata();
    Ok(StoredDocument {
        document: Document {
            id: vector_id(&claimed.key)?,
            text: String::new(),
            metadata,
        },
        vector,
    })
}

async fn mark_done(worker: &EmbedWorker, claimed: &[Claimed], version: &str) -> Result<(), StorageError> {
    let changes = claimed
        .iter()
        .map(|entry| {
            let stored = EntryRecord {
                embedded_by: Some(version.to_owned()),
                ..entry.stored.clone().reset()
            };
            stored.put(&entry.key, None, Expect::Version(entry.version))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let applied = worker.records.apply(changes).await?;
    let mut changed: HashMap<MemoryKind, Vec<String>> = HashMap::new();
    for (entry, applied) in claimed.iter().zip(applied) {
        if applied == Applied::Skipped {
            changed.entry(entry.kind()).or_default().push(entry.key.clone());
        }
    }
    for (kind, mut keys) in changed {
        // A deleted entry must not keep its new vector. An entry that was saved again is due, unless it
        // was embedded meanwhile: then an older vector has just replaced its newer one.
        let mut found = worker.records.get(kind.records(), &keys).await?;
        keys.retain(|key| found.iter().all(|record| record.key != *key));
        removal::remove_vectors(worker.store.as_ref(), kind, &keys).await?;
        found.retain(|record| record.run_at.is_none());
        worker.records.apply(removal::embed_anew(&found)?).await?;
    }
    Ok(())
}

/// Makes entries due after a delay, or gives them up.
async fn note_failures(worker: &EmbedWorker, failures: Vec<(Claimed, BatchFailure)>) {
    metrics::counter!("ragstone_memory_embed_failures_total").increment(failures.len() as u64);
    if let Some((_, failure)) = failures.first() {
        tracing::warn!(entries = failures.len(), error = %failure.message, "agent memory could not be embedded");
    }
    if let Err(error) = write_failures(worker, failures).await {
        // The entries are due again, now or when their leases run out. With a store that cannot be
        // written, the provider would get the same texts over and over.
        worker.circuit.open(Failed {
            error: "failed entries could not be stored",
            retry_after: Duration::ZERO,
            oldest: None,
        });
        tracing::error!(%error, "failed entries could not be stored");
    }
}

async fn write_failures(
    worker: &EmbedWorker,
    failures: Vec<(Claimed, BatchFailure)>,
) -> Result<(), StorageError> {
    let options = &worker.options;
    let (mut notes, mut changes, mut given_up) = (Vec::new(), Vec::new(), Vec::new());
    // Behind entries that were not tried yet: one batch that fails must not delay all others.
    let after_outage = now() + millis(options.backoff.delay(worker.circuit.failures(), fastrand::f64()));
    for (claimed, failure) in failures {
        let mut stored = claimed.stored.clone();
        let is_refused = failure.cause == Cause::Text;
        if !matches!(failure.cause, Cause::Outage(_)) {
            stored.attempts += 1;
        }
        stored.error = Some(failure.message);
        let run_at = if matches!(failure.cause, Cause::Outage(_)) {
            Some(after_outage)
        } else if is_refused || stored.attempts >= options.backoff.max_attempts {
            let wait =
                options
                    .retry_failed_after
                    .saturating_mul(if is_refused { REFUSED_DELAY_FACTOR } else { 1 });
            notes.push(failed_note(&claimed, now() + millis(wait)));
            given_up.push(changes.len());
            None
        } else {
            Some(now() + millis(options.backoff.delay(stored.attempts, fastrand::f64())))
        };
        let change = stored.put(&claimed.key, run_at, Expect::Version(claimed.version))?;
        changes.push((claimed, change));
    }
    // Notes come first: a note without its entry is deleted later, but an entry that was given up
    // without a note would never be retried.
    if !notes.is_empty() {
        worker.records.apply(notes).await?;
    }
    let (claimed, changes): (Vec<_>, Vec<_>) = changes.into_iter().unzip();
    let applied = worker.records.apply(changes).await?;
    let stale: Vec<RecordChange> = given_up
        .into_iter()
        .filter(|at| applied.get(*at) == Some(&Applied::Skipped))
        .filter_map(|at| claimed.get(at))
        .map(|entry| forget_note(FAILED, entry.kind(), &entry.key))
        .collect();
    if !stale.is_empty() {
        worker.records.apply(stale).await?;
    }
    Ok(())
}

fn failed_note(claimed: &Claimed, run_at: Millis) -> RecordChange {
    RecordChange::Put {
        kind: FAILED.to_owned(),
        key: note_key(claimed.kind(), &claimed.key),
        group: String::new(),
        value: Vec::new(),
        run_at: Some(run_at),
        expect: Expect::Anything,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryEntry;

    fn claimed(count: usize) -> Vec<Claimed> {
        let entry = MemoryEntry::Knowledge {
            content: "c".into(),
            category: None,
        };
        (0..count)
            .map(|n| Claimed {
                key: n.to_string(),
                version: 1,
                stored: EntryRecord::new(entry.clone(), 0),
            })
            .collect()
    }

    #[test]
    fn batches_keep_order_and_are_even() {
        for (count, limit, sizes) in [
            (0, 4, vec![]),
            (4, 4, vec![4]),
            (5, 4, vec![3, 2]),
            (9, 4, vec![3, 3, 3]),
        ] {
            let limits = CallLimits {
                texts: limit,
                ..CallLimits::NONE
            };
            let batches = into_batches(claimed(count), limits);
            assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), sizes);
            let keys: Vec<String> = batches.concat().into_iter().map(|c| c.key).collect();
            assert_eq!(keys, (0..count).map(|n| n.to_string()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn batches_of_long_texts_are_smaller() {
        let mut entries = claimed(7);
        for (entry, length) in entries.iter_mut().zip([4, 6, 1, 50, 1, 9, 1]) {
            let content = "c".repeat(length);
            entry.stored.entry = MemoryEntry::Knowledge {
                content,
                category: None,
            };
        }
        let limits = CallLimits { texts: 4, bytes: 10 };
        let batches = into_batches(entries, limits);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1, 2, 1]);
    }
}
