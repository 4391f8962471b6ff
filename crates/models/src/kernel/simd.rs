//! The unsafe arithmetic on `f32`: the 6 × 16 register tile and the calls into code compiled for AVX2
//! and FMA. [`super::bf16`] and [`super::int8`] have their counterparts for weights of quantized bits.
//!
//! Three invariants keep it sound. [`run`] checks the lengths of its operands against the whole product
//! before the first tile. The parts of one product that run on several threads are ranges of
//! columns that do not overlap. And code compiled for AVX2 and FMA is entered only through
//! [`Isa::Avx2`], a value that [`Isa::detect`] makes only after the processor said that it has both.

use std::cell::Cell;
use std::ops::Range;

use half::bf16;

use super::int8::RowScale;
use super::product::{Accumulate, Activation, BLOCK_DEPTH, BLOCK_ROWS, Product};
use super::{PANEL, TILE_ROWS, rows};
use crate::thread_group::ThreadGroup;

/// The instruction set that the arithmetic is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// Cheap: the standard library caches the detected features.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        Self::Portable
    }
}

/// One cache line of floats; weights and activations start on such a line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; PANEL]);

/// Floats that begin on a cache line. Grows on demand and never shrinks.
#[derive(Default)]
pub(crate) struct AlignedBuffer {
    lines: Vec<Line>,
}

impl AlignedBuffer {
    pub(crate) fn zeroed(len: usize) -> Self {
        Self {
            lines: vec![Line([0.0; PANEL]); len.div_ceil(PANEL)],
        }
    }

    /// The first `len` floats; they hold values of earlier use.
    pub(crate) fn reserve(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(PANEL);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; PANEL]));
        }
        &mut self.as_mut_slice()[..len]
    }

    pub(crate) fn as_slice(&self) -> &[f32] {
        // SAFETY: `Line` is `repr(C)` around `[f32; 16]` and 64 bytes long like its alignment, so
        // the lines are one run of initialized floats without gaps.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * PANEL) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_slice`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * PANEL) }
    }

    /// The same memory as bytes, for a buffer that is used for those.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        let floats = self.as_slice();
        // SAFETY: floats are initialized bytes without gaps.
        unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), size_of_val(floats)) }
    }

    /// The same memory as pairs of halves, for a buffer that is used for those.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn as_pairs(&self) -> &[[bf16; 2]] {
        let floats = self.as_slice();
        // SAFETY: a pair is as large as a float, needs no greater alignment, and any bits are one.
        unsafe { std::slice::from_raw_parts(floats.as_ptr().cast(), floats.len()) }
    }

    /// The first `len` pairs; they hold values of earlier use.
    pub(super) fn reserve_pairs(&mut self, len: usize) -> &mut [[bf16; 2]] {
        let floats = self.reserve(len);
        // SAFETY: as in `as_pairs`, the borrow is exclusive, and any two halves are a float.
        unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), len) }
    }

    /// The first `len` bytes; they hold values of earlier use.
    pub(crate) fn reserve_bytes(&mut self, len: usize) -> &mut [u8] {
        let floats = self.reserve(len.div_ceil(size_of::<f32>()));
        // SAFETY: as in `as_bytes`, the borrow is exclusive, and any four bytes are a float.
        unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), len) }
    }
}

/// Pointer to the result of a product, which several threads write at disjoint columns.
#[derive(Clone, Copy)]
pub(super) struct OutputPointer(*mut f32);

// SAFETY: only products share it, and give each thread columns of its own.
unsafe impl Sync for OutputPointer {}

impl OutputPointer {
    pub(super) fn new(c: &mut [f32]) -> Self {
        Self(c.as_mut_ptr())
    }

    /// # Safety
    /// The `len` floats from `offset` must lie within the result, and nothing else may access them
    /// while the slice exists.
    pub(super) unsafe fn row_part<'a>(self, offset: usize, len: usize) -> &'a mut [f32] {
        // SAFETY: the caller vouches for the range and for its being exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(offset), len) }
    }

    /// # Safety
    /// `offset` must lie within the result.
    unsafe fn at(&self, offset: usize) -> *mut f32 {
        // SAFETY: the caller vouches for the offset.
        unsafe { self.0.add(offset) }
    }
}

