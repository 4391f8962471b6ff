//! The inner loops of dense search, with AVX2 where the processor has it.
//!
//! Everything `unsafe` of the search is here: calls of functions compiled for instructions that
//! were found at run time, and loads whose bounds are checked just before.

/// Vectors whose codes are scanned together.
pub(crate) const LANES: usize = 32;
/// Bytes that hold four bits of each of [`LANES`] vectors, and entries of one look-up table.
pub(crate) const GROUP: usize = 16;

/// The inner product. Both slices have the same length.
#[inline]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the features the function is compiled for were just found.
        return unsafe { avx2::dot(a, b) };
    }
    portable::dot(a, b)
}

/// Has memory fetched that is needed soon: vectors that were chosen by a filter lie apart, where
/// the processor does not fetch ahead by itself.
#[inline]
pub(crate) fn prefetch(vector: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINE: usize = 64 / size_of::<f32>();
        for line in vector.chunks(LINE) {
            // SAFETY: a hint that reads nothing; the address is that of a slice besides.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = vector;
}

/// For each of 32 vectors, the sum over all groups of the table entry its four bits select.
/// `codes` and `tables` have [`GROUP`] bytes per group, and the number of groups is even. A sum
/// must fit 16 bits.
#[inline]
pub(crate) fn sum_tables(codes: &[u8], tables: &[u8], sums: &mut [u16; LANES]) {
    debug_assert_eq!(codes.len(), tables.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature the function is compiled for was just found.
        unsafe { avx2::sum_tables(codes, tables, sums) };
        return;
    }
    portable::sum_tables(codes, tables, sums);
}

/// The Hadamard transform, scaled so that lengths stay as they are. The number of elements is a
/// power of two.
#[inline]
pub(crate) fn hadamard(x: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature the function is compiled for was just found.
        unsafe { avx2::hadamard(x) };
        return;
    }
    portable::hadamard(x);
}

mod portable {
    use super::{GROUP, LANES};

    #[inline(always)]
    pub(super) fn hadamard(x: &mut [f32]) {
        let scale = 1.0 / (x.len() as f32).sqrt();
        let (eights, rest) = x.as_chunks_mut::<8>();
        // Steps of one, two and four stay within eight neighbours.
        for v in eights {
            let [a, b, c, d, e, f, g, h] = *v;
            let [a, b, c, d, e, f, g, h] = [a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h];
            let [a, b, c, d, e, f, g, h] = [a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h];
            *v = [a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h].map(|x| x * scale);
        }
        let mut half = 8;
        if !rest.is_empty() {
            rest.iter_mut().for_each(|x| *x *= scale);
            half = 1;
        }
        while half < x.len() {
            for pair in x.chunks_exact_mut(2 * half) {
                let (left, right) = pair.split_at_mut(half);
                for (a, b) in left.iter_mut().zip(right) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
    }

    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        let mut sums = [0.0f32; 8];
        let (a_parts, a_rest) = a.as_chunks::<8>();
        let (b_parts, b_rest) = b.as_chunks::<8>();
        for (x, y) in a_parts.iter().zip(b_parts) {
            for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
                *sum += x * y;
            }
        }
        let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
        sums.iter().sum::<f32>() + rest
    }

