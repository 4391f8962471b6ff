//! Reads of records.

use async_trait::async_trait;
use ragstone_core::records::{Applied, Millis, Record, RecordChange, RecordCounts, RecordRange, Records};
use ragstone_core::storage::StorageError;
use rusqlite::{Connection, OptionalExtension, Row, params};

use crate::SqliteStore;

fn read_record(row: &Row<'_>) -> rusqlite::Result<Record> {
    Ok(Record {
        key: row.get(0)?,
        group: row.get(1)?,
        value: row.get(2)?,
        version: row.get(3)?,
        run_at: row.get(4)?,
    })
}

/// The records whose time to run has come, the earliest first.
pub(crate) fn ready_records(
    connection: &Connection,
    kind: &str,
    limit: usize,
    now: Millis,
) -> rusqlite::Result<Vec<Record>> {
    connection
        .prepare_cached(
            "SELECT key, grp, value, version, due FROM records
             WHERE kind = ?1 AND due <= ?2 AND due IS NOT NULL ORDER BY due, key LIMIT ?3",
        )?
        .query_map(params![kind, now, sql_limit(limit)], read_record)?
        .collect()
}

fn sql_limit(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(i64::MAX)
}

#[async_trait]
impl Records for SqliteStore {
    async fn apply(&self, changes: Vec<RecordChange>) -> Result<Vec<Applied>, StorageError> {
        let bytes = changes.iter().map(size).sum();
        Ok(self.write_records(bytes, changes).await?)
    }

    async fn get(&self, kind: &str, keys: &[String]) -> Result<Vec<Record>, StorageError> {
        let (kind, keys) = (kind.to_owned(), keys.to_vec());
        Ok(self
            .read(move |connection| {
                let mut find = connection.prepare_cached(
                    "SELECT key, grp, value, version, due FROM records WHERE kind = ?1 AND key = ?2",
                )?;
                let mut records = Vec::with_capacity(keys.len());
                for key in keys {
                    records.extend(find.query_row((&kind, key), read_record).optional()?);
                }
                Ok(records)
            })
            .await?)
    }

    async fn list(&self, kind: &str, range: RecordRange) -> Result<Vec<Record>, StorageError> {
        let kind = kind.to_owned();
        Ok(self
            .read(move |connection| {
                let mut sql = "SELECT key, grp, value, version, due FROM records WHERE kind = ?1".to_owned();
                if range.group.is_some() {
                    // The condition lets SQLite use the index, which leaves ungrouped records out.
                    sql += if range.group.as_deref() == Some("") {
                        " AND grp = ?2"
                    } else {
                        " AND grp = ?2 AND grp <> ''"
                    };
                } else {
                    sql += " AND ?2 IS NULL";
                }
                sql += match (range.after.is_some(), range.descending) {
                    (true, false) => " AND key > ?3 ORDER BY key LIMIT ?4",
                    (true, true) => " AND key < ?3 ORDER BY key DESC LIMIT ?4",
                    (false, false) => " AND ?3 IS NULL ORDER BY key LIMIT ?4",
                    (false, true) => " AND ?3 IS NULL ORDER BY key DESC LIMIT ?4",
                };
                let mut list = connection.prepare_cached(&sql)?;
                let rows = list.query_map(
                    params![kind, range.group, range.after, sql_limit(range.limit)],
                    read_record,
                )?;
                Ok(rows.collect::<rusqlite::Result<_>>()?)
            })
            .await?)
    }

    async fn counts(&self, kind: &str) -> Result<RecordCounts, StorageError> {
        let kind = kind.to_owned();
        Ok(self
            .read(move |connection| {
                let count = |sql| {
                    connection
                        .prepare_cached(sql)?
                        .query_row([&kind], |row| row.get(0))
                };
                Ok(RecordCounts {
                    total: count("SELECT count(*) FROM records WHERE kind = ?1")?,
                    waiting: count("SELECT count(*) FROM records WHERE kind = ?1 AND due IS NOT NULL")?,
                })
            })
            .await?)
    }

    async fn ready(&self, kind: &str, limit: usize, now: Millis) -> Result<Vec<Record>, StorageError> {
        let kind = kind.to_owned();
        Ok(self
            .read(move |connection| Ok(ready_records(connection, &kind, limit, now)?))
            .await?)
    }

    async fn claim(
        &self,
        kind: &str,
        limit: usize,
        now: Millis,
        lease_until: Millis,
    ) -> Result<Vec<Record>, StorageError> {
        let kind = kind.to_owned();
        Ok(self
            .write(limit.saturating_mul(256), move |transaction| {
                transaction.claim_records(&kind, limit, now, lease_until)
            })
            .await?)
    }
}

fn size(change: &RecordChange) -> usize {
    128 + match change {
        RecordChange::Put { key, value, .. } => key.len() + value.len(),
        RecordChange::Delete { key, .. } => key.len(),
    }
}
