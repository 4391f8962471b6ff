//! The siblings of hits, read in the transaction that found them.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ragstone_core::filter::Scalar;
use ragstone_core::search::SearchHit;
use ragstone_core::siblings::{DocumentPosition, Gathering, MAX_SIBLINGS, SECTION_REACH};
use ragstone_core::storage::SiblingsRequest;
use ragstone_core::{Document, Metadata};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::pool::Session;
use super::read::read_document;
use super::statement::Statement;
use crate::error::{Error, Result};

/// Number of hits whose siblings are read together: few enough for memory, and three round trips.
const HITS_AT_ONCE: usize = 16;

/// Comparison, order and limit of the two statements that read a section around a place.
const SIDES: [(&str, &str, usize); 2] = [("<=", "DESC", SECTION_REACH + 1), (">", "ASC", SECTION_REACH)];

/// Reads every document once, however many hits share it.
pub(super) struct SiblingReader<'a> {
    session: &'a Session,
    table: &'a str,
    gathering: Gathering<'a>,
    sections: HashMap<Scalar, SectionQuery>,
    documents: HashMap<i64, Arc<Document>>,
}

enum SectionQuery {
    /// Its places in document order.
    Whole(Arc<[i64]>),
    /// Each hit sees only the documents around it.
    TooLarge,
}

impl<'a> SiblingReader<'a> {
    pub(super) fn new(session: &'a Session, table: &'a str, request: &'a SiblingsRequest) -> Self {
        Self {
            session,
            table,
            gathering: Gathering::new(&request.expand, request.max_bytes),
            sections: HashMap::new(),
            documents: HashMap::new(),
        }
    }

    /// Sets the siblings of hits at these places. Returns whether some were left out.
    pub(super) async fn add_to(mut self, places: &[i64], hits: &mut [SearchHit]) -> Result<bool> {
        for (places, hits) in places.chunks(HITS_AT_ONCE).zip(hits.chunks_mut(HITS_AT_ONCE)) {
            let mut members = vec![None; hits.len()];
            if !self.gathering.cut {
                members = self.members(places, hits).await?;
                self.read_around(places, &members).await?;
            }
            for ((place, hit), members) in places.iter().zip(hits).zip(members) {
                hit.siblings = self.gather(*place, &hit.document, members.as_deref())?;
            }
        }
        Ok(self.gathering.cut)
    }

    fn gather(
        &mut self,
        place: i64,
        hit: &Document,
        members: Option<&[i64]>,
    ) -> Result<Option<Vec<Arc<Document>>>> {
        if self.gathering.expand.section(hit).is_none() {
            return Ok(None);
        }
        let members = members.unwrap_or_default();
        let center = members.iter().position(|member| *member == place);
        let Some(center) = center.filter(|_| !self.gathering.cut) else {
            return Ok(Some(vec![Arc::new(hit.clone())]));
        };
        let documents = &self.documents;
        let read = |at: usize| -> Result<Arc<Document>> {
            let document = members.get(at).and_then(|member| documents.get(member));
            document
                .cloned()
                .ok_or_else(|| Error::Damaged("a sibling has no row".to_owned()))
        };
        self.gathering.around(members.len(), center, read).map(Some)
    }

    /// The places of the section of each hit, in document order; of a large section those near the
    /// hit.
    async fn members(&mut self, places: &[i64], hits: &[SearchHit]) -> Result<Vec<Option<Arc<[i64]>>>> {
        let values: Vec<Option<Scalar>> = hits
            .iter()
            .map(|hit| self.gathering.expand.section(&hit.document))
            .collect();
        let mut members: Vec<Option<Arc<[i64]>>> = vec![None; hits.len()];
        // The first hit of each unknown section finds out whether it is small. If not, all other hits
        // need their own query.
        for _ in 0..2 {
            let mut first_of = HashSet::new();
            let mut numbers = Vec::new();
            let mut statements = Vec::new();
            for (number, (place, value)) in places.iter().zip(&values).enumerate() {
                let Some(value) = value.as_ref().filter(|_| members[number].is_none()) else {
                    continue;
                };
                match self.sections.get(value) {
                    Some(SectionQuery::Whole(section)) => members[number] = Some(section.clone()),
                    None if !first_of.insert(value) => {}
                    None | Some(SectionQuery::TooLarge) => {
                        numbers.push(number);
                        statements.extend(self.near(*place, value));
                    }
                }
            }
            let statements: Vec<&Statement> = statements.iter().collect();
            let results = self.session.query_all(&statements).await?;
            let results = results.into_iter().collect::<Result<Vec<_>>>()?;
            for (number, sides) in numbers.into_iter().zip(results.chunks(2)) {
                let section = ordered(sides)?;
                let whole = SIDES
                    .iter()
                    .zip(sides)
                    .all(|((.., limit), rows)| rows.len() < *limit);
                if let Some(value) = &values[number] {
                    let known = match whole {
                        true => SectionQuery::Whole(section.clone()),
                        false => SectionQuery::TooLarge,
                    };
                    self.sections.insert(value.clone(), known);
                }
                members[number] = Some(section);
            }
        }
        for (member, value) in members.iter_mut().zip(&values) {
            if let (None, Some(SectionQuery::Whole(section))) =
                (&member, value.as_ref().and_then(|value| self.sections.get(value)))
            {
                *member = Some(section.clone());
            }
        }
        Ok(members)
    }

    /// The documents of a section up to a place, itself included, and those after it.
    fn near(&self, place: i64, value: &Scalar) -> [Statement; 2] {
        let filter = self.gathering.expand.filter(value.clone());
        SIDES.map(|(side, direction, limit)| {
            let mut near = Statement::new(format!(
                "SELECT place, metadata FROM {} WHERE place {side} ",
                self.table
            ));
            near.number(place)
                .push(" AND ")
                .filter(&filter)
                .push(&format!(" ORDER BY place {direction}"))
                .limit(limit);
            near
        })
    }

    /// Reads the documents that may become siblings.
    async fn read_around(&mut self, places: &[i64], members: &[Option<Arc<[i64]>>]) -> Result<()> {
        let mut wanted = HashSet::new();
        for (place, members) in places.iter().zip(members) {
            let members = members.as_deref().unwrap_or_default();
            if let Some(center) = members.iter().position(|member| member == place) {
                let reachable = center.saturating_sub(MAX_SIBLINGS)..members.len().min(center + MAX_SIBLINGS);
                wanted.extend(members.get(reachable).unwrap_or_default());
            }
        }
        wanted.retain(|place| !self.documents.contains_key(place));
        if wanted.is_empty() {
            return Ok(());
        }
        let mut fetch = Statement::new(format!(
            "SELECT place, id, metadata, body FROM {} WHERE place = ANY (",
            self.table
        ));
        fetch
            .bind(wanted.into_iter().collect::<Vec<i64>>(), Type::INT8_ARRAY)
            .push(")");
        for row in self.session.query(&fetch).await? {
            self.documents
                .insert(row.try_get(0)?, Arc::new(read_document(&row, 1)?));
        }
        Ok(())
    }
}

fn ordered(sides: &[Vec<Row>]) -> Result<Arc<[i64]>> {
    let mut near = Vec::new();
    for row in sides.iter().flatten() {
        let metadata: Metadata = serde_json::from_str(row.try_get(1)?)?;
        near.push((DocumentPosition::of(&metadata), row.try_get::<_, i64>(0)?));
    }
    near.sort();
    Ok(near.into_iter().map(|(_, place)| place).collect())
}
