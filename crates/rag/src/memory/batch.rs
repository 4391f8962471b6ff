//! One round of embedding: calls, vectors, and what becomes of the entries.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use ragstone_core::document::{Document, Metadata};
use ragstone_core::model::{EmbedInput, ModelError, Role};
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange};
use ragstone_core::store::{DocumentBatch, StoreError, StoredDocument};
use tokio::time::Instant;

use super::buffer::{BufferOptions, Worker};
use super::entry::Kind;
use super::stored::{FAILED, Stored, forget_note, note_key, vector_id};
use super::{now, removal};

/// What is left of the lease for storing vectors once the embedder has answered.
const STORING: Duration = Duration::from_secs(5);
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
    /// Something that may pass, after at least this long.
    Passing(Duration),
}

#[derive(Default)]
struct Outcome {
    vectors: Vec<(Claimed, Vec<f32>)>,
    failures: Vec<(Claimed, Failure)>,
}

/// The pause after so many failures in a row, with some chance in it so that processes spread out.
pub(super) fn backoff(options: &BufferOptions, failures: u32) -> Duration {
    let doubled = options
        .first_pause
        .saturating_mul(1 << failures.saturating_sub(1).min(16));
    doubled
        .min(options.max_pause)
        .mul_f64(0.75 + 0.25 * fastrand::f64())
}

pub(super) async fn round(worker: Arc<Worker>, claimed: Vec<Claimed>, lease_ends: Instant) {
    let parts = into_batches(claimed, worker.options.batch)
        .into_iter()
        .map(|batch| embed_and_store(&worker, batch, lease_ends));
    futures::future::join_all(parts).await;
}

/// Each batch is stored by itself, as soon as it is there: short writes let others in between.
async fn embed_and_store(worker: &Worker, batch: Vec<Claimed>, lease_ends: Instant) {
    let oldest = batch.iter().map(|claimed| claimed.stored.saved_at).min();
    let mut outcome = embed(worker, batch, lease_ends).await;
    let embedded = outcome.vectors.len();
    if let Err((claimed, error)) = store_vectors(worker, outcome.vectors).await {
        tracing::error!(%error, "vectors of agent memory could not be stored");
        let failure = Failure {
            message: "the vector could not be stored".to_owned(),
            cause: Cause::Passing(Duration::ZERO),
        };
        outcome
            .failures
            .extend(claimed.into_iter().map(|claimed| (claimed, failure.clone())));
    } else if embedded > 0 {
        worker.pause.succeeded();
        metrics::counter!("ragstone_memory_embedded_total").increment(embedded as u64);
        if let Some(oldest) = oldest {
            metrics::gauge!("ragstone_memory_lag_seconds").set((now() - oldest).max(0) as f64 / 1e3);
        }
    }
    if !outcome.failures.is_empty() {
        note_failures(worker, outcome.failures).await;
    }
}

/// Batches of about one size, none larger than the limit.
fn into_batches(mut claimed: Vec<Claimed>, limit: usize) -> Vec<Vec<Claimed>> {
    let count = claimed.len().div_ceil(limit.max(1)).max(1);
    let size = claimed.len().div_ceil(count);
    let mut batches = Vec::with_capacity(count);
    while claimed.len() > size {
        let rest = claimed.split_off(size);
        batches.push(std::mem::replace(&mut claimed, rest));
    }
    batches.push(claimed);
    batches
}

/// Embeds a batch in one call. Where the model refuses the input, halves of it are tried, until the
/// texts at fault are alone.
async fn embed(worker: &Worker, batch: Vec<Claimed>, lease_ends: Instant) -> Outcome {
    let mut outcome = Outcome::default();
    let mut waiting = vec![batch];
    while let Some(mut batch) = waiting.pop() {
        match call(worker, &batch, lease_ends).await {
            Ok(vectors) => outcome.vectors.extend(batch.into_iter().zip(vectors)),
            Err(failure) if failure.cause == Cause::Text && batch.len() > 1 => {
                let rest = batch.split_off(batch.len() / 2);
                waiting.extend([rest, batch]);
            }
            Err(failure) => {
                if let Cause::Passing(at_least) = failure.cause {
                    worker.pause.failed(&worker.options, at_least);
                }
                let failures = batch.into_iter().map(|claimed| (claimed, failure.clone()));
                outcome.failures.extend(failures);
            }
        }
    }
    outcome
}

