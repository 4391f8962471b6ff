//! A growing array in shared pieces: copying it copies pointers, changing it copies one piece.

use std::sync::Arc;

const PIECE: usize = 4096;

#[derive(Debug, Clone)]
pub(crate) struct Chunked<T> {
    pieces: Vec<Arc<Vec<T>>>,
    len: usize,
}

impl<T> Default for Chunked<T> {
    fn default() -> Self {
        Self {
            pieces: Vec::new(),
            len: 0,
        }
    }
}

impl<T: Copy> Chunked<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, at: usize) -> Option<T> {
        self.pieces.get(at / PIECE)?.get(at % PIECE).copied()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.pieces.iter().flat_map(|piece| piece.iter().copied())
    }

    pub(crate) fn push(&mut self, value: T) {
        if self.len.is_multiple_of(PIECE) {
            self.pieces.push(Arc::new(Vec::new()));
        }
        if let Some(piece) = self.pieces.last_mut() {
            Arc::make_mut(piece).push(value);
        }
        self.len += 1;
    }

    pub(crate) fn set(&mut self, at: usize, value: T) {
        if let Some(place) = self
            .pieces
            .get_mut(at / PIECE)
            .and_then(|piece| Arc::make_mut(piece).get_mut(at % PIECE))
        {
            *place = value;
        }
    }

    /// Where a value stands, if the array is sorted.
    pub(crate) fn find(&self, value: &T) -> Option<usize>
    where
        T: Ord,
    {
        let piece = self
            .pieces
            .partition_point(|piece| piece.last().is_some_and(|last| last < value));
        let within = self.pieces.get(piece)?.binary_search(value).ok()?;
        Some(piece * PIECE + within)
    }
}

impl Chunked<i64> {
    /// How many values are at most this one, if the array is sorted.
    pub(crate) fn up_to(&self, value: i64) -> usize {
        let piece = self
            .pieces
            .partition_point(|piece| piece.last().is_some_and(|last| *last <= value));
        let within = self
            .pieces
            .get(piece)
            .map_or(0, |piece| piece.partition_point(|one| *one <= value));
        (piece * PIECE + within).min(self.len)
    }
}

impl<T: Copy> FromIterator<T> for Chunked<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut chunked = Self::default();
        values.into_iter().for_each(|value| chunked.push(value));
        chunked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_do_not_see_later_changes() {
        let mut array: Chunked<i64> = (0..10_000).map(|n| n * 2).collect();
        let before = array.clone();
        array.set(5000, -1);
        array.push(7);
        assert_eq!(before.get(5000), Some(10_000));
        assert_eq!((before.len(), array.len()), (10_000, 10_001));
        assert_eq!(array.get(5000), Some(-1));
        assert_eq!(before.get(10_000), None);
    }

    #[test]
    fn values_are_found_by_their_order() {
        let array: Chunked<i64> = (0..10_000).map(|n| n * 2).collect();
        for at in [0, 1, 4095, 4096, 9999] {
            assert_eq!(array.find(&(at as i64 * 2)), Some(at));
        }
        assert_eq!(array.find(&3), None);
        assert_eq!(array.find(&20_000), None);
        assert_eq!(Chunked::<i64>::default().find(&0), None);
        for (value, before) in [
            (-1, 0),
            (0, 1),
            (3, 2),
            (8190, 4096),
            (8192, 4097),
            (30_000, 10_000),
        ] {
            assert_eq!(array.up_to(value), before, "{value}");
        }
        assert_eq!(Chunked::<i64>::default().up_to(0), 0);
    }
}
