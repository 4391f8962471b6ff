//! Checks of the paths of a backup: never a file of a store that is in use, and never over another
//! file.

use std::fs::{File, Metadata};
use std::io::Read;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags};

use super::with_suffix;
use crate::error::{Error, Result};
use crate::sqlite::schema::{DATABASE_FILE, LOCK_FILE};

/// Suffixes of the files beside the database.
const BESIDE: [&str; 5] = ["", "-wal", "-shm", "-journal", ".restoring"];

pub(super) fn check_target(directory: &Path, file: &Path) -> Result<()> {
    let refused = |reason: &str| Error::BackupPlace {
        path: file.to_owned(),
        reason: reason.to_owned(),
    };
    let folder = folder(file);
    if !folder.is_dir() {
        return Err(refused(&format!("there is no folder {}", folder.display())));
    }
    // A folder with a lock file is a data directory.
    let anothers = folder.join(LOCK_FILE).exists() && has_own_name(folder, file);
    if anothers || is_own(directory, file) {
        return Err(refused("this is a file of the store itself"));
    }
    match std::fs::metadata(file) {
        Ok(there) if !there.is_file() => Err(refused("this is not a file")),
        Ok(there) if there.len() > 0 && !is_backup(file) => Err(refused(
            "a file is there that is not a backup: name another, or remove it",
        )),
        _ => Ok(()),
    }
}

pub(super) fn check_source(directory: &Path, file: &Path) -> Result<()> {
    let refused = |reason: &str| Error::NotABackup {
        path: file.to_owned(),
        reason: reason.to_owned(),
    };
    if is_own(directory, file) {
        return Err(refused("it is a file of the store that would be written"));
    }
    let log = std::fs::metadata(with_suffix(file, "-wal"));
    if log.is_ok_and(|log| log.len() > 0) {
        return Err(refused(
            "it is a database in use, whose log beside it has what was written last; `ragstone backup` makes one file of both",
        ));
    }
    Ok(())
}

fn folder(file: &Path) -> &Path {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new("."))
}

fn own_files(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let database = directory.join(DATABASE_FILE);
    let lock = directory.join(LOCK_FILE);
    BESIDE
        .iter()
        .map(move |suffix| with_suffix(&database, suffix))
        .chain([lock])
}

fn has_own_name(directory: &Path, file: &Path) -> bool {
    own_files(directory).any(|own| own.file_name() == file.file_name())
}

/// Whether a path is, or would become, a file of a data directory.
fn is_own(directory: &Path, file: &Path) -> bool {
    let same_folder = match (directory.canonicalize(), folder(file).canonicalize()) {
        (Ok(directory), Ok(folder)) => directory == folder,
        _ => false,
    };
    (same_folder && has_own_name(directory, file)) || own_files(directory).any(|own| same(&own, file))
}

/// Follows symbolic and hard links.
fn same(own: &Path, other: &Path) -> bool {
    match (std::fs::metadata(own), std::fs::metadata(other)) {
        (Ok(own_facts), Ok(facts)) => {
            same_inode(&own_facts, &facts) || own.canonicalize().ok() == other.canonicalize().ok()
        }
        _ => false,
    }
}

#[cfg(unix)]
fn same_inode(own: &Metadata, other: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (own.dev(), own.ino()) == (other.dev(), other.ino())
}

#[cfg(not(unix))]
fn same_inode(_: &Metadata, _: &Metadata) -> bool {
    false
}

/// Whether a file is a Ragstone database without a write-ahead log, as backups are; one that a server
/// has used has a log.
fn is_backup(file: &Path) -> bool {
    const SIGNATURE: &[u8] = b"SQLite format 3\0";
    const WITHOUT_LOG: &[u8] = &[1, 1];
    let mut header = [0; 20];
    let read = File::open(file).and_then(|mut file| file.read_exact(&mut header));
    if read.is_err() || !header.starts_with(SIGNATURE) || !header.ends_with(WITHOUT_LOG) {
        return false;
    }
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let tables = Connection::open_with_flags(file, flags).and_then(|connection| {
        connection.query_row(
            "SELECT count(*) FROM sqlite_schema WHERE name IN ('collections', 'documents', 'records')",
            [],
            |row| row.get::<_, u32>(0),
        )
    });
    tables.is_ok_and(|tables| tables == 3)
}
