//! Steps that change records.

use ragstone_core::records::{Applied, Expect, Millis, Record, RecordChange};
use rusqlite::{OptionalExtension, params};

use super::transaction::Transaction;
use crate::error::Result;

impl Transaction<'_> {
    pub(crate) fn apply_records(&mut self, changes: Vec<RecordChange>) -> Result<Vec<Applied>> {
        changes
            .into_iter()
            .map(|change| self.apply_record(change))
            .collect()
    }

    fn apply_record(&mut self, change: RecordChange) -> Result<Applied> {
        match change {
            RecordChange::Put {
                kind,
                key,
                group,
                value,
                run_at,
                expect,
            } => {
                let version = self.next_record_version();
                let done = Applied::Done {
                    version: version as u64,
                };
                if let Expect::Version(expected) = expect {
                    // The usual case, the same version and group, is one statement that does not
                    // touch the index of groups.
                    let replaced = self
                        .connection
                        .prepare_cached(
                            "UPDATE records SET value = ?4, version = ?5, due = ?6
                             WHERE kind = ?1 AND key = ?2 AND grp = ?3 AND version = ?7",
                        )?
                        .execute(params![kind, key, group, value, version, run_at, expected])?;
                    if replaced > 0 {
                        return Ok(done);
                    }
                }
                if expect != Expect::Anything && !holds(expect, self.record_version(&kind, &key)?) {
                    return Ok(Applied::Skipped);
                }
                self.connection
                    .prepare_cached(
                        "INSERT INTO records (kind, key, grp, value, version, due) VALUES (?1, ?2, ?3, ?4, ?5, ?6)
                         ON CONFLICT (kind, key) DO UPDATE SET
                         grp = excluded.grp, value = excluded.value, version = excluded.version, due = excluded.due",
                    )?
                    .execute(params![kind, key, group, value, version, run_at])?;
                Ok(done)
            }
            RecordChange::Delete { kind, key, expect } => {
                let version = self.record_version(&kind, &key)?;
                let Some(version) = version.filter(|_| holds(expect, version)) else {
                    return Ok(Applied::Skipped);
                };
                self.connection
                    .prepare_cached("DELETE FROM records WHERE kind = ?1 AND key = ?2")?
                    .execute((kind, key))?;
                Ok(Applied::Done { version })
            }
        }
    }

    /// A claim gives the record a new version, so that the holder of an expired lease can no longer
    /// finish the work.
    pub(crate) fn claim_records(
        &mut self,
        kind: &str,
        limit: usize,
        now: Millis,
        lease_until: Millis,
    ) -> Result<Vec<Record>> {
        let mut records = crate::sqlite::records::ready_records(self.connection, kind, limit, now)?;
        for record in &mut records {
            record.version = self.next_record_version() as u64;
            record.run_at = Some(lease_until);
            self.connection
                .prepare_cached("UPDATE records SET due = ?3, version = ?4 WHERE kind = ?1 AND key = ?2")?
                .execute(params![kind, record.key, lease_until, record.version])?;
        }
        Ok(records)
    }

    fn record_version(&self, kind: &str, key: &str) -> Result<Option<u64>> {
        Ok(self
            .connection
            .prepare_cached("SELECT version FROM records WHERE kind = ?1 AND key = ?2")?
            .query_row((kind, key), |row| row.get(0))
            .optional()?)
    }

    fn next_record_version(&mut self) -> i64 {
        *self.record_clock += 1;
        *self.record_clock
    }
}

fn holds(expect: Expect, version: Option<u64>) -> bool {
    match expect {
        Expect::Anything => true,
        Expect::Absent => version.is_none(),
        Expect::Version(expected) => version == Some(expected),
    }
}
