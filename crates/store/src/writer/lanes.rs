//! Which of the waiting writes make up the next transaction.
//!
//! Everything that waits could share one commit, but a small write would then wait for every large
//! one that came with it. So small writes go first, and large ones take the time that is left, or
//! their turn when they have waited long enough.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Writes that hold more than this in memory are large.
const SMALL_BYTES: usize = 32 << 10;
/// One transaction takes at most this much, so that nobody waits long for its commit.
const BATCH_JOBS: usize = 4096;
const BATCH_BYTES: usize = 8 << 20;
/// The longest that a large write lets small ones pass.
const PATIENCE: Duration = Duration::from_millis(100);

pub(super) struct Lanes<T> {
    small: VecDeque<(usize, T)>,
    large: VecDeque<(usize, Instant, T)>,
}

/// What is committed together.
pub(super) struct Batch<T> {
    pub(super) jobs: Vec<T>,
    pub(super) bytes: usize,
}

impl<T> Default for Lanes<T> {
    fn default() -> Self {
        Self {
            small: VecDeque::new(),
            large: VecDeque::new(),
        }
    }
}

impl<T> Lanes<T> {
    pub(super) fn push(&mut self, bytes: usize, job: T, now: Instant) {
        if bytes <= SMALL_BYTES {
            self.small.push_back((bytes, job));
        } else {
            self.large.push_back((bytes, now, job));
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.small.is_empty() && self.large.is_empty()
    }

    /// Small writes, as many as fit. Large ones, as many as fit, where no small one waits; else at
    /// most one, when it is time.
    pub(super) fn next(&mut self, now: Instant) -> Batch<T> {
        let mut batch = Batch {
            jobs: Vec::new(),
            bytes: 0,
        };
        let overdue = self
            .large
            .front()
            .is_some_and(|(_, since, _)| now.saturating_duration_since(*since) >= PATIENCE);
        let mut large = match (self.small.is_empty(), overdue) {
            (true, _) => usize::MAX,
            (false, true) => 1,
            (false, false) => 0,
        };
        while batch.has_room() {
            let next = if let Some(small) = self.small.pop_front() {
                small
            } else if large > 0
                && let Some((bytes, _, job)) = self.large.pop_front()
            {
                large -= 1;
                (bytes, job)
            } else {
                break;
            };
            batch.bytes += next.0;
            batch.jobs.push(next.1);
        }
        batch
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
        assert_eq!(lanes.next(start + PATIENCE).jobs, ['e', 'A'], "one, in its turn");
        assert_eq!(lanes.next(start).jobs, ['C'], "at once where nothing small waits");
        assert!(lanes.is_empty());
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
        let taken: Vec<char> = (0..3).flat_map(|_| lanes.next(start + PATIENCE).jobs).collect();
        assert!(taken.contains(&'L'));
    }

    #[test]
    fn a_transaction_is_bounded_but_takes_at_least_one_write() {
        let start = Instant::now();
        let mut lanes = lanes(
            &[(5 * BATCH_BYTES, 'A'), (BATCH_BYTES / 2, 'B'), (LARGE, 'C')],
            start,
        );
        assert_eq!(lanes.next(start).jobs, ['A']);
        let batch = lanes.next(start);
        assert_eq!(
            (batch.jobs, batch.bytes),
            (vec!['B', 'C'], BATCH_BYTES / 2 + LARGE)
        );
    }
}
