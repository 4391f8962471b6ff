//! Products with weights of eight bits: `C = A · B` where `B` was quantized once at load and the
//! rows of `A` are quantized as they come.
//!
//! A weight is `scale · q`, one scale per column and `q` from -127 to 127. A value of a row is
//! `offset + scale · u`, one offset and scale per row and `u` from 0 to 255. The sum over the depth
//! is then a sum of products of small integers, which AVX2 multiplies 32 at a time, and AVX-512 with
//! VNNI 64.
//!
//! The instruction of AVX2 adds two products in 16 bits, and four are added here before they are
//! widened. They fit by construction: the four weights that meet in one such lane have positive
//! parts whose sum is at most 128, and negative ones as well, so that even with 255 in every row
//! the sum stays within ±32,640. A column whose weights would not fit gets a larger scale.
//!
//! The unsafe code is the reading of operands in [`x86`], whose lengths are checked before, and
//! the writing of results through a pointer, as in [`super::simd`].

use std::ops::Range;

use super::product::BLOCK_ROWS;
use super::simd::{self, Isa, OutputPointer, TilePosition};
use super::{Accumulate, Activation, AlignedBuffer, PANEL, rows};
use crate::thread_group::ThreadGroup;

/// Depth handled at once: two steps of four, whose products are added in 16 bits.
const GROUP: usize = 8;
/// Bytes of one group of one panel.
const GROUP_BYTES: usize = GROUP * PANEL;
/// Largest magnitude of a quantized weight.
const LARGEST: f32 = 127.0;
/// Limit on the sum of the weights of one sign in one lane, before each is rounded by up to a half.
const LANE_SUM: f32 = 126.0;

/// Scale and offset of one row: a value is `offset + scale · byte`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct RowScale {
    pub(crate) scale: f32,
    pub(crate) offset: f32,
}

/// Rows of a left-hand side, quantized. Kept from product to product for its memory.
#[derive(Default)]
pub(crate) struct ByteRows {
    bytes: AlignedBuffer,
    steps: Vec<RowScale>,
    stride: usize,
}

impl ByteRows {
    /// Takes over rows of `depth` values each.
    pub(crate) fn quantize(&mut self, isa: Isa, values: &[f32], depth: usize) {
        self.stride = depth.next_multiple_of(GROUP);
        self.steps.clear();
        self.steps.resize(values.len() / depth, RowScale::default());
        let bytes = self.bytes.reserve_bytes(self.steps.len() * self.stride);
        simd::quantize(isa, values, depth, self.stride, bytes, &mut self.steps);
    }
}

/// A right-hand side of eight-bit weights with its bias, in panels of 16 columns.
pub(crate) struct ByteWeights {
    depth: usize,
    columns: usize,
    /// By panel, group of depths, step of four within the group, column, depth within the step.
    panels: AlignedBuffer,
    constants: Vec<Constants>,
}

/// Constants that convert the integer sums of a panel back to values.
#[derive(Clone, Default)]
struct Constants {
    scales: [f32; PANEL],
    /// The sum of each column's weights, which the rows' offsets are multiplied with.
    sums: [f32; PANEL],
    bias: [f32; PANEL],
}

