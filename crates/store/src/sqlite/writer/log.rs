//! Moving the write-ahead log into the database beside the writer.
//!
//! The writer would do it itself when the log has grown long, and everybody who writes would wait
//! meanwhile. A second connection does most of it ahead of time; what came in since is little, and
//! the writer's own turn, which alone lets the log begin anew, stays short.

use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::{Connection, OpenFlags};

use crate::error::{Error, Result};

/// After so many transactions, or so much in them, there is something to move.
const TRANSACTIONS: usize = 64;
const BYTES: usize = 8 << 20;

pub(super) struct LogMover {
    /// Taken when the mover ends.
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    transactions: usize,
    bytes: usize,
}

impl LogMover {
    pub(super) fn start(database: PathBuf) -> Result<Self> {
        let (wake, woken) = sync_channel::<()>(1);
        let connection = Connection::open_with_flags(
            database,
            OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX,
        )?;
        let thread = std::thread::Builder::new()
            .name("ragstone-log".into())
            .spawn(move || {
                while woken.recv().is_ok() {
                    // Passive: it waits for nobody, and nobody for it.
                    let moved = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
                    if let Err(error) = moved {
                        // The writer comes upon it as well, and answers for it.
                        tracing::debug!(%error, "could not move the log into the database");
                    }
                }
            })
            .map_err(|e| Error::Worker(e.to_string()))?;
        Ok(Self {
            wake: Some(wake),
            thread: Some(thread),
            transactions: 0,
            bytes: 0,
        })
    }

    /// A transaction with so much in it was committed.
    pub(super) fn committed(&mut self, bytes: usize) {
        self.transactions += 1;
        self.bytes += bytes;
        if (self.transactions >= TRANSACTIONS || self.bytes >= BYTES)
            && let Some(wake) = &self.wake
        {
            // If it is still at the last one, it will be woken for this one right after.
            let _ = wake.try_send(());
            (self.transactions, self.bytes) = (0, 0);
        }
    }
}

impl Drop for LogMover {
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
