//! The arithmetic: matrix products and the row-wise functions of a transformer encoder.
//!
//! The interface is safe. [`product`] has the blocked matrix product over weights
//! that were packed once at load, [`rows`] softmax, layer norm and activations. [`simd`], [`bf16`] and
//! [`int8`] are the files with `unsafe` code in them: the first runs those bodies with AVX2 and FMA
//! where the processor has them, the others multiply with weights of sixteen and of eight bits.

pub(crate) mod bf16;
pub(crate) mod int8;
pub(crate) mod product;
pub(crate) mod rows;
pub(crate) mod simd;
#[cfg(test)]
mod tests;

pub(crate) use product::{Accumulate, Activation, Packed, Product};
pub(crate) use simd::AlignedBuffer;

/// Columns of one panel: one cache line of `f32`, and two AVX2 registers.
pub(crate) const PANEL: usize = 16;

/// Rows of one register tile: 6 × 2 accumulators leave four of the sixteen AVX2 registers for operands.
pub(crate) const TILE_ROWS: usize = 6;
