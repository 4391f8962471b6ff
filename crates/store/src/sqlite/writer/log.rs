//! Checkpoints the write-ahead log beside the writer.
//!
//! The writer checkpoints a log that has grown long, and all writes wait meanwhile. A second connection
//! does most of this ahead of time, so that the writer's own checkpoint, which alone resets the log, is
//! short.

use std::path::PathBuf;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use rusqlite::{Connection, OpenFlags};

use crate::error::{Error, Result};

/// Number of transactions, and their size, after which a checkpoint is worthwhile.
const TRANSACTIONS: usize = 64;
const BYTES: usize = 8 << 20;

pub(super) struct Checkpointer {
    /// Taken when the thread has to end.
    wake: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
    transactions: usize,
    bytes: usize,
}

impl Checkpointer {
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
                    // A passive checkpoint neither waits nor blocks.
                    let moved = connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
                    if let Err(error) = moved {
                        // The writer's own checkpoint reports the error.
                        tracing::debug!(%error, "could not checkpoint the log");
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

    /// A transaction of this size was committed.
    pub(super) fn committed(&mut self, bytes: usize) {
        self.transactions += 1;
        self.bytes += bytes;
        if (self.transactions >= TRANSACTIONS || self.bytes >= BYTES)
            && let Some(wake) = &self.wake
        {
            // If a checkpoint is running, another one follows.
            let _ = wake.try_send(());
            (self.transactions, self.bytes) = (0, 0);
        }
    }
}

impl Drop for Checkpointer {
    fn drop(&mut self) {
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
