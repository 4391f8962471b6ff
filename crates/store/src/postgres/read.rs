//! Reads of collections and documents.

use std::collections::BTreeSet;

use ragstone_core::filter::Scalar;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{
    Cursor, DocumentPage, Engine, ExportPage, ExportRange, ExportedDocument, Page, StorageHealth,
    VectorPrecision,
};
use ragstone_core::{Collection, CollectionName, Document, DocumentId, Filter};
use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::encode::{escape, read_scalar, scalars_key, unescape};
use super::pool::{Pool, Session};
use super::schema::table;
use super::statement::Statement;
use super::stats_cache::TableStats;
use crate::error::{Error, Result};
use crate::ranking::document;

const COLLECTION: &str =
    "SELECT name, metadata, dimensions, documents, relation FROM ragstone.collections WHERE ";

/// A collection as one transaction sees it.
pub(super) struct CollectionState {
    pub(super) collection: Collection,
    /// The table of its documents, if it has any.
    pub(super) table: Option<String>,
}

impl CollectionState {
    fn read(row: &Row) -> Result<Self> {
        let name: &str = row.try_get(0)?;
        let metadata: &str = row.try_get(1)?;
        Ok(Self {
            collection: Collection {
                name: collection_name(name)?,
                count: row.try_get::<_, i64>(3)?.unsigned_abs(),
                metadata: serde_json::from_str(metadata)?,
                dimensions: width(row.try_get(2)?),
            },
            table: row.try_get::<_, Option<i64>>(4)?.map(table),
        })
    }

    /// Reads the result of [`find_collection`].
    pub(super) fn first(rows: &[Row], name: &CollectionName) -> Result<Self> {
        match rows.first() {
            Some(row) => Self::read(row),
            None => Err(Error::CollectionNotFound(name.clone())),
        }
    }

    pub(super) fn stats(&self) -> Option<TableStats> {
        Some(TableStats {
            table: self.table.clone()?,
            dimensions: self.collection.dimensions,
            count: self.collection.count,
        })
    }
}

fn collection_name(name: &str) -> Result<CollectionName> {
    match name.strip_prefix('.') {
        Some(internal) => Ok(CollectionName::internal(internal)),
        None => CollectionName::parse(name).map_err(|error| Error::Damaged(error.to_string())),
    }
}

pub(super) fn width(stored: Option<i32>) -> Option<usize> {
    stored.and_then(|width| usize::try_from(width).ok())
}

pub(super) fn find_collection(name: &CollectionName) -> Statement {
    let mut find = Statement::new(COLLECTION);
    find.push("name = ").text(name.as_str()).cached();
    find
}

/// Begins a transaction by reading a collection.
pub(super) async fn begin(pool: &Pool, name: &CollectionName) -> Result<(Session, CollectionState)> {
    let (session, rows) = Session::read(pool, &find_collection(name)).await?;
    Ok((session, CollectionState::first(&rows, name)?))
}

pub(super) async fn collections(pool: &Pool) -> Result<Vec<Collection>> {
    let mut all = Statement::new(COLLECTION);
    all.push("name NOT LIKE '.%' ORDER BY name");
    let (_session, rows) = Session::read(pool, &all).await?;
    rows.iter()
        .map(|row| Ok(CollectionState::read(row)?.collection))
        .collect()
}

pub(super) async fn by_id(pool: &Pool, name: &CollectionName, ids: &[DocumentId]) -> Result<Vec<Document>> {
    let (session, state) = begin(pool, name).await?;
    let Some(table) = state.table else {
        return Ok(Vec::new());
    };
    let ids: Vec<String> = ids.iter().map(|id| escape(id.as_str()).into_owned()).collect();
    let mut find = Statement::new(format!(
        "SELECT d.id, d.metadata, d.body FROM {table} d JOIN unnest("
    ));
    find.bind(ids, Type::TEXT_ARRAY)
        .push(") WITH ORDINALITY AS wanted (id, place) ON wanted.id = d.id ORDER BY wanted.place");
    let rows = session.query(&find).await?;
    rows.iter().map(|row| read_document(row, 0)).collect()
}

