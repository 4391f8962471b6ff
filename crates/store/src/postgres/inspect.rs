//! Inspects a database without changing it.

use std::fmt;
use std::time::Duration;

use super::pool::{PoolSize, Session, pool};
use super::read::width;
use super::schema::{applied, known};
use super::statement::Statement;
use super::url::PostgresUrl;
use super::{READ_DEADLINE, within};
use crate::error::{Error, Result};
use crate::sqlite::InspectedCollection;

#[derive(Debug)]
pub struct PostgresInspection {
    pub server: String,
    /// The version of pgvector that is, or would be, installed.
    pub pgvector: String,
    /// Number of applied migrations; 0 for an unused database.
    pub schema: i64,
    /// Number of migrations that this version knows.
    pub known_schema: i64,
    /// Empty if the schema is of another version.
    pub collections: Vec<InspectedCollection>,
}

impl fmt::Display for PostgresInspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            server,
            pgvector,
            schema,
            known_schema,
            collections,
        } = self;
        let visible = collections.iter().filter(|found| !found.name.starts_with('.'));
        let visible = visible.count();
        write!(
            f,
            "Postgres {server}, pgvector {pgvector}, schema {schema} of {known_schema}, {visible} collections"
        )
    }
}

/// Describes the database, or returns why it cannot be used.
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
        let (session, rows) = Session::read(&pool, &versions).await?;
        let row = rows
            .first()
            .ok_or_else(|| Error::Damaged("a row is missing".into()))?;
        let schema = applied(&session).await?;
        let known_schema = known();
        let collections = match schema == known_schema {
            true => inspected_collections(&session).await?,
            false => Vec::new(),
        };
        Ok(PostgresInspection {
            server: row.try_get(0)?,
            pgvector: row
                .try_get::<_, Option<String>>(1)?
                .ok_or(Error::NoVectorExtension(None))?,
            schema,
            known_schema,
            collections,
        })
    })
    .await
}

async fn inspected_collections(session: &Session) -> Result<Vec<InspectedCollection>> {
    let all = Statement::new("SELECT name, metadata, dimensions FROM ragstone.collections ORDER BY name");
    let rows = session.query(&all).await?;
    rows.iter()
        .map(|row| {
            Ok(InspectedCollection {
                name: row.try_get(0)?,
                metadata: serde_json::from_str(row.try_get(1)?)?,
                dimensions: width(row.try_get(2)?),
            })
        })
        .collect()
}
