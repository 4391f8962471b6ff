//! One round of embedding: calls, vectors, and what becomes of the entries.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt};
use ragstone_core::document::{Document, Metadata};
use ragstone_core::model::{CallLimits, EmbedInput, ModelError, RemoteFailure, RemoteFault, Role};
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange};
use ragstone_core::storage::{DocumentBatch, StorageError, StoredDocument};
use tokio::time::Instant;

use super::buffer::{Ownership, Worker};
use super::circuit::{Attempt, Failed};
use super::entry::Kind;
use super::stored::{FAILED, Stored, forget_note, note_key, vector_id};
use super::{now, removal};

/// This part of the lease is left for storing vectors once the embedder has answered.
const STORING: u32 = 6;
/// No model refuses this for itself: whoever does refuses everything.
const HARMLESS: &str = "ragstone";
/// Text that the model refuses is tried again, but not often.
const REFUSED_WAITS: u32 = 24;

/// An entry that this process has the lease of.
#[derive(Debug, Clone)]
pub(super) struct Claimed {
    key: String,
    version: u64,
    stored: Stored,
}

impl Claimed {
    /// A record that cannot be read stays where it is, and the log says so.
    pub(super) fn read(record: Record) -> Option<Self> {
        match Stored::read(&record) {
            Ok(stored) => Some(Self {
                key: record.key,
                version: record.version,
                stored,
            }),
            Err(error) => {
                tracing::error!(id = %record.key, %error, "an entry of agent memory cannot be read");
                None
            }
        }
    }

    fn kind(&self) -> Kind {
        self.stored.entry.kind()
    }
}

/// Why an entry has no vector yet.
#[derive(Debug, Clone)]
struct Failure {
    message: String,
    cause: Cause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The model refuses this very text.
    Text,
    /// The provider is down or wrongly configured, or the store is away, which is not for the text to
    /// pay for; it is left alone for at least this long.
    Outage(Duration),
    /// Something went wrong that may not the next time.
    Passing,
}

#[derive(Default)]
struct Outcome {
    vectors: Vec<(Claimed, Vec<f32>)>,
    failures: Vec<(Claimed, Failure)>,
    /// The first failure for which no text is to blame.
    down: Option<Failure>,
}

impl Failure {
    fn retry_after(&self) -> Duration {
        match self.cause {
            Cause::Outage(retry_after) => retry_after,
            Cause::Text | Cause::Passing => Duration::ZERO,
        }
    }
}

/// Embeds what was claimed, a few calls at a time. Gives the kinds of which something was left.
///
/// What one call brings is stored, whatever becomes of the others. None is begun after half of the
/// time: as calls go, it would not end in the other half. Nor after another has failed.
pub(super) async fn round(worker: Arc<Worker>, claimed: Vec<Claimed>, lease_ends: Instant) -> Vec<Kind> {
    let began = Instant::now();
    let storing = worker.options.lease / STORING;
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
    if let Err(error) = give_back(worker, &left).await {
        // They are due again when their lease runs out.
        tracing::warn!(%error, "entries that were not embedded could not be given back");
    }
    let mut kinds: Vec<Kind> = left.iter().map(Claimed::kind).collect();
    kinds.dedup();
    kinds
}

/// Makes entries that nothing was done with due again.
async fn give_back(worker: &Worker, entries: &[Claimed]) -> Result<(), StorageError> {
    if worker.options.ownership == Ownership::Exclusive {
        return Ok(());
    }
    let changes = entries
        .iter()
        .map(|claimed| {
            let (due, expect) = (claimed.stored.saved_at, Expect::Version(claimed.version));
            claimed.stored.put(&claimed.key, Some(due), expect)
        })
        .collect::<Result<Vec<_>, _>>()?;
    worker.records.apply(changes).await?;
    Ok(())
}

