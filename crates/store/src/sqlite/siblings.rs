//! The siblings of hits, read from the state that was searched.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use ragstone_core::filter::Scalar;
use ragstone_core::siblings::{DocumentPosition, Gathering, SECTION_REACH};
use ragstone_core::storage::SiblingsRequest;
use ragstone_core::{Document, Metadata};
use roaring::RoaringBitmap;
use rusqlite::Connection;

use crate::error::{Error, Result};
use crate::sqlite::index::Snapshot;
use crate::sqlite::index::budget::WorkBudget;
use crate::sqlite::search::fetch;

/// Every section is ordered once and every document read once, however many hits share them.
pub(crate) struct SiblingGatherer<'a> {
    connection: &'a Connection,
    snapshot: &'a Snapshot,
    budget: &'a WorkBudget,
    gathering: Gathering<'a>,
    sections: HashMap<Scalar, SectionMembers<'a>>,
    documents: HashMap<u32, Arc<Document>>,
}

struct SectionMembers<'a> {
    members: Cow<'a, RoaringBitmap>,
    /// In document order, if the section is small enough to be ordered as a whole.
    ordered: Option<Arc<[u32]>>,
}

impl<'a> SiblingGatherer<'a> {
    pub(crate) fn new(
        connection: &'a Connection,
        snapshot: &'a Snapshot,
        request: &'a SiblingsRequest,
        budget: &'a WorkBudget,
    ) -> Self {
        Self {
            connection,
            snapshot,
            budget,
            gathering: Gathering::new(&request.expand, request.max_bytes),
            sections: HashMap::new(),
            documents: HashMap::new(),
        }
    }

    pub(crate) fn cut(&self) -> bool {
        self.gathering.cut
    }

    pub(crate) fn of(&mut self, slot: u32, hit: &Document) -> Result<Option<Vec<Arc<Document>>>> {
        let Some(value) = self.gathering.expand.section(hit) else {
            return Ok(None);
        };
        if self.gathering.cut {
            return Ok(Some(vec![Arc::new(hit.clone())]));
        }
        let members = self.around(slot, value)?;
        let Some(place) = members.iter().position(|member| *member == slot) else {
            return Ok(Some(vec![Arc::new(hit.clone())]));
        };
        let Self {
            connection,
            snapshot,
            gathering,
            documents,
            ..
        } = self;
        let read = |at: usize| -> Result<Arc<Document>> {
            let member = members[at];
            if let Some(known) = documents.get(&member) {
                return Ok(known.clone());
            }
            let document = Arc::new(fetch(connection, snapshot, member)?);
            documents.insert(member, document.clone());
            Ok(document)
        };
        gathering.around(members.len(), place, read).map(Some)
    }

    /// The members of a section that are near a slot, in document order.
    fn around(&mut self, slot: u32, value: Scalar) -> Result<Arc<[u32]>> {
        let (snapshot, connection) = (self.snapshot, self.connection);
        let expand = self.gathering.expand;
        let section = match self.sections.entry(value.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(SectionMembers {
                members: snapshot.matching(&expand.filter(value), self.budget)?,
                ordered: None,
            }),
        };
        if let Some(ordered) = &section.ordered {
            return Ok(ordered.clone());
        }
        let reach = SECTION_REACH as u64;
        let behind = section.members.rank(slot);
        let first = behind.saturating_sub(reach + 1);
        let first_slot = u32::try_from(first)
            .ok()
            .and_then(|first| section.members.select(first));
        let count = (behind - first + reach).min(section.members.len() - first);
        let mut near = section
            .members
            .range(first_slot.unwrap_or(slot)..)
            .take(usize::try_from(count).unwrap_or(usize::MAX))
            .map(|member| Ok((standing(connection, snapshot, member)?, member)))
            .collect::<Result<Vec<_>>>()?;
        near.sort();
        let near: Arc<[u32]> = near.into_iter().map(|(_, member)| member).collect();
        if near.len() as u64 == section.members.len() {
            section.ordered = Some(near.clone());
        }
        Ok(near)
    }
}

fn standing(connection: &Connection, snapshot: &Snapshot, slot: u32) -> Result<DocumentPosition> {
    let rowid = snapshot
        .rowid(slot)
        .ok_or_else(|| Error::Damaged(format!("slot {slot} has no row")))?;
    let metadata: String = connection
        .prepare_cached("SELECT metadata FROM documents WHERE rowid = ?1")?
        .query_row([rowid], |row| row.get(0))?;
    let metadata: Metadata = serde_json::from_str(&metadata)?;
    Ok(DocumentPosition::of(&metadata))
}
