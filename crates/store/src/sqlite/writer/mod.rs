//! The writer: a thread that owns the only connection that writes.
//!
//! Queued writes share a transaction, small ones first. Each is a step with its own savepoint, so that
//! one failing does not affect the others. The snapshots of the new state are built before the commit
//! and published right after it; only then do callers get their results. Between writes the thread
//! removes deleted documents, returns free pages to the file system and empties the write-ahead log, so
//! that no file contains deleted text for long.

mod cleanup;
mod collections;
mod documents;
mod lanes;
mod log;
mod records;
#[cfg(test)]
mod tests;
mod transaction;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::sqlite::faults::Faults;
use crate::sqlite::published::Published;
use crate::sqlite::reserve::DiskReserve;
use cleanup::{Cleanup, Disk};
pub(crate) use cleanup::{deleted_rowids, purge_deleted};
pub(crate) use documents::prepare;
use lanes::{Batch, Lanes};
use log::Checkpointer;
pub(crate) use transaction::{Statements, Transaction};

/// How long the queue has to be empty before the thread tidies up.
const IDLE: Duration = Duration::from_millis(100);
/// How long written data stays untidied while writes keep coming.
const MAX_UNTIDY: Duration = Duration::from_secs(10);
/// How long closing the store takes for the removal of deleted documents. The next start goes on.
const CLOSE_CLEANUP: Duration = Duration::from_secs(5);
/// Interval of checks for free space on a full disk.
const FULL_DISK_CHECK: Duration = Duration::from_secs(5);
/// About how much a changed row adds to the write-ahead log.
const BYTES_PER_CHANGE: usize = 4096;
/// After a transaction of this many writes, the next one waits a moment for more of them, because every
/// transaction costs a few pages and a sync of the disk.
const BATCHING_WRITES: usize = 16;
const BATCH_WINDOW: Duration = Duration::from_millis(2);

/// Sends the result to the caller once the whole transaction is committed or rolled back.
type Finish = Box<dyn FnOnce(Result<(), &Error>) + Send>;

struct WriteJob {
    bytes: usize,
    run: Box<dyn FnOnce(&mut Transaction<'_>) -> Finish + Send>,
}

enum WriterMessage {
    Job(WriteJob),
    /// Tidies up now.
    Flush(oneshot::Sender<Result<()>>),
    Stop,
}

/// Limits of the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueueLimits {
    pub(crate) jobs: usize,
    pub(crate) bytes: usize,
}

pub(crate) struct Writer {
    queue: Sender<WriterMessage>,
    queued: Arc<Queued>,
    limits: QueueLimits,
    stopped: AtomicBool,
}

/// The size of the queue.
#[derive(Default)]
struct Queued {
    jobs: AtomicUsize,
    bytes: AtomicUsize,
}

impl Queued {
    /// Adds a job, unless that exceeds the limits. A job larger than the limit is accepted by an empty
    /// queue.
    fn add(&self, bytes: usize, limits: QueueLimits) -> Result<()> {
        let jobs_before = self.jobs.fetch_add(1, Ordering::Relaxed);
        let bytes_before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let full = jobs_before >= limits.jobs || (bytes_before > 0 && bytes_before + bytes > limits.bytes);
        if full {
            self.remove(1, bytes);
            return Err(Error::QueueFull);
        }
        Ok(())
    }

