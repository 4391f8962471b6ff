//! Deletes entries together with their vectors.
//!
//! Records and vectors are not written in one transaction. The deletion of a record also writes a note,
//! so that the next sweep deletes the vector if the process dies in between.

use ragstone_core::records::{Applied, Expect, Record, RecordChange, Records};
use ragstone_core::storage::{Selection, Storage, StorageError};

use super::entry::MemoryKind;
use super::stored::{EntryRecord, FAILED, forget_note, note_key, parse_note_key, vector_id};
use ragstone_lease::now;

/// Notes of entries that were deleted or replaced, and whose old vectors may still be there.
pub(super) const REMOVED: &str = "memory.removed";

pub(super) async fn delete(
    records: &dyn Records,
    store: &dyn Storage,
    kind: MemoryKind,
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

/// The note that an entry's vector has to be deleted.
pub(super) fn note(kind: MemoryKind, id: &str) -> RecordChange {
    RecordChange::Put {
        kind: REMOVED.to_owned(),
        key: note_key(kind, id),
        group: String::new(),
        value: Vec::new(),
        run_at: Some(now()),
        expect: Expect::Anything,
    }
}

/// Deletes the vectors that notes name.
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

/// Deletes the vector that a note names, then the note. The vector may have been that of a newer save,
/// or of an entry that is about to be marked done, so an entry with this id is embedded anew.
pub(super) async fn finish(
    records: &dyn Records,
    store: &dyn Storage,
    kind: MemoryKind,
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
    changes.extend(embed_anew(&found)?);
    records.apply(changes).await.map(|_| ())
}

/// Makes entries due that have a vector or may get one. The write keeps a worker that embeds such an
/// entry from marking it done.
pub(super) fn embed_anew(found: &[Record]) -> Result<Vec<RecordChange>, StorageError> {
    let mut changes = Vec::new();
    for record in found {
        let stored = EntryRecord::read(record)?;
        if record.run_at.is_some() || stored.embedded_by.is_some() {
            let expect = Expect::Version(record.version);
            changes.push(stored.reset().put(&record.key, Some(now()), expect)?);
        }
    }
    Ok(changes)
}

pub(super) async fn remove_vectors(
    store: &dyn Storage,
    kind: MemoryKind,
    ids: &[String],
) -> Result<(), StorageError> {
    let ids = ids.iter().map(|id| vector_id(id)).collect::<Result<_, _>>()?;
    match store.delete_documents(&kind.vectors(), Selection::Ids(ids)).await {
        Ok(_) | Err(StorageError::CollectionNotFound(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
