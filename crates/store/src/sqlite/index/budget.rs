//! A bound on the work of evaluating a filter.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Work of one read, in about nanoseconds: two seconds on a common processor.
const MAX_WORK: u64 = 1 << 31;
/// Work of looking at one value, in addition to that of its length or of the documents that have it.
pub(crate) const VALUE_WORK: u64 = 64;

/// The work that a read may still do. Ends early when the caller has gone away.
#[derive(Debug)]
pub(crate) struct WorkBudget {
    left: Cell<u64>,
    cancelled: Arc<AtomicBool>,
}

impl WorkBudget {
    pub(crate) fn new(cancelled: Arc<AtomicBool>) -> Self {
        Self {
            left: Cell::new(MAX_WORK),
            cancelled,
        }
    }

    /// For callers that always wait for the result.
    pub(crate) fn uncancelled() -> Self {
        Self::new(Arc::default())
    }

    pub(crate) fn spend(&self, work: u64) -> Result<()> {
        if self.cancelled.load(Ordering::Relaxed) {
            return Err(Error::Cancelled);
        }
        let left = self.left.get().checked_sub(work).ok_or(Error::ExpensiveFilter)?;
        self.left.set(left);
        Ok(())
    }
}
