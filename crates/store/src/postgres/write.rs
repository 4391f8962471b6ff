//! Writes to collections and documents. A writer locks the row of its collection, so that writes to one
//! collection follow each other, across processes too.

use bytes::{BufMut, BytesMut};
use ragstone_core::analysis::analyze_document;
use ragstone_core::model::ModelIdentity;
use ragstone_core::storage::{ExportedDocument, MetadataUpdate, Selection};
use ragstone_core::{Collection, CollectionName, Metadata};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{IsNull, ToSql, Type, to_sql_checked};

use super::encode::{escape, fields, tsvector};
use super::pool::Session;
use super::schema::{create_table, table};
use super::statement::Statement;
use crate::error::{Error, Result};

/// A batch as columns, prepared as far as possible without the database.
#[derive(Default)]
pub(super) struct EncodedBatch {
    dimensions: usize,
    models: Vec<ModelIdentity>,
    /// The index in `models` of the model of each vector.
    made_by: Vec<Option<usize>>,
    ids: Vec<String>,
    norms: Vec<f32>,
    words: Vec<i64>,
    fields: Vec<String>,
    terms: Vec<String>,
    vectors: Vec<UnitVector>,
    metadata: Vec<String>,
    bodies: Vec<String>,
}

/// Analyses the texts. Takes time, but no lock.
pub(super) fn prepare(name: &CollectionName, batch: Vec<ExportedDocument>) -> Result<EncodedBatch> {
    let mut prepared = EncodedBatch {
        dimensions: batch.first().map_or(0, |first| first.vector.len()),
        ..EncodedBatch::default()
    };
    for exported in batch {
        if exported.vector.len() != prepared.dimensions {
            return Err(Error::DimensionMismatch {
                collection: name.clone(),
                expected: prepared.dimensions,
                actual: exported.vector.len(),
            });
        }
        let made_by = exported.model.map(|model| {
            let known = prepared.models.iter().position(|known| *known == model);
            known.unwrap_or_else(|| {
                prepared.models.push(model);
                prepared.models.len() - 1
            })
        });
        let document = exported.document;
        let terms = analyze_document(&document.text);
        prepared.made_by.push(made_by);
        prepared.norms.push(exported.norm);
        prepared.vectors.push(UnitVector(exported.vector));
        prepared.ids.push(escape(document.id.as_str()).into_owned());
        prepared.words.push(terms.length.into());
        let words = tsvector(&terms).ok_or_else(|| Error::TooManyWords(document.id.clone()))?;
        prepared.terms.push(words);
        prepared.fields.push(fields(&document.metadata));
        prepared.metadata.push(serde_json::to_string(&document.metadata)?);
        prepared.bodies.push(escape(&document.text).into_owned());
    }
    Ok(prepared)
}

/// The binary format of pgvector: dimensions, a reserved field, and the numbers.
#[derive(Debug)]
struct UnitVector(Vec<f32>);

impl ToSql for UnitVector {
    fn to_sql(
        &self,
        _: &Type,
        out: &mut BytesMut,
    ) -> std::result::Result<IsNull, Box<dyn std::error::Error + Sync + Send>> {
        out.put_u16(u16::try_from(self.0.len())?);
        out.put_u16(0);
        self.0.iter().for_each(|x| out.put_f32(*x));
        Ok(IsNull::No)
    }

    fn accepts(kind: &Type) -> bool {
        kind.name() == "vector"
    }

    to_sql_checked!();
}

/// A collection whose row this transaction has locked.
struct LockedCollection {
    id: i64,
    metadata: String,
    relation: Option<i64>,
    dimensions: Option<usize>,
    documents: i64,
    next_place: i64,
}

async fn lock_collection(session: &Session, name: &CollectionName) -> Result<LockedCollection> {
    let mut find = Statement::new(
        "SELECT id, metadata, relation, dimensions, documents, next_place
         FROM ragstone.collections WHERE name = ",
    );
    find.text(name.as_str()).push(" FOR NO KEY UPDATE");
    let rows = session.query(&find).await?;
    let row = rows
        .first()
        .ok_or_else(|| Error::CollectionNotFound(name.clone()))?;
    Ok(LockedCollection {
        id: row.try_get(0)?,
        metadata: row.try_get(1)?,
        relation: row.try_get(2)?,
        dimensions: super::read::width(row.try_get(3)?),
        documents: row.try_get(4)?,
        next_place: row.try_get(5)?,
    })
}

