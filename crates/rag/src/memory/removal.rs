//! Deleting entries together with their vectors.
//!
//! Records and vectors are not written in one transaction, so a deletion is noted with the record's
//! own: whoever dies between the two leaves the note, and the next sweep finishes what it says.

use ragstone_core::records::{Applied, Expect, Record, RecordChange, Records};
use ragstone_core::store::{Selection, Store, StoreError};

use super::entry::Kind;
use super::now;
use super::stored::{FAILED, Stored, forget_note, note_key, parse_note_key, vector_id};

/// Entries that are gone and whose vectors may not be.
pub(super) const REMOVED: &str = "memory.removed";

pub(super) async fn delete(
    records: &dyn Records,
    store: &dyn Store,
    kind: Kind,
    id: &str,
) -> Result<bool, StoreError> {
    if records.get(kind.records(), &[id.to_owned()]).await?.is_empty() {
        return Ok(false);
    }
    let key = note_key(kind, id);
    let applied = records
        .apply(vec![
            RecordChange::Delete {
                kind: kind.records().to_owned(),
                key: id.to_owned(),
                expect: Expect::Anything,
            },
            forget_note(FAILED, kind, id),
            RecordChange::Put {
                kind: REMOVED.to_owned(),
                key: key.clone(),
                group: String::new(),
                value: Vec::new(),
                due: Some(now()),
                expect: Expect::Anything,
            },
        ])
        .await?;
    if let Some(Applied::Done { version }) = applied.last().copied() {
        finish(records, store, &key, version).await?;
    }
    Ok(matches!(applied.first(), Some(Applied::Done { .. })))
}

/// Does what notes of removal say.
pub(super) async fn finish_all(
    records: &dyn Records,
    store: &dyn Store,
    notes: &[Record],
) -> Result<(), StoreError> {
    for note in notes {
        finish(records, store, &note.key, note.version).await?;
    }
    Ok(())
}

/// Removes the vector that a note names, then the note.
async fn finish(records: &dyn Records, store: &dyn Store, key: &str, version: u64) -> Result<(), StoreError> {
    if let Some((kind, id)) = parse_note_key(key) {
        remove_vectors(store, kind, &[id.to_owned()]).await?;
    }
    let applied = records
        .apply(vec![RecordChange::Delete {
            kind: REMOVED.to_owned(),
            key: key.to_owned(),
            expect: Expect::Version(version),
        }])
        .await?;
    if applied == [Applied::Skipped] {
        // A save took the note away: it might have been its vector that went just now.
        embed_again(records, key).await?;
    }
    Ok(())
}

async fn embed_again(records: &dyn Records, key: &str) -> Result<(), StoreError> {
    let Some((kind, id)) = parse_note_key(key) else {
        return Ok(());
    };
    for record in records.get(kind.records(), &[id.to_owned()]).await? {
        let stored = Stored::read(&record)?;
        if stored.embedded_by.is_some() {
            let again = stored
                .again()
                .put(id, Some(now()), Expect::Version(record.version))?;
            records.apply(vec![again]).await?;
        }
    }
    Ok(())
}

pub(super) async fn remove_vectors(store: &dyn Store, kind: Kind, ids: &[String]) -> Result<(), StoreError> {
    let ids = ids.iter().map(|id| vector_id(id)).collect::<Result<_, _>>()?;
    match store.delete_documents(&kind.vectors(), Selection::Ids(ids)).await {
        Ok(_) | Err(StoreError::CollectionNotFound(_)) => Ok(()),
        Err(error) => Err(error),
    }
}
