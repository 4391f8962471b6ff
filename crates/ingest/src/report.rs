//! Progress and result of a run.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Further errors are only counted.
const MAX_ERRORS: usize = 100;

/// Counts of documents, which are files or rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentCounts {
    pub added: u64,
    pub changed: u64,
    pub unchanged: u64,
    pub removed: u64,
    pub failed: u64,
    /// Files in folders whose type cannot be read.
    pub skipped: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkCounts {
    pub added: u64,
    pub changed: u64,
    pub unchanged: u64,
    pub removed: u64,
    /// Sent to the model.
    pub embedded: u64,
    /// Content that had a vector already.
    pub reused: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ItemError {
    pub source: String,
    pub error: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    pub documents: DocumentCounts,
    pub chunks: ChunkCounts,
    /// Tokens that the model read.
    pub tokens: u64,
    /// Bytes of input that are processed.
    pub bytes: u64,
    pub errors: Vec<ItemError>,
    /// Of these, bytes of documents that could not be read, which are not part of the rate.
    #[serde(default)]
    pub failed_bytes: u64,
    /// Extensions of skipped files.
    #[serde(default)]
    pub skipped_types: BTreeSet<String>,
    /// Errors that are not in the list.
    pub more_errors: u64,
    /// Problems that did not make a document fail.
    #[serde(default)]
    pub warnings: Vec<ItemError>,
}

impl Report {
    pub fn fail(&mut self, source: impl Into<String>, error: impl Into<String>) {
        self.documents.failed += 1;
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(ItemError {
                source: source.into(),
                error: error.into(),
            });
        } else {
            self.more_errors += 1;
        }
    }

    /// Counts a file in a folder whose type cannot be read.
    pub fn skip(&mut self, source: &str) {
        self.documents.skipped += 1;
        let extension = Path::new(source).extension().and_then(|e| e.to_str());
        if self.skipped_types.len() < MAX_ERRORS {
            let name = extension.map_or("no extension".to_owned(), |e| {
                format!(".{}", e.to_ascii_lowercase())
            });
            self.skipped_types.insert(name);
        }
    }

    /// Estimated time for the rest of `total` bytes; unknown before the first chunk is embedded.
    pub fn time_left(&self, elapsed: Duration, total: u64) -> Option<Duration> {
        let done = self.bytes.saturating_sub(self.failed_bytes);
        let left = total.checked_sub(self.bytes).filter(|left| *left > 0)?;
        (done > 0 && self.chunks.embedded > 0).then(|| elapsed.mul_f64(left as f64 / done as f64))
    }

    /// Adds a warning once, even if several parts of a file cause it.
    pub fn warn(&mut self, source: impl Into<String>, warning: impl Into<String>) {
        let warning = ItemError {
            source: source.into(),
            error: warning.into(),
        };
        if self.warnings.len() < MAX_ERRORS && !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }

    /// Documents that are processed, with any result.
    pub fn documents_done(&self) -> u64 {
        let d = &self.documents;
        d.added + d.changed + d.unchanged + d.failed + d.skipped
    }

    /// Adds the report of another run.
    pub fn add(&mut self, other: &Report) {
        let (d, o) = (&mut self.documents, &other.documents);
        d.added += o.added;
        d.changed += o.changed;
        d.unchanged += o.unchanged;
        d.removed += o.removed;
        d.failed += o.failed;
        d.skipped += o.skipped;
        let (c, o) = (&mut self.chunks, &other.chunks);
        c.added += o.added;
        c.changed += o.changed;
        c.unchanged += o.unchanged;
        c.removed += o.removed;
        c.embedded += o.embedded;
        c.reused += o.reused;
        self.tokens += other.tokens;
        self.bytes += other.bytes;
        self.failed_bytes += other.failed_bytes;
        self.skipped_types.extend(other.skipped_types.iter().cloned());
        self.more_errors += other.more_errors;
        for warning in &other.warnings {
            self.warn(&warning.source, &warning.error);
        }
        for error in &other.errors {
            if self.errors.len() < MAX_ERRORS {
                self.errors.push(error.clone());
            } else {
                self.more_errors += 1;
            }
        }
    }
}

/// A report that is read while it is written.
#[derive(Debug)]
pub struct Progress {
    report: Mutex<Report>,
    started: Instant,
    writes: AtomicUsize,
}

/// A write that is not counted in the report yet.
pub(super) struct PendingWrite(Arc<Progress>);

impl Drop for PendingWrite {
    fn drop(&mut self) {
        self.0.writes.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            report: Mutex::default(),
            started: Instant::now(),
            writes: AtomicUsize::new(0),
        }
    }
}

impl Progress {
    pub fn snapshot(&self) -> Report {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn begin_write(self: &Arc<Self>) -> PendingWrite {
        self.writes.fetch_add(1, Ordering::AcqRel);
        PendingWrite(Arc::clone(self))
    }

    /// Whether documents are being stored that the report does not count yet.
    pub fn is_writing(&self) -> bool {
        self.writes.load(Ordering::Acquire) > 0
    }

    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub fn update(&self, change: impl FnOnce(&mut Report)) {
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_known_once_a_chunk_was_embedded() {
        let left = |report: &Report| report.time_left(Duration::from_secs(10), 1_000);
        let mut report = Report {
            bytes: 300,
            failed_bytes: 200,
            ..Report::default()
        };
        assert_eq!(left(&report), None);
        report.chunks.embedded = 1;
        assert_eq!(left(&report), Some(Duration::from_secs(70)));
        report.bytes = 1_000;
        assert_eq!(left(&report), None);
        assert_eq!(report.time_left(Duration::from_secs(10), 0), None);
    }
}
