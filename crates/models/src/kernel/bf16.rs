//! Products with weights of sixteen bits, on processors that multiply those twice as fast as `f32`.
//!
//! A bfloat16 is the upper half of an `f32`: the same range, eight bits of precision. The weights are
//! rounded once at load and the rows of `A` for each product. Products are exact and summed in `f32`, so
//! only the rounding of the operands loses precision. The cosine between vectors and the exact ones is
//! .9999 or more.
//!
//! The unsafe code is [`avx512::tile`], which reads operands whose lengths are checked before and
//! writes results through a pointer, as in [`super::simd`], and the calls into code compiled for
//! AVX-512, which only a [`Native`] allows.

use std::ops::Range;

use half::bf16;

use super::product::BLOCK_ROWS;
use super::simd::{self, OutputPointer};
use super::{Accumulate, Activation, AlignedBuffer, PANEL};
use crate::thread_group::ThreadGroup;

/// Rows of one register tile: as many accumulators hide the latency of a product, and an operand of
/// the panel is loaded once for all of them.
const TILE_ROWS: usize = 12;

/// Proof that the processor has the instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Native(());

impl Native {
    pub(crate) fn detect() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("fma")
        {
            return Some(Self(()));
        }
        None
    }
}

/// Two neighbouring values of a row, as the processor multiplies them.
type Pair = [bf16; 2];

/// Rows of a left-hand side, rounded and in tiles: the pairs that the rows of a tile have at one depth
/// lie side by side, so that a product reads them as one stream. Kept from product to product for its
/// memory.
#[derive(Default)]
pub(crate) struct HalfRows {
    pairs: AlignedBuffer,
    rows: usize,
    /// Values of one row, and how many pairs they are; the last of an odd number is filled up with zero.
    values: usize,
    depth: usize,
}

impl HalfRows {
    /// Takes over rows of `depth` values each.
    pub(crate) fn round(&mut self, native: Native, values: &[f32], depth: usize) {
        self.rows = values.len() / depth;
        (self.values, self.depth) = (depth, depth.div_ceil(2));
        let pairs = self.pairs.reserve_pairs(self.rows * self.depth);
        for tile in blocks(self.rows).flat_map(tiles) {
            let pairs = &mut pairs[tile.start * self.depth..tile.end * self.depth];
            round_tile(
                native,
                &values[tile.start * depth..tile.end * depth],
                depth,
                pairs,
            );
        }
    }
}

/// Rows that stay in the second-level cache while all panels pass.
fn blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows)
        .step_by(BLOCK_ROWS)
        .map(move |start| start..rows.min(start + BLOCK_ROWS))
}

/// The tiles of a block, of nearly equal height: one of a few rows takes as long as a high one.
fn tiles(block: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut row = block.start;
    std::iter::from_fn(move || {
        let left = block.end - row;
        let start = row;
        row += left.div_ceil(left.div_ceil(TILE_ROWS).max(1));
        (left > 0).then_some(start..row)
    })
}

/// A right-hand side of sixteen-bit weights with its bias, in panels of 16 columns.
pub(crate) struct HalfWeights {
    native: Native,
    /// Values of one column, and how many pairs they are.
    depth: usize,
    pairs: usize,
    columns: usize,
    /// By panel, pair of depths, column.
    panels: AlignedBuffer,
    /// As many as all panels have columns.
    bias: Vec<f32>,
}

impl HalfWeights {
    /// Rounds weights as PyTorch stores them: one row of `depth` values per output column.
    pub(crate) fn from_rows(native: Native, weights: &[f32], bias: &[f32], depth: usize) -> Self {
        let columns = bias.len();
        let mut packed = Self {
            native,
            depth,
            pairs: depth.div_ceil(2),
            columns,
            panels: AlignedBuffer::default(),
            bias: bias.to_vec(),
        };
        packed.bias.resize(columns.next_multiple_of(PANEL), 0.0);
        let panel_pairs = packed.pairs * PANEL;
        let pairs = packed.panels.reserve_pairs(columns.div_ceil(PANEL) * panel_pairs);
        for (column, weights) in weights.chunks_exact(depth).enumerate() {
            let panel = &mut pairs[column / PANEL * panel_pairs..][..panel_pairs];
            for (k, values) in weights.chunks(2).enumerate() {
                panel[k * PANEL + column % PANEL] = pair(values);
            }
        }
        packed
    }

    pub(crate) fn native(&self) -> Native {
        self.native
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    #[cfg(target_arch = "x86_64")]
    fn panel(&self, number: usize) -> &[Pair] {
        let length = self.pairs * PANEL;
        &self.panels.as_pairs()[number * length..][..length]
    }
}

/// One or two values, rounded to the nearest.
fn pair(values: &[f32]) -> Pair {
    let value = |at: usize| bf16::from_f32(values.get(at).copied().unwrap_or(0.0));
    [value(0), value(1)]
}

/// One product: the rounded rows `a` times `b` plus its bias.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "nothing multiplies them there")
)]
pub(crate) struct HalfProduct<'a> {
    pub(crate) a: &'a HalfRows,
    pub(crate) b: &'a HalfWeights,
    pub(crate) accumulate: Accumulate,
    pub(crate) activation: Activation,
}

/// Computes `product` into the rows of `c`, as wide as the weights' columns, on all threads of the group.
pub(crate) fn run(threads: &ThreadGroup, product: &HalfProduct<'_>, c: &mut [f32]) {
    let HalfProduct { a, b, .. } = *product;
    if a.rows == 0 || b.columns == 0 {
        return;
    }
    assert!(a.values == b.depth && c.len() >= a.rows * b.columns);
    let output = OutputPointer::new(c);
    simd::for_panels(threads, b.columns.div_ceil(PANEL), &|range| {
        for block in blocks(a.rows) {
            for panel in range.clone() {
                for tile in tiles(block.clone()) {
                    // SAFETY: `c` was checked to have all rows and columns, the ranges of different
                    // threads are disjoint, and the weights' `Native` vouches for the instructions.
                    unsafe { tile_of(product, output, panel, tile) };
                }
            }
        }
    });
}

