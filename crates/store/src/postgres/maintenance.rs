//! Background work, done by one of the processes: building the indexes of large collections, and
//! dropping discarded tables.

use std::collections::HashMap;
use std::sync::Arc;

use deadpool_postgres::Object;
use tokio::sync::Notify;
use tokio_postgres::error::SqlState;

use super::PostgresThresholds;
use super::pool::Pool;
use super::schema::table;
use crate::error::{Error, Result};

/// Growth between two checks, as a share, from which on a collection counts as being filled.
const MIN_GROWTH: f64 = 0.02;
/// First key of the advisory lock for building an index. The second is the number of the table.
const BUILD_LOCK: i32 = 0x7261_6773;

/// Half-precision vectors, as the index stores them. The index is half as large and faster to build;
/// the exact order is computed from the full vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HalfPrecision {
    dimensions: usize,
}

impl HalfPrecision {
    const WIDEST: usize = 4000;

    /// `None` for vectors that are too wide for an index.
    pub(super) fn of(dimensions: usize) -> Option<Self> {
        (dimensions <= Self::WIDEST).then_some(Self { dimensions })
    }

    pub(super) fn expression(self, vector: &str) -> String {
        format!("({vector}::halfvec({}))", self.dimensions)
    }
}

pub(super) struct Maintenance {
    pool: Pool,
    /// Notified when a table was discarded.
    wake: Arc<Notify>,
    thresholds: PostgresThresholds,
    /// Number of documents of each collection at the last check, by the number of its table.
    sizes: HashMap<i64, u64>,
}

impl Maintenance {
    pub(super) fn new(pool: Pool, wake: Arc<Notify>, thresholds: PostgresThresholds) -> Self {
        Self {
            pool,
            wake,
            thresholds,
            sizes: HashMap::new(),
        }
    }

    pub(super) async fn run(mut self) {
        let mut checks = tokio::time::interval(self.thresholds.settle);
        checks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = self.wake.notified() => {}
                _ = checks.tick() => {
                    if let Err(error) = self.build_one().await {
                        tracing::warn!(%error, "could not build an index; retrying");
                    }
                }
            }
            if let Err(error) = self.drop_discarded().await {
                tracing::debug!(%error, "could not drop discarded tables yet");
            }
        }
    }

    async fn drop_discarded(&self) -> Result<()> {
        let client = self.pool.get().await?;
        let rows = client
            .query("SELECT relation FROM ragstone.discarded ORDER BY relation", &[])
            .await?;
        for row in rows {
            let relation: i64 = row.try_get(0)?;
            // Does not wait for long reads; the next run tries again.
            let dropped = client
                .batch_execute(&format!(
                    "BEGIN;
                     SET LOCAL lock_timeout = '1s';
                     DROP TABLE IF EXISTS {};
                     DELETE FROM ragstone.discarded WHERE relation = {relation};
                     COMMIT",
                    table(relation)
                ))
                .await;
            if let Err(error) = dropped {
                client.batch_execute("ROLLBACK").await?;
                if error.code() != Some(&SqlState::LOCK_NOT_AVAILABLE) {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Builds the index of one collection that needs it and is not being filled.
    async fn build_one(&mut self) -> Result<()> {
        let client = self.pool.get().await?;
        let rows = client
            .query(
                "SELECT relation, dimensions, documents FROM ragstone.collections
                 WHERE relation IS NOT NULL AND documents >= $1 AND NOT EXISTS (
                     SELECT FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
                     WHERE relname = 'near_' || relation AND indisvalid
                       AND relnamespace = 'ragstone'::regnamespace)",
                &[&i64::try_from(self.thresholds.index_from).unwrap_or(i64::MAX)],
            )
            .await?;
        let mut sizes = HashMap::new();
        let mut ready = None;
        for row in rows {
            let (relation, dimensions, documents) = (
                row.try_get::<_, i64>(0)?,
                super::read::width(row.try_get(1)?).unwrap_or(0),
                row.try_get::<_, i64>(2)?.unsigned_abs(),
            );
            let before = self.sizes.get(&relation).copied();
            let settled = before
                .is_some_and(|before| documents.abs_diff(before) as f64 <= MIN_GROWTH * documents as f64);
            if let Some(vectors) = HalfPrecision::of(dimensions).filter(|_| settled && ready.is_none()) {
                ready = Some((relation, vectors));
            }
            sizes.insert(relation, documents);
        }
        self.sizes = sizes;
        match ready {
            Some((relation, vectors)) => build(client, relation, vectors).await,
            None => Ok(()),
        }
    }
}

/// Builds an index unless another process is building it. The lock belongs to the connection, so it
/// ends with a process that dies, and the next one builds the index anew.
async fn build(client: Object, relation: i64, vectors: HalfPrecision) -> Result<()> {
    // Does not return to the pool: the settings and the lock end with the connection.
    let client = Object::take(client);
    let number = i32::try_from(relation % i64::from(i32::MAX)).unwrap_or_default();
    let locked = client
        .query_one("SELECT pg_try_advisory_lock($1, $2)", &[&BUILD_LOCK, &number])
        .await?;
    if !locked.try_get::<_, bool>(0)? {
        return Ok(());
    }
    let index = format!("near_{relation}");
    tracing::info!(index, "building the index of a large collection");
    let started = std::time::Instant::now();
    client.batch_execute("SET statement_timeout = 0").await?;
    client
        .batch_execute(&format!("DROP INDEX CONCURRENTLY IF EXISTS ragstone.{index}"))
        .await?;
    let built = client
        .batch_execute(&format!(
            "CREATE INDEX CONCURRENTLY {index} ON {} USING hnsw ({} halfvec_ip_ops)",
            table(relation),
            vectors.expression("embedding"),
        ))
        .await;
    match built {
        // The collection was emptied meanwhile.
        Err(error) if error.code() == Some(&SqlState::UNDEFINED_TABLE) => Ok(()),
        Err(error) => Err(Error::from(error)),
        Ok(()) => {
            // The index of earlier versions, with full-precision numbers.
            client
                .batch_execute(&format!(
                    "DROP INDEX CONCURRENTLY IF EXISTS ragstone.nearest_{relation}"
                ))
                .await?;
            client
                .batch_execute(&format!("ANALYZE {}", table(relation)))
                .await?;
            tracing::info!(index, seconds = started.elapsed().as_secs(), "index built");
            Ok(())
        }
    }
}
