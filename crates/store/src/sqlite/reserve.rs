//! Disk space that is kept for deleting.
//!
//! Deleting needs some space: the write-ahead log grows before the database shrinks. A file of a fixed
//! size holds that space. When the disk is full the file is removed, writes other than deletes are
//! refused, and the file is created again once there is room for it.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::Error;

/// More than what the largest transaction of a cleanup adds to the write-ahead log.
pub(crate) const BYTES: usize = 8 << 20;

#[derive(Debug)]
pub(crate) struct DiskReserve {
    file: PathBuf,
    full: AtomicBool,
}

impl DiskReserve {
    pub(crate) fn new(file: PathBuf) -> Self {
        Self {
            file,
            full: AtomicBool::new(false),
        }
    }

    /// Whether the disk is full, and only deletes are accepted.
    pub(crate) fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }

    /// Opens something in the data directory; on a full disk a second time without the reserve.
    pub(crate) fn open<T>(&self, open: impl Fn() -> Result<T, Error>) -> Result<T, Error> {
        match open() {
            Err(error) if error.may_be_full_disk() && self.file.exists() => {
                self.release();
                open()
            }
            outcome => outcome,
        }
    }

    /// Gives the space to whoever needs it to delete.
    pub(crate) fn release(&self) {
        if !self.full.swap(true, Ordering::Relaxed) {
            tracing::error!(
                file = %self.file.display(),
                "the disk is full: only deletes are accepted until there is free space again"
            );
        }
        metrics::gauge!("ragstone_disk_full").set(1.0);
        // Gone already, most likely.
        let _ = std::fs::remove_file(&self.file);
    }

    /// Sets the space aside if there is enough.
    pub(crate) fn fill(&self) {
        match fill(&self.file) {
            Ok(()) => {
                if self.full.swap(false, Ordering::Relaxed) {
                    tracing::info!("there is free space on the disk again: all writes are accepted");
                }
                metrics::gauge!("ragstone_disk_full").set(0.0);
            }
            Err(error) => {
                tracing::debug!(%error, "could not reserve disk space");
                self.release();
            }
        }
    }
}

fn fill(path: &Path) -> std::io::Result<()> {
    if std::fs::metadata(path).is_ok_and(|file| file.len() == BYTES as u64) {
        return Ok(());
    }
    let mut file = File::create(path)?;
    let zeros = vec![0; 1 << 20];
    for _ in 0..BYTES / zeros.len() {
        file.write_all(&zeros)?;
    }
    file.flush()
}
