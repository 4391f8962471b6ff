//! Reading documents with all that is kept of them.

use ragstone_core::model::ModelIdentity;
use ragstone_core::store::{MovedDocument, MovedPage, MovedRange, Place};
use rusqlite::Connection;

use crate::error::{Error, Result};
use crate::index::Snapshot;
use crate::search::document;

/// A page ends early when it has grown this large.
const PAGE_BYTES: usize = 8 << 20;

pub(crate) fn export(connection: &Connection, snapshot: &Snapshot, range: MovedRange) -> Result<MovedPage> {
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
            let model = match row.get::<_, Option<String>>(4)? {
                None => None,
                Some(id) => Some(ModelIdentity {
                    id,
                    version: row.get(5)?,
                    dimensions: row.get(6)?,
                }),
            };
            Ok((
                row.get::<_, String>(0)?,
                row.get::<_, String>(1)?,
                row.get::<_, String>(2)?,
                row.get(3)?,
                model,
            ))
        })?;
        bytes += text.len() + metadata.len() + 4 * vector.len();
        last = Some(Place(rowid));
        documents.push(MovedDocument {
            document: document(id, &metadata, text)?,
            vector,
            norm,
            model,
        });
    }
    Ok(MovedPage {
        documents,
        last,
        more: slots.peek().is_some(),
    })
}