async fn call(worker: &Worker, batch: &[Claimed], lease_ends: Instant) -> Result<Vec<Vec<f32>>, Failure> {
    let inputs: Vec<EmbedInput> = batch
        .iter()
        .map(|claimed| EmbedInput::Text(claimed.stored.entry.content()))
        .collect();
    let passing = |message: String, at_least| Failure {
        message,
        cause: Cause::Passing(at_least),
    };
    metrics::counter!("ragstone_memory_embed_calls_total").increment(1);
    metrics::histogram!("ragstone_memory_embed_texts").record(inputs.len() as f64);
    let started = Instant::now();
    let deadline = lease_ends.checked_sub(STORING).unwrap_or(lease_ends);
    let answer = tokio::time::timeout_at(deadline, worker.embedder.embed(inputs, Role::Passage)).await;
    metrics::histogram!("ragstone_memory_embed_seconds").record(started.elapsed().as_secs_f64());
    match answer {
        Err(_) => Err(passing(
            "the embedding model did not answer in time".to_owned(),
            Duration::ZERO,
        )),
        Ok(Ok(embeddings)) if embeddings.len() == batch.len() => {
            Ok(embeddings.into_iter().map(|embedding| embedding.vector).collect())
        }
        Ok(Ok(embeddings)) => Err(passing(
            format!(
                "the embedding model gave {} vectors for {} texts",
                embeddings.len(),
                batch.len()
            ),
            Duration::ZERO,
        )),
        Ok(Err(ModelError::InvalidInput(message))) => Err(Failure {
            message,
            cause: Cause::Text,
        }),
        Ok(Err(error)) => {
            let at_least = match &error {
                ModelError::Overloaded { retry_after } => *retry_after,
                _ => Duration::ZERO,
            };
            Err(passing(error.to_string(), at_least))
        }
    }
}

/// Stores the vectors, then marks their entries done; gives the entries back when that fails.
async fn store_vectors(
    worker: &Worker,
    vectors: Vec<(Claimed, Vec<f32>)>,
) -> Result<(), (Vec<Claimed>, StoreError)> {
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
fn vector_document(claimed: &Claimed, vector: Vec<f32>) -> Result<StoredDocument, StoreError> {
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

async fn mark_done(worker: &Worker, claimed: &[Claimed], version: &str) -> Result<(), StoreError> {
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
        // What was saved again is due again. What was deleted must not keep the vector it just got.
        for record in worker.records.get(kind.records(), &keys).await? {
            keys.retain(|key| *key != record.key);
        }
        removal::remove_vectors(worker.store.as_ref(), kind, &keys).await?;
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
        worker.pause.failed(&worker.options, Duration::ZERO);
        tracing::error!(%error, "failures of embedding could not be noted");
    }
}

async fn write_failures(worker: &Worker, failures: Vec<(Claimed, Failure)>) -> Result<(), StoreError> {
    let options = &worker.options;
    let (mut notes, mut changes, mut given_up) = (Vec::new(), Vec::new(), Vec::new());
    for (claimed, failure) in failures {
        let mut stored = claimed.stored.clone();
        stored.attempts += 1;
        stored.error = Some(failure.message);
        let is_refused = failure.cause == Cause::Text;
        let due = if is_refused || stored.attempts >= options.max_attempts {
            let wait = options
                .try_failed_again
                .saturating_mul(if is_refused { REFUSED_WAITS } else { 1 });
            notes.push(failed_note(&claimed, now() + millis(wait)));
            given_up.push(changes.len());
            None
        } else {
            Some(now() + millis(backoff(options, stored.attempts)))
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
            (0, 4, vec![0]),
            (4, 4, vec![4]),
            (5, 4, vec![3, 2]),
            (9, 4, vec![3, 3, 3]),
        ] {
            let batches = into_batches(claimed(count), limit);
            assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), sizes);
            let keys: Vec<String> = batches.concat().into_iter().map(|c| c.key).collect();
            assert_eq!(keys, (0..count).map(|n| n.to_string()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest() {
        let options = BufferOptions::default();
        for (failures, at_most) in [(1, 500), (2, 1000), (3, 2000), (40, 30_000)] {
            let pause = backoff(&options, failures).as_millis();
            assert!(
                pause <= at_most && pause * 4 >= at_most * 3,
                "{failures}: {pause}"
            );
        }
    }
}