pub(super) async fn create_collection(
    session: Session,
    name: &CollectionName,
    metadata: &Metadata,
) -> Result<Collection> {
    let mut insert = Statement::new("INSERT INTO ragstone.collections (name, metadata) VALUES (");
    insert
        .text(name.as_str())
        .push(", ")
        .text(serde_json::to_string(metadata)?)
        .push(")");
    session.query(&insert).await.map_err(|error| match error {
        Error::Postgres(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            Error::CollectionExists(name.clone())
        }
        other => other,
    })?;
    session.commit().await?;
    Ok(Collection {
        name: name.clone(),
        count: 0,
        metadata: metadata.clone(),
        dimensions: None,
    })
}

pub(super) async fn update_metadata(
    session: Session,
    name: &CollectionName,
    metadata: &Metadata,
    update: MetadataUpdate,
) -> Result<Metadata> {
    let locked = lock_collection(&session, name).await?;
    let mut new = match update {
        MetadataUpdate::Replace => Metadata::new(),
        MetadataUpdate::Merge => serde_json::from_str(&locked.metadata)?,
    };
    new.extend(metadata.clone());
    let mut set = Statement::new("UPDATE ragstone.collections SET metadata = ");
    set.text(serde_json::to_string(&new)?)
        .push(" WHERE id = ")
        .number(locked.id);
    session.query(&set).await?;
    session.commit().await?;
    Ok(new)
}

pub(super) async fn delete_collection(session: Session, name: &CollectionName) -> Result<()> {
    let locked = lock_collection(&session, name).await?;
    discard(&session, locked.relation).await?;
    session
        .query(Statement::new("DELETE FROM ragstone.collections WHERE id = ").number(locked.id))
        .await?;
    session.commit().await
}

pub(super) async fn empty(session: Session, name: &CollectionName) -> Result<u64> {
    let locked = lock_collection(&session, name).await?;
    discard_table(&session, &locked).await?;
    session.commit().await?;
    Ok(locked.documents.unsigned_abs())
}

/// Leaves the collection without documents and without dimensions.
async fn discard_table(session: &Session, locked: &LockedCollection) -> Result<()> {
    discard(session, locked.relation).await?;
    let mut clear = Statement::new(
        "UPDATE ragstone.collections SET relation = NULL, dimensions = NULL, documents = 0, words = 0
         WHERE id = ",
    );
    session.query(clear.number(locked.id)).await.map(|_| ())
}

async fn discard(session: &Session, relation: Option<i64>) -> Result<()> {
    if let Some(relation) = relation {
        let mut insert = Statement::new("INSERT INTO ragstone.discarded (relation) VALUES (");
        session.query(insert.number(relation).push(")")).await?;
    }
    Ok(())
}

pub(super) async fn upsert(session: Session, name: &CollectionName, batch: &EncodedBatch) -> Result<()> {
    let locked = lock_collection(&session, name).await?;
    if batch.ids.is_empty() {
        return Ok(());
    }
    let relation = match (locked.relation, locked.dimensions) {
        (Some(relation), Some(expected)) => {
            if expected != batch.dimensions {
                return Err(Error::DimensionMismatch {
                    collection: name.clone(),
                    expected,
                    actual: batch.dimensions,
                });
            }
            relation
        }
        _ => begin_table(&session, &locked, batch.dimensions).await?,
    };
    let models = model_numbers(&session, batch).await?;
    let table = table(relation);
    // Counts the replaced documents; the others are new.
    let mut before = Statement::new(format!(
        "SELECT count(*), coalesce(sum(words), 0)::bigint FROM {table} WHERE id = ANY ("
    ));
    before.bind(batch.ids.clone(), Type::TEXT_ARRAY).push(")");
    let before = session.query_one(&before).await?;
    let (replaced, replaced_words): (i64, i64) = (before.try_get(0)?, before.try_get(1)?);
    let insert = format!(
        "INSERT INTO {table} (place, id, model, norm, words, fields, terms, embedding, metadata, body)
         SELECT $1 + number, id, model, norm, words, fields::jsonb, terms::tsvector, embedding, metadata, body
         FROM unnest($2::bigint[], $3::text[], $4::real[], $5::bigint[], $6::text[], $7::text[], $8::vector[], $9::text[], $10::text[])
             WITH ORDINALITY AS new (model, id, norm, words, fields, terms, embedding, metadata, body, number)
         ON CONFLICT (id) DO UPDATE SET
             model = excluded.model, norm = excluded.norm, words = excluded.words, fields = excluded.fields,
             terms = excluded.terms, embedding = excluded.embedding, metadata = excluded.metadata,
             body = excluded.body"
    );
    let values: [&(dyn ToSql + Sync); 10] = [
        &locked.next_place,
        &models,
        &batch.ids,
        &batch.norms,
        &batch.words,
        &batch.fields,
        &batch.terms,
        &batch.vectors,
        &batch.metadata,
        &batch.bodies,
    ];
    session.query_untyped(&insert, &values).await?;
    let added = batch.ids.len() as i64;
    let mut count = Statement::new("UPDATE ragstone.collections SET documents = documents + ");
    count
        .number(added - replaced)
        .push(", words = words + ")
        .number(batch.words.iter().sum::<i64>() - replaced_words)
        .push(", next_place = next_place + ")
        .number(added)
        .push(" WHERE id = ")
        .number(locked.id);
    session.query(&count).await?;
    session.commit().await
}