impl ByteWeights {
    /// Quantizes weights as PyTorch stores them: one row of `depth` values per output column.
    pub(crate) fn from_rows(weights: &[f32], bias: &[f32], depth: usize) -> Self {
        let columns = bias.len();
        let panels = columns.div_ceil(PANEL);
        let panel_bytes = depth.next_multiple_of(GROUP) * PANEL;
        let mut packed = Self {
            depth,
            columns,
            panels: AlignedBuffer::default(),
            constants: vec![Constants::default(); panels],
        };
        let bytes = packed.panels.reserve_bytes(panels * panel_bytes);
        for (column, (weights, bias)) in weights.chunks_exact(depth).zip(bias).enumerate() {
            let (panel, lane) = (column / PANEL, column % PANEL);
            let scale = column_scale(weights);
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let bytes = &mut bytes[panel * panel_bytes..][..panel_bytes];
            let mut sum = 0;
            for (k, weight) in weights.iter().enumerate() {
                let quantized = (weight * inverse).round() as i8;
                sum += i32::from(quantized);
                bytes[weight_offset(lane, k)] = quantized.cast_unsigned();
            }
            let constants = &mut packed.constants[panel];
            constants.scales[lane] = scale;
            constants.sums[lane] = scale * sum as f32;
            constants.bias[lane] = *bias;
        }
        packed
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    fn groups(&self) -> usize {
        self.depth.div_ceil(GROUP)
    }

    fn panel(&self, number: usize) -> &[u8] {
        let length = self.groups() * GROUP_BYTES;
        &self.panels.as_bytes()[number * length..][..length]
    }

    /// The weight that a quantized one stands for.
    #[cfg(test)]
    pub(super) fn weight(&self, column: usize, k: usize) -> f32 {
        let (panel, lane) = (column / PANEL, column % PANEL);
        f32::from(self.panel(panel)[weight_offset(lane, k)].cast_signed())
            * self.constants[panel].scales[lane]
    }
}

/// Offset of a weight in its panel.
fn weight_offset(lane: usize, k: usize) -> usize {
    k / 4 * 4 * PANEL + lane * 4 + k % 4
}

/// The smallest scale at which no weight exceeds eight bits and no lane 16, see the module's text.
fn column_scale(weights: &[f32]) -> f32 {
    let largest = weights.iter().fold(0.0f32, |most, weight| most.max(weight.abs()));
    let mut lane = 0.0f32;
    for group in weights.chunks(GROUP) {
        // The pairs (0, 1) and (4, 5) meet in one lane, (2, 3) and (6, 7) in another.
        let (mut positive, mut negative) = ([0.0f32; 2], [0.0f32; 2]);
        for (k, weight) in group.iter().enumerate() {
            positive[k / 2 % 2] += weight.max(0.0);
            negative[k / 2 % 2] -= weight.min(0.0);
        }
        lane = positive.into_iter().chain(negative).fold(lane, f32::max);
    }
    (largest / LARGEST).max(lane / LANE_SUM)
}

/// One product: the quantized rows `a` times `b` plus its bias.
pub(crate) struct ByteProduct<'a> {
    pub(crate) a: &'a ByteRows,
    pub(crate) b: &'a ByteWeights,
    pub(crate) accumulate: Accumulate,
    pub(crate) activation: Activation,
}

/// The instructions that sum up products of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DotProduct {
    /// Four products at a time in 32 bits; made only by [`DotProduct::all`] after feature detection.
    #[cfg(target_arch = "x86_64")]
    Vnni,
    /// Two at a time in 16 bits, see [`Isa`].
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl DotProduct {
    /// The variants that this processor supports on top of `isa`, the fastest first.
    pub(super) fn all(isa: Isa) -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let wide = is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        #[cfg(target_arch = "x86_64")]
        let ways = [
            (wide && isa == Isa::Avx2).then_some(Self::Vnni),
            (isa == Isa::Avx2).then_some(Self::Avx2),
            (isa == Isa::Portable).then_some(Self::Portable),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let ways = {
            let Isa::Portable = isa;
            [Some(Self::Portable)]
        };
        ways.into_iter().flatten()
    }
}

/// Computes `product` into the rows of `c`, as wide as the weights' columns, on all threads of the group.
pub(crate) fn run(isa: Isa, threads: &ThreadGroup, product: &ByteProduct<'_>, c: &mut [f32]) {
    if let Some(dot_product) = DotProduct::all(isa).next() {
        run_by(dot_product, threads, product, c);
    }
}

pub(super) fn run_by(
    dot_product: DotProduct,
    threads: &ThreadGroup,
    product: &ByteProduct<'_>,
    c: &mut [f32],
) {
    let ByteProduct { a, b, .. } = *product;
    let rows = a.steps.len();
    if rows == 0 || b.columns == 0 {
        return;
    }
    assert!(a.stride == b.groups() * GROUP && c.len() >= rows * b.columns);
    let output = OutputPointer::new(c);
    simd::for_panels(threads, b.columns.div_ceil(PANEL), &|range| {
        for block in (0..rows).step_by(BLOCK_ROWS) {
            for panel in range.clone() {
                let block = block..rows.min(block + BLOCK_ROWS);
                // SAFETY: `c` was checked to have all rows and columns, and the ranges of different
                // threads are disjoint.
                unsafe { run_panel(dot_product, product, output, panel, block) };
            }
        }
    });
}