/// Position of a tile in a result whose rows are `columns` wide.
#[derive(Clone, Copy)]
pub(super) struct TilePosition {
    /// The first of its rows.
    pub(super) row: usize,
    pub(super) panel: usize,
    pub(super) columns: usize,
}

/// Writes the products of `R` rows and one panel, all rows at once, because one alone would wait for the
/// latency of each operation.
///
/// # Safety
/// `output` must be valid for these rows and the columns of the panel, and no other thread may access
/// them meanwhile.
#[inline(always)]
pub(super) unsafe fn write_tile<const FMA: bool, const R: usize>(
    mut values: [[f32; PANEL]; R],
    output: OutputPointer,
    position: TilePosition,
    accumulate: Accumulate,
    activation: Activation,
) {
    let TilePosition { row, panel, columns } = position;
    let column = panel * PANEL;
    let width = PANEL.min(columns - column);
    // SAFETY: within the rows and columns that the caller vouches for.
    let into = |r: usize| unsafe { output.row_part((row + r) * columns + column, width) };
    if accumulate == Accumulate::Add {
        for (r, values) in values.iter_mut().enumerate() {
            let before = into(r);
            match before.first_chunk::<PANEL>() {
                Some(whole) => add(values, whole),
                None => add(values, before),
            }
        }
    }
    rows::activate::<FMA>(activation, values.as_flattened_mut());
    for (r, values) in values.iter().enumerate() {
        let into = into(r);
        match into.first_chunk_mut::<PANEL>() {
            Some(whole) => *whole = *values,
            None => into.copy_from_slice(&values[..width]),
        }
    }
}

#[inline(always)]
fn add(values: &mut [f32; PANEL], others: &[f32]) {
    for (value, other) in values.iter_mut().zip(others) {
        *value += other;
    }
}

/// Computes `product` into the rows of `c`, which are `ldc` apart, on all threads of the group.
pub(crate) fn run(isa: Isa, threads: &ThreadGroup, product: &Product<'_>, c: &mut [f32], ldc: usize) {
    let Product {
        a,
        lda,
        rows,
        b,
        bias,
        ..
    } = *product;
    if rows == 0 || b.columns == 0 {
        return;
    }
    assert!(a.len() >= (rows - 1) * lda + b.depth && lda >= b.depth);
    assert!(c.len() >= (rows - 1) * ldc + b.columns && ldc >= b.columns);
    assert!(b.panels.len() >= b.columns.next_multiple_of(PANEL) * b.depth);
    assert!(bias.is_none_or(|bias| bias.len() >= b.columns));

    let output = OutputPointer::new(c);
    for_panels(threads, b.columns.div_ceil(PANEL), &|range| {
        // SAFETY: the lengths were checked above, and the ranges of different parts are disjoint.
        unsafe { run_panels(isa, product, output, ldc, range) };
    });
}

/// Calls `work` with disjoint ranges that cover all panels, on all threads of the group.
pub(super) fn for_panels(threads: &ThreadGroup, panels: usize, work: &(dyn Fn(Range<usize>) + Sync)) {
    if threads.size() == 1 {
        return work(0..panels);
    }
    // A few parts per thread even out threads that join late or are interrupted.
    let per_part = panels.div_ceil(4 * threads.size()).max(1);
    threads.for_each(panels.div_ceil(per_part), &|part| {
        work(part * per_part..panels.min((part + 1) * per_part));
    });
}

/// From this many panels on, rows of `a` are copied so that a tile reads them as one stream: each
/// copy is then read often enough to pay for itself.
const PANELS_WORTH_PACKING: usize = 8;

thread_local! {
    /// The packed rows of the block that this thread works on, tile after tile; in a tile, the values
    /// of one depth side by side.
    static PACKED_ROWS: Cell<AlignedBuffer> = const { Cell::new(AlignedBuffer { lines: Vec::new() }) };
}