    pub(super) fn sum_tables(codes: &[u8], tables: &[u8], sums: &mut [u16; LANES]) {
        *sums = [0; LANES];
        let (codes, _) = codes.as_chunks::<GROUP>();
        let (tables, _) = tables.as_chunks::<GROUP>();
        for (code, table) in codes.iter().zip(tables) {
            for (at, byte) in code.iter().enumerate() {
                sums[at] += u16::from(table[usize::from(byte & 15)]);
                sums[at + GROUP] += u16::from(table[usize::from(byte >> 4)]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{GROUP, LANES};

    #[target_feature(enable = "avx2")]
    pub(super) fn hadamard(x: &mut [f32]) {
        super::portable::hadamard(x);
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        // Four registers of sums, so that one product does not wait for the one before.
        let mut sums = [0.0f32; 32];
        let (a_parts, a_rest) = a.as_chunks::<32>();
        let (b_parts, b_rest) = b.as_chunks::<32>();
        for (x, y) in a_parts.iter().zip(b_parts) {
            for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
                *sum = x.mul_add(*y, *sum);
            }
        }
        let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x * y).sum();
        sums.iter().sum::<f32>() + rest
    }

    /// Two groups at a time, one in each half of a register. Sums of even and odd bytes are kept
    /// apart as 16-bit numbers: adding a register of bytes as 16-bit numbers adds the odd byte
    /// times 256 as well, which is taken off at the end.
    #[target_feature(enable = "avx2")]
    pub(super) fn sum_tables(codes: &[u8], tables: &[u8], sums: &mut [u16; LANES]) {
        let low_bits = _mm256_set1_epi8(15);
        let zero = _mm256_setzero_si256();
        let (mut first, mut first_odd, mut second, mut second_odd) = (zero, zero, zero, zero);
        let (codes, _) = codes.as_chunks::<{ 2 * GROUP }>();
        let (tables, _) = tables.as_chunks::<{ 2 * GROUP }>();
        for (code, table) in codes.iter().zip(tables) {
            // SAFETY: both are references to 32 bytes, and the loads need no alignment.
            let (code, table) = unsafe {
                (
                    _mm256_loadu_si256(code.as_ptr().cast()),
                    _mm256_loadu_si256(table.as_ptr().cast()),
                )
            };
            let low = _mm256_shuffle_epi8(table, _mm256_and_si256(code, low_bits));
            let high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(code, 4), low_bits));
            first = _mm256_add_epi16(first, low);
            first_odd = _mm256_add_epi16(first_odd, _mm256_srli_epi16(low, 8));
            second = _mm256_add_epi16(second, high);
            second_odd = _mm256_add_epi16(second_odd, _mm256_srli_epi16(high, 8));
        }
        for (half, (all, odd)) in [(first, first_odd), (second, second_odd)].into_iter().enumerate() {
            let even = _mm256_sub_epi16(all, _mm256_slli_epi16(odd, 8));
            let even = _mm_add_epi16(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
            let odd = _mm_add_epi16(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
            let place = sums[half * GROUP..].as_mut_ptr();
            // SAFETY: `sums` has 32 numbers; 16 are written from number 0 or 16 on, unaligned.
            unsafe {
                _mm_storeu_si128(place.cast(), _mm_unpacklo_epi16(even, odd));
                _mm_storeu_si128(place.add(8).cast(), _mm_unpackhi_epi16(even, odd));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, n: usize) -> Vec<u8> {
        let mut state = seed;
        std::iter::repeat_with(|| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .take(n)
        .collect()
    }

    #[test]
    fn both_sums_agree_with_the_definition() {
        for groups in [2, 4, 96, 250] {
            let codes = noise(groups as u64, groups * GROUP);
            let limit = (u16::MAX as usize / groups).min(255) as u8;
            let tables: Vec<u8> = noise(7, groups * GROUP)
                .iter()
                .map(|b| b % limit.max(1))
                .collect();
            let mut expected = [0u16; LANES];
            for (lane, sum) in expected.iter_mut().enumerate() {
                for group in 0..groups {
                    let byte = codes[group * GROUP + lane % GROUP];
                    let bits = if lane < GROUP { byte & 15 } else { byte >> 4 };
                    *sum += u16::from(tables[group * GROUP + usize::from(bits)]);
                }
            }
            let mut sums = [1; LANES];
            sum_tables(&codes, &tables, &mut sums);
            assert_eq!(sums, expected);
            portable::sum_tables(&codes, &tables, &mut sums);
            assert_eq!(sums, expected);
        }
    }

    #[test]
    fn the_transform_keeps_lengths_and_undoes_itself() {
        for n in [1, 2, 4, 8, 16, 256] {
            let before: Vec<f32> = noise(3, n).iter().map(|b| f32::from(*b) / 128.0 - 1.0).collect();
            let mut x = before.clone();
            hadamard(&mut x);
            assert!((dot(&x, &x) - dot(&before, &before)).abs() < 1e-3);
            let sum: f32 = before.iter().sum();
            assert!((x[0] - sum / (n as f32).sqrt()).abs() < 1e-3);
            hadamard(&mut x);
            for (a, b) in x.iter().zip(&before) {
                assert!((a - b).abs() < 1e-4);
            }
        }
    }

    #[test]
    fn both_products_agree_with_the_definition() {
        for n in [0, 1, 3, 7, 8, 31, 32, 33, 384, 1000] {
            let a: Vec<f32> = noise(1, n).iter().map(|b| f32::from(*b) / 128.0 - 1.0).collect();
            let b: Vec<f32> = noise(2, n).iter().map(|b| f32::from(*b) / 128.0 - 1.0).collect();
            let expected: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            assert!((f64::from(dot(&a, &b)) - expected).abs() < 1e-3);
            assert!((f64::from(portable::dot(&a, &b)) - expected).abs() < 1e-3);
        }
    }
}
