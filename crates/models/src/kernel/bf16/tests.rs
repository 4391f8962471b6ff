//! Sixteen-bit products against plain loops over the rounded numbers.

use super::*;
use crate::kernel::tests::{dot, numbers};

fn rounded(values: &[f32]) -> Vec<f32> {
    values
        .iter()
        .map(|value| bf16::from_f32(*value).to_f32())
        .collect()
}

/// Rounds the rows and multiplies.
fn product(
    a: &[f32],
    weights: &HalfWeights,
    mode: (Accumulate, Activation),
    threads: &ThreadGroup,
    c: &mut [f32],
) {
    let mut rows = HalfRows::default();
    rows.round(weights.native(), a, weights.depth());
    let (accumulate, activation) = mode;
    let product = HalfProduct {
        a: &rows,
        b: weights,
        accumulate,
        activation,
    };
    run(threads, &product, c);
}

#[test]
fn products_are_exact_for_the_rounded_numbers() {
    let Some(native) = Native::detect() else { return };
    let heights = (1..=TILE_ROWS + 1).map(|rows| (rows, 34, 16));
    let cases = [
        (1, 1, 1),
        (5, 32, 17),
        (7, 63, 48),
        (99, 385, 31),
        (3, 1536, 16),
        (205, 96, 40),
    ];
    for (rows, depth, columns) in heights.chain(cases) {
        let a: Vec<f32> = numbers(rows * depth, 1).iter().map(|v| v * 6.0 + 1.0).collect();
        let weights = numbers(columns * depth, 2);
        let bias = numbers(columns, 3);
        let before = numbers(rows * columns, 4);
        let packed = HalfWeights::from_rows(native, &weights, &bias, depth);
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            let mut c = before.clone();
            product(
                &a,
                &packed,
                (accumulate, Activation::Relu),
                &ThreadGroup::solo(),
                &mut c,
            );
            for (row, values) in c.chunks_exact(columns).enumerate() {
                let a = rounded(&a[row * depth..][..depth]);
                for (column, value) in values.iter().enumerate() {
                    let b = rounded(&weights[column * depth..][..depth]);
                    let existing = f64::from(before[row * columns + column]);
                    let first = if accumulate == Accumulate::Add {
                        existing
                    } else {
                        0.0
                    };
                    let expected = (first + f64::from(bias[column]) + dot(&a, &b)).max(0.0);
                    assert!(
                        (f64::from(*value) - expected).abs() < 1e-5 * (depth as f64 + expected),
                        "{rows}x{depth}x{columns} at {row}, {column}: {value}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn what_was_there_before_is_not_part_of_a_product() {
    let Some(native) = Native::detect() else { return };
    let mut rows = HalfRows::default();
    rows.round(native, &[f32::NAN; 40 * 64], 64);
    for (count, depth) in [(0, 7), (5, 7), (13, 33)] {
        rows.round(native, &vec![1.0; count * depth], depth);
        let weights = HalfWeights::from_rows(native, &vec![1.0; 3 * depth], &[0.5; 3], depth);
        let product = HalfProduct {
            a: &rows,
            b: &weights,
            accumulate: Accumulate::Overwrite,
            activation: Activation::Identity,
        };
        let mut c = vec![f32::NAN; count * 3];
        run(&ThreadGroup::solo(), &product, &mut c);
        assert_eq!(c, vec![depth as f32 + 0.5; count * 3]);
    }
}

#[test]
fn what_is_not_a_number_does_not_pass_for_one() {
    let Some(native) = Native::detect() else { return };
    for depth in [3, 64] {
        for bad in [f32::NAN, f32::INFINITY, f32::from_bits(0x7fff_ffff)] {
            for weight in [1.0, bad] {
                let weights = HalfWeights::from_rows(native, &vec![weight; depth], &[0.0], depth);
                let mut a = vec![1.0; depth];
                a[1] = bad;
                let mut c = [0.0];
                product(
                    &a,
                    &weights,
                    (Accumulate::Overwrite, Activation::Identity),
                    &ThreadGroup::solo(),
                    &mut c,
                );
                assert!(
                    !c[0].is_finite(),
                    "{bad} times {weight} over {depth} gives {}",
                    c[0]
                );
            }
        }
    }
}

#[test]
fn a_team_multiplies_halves_exactly_as_one_thread_does() {
    let Some(native) = Native::detect() else { return };
    let (rows, depth, columns) = (12, 384, 1152);
    let weights = HalfWeights::from_rows(native, &numbers(columns * depth, 6), &numbers(columns, 7), depth);
    let a = numbers(rows * depth, 5);
    let mode = (Accumulate::Overwrite, Activation::Gelu);
    let mut alone = vec![0.0; rows * columns];
    product(&a, &weights, mode, &ThreadGroup::solo(), &mut alone);
    let (threads, helpers) = ThreadGroup::with_helpers(2);
    std::thread::scope(|scope| {
        for helper in helpers {
            scope.spawn(|| helper.assist());
        }
        for _ in 0..20 {
            let mut together = vec![0.0; rows * columns];
            product(&a, &weights, mode, &threads, &mut together);
            assert!(alone == together);
        }
        drop(threads);
    });
}

#[test]
fn a_product_that_would_write_outside_its_result_is_refused() {
    let Some(native) = Native::detect() else { return };
    let weights = HalfWeights::from_rows(native, &[1.0; 16 * 8], &[0.0; 16], 8);
    let refused = std::panic::catch_unwind(|| {
        let mode = (Accumulate::Overwrite, Activation::Identity);
        product(&[1.0; 16], &weights, mode, &ThreadGroup::solo(), &mut [0.0; 31]);
    });
    assert!(refused.is_err());
}