/// # Safety
/// The operands must be as long as [`run`] checks, and no other thread may access the columns of
/// `range` in the output.
unsafe fn run_panels(
    isa: Isa,
    product: &Product<'_>,
    output: OutputPointer,
    ldc: usize,
    range: Range<usize>,
) {
    let Product { a, lda, rows, b, .. } = *product;
    let blocks = b.depth.div_ceil(BLOCK_DEPTH).max(1);
    let block_depth = b.depth.div_ceil(blocks);
    for block in 0..blocks {
        let k = block * block_depth;
        let depth = block_depth.min(b.depth - k);
        let (first, last) = (block == 0, block + 1 == blocks);
        for block_row in (0..rows).step_by(BLOCK_ROWS) {
            let block_end = rows.min(block_row + BLOCK_ROWS);
            let block_rows = block_end - block_row;
            let packing = block_rows > TILE_ROWS && range.len() >= PANELS_WORTH_PACKING;
            let mut packed = PACKED_ROWS.take();
            if packing {
                let mut into = packed.reserve(block_rows * depth);
                let mut row = block_row;
                while row < block_end {
                    let height = tile_height(block_end - row);
                    let (tile, rest) = into.split_at_mut(height * depth);
                    pack_tile(isa, &a[row * lda + k..], lda, depth, height, tile);
                    (into, row) = (rest, row + height);
                }
            }
            for panel in range.clone() {
                let column = panel * PANEL;
                let width = PANEL.min(b.columns - column);
                let mut row = block_row;
                while row < block_end {
                    let height = tile_height(block_end - row);
                    let args = TileArgs {
                        a: if packing {
                            &packed.as_slice()[(row - block_row) * depth..]
                        } else {
                            &a[row * lda + k..]
                        },
                        lda,
                        packed: packing,
                        b: &b.panels[panel * b.depth * PANEL + k * PANEL..][..depth * PANEL],
                        depth,
                        // SAFETY: row < rows and column < columns.
                        c: unsafe { output.at(row * ldc + column) },
                        ldc,
                        accumulate: !first || product.accumulate == Accumulate::Add,
                        bias: product
                            .bias
                            .filter(|_| first)
                            .map(|bias| &bias[column..column + width]),
                        activation: if last {
                            product.activation
                        } else {
                            Activation::Identity
                        },
                    };
                    // SAFETY: the tile lies in the rows and columns that the caller vouches for.
                    unsafe {
                        if width == PANEL {
                            tile_of(isa, height, &args);
                        } else {
                            narrow_tile(isa, height, &args, width);
                        }
                    }
                    row += height;
                }
            }
            PACKED_ROWS.set(packed);
        }
    }
}

/// Rows of the next tile when `left` rows are left: tiles of nearly equal height, because a tile
/// of one row takes almost as long as one of three.
fn tile_height(left: usize) -> usize {
    left.div_ceil(left.div_ceil(TILE_ROWS))
}

/// The last panel of a matrix whose columns are no multiple of 16, by way of a full tile in scratch memory.
///
/// # Safety
/// As for [`tile`], for `width` columns.
unsafe fn narrow_tile(isa: Isa, height: usize, args: &TileArgs<'_>, width: usize) {
    let mut scratch = [0.0f32; TILE_ROWS * PANEL];
    let mut bias = [0.0f32; PANEL];
    for (r, line) in scratch.chunks_exact_mut(PANEL).take(height).enumerate() {
        // SAFETY: the caller vouches for `width` columns of this row.
        line[..width].copy_from_slice(unsafe { std::slice::from_raw_parts(args.c.add(r * args.ldc), width) });
    }
    if let Some(given) = args.bias {
        bias[..width].copy_from_slice(given);
    }
    let inner = TileArgs {
        c: scratch.as_mut_ptr(),
        ldc: PANEL,
        bias: args.bias.map(|_| &bias[..]),
        ..*args
    };
    // SAFETY: the scratch tile is as large as the largest tile.
    unsafe { tile_of(isa, height, &inner) };
    for (r, line) in scratch.chunks_exact(PANEL).take(height).enumerate() {
        // SAFETY: as above, and the caller has exclusive access.
        unsafe { std::slice::from_raw_parts_mut(args.c.add(r * args.ldc), width) }
            .copy_from_slice(&line[..width]);
    }
}