async fn begin_table(session: &Session, locked: &LockedCollection, dimensions: usize) -> Result<i64> {
    let row = session
        .query_one(&Statement::new("SELECT nextval('ragstone.relations')"))
        .await?;
    let relation: i64 = row.try_get(0)?;
    create_table(session, relation, dimensions).await?;
    let mut set = Statement::new("UPDATE ragstone.collections SET relation = ");
    set.number(relation)
        .push(", dimensions = ")
        .number(dimensions as i64)
        .push("::integer WHERE id = ")
        .number(locked.id);
    session.query(&set).await?;
    Ok(relation)
}

/// The number of the model of each vector.
async fn model_numbers(session: &Session, batch: &EncodedBatch) -> Result<Vec<Option<i64>>> {
    let mut numbers = Vec::with_capacity(batch.models.len());
    for model in &batch.models {
        numbers.push(model_number(session, model).await?);
    }
    let number = |made_by: &Option<usize>| made_by.and_then(|model| numbers.get(model).copied());
    Ok(batch.made_by.iter().map(number).collect())
}

async fn model_number(session: &Session, model: &ModelIdentity) -> Result<i64> {
    let mut find = Statement::default();
    let id = find.remember(escape(&model.id).into_owned(), Type::TEXT);
    let version = find.remember(escape(&model.version).into_owned(), Type::TEXT);
    let dimensions = find.remember(model.dimensions as i64, Type::INT8);
    // Inserting first would use up a number each time. The second query finds what another process
    // inserted.
    let select = format!(
        "SELECT number FROM ragstone.models WHERE id = {id} AND version = {version} AND dimensions = {dimensions}"
    );
    find.push(&select);
    if let Some(row) = session.query(&find).await?.first() {
        return Ok(row.try_get(0)?);
    }
    find.sql = format!(
        "INSERT INTO ragstone.models (id, version, dimensions) VALUES ({id}, {version}, {dimensions})
         ON CONFLICT DO NOTHING"
    );
    session.query(&find).await?;
    find.sql = select;
    Ok(session.query_one(&find).await?.try_get(0)?)
}

/// Deletes the selected documents and returns how many there were.
pub(super) async fn delete_documents(
    session: Session,
    name: &CollectionName,
    selection: &Selection,
) -> Result<u64> {
    let locked = lock_collection(&session, name).await?;
    let Some(relation) = locked.relation else {
        return Ok(0);
    };
    let mut delete = Statement::new(format!("WITH gone AS (DELETE FROM {} WHERE ", table(relation)));
    match selection {
        Selection::Ids(ids) => {
            let ids: Vec<String> = ids.iter().map(|id| escape(id.as_str()).into_owned()).collect();
            delete.push("id = ANY (").bind(ids, Type::TEXT_ARRAY).push(")");
        }
        Selection::Matching(filter) => {
            delete.filter(filter);
        }
    }
    delete.push(" RETURNING words) SELECT count(*), coalesce(sum(words), 0)::bigint FROM gone");
    let gone = session.query_one(&delete).await?;
    let (gone, words): (i64, i64) = (gone.try_get(0)?, gone.try_get(1)?);
    if gone == locked.documents {
        discard_table(&session, &locked).await?;
    } else {
        let mut count = Statement::new("UPDATE ragstone.collections SET documents = documents - ");
        count
            .number(gone)
            .push(", words = words - ")
            .number(words)
            .push(" WHERE id = ")
            .number(locked.id);
        session.query(&count).await?;
    }
    session.commit().await?;
    Ok(gone.unsigned_abs())
}