/// Stores each batch as soon as it is embedded: short writes let others in between.
async fn embed_and_store(worker: &Worker, batch: Vec<Claimed>, attempt: Attempt<'_>, deadline: Instant) {
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

/// Batches within the limits, of about one size where their texts are short. A text that is too long
/// by itself is a batch of its own.
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

/// Embeds a batch in one call. Where the model refuses the input, halves of it are tried, until the
/// texts at fault are alone.
async fn embed(worker: &Worker, batch: Vec<Claimed>, deadline: Instant) -> Outcome {
    let mut outcome = Outcome::default();
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

/// Why a call brought no vectors.
enum Refusal {
    /// A provider refuses the request, for a text in it or for what is configured.
    OfProvider(RemoteFailure),
    Other(Failure),
}

fn text_at_fault(error: &impl ToString) -> Failure {
    Failure {
        message: error.to_string(),
        cause: Cause::Text,
    }
}

fn outage(error: &impl ToString, at_least: Duration) -> Failure {
    Failure {
        message: error.to_string(),
        cause: Cause::Outage(at_least),
    }
}

fn passing(error: &impl ToString) -> Failure {
    Failure {
        message: error.to_string(),
        cause: Cause::Passing,
    }
}

async fn call(worker: &Worker, texts: Vec<String>, deadline: Instant) -> Result<Vec<Vec<f32>>, Refusal> {
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

/// Stores the vectors, then marks their entries done; gives the entries back when that fails.
async fn store_vectors(
    worker: &Worker,
    vectors: Vec<(Claimed, Vec<f32>)>,
) -> Result<(), (Vec<Claimed>, StorageError)> {
    let mut batches: HashMap<Kind, Vec<StoredDocument>> = HashMap::new();
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

/// The text stays in the source store alone: a vector leads to it by its id.
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

async fn mark_done(worker: &Worker, claimed: &[Claimed], version: &str) -> Result<(), StorageError> {
    let changes = claimed
        .iter()
        .map(|entry| {
            let stored = Stored {
                embedded_by: Some(version.to_owned()),
                ..entry.stored.clone().again()
            };
            stored.put(&entry.key, None, Expect::Version(entry.version))
        })
        .collect::<Result<Vec<_>, _>>()?;
    let applied = worker.records.apply(changes).await?;
    let mut changed: HashMap<Kind, Vec<String>> = HashMap::new();
    for (entry, applied) in claimed.iter().zip(applied) {
        if applied == Applied::Skipped {
            changed.entry(entry.kind()).or_default().push(entry.key.clone());
        }
    }
    for (kind, mut keys) in changed {
        // What was deleted must not keep the vector it just got. What was saved again is due again,
        // unless it was embedded meanwhile: then its vector has just been replaced by an older one.
        let mut found = worker.records.get(kind.records(), &keys).await?;
        keys.retain(|key| found.iter().all(|record| record.key != *key));
        removal::remove_vectors(worker.store.as_ref(), kind, &keys).await?;
        found.retain(|record| record.due.is_none());
        worker.records.apply(removal::embed_again(&found)?).await?;
    }
    Ok(())
}

/// Makes entries due again after a pause, or gives them up.
async fn note_failures(worker: &Worker, failures: Vec<(Claimed, Failure)>) {
    metrics::counter!("ragstone_memory_embed_failures_total").increment(failures.len() as u64);
    if let Some((_, failure)) = failures.first() {
        tracing::warn!(entries = failures.len(), error = %failure.message, "agent memory could not be embedded");
    }
    if let Err(error) = write_failures(worker, failures).await {
        // The entries are due again, at once or when their leases run out. A store that cannot be
        // written to would have the provider asked for the same texts again and again.
        worker.circuit.open(Failed {
            error: "the failure of a call could not be noted",
            retry_after: Duration::ZERO,
            oldest: None,
        });
        tracing::error!(%error, "failures of embedding could not be noted");
    }
}

async fn write_failures(worker: &Worker, failures: Vec<(Claimed, Failure)>) -> Result<(), StorageError> {
    let options = &worker.options;
    let (mut notes, mut changes, mut given_up) = (Vec::new(), Vec::new(), Vec::new());
    // Behind those that have not been tried, lest one batch that cannot be embedded hold up all others.
    let after_outage = now() + millis(options.backoff.delay(worker.circuit.failures(), fastrand::f64()));
    for (claimed, failure) in failures {
        let mut stored = claimed.stored.clone();
        let is_refused = failure.cause == Cause::Text;
        if !matches!(failure.cause, Cause::Outage(_)) {
            stored.attempts += 1;
        }
        stored.error = Some(failure.message);
        let due = if matches!(failure.cause, Cause::Outage(_)) {
            Some(after_outage)
        } else if is_refused || stored.attempts >= options.backoff.max_attempts {
            let wait = options
                .retry_failed_after
                .saturating_mul(if is_refused { REFUSED_WAITS } else { 1 });
            notes.push(failed_note(&claimed, now() + millis(wait)));
            given_up.push(changes.len());
            None
        } else {
            Some(now() + millis(options.backoff.delay(stored.attempts, fastrand::f64())))
        };
        let change = stored.put(&claimed.key, due, Expect::Version(claimed.version))?;
        changes.push((claimed, change));
    }
    // Notes come first: one without its entry is found and forgotten, but an entry that was given
    // up without a note would never be tried again.
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

fn failed_note(claimed: &Claimed, due: Millis) -> RecordChange {
    RecordChange::Put {
        kind: FAILED.to_owned(),
        key: note_key(claimed.kind(), &claimed.key),
        group: String::new(),
        value: Vec::new(),
        due: Some(due),
        expect: Expect::Anything,
    }
}

fn millis(duration: Duration) -> Millis {
    Millis::try_from(duration.as_millis()).unwrap_or(i64::MAX / 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Entry;

    fn claimed(count: usize) -> Vec<Claimed> {
        let entry = Entry::Knowledge {
            content: "c".into(),
            category: None,
        };
        (0..count)
            .map(|n| Claimed {
                key: n.to_string(),
                version: 1,
                stored: Stored::new(entry.clone(), 0),
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
            entry.stored.entry = Entry::Knowledge {
                content,
                category: None,
            };
        }
        let limits = CallLimits { texts: 4, bytes: 10 };
        let batches = into_batches(entries, limits);
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1, 2, 1]);
    }
}
