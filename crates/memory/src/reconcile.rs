//! Reconciles vectors and entries: after a change of model, after a time without embedding, and after a
//! crash.

use std::time::Duration;

use ragstone_core::collection::{Collection, EMBEDDING_MODEL};
use ragstone_core::document::Metadata;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange, RecordRange, Records};
use ragstone_core::storage::{Storage, StorageError};
use serde::{Deserialize, Serialize};

use super::buffer::EmbedWorker;
use super::entry::MemoryKind;
use super::removal::{self, REMOVED};
use super::stored::{EntryRecord, FAILED, forget_note, parse_note_key};
use ragstone_lease::{ClaimRequest, Leases, Ownership, millis, now};

/// In the metadata of a vector collection: the version of the model that made its vectors.
pub const MODEL_VERSION: &str = "embedding_model_version";
/// For every kind: the model of its vectors, and whether every entry has one or is due.
const STATE: &str = "memory.state";
/// Claimed by the process that compares the model with the vectors.
const TURN: &str = "memory.turn";
const TURN_LEASE: Duration = Duration::from_secs(10);
const TURN_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Records read in one step.
const STEP: usize = 1000;
static SWEEPS: Leases = Leases::shared(Duration::from_secs(30));

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct ReconcileState {
    /// The version of the model that made the vectors.
    model: String,
    /// Every entry has a vector or is due: embedding was never off since.
    complete: bool,
    /// Vectors of another width were deleted: entries are due even if this model embedded them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    all_due: bool,
}

/// Whether this model can search the vectors of a collection.
pub(super) fn fits(vectors: &Collection, model: &ModelIdentity) -> bool {
    let version = vectors
        .metadata
        .get(MODEL_VERSION)
        .and_then(|value| value.as_str());
    version == Some(&model.version) && has_width(vectors, model)
}

fn has_width(vectors: &Collection, model: &ModelIdentity) -> bool {
    vectors.dimensions.is_none_or(|width| width == model.dimensions)
}

/// Prepares the vector collections for the model, and makes every entry due that has no vector of it.
pub(super) async fn with_model(worker: &EmbedWorker) -> Result<(), StorageError> {
    let identity = &worker.embedder.info().identity;
    for kind in MemoryKind::ALL {
        let turn = take_turn(worker).await?;
        let state = read_state(worker.records.as_ref(), kind).await?;
        let is_same_model = state.model == identity.version;
        let is_same_width = match worker.store.collection(&kind.vectors()).await {
            Ok(vectors) => has_width(&vectors, identity),
            Err(StorageError::CollectionNotFound(_)) => true,
            Err(error) => return Err(error),
        };
        let complete = is_same_model && is_same_width && state.complete;
        if !is_same_model || !is_same_width {
            start_over(worker.store.as_ref(), kind, identity).await?;
        }
        let mut state = ReconcileState {
            model: identity.version.clone(),
            complete,
            all_due: is_same_model && (!is_same_width || state.all_due),
        };
        if !complete {
            write_state(worker.records.as_ref(), kind, &state).await?;
        }
        end_turn(worker.records.as_ref(), turn).await?;
        if complete {
            continue;
        }
        let keep = Some(identity.version.as_str()).filter(|_| !state.all_due);
        let due = make_due(worker, kind, keep).await?;
        if due > 0 {
            tracing::info!(kind = kind.collection(), entries = due, model = %identity.version, "embedding entries without a vector of this model");
        }
        state.complete = true;
        state.all_due = false;
        write_state(worker.records.as_ref(), kind, &state).await?;
    }
    Ok(())
}

/// Waits until no other process replaces vector collections: of two that start with a new model, the
/// second must not delete vectors that the first has made since.
async fn take_turn(worker: &EmbedWorker) -> Result<Record, StorageError> {
    let records = worker.records.as_ref();
    records.apply(vec![turn(Expect::Absent)]).await?;
    loop {
        let now = now();
        let mut request = ClaimRequest::new(&[TURN], 1, now);
        if worker.options.ownership == Ownership::Exclusive {
            // The owner of any lease is dead.
            request.due_by = now + millis(TURN_LEASE);
        }
        let mut claim = Leases::shared(TURN_LEASE).claim(records, request).await?;
        if let Some(taken) = claim.take().into_iter().flatten().next() {
            return Ok(taken);
        }
        tokio::time::sleep(TURN_POLL_INTERVAL).await;
    }
}

async fn end_turn(records: &dyn Records, taken: Record) -> Result<(), StorageError> {
    let change = turn(Expect::Version(taken.version));
    records.apply(vec![change]).await.map(|_| ())
}

/// The record is always due, unless a process holds it.
fn turn(expect: Expect) -> RecordChange {
    RecordChange::Put {
        kind: TURN.to_owned(),
        key: String::new(),
        group: String::new(),
        value: Vec::new(),
        run_at: Some(0),
        expect,
    }
}

/// Records that entries may be saved without becoming due, and finishes deletions.
pub(super) async fn without_model(records: &dyn Records, store: &dyn Storage) -> Result<(), StorageError> {
    for kind in MemoryKind::ALL {
        let state = read_state(records, kind).await?;
        if state.complete {
            let state = ReconcileState {
                complete: false,
                ..state
            };
            write_state(records, kind, &state).await?;
        }
    }
    finish_removals(records, store).await
}

async fn finish_removals(records: &dyn Records, store: &dyn Storage) -> Result<(), StorageError> {
    let request = ClaimRequest::new(&[REMOVED], STEP, now());
    let notes = SWEEPS.claim(records, request).await?.take().concat();
    removal::finish_all(records, store, &notes).await
}

