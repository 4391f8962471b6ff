//! Rows as they arrive.

use std::io::Read;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::kind::FileKind;
use crate::rows::{BadRow, Rows, SourceRow, rows};

/// Rows of a stream wait no longer than this for more rows.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

pub(super) enum Incoming {
    /// Rows that can be read without waiting.
    Ready(Rows),
    /// Rows of a stream, read on a thread that may block.
    Live {
        rows: Receiver<Result<SourceRow, BadRow>>,
        thread: Option<JoinHandle<()>>,
    },
}

pub(super) enum NextDocument {
    Row(Result<SourceRow, BadRow>),
    /// No row arrived in time.
    Later,
    End,
}

impl Incoming {
    pub(super) fn live(
        kind: FileKind,
        reader: impl Read + Send + 'static,
        max_row_bytes: usize,
    ) -> std::io::Result<Self> {
        // One at a time, because rows may be long.
        let (sender, receiver) = sync_channel(1);
        let thread = std::thread::Builder::new()
            .name("ingest-rows".to_owned())
            .spawn(move || {
                for row in rows(kind, reader, max_row_bytes, Vec::new()) {
                    if sender.send(row).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self::Live {
            rows: receiver,
            thread: Some(thread),
        })
    }

    /// The next row; `since` is the arrival of the first row that waits for it.
    pub(super) fn next(&mut self, since: Option<Instant>) -> NextDocument {
        let left = FLUSH_INTERVAL.saturating_sub(since.map_or(Duration::ZERO, |since| since.elapsed()));
        match self {
            Self::Ready(rows) => rows.next().map_or(NextDocument::End, NextDocument::Row),
            Self::Live { rows, thread } => match rows.recv_timeout(left) {
                Ok(row) => NextDocument::Row(row),
                Err(RecvTimeoutError::Timeout) => NextDocument::Later,
                Err(RecvTimeoutError::Disconnected) => {
                    if let Some(Err(panic)) = thread.take().map(JoinHandle::join) {
                        // Panics as if the rows had been read here.
                        std::panic::resume_unwind(panic);
                    }
                    NextDocument::End
                }
            },
        }
    }
}
