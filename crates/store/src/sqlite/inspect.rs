//! Inspects a data directory for diagnosis. Nothing is created, migrated or locked, and a server may be
//! running on it.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use rusqlite::Connection;

use crate::error::{Error, Result};
use crate::sqlite::schema::{DATABASE_FILE, LOCK_FILE, MIGRATIONS, open_reader};

#[derive(Debug)]
pub struct Inspection {
    /// The schema version of the file, and the newest that this version knows.
    pub schema: i64,
    pub known_schema: i64,
    /// Problems that SQLite found in the file; empty if there are none.
    pub problems: Vec<String>,
    pub collections: Vec<InspectedCollection>,
}

#[derive(Debug)]
pub struct InspectedCollection {
    /// Names of internal collections begin with a dot.
    pub name: String,
    pub dimensions: Option<usize>,
    pub metadata: ragstone_core::Metadata,
}

/// Whether a data directory has a database. Creates nothing.
pub fn has_database(directory: &Path) -> bool {
    directory.join(DATABASE_FILE).exists()
}

/// Checks that this process may read and write the existing files of a database. Neither changes nor
/// locks them.
pub fn check_access(directory: &Path) -> Result<()> {
    let database = ["", "-wal", "-shm"].map(|suffix| format!("{DATABASE_FILE}{suffix}"));
    for name in database.iter().map(String::as_str).chain([LOCK_FILE]) {
        let path = directory.join(name);
        match File::options().read(true).write(true).open(&path) {
            Ok(_) => {}
            Err(reason) if reason.kind() == ErrorKind::NotFound => {}
            Err(reason) => return Err(Error::Directory { path, reason }),
        }
    }
    Ok(())
}

/// Returns `None` if there is no database. Blocks; checking a large file takes seconds.
pub fn inspect(directory: &Path) -> Result<Option<Inspection>> {
    if !has_database(directory) {
        return Ok(None);
    }
    let database = directory.join(DATABASE_FILE);
    crate::sqlite::vec_extension::register();
    let connection = open_reader(&database)?;
    let schema = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let known_schema = MIGRATIONS.len() as i64;
    let readable = (1..=known_schema).contains(&schema);
    Ok(Some(Inspection {
        schema,
        known_schema,
        problems: problems(&connection)?,
        collections: if readable {
            collections(&connection)?
        } else {
            Vec::new()
        },
    }))
}

/// Problems that SQLite finds in a file; empty if there are none.
pub(crate) fn problems(connection: &Connection) -> Result<Vec<String>> {
    let mut check = connection.prepare("PRAGMA integrity_check(10)")?;
    let lines = check.query_map([], |row| row.get::<_, String>(0))?;
    let mut problems = lines.collect::<rusqlite::Result<Vec<_>>>()?;
    problems.retain(|line| line != "ok");
    Ok(problems)
}

fn collections(connection: &Connection) -> Result<Vec<InspectedCollection>> {
    let mut all = connection.prepare("SELECT name, dimensions, metadata FROM collections ORDER BY name")?;
    let mut rows = all.query([])?;
    let mut collections = Vec::new();
    while let Some(row) = rows.next()? {
        collections.push(InspectedCollection {
            name: row.get(0)?,
            dimensions: row.get(1)?,
            metadata: serde_json::from_str(&row.get::<_, String>(2)?)?,
        });
    }
    Ok(collections)
}
