//! Reads of documents with their vectors and models.

use ragstone_core::DocumentId;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{Cursor, ExportPage, ExportRange, ExportedDocument};
use rusqlite::{Connection, OptionalExtension, Row};

use crate::error::{Error, Result};
use crate::ranking::document;
use crate::sqlite::index::Snapshot;
use crate::sqlite::readers::CollectionView;

/// Size at which a page of an export ends early.
const PAGE_BYTES: usize = 8 << 20;

pub(crate) fn export(connection: &Connection, snapshot: &Snapshot, range: ExportRange) -> Result<ExportPage> {
    let mut select = connection.prepare_cached(
        "SELECT d.id, d.metadata, d.text, d.norm, m.id, m.version, m.dimensions
         FROM documents d LEFT JOIN models m ON m.number = d.model WHERE d.rowid = ?1",
    )?;
    let mut slots = snapshot
        .after(range.after.map_or(i64::MIN, |place| place.0))
        .peekable();
    let mut documents = Vec::new();
    let mut bytes = 0;
    let mut last = None;
    while documents.len() < range.limit && bytes < PAGE_BYTES {
        let Some(slot) = slots.next() else { break };
        let rowid = snapshot
            .rowid(slot)
            .ok_or_else(|| Error::Damaged(format!("slot {slot} has no row")))?;
        let vector = snapshot
            .vectors()
            .map_or_else(Vec::new, |vectors| vectors.get(slot).to_vec());
        let (id, metadata, text, norm, model) = select.query_row([rowid], |row| {
            let model = read_model_if_any(row, 4)?;
            Ok((
                row.get::<_, String>(0)?,
                row.get::<_, String>(1)?,
                row.get::<_, String>(2)?,
                row.get(3)?,
                model,
            ))
        })?;
        bytes += text.len() + metadata.len() + 4 * vector.len();
        last = Some(Cursor(rowid));
        documents.push(ExportedDocument {
            document: document(id, &metadata, text)?,
            vector,
            norm,
            model,
        });
    }
    Ok(ExportPage {
        documents,
        last,
        more: slots.peek().is_some(),
    })
}

/// See [`ragstone_core::storage::Storage::vector_models`].
pub(crate) fn vector_models(connection: &Connection, snapshot: &Snapshot) -> Result<Vec<ModelIdentity>> {
    let mut select = connection.prepare_cached(
        "SELECT m.id, m.version, m.dimensions
         FROM documents d JOIN models m ON m.number = d.model WHERE d.rowid = ?1",
    )?;
    let mut models = Vec::new();
    for slot in [snapshot.live().min(), snapshot.live().max()] {
        let Some(rowid) = slot.and_then(|slot| snapshot.rowid(slot)) else {
            continue;
        };
        let model = select.query_row([rowid], |row| read_model(row, 0)).optional()?;
        models.extend(model.filter(|model| !models.contains(model)));
    }
    Ok(models)
}

/// See [`ragstone_core::storage::Storage::models_by_id`].
pub(crate) fn models_by_id(
    connection: &Connection,
    view: &CollectionView,
    ids: &[DocumentId],
) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>> {
    let mut find = connection.prepare_cached(
        "SELECT d.rowid, m.id, m.version, m.dimensions FROM documents d
         LEFT JOIN models m ON m.number = d.model WHERE d.collection = ?1 AND d.id = ?2",
    )?;
    let mut found = Vec::with_capacity(ids.len());
    for id in ids {
        let row = find.query_row((view.key, id.as_str()), |row| {
            Ok((row.get::<_, i64>(0)?, read_model_if_any(row, 1)?))
        });
        if let Some((rowid, model)) = row.optional()?
            && view.snapshot.slot(rowid).is_some()
        {
            found.push((id.clone(), model));
        }
    }
    Ok(found)
}

fn read_model_if_any(row: &Row<'_>, first: usize) -> rusqlite::Result<Option<ModelIdentity>> {
    match row.get::<_, Option<String>>(first)? {
        None => Ok(None),
        Some(_) => read_model(row, first).map(Some),
    }
}

/// Reads three columns from `first` on: id, version and dimensions.
fn read_model(row: &Row<'_>, first: usize) -> rusqlite::Result<ModelIdentity> {
    Ok(ModelIdentity {
        id: row.get(first)?,
        version: row.get(first + 1)?,
        dimensions: row.get(first + 2)?,
    })
}
