//! Small durable records.

use futures::{StreamExt, TryStreamExt};
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange, RecordCounts, RecordRange};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::encode::{escape, unescape};
use super::pool::{Pool, Session};
use super::statement::Statement;
use crate::error::{Error, Result};

const COLUMNS: &str = "key, grp, value, version, due";
/// Number of changes in flight. They are sent, and so made, in order.
const PIPELINE: usize = 32;

fn read_record(row: &Row) -> Result<Record> {
    Ok(Record {
        key: unescape(row.try_get(0)?),
        group: unescape(row.try_get(1)?),
        value: row.try_get(2)?,
        version: row.try_get::<_, i64>(3)?.unsigned_abs(),
        run_at: row.try_get(4)?,
    })
}

pub(super) async fn apply(session: Session, changes: &[RecordChange]) -> Result<Vec<Applied>> {
    let applying: Vec<_> = changes
        .iter()
        .map(|change| apply_one(&session, change_statement(change)))
        .collect();
    let applied = futures::stream::iter(applying)
        .buffered(PIPELINE)
        .try_collect()
        .await?;
    session.commit().await?;
    Ok(applied)
}

async fn apply_one(session: &Session, statement: Option<Statement>) -> Result<Applied> {
    let Some(statement) = statement else {
        return Ok(Applied::Skipped);
    };
    match session.query(&statement).await?.first() {
        Some(row) => Ok(Applied::Done {
            version: row.try_get::<_, i64>(0)?.unsigned_abs(),
        }),
        None => Ok(Applied::Skipped),
    }
}

/// A statement that returns the version if the change was made. `None` for deleting an absent record,
/// which never happens.
fn change_statement(change: &RecordChange) -> Option<Statement> {
    let mut statement = Statement::default();
    match change {
        RecordChange::Put {
            kind,
            key,
            group,
            value,
            run_at,
            expect,
        } => {
            let kind = statement.remember(escape(kind).into_owned(), Type::TEXT);
            let key = statement.remember(escape(key).into_owned(), Type::TEXT);
            let group = statement.remember(escape(group).into_owned(), Type::TEXT);
            let value = statement.remember(value.clone(), Type::BYTEA);
            let run_at = statement.remember(*run_at, Type::INT8);
            let insert = format!(
                "INSERT INTO ragstone.records (kind, key, grp, value, version, due)
                 VALUES ({kind}, {key}, {group}, {value}, nextval('ragstone.record_clock'), {run_at})
                 ON CONFLICT (kind, key) DO"
            );
            let set = format!(
                "SET grp = {group}, value = {value}, version = nextval('ragstone.record_clock'), due = {run_at}"
            );
            match expect {
                // The version is drawn after the row is locked, so that it grows with every write.
                Expect::Anything => statement.push(&format!("{insert} UPDATE {set}")),
                Expect::Absent => statement.push(&format!("{insert} NOTHING")),
                Expect::Version(version) => statement
                    .push(&format!(
                        "UPDATE ragstone.records {set} WHERE kind = {kind} AND key = {key} AND version = "
                    ))
                    .number(stored_version(*version)),
            };
        }
        RecordChange::Delete { kind, key, expect } => {
            statement
                .push("DELETE FROM ragstone.records WHERE kind = ")
                .text(escape(kind))
                .push(" AND key = ")
                .text(escape(key));
            match expect {
                Expect::Anything => {}
                Expect::Absent => return None,
                Expect::Version(version) => {
                    statement.push(" AND version = ").number(stored_version(*version));
                }
            }
        }
    }
    statement.push(" RETURNING version");
    Some(statement)
}

/// A version that does not fit matches no record.
fn stored_version(version: u64) -> i64 {
    i64::try_from(version).unwrap_or(-1)
}

