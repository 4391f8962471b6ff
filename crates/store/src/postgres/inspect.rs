//! Looking at a database without changing it.

use std::fmt;
use std::time::Duration;

use super::pool::{PoolSize, Session, pool};
use super::schema::applied;
use super::statement::Statement;
use super::url::PostgresUrl;
use super::{READ_DEADLINE, within};
use crate::error::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostgresInspection {
    pub server: String,
    /// The version of pgvector that is, or would be, installed.
    pub pgvector: String,
    /// How many migrations have been applied; 0 of a database that was never used.
    pub schema: i64,
}

impl fmt::Display for PostgresInspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            server,
            pgvector,
            schema,
        } = self;
        write!(f, "Postgres {server}, pgvector {pgvector}, schema {schema}")
    }
}

/// Says what is there, or why it cannot be used.
pub async fn inspect_postgres(url: &PostgresUrl) -> Result<PostgresInspection> {
    let size = PoolSize {
        connections: 1,
        wait: Duration::from_secs(5),
        statement: READ_DEADLINE,
    };
    let pool = pool(url, &size)?;
    let versions = Statement::new(
        "SELECT current_setting('server_version'), coalesce(
             (SELECT extversion FROM pg_extension WHERE extname = 'vector'),
             (SELECT default_version FROM pg_available_extensions WHERE name = 'vector'))",
    );
    within(READ_DEADLINE, async {
        let (session, rows) = Session::read(&pool, &versions, None).await?;
        let row = rows
            .first()
            .ok_or_else(|| Error::Damaged("a row is missing".into()))?;
        Ok(PostgresInspection {
            server: row.try_get(0)?,
            pgvector: row
                .try_get::<_, Option<String>>(1)?
                .ok_or(Error::NoVectorExtension(None))?,
            schema: applied(&session).await?,
        })
    })
    .await
}
