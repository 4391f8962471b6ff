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

/// The inner product of a vector in bytes and a query in 16 bits, of the same length. The sum of
/// the products' absolute values must fit 32 bits.
#[inline]
pub(crate) fn byte_dot(bytes: &[i8], query: &[i16]) -> i32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature the function is compiled for was just found.
        return unsafe { avx2::byte_dot(bytes, query) };
    }
    portable::byte_dot(bytes, query)
}

/// Has memory fetched that is needed soon: vectors that were chosen by a filter lie apart, where
/// the processor does not fetch ahead by itself.
#[inline]
pub(crate) fn prefetch<T>(vector: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        for line in vector.chunks((64 / size_of::<T>().max(1)).max(1)) {
            // SAFETY: a hint that reads nothing; the address is that of a slice besides.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = vector;
}

/// What is stored of [`LANES`] vectors that are scanned together.
pub(crate) struct CodeBlock<'a> {
    /// [`GROUP`] bytes per group; the number of groups is even.
    pub(crate) codes: &'a [u8],
    /// Codes that come later, which are fetched from memory meanwhile.
    pub(crate) later: &'a [u8],
    pub(crate) scales: &'a [f32; LANES],
    pub(crate) shifts: &'a [f32; LANES],
}

/// How sums of table entries become similarities: `offset + shift + scale * (sum * step + bias)`.
#[derive(Clone, Copy)]
pub(crate) struct CodeLine {
    pub(crate) offset: f32,
    pub(crate) step: f32,
    pub(crate) bias: f32,
}

/// For each vector of a block, sums over all groups the table entry its four bits select, and
/// estimates its similarity from that. Tells by bits which estimates are above the threshold; if
/// none is, the estimates are not written. `tables` are as long as the codes, and a sum must fit
/// 16 bits.
#[inline]
pub(crate) fn estimate(
    block: &CodeBlock<'_>,
    tables: &[u8],
    line: CodeLine,
    threshold: f32,
    estimates: &mut [f32; LANES],
) -> u32 {
    debug_assert_eq!(block.codes.len(), tables.len());
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the features the function is compiled for were just found.
        return unsafe { avx2::estimate(block, tables, line, threshold, estimates) };
    }
    portable::estimate(block, tables, line, threshold, estimates)
}

