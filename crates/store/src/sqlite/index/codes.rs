//! One bit per dimension: small codes that tell roughly how close a vector is.
//!
//! Vectors are first turned by a fixed random rotation, so that no input, however lopsided, puts
//! its information into few dimensions. Then what vectors have in common is dealt with exactly, so
//! that only what tells them apart is estimated: with `c` the centre of a vector's chunk, `h` a
//! point amid the whole collection, its home, and `r = x - c`,
//!
//! `⟨q, x⟩ = ⟨q, c⟩ + ⟨h, r⟩ + ⟨q - h, r⟩`.
//!
//! The first term is computed once per chunk, the second is stored with the vector, and in the
//! third `r` is known by the signs `s` of its coordinates and one scale: `⟨q - h, r⟩` is estimated
//! by `⟨q - h, s⟩ · |r|² / ⟨r, s⟩`, which is right on average over rotations. The spread of the
//! error is known as well and says which vectors deserve to be looked at exactly.

use std::sync::Arc;

use super::kernel::{CodeBlock, CodeLine, GROUP, LANES, dot, estimate, hadamard, prefetch};
use super::vectors::CHUNK;

/// A rotation of the space by sign flips and Hadamard transforms: quick, and without a matrix.
#[derive(Debug)]
pub(crate) struct Rotation {
    dimensions: usize,
    /// The largest power of two that fits.
    block: usize,
    flips: Vec<Vec<f32>>,
}

const ROUNDS: usize = 3;

impl Rotation {
    pub(crate) fn new(dimensions: usize) -> Self {
        let block = if dimensions == 0 {
            0
        } else {
            1 << dimensions.ilog2()
        };
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut sign = move || {
            // SplitMix64: the signs only have to be without pattern, and the same in every run.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            if (z ^ (z >> 31)) & 1 == 0 { 1.0 } else { -1.0 }
        };
        let flips = (0..ROUNDS)
            .map(|_| (0..dimensions).map(|_| sign()).collect())
            .collect();
        Self {
            dimensions,
            block,
            flips,
        }
    }

    pub(crate) fn dimensions(&self) -> usize {
        self.dimensions
    }

    /// The rotated vector.
    pub(crate) fn rotated(&self, vector: &[f32]) -> Vec<f32> {
        let mut rotated = Vec::with_capacity(vector.len());
        self.apply(vector, &mut rotated);
        rotated
    }

    fn apply(&self, vector: &[f32], rotated: &mut Vec<f32>) {
        rotated.clear();
        rotated.extend_from_slice(vector);
        if self.block < 2 || vector.len() != self.dimensions {
            return;
        }
        for flips in &self.flips {
            for (x, flip) in rotated.iter_mut().zip(flips) {
                *x *= flip;
            }
            hadamard(&mut rotated[..self.block]);
            if self.block < self.dimensions {
                hadamard(&mut rotated[self.dimensions - self.block..]);
            }
        }
    }
}

/// Groups of four dimensions; an even number, as the scan takes two at a time.
fn groups(dimensions: usize) -> usize {
    dimensions.div_ceil(8) * 2
}

/// The codes of one chunk of vectors.
#[derive(Debug, Clone)]
pub(crate) struct Codes {
    dimensions: usize,
    /// Shared by many chunks, so that a query is prepared once for all of them. Rotated.
    home: Arc<Vec<f32>>,
    /// Rotated.
    centre: Vec<f32>,
    /// Blocks of [`LANES`] vectors; in a block, group after group, four bits of every vector.
    bits: Vec<u8>,
    scales: Vec<f32>,
    /// What the home contributes to the similarity with any query.
    shifts: Vec<f32>,
    /// How far an estimate is off: one standard deviation, for a query at distance one from home.
    spreads: Vec<f32>,
    /// At least the largest of them.
    widest: f32,
}