/// Rounds the rows of one tile and puts the pairs of one depth side by side.
fn round_tile(native: Native, values: &[f32], depth: usize, pairs: &mut [Pair]) {
    let Native(()) = native;
    // SAFETY: `Native` vouches for the instructions.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        avx512::round_tile(values, depth, pairs);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, depth, pairs);
}

/// # Safety
/// The processor must have what [`Native`] stands for, `output` must be valid for the rows of `tile` and
/// the columns of `panel`, and no other thread may access those meanwhile.
unsafe fn tile_of(product: &HalfProduct<'_>, output: OutputPointer, panel: usize, tile: Range<usize>) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: passed on to the caller.
    unsafe {
        match tile.len() {
            1 => avx512::tile::<1>(product, output, panel, tile.start),
            2 => avx512::tile::<2>(product, output, panel, tile.start),
            3 => avx512::tile::<3>(product, output, panel, tile.start),
            4 => avx512::tile::<4>(product, output, panel, tile.start),
            5 => avx512::tile::<5>(product, output, panel, tile.start),
            6 => avx512::tile::<6>(product, output, panel, tile.start),
            7 => avx512::tile::<7>(product, output, panel, tile.start),
            8 => avx512::tile::<8>(product, output, panel, tile.start),
            9 => avx512::tile::<9>(product, output, panel, tile.start),
            10 => avx512::tile::<10>(product, output, panel, tile.start),
            11 => avx512::tile::<11>(product, output, panel, tile.start),
            _ => avx512::tile::<TILE_ROWS>(product, output, panel, tile.start),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (product, output, panel, tile);
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m512, __m512bh, __m512i, _mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_loadu_ps,
        _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps, _mm512_storeu_si512,
    };
    use std::mem::transmute;

    use super::{HalfProduct, OutputPointer, PANEL, Pair, pair};
    use crate::kernel::simd::{TilePosition, write_tile};

    /// Values that are rounded at once.
    const AT_ONCE: usize = 32;

    #[target_feature(enable = "avx512f,avx512bf16,avx512bw,avx512dq,avx512vl,fma")]
    pub(super) fn round_tile(values: &[f32], depth: usize, pairs: &mut [Pair]) {
        let height = values.len() / depth;
        for (r, row) in values.chunks_exact(depth).enumerate() {
            let mut into = pairs[r..].iter_mut().step_by(height);
            let (whole, rest) = row.as_chunks::<AT_ONCE>();
            for values in whole {
                let mut rounded = [[half::bf16::ZERO; 2]; AT_ONCE / 2];
                // SAFETY: 32 floats are two registers, 16 pairs are one.
                unsafe {
                    let low = _mm512_loadu_ps(values.as_ptr());
                    let high = _mm512_loadu_ps(values.as_ptr().add(AT_ONCE / 2));
                    let both = _mm512_cvtne2ps_pbh(high, low);
                    _mm512_storeu_si512(rounded.as_mut_ptr().cast(), transmute::<__m512bh, __m512i>(both));
                }
                // In this order: what ends first is cancellation first, and takes nothing of the other.
                for (pair, into) in rounded.into_iter().zip(into.by_ref()) {
                    *into = pair;
                }
            }
            for (into, values) in into.zip(rest.chunks(2)) {
                *into = pair(values);
            }
        }
    }

    /// `R` rows by one panel of the result.
    ///
    /// # Safety
    /// As for [`super::tile_of`], with `R` rows from `row` on.
    #[target_feature(enable = "avx512f,avx512bf16,avx512bw,avx512dq,avx512vl,fma")]
    pub(super) unsafe fn tile<const R: usize>(
        product: &HalfProduct<'_>,
        output: OutputPointer,
        panel: usize,
        row: usize,
    ) {
        let HalfProduct { a, b, .. } = *product;
        let rows = a.pairs.as_pairs()[row * a.depth..][..R * a.depth].as_ptr();
        let weights = b.panel(panel).as_ptr();
        let mut acc: [__m512; R] = [_mm512_setzero_ps(); R];
        for k in 0..a.depth {
            // SAFETY: there are `depth` times `R` pairs of rows and `depth` times 16 of weights; a pair
            // is as long as an integer of 32 bits, and both registers are 64 bytes of any value.
            unsafe {
                let weights = _mm512_loadu_si512(weights.add(k * PANEL).cast());
                let weights = transmute::<__m512i, __m512bh>(weights);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let pair = rows.add(k * R + r).cast::<i32>().read_unaligned();
                    let pair = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair));
                    *acc = _mm512_dpbf16_ps(*acc, weights, pair);
                }
            }
        }
        let mut values = [[0.0f32; PANEL]; R];
        let bias = &b.bias[panel * PANEL..][..PANEL];
        for (values, acc) in values.iter_mut().zip(acc) {
            // SAFETY: sixteen floats are one register.
            unsafe { _mm512_storeu_ps(values.as_mut_ptr(), acc) };
            for (value, bias) in values.iter_mut().zip(bias) {
                *value += bias;
            }
        }
        let position = TilePosition {
            row,
            panel,
            columns: b.columns,
        };
        // SAFETY: passed on to the caller.
        unsafe { write_tile::<true, R>(values, output, position, product.accumulate, product.activation) };
    }
}

#[cfg(test)]
mod tests;