    fn remove(&self, jobs: usize, bytes: usize) {
        self.jobs.fetch_sub(jobs, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Writer {
    pub(crate) fn start(
        connection: Connection,
        published: Arc<Published>,
        faults: Faults,
        limits: QueueLimits,
        reserve: Arc<DiskReserve>,
    ) -> Result<(Self, JoinHandle<()>)> {
        let (queue, messages) = channel();
        let queued = Arc::new(Queued::default());
        let record_clock = connection.query_row("SELECT now FROM record_clock", [], |row| row.get(0))?;
        let cleanup = Cleanup::after_start(published.ids());
        let log = connection
            .path()
            .map(PathBuf::from)
            .map(Checkpointer::start)
            .transpose()?;
        let mut thread = WriterThread {
            log,
            connection,
            published,
            faults,
            queued: Arc::clone(&queued),
            lanes: Lanes::default(),
            flushes: Vec::new(),
            record_clock,
            cleanup,
            reserve,
            untidy_since: Some(Instant::now()),
            batching: false,
        };
        let handle = std::thread::Builder::new()
            .name("ragstone-writer".into())
            .spawn(move || thread.run(&messages))
            .map_err(|e| Error::Worker(e.to_string()))?;
        let writer = Self {
            queue,
            queued,
            limits,
            stopped: AtomicBool::new(false),
        };
        Ok((writer, handle))
    }

    /// Queues work and waits until it is durable. `bytes` is its approximate size in memory.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        bytes: usize,
        statements: Statements,
        work: impl FnOnce(&mut Transaction<'_>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = oneshot::channel();
        let run = Box::new(move |transaction: &mut Transaction<'_>| -> Finish {
            let outcome = transaction.step(statements, work);
            Box::new(move |committed| {
                let outcome = outcome.and_then(|value| committed.map_err(rolled_back).map(|()| value));
                // The caller may be gone; the write is done all the same.
                let _ = answer.send(outcome);
            })
        });
        self.queued.add(bytes, self.limits)?;
        if let Err(error) = self.send(WriterMessage::Job(WriteJob { bytes, run })) {
            self.queued.remove(1, bytes);
            return Err(error);
        }
        answered.await.unwrap_or_else(|_| {
            // It was queued after the stop, or it panicked.
            Err(if self.stopped.load(Ordering::Relaxed) {
                Error::Closed
            } else {
                Error::Worker("the write was aborted".into())
            })
        })
    }

    /// Waits until the files contain no deleted data; see [`WriterThread::tidy`].
    pub(crate) async fn flush(&self) -> Result<()> {
        let (answer, answered) = oneshot::channel();
        self.send(WriterMessage::Flush(answer))?;
        answered.await.unwrap_or(Err(Error::Closed))
    }

    /// Stops after the accepted writes.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _ = self.queue.send(WriterMessage::Stop);
    }

    fn send(&self, message: WriterMessage) -> Result<()> {
        self.queue.send(message).map_err(|_| Error::Closed)
    }
}

fn rolled_back(error: &Error) -> Error {
    match error {
        Error::DiskFull => Error::DiskFull,
        other => Error::RolledBack(other.to_string()),
    }
}

struct WriterThread {
    /// Dropped before the connection, which empties the log when it closes.
    log: Option<Checkpointer>,
    connection: Connection,
    published: Arc<Published>,
    faults: Faults,
    queued: Arc<Queued>,
    lanes: Lanes<WriteJob>,
    /// Callers that wait for a flush.
    flushes: Vec<oneshot::Sender<Result<()>>>,
    record_clock: i64,
    cleanup: Cleanup,
    reserve: Arc<DiskReserve>,
    /// When something was first written after the last tidying.
    untidy_since: Option<Instant>,
    /// The last transaction had at least [`BATCHING_WRITES`].
    batching: bool,
}

impl WriterThread {
    fn run(&mut self, messages: &Receiver<WriterMessage>) {
        let mut stopping = false;
        while !stopping || !self.lanes.is_empty() {
            if self.lanes.is_empty() {
                match self.wait(messages) {
                    Ok(message) => stopping |= self.take_in(message),
                    Err(RecvTimeoutError::Timeout) => {
                        self.use_idle_time();
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                }
            }
            if self.batching && !stopping {
                std::thread::sleep(BATCH_WINDOW);
            }
            // Nothing is accepted after the stop.
            while !stopping && let Ok(message) = messages.try_recv() {
                stopping |= self.take_in(message);
            }
            let batch = self.lanes.next(Instant::now());
            self.batching = batch.jobs.len() >= BATCHING_WRITES;
            self.write(batch);
            self.keep_up();
            if self.lanes.is_empty() {
                for answer in std::mem::take(&mut self.flushes) {
                    let _ = answer.send(self.tidy(None));
                }
            }
        }
        if let Err(error) = self.tidy(Some(Instant::now() + CLOSE_CLEANUP)) {
            tracing::warn!(%error, "could not empty the write-ahead log on shutdown");
        }
    }

    /// Waits for a message as long as there is nothing else to do.
    fn wait(
        &self,
        messages: &Receiver<WriterMessage>,
    ) -> std::result::Result<WriterMessage, RecvTimeoutError> {
        if self.cleanup.is_due() {
            messages.recv_timeout(Duration::ZERO)
        } else if self.untidy_since.is_some() || self.cleanup.is_waiting() {
            messages.recv_timeout(IDLE)
        } else if self.reserve.is_full() {
            messages.recv_timeout(FULL_DISK_CHECK)
        } else {
            messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
        }
    }

    fn use_idle_time(&mut self) {
        if self.cleanup.is_due() {
            self.clean_slice();
        } else if self.untidy_since.is_some() {
            self.tidy_slice();
        } else {
            self.restore_reserve();
        }
    }

    /// Does a little of the cleanup while writes keep coming, and tidies after a while.
    fn keep_up(&mut self) {
        if self.cleanup.is_due() {
            self.clean_slice();
            self.cleanup.ran();
        } else if self
            .untidy_since
            .is_some_and(|since| since.elapsed() > MAX_UNTIDY)
        {
            self.tidy_slice();
        }
    }

    fn noticing_full_disk(&self, error: Error) -> Error {
        if matches!(error, Error::DiskFull) {
            self.reserve.release();
        }
        error
    }

    fn clean_slice(&mut self) {
        if let Err(error) = self.clean() {
            let error = self.noticing_full_disk(error);
            tracing::warn!(%error, "could not remove deleted documents from the file; trying again");
            self.cleanup.failed();
        }
    }

    fn clean(&mut self) -> Result<()> {
        let connection = &self.connection;
        let mut transaction =
            Transaction::begin(connection, &self.published, &self.faults, &mut self.record_clock)?
                .alone(true)
                .recording(self.cleanup.recorded());
        let cleanup = &mut self.cleanup;
        let before = connection.total_changes();
        let disk = match self.reserve.is_full() {
            true => Disk::Full,
            false => Disk::HasRoom,
        };
        transaction.step(Statements::Many, |transaction| transaction.clean(cleanup, disk))?;
        let committed = transaction.commit()?;
        self.cleanup.record(committed.record);
        drop(self.published.publish(committed.snapshots));
        if self.reserve.is_full() {
            // The next slice writes to the same part of the log.
            self.empty_log()?;
        }
        let changes = self.connection.total_changes() - before;
        if changes > 0 {
            self.untidy_since.get_or_insert_with(Instant::now);
            if let Some(log) = &mut self.log {
                log.committed(changes as usize * BYTES_PER_CHANGE);
            }
        }
        Ok(())
    }

    /// Takes a message, and returns whether it was the stop.
    fn take_in(&mut self, message: WriterMessage) -> bool {
        match message {
            WriterMessage::Job(job) => self.lanes.push(job.bytes, job, Instant::now()),
            WriterMessage::Flush(answer) => self.flushes.push(answer),
            WriterMessage::Stop => return true,
        }
        false
    }

    fn write(&mut self, batch: Batch<WriteJob>) {
        if batch.jobs.is_empty() {
            return;
        }
        // Before callers get their results, so that their next write is not refused because of this
        // one.
        self.queued.remove(batch.jobs.len(), batch.bytes);
        let bytes = batch.bytes;
        // A panic is a bug, but it must not end all writing. The transaction is rolled back as it
        // unwinds, nothing of it is published, and its callers get an error.
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| self.commit(batch.jobs)));
        if outcome.is_err() {
            tracing::error!("a write panicked; its transaction was rolled back");
        }
        if let Some(log) = &mut self.log {
            log.committed(bytes);
        }
    }

