//! The siblings of hits, in the transaction that found them.

use std::collections::HashMap;
use std::sync::Arc;

use ragstone_core::filter::Scalar;
use ragstone_core::siblings::{Gathering, MAX_SIBLINGS, SECTION_REACH, Standing};
use ragstone_core::storage::SiblingsRequest;
use ragstone_core::{Document, Metadata};
use tokio_postgres::types::Type;

use super::pool::Session;
use super::read::read_document;
use super::statement::Statement;
use crate::error::{Error, Result};

/// Every section is ordered once and every document read once, however many hits share them.
pub(super) struct Siblings<'a> {
    session: &'a Session,
    table: &'a str,
    gathering: Gathering<'a>,
    /// In document order; only those that are small enough to be looked at whole.
    sections: HashMap<Scalar, Arc<[i64]>>,
    documents: HashMap<i64, Arc<Document>>,
}

impl<'a> Siblings<'a> {
    pub(super) fn new(session: &'a Session, table: &'a str, request: &'a SiblingsRequest) -> Self {
        Self {
            session,
            table,
            gathering: Gathering::new(&request.expand, request.max_bytes),
            sections: HashMap::new(),
            documents: HashMap::new(),
        }
    }

    pub(super) fn cut(&self) -> bool {
        self.gathering.cut
    }

    pub(super) async fn of(&mut self, place: i64, hit: &Document) -> Result<Option<Vec<Arc<Document>>>> {
        let Some(value) = self.gathering.expand.section(hit) else {
            return Ok(None);
        };
        let alone = || Ok(Some(vec![Arc::new(hit.clone())]));
        if self.gathering.cut {
            return alone();
        }
        let members = self.around(place, value).await?;
        let Some(center) = members.iter().position(|member| *member == place) else {
            return alone();
        };
        let reachable = center.saturating_sub(MAX_SIBLINGS)..members.len().min(center + MAX_SIBLINGS);
        self.fetch(members.get(reachable).unwrap_or_default()).await?;
        let documents = &self.documents;
        let read = |at: usize| -> Result<Arc<Document>> {
            let document = members.get(at).and_then(|member| documents.get(member));
            document
                .cloned()
                .ok_or_else(|| Error::Damaged("a sibling has no row".to_owned()))
        };
        self.gathering.around(members.len(), center, read).map(Some)
    }

    /// The members of a section that are near a place, in document order.
    async fn around(&mut self, place: i64, value: Scalar) -> Result<Arc<[i64]>> {
        if let Some(ordered) = self.sections.get(&value) {
            return Ok(ordered.clone());
        }
        let filter = self.gathering.expand.filter(value.clone());
        let mut near = Vec::new();
        let mut whole = true;
        let sides = [("<=", "DESC", SECTION_REACH + 1), (">", "ASC", SECTION_REACH)];
        for (side, direction, limit) in sides {
            let mut members = Statement::new(format!(
                "SELECT place, metadata FROM {} WHERE place {side} ",
                self.table
            ));
            members
                .number(place)
                .push(" AND ")
                .filter(&filter)
                .push(&format!(" ORDER BY place {direction}"))
                .limit(limit);
            let rows = self.session.query(&members).await?;
            whole &= rows.len() < limit;
            for row in &rows {
                let metadata: Metadata = serde_json::from_str(row.try_get(1)?)?;
                near.push((Standing::of(&metadata), row.try_get::<_, i64>(0)?));
            }
        }
        near.sort();
        let near: Arc<[i64]> = near.into_iter().map(|(_, member)| member).collect();
        if whole {
            self.sections.insert(value, near.clone());
        }
        Ok(near)
    }

    async fn fetch(&mut self, places: &[i64]) -> Result<()> {
        let unknown = places.iter().filter(|place| !self.documents.contains_key(place));
        let unknown: Vec<i64> = unknown.copied().collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let mut fetch = Statement::new(format!(
            "SELECT place, id, metadata, body FROM {} WHERE place = ANY (",
            self.table
        ));
        fetch.bind(unknown, Type::INT8_ARRAY).push(")");
        for row in self.session.query(&fetch).await? {
            self.documents
                .insert(row.try_get(0)?, Arc::new(read_document(&row, 1)?));
        }
        Ok(())
    }
}
