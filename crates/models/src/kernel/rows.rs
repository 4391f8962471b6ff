//! Row-wise functions, written so that the compiler vectorizes them.
//!
//! They are generic over whether fused multiply-add is there, and always inlined: the callers in
//! [`super::simd`] decide which instructions they are compiled for.

use super::PANEL;
use super::int8::RowScale;
use super::product::Activation;

/// Floats handled side by side in reductions, whose order the compiler may not change by itself.
const LANES: usize = 16;

#[inline(always)]
pub(super) fn madd<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn horner<const FMA: bool, const N: usize>(x: f32, coefficients: [f32; N]) -> f32 {
    coefficients.iter().fold(0.0, |sum, c| madd::<FMA>(sum, x, *c))
}

/// `e^x`, relative error below 3e-7; anything below -87 gives a number of the size 1e-38.
///
/// The exponent is split off by adding 1.5 · 2^23, which rounds to an integer and leaves that
/// integer in the low bits, where a shift moves it to the exponent of the result.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.0, 88.0);
    let shifted = madd::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, the first of which is exact in few bits, so that `r` keeps its precision.
    let r = madd::<FMA>(n, 2.121_944_4e-4, madd::<FMA>(n, -0.693_359_4, x));
    let p = horner::<FMA, 7>(
        r,
        [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0],
    );
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

#[inline(always)]
fn tanh<const FMA: bool>(x: f32) -> f32 {
    1.0 - 2.0 / (exp::<FMA>(2.0 * x) + 1.0)
}

/// `x · Φ(x)`. The error function is a rational fit in x², below 1e-6 from the true value.
#[inline(always)]
fn gelu<const FMA: bool>(x: f32) -> f32 {
    let inner = x.clamp(-5.65, 5.65);
    let t = inner * inner;
    let numerator = horner::<FMA, 6>(
        t,
        [
            -2.442_163_4e-8,
            8.479_64e-6,
            6.975_123e-4,
            1.164_517_7e-2,
            0.110_514_54,
            0.797_888_4,
        ],
    );
    let denominator = horner::<FMA, 5>(
        t,
        [1.120_015_5e-4, 2.969_750_2e-3, 4.043_956_4e-2, 0.305_195_77, 1.0],
    );
    let erf = inner * numerator / denominator;
    let half = 0.5 * x;
    madd::<FMA>(half, erf, half)
}

#[inline(always)]
fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    let inner = 0.797_884_6 * madd::<FMA>(0.044_715 * x * x, x, x);
    0.5 * x * (1.0 + tanh::<FMA>(inner))
}

#[inline(always)]
pub(super) fn activate<const FMA: bool>(activation: Activation, values: &mut [f32]) {
    match activation {
        Activation::Identity => {}
        Activation::Gelu => values.iter_mut().for_each(|v| *v = gelu::<FMA>(*v)),
        Activation::GeluTanh => values.iter_mut().for_each(|v| *v = gelu_tanh::<FMA>(*v)),
        Activation::Relu => values.iter_mut().for_each(|v| *v = v.max(0.0)),
        Activation::Silu => values.iter_mut().for_each(|v| *v /= 1.0 + exp::<FMA>(-*v)),
        Activation::Tanh => values.iter_mut().for_each(|v| *v = tanh::<FMA>(*v)),
        Activation::Sigmoid => values.iter_mut().for_each(|v| *v = 1.0 / (1.0 + exp::<FMA>(-*v))),
    }
}

/// Softmax over the first `len` values of each row of `stride` values; the rest of a row becomes 0.
#[inline(always)]
pub(super) fn softmax<const FMA: bool>(scores: &mut [f32], stride: usize, len: usize) {
    for row in scores.chunks_exact_mut(stride) {
        let (row, rest) = row.split_at_mut(len);
        rest.fill(0.0);
        let highest = reduce(row, f32::NEG_INFINITY, f32::max);
        for value in row.iter_mut() {
            *value = exp::<FMA>(*value - highest);
        }
        let scale = 1.0 / reduce(row, 0.0, |a, b| a + b);
        for value in row.iter_mut() {
            *value *= scale;
        }
    }
}

/// Layer normalization of rows as wide as `gamma`, in place.
#[inline(always)]
pub(super) fn layer_norm<const FMA: bool>(values: &mut [f32], gamma: &[f32], beta: &[f32], eps: f32) {
    let width = gamma.len();
    for row in values.chunks_exact_mut(width) {
        let mean = reduce(row, 0.0, |a, b| a + b) / width as f32;
        for value in row.iter_mut() {
            *value -= mean;
        }
        let variance = sum_of_squares::<FMA>(row) / width as f32;
        let scale = 1.0 / (variance + eps).sqrt();
        for ((value, gamma), beta) in row.iter_mut().zip(gamma).zip(beta) {
            *value = madd::<FMA>(*value * scale, *gamma, *beta);
        }
    }
}

