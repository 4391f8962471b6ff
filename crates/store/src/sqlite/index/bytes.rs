//! One byte per dimension: a quarter of a vector's memory, and a similarity whose error has a
//! bound. What the bound rules out need not be read in full, and nothing that belongs among the
//! nearest is ever ruled out.
//!
//! With `x̂` the vector as its bytes tell it and `q̂` the query in 16 bits,
//! `⟨q, x⟩ - ⟨q̂, x̂⟩ = ⟨q, x - x̂⟩ + ⟨q - q̂, x̂⟩`, of which both parts are at most the product of the
//! lengths.

use super::kernel::{byte_dot, dot, to_bytes};
use super::vectors::CHUNK;

/// The vectors of one chunk in bytes.
#[derive(Debug, Clone)]
pub(crate) struct Bytes {
    dimensions: usize,
    values: Vec<i8>,
    steps: Vec<f32>,
    /// How far the vector in bytes is from the vector.
    errors: Vec<f32>,
}

/// A similarity and by how much it may be off.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounded {
    pub(crate) similarity: f32,
    pub(crate) margin: f32,
}

impl Bytes {
    pub(crate) fn encode<'a>(vectors: impl Iterator<Item = &'a [f32]>, dimensions: usize) -> Self {
        let mut bytes = Self {
            dimensions,
            values: Vec::with_capacity(CHUNK * dimensions),
            steps: Vec::with_capacity(CHUNK),
            errors: Vec::with_capacity(CHUNK),
        };
        for (at, vector) in vectors.enumerate() {
            bytes.values.resize((at + 1) * dimensions, 0);
            bytes.steps.push(0.0);
            bytes.errors.push(0.0);
            bytes.set(at, vector);
        }
        bytes
    }

    pub(crate) fn set(&mut self, at: usize, vector: &[f32]) {
        let start = at * self.dimensions;
        let (Some(values), Some(step), Some(error)) = (
            self.values.get_mut(start..start + self.dimensions),
            self.steps.get_mut(at),
            self.errors.get_mut(at),
        ) else {
            return;
        };
        let largest = vector.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        *step = largest / f32::from(i8::MAX);
        let per_step = if *step > 0.0 { 1.0 / *step } else { 0.0 };
        *error = to_bytes(vector, *step, per_step, values).sqrt();
    }

    pub(crate) fn values(&self, at: usize) -> &[i8] {
        let start = at * self.dimensions;
        self.values.get(start..start + self.dimensions).unwrap_or(&[])
    }

    #[inline]
    pub(crate) fn compare(&self, at: usize, query: &ByteQuery) -> Bounded {
        let (Some(step), Some(error)) = (self.steps.get(at), self.errors.get(at)) else {
            return Bounded {
                similarity: 0.0,
                margin: f32::INFINITY,
            };
        };
        let product = byte_dot(self.values(at), &query.values);
        Bounded {
            similarity: product as f32 * step * query.step,
            margin: query.length * error + query.error * (1.0 + error) + query.slack,
        }
    }
}

/// A query in 16 bits, or as many as leave the sum over all dimensions within 32.
#[derive(Debug)]
pub(crate) struct ByteQuery {
    values: Vec<i16>,
    step: f32,
    length: f32,
    error: f32,
    /// What sums of rounded numbers may be off by.
    slack: f32,
}

impl ByteQuery {
    pub(crate) fn new(query: &[f32]) -> Self {
        let largest = query.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let levels = (i32::MAX / i32::from(i8::MAX) / query.len().max(1) as i32).min(i32::from(i16::MAX));
        let step = largest / levels.max(1) as f32;
        let per_step = if step > 0.0 { 1.0 / step } else { 0.0 };
        let values: Vec<i16> = query
            .iter()
            .map(|x| (x * per_step).round_ties_even() as i16)
            .collect();
        let rest: Vec<f32> = query
            .iter()
            .zip(&values)
            .map(|(x, value)| x - f32::from(*value) * step)
            .collect();
        Self {
            values,
            step,
            length: dot(query, query).sqrt(),
            error: dot(&rest, &rest).sqrt(),
            slack: query.len() as f32 * f32::EPSILON,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn unit(mut vector: Vec<f32>) -> Vec<f32> {
        let length = dot(&vector, &vector).sqrt();
        if length > 0.0 {
            vector.iter_mut().for_each(|x| *x /= length);
        }
        vector
    }

    proptest! {
        /// Also where one coordinate is far larger than all others, so that the rest is lost.
        #[test]
        fn a_similarity_is_never_off_by_more_than_its_margin(
            dimensions in prop::sample::select(vec![1usize, 7, 16, 33, 384, 5000]),
            seed in any::<u64>(),
            outlier in prop::sample::select(vec![0.0f32, 0.5, 100.0, 1e6]),
        ) {
            let mut state = seed | 1;
            let mut noise = move || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / 8_388_608.0 - 1.0).powi(3)
            };
            let mut vectors = Vec::new();
            for _ in 0..3 {
                let mut vector: Vec<f32> = (0..dimensions).map(|_| noise()).collect();
                vector[0] += outlier;
                vectors.extend(unit(vector));
            }
            vectors.extend(std::iter::repeat_n(0.0, dimensions));
            let query = unit((0..dimensions).map(|_| noise()).collect());
            let prepared = ByteQuery::new(&query);
            let bytes = Bytes::encode(vectors.chunks_exact(dimensions), dimensions);
            for (at, vector) in vectors.chunks_exact(dimensions).enumerate() {
                let exact: f64 = vector.iter().zip(&query).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
                let Bounded { similarity, margin } = bytes.compare(at, &prepared);
                prop_assert!(
                    (f64::from(similarity) - exact).abs() <= f64::from(margin),
                    "{similarity} and {exact} with {margin}"
                );
            }
        }
    }
}