/// # Safety
/// As for [`tile`].
unsafe fn tile_of(isa: Isa, height: usize, args: &TileArgs<'_>) {
    // SAFETY: passed on to the caller.
    unsafe {
        match height {
            1 => tile::<1>(isa, args),
            2 => tile::<2>(isa, args),
            3 => tile::<3>(isa, args),
            4 => tile::<4>(isa, args),
            5 => tile::<5>(isa, args),
            _ => tile::<6>(isa, args),
        }
    }
}

/// What one register tile needs; `c` points at its first value.
#[derive(Clone, Copy)]
struct TileArgs<'a> {
    a: &'a [f32],
    /// How far apart the rows of `a` are, unless it is packed.
    lda: usize,
    /// Whether the values of one depth stand side by side.
    packed: bool,
    b: &'a [f32],
    depth: usize,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    bias: Option<&'a [f32]>,
    activation: Activation,
}

impl TileArgs<'_> {
    /// How far apart two values of `a` are in neighbouring rows and at neighbouring depths.
    fn steps<const R: usize>(&self) -> (usize, usize) {
        if self.packed { (1, R) } else { (self.lda, 1) }
    }
}

/// Computes `R` rows by 16 columns of a product, `R` from 1 to 6.
///
/// # Safety
/// `args.c` must be valid for reads and writes of `R` rows of 16 floats with the row distance
/// `args.ldc`, and nothing else may access them meanwhile. `a`, `b` and `bias` are checked here.
unsafe fn tile<const R: usize>(isa: Isa, args: &TileArgs<'_>) {
    assert!(args.b.len() >= args.depth * PANEL && args.bias.is_none_or(|bias| bias.len() >= PANEL));
    let (row_step, depth_step) = args.steps::<R>();
    assert!(args.depth == 0 || args.a.len() > (R - 1) * row_step + (args.depth - 1) * depth_step);
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: AVX2 and FMA are there, see `Isa`; the lengths of `a`, `b` and `bias` were
        // checked above, and the caller vouches for `c`.
        Isa::Avx2 => unsafe {
            if args.packed {
                avx2::tile::<R, true>(args);
            } else {
                avx2::tile::<R, false>(args);
            }
        },
        // SAFETY: the caller vouches for `c`.
        Isa::Portable => unsafe { portable_tile::<R>(args) },
    }
}

/// # Safety
/// As for [`tile`].
unsafe fn portable_tile<const R: usize>(args: &TileArgs<'_>) {
    let mut acc = [[0.0f32; PANEL]; R];
    for (r, row) in acc.iter_mut().enumerate() {
        for (j, value) in row.iter_mut().enumerate() {
            if args.accumulate {
                // SAFETY: within the tile that the caller vouches for.
                *value = unsafe { *args.c.add(r * args.ldc + j) };
            }
            if let Some(bias) = args.bias {
                *value += bias[j];
            }
        }
    }
    let (row_step, depth_step) = args.steps::<R>();
    for (k, b) in args.b.chunks_exact(PANEL).take(args.depth).enumerate() {
        for (r, row) in acc.iter_mut().enumerate() {
            let a = args.a[r * row_step + k * depth_step];
            for (value, b) in row.iter_mut().zip(b) {
                *value = rows::madd::<NATIVE_FMA>(a, *b, *value);
            }
        }
    }
    for (r, row) in acc.iter_mut().enumerate() {
        rows::activate::<NATIVE_FMA>(args.activation, row);
        for (j, value) in row.iter().enumerate() {
            // SAFETY: within the tile that the caller vouches for.
            unsafe { *args.c.add(r * args.ldc + j) = *value };
        }
    }
}

/// Without hardware support `mul_add` is a slow library call; on AArch64 it is always there.
const NATIVE_FMA: bool = cfg!(target_arch = "aarch64");

/// Makes a safe function that runs the body of the same name in [`rows`], compiled for `isa`.
macro_rules! dispatch {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        $(pub(crate) fn $name(isa: Isa, $($arg: $type),*) {
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: AVX2 and FMA are there, see `Isa`.
                Isa::Avx2 => unsafe { avx2::$name($($arg),*) },
                Isa::Portable => rows::$name::<NATIVE_FMA>($($arg),*),
            }
        })*

        #[cfg(target_arch = "x86_64")]
        mod avx2 {
            use super::{Activation, RowScale, rows};
            pub(super) use super::avx2_tile::tile;
            $(#[target_feature(enable = "avx2,fma")]
            pub(super) fn $name($($arg: $type),*) {
                rows::$name::<true>($($arg),*);
            })*
        }
    };
}

