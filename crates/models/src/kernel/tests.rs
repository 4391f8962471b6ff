//! The kernel against plain loops, on every instruction set this processor has.

use super::product::PackedView;
use super::simd::{self, Isa};
use super::{Accumulate, Activation, Packed, Product, rows};
use crate::thread_group::ThreadGroup;

pub(super) fn sets() -> Vec<Isa> {
    let mut sets = vec![Isa::Portable, Isa::detect()];
    sets.dedup();
    sets
}

/// Numbers that look random and are the same in every run.
pub(super) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[test]
fn products_agree_with_plain_loops_at_every_edge() {
    let cases = [
        (1, 1, 1),
        (5, 3, 16),
        (6, 32, 17),
        (7, 384, 48),
        (13, 385, 31),
        (97, 800, 33),
        (200, 40, 16),
    ];
    for isa in sets() {
        for (rows, depth, columns) in cases {
            let (lda, ldc) = (depth + 3, columns + 5);
            let a = numbers(rows * lda, 1);
            let weights = numbers(columns * depth, 2);
            let bias = numbers(columns, 3);
            let before = numbers(rows * ldc, 4);
            let packed = Packed::from_rows(&weights, depth, columns);
            for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                let mut c = before.clone();
                let product = Product {
                    a: &a,
                    lda,
                    rows,
                    b: packed.view(),
                    bias: Some(&bias),
                    accumulate,
                    activation: Activation::Relu,
                };
                simd::run(isa, &ThreadGroup::solo(), &product, &mut c, ldc);
                for (at, value) in c.iter().enumerate() {
                    let (row, column) = (at / ldc, at % ldc);
                    let expected = if column >= columns {
                        f64::from(before[at])
                    } else {
                        let first = if accumulate == Accumulate::Add {
                            f64::from(before[at])
                        } else {
                            0.0
                        };
                        let product = dot(&a[row * lda..][..depth], &weights[column * depth..][..depth]);
                        (first + f64::from(bias[column]) + product).max(0.0)
                    };
                    assert!(
                        (f64::from(*value) - expected).abs() < 1e-4,
                        "{isa:?} {rows}x{depth}x{columns} at {at}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_team_computes_exactly_what_one_thread_does() {
    let (rows, depth, columns) = (12, 384, 1152);
    let a = numbers(rows * depth, 5);
    let packed = Packed::from_rows(&numbers(columns * depth, 6), depth, columns);
    let product = Product {
        a: &a,
        lda: depth,
        rows,
        b: packed.view(),
        bias: None,
        accumulate: Accumulate::Overwrite,
        activation: Activation::Gelu,
    };
    let mut alone = vec![0.0; rows * columns];
    simd::run(Isa::detect(), &ThreadGroup::solo(), &product, &mut alone, columns);
    let (threads, helpers) = ThreadGroup::with_helpers(2);
    std::thread::scope(|scope| {
        for helper in helpers {
            scope.spawn(|| helper.assist());
        }
        for _ in 0..20 {
            let mut together = vec![0.0; rows * columns];
            simd::run(Isa::detect(), &threads, &product, &mut together, columns);
            assert!(alone == together);
        }
        drop(threads);
    });
}

#[test]
#[should_panic(expected = "assertion")]
fn a_product_that_would_write_outside_its_result_is_refused() {
    let panels = [0.0; 16 * 4];
    let product = Product {
        a: &[0.0; 8],
        lda: 4,
        rows: 2,
        b: PackedView {
            depth: 4,
            columns: 16,
            panels: &panels,
        },
        bias: None,
        accumulate: Accumulate::Overwrite,
        activation: Activation::Identity,
    };
    simd::run(Isa::detect(), &ThreadGroup::solo(), &product, &mut [0.0; 31], 16);
}

#[test]
fn activations_agree_with_their_definitions() {
    let inputs: Vec<f32> = (-2_000..=2_000).map(|i| i as f32 / 200.0).collect();
    type Definition = fn(f64) -> f64;
    let definitions: [(Activation, Definition); 6] = [
        (Activation::Gelu, |x| x * normal_distribution(x)),
        (Activation::GeluTanh, |x| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }),
        (Activation::Relu, |x| x.max(0.0)),
        (Activation::Silu, |x| x / (1.0 + (-x).exp())),
        (Activation::Tanh, f64::tanh),
        (Activation::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
    ];
    for isa in sets() {
        for (activation, definition) in definitions {
            let mut values = inputs.clone();
            simd::activate(isa, activation, &mut values);
            for (x, value) in inputs.iter().zip(values) {
                let expected = definition(f64::from(*x));
                assert!(
                    (f64::from(value) - expected).abs() < 5e-6,
                    "{isa:?} {activation:?}({x}) = {value}, not {expected}"
                );
            }
        }
    }
}

/// By numerical integration of the density, which needs no special function.
fn normal_distribution(x: f64) -> f64 {
    let steps = 2_000;
    let width = x / f64::from(steps);
    let density = |t: f64| (-0.5 * t * t).exp() / std::f64::consts::TAU.sqrt();
    let simpson = |i: i32| {
        let a = f64::from(i) * width;
        density(a) + 4.0 * density(a + width / 2.0) + density(a + width)
    };
    0.5 + (0..steps).map(simpson).sum::<f64>() * width / 6.0
}

#[test]
fn exponentials_are_precise_and_never_overflow() {
    for i in -8_700..=8_700 {
        let x = i as f32 / 100.0;
        let (value, expected) = (f64::from(rows::exp::<false>(x)), f64::from(x).exp());
        assert!((value - expected).abs() <= 5e-7 * expected, "exp({x})");
    }
    assert!(rows::exp::<false>(-1e9) < 1e-37 && rows::exp::<false>(1e9).is_finite());
}

#[test]
fn softmax_rows_sum_to_one_and_leave_the_padding_empty() {
    for isa in sets() {
        let (stride, len) = (32, 21);
        let mut scores: Vec<f32> = numbers(stride * 3, 7).iter().map(|v| v * 40.0).collect();
        let before = scores.clone();
        simd::softmax(isa, &mut scores, stride, len);
        for (row, before) in scores.chunks(stride).zip(before.chunks(stride)) {
            let highest = before[..len].iter().copied().fold(f32::MIN, f32::max);
            let total: f64 = before[..len].iter().map(|v| f64::from(v - highest).exp()).sum();
            for (value, before) in row[..len].iter().zip(before) {
                assert!((f64::from(*value) - f64::from(before - highest).exp() / total).abs() < 1e-6);
            }
            assert!(row[len..].iter().all(|v| *v == 0.0));
        }
    }
}

#[test]
fn layer_norm_agrees_with_its_definition() {
    for isa in sets() {
        let width = 37;
        let (gamma, beta) = (numbers(width, 8), numbers(width, 9));
        let before = numbers(width * 4, 10);
        let mut values = before.clone();
        simd::layer_norm(isa, &mut values, &gamma, &beta, 1e-5);
        for (row, before) in values.chunks(width).zip(before.chunks(width)) {
            let mean = before.iter().map(|v| f64::from(*v)).sum::<f64>() / width as f64;
            let variance = before.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / width as f64;
            for (j, value) in row.iter().enumerate() {
                let expected = (f64::from(before[j]) - mean) / (variance + 1e-5).sqrt() * f64::from(gamma[j]);
                assert!((f64::from(*value) - expected - f64::from(beta[j])).abs() < 1e-5);
            }
        }
    }
}
