//! Chooses the queued writes of the next transaction.
//!
//! All queued writes could share one commit, but a small write would then wait for every large one. So
//! small writes go first. Large ones go when no small one is queued, or when they have waited long
//! enough.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Writes of more bytes than this are large.
const SMALL_BYTES: usize = 32 << 10;
/// Limits of one transaction, so that its commit does not take long.
const BATCH_JOBS: usize = 4096;
const BATCH_BYTES: usize = 8 << 20;
/// A write of this size has a transaction of its own, which needs no savepoint.
const ALONE_BYTES: usize = 1 << 20;
/// How long a large write lets small ones pass.
const MAX_DELAY: Duration = Duration::from_millis(400);

pub(super) struct Lanes<T> {
    small: VecDeque<(usize, T)>,
    large: VecDeque<(usize, Instant, T)>,
    /// When the last small one came.
    last_small: Option<Instant>,
}

/// Writes that are committed together.
pub(super) struct Batch<T> {
    pub(super) jobs: Vec<T>,
    pub(super) bytes: usize,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self {
            small: VecDeque::new(),
            large: VecDeque::new(),
            last_small: None,
        }
    }
}

impl<T> Lanes<T> {
    pub(super) fn push(&mut self, bytes: usize, job: T, now: Instant) {
        if bytes <= SMALL_BYTES {
            self.small.push_back((bytes, job));
            self.last_small = Some(now);
        } else {
            self.large.push_back((bytes, now, job));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.small.is_empty() && self.large.is_empty()
    }

    /// Takes small writes, as many as fit. Takes one large write if no small one is queued or if it is
    /// overdue, and more of them only if no small one has come lately: a client that writes little and
    /// often is about to write again.
    pub(super) fn next(&mut self, now: Instant) -> Batch<T> {
        let mut batch = Batch {
            jobs: Vec::new(),
            bytes: 0,
        };
        let is_long_ago = |since: &Instant| now.saturating_duration_since(*since) >= MAX_DELAY;
        let overdue = self.large.front().is_some_and(|(_, since, _)| is_long_ago(since));
        if overdue && let Some((bytes, job)) = self.pop_large(|bytes| bytes >= ALONE_BYTES) {
            return Batch {
                jobs: vec![job],
                bytes,
            };
        }
        let mut large = if self.small.is_empty() && self.last_small.as_ref().is_none_or(is_long_ago) {
            usize::MAX
        } else {
            usize::from(self.small.is_empty() || overdue)
        };
        while batch.has_room() {
            let next = if let Some(small) = self.small.pop_front() {
                small
            } else if large > 0
                && let Some((bytes, job)) =
                    self.pop_large(|bytes| batch.jobs.is_empty() || bytes < ALONE_BYTES)
            {
                large -= 1;
                (bytes, job)
            } else {
                break;
            };
            let alone = next.0 >= ALONE_BYTES;
            batch.bytes += next.0;
            batch.jobs.push(next.1);
            if alone {
                break;
            }
        }
        batch
    }

    /// Takes the first large write if its size is right.
    fn pop_large(&mut self, fits: impl Fn(usize) -> bool) -> Option<(usize, T)> {
        let (bytes, ..) = self.large.front()?;
        if !fits(*bytes) {
            return None;
        }
        self.large.pop_front().map(|(bytes, _, job)| (bytes, job))
    }
}

impl<T> Batch<T> {
    fn has_room(&self) -> bool {
        self.jobs.len() < BATCH_JOBS && self.bytes < BATCH_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: usize = SMALL_BYTES + 1;

    fn lanes(waiting: &[(usize, char)], since: Instant) -> Lanes<char> {
        let mut lanes = Lanes::default();
        for (bytes, job) in waiting {
            lanes.push(*bytes, *job, since);
        }
        lanes
    }

    #[test]
    fn small_writes_go_before_large_ones_until_those_have_waited_long_enough() {
        let start = Instant::now();
        let mut lanes = lanes(&[(LARGE, 'A'), (1, 'b'), (LARGE, 'C'), (1, 'd')], start);
        assert_eq!(lanes.next(start).jobs, ['b', 'd']);
        lanes.push(1, 'e', start);
        assert_eq!(lanes.next(start + MAX_DELAY).jobs, ['e', 'A'], "one, in its turn");
        assert_eq!(lanes.next(start).jobs, ['C'], "at once where nothing small waits");
        assert!(lanes.is_empty());
    }

    #[test]
    fn large_writes_go_one_by_one_while_small_ones_keep_coming() {
        let start = Instant::now();
        let mut lanes = lanes(&[(1, 'a'), (LARGE, 'B'), (LARGE, 'C'), (LARGE, 'D')], start);
        assert_eq!(lanes.next(start).jobs, ['a']);
        assert_eq!(
            lanes.next(start).jobs,
            ['B'],
            "another small one may be about to come"
        );
        assert_eq!(lanes.next(start + MAX_DELAY).jobs, ['C', 'D']);
    }

    #[test]
    fn a_stream_of_small_writes_cannot_keep_a_large_one_out() {
        let start = Instant::now();
        let mut lanes = lanes(&[(LARGE, 'L')], start);
        for _ in 0..2 * BATCH_JOBS {
            lanes.push(1, 's', start);
        }
        assert_eq!(lanes.next(start).jobs.len(), BATCH_JOBS);
        lanes.push(1, 's', start);
        let taken: Vec<char> = (0..3).flat_map(|_| lanes.next(start + MAX_DELAY).jobs).collect();
        assert!(taken.contains(&'L'));
    }

    #[test]
    fn a_transaction_is_bounded_but_takes_at_least_one_write() {
        let start = Instant::now();
        let mut lanes = lanes(
            &[
                (5 * BATCH_BYTES, 'A'),
                (LARGE, 'B'),
                (LARGE, 'C'),
                (ALONE_BYTES, 'D'),
            ],
            start,
        );
        assert_eq!(lanes.next(start).jobs, ['A']);
        let batch = lanes.next(start);
        assert_eq!((batch.jobs, batch.bytes), (vec!['B', 'C'], 2 * LARGE));
        assert_eq!(lanes.next(start).jobs, ['D']);
    }

    #[test]
    fn a_write_that_has_to_be_alone_gets_its_turn() {
        let start = Instant::now();
        let mut lanes = lanes(&[(ALONE_BYTES, 'A'), (1, 'b')], start);
        assert_eq!(lanes.next(start).jobs, ['b']);
        lanes.push(1, 'c', start);
        assert_eq!(lanes.next(start + MAX_DELAY).jobs, ['A']);
        assert_eq!(lanes.next(start).jobs, ['c']);
    }
}
