//! The kernel against plain loops, on every instruction set this processor has.

use super::int8::{self, ByteProduct, ByteRows, ByteWeights, RowStep};
use super::product::PackedView;
use super::simd::{self, Isa};
use super::{Finish, Packed, Product, Start, rows};
use crate::team::Team;

fn sets() -> Vec<Isa> {
    let mut sets = vec![Isa::Portable, Isa::detect()];
    sets.dedup();
    sets
}

/// Numbers that look random and are the same in every run.
fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
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
            for start in [Start::Zero, Start::Existing] {
                let mut c = before.clone();
                let product = Product {
                    a: &a,
                    lda,
                    rows,
                    b: packed.view(),
                    bias: Some(&bias),
                    start,
                    finish: Finish::Relu,
                };
                simd::run(isa, &Team::solo(), &product, &mut c, ldc);
                for (at, value) in c.iter().enumerate() {
                    let (row, column) = (at / ldc, at % ldc);
                    let expected = if column >= columns {
                        f64::from(before[at])
                    } else {
                        let first = if start == Start::Existing {
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

/// Values that a row's bytes stand for.
fn read_back(values: &[f32]) -> Vec<f32> {
    let mut step = [RowStep::default()];
    let mut bytes = vec![0; values.len()];
    simd::quantize(
        Isa::Portable,
        values,
        values.len(),
        values.len(),
        &mut bytes,
        &mut step,
    );
    let [RowStep { scale, offset }] = step;
    bytes
        .iter()
        .map(|byte| offset + scale * f32::from(*byte))
        .collect()
}

#[test]
fn int8_products_are_exact_for_the_numbers_that_the_bytes_stand_for() {
    // The extremes meet in every lane of 16 bits: all weights at their largest, of one sign or of two.
    let random = |count, seed| numbers(count, seed);
    let largest = |count: usize, _| vec![1.0; count];
    let signs = |count: usize, _| (0..count).map(|i| if i % 3 == 0 { -2.0 } else { 2.0 }).collect();
    type Weights = fn(usize, u32) -> Vec<f32>;
    let kinds: [Weights; 3] = [random, largest, signs];
    let cases = [
        (1, 1, 1),
        (4, 8, 16),
        (5, 32, 17),
        (7, 56, 48),
        (99, 385, 31),
        (3, 1536, 16),
    ];
    for (rows, depth, columns) in cases {
        let a: Vec<f32> = numbers(rows * depth, 1).iter().map(|v| v * 6.0 + 1.0).collect();
        let bias = numbers(columns, 3);
        let before = numbers(rows * columns, 4);
        for weights in kinds {
            let weights = weights(columns * depth, 2);
            let packed = ByteWeights::from_rows(&weights, &bias, depth);
            for (at, weight) in weights.iter().enumerate() {
                let close = packed.weight(at / depth, at % depth);
                // Half a step of the coarsest scale: lanes of four weights of one sign, 126 in all.
                assert!(
                    (weight - close).abs() <= 4.0 * 2.0 / 126.0 / 2.0 + 1e-6,
                    "{weight} became {close}"
                );
            }
            for (isa, start) in sets().into_iter().zip([Start::Existing, Start::Zero]) {
                let mut c = before.clone();
                let mut bytes = ByteRows::default();
                bytes.quantize(isa, &a, depth);
                let product = ByteProduct {
                    a: &bytes,
                    b: &packed,
                    start,
                    finish: Finish::Relu,
                };
                int8::run(isa, &Team::solo(), &product, &mut c);
                for (row, values) in c.chunks_exact(columns).enumerate() {
                    let a = read_back(&a[row * depth..][..depth]);
                    for (column, value) in values.iter().enumerate() {
                        let b: Vec<f32> = (0..depth).map(|k| packed.weight(column, k)).collect();
                        let existing = f64::from(before[row * columns + column]);
                        let first = if start == Start::Existing { existing } else { 0.0 };
                        let expected = (first + f64::from(bias[column]) + dot(&a, &b)).max(0.0);
                        assert!(
                            (f64::from(*value) - expected).abs() < 1e-5 * (depth as f64 + expected),
                            "{isa:?} {rows}x{depth}x{columns} at {row}, {column}: {value}, not {expected}"
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
        let (mut bytes, mut steps) = (vec![7; stride * 3], vec![RowStep::default(); 3]);
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
        let mut step = [RowStep::default()];
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
        start: Start::Zero,
        finish: Finish::Gelu,
    };
    let mut alone = vec![0.0; rows * columns];
    int8::run(Isa::detect(), &Team::solo(), &product, &mut alone);
    let (team, helpers) = Team::with_helpers(2);
    std::thread::scope(|scope| {
        for helper in helpers {
            scope.spawn(|| helper.assist());
        }
        for _ in 0..20 {
            let mut together = vec![0.0; rows * columns];
            int8::run(Isa::detect(), &team, &product, &mut together);
            assert!(alone == together);
        }
        drop(team);
    });
}

#[test]
#[should_panic(expected = "assertion")]
fn an_int8_product_that_would_write_outside_its_result_is_refused() {
    let weights = ByteWeights::from_rows(&[1.0; 16 * 8], &[0.0; 16], 8);
    let mut bytes = ByteRows::default();
    bytes.quantize(Isa::detect(), &[1.0; 16], 8);
    let product = ByteProduct {
        a: &bytes,
        b: &weights,
        start: Start::Zero,
        finish: Finish::Nothing,
    };
    int8::run(Isa::detect(), &Team::solo(), &product, &mut [0.0; 31]);
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
        start: Start::Zero,
        finish: Finish::Gelu,
    };
    let mut alone = vec![0.0; rows * columns];
    simd::run(Isa::detect(), &Team::solo(), &product, &mut alone, columns);
    let (team, helpers) = Team::with_helpers(2);
    std::thread::scope(|scope| {
        for helper in helpers {
            scope.spawn(|| helper.assist());
        }
        for _ in 0..20 {
            let mut together = vec![0.0; rows * columns];
            simd::run(Isa::detect(), &team, &product, &mut together, columns);
            assert!(alone == together);
        }
        drop(team);
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
        start: Start::Zero,
        finish: Finish::Nothing,
    };
    simd::run(Isa::detect(), &Team::solo(), &product, &mut [0.0; 31], 16);
}

#[test]
fn activations_agree_with_their_definitions() {
    let inputs: Vec<f32> = (-2_000..=2_000).map(|i| i as f32 / 200.0).collect();
    type Definition = fn(f64) -> f64;
    let definitions: [(Finish, Definition); 6] = [
        (Finish::Gelu, |x| x * normal_distribution(x)),
        (Finish::GeluTanh, |x| {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }),
        (Finish::Relu, |x| x.max(0.0)),
        (Finish::Silu, |x| x / (1.0 + (-x).exp())),
        (Finish::Tanh, f64::tanh),
        (Finish::Sigmoid, |x| 1.0 / (1.0 + (-x).exp())),
    ];
    for isa in sets() {
        for (finish, definition) in definitions {
            let mut values = inputs.clone();
            simd::activate(isa, finish, &mut values);
            for (x, value) in inputs.iter().zip(values) {
                let expected = definition(f64::from(*x));
                assert!(
                    (f64::from(value) - expected).abs() < 5e-6,
                    "{isa:?} {finish:?}({x}) = {value}, not {expected}"
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
