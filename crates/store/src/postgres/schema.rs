//! The tables and their migrations. Of processes that start at the same time, one migrates.
//!
//! Everything is in the schema `ragstone`. Each collection that has documents has its own table, named
//! after a number that is never used twice. So its vectors have one width, it has its own index, and
//! emptying a collection means discarding its table: the transaction lists the table in `discarded`,
//! and maintenance drops it soon after, when nobody reads it.

use super::pool::{Pool, Session};
use super::statement::Statement;
use crate::error::{Error, Result};

/// One entry per schema version, applied in order. Entries that have been released are never edited.
const MIGRATIONS: &[&str] = &["
CREATE TABLE ragstone.collections (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE \"C\" NOT NULL UNIQUE,
    metadata text NOT NULL,
    -- The number of the table with its documents; null while it has none.
    relation bigint,
    dimensions integer,
    documents bigint NOT NULL DEFAULT 0,
    words bigint NOT NULL DEFAULT 0,
    -- The place of the next new document in the order of insertion.
    next_place bigint NOT NULL DEFAULT 1
);
CREATE SEQUENCE ragstone.relations;
CREATE TABLE ragstone.discarded (relation bigint PRIMARY KEY);

CREATE TABLE ragstone.models (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text NOT NULL,
    version text NOT NULL,
    dimensions bigint NOT NULL,
    UNIQUE (id, version, dimensions)
);

CREATE TABLE ragstone.records (
    kind text COLLATE \"C\" NOT NULL,
    key text COLLATE \"C\" NOT NULL,
    grp text COLLATE \"C\" NOT NULL,
    value bytea NOT NULL,
    version bigint NOT NULL,
    due bigint,
    PRIMARY KEY (kind, key)
);
CREATE INDEX records_by_group ON ragstone.records (kind, grp, key) WHERE grp <> '';
CREATE INDEX records_by_due ON ragstone.records (kind, due, key) WHERE due IS NOT NULL;
-- Record versions come from one clock, so that a record written again never gets an old one back.
CREATE SEQUENCE ragstone.record_clock;
"];

/// Advisory lock for migrations. The number only has to be unused by others.
const MIGRATION_LOCK: i64 = 0x7261_6773_746f_6e65;

pub(super) async fn migrate(pool: &Pool) -> Result<()> {
    let session = Session::write(pool).await?;
    session
        .query(
            Statement::new("SELECT pg_advisory_xact_lock(")
                .number(MIGRATION_LOCK)
                .push(")"),
        )
        .await?;
    check_encoding(&session).await?;
    let found = applied(&session).await?;
    let known = known();
    if found > known {
        return Err(Error::NewerSchema { found, known });
    }
    if found < known {
        session
            .batch("CREATE EXTENSION IF NOT EXISTS vector")
            .await
            .map_err(|error| Error::NoVectorExtension(Some(Box::new(error))))?;
        session
            .batch(
                "CREATE SCHEMA IF NOT EXISTS ragstone;
                 CREATE TABLE IF NOT EXISTS ragstone.migrations (
                     version bigint PRIMARY KEY, applied timestamptz NOT NULL DEFAULT now())",
            )
            .await?;
        for (done, migration) in MIGRATIONS
            .iter()
            .enumerate()
            .skip(usize::try_from(found).unwrap_or(0))
        {
            session.batch(migration).await?;
            session
                .query(
                    Statement::new("INSERT INTO ragstone.migrations (version) VALUES (")
                        .number(done as i64 + 1)
                        .push(")"),
                )
                .await?;
        }
    }
    check_rights(&session).await?;
    session.commit().await
}

/// Only UTF-8 can store any text.
async fn check_encoding(session: &Session) -> Result<()> {
    let row = session
        .query_one(&Statement::new("SELECT current_setting('server_encoding')"))
        .await?;
    match row.try_get::<_, &str>(0)? {
        "UTF8" => Ok(()),
        other => Err(Error::DatabaseEncoding(other.to_owned())),
    }
}

/// Collections are created and dropped as tables, so the user has to own the schema or its tables.
async fn check_rights(session: &Session) -> Result<()> {
    let row = session
        .query_one(&Statement::new(
            "SELECT to_regtype('vector') IS NOT NULL,
                 has_schema_privilege('ragstone', 'CREATE') AND NOT EXISTS (
                     SELECT FROM pg_class WHERE relnamespace = 'ragstone'::regnamespace
                     AND relkind IN ('r', 'S') AND NOT pg_has_role(relowner, 'USAGE')),
                 current_user::text, pg_get_userbyid(nspowner)::text
             FROM pg_namespace WHERE nspname = 'ragstone'",
        ))
        .await?;
    if !row.try_get::<_, bool>(0)? {
        return Err(Error::NoVectorExtension(None));
    }
    if !row.try_get::<_, bool>(1)? {
        return Err(Error::MissingRights {
            user: row.try_get(2)?,
            owner: row.try_get(3)?,
        });
    }
    Ok(())
}

/// Number of migrations.
pub(super) fn known() -> i64 {
    MIGRATIONS.len() as i64
}

pub(super) async fn applied(session: &Session) -> Result<i64> {
    let there = session
        .query_one(&Statement::new(
            "SELECT to_regclass('ragstone.migrations') IS NOT NULL",
        ))
        .await?;
    if !there.try_get::<_, bool>(0)? {
        return Ok(0);
    }
    let version = session
        .query_one(&Statement::new(
            "SELECT coalesce(max(version), 0) FROM ragstone.migrations",
        ))
        .await?;
    Ok(version.try_get(0)?)
}

/// The name of a table of documents. It contains only a number, so it is safe inside SQL text.
pub(super) fn table(relation: i64) -> String {
    format!("ragstone.documents_{relation}")
}

/// The widest vector that is stored inline. Other columns move out of the row if necessary.
const MAX_INLINE_DIMENSIONS: usize = 1500;

pub(super) async fn create_table(session: &Session, relation: i64, dimensions: usize) -> Result<()> {
    let table = table(relation);
    // Longer rows than the usual quarter of a page: filters and words are read far more often than rows
    // in sequence.
    let row_bytes = (4 * dimensions + 1200).clamp(2048, 8160);
    let storage = if dimensions <= MAX_INLINE_DIMENSIONS {
        "PLAIN"
    } else {
        "EXTERNAL"
    };
    session
        .batch(&format!(
            "CREATE TABLE {table} (
                 place bigint PRIMARY KEY,
                 id text COLLATE \"C\" NOT NULL UNIQUE,
                 model bigint,
                 norm real NOT NULL,
                 words bigint NOT NULL,
                 fields jsonb NOT NULL,
                 terms tsvector NOT NULL,
                 embedding vector({dimensions}) NOT NULL,
                 metadata text NOT NULL,
                 body text NOT NULL
             ) WITH (toast_tuple_target = {row_bytes});
             ALTER TABLE {table} ALTER COLUMN embedding SET STORAGE {storage};
             CREATE INDEX ON {table} USING gin (fields jsonb_path_ops);
             CREATE INDEX ON {table} USING gin (terms)"
        ))
        .await
}
