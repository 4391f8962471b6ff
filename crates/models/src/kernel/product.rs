//! Matrix products `C = A · B` where `B` was packed beforehand.
//!
//! `B` is kept as panels of 16 columns, each panel a run of rows of one cache line. The product
//! walks blocks of 384 rows of `B` (a panel's part of such a block, 24 KB, stays in the first-level
//! cache) and of 96 rows of `A` (147 KB, second-level cache), and computes register tiles of up to
//! 6 × 16 within.

use super::simd::{self, Isa};
use super::{AlignedBuffer, PANEL};

/// Depth of one block: 384 × 16 floats are three quarters of a 32 KB first-level cache.
pub(super) const BLOCK_DEPTH: usize = 384;
/// Rows of one block, a multiple of the tile's rows.
pub(super) const BLOCK_ROWS: usize = 96;

/// How a product is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Accumulate {
    /// `C = A · B`
    Overwrite,
    /// `C = C + A · B`: `C` holds a residual or a relative position bias.
    Add,
}

/// The function applied to each value of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Activation {
    Identity,
    Gelu,
    GeluTanh,
    Relu,
    Silu,
    Tanh,
    Sigmoid,
}

/// The right-hand side of a product, in panels.
pub(crate) struct Packed {
    depth: usize,
    columns: usize,
    panels: AlignedBuffer,
}

impl Packed {
    /// Packs weights as PyTorch stores them: one row of `depth` values per output column.
    pub(crate) fn from_rows(weights: &[f32], depth: usize, columns: usize) -> Self {
        let mut panels = AlignedBuffer::zeroed(depth * columns.next_multiple_of(PANEL));
        simd::pack_transposed(
            Isa::detect(),
            weights,
            depth,
            depth,
            columns,
            panels.as_mut_slice(),
        );
        Self {
            depth,
            columns,
            panels,
        }
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn view(&self) -> PackedView<'_> {
        PackedView {
            depth: self.depth,
            columns: self.columns,
            panels: self.panels.as_slice(),
        }
    }
}

/// Panels borrowed from wherever they were packed.
#[derive(Clone, Copy)]
pub(crate) struct PackedView<'a> {
    pub(crate) depth: usize,
    pub(crate) columns: usize,
    pub(crate) panels: &'a [f32],
}

/// One product: `rows` rows of `a`, `lda` floats apart, times `b`, into rows of `c` that are `ldc` apart.
pub(crate) struct Product<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) lda: usize,
    pub(crate) rows: usize,
    pub(crate) b: PackedView<'a>,
    /// One value per column, added once.
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) accumulate: Accumulate,
    pub(crate) activation: Activation,
}