/// Copies a row-major matrix of `columns` rows and `depth` columns, rows `stride` apart, into
/// panels of its transpose. Columns beyond the last become 0.
#[inline(always)]
pub(super) fn pack_transposed<const FMA: bool>(
    source: &[f32],
    stride: usize,
    depth: usize,
    columns: usize,
    panels: &mut [f32],
) {
    for (p, panel) in panels.chunks_exact_mut(depth * PANEL).enumerate() {
        for j in 0..PANEL {
            let column = p * PANEL + j;
            if column < columns {
                let source = &source[column * stride..][..depth];
                for (value, line) in source.iter().zip(panel.chunks_exact_mut(PANEL)) {
                    line[j] = *value;
                }
            } else {
                panel.chunks_exact_mut(PANEL).for_each(|line| line[j] = 0.0);
            }
        }
    }
}

/// Copies `height` rows of `depth` values so that those of one depth stand side by side.
#[inline(always)]
pub(super) fn pack_tile<const FMA: bool>(
    source: &[f32],
    stride: usize,
    depth: usize,
    height: usize,
    tile: &mut [f32],
) {
    match height {
        6 => pack_rows::<6>(source, stride, depth, tile),
        5 => pack_rows::<5>(source, stride, depth, tile),
        _ => {
            for row in 0..height {
                let source = &source[row * stride..][..depth];
                for (value, line) in source.iter().zip(tile.chunks_exact_mut(height)) {
                    line[row] = *value;
                }
            }
        }
    }
}

/// Four depths of all rows at a time, so that the compiler can turn them in registers.
#[inline(always)]
fn pack_rows<const ROWS: usize>(source: &[f32], stride: usize, depth: usize, tile: &mut [f32]) {
    const AT_ONCE: usize = 4;
    let rows: [&[f32]; ROWS] = std::array::from_fn(|row| &source[row * stride..][..depth]);
    let (lines, _) = tile.as_chunks_mut::<ROWS>();
    let (fours, rest) = lines.as_chunks_mut::<AT_ONCE>();
    let parts = rows.map(|row| row.as_chunks::<AT_ONCE>().0);
    let count = fours.len().min(depth / AT_ONCE);
    for (at, four) in fours.iter_mut().enumerate().take(count) {
        let values = parts.map(|part| part[at]);
        *four = std::array::from_fn(|k| std::array::from_fn(|row| values[row][k]));
    }
    for (line, k) in rest.iter_mut().zip(count * AT_ONCE..depth) {
        *line = rows.map(|row| row[k]);
    }
}

/// Rows of `depth` values become rows of as many bytes, `stride` apart, from 0 for a row's lowest value
/// to 255 for its highest. The bytes between two rows become 0.
#[inline(always)]
pub(super) fn quantize<const FMA: bool>(
    values: &[f32],
    depth: usize,
    stride: usize,
    bytes: &mut [u8],
    steps: &mut [RowScale],
) {
    /// 1.5 · 2^23: adding it rounds to an integer and leaves that in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let rows = values.chunks_exact(depth).zip(bytes.chunks_exact_mut(stride));
    for ((row, bytes), step) in rows.zip(steps) {
        let lowest = reduce(row, f32::INFINITY, f32::min);
        let highest = reduce(row, f32::NEG_INFINITY, f32::max);
        // Minimum and maximum ignore NaN; this carries a NaN of the row into the result.
        let poison = sum_of_squares::<FMA>(row) * 0.0;
        let range = highest - lowest;
        let inverse = if range > 0.0 { 255.0 / range } else { 0.0 };
        let (bytes, rest) = bytes.split_at_mut(depth);
        for (byte, value) in bytes.iter_mut().zip(row) {
            *byte = madd::<FMA>(*value - lowest, inverse, ROUND).to_bits() as u8;
        }
        rest.fill(0);
        *step = RowScale {
            scale: range / 255.0 + poison,
            offset: lowest,
        };
    }
}

#[inline(always)]
fn reduce(values: &[f32], start: f32, combine: impl Fn(f32, f32) -> f32 + Copy) -> f32 {
    let mut lanes = [start; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = combine(*lane, *value);
        }
    }
    let folded = lanes.into_iter().fold(start, combine);
    rest.iter().fold(folded, |a, b| combine(a, *b))
}

#[inline(always)]
fn sum_of_squares<const FMA: bool>(values: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = madd::<FMA>(*value, *value, *lane);
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|v| v * v).sum::<f32>()
}
