//! Eight-bit products against plain loops over the numbers that their bytes stand for.

use super::*;
use crate::kernel::tests::{dot, numbers, sets};

/// Values that a row's bytes stand for.
fn read_back(isa: Isa, values: &[f32]) -> Vec<f32> {
    let mut step = [RowScale::default()];
    let mut bytes = vec![0; values.len()];
    simd::quantize(isa, values, values.len(), values.len(), &mut bytes, &mut step);
    let [RowScale { scale, offset }] = step;
    bytes
        .iter()
        .map(|byte| offset + scale * f32::from(*byte))
        .collect()
}

/// Weights whose extremes meet in every lane of 16 bits, and ordinary ones.
fn weights_of_all_kinds(count: usize) -> [Vec<f32>; 3] {
    let signs = (0..count).map(|i| if i % 3 == 0 { -2.0 } else { 2.0 });
    [numbers(count, 2), vec![1.0; count], signs.collect()]
}

#[test]
fn products_are_exact_for_the_numbers_that_the_bytes_stand_for() {
    let cases = [
        (1, 1, 1),
        (4, 8, 16),
        (5, 32, 17),
        (7, 56, 48),
        (99, 385, 31),
        (3, 1536, 16),
    ];
    for (rows, depth, columns) in cases {
        let mut a: Vec<f32> = numbers(rows * depth, 1).iter().map(|v| v * 6.0 + 1.0).collect();
        // One row is the highest byte but for one value, so that the lanes fill up.
        a[1..depth].fill(4.0);
        let bias = numbers(columns, 3);
        let before = numbers(rows * columns, 4);
        for weights in weights_of_all_kinds(columns * depth) {
            let packed = ByteWeights::from_rows(&weights, &bias, depth);
            for (at, weight) in weights.iter().enumerate() {
                let close = packed.weight(at / depth, at % depth);
                // Half a step of the coarsest scale: four weights of one sign in a lane are 126.
                assert!(
                    (weight - close).abs() <= 4.0 / 126.0 + 1e-6,
                    "{weight} became {close}"
                );
            }
            let ways = sets()
                .into_iter()
                .flat_map(|isa| DotProduct::all(isa).map(move |dot_product| (isa, dot_product)));
            let cases = ways.flat_map(|(isa, dot_product)| {
                [
                    (isa, dot_product, Accumulate::Overwrite),
                    (isa, dot_product, Accumulate::Add),
                ]
            });
            for (isa, dot_product, accumulate) in cases {
                let mut c = before.clone();
                let mut bytes = ByteRows::default();
                bytes.quantize(isa, &a, depth);
                let product = ByteProduct {
                    a: &bytes,
                    b: &packed,
                    accumulate,
                    activation: Activation::Relu,
                };
                run_by(dot_product, &ThreadGroup::solo(), &product, &mut c);
                for (row, values) in c.chunks_exact(columns).enumerate() {
                    let a = read_back(isa, &a[row * depth..][..depth]);
                    for (column, value) in values.iter().enumerate() {
                        let b: Vec<f32> = (0..depth).map(|k| packed.weight(column, k)).collect();
                        let existing = f64::from(before[row * columns + column]);
                        let first = if accumulate == Accumulate::Add {
                            existing
                        } else {
                            0.0
                        };
                        let expected = (first + f64::from(bias[column]) + dot(&a, &b)).max(0.0);
                        assert!(
                            (f64::from(*value) - expected).abs() < 1e-5 * (depth as f64 + expected),
                            "{dot_product:?} {rows}x{depth}x{columns} at {row}, {column}: {value}, not {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rows_of_bytes_span_the_whole_range_and_give_bad_numbers_away() {
    for isa in sets() {
        let (depth, stride) = (21, 24);
        let values: Vec<f32> = numbers(depth * 3, 11).iter().map(|v| v * 9.0 - 2.0).collect();
        let (mut bytes, mut steps) = (vec![7; stride * 3], vec![RowScale::default(); 3]);
        simd::quantize(isa, &values, depth, stride, &mut bytes, &mut steps);
        for ((row, bytes), step) in values.chunks(depth).zip(bytes.chunks(stride)).zip(&steps) {
            assert!(bytes.contains(&0) && bytes.contains(&255));
            assert!(bytes[depth..].iter().all(|byte| *byte == 0));
            for (value, byte) in row.iter().zip(bytes) {
                let back = step.offset + step.scale * f32::from(*byte);
                assert!(
                    (value - back).abs() <= 0.501 * step.scale,
                    "{value} became {back}"
                );
            }
        }
        let mut step = [RowScale::default()];
        simd::quantize(isa, &[3.5; 8], 8, 8, &mut [0; 8], &mut step);
        assert_eq!((step[0].offset, step[0].scale), (3.5, 0.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            simd::quantize(isa, &[0.0, 1.0, bad, 2.0], 4, 4, &mut [0; 4], &mut step);
            assert!(!(step[0].offset + step[0].scale).is_finite(), "{bad}");
        }
    }
}

#[test]
fn a_team_multiplies_bytes_exactly_as_one_thread_does() {
    let (rows, depth, columns) = (12, 384, 1152);
    let weights = ByteWeights::from_rows(&numbers(columns * depth, 6), &numbers(columns, 7), depth);
    let mut bytes = ByteRows::default();
    bytes.quantize(Isa::detect(), &numbers(rows * depth, 5), depth);
    let product = ByteProduct {
        a: &bytes,
        b: &weights,
        accumulate: Accumulate::Overwrite,
        activation: Activation::Gelu,
    };
    let mut alone = vec![0.0; rows * columns];
    run(Isa::detect(), &ThreadGroup::solo(), &product, &mut alone);
    let (threads, helpers) = ThreadGroup::with_helpers(2);
    std::thread::scope(|scope| {
        for helper in helpers {
            scope.spawn(|| helper.assist());
        }
        for _ in 0..20 {
            let mut together = vec![0.0; rows * columns];
            run(Isa::detect(), &threads, &product, &mut together);
            assert!(alone == together);
        }
        drop(threads);
    });
}

#[test]
#[should_panic(expected = "assertion")]
fn a_product_that_would_write_outside_its_result_is_refused() {
    let weights = ByteWeights::from_rows(&[1.0; 16 * 8], &[0.0; 16], 8);
    let mut bytes = ByteRows::default();
    bytes.quantize(Isa::detect(), &[1.0; 16], 8);
    let product = ByteProduct {
        a: &bytes,
        b: &weights,
        accumulate: Accumulate::Overwrite,
        activation: Activation::Identity,
    };
    run(Isa::detect(), &ThreadGroup::solo(), &product, &mut [0.0; 31]);
}