pub(super) async fn models_by_id(
    pool: &Pool,
    name: &CollectionName,
    ids: &[DocumentId],
) -> Result<Vec<(DocumentId, Option<ModelIdentity>)>> {
    let (session, state) = begin(pool, name).await?;
    let Some(table) = state.table else {
        return Ok(Vec::new());
    };
    let escaped: Vec<String> = ids.iter().map(|id| escape(id.as_str()).into_owned()).collect();
    let mut find = Statement::new(format!(
        "SELECT wanted.place, m.id, m.version, m.dimensions
         FROM {table} d LEFT JOIN ragstone.models m ON m.number = d.model JOIN unnest("
    ));
    find.bind(escaped, Type::TEXT_ARRAY)
        .push(") WITH ORDINALITY AS wanted (id, place) ON wanted.id = d.id");
    let mut found = Vec::with_capacity(ids.len());
    for row in &session.query(&find).await? {
        let place = usize::try_from(row.try_get::<_, i64>(0)?).unwrap_or_default();
        // Counted from one.
        if let Some(id) = place.checked_sub(1).and_then(|index| ids.get(index)) {
            found.push((id.clone(), read_model_if_any(row, 1)?));
        }
    }
    Ok(found)
}

pub(super) async fn documents(
    pool: &Pool,
    name: &CollectionName,
    filter: &Filter,
    page: Page,
) -> Result<DocumentPage> {
    let (session, state) = begin(pool, name).await?;
    let Some(table) = state.table else {
        return Ok(DocumentPage {
            documents: Vec::new(),
            total: 0,
        });
    };
    let total = if filter.is_everything() {
        state.collection.count
    } else {
        let mut count = Statement::new(format!("SELECT count(*) FROM {table} WHERE "));
        let row = session.query_one(count.filter(filter)).await?;
        row.try_get::<_, i64>(0)?.unsigned_abs()
    };
    let mut documents = Vec::new();
    if page.limit > 0 && page.offset < total {
        let mut list = Statement::new(format!("SELECT id, metadata, body FROM {table} WHERE "));
        list.filter(filter)
            .push(" ORDER BY place")
            .limit(page.limit)
            .push(" OFFSET ")
            .number(i64::try_from(page.offset).unwrap_or(i64::MAX));
        let rows = session.query(&list).await?;
        documents = rows
            .iter()
            .map(|row| read_document(row, 0))
            .collect::<Result<_>>()?;
    }
    Ok(DocumentPage { documents, total })
}

/// Reads three columns from `first` on: id, metadata and text.
pub(super) fn read_document(row: &Row, first: usize) -> Result<Document> {
    document(
        unescape(row.try_get(first)?),
        row.try_get(first + 1)?,
        unescape(row.try_get(first + 2)?),
    )
}

pub(super) async fn metadata_values(pool: &Pool, name: &CollectionName, field: &str) -> Result<Vec<Value>> {
    let (session, state) = begin(pool, name).await?;
    let Some(table) = state.table else {
        return Ok(Vec::new());
    };
    let mut distinct = Statement::new(format!(
        "SELECT DISTINCT value::text FROM {table}, jsonb_array_elements(fields -> "
    ));
    distinct.text(scalars_key(field)).push(") AS value");
    let mut values = BTreeSet::new();
    for row in session.query(&distinct).await? {
        values.extend(read_scalar(row.try_get(0)?)?);
    }
    Ok(values.iter().map(Scalar::to_json).collect())
}

/// Size at which a page of an export ends early.
const PAGE_BYTES: i64 = 8 << 20;

pub(super) async fn export(pool: &Pool, name: &CollectionName, range: ExportRange) -> Result<ExportPage> {
    let (session, state) = begin(pool, name).await?;
    let Some(table) = state.table else {
        return Ok(ExportPage {
            documents: Vec::new(),
            last: None,
            more: false,
        });
    };
    let mut rows = Statement::new(format!(
        "WITH page AS (
             SELECT place, sum(length(body) + length(metadata) + {}) OVER (ORDER BY place) AS bytes FROM (
                 SELECT place, body, metadata FROM {table} WHERE place > ",
        4 * state.collection.dimensions.unwrap_or(0)
    ));
    rows.number(range.after.map_or(0, |place| place.0))
        .push(" ORDER BY place")
        .limit(range.limit)
        .push(") AS next), chosen AS (SELECT place FROM page WHERE bytes <= ")
        .number(PAGE_BYTES)
        .push(&format!(
            " OR place = (SELECT min(place) FROM page))
             SELECT place, d.id, metadata, body, embedding::real[], norm, m.id, m.version, m.dimensions,
                    EXISTS (SELECT FROM {table} WHERE place > (SELECT max(place) FROM chosen))
             FROM chosen JOIN {table} d USING (place) LEFT JOIN ragstone.models m ON m.number = d.model
             ORDER BY place"
        ));
    let rows = session.query(&rows).await?;
    let (last, more) = match rows.last() {
        Some(last) => (Some(Cursor(last.try_get(0)?)), last.try_get(9)?),
        None => (None, false),
    };
    Ok(ExportPage {
        documents: rows.iter().map(read_exported).collect::<Result<_>>()?,
        last,
        more,
    })
}

/// See [`ragstone_core::storage::Storage::vector_models`].
pub(super) async fn vector_models(pool: &Pool, name: &CollectionName) -> Result<Vec<ModelIdentity>> {
    let (session, state) = begin(pool, name).await?;
    match state.table {
        Some(table) => {
            let rows = session.query(&find_models(&table)).await?;
            rows.iter().map(|row| read_model(row, 0)).collect()
        }
        None => Ok(Vec::new()),
    }
}

/// The models of the first and of the last document of a table.
pub(super) fn find_models(table: &str) -> Statement {
    let mut find = Statement::new(format!(
        "SELECT DISTINCT m.id, m.version, m.dimensions
         FROM {table} d JOIN ragstone.models m ON m.number = d.model
         WHERE place IN ((SELECT min(place) FROM {table}), (SELECT max(place) FROM {table}))"
    ));
    find.cached();
    find
}

/// Reads three columns from `first` on: id, version and dimensions.
pub(super) fn read_model(row: &Row, first: usize) -> Result<ModelIdentity> {
    Ok(ModelIdentity {
        id: unescape(row.try_get(first)?),
        version: unescape(row.try_get(first + 1)?),
        dimensions: usize::try_from(row.try_get::<_, i64>(first + 2)?).unwrap_or_default(),
    })
}

fn read_model_if_any(row: &Row, first: usize) -> Result<Option<ModelIdentity>> {
    match row.try_get::<_, Option<&str>>(first)? {
        None => Ok(None),
        Some(_) => read_model(row, first).map(Some),
    }
}

fn read_exported(row: &Row) -> Result<ExportedDocument> {
    Ok(ExportedDocument {
        document: read_document(row, 1)?,
        vector: row.try_get(4)?,
        norm: row.try_get(5)?,
        model: read_model_if_any(row, 6)?,
    })
}

pub(super) async fn health(pool: &Pool) -> Result<StorageHealth> {
    let sizes = Statement::new(
        "SELECT (SELECT count(*) FROM ragstone.collections WHERE name NOT LIKE '.%'),
                (SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
                 WHERE relnamespace = 'ragstone'::regnamespace AND relkind = 'r')",
    );
    let (_session, rows) = Session::read(pool, &sizes).await?;
    let row = rows
        .first()
        .ok_or_else(|| Error::Damaged("a row is missing".into()))?;
    Ok(StorageHealth {
        collections: row.try_get::<_, i64>(0)?.unsigned_abs(),
        storage_bytes: row.try_get::<_, i64>(1)?.unsigned_abs(),
        engine: Some(Engine {
            name: "postgres",
            vectors: VectorPrecision::Exact,
            limitations: &[
                "A document of more different words than fit into a megabyte is refused",
                "A collection of 10,000 documents and more is searched by an index that finds nearly all of the nearest, not all",
                "The words of deleted documents are gone from the disk when Postgres vacuums their table",
            ],
        }),
    })
}