impl Codes {
    /// Encodes all vectors of a chunk. Without a home, the centre of these vectors becomes one.
    pub(crate) fn encode<'a>(
        vectors: impl Iterator<Item = &'a [f32]>,
        rotation: &Rotation,
        home: Option<&Arc<Vec<f32>>>,
    ) -> Self {
        let dimensions = rotation.dimensions.max(1);
        let mut rotated_all = Vec::with_capacity(CHUNK * dimensions);
        let mut rotated = Vec::with_capacity(dimensions);
        let mut centre = vec![0.0f32; dimensions];
        for vector in vectors {
            rotation.apply(vector, &mut rotated);
            for (sum, x) in centre.iter_mut().zip(&rotated) {
                *sum += x;
            }
            rotated_all.extend_from_slice(&rotated);
        }
        let count = rotated_all.len() / dimensions;
        centre.iter_mut().for_each(|sum| *sum /= count.max(1) as f32);
        let mut codes = Self {
            dimensions,
            home: home.cloned().unwrap_or_else(|| Arc::new(centre.clone())),
            centre,
            bits: vec![0; count.div_ceil(LANES) * groups(dimensions) * GROUP],
            scales: vec![0.0; count.next_multiple_of(LANES)],
            shifts: vec![0.0; count.next_multiple_of(LANES)],
            spreads: vec![0.0; count.next_multiple_of(LANES)],
            widest: 0.0,
        };
        for (at, rotated) in rotated_all.chunks_exact(dimensions).enumerate() {
            codes.set_rotated(at, rotated);
        }
        codes
    }

    /// Encodes one vector anew; the centre stays as it was.
    pub(crate) fn set(&mut self, at: usize, vector: &[f32], rotation: &Rotation) {
        self.set_rotated(at, &rotation.rotated(vector));
    }

    fn set_rotated(&mut self, at: usize, rotated: &[f32]) {
        let groups = groups(self.dimensions);
        let block = at / LANES * groups * GROUP;
        let lane = at % LANES;
        let (byte, shift) = (lane % GROUP, if lane < GROUP { 0 } else { 4 });
        let (mut square, mut absolute, mut of_home) = (0.0f32, 0.0f32, 0.0f32);
        for group in 0..groups {
            let first = group * 4;
            let mut bits = 0u8;
            for bit in 0..4 {
                let at = first + bit;
                let (Some(x), Some(centre), Some(home)) =
                    (rotated.get(at), self.centre.get(at), self.home.get(at))
                else {
                    break;
                };
                let rest = x - centre;
                square += rest * rest;
                absolute += rest.abs();
                of_home += rest * home;
                bits |= u8::from(rest >= 0.0) << bit;
            }
            let place = &mut self.bits[block + group * GROUP + byte];
            *place = (*place & !(15 << shift)) | (bits << shift);
        }
        let (scale, spread) = if absolute > 0.0 {
            let dimensions = self.dimensions as f32;
            // cos² of the angle between what remains and its signs.
            let aligned = (absolute * absolute / (square * dimensions)).min(1.0);
            let spread = (square * (1.0 / aligned - 1.0) / (dimensions - 1.0).max(1.0)).sqrt();
            (square / absolute, spread)
        } else {
            (0.0, 0.0)
        };
        self.scales[at] = scale;
        self.shifts[at] = of_home;
        self.spreads[at] = spread;
        self.widest = self.widest.max(spread);
    }

    /// Has fetched from memory what a scan reads beside the bits, see [`Codes::estimate`].
    pub(crate) fn prefetch(&self) {
        prefetch(&self.centre);
        prefetch(&self.scales);
        prefetch(&self.shifts);
    }

    pub(crate) fn home(&self) -> &Arc<Vec<f32>> {
        &self.home
    }

    pub(crate) fn centre(&self) -> &[f32] {
        &self.centre
    }

    pub(crate) fn blocks(&self) -> usize {
        self.scales.len() / LANES
    }

    /// Estimates the similarity of all vectors of a block, and tells by bits which are above the
    /// threshold; if none is, the estimates are not written. Meanwhile the same block of `next` is
    /// fetched from memory: the codes of a chunk are too short a run for the processor to be ahead
    /// by itself.
    #[inline]
    pub(crate) fn estimate(
        &self,
        block: usize,
        next: Option<&Self>,
        query: &CodeQuery,
        line: CodeLine,
        threshold: f32,
        estimates: &mut [f32; LANES],
    ) -> u32 {
        let size = query.tables.len();
        let range = block * size..(block + 1) * size;
        let later = next.and_then(|next| next.bits.get(range.clone()));
        let (Some(codes), Some(scales), Some(shifts)) = (
            self.bits.get(range),
            self.scales.as_chunks().0.get(block),
            self.shifts.as_chunks().0.get(block),
        ) else {
            return 0;
        };
        let block = CodeBlock {
            codes,
            later: later.unwrap_or_default(),
            scales,
            shifts,
        };
        estimate(&block, &query.tables, line, threshold, estimates)
    }
}