pub(super) async fn get(pool: &Pool, kind: &str, keys: &[String]) -> Result<Vec<Record>> {
    let keys: Vec<String> = keys.iter().map(|key| escape(key).into_owned()).collect();
    let mut find = Statement::new(format!("SELECT {COLUMNS} FROM ragstone.records WHERE kind = "));
    find.text(escape(kind))
        .push(" AND key = ANY (")
        .bind(keys, Type::TEXT_ARRAY)
        .push(") ORDER BY key");
    read_all(pool, &find).await
}

pub(super) async fn list(pool: &Pool, kind: &str, range: &RecordRange) -> Result<Vec<Record>> {
    let mut list = Statement::new(format!("SELECT {COLUMNS} FROM ragstone.records WHERE kind = "));
    list.text(escape(kind));
    if let Some(group) = &range.group {
        list.push(" AND grp = ").text(escape(group));
        if !group.is_empty() {
            // The condition lets Postgres use the index, which leaves ungrouped records out.
            list.push(" AND grp <> ''");
        }
    }
    if let Some(after) = &range.after {
        let compare = if range.descending {
            " AND key < "
        } else {
            " AND key > "
        };
        list.push(compare).text(escape(after));
    }
    let order = if range.descending {
        " ORDER BY key DESC"
    } else {
        " ORDER BY key"
    };
    list.push(order).limit(range.limit);
    read_all(pool, &list).await
}

async fn read_all(pool: &Pool, statement: &Statement) -> Result<Vec<Record>> {
    let (_session, rows) = Session::read(pool, statement).await?;
    rows.iter().map(read_record).collect()
}

pub(super) async fn counts(pool: &Pool, kind: &str) -> Result<RecordCounts> {
    let mut count = Statement::new("SELECT count(*), count(due) FROM ragstone.records WHERE kind = ");
    count.text(escape(kind));
    let (_session, rows) = Session::read(pool, &count).await?;
    let row = rows
        .first()
        .ok_or_else(|| Error::Damaged("a row is missing".into()))?;
    Ok(RecordCounts {
        total: row.try_get::<_, i64>(0)?.unsigned_abs(),
        waiting: row.try_get::<_, i64>(1)?.unsigned_abs(),
    })
}

pub(super) async fn ready(pool: &Pool, kind: &str, limit: usize, now: Millis) -> Result<Vec<Record>> {
    let mut ready = Statement::new(format!("SELECT {COLUMNS} FROM ragstone.records WHERE kind = "));
    ready
        .text(escape(kind))
        .push(" AND due <= ")
        .number(now)
        .push(" ORDER BY due, key")
        .limit(limit);
    read_all(pool, &ready).await
}

/// Parameters of [`claim`].
pub(super) struct ClaimStatement<'a> {
    pub(super) kind: &'a str,
    pub(super) limit: usize,
    pub(super) now: Millis,
    pub(super) lease_until: Millis,
}

/// A claim gives the record a new version, so that the holder of an expired lease can no longer finish
/// the work. Records that another process is claiming are skipped, not waited for.
pub(super) async fn claim(session: Session, claim: &ClaimStatement<'_>) -> Result<Vec<Record>> {
    let mut update =
        Statement::new("WITH longest AS (SELECT kind, key, due FROM ragstone.records WHERE kind = ");
    update
        .text(escape(claim.kind))
        .push(" AND due <= ")
        .number(claim.now)
        .push(" ORDER BY due, key")
        .limit(claim.limit)
        .push(
            " FOR UPDATE SKIP LOCKED), taken AS (
             UPDATE ragstone.records SET version = nextval('ragstone.record_clock'), due = ",
        )
        .number(claim.lease_until)
        .push(
            " FROM longest WHERE records.kind = longest.kind AND records.key = longest.key
             RETURNING records.key, grp, value, version, records.due, longest.due AS since)
             SELECT key, grp, value, version, due FROM taken ORDER BY since, key",
        );
    let rows = session.query(&update).await?;
    let records = rows.iter().map(read_record).collect::<Result<_>>()?;
    session.commit().await?;
    Ok(records)
}
