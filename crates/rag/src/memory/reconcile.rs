//! Bringing vectors and entries together: after a change of model, after a time without embedding,
//! and after a process that died at an unlucky moment.

use std::time::Duration;

use ragstone_core::collection::EMBEDDING_MODEL;
use ragstone_core::document::Metadata;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange, RecordRange, Records};
use ragstone_core::storage::{Storage, StorageError};
use serde::{Deserialize, Serialize};

use super::buffer::{Ownership, Worker};
use super::entry::Kind;
use super::now;
use super::removal::{self, REMOVED};
use super::stored::{FAILED, Stored, forget_note, parse_note_key};

/// In the metadata of a vector collection: the version of the model that made its vectors.
pub const MODEL_VERSION: &str = "embedding_model_version";
/// For every kind: which model its vectors are of, and whether every entry has one or is due.
const STATE: &str = "memory.state";
/// Held by the process that compares the model with the vectors.
const TURN: &str = "memory.turn";
const TURN_LEASE_MS: i64 = 10_000;
const TURN_POLL: Duration = Duration::from_millis(100);
/// How many records are looked at in one step.
const STEP: usize = 1000;
/// How long whoever sweeps has for what it took.
const SWEEP_LEASE_MS: i64 = 30_000;

#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct State {
    /// The version of the model that made the vectors.
    model: String,
    /// Every entry has a vector or is due, because embedding was never off since.
    complete: bool,
}

/// Makes the vector collections fit the model, and every entry due that has no vector of it.
pub(super) async fn with_model(worker: &Worker) -> Result<(), StorageError> {
    let identity = &worker.embedder.info().identity;
    for kind in Kind::ALL {
        let turn = take_turn(worker).await?;
        let state = read_state(worker.records.as_ref(), kind).await?;
        let complete = state.model == identity.version && state.complete;
        if state.model != identity.version {
            start_over(worker.store.as_ref(), kind, identity).await?;
        }
        let mut state = State {
            model: identity.version.clone(),
            complete,
        };
        if !complete {
            write_state(worker.records.as_ref(), kind, &state).await?;
        }
        end_turn(worker.records.as_ref(), turn).await?;
        if complete {
            continue;
        }
        let due = make_due(worker, kind, &identity.version).await?;
        if due > 0 {
            tracing::info!(kind = kind.collection(), entries = due, model = %identity.version, "entries without a vector of this model will be embedded");
        }
        state.complete = true;
        write_state(worker.records.as_ref(), kind, &state).await?;
    }
    Ok(())
}

/// Waits until no other process is about to throw vectors away: of two that start with a new model,
/// the second must see what the first has done, or it would throw away what that has embedded since.
async fn take_turn(worker: &Worker) -> Result<Record, StorageError> {
    let records = worker.records.as_ref();
    records.apply(vec![turn(Expect::Absent)]).await?;
    loop {
        let now = now();
        let due_until = match worker.options.ownership {
            Ownership::Shared => now,
            // Whoever has a lease is dead.
            Ownership::Exclusive => now + TURN_LEASE_MS,
        };
        let taken = records.claim(TURN, 1, due_until, now + TURN_LEASE_MS).await?;
        if let Some(taken) = taken.into_iter().next() {
            return Ok(taken);
        }
        tokio::time::sleep(TURN_POLL).await;
    }
}

async fn end_turn(records: &dyn Records, taken: Record) -> Result<(), StorageError> {
    let change = turn(Expect::Version(taken.version));
    records.apply(vec![change]).await.map(|_| ())
}

/// The record is always due, unless somebody has it.
fn turn(expect: Expect) -> RecordChange {
    RecordChange::Put {
        kind: TURN.to_owned(),
        key: String::new(),
        group: String::new(),
        value: Vec::new(),
        due: Some(0),
        expect,
    }
}

/// Notes that entries may be saved without becoming due, and finishes deletions.
pub(super) async fn without_model(records: &dyn Records, store: &dyn Storage) -> Result<(), StorageError> {
    for kind in Kind::ALL {
        let state = read_state(records, kind).await?;
        if state.complete {
            let state = State {
                complete: false,
                ..state
            };
            write_state(records, kind, &state).await?;
        }
    }
    let now = now();
    let notes = records.claim(REMOVED, STEP, now, now + SWEEP_LEASE_MS).await?;
    removal::finish_all(records, store, &notes).await
}