/// A query prepared for the chunks of one home: for each group of four dimensions, the inner
/// product of what leads from there to the query with each of the sixteen patterns of signs, in 8
/// bits.
#[derive(Debug)]
pub(crate) struct CodeQuery {
    home: Arc<Vec<f32>>,
    rotated: Vec<f32>,
    /// How far the query is from home.
    reach: f32,
    tables: Vec<u8>,
    step: f32,
    bias: f32,
}

impl CodeQuery {
    /// Takes the query after rotation.
    pub(crate) fn new(rotated: Vec<f32>, home: Arc<Vec<f32>>) -> Self {
        let way: Vec<f32> = rotated
            .iter()
            .zip(home.iter())
            .map(|(x, home)| x - home)
            .collect();
        let groups = groups(way.len());
        let mut exact = Vec::with_capacity(groups * GROUP);
        let mut lowest_of = Vec::with_capacity(groups);
        let mut widest = f32::MIN_POSITIVE;
        for group in 0..groups {
            let at = |bit: usize| way.get(group * 4 + bit).copied().unwrap_or(0.0);
            let values = [at(0), at(1), at(2), at(3)];
            let reach: f32 = values.iter().map(|x| x.abs()).sum();
            lowest_of.push(-reach);
            widest = widest.max(2.0 * reach);
            for pattern in 0..GROUP {
                let sum: f32 = (0..4)
                    .map(|bit| {
                        if pattern >> bit & 1 == 1 {
                            values[bit]
                        } else {
                            -values[bit]
                        }
                    })
                    .sum();
                exact.push(sum);
            }
        }
        // The sum over all groups must fit 16 bits.
        let levels = (usize::from(u16::MAX) / groups.max(1)).min(255) as f32;
        let step = widest / levels;
        let tables = exact
            .iter()
            .enumerate()
            .map(|(at, sum)| ((sum - lowest_of[at / GROUP]) / step).round().min(levels) as u8)
            .collect();
        Self {
            tables,
            step,
            bias: lowest_of.iter().sum(),
            reach: dot(&way, &way).sqrt(),
            home,
            rotated,
        }
    }

    /// How sums become similarities to the vectors of a chunk.
    pub(crate) fn line(&self, codes: &Codes) -> CodeLine {
        CodeLine {
            offset: dot(&self.rotated, &codes.centre),
            step: self.step,
            bias: self.bias,
        }
    }

    pub(crate) fn is_for(&self, codes: &Codes) -> bool {
        Arc::ptr_eq(&self.home, &codes.home)
    }

    /// At least one standard deviation of any estimate in a chunk.
    pub(crate) fn widest_spread(&self, codes: &Codes) -> f32 {
        self.reach * codes.widest
    }

    /// One standard deviation of the estimate for a vector.
    pub(crate) fn spread(&self, codes: &Codes, at: usize) -> f32 {
        self.reach * codes.spreads.get(at).copied().unwrap_or(0.0)
    }
}
