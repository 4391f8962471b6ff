//! Backups: database files with one state of the store, even while it is written to.
//!
//! Pages are copied within one read transaction. In WAL mode that neither waits for the writer nor
//! blocks it, from another process either; the write-ahead log grows until the copy is done. A backup
//! contains everything that was acknowledged before it began, and nothing that was deleted by then.

mod target;

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

use rusqlite::backup::{Backup, StepResult};
use rusqlite::{Connection, OpenFlags};

use crate::error::{Error, Result};
use crate::sqlite::inspect::problems;
use crate::sqlite::schema::{
    DATABASE_FILE, DataDirectory, LOCK_FILE, MIGRATIONS, RESERVE_FILE, open_reader, open_writer,
};
use crate::sqlite::writer::purge_deleted;

/// Number of pages copied between two reports of progress.
const PAGES: i32 = 4096;
/// Suffix of a backup that is being restored, until it has been checked.
const RESTORING: &str = ".restoring";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackedUp {
    pub collections: u64,
    pub documents: u64,
    pub bytes: u64,
}

/// Handling of a data directory that is not empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occupied {
    Refuse,
    Replace,
}

/// Copies the store of a data directory into a file, which gets its name once it is complete, checked
/// and synced. `progress` gets the number of copied pages and of all pages. Blocks.
pub fn backup(directory: &Path, file: &Path, progress: impl Fn(u64, u64)) -> Result<BackedUp> {
    let database = directory.join(DATABASE_FILE);
    if !database.exists() {
        return Err(Error::NothingToBackUp(directory.to_owned()));
    }
    target::check_target(directory, file)?;
    crate::sqlite::vec_extension::register();
    let failed = |source| Error::Backup {
        path: file.to_owned(),
        source,
    };
    let part = with_suffix(file, ".part");
    remove_if_there(&part).map_err(failed)?;
    // The journal of an earlier attempt must not be applied to this one.
    remove_if_there(&with_suffix(&part, "-journal")).map_err(failed)?;
    let done = copy(&database, &part, progress).and_then(|()| {
        let facts = check(&part)?;
        sync(&part)
            .and_then(|()| std::fs::rename(&part, file))
            .and_then(|()| sync_folder(file))
            .map_err(failed)?;
        Ok(facts)
    });
    if done.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    done
}

fn copy(database: &Path, part: &Path, progress: impl Fn(u64, u64)) -> Result<()> {
    let from = open_reader(database)?;
    // The transaction stays open, so that every step copies from the same state.
    from.execute_batch("BEGIN; SELECT count(*) FROM sqlite_schema;")?;
    let mut to = Connection::open(part)?;
    // The file is synced once, when it is complete.
    to.execute_batch("PRAGMA synchronous = OFF; PRAGMA journal_mode = OFF;")?;
    {
        let copying = Backup::new(&from, &mut to)?;
        loop {
            let step = copying.step(PAGES)?;
            let pages = copying.progress();
            let count = |pages: i32| u64::try_from(pages).unwrap_or_default();
            progress(count(pages.pagecount - pages.remaining), count(pages.pagecount));
            match step {
                StepResult::Done => break,
                StepResult::More => {}
                _ => std::thread::sleep(std::time::Duration::from_millis(10)),
            }
        }
    }
    from.execute_batch("COMMIT")?;
    purge_deleted(&to)?;
    // One file without a log, and without free pages, which may contain deleted text.
    to.execute_batch("PRAGMA journal_mode = DELETE;")?;
    let mut vacuum = to.prepare("PRAGMA incremental_vacuum")?;
    let mut rows = vacuum.query([])?;
    while rows.next()?.is_some() {}
    Ok(())
}

/// Reads and checks a whole backup.
fn check(file: &Path) -> Result<BackedUp> {
    let unfit = |reason: String| Error::NotABackup {
        path: file.to_owned(),
        reason,
    };
    let bytes = std::fs::metadata(file).map_err(|e| unfit(e.to_string()))?.len();
    let connection = Connection::open_with_flags(
        file,
        OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX,
    )
    .map_err(|e| unfit(e.to_string()))?;
    let schema: i64 = connection
        .query_row("PRAGMA user_version", [], |row| row.get(0))
        .map_err(|e| unfit(e.to_string()))?;
    let known = MIGRATIONS.len() as i64;
    if schema > known {
        return Err(Error::NewerSchema { found: schema, known });
    }
    let found = problems(&connection).map_err(|e| unfit(e.to_string()))?;
    if let Some(problem) = found.first() {
        return Err(unfit(format!("it is damaged: {problem}")));
    }
    let counts = connection.query_row(
        "SELECT (SELECT count(*) FROM collections WHERE name NOT LIKE '.%'),
                (SELECT count(*) FROM documents d JOIN collections c ON c.id = d.collection WHERE c.name NOT LIKE '.%')",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    );
    let (collections, documents) = counts.map_err(|_| unfit("it is not a Ragstone database".into()))?;
    Ok(BackedUp {
        collections,
        documents,
        bytes,
    })
}

/// Restores a backup into a data directory that is not in use. Existing data is kept until the backup
/// has been checked. Blocks.
pub fn restore(file: &Path, directory: &Path, occupied: Occupied) -> Result<BackedUp> {
    crate::sqlite::vec_extension::register();
    let failed = |reason| Error::Directory {
        path: directory.to_owned(),
        reason,
    };
    if !file.is_file() {
        return Err(Error::NotABackup {
            path: file.to_owned(),
            reason: "no such file".into(),
        });
    }
    target::check_source(directory, file)?;
    let target = DataDirectory::open(directory)?;
    if occupied == Occupied::Refuse && holds_data(directory).map_err(failed)? {
        return Err(Error::NotEmpty(directory.to_owned()));
    }
    let database = target.database();
    let incoming = with_suffix(&database, RESTORING);
    remove_if_there(&with_suffix(&incoming, "-journal")).map_err(failed)?;
    std::fs::copy(file, &incoming).map_err(failed)?;
    let facts = match check(&incoming) {
        Ok(facts) => facts,
        Err(error) => {
            let _ = std::fs::remove_file(&incoming);
            return Err(match error {
                Error::NotABackup { reason, .. } => Error::NotABackup {
                    path: file.to_owned(),
                    reason,
                },
                other => other,
            });
        }
    };
    sync(&incoming).map_err(failed)?;
    discard_log(&database).map_err(failed)?;
    std::fs::rename(&incoming, &database)
        .and_then(|()| sync_folder(&database))
        .map_err(failed)?;
    Ok(facts)
}

/// Removes the log of the replaced database, which must not be applied to the restored one.
fn discard_log(database: &Path) -> std::io::Result<()> {
    if database.exists()
        && let Ok(old) = open_writer(database)
    {
        // Makes the old database complete without its log, in case the restore is interrupted.
        let _ = old.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)");
    }
    remove_if_there(&with_suffix(database, "-wal"))?;
    remove_if_there(&with_suffix(database, "-shm"))
}

/// Whether there is data; files of an interrupted restore do not count.
fn holds_data(directory: &Path) -> std::io::Result<bool> {
    let incoming = with_suffix(Path::new(DATABASE_FILE), RESTORING);
    let no_data = [
        OsString::from(LOCK_FILE),
        OsString::from(RESERVE_FILE),
        with_suffix(&incoming, "-journal").into(),
        incoming.into(),
    ];
    for entry in std::fs::read_dir(directory)? {
        if !no_data.contains(&entry?.file_name()) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn sync(file: &Path) -> std::io::Result<()> {
    File::options().write(true).open(file)?.sync_all()
}

/// Makes the name of a file durable.
fn sync_folder(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}
