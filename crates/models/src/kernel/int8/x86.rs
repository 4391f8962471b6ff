//! The products of bytes by the instructions of x86-64.

use std::arch::x86_64::{
    __m256i, __m512i, _mm256_add_epi16, _mm256_add_epi32, _mm256_loadu_si256, _mm256_madd_epi16,
    _mm256_maddubs_epi16, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_setzero_si256, _mm256_storeu_si256,
    _mm512_dpbusd_epi32, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_si512, _mm512_storeu_si512,
};
use std::ops::Range;

use super::{ByteProduct, Dots, GROUP, OutputPointer, PANEL, panel_rows};

/// # Safety
/// As for [`super::run_panel`], on a processor with AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn avx2_panel(
    product: &ByteProduct<'_>,
    output: OutputPointer,
    panel: usize,
    block: Range<usize>,
) {
    // SAFETY: passed on to the caller.
    unsafe { panel_rows::<true, Avx2>(product, output, panel, block) };
}

/// # Safety
/// As for [`super::run_panel`], on a processor with what [`super::DotProduct::Vnni`] stands for.
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn vnni_panel(
    product: &ByteProduct<'_>,
    output: OutputPointer,
    panel: usize,
    block: Range<usize>,
) {
    // SAFETY: passed on to the caller.
    unsafe { panel_rows::<true, Vnni>(product, output, panel, block) };
}

struct Avx2;

impl Dots for Avx2 {
    /// 4 × 2 accumulators leave eight registers for operands.
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn dots<const R: usize>(rows: &[u8], stride: usize, panel: &[u8]) -> [[i32; PANEL]; R] {
        // SAFETY: passed on to the caller.
        unsafe { avx2_dots::<R>(rows, stride, panel) }
    }
}

struct Vnni;

impl Dots for Vnni {
    /// As many accumulators hide the latency of a product.
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn dots<const R: usize>(rows: &[u8], stride: usize, panel: &[u8]) -> [[i32; PANEL]; R] {
        // SAFETY: passed on to the caller.
        unsafe { vnni_dots::<R>(rows, stride, panel) }
    }
}

/// # Safety
/// As for [`Dots::dots`].
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
#[inline]
unsafe fn vnni_dots<const R: usize>(rows: &[u8], stride: usize, panel: &[u8]) -> [[i32; PANEL]; R] {
    debug_assert!(rows.len() >= R * stride && panel.len() >= stride * PANEL && stride.is_multiple_of(GROUP));
    let mut acc: [__m512i; R] = [_mm512_setzero_si512(); R];
    let (rows, panel) = (rows.as_ptr(), panel.as_ptr());
    for step in 0..stride / 4 {
        // SAFETY: each round reads 4 bytes of each row and 64 of the panel, and there are as many as the
        // caller vouches for.
        unsafe {
            let weights = _mm512_loadu_si512(panel.add(step * 4 * PANEL).cast());
            for (r, acc) in acc.iter_mut().enumerate() {
                let bytes = rows.add(r * stride + step * 4).cast::<i32>().read_unaligned();
                *acc = _mm512_dpbusd_epi32(*acc, _mm512_set1_epi32(bytes), weights);
            }
        }
    }
    let mut dots = [[0; PANEL]; R];
    for (dots, acc) in dots.iter_mut().zip(acc) {
        // SAFETY: sixteen integers are one register.
        unsafe { _mm512_storeu_si512(dots.as_mut_ptr().cast(), acc) };
    }
    dots
}

/// # Safety
/// As for [`Dots::dots`].
#[target_feature(enable = "avx2,fma")]
#[inline]
unsafe fn avx2_dots<const R: usize>(rows: &[u8], stride: usize, panel: &[u8]) -> [[i32; PANEL]; R] {
    debug_assert!(rows.len() >= R * stride && panel.len() >= stride * PANEL && stride.is_multiple_of(GROUP));
    let ones = _mm256_set1_epi16(1);
    let mut acc: [[__m256i; 2]; R] = [[_mm256_setzero_si256(); 2]; R];
    let (mut row, mut weights) = (rows.as_ptr(), panel.as_ptr().cast::<__m256i>());
    for _ in 0..stride / GROUP {
        // SAFETY: each round reads 8 bytes of each row and 128 of the panel, and there are as many
        // as the caller vouches for.
        unsafe {
            let first = [_mm256_loadu_si256(weights), _mm256_loadu_si256(weights.add(1))];
            let second = [
                _mm256_loadu_si256(weights.add(2)),
                _mm256_loadu_si256(weights.add(3)),
            ];
            for (r, acc) in acc.iter_mut().enumerate() {
                let at = row.add(r * stride).cast::<i32>();
                let left = _mm256_set1_epi32(at.read_unaligned());
                let right = _mm256_set1_epi32(at.add(1).read_unaligned());
                for (half, acc) in acc.iter_mut().enumerate() {
                    // Never saturates, by the choice of scales.
                    let products = _mm256_add_epi16(
                        _mm256_maddubs_epi16(left, first[half]),
                        _mm256_maddubs_epi16(right, second[half]),
                    );
                    *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(products, ones));
                }
            }
            row = row.add(GROUP);
            weights = weights.add(4);
        }
    }
    let mut dots = [[0; PANEL]; R];
    for (dots, [low, high]) in dots.iter_mut().zip(acc) {
        // SAFETY: sixteen integers are two registers.
        unsafe {
            _mm256_storeu_si256(dots.as_mut_ptr().cast(), low);
            _mm256_storeu_si256(dots.as_mut_ptr().add(PANEL / 2).cast(), high);
        }
    }
    dots
}
