//! Deleting entries together with their vectors.
//!
//! Records and vectors are not written in one transaction, so a deletion is noted with the record's
//! own: whoever dies between the two leaves the note, and the next sweep finishes what it says.

use ragstone_core::records::{Applied, Expect, Record, RecordChange, Records};
use ragstone_core::storage::{Selection, Storage, StorageError};

use super::entry::Kind;
use super::now;
use super::stored::{FAILED, Stored, forget_note, note_key, parse_note_key, vector_id};

/// Entries that are gone, or have another text now, and whose old vectors may still be there.
pub(super) const REMOVED: &str = "memory.removed";

pub(super) async fn delete(
    records: &dyn Records,
    store: &dyn Storage,
    kind: Kind,
    id: &str,
) -> Result<bool, StorageError> {
    if records.get(kind.records(), &[id.to_owned()]).await?.is_empty() {
        return Ok(false);
    }
    let applied = records
        .apply(vec![
            RecordChange::Delete {
                kind: kind.records().to_owned(),
                key: id.to_owned(),
                expect: Expect::Anything,
            },
            forget_note(FAILED, kind, id),
            note(kind, id),
        ])
        .await?;
    if let Some(Applied::Done { version }) = applied.last().copied() {
        finish(records, store, kind, id, version).await?;
    }
    Ok(matches!(applied.first(), Some(Applied::Done { .. })))
}

/// Notes that an entry's vector has to go.
pub(super) fn note(kind: Kind, id: &str) -> RecordChange {
    RecordChange::Put {
        kind: REMOVED.to_owned(),
        key: note_key(kind, id),
        group: String::new(),
        value: Vec::new(),
        due: Some(now()),
        expect: Expect::Anything,
    }
}

/// Does what notes of removal say.
pub(super) async fn finish_all(
    records: &dyn Records,
    store: &dyn Storage,
    notes: &[Record],
) -> Result<(), StorageError> {
    for note in notes {
        if let Some((kind, id)) = parse_note_key(&note.key) {
            finish(records, store, kind, id, note.version).await?;
        }
    }
    Ok(())
}

/// Removes the vector that a note names, then the note. It might have been the vector of a newer
/// save that went just now, or one whose entry is about to be marked done: whatever entry is there
/// now is embedded again.
pub(super) async fn finish(
    records: &dyn Records,
    store: &dyn Storage,
    kind: Kind,
    id: &str,
    note: u64,
) -> Result<(), StorageError> {
    remove_vectors(store, kind, &[id.to_owned()]).await?;
    let mut changes = vec![RecordChange::Delete {
        kind: REMOVED.to_owned(),
        key: note_key(kind, id),
        expect: Expect::Version(note),
    }];
    let found = records.get(kind.records(), &[id.to_owned()]).await?;
    changes.extend(embed_again(&found)?);
    records.apply(changes).await.map(|_| ())
}

/// Makes entries due that have or may be getting a vector. Writing them keeps a worker that is
/// embedding one from marking it done.
pub(super) fn embed_again(found: &[Record]) -> Result<Vec<RecordChange>, StorageError> {
    let mut changes = Vec::new();
    for record in found {
        let stored = Stored::read(record)?;
        if record.due.is_some() || stored.embedded_by.is_some() {
            let again = stored.again();
            changes.push(again.put(&record.key, Some(now()), Expect::Version(record.version))?);
        }
    }
    Ok(changes)
}

pub(super) async fn remove_vectors(
    store: &dyn Storage,
    kind: Kind,
    ids: &[String],
) -> Result<(), StorageError> {
    let ids = ids.iter().map(|id| vector_id(id)).collect::<Result<_, _>>()?;
    match store.delete_documents(&kind.vectors(), Selection::Ids(ids)).await {
        Ok(_) | Err(StorageError::CollectionNotFound(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