/// Finishes deletions that were begun, and takes up again what was given up long enough ago.
pub(super) async fn sweep(worker: &Worker) -> Result<(), StorageError> {
    let records = worker.records.as_ref();
    let now = now();
    let removed = records.claim(REMOVED, STEP, now, now + SWEEP_LEASE_MS).await?;
    removal::finish_all(records, worker.store.as_ref(), &removed).await?;
    take_up_failed(records, now).await.map(|_| ())
}

/// Takes up everything that was given up, however lately: what made it fail may have been mended
/// while no server ran.
pub(super) async fn take_up_all_failed(records: &dyn Records) -> Result<(), StorageError> {
    while take_up_failed(records, Millis::MAX).await? == STEP {}
    Ok(())
}

/// Takes up what was to be tried again by this time; returns how many notes there were, up to a step.
async fn take_up_failed(records: &dyn Records, until: Millis) -> Result<usize, StorageError> {
    let now = now();
    let notes = records.claim(FAILED, STEP, until, now + SWEEP_LEASE_MS).await?;
    let count = notes.len();
    for note in notes {
        let mut changes = Vec::new();
        if let Some((kind, id)) = parse_note_key(&note.key) {
            for record in records.get(kind.records(), &[id.to_owned()]).await? {
                let stored = Stored::read(&record)?;
                if record.due.is_none() && stored.embedded_by.is_none() {
                    changes.push(
                        stored
                            .again()
                            .put(id, Some(now), Expect::Version(record.version))?,
                    );
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

/// Counting walks through all entries, so this is not for every sweep.
pub(super) async fn measure_queue(records: &dyn Records) -> Result<(), StorageError> {
    let mut queued = 0;
    for kind in Kind::ALL {
        queued += records.counts(kind.records()).await?.due;
    }
    metrics::gauge!("ragstone_memory_queued").set(queued as f64);
    metrics::gauge!("ragstone_memory_failed").set(records.counts(FAILED).await?.total as f64);
    Ok(())
}

/// How long the oldest entry that waits has waited; zero where none does.
pub(super) async fn measure_lag(worker: &Worker) -> Result<(), StorageError> {
    let mut oldest: Option<Millis> = None;
    for kind in Kind::ALL {
        for record in worker.records.due(kind.records(), 1, Millis::MAX).await? {
            let Ok(Stored { saved_at, .. }) = Stored::read(&record) else {
                continue;
            };
            // Entries that failed are due later than others that are younger.
            let waiting = worker.circuit.oldest_failed().unwrap_or(saved_at).min(saved_at);
            oldest = Some(oldest.unwrap_or(waiting).min(waiting));
        }
    }
    let lag = oldest.map_or(0, |oldest| now().saturating_sub(oldest).max(0));
    metrics::gauge!("ragstone_memory_lag_seconds").set(lag as f64 / 1e3);
    Ok(())
}

/// Vectors of different models cannot be compared, so those of another are thrown away.
async fn start_over(store: &dyn Storage, kind: Kind, identity: &ModelIdentity) -> Result<(), StorageError> {
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

/// Marks every entry due that has no vector of this model and does not wait for one yet.
async fn make_due(worker: &Worker, kind: Kind, version: &str) -> Result<usize, StorageError> {
    let records = worker.records.as_ref();
    let (mut after, mut count) = (None, 0);
    loop {
        let range = RecordRange {
            group: None,
            after: after.take(),
            limit: STEP,
        };
        let page = records.list(kind.records(), range).await?;
        let mut changes = Vec::new();
        for record in &page {
            let stored = Stored::read(record)?;
            if record.due.is_none() && stored.embedded_by.as_deref() != Some(version) {
                let again = stored.again();
                changes.push(again.put(&record.key, Some(now()), Expect::Version(record.version))?);
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

async fn read_state(records: &dyn Records, kind: Kind) -> Result<State, StorageError> {
    let found = records.get(STATE, &[kind.collection().to_owned()]).await?;
    let Some(record) = found.first() else {
        return Ok(State::default());
    };
    serde_json::from_slice(&record.value).map_err(|error| StorageError::Failed(Box::new(error)))
}

async fn write_state(records: &dyn Records, kind: Kind, state: &State) -> Result<(), StorageError> {
    let change = RecordChange::Put {
        kind: STATE.to_owned(),
        key: kind.collection().to_owned(),
        group: String::new(),
        value: serde_json::to_vec(state).map_err(|error| StorageError::Failed(Box::new(error)))?,
        due: None,
        expect: Expect::Anything,
    };
    records.apply(vec![change]).await?;
    Ok(())
}