/// # Safety
/// `output` must be valid for the rows of `block` and the columns of `panel`, and no other thread may
/// access those meanwhile.
unsafe fn run_panel(
    dot_product: DotProduct,
    product: &ByteProduct<'_>,
    output: OutputPointer,
    panel: usize,
    block: Range<usize>,
) {
    match dot_product {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the instructions are there, see `DotProduct`; the caller vouches for the rest.
        DotProduct::Vnni => unsafe { x86::vnni_panel(product, output, panel, block) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: AVX2 and FMA are there, see `Isa`; the caller vouches for the rest.
        DotProduct::Avx2 => unsafe { x86::avx2_panel(product, output, panel, block) },
        // SAFETY: passed on to the caller.
        DotProduct::Portable => unsafe { panel_rows::<false, Portable>(product, output, panel, block) },
    }
}

/// Sums of products of bytes, by one set of instructions.
trait Dots {
    /// Rows of one register tile, up to 8.
    const ROWS: usize;

    /// The sums over the depth for `R` rows and one panel.
    ///
    /// # Safety
    /// The processor must have the instructions, `rows` must hold `R` rows of `stride` bytes, a multiple
    /// of 8, and `panel` sixteen times as many as one row.
    unsafe fn dots<const R: usize>(rows: &[u8], stride: usize, panel: &[u8]) -> [[i32; PANEL]; R];
}

/// # Safety
/// As for [`run_panel`]; with `FMA`, the processor must have AVX2 and FMA, and it must have what `D` uses.
#[inline(always)]
unsafe fn panel_rows<const FMA: bool, D: Dots>(
    product: &ByteProduct<'_>,
    output: OutputPointer,
    panel: usize,
    block: Range<usize>,
) {
    let mut row = block.start;
    while row < block.end {
        let height = D::ROWS.min(block.end - row);
        // SAFETY: passed on to the caller.
        unsafe {
            match height {
                1 => tile::<FMA, D, 1>(product, output, panel, row),
                2 => tile::<FMA, D, 2>(product, output, panel, row),
                3 => tile::<FMA, D, 3>(product, output, panel, row),
                4 => tile::<FMA, D, 4>(product, output, panel, row),
                5 => tile::<FMA, D, 5>(product, output, panel, row),
                6 => tile::<FMA, D, 6>(product, output, panel, row),
                7 => tile::<FMA, D, 7>(product, output, panel, row),
                _ => tile::<FMA, D, 8>(product, output, panel, row),
            }
        }
        row += height;
    }
}

/// `R` rows by one panel of the result.
///
/// # Safety
/// As for [`panel_rows`].
#[inline(always)]
unsafe fn tile<const FMA: bool, D: Dots, const R: usize>(
    product: &ByteProduct<'_>,
    output: OutputPointer,
    panel: usize,
    row: usize,
) {
    let ByteProduct { a, b, .. } = *product;
    let bytes = &a.bytes.as_bytes()[row * a.stride..][..R * a.stride];
    let weights = b.panel(panel);
    // SAFETY: the caller vouches for the instructions; there are R rows of `stride` bytes, and a panel
    // has sixteen bytes for each byte of a row.
    let dots = unsafe { D::dots::<R>(bytes, a.stride, weights) };
    let mut values = [[0.0; PANEL]; R];
    for (r, (values, dots)) in values.iter_mut().zip(&dots).enumerate() {
        read_back::<FMA>(&b.constants[panel], a.steps[row + r], dots, values);
    }
    let position = TilePosition {
        row,
        panel,
        columns: b.columns,
    };
    // SAFETY: passed on to the caller.
    unsafe { simd::write_tile::<FMA, R>(values, output, position, product.accumulate, product.activation) };
}

/// Converts integer sums to values and adds the bias.
#[inline(always)]
fn read_back<const FMA: bool>(
    constants: &Constants,
    step: RowScale,
    dots: &[i32; PANEL],
    values: &mut [f32; PANEL],
) {
    let Constants { scales, sums, bias } = constants;
    for ((value, sum), bias) in values.iter_mut().zip(sums).zip(bias) {
        *value = rows::madd::<FMA>(step.offset, *sum, *bias);
    }
    for ((value, dot), scale) in values.iter_mut().zip(dots).zip(scales) {
        *value = rows::madd::<FMA>(*dot as f32 * scale, step.scale, *value);
    }
}

struct Portable;

impl Dots for Portable {
    const ROWS: usize = 4;

    unsafe fn dots<const R: usize>(rows: &[u8], stride: usize, panel: &[u8]) -> [[i32; PANEL]; R] {
        let mut dots = [[0; PANEL]; R];
        for (r, dots) in dots.iter_mut().enumerate() {
            let steps = rows[r * stride..][..stride].as_chunks::<4>().0;
            for (row, weights) in steps.iter().zip(panel.as_chunks::<{ 4 * PANEL }>().0) {
                for (dot, weights) in dots.iter_mut().zip(weights.as_chunks::<4>().0) {
                    for (value, weight) in row.iter().zip(weights) {
                        *dot += i32::from(*value) * i32::from(weight.cast_signed());
                    }
                }
            }
        }
        dots
    }
}

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
mod tests;