/// Finishes deletions, and retries entries that were given up long enough ago.
pub(super) async fn sweep(worker: &EmbedWorker) -> Result<(), StorageError> {
    let records = worker.records.as_ref();
    finish_removals(records, worker.store.as_ref()).await?;
    retry_failed(records, now()).await.map(|_| ())
}

/// Retries all entries that were given up: the cause may have been fixed while no server ran.
pub(super) async fn retry_all_failed(records: &dyn Records) -> Result<(), StorageError> {
    while retry_failed(records, Millis::MAX).await? == STEP {}
    Ok(())
}

/// Retries entries whose time has come; returns how many notes there were, up to a step.
async fn retry_failed(records: &dyn Records, due_by: Millis) -> Result<usize, StorageError> {
    let now = now();
    let mut request = ClaimRequest::new(&[FAILED], STEP, now);
    request.due_by = due_by;
    let notes = SWEEPS.claim(records, request).await?.take().concat();
    let count = notes.len();
    for note in notes {
        let mut changes = Vec::new();
        if let Some((kind, id)) = parse_note_key(&note.key) {
            for record in records.get(kind.records(), &[id.to_owned()]).await? {
                let stored = EntryRecord::read(&record)?;
                if record.run_at.is_none() && stored.embedded_by.is_none() {
                    let expect = Expect::Version(record.version);
                    changes.push(stored.reset().put(id, Some(now), expect)?);
                }
            }
        }
        changes.push(RecordChange::Delete {
            kind: FAILED.to_owned(),
            key: note.key,
            expect: Expect::Version(note.version),
        });
        records.apply(changes).await?;
    }
    Ok(count)
}

/// Counting reads all entries, so this does not run in every sweep.
pub(super) async fn measure_queue(records: &dyn Records) -> Result<(), StorageError> {
    let mut queued = 0;
    for kind in MemoryKind::ALL {
        queued += records.counts(kind.records()).await?.waiting;
    }
    metrics::gauge!("ragstone_memory_queued").set(queued as f64);
    metrics::gauge!("ragstone_memory_failed").set(records.counts(FAILED).await?.total as f64);
    Ok(())
}

/// Reports how long the oldest waiting entry has waited.
pub(super) async fn measure_lag(worker: &EmbedWorker) -> Result<(), StorageError> {
    let mut oldest: Option<Millis> = None;
    for kind in MemoryKind::ALL {
        for record in worker.records.ready(kind.records(), 1, Millis::MAX).await? {
            let Ok(EntryRecord { saved_at, .. }) = EntryRecord::read(&record) else {
                continue;
            };
            // Failed entries are due later than younger ones.
            let waiting = worker.circuit.oldest_failed().unwrap_or(saved_at).min(saved_at);
            oldest = Some(oldest.unwrap_or(waiting).min(waiting));
        }
    }
    let lag = oldest.map_or(0, |oldest| now().saturating_sub(oldest).max(0));
    metrics::gauge!("ragstone_memory_lag_seconds").set(lag as f64 / 1e3);
    Ok(())
}

/// Deletes the vectors of another model: vectors of different models cannot be compared.
async fn start_over(
    store: &dyn Storage,
    kind: MemoryKind,
    identity: &ModelIdentity,
) -> Result<(), StorageError> {
    let name = kind.vectors();
    match store.delete_collection(&name).await {
        Ok(()) | Err(StorageError::CollectionNotFound(_)) => {}
        Err(error) => return Err(error),
    }
    let metadata = Metadata::from_iter([
        (EMBEDDING_MODEL.to_owned(), identity.id.clone().into()),
        (MODEL_VERSION.to_owned(), identity.version.clone().into()),
    ]);
    match store.create_collection(&name, metadata).await {
        Ok(_) | Err(StorageError::CollectionExists(_)) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Makes every entry due, except those that the model of version `keep` has embedded.
async fn make_due(worker: &EmbedWorker, kind: MemoryKind, keep: Option<&str>) -> Result<usize, StorageError> {
    let records = worker.records.as_ref();
    let (mut after, mut count) = (None, 0);
    loop {
        let range = RecordRange {
            after: after.take(),
            limit: STEP,
            ..RecordRange::default()
        };
        let page = records.list(kind.records(), range).await?;
        let mut changes = Vec::new();
        for record in &page {
            let stored = EntryRecord::read(record)?;
            let is_kept = keep.is_some() && stored.embedded_by.as_deref() == keep;
            if record.run_at.is_none() && !is_kept {
                let expect = Expect::Version(record.version);
                changes.push(stored.reset().put(&record.key, Some(now()), expect)?);
                changes.push(forget_note(FAILED, kind, &record.key));
            }
        }
        if !changes.is_empty() {
            let applied = records.apply(changes).await?;
            let puts = applied.iter().step_by(2);
            count += puts.filter(|applied| **applied != Applied::Skipped).count();
        }
        match page.last() {
            Some(last) if page.len() == STEP => after = Some(last.key.clone()),
            _ => return Ok(count),
        }
    }
}

async fn read_state(records: &dyn Records, kind: MemoryKind) -> Result<ReconcileState, StorageError> {
    let found = records.get(STATE, &[kind.collection().to_owned()]).await?;
    let Some(record) = found.first() else {
        return Ok(ReconcileState::default());
    };
    serde_json::from_slice(&record.value).map_err(|error| StorageError::Failed(Box::new(error)))
}

async fn write_state(
    records: &dyn Records,
    kind: MemoryKind,
    state: &ReconcileState,
) -> Result<(), StorageError> {
    let change = RecordChange::Put {
        kind: STATE.to_owned(),
        key: kind.collection().to_owned(),
        group: String::new(),
        value: serde_json::to_vec(state).map_err(|error| StorageError::Failed(Box::new(error)))?,
        run_at: None,
        expect: Expect::Anything,
    };
    records.apply(vec![change]).await?;
    Ok(())
}