    fn commit(&mut self, jobs: Vec<WriteJob>) {
        self.untidy_since.get_or_insert_with(Instant::now);
        let mut finishes: Vec<Finish> = Vec::with_capacity(jobs.len());
        let outcome = Transaction::begin(
            &self.connection,
            &self.published,
            &self.faults,
            &mut self.record_clock,
        )
        .and_then(|transaction| {
            let mut transaction = transaction
                .alone(jobs.len() == 1)
                .recording(self.cleanup.recorded());
            for job in jobs {
                finishes.push((job.run)(&mut transaction));
            }
            transaction.commit()
        });
        let outcome = match outcome {
            Ok(committed) => {
                self.cleanup.record(committed.record);
                if !committed.deleted.is_empty() {
                    self.cleanup.deleted(committed.deleted.into_iter());
                }
                Ok(self.published.publish(committed.snapshots))
            }
            Err(error) => {
                tracing::error!(%error, "a transaction was rolled back");
                Err(self.noticing_full_disk(error))
            }
        };
        for finish in finishes {
            finish(outcome.as_ref().map(|_| ()));
        }
    }

    /// Does a part of the tidying: returns some free pages, or empties the log.
    fn tidy_slice(&mut self) {
        match self.vacuum().and_then(|left| {
            let emptied = (left == 0 || self.reserve.is_full()) && self.empty_log()?;
            Ok(left == 0 && emptied)
        }) {
            Ok(true) => {
                self.untidy_since = None;
                self.restore_reserve();
            }
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "could not tidy up the database");
                self.untidy_since = None;
            }
        }
    }

    /// Removes deleted documents until the deadline, returns all free pages, and empties the log.
    fn tidy(&mut self, deadline: Option<Instant>) -> Result<()> {
        while self.cleanup.is_pending() {
            if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                tracing::info!("deleted documents are left in the file; the next start removes them");
                break;
            }
            self.clean()?;
        }
        while self.vacuum()? > 0 {
            if self.reserve.is_full() {
                self.empty_log()?;
            }
        }
        // A reader may use the log for a moment.
        for _ in 0..100 {
            if self.empty_log()? {
                self.untidy_since = None;
                self.restore_reserve();
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(Error::LogInUse)
    }

    /// Creates the reserve again if it was released and there is room.
    fn restore_reserve(&self) {
        if self.reserve.is_full() {
            self.reserve.fill();
        }
    }

    /// Returns some free pages to the file system. Returns how many are left.
    fn vacuum(&self) -> Result<i64> {
        // Moved pages go through the log, which has to fit into the reserve.
        let pages = if self.reserve.is_full() { 512 } else { 4096 };
        let free = |connection: &Connection| -> Result<i64> {
            Ok(connection.query_row("PRAGMA freelist_count", [], |row| row.get(0))?)
        };
        if free(&self.connection)? == 0 {
            return Ok(0);
        }
        self.connection
            .prepare(&format!("PRAGMA incremental_vacuum({pages})"))?
            .query([])
            .and_then(|mut rows| {
                while rows.next()?.is_some() {}
                Ok(())
            })?;
        free(&self.connection)
    }

    /// Checkpoints and truncates the log. Returns `false` if a reader still uses it.
    fn empty_log(&self) -> Result<bool> {
        let busy: i64 = self
            .connection
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
        Ok(busy == 0)
    }
}