dispatch! {
    softmax(scores: &mut [f32], stride: usize, len: usize);
    layer_norm(values: &mut [f32], gamma: &[f32], beta: &[f32], eps: f32);
    activate(activation: Activation, values: &mut [f32]);
    pack_transposed(source: &[f32], stride: usize, depth: usize, columns: usize, panels: &mut [f32]);
    pack_tile(source: &[f32], stride: usize, depth: usize, height: usize, tile: &mut [f32]);
    quantize(values: &[f32], depth: usize, stride: usize, bytes: &mut [u8], steps: &mut [RowScale]);
}

#[cfg(target_arch = "x86_64")]
mod avx2_tile {
    use std::arch::x86_64::{
        __m256, _MM_HINT_T0, _mm_prefetch, _mm256_add_ps, _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_set1_ps,
        _mm256_setzero_ps, _mm256_storeu_ps,
    };

    use super::super::rows;
    use super::{Activation, PANEL, TileArgs};

    /// How many rows of the panel ahead to ask for; a panel that comes from main memory is read
    /// as one stream, and this keeps it a few hundred cycles ahead of its use.
    const AHEAD: usize = 24;

    /// # Safety
    /// As for [`super::tile`], with the lengths of `a`, `b` and `bias` checked.
    #[target_feature(enable = "avx2,fma")]
    pub(in super::super) unsafe fn tile<const R: usize, const PACKED: bool>(args: &TileArgs<'_>) {
        let TileArgs {
            a, b, depth, c, ldc, ..
        } = *args;
        let (row_step, depth_step) = if PACKED { (1, R) } else { (args.lda, 1) };
        let (mut a, mut b) = (a.as_ptr(), b.as_ptr());
        let mut acc: [[__m256; 2]; R] = [[_mm256_setzero_ps(); 2]; R];
        // SAFETY: `c` covers R rows of 16 floats, `bias` holds 16, `b` holds depth rows of 16 and
        // `a` reaches to the last element that is read; prefetching an address is always allowed.
        unsafe {
            if args.accumulate {
                for (r, [low, high]) in acc.iter_mut().enumerate() {
                    *low = _mm256_loadu_ps(c.add(r * ldc));
                    *high = _mm256_loadu_ps(c.add(r * ldc + 8));
                }
            }
            if let Some(bias) = args.bias {
                let (left, right) = (
                    _mm256_loadu_ps(bias.as_ptr()),
                    _mm256_loadu_ps(bias.as_ptr().add(8)),
                );
                for [low, high] in &mut acc {
                    *low = _mm256_add_ps(*low, left);
                    *high = _mm256_add_ps(*high, right);
                }
            }
            let mut deeper = |steps: usize| {
                for step in 0..steps {
                    let line = b.add(step * PANEL);
                    let (left, right) = (_mm256_loadu_ps(line), _mm256_loadu_ps(line.add(8)));
                    _mm_prefetch::<_MM_HINT_T0>(line.wrapping_add(AHEAD * PANEL).cast());
                    for (r, [low, high]) in acc.iter_mut().enumerate() {
                        let value = _mm256_set1_ps(*a.add(r * row_step + step * depth_step));
                        *low = _mm256_fmadd_ps(value, left, *low);
                        *high = _mm256_fmadd_ps(value, right, *high);
                    }
                }
                a = a.add(steps * depth_step);
                b = b.add(steps * PANEL);
            };
            // Written out four times, the loop itself costs nothing beside the products.
            for _ in 0..depth / 4 {
                deeper(4);
            }
            for _ in 0..depth % 4 {
                deeper(1);
            }
            for (r, [low, high]) in acc.iter().enumerate() {
                _mm256_storeu_ps(c.add(r * ldc), *low);
                _mm256_storeu_ps(c.add(r * ldc + 8), *high);
            }
            if args.activation != Activation::Identity {
                for r in 0..R {
                    let row = std::slice::from_raw_parts_mut(c.add(r * ldc), PANEL);
                    rows::activate::<true>(args.activation, row);
                }
            }
        }
    }
}