/// Rounds `vector * per_step` to bytes, and returns the square of the distance between the vector
/// and its bytes times `step`. Nothing may round beyond a byte.
#[inline]
pub(crate) fn to_bytes(vector: &[f32], step: f32, per_step: f32, bytes: &mut [i8]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the feature the function is compiled for was just found.
        return unsafe { avx2::to_bytes(vector, step, per_step, bytes) };
    }
    portable::to_bytes(vector, step, per_step, bytes)
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
    use super::{CodeBlock, CodeLine, GROUP, LANES};

    #[inline(always)]
    pub(super) fn to_bytes(vector: &[f32], step: f32, per_step: f32, bytes: &mut [i8]) -> f32 {
        let mut sums = [0.0f32; 16];
        let (parts, rest) = vector.as_chunks::<16>();
        let (byte_parts, byte_rest) = bytes.as_chunks_mut::<16>();
        let round = |x: f32, byte: &mut i8| {
            let rounded = (x * per_step).round_ties_even();
            *byte = rounded as i32 as i8;
            x - rounded * step
        };
        for (part, byte_part) in parts.iter().zip(byte_parts) {
            for ((sum, x), byte) in sums.iter_mut().zip(part).zip(byte_part) {
                let off = round(*x, byte);
                *sum += off * off;
            }
        }
        let mut sum: f32 = sums.iter().sum();
        for (x, byte) in rest.iter().zip(byte_rest) {
            let off = round(*x, byte);
            sum += off * off;
        }
        sum
    }

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

    pub(super) fn byte_dot(bytes: &[i8], query: &[i16]) -> i32 {
        let products = bytes
            .iter()
            .zip(query)
            .map(|(x, y)| i32::from(*x) * i32::from(*y));
        products.sum()
    }

    pub(super) fn estimate(
        block: &CodeBlock<'_>,
        tables: &[u8],
        line: CodeLine,
        threshold: f32,
        estimates: &mut [f32; LANES],
    ) -> u32 {
        let mut sums = [0u16; LANES];
        let (codes, _) = block.codes.as_chunks::<GROUP>();
        let (tables, _) = tables.as_chunks::<GROUP>();
        for (code, table) in codes.iter().zip(tables) {
            for (at, byte) in code.iter().enumerate() {
                sums[at] += u16::from(table[usize::from(byte & 15)]);
                sums[at + GROUP] += u16::from(table[usize::from(byte >> 4)]);
            }
        }
        let mut above = 0;
        for (lane, sum) in sums.iter().enumerate() {
            let slope = f32::from(*sum) * line.step + line.bias;
            estimates[lane] = block.scales[lane] * slope + (block.shifts[lane] + line.offset);
            above |= u32::from(estimates[lane] > threshold) << lane;
        }
        above
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::{CodeBlock, CodeLine, GROUP, LANES};

    #[target_feature(enable = "avx2")]
    pub(super) fn to_bytes(vector: &[f32], step: f32, per_step: f32, bytes: &mut [i8]) -> f32 {
        super::portable::to_bytes(vector, step, per_step, bytes)
    }

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

    #[target_feature(enable = "avx2")]
    pub(super) fn byte_dot(bytes: &[i8], query: &[i16]) -> i32 {
        let mut sums = [_mm256_setzero_si256(); 2];
        let (byte_parts, byte_rest) = bytes.as_chunks::<32>();
        let (query_parts, query_rest) = query.as_chunks::<32>();
        for (x, y) in byte_parts.iter().zip(query_parts) {
            for (half, sum) in sums.iter_mut().enumerate() {
                // SAFETY: references to 32 bytes and 32 16-bit numbers, of which this is the first
                // or the second half; the loads need no alignment.
                let (x, y) = unsafe {
                    (
                        _mm_loadu_si128(x.as_ptr().add(half * 16).cast()),
                        _mm256_loadu_si256(y.as_ptr().add(half * 16).cast()),
                    )
                };
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_cvtepi8_epi16(x), y));
            }
        }
        let sum = _mm256_add_epi32(sums[0], sums[1]);
        let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b00_00_11_10));
        let sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0b00_00_00_01));
        _mm_cvtsi128_si32(sum) + super::portable::byte_dot(byte_rest, query_rest)
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn estimate(
        block: &CodeBlock<'_>,
        tables: &[u8],
        line: CodeLine,
        threshold: f32,
        estimates: &mut [f32; LANES],
    ) -> u32 {
        let (step, bias) = (_mm256_set1_ps(line.step), _mm256_set1_ps(line.bias));
        let (offset, threshold) = (_mm256_set1_ps(line.offset), _mm256_set1_ps(threshold));
        let mut above = 0;
        let mut results = [_mm256_setzero_ps(); LANES / 8];
        for (eight, (sums, result)) in sums_of_tables(block.codes, block.later, tables)
            .into_iter()
            .zip(&mut results)
            .enumerate()
        {
            // SAFETY: both have 32 numbers; eight are read from number 0, 8, 16 or 24 on, unaligned.
            let (scale, shift) = unsafe {
                (
                    _mm256_loadu_ps(block.scales.as_ptr().add(eight * 8)),
                    _mm256_loadu_ps(block.shifts.as_ptr().add(eight * 8)),
                )
            };
            let sums = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(sums));
            let slope = _mm256_fmadd_ps(sums, step, bias);
            *result = _mm256_fmadd_ps(scale, slope, _mm256_add_ps(shift, offset));
            let above_here = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(*result, threshold));
            above |= (above_here as u32) << (eight * 8);
        }
        if above != 0 {
            for (eight, result) in results.into_iter().enumerate() {
                // SAFETY: 32 numbers, of which eight are written from number 0, 8, 16 or 24 on.
                unsafe { _mm256_storeu_ps(estimates.as_mut_ptr().add(eight * 8), result) };
            }
        }
        above
    }

    /// The sums of 32 vectors, eight in each part. Two groups at a time, one in each half of a
    /// register. Sums of even and odd bytes are kept apart as 16-bit numbers: adding a register of
    /// bytes as 16-bit numbers adds the odd byte times 256 as well, which is taken off at the end.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn sums_of_tables(codes: &[u8], later: &[u8], tables: &[u8]) -> [__m128i; LANES / 8] {
        let low_bits = _mm256_set1_epi8(15);
        let zero = _mm256_setzero_si256();
        let (mut first, mut first_odd, mut second, mut second_odd) = (zero, zero, zero, zero);
        let (codes, _) = codes.as_chunks::<{ 2 * GROUP }>();
        let (tables, _) = tables.as_chunks::<{ 2 * GROUP }>();
        for (at, (code, table)) in codes.iter().zip(tables).enumerate() {
            // Half a line at a time: asking twice costs less than keeping count.
            let soon = later.as_ptr().wrapping_add(at * 2 * GROUP);
            _mm_prefetch::<_MM_HINT_T0>(soon.cast());
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
        let [first, second] = [(first, first_odd), (second, second_odd)].map(|(all, odd)| {
            let even = _mm256_sub_epi16(all, _mm256_slli_epi16(odd, 8));
            let even = _mm_add_epi16(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
            let odd = _mm_add_epi16(_mm256_castsi256_si128(odd), _mm256_extracti128_si256(odd, 1));
            [_mm_unpacklo_epi16(even, odd), _mm_unpackhi_epi16(even, odd)]
        });
        [first[0], first[1], second[0], second[1]]
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
    fn both_estimates_agree_with_the_definition() {
        for groups in [2, 4, 96, 250] {
            let codes = noise(groups as u64, groups * GROUP);
            let limit = (u16::MAX as usize / groups).min(255) as u8;
            let tables: Vec<u8> = noise(7, groups * GROUP)
                .iter()
                .map(|b| b % limit.max(1))
                .collect();
            let numbers = |seed| {
                let numbers: Vec<f32> = noise(seed, LANES).iter().map(|b| f32::from(*b) / 255.0).collect();
                <[f32; LANES]>::try_from(numbers).unwrap()
            };
            let (scales, shifts) = (numbers(5), numbers(6));
            let line = CodeLine {
                offset: 0.25,
                step: 0.001,
                bias: -1.5,
            };
            let expected: Vec<f64> = (0..LANES)
                .map(|lane| {
                    let sum: u32 = (0..groups)
                        .map(|group| {
                            let byte = codes[group * GROUP + lane % GROUP];
                            let bits = if lane < GROUP { byte & 15 } else { byte >> 4 };
                            u32::from(tables[group * GROUP + usize::from(bits)])
                        })
                        .sum();
                    0.25 + f64::from(shifts[lane]) + f64::from(scales[lane]) * (f64::from(sum) * 0.001 - 1.5)
                })
                .collect();
            let block = CodeBlock {
                codes: &codes,
                later: &[],
                scales: &scales,
                shifts: &shifts,
            };
            let mut sorted = expected.clone();
            sorted.sort_by(f64::total_cmp);
            // Between two of them, below all and above all.
            let middle = (sorted[LANES / 2 - 1] + sorted[LANES / 2]) / 2.0;
            for threshold in [middle, sorted[0] - 1.0, sorted[LANES - 1] + 1.0] {
                for function in [estimate, portable::estimate] {
                    let mut estimates = [f32::NAN; LANES];
                    let above = function(&block, &tables, line, threshold as f32, &mut estimates);
                    for (lane, expected) in expected.iter().enumerate() {
                        assert_eq!(above >> lane & 1 == 1, *expected > threshold);
                        assert!(above == 0 || (f64::from(estimates[lane]) - expected).abs() < 1e-3);
                    }
                }
            }
        }
    }

    #[test]
    fn both_ways_to_bytes_agree_with_the_definition() {
        for n in [0, 1, 15, 16, 33, 384] {
            let vector: Vec<f32> = noise(1, n).iter().map(|b| f32::from(*b) / 128.0 - 1.0).collect();
            let (step, per_step) = (1.0 / 127.0, 127.0);
            let rounded: Vec<f32> = vector.iter().map(|x| (x * per_step).round_ties_even()).collect();
            let square: f32 = vector
                .iter()
                .zip(&rounded)
                .map(|(x, r)| (x - r * step).powi(2))
                .sum();
            for function in [to_bytes, portable::to_bytes] {
                let mut bytes = vec![99; n];
                assert!((function(&vector, step, per_step, &mut bytes) - square).abs() < 1e-6);
                assert!(bytes.iter().zip(&rounded).all(|(byte, r)| f32::from(*byte) == *r));
            }
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
    fn both_products_of_bytes_agree_with_the_definition() {
        for n in [0, 1, 15, 16, 31, 32, 33, 384, 1000] {
            let bytes: Vec<i8> = noise(1, n).iter().map(|b| (*b as i8).max(-127)).collect();
            let query: Vec<i16> = noise(2, n).iter().map(|b| i16::from(*b as i8) * 128).collect();
            let expected: i64 = bytes
                .iter()
                .zip(&query)
                .map(|(x, y)| i64::from(*x) * i64::from(*y))
                .sum();
            assert_eq!(i64::from(byte_dot(&bytes, &query)), expected);
            assert_eq!(i64::from(portable::byte_dot(&bytes, &query)), expected);
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
