//! Encoders of the BERT family: token ids in, one vector per token out.
//!
//! Sequences are packed one after the other without padding. Everything but attention treats the
//! pack as one matrix of token rows; attention goes by sequence and head.

mod attention;
pub(crate) mod config;
mod forward;
mod load;

use crate::config::Quantize;
use crate::error::LoadError;
use crate::files::weights::Weights;
use crate::kernel::bf16::{self, HalfProduct, HalfRows, HalfWeights, Native};
use crate::kernel::int8::{self, ByteProduct, ByteRows, ByteWeights};
use crate::kernel::{Accumulate, Activation};
use crate::kernel::{Packed, Product, simd};
use crate::thread_group::ThreadGroup;
use config::EncoderConfig;

pub(crate) use forward::{OutputRows, Scratch};
pub(crate) use load::{linear, norm};

/// One tokenized text or pair.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Sequence {
    pub(crate) ids: Vec<u32>,
    /// Empty if every token has type 0.
    pub(crate) types: Vec<u32>,
    /// Pooling skips the tokens before this one.
    pub(crate) pool_from: usize,
}

pub(crate) struct Encoder {
    pub(crate) config: EncoderConfig,
    words: Vec<f32>,
    positions: Vec<f32>,
    token_types: Vec<f32>,
    /// One value per bucket of distances and head; empty but for MPNet.
    relative_bias: Vec<f32>,
    embedding_norm: Norm,
    layers: Vec<Layer>,
}

struct Layer {
    query_key_value: Projection,
    attention_output: Projection,
    attention_norm: Norm,
    up: Projection,
    down: Projection,
    output_norm: Norm,
}

/// One of a layer's four products with weights, in the configured precision. Everything else in a
/// layer is computed in `f32`.
enum Projection {
    Float(Linear),
    Bf16(HalfWeights),
    Int8(ByteWeights),
}

/// Quantized left-hand sides of products, kept to reuse their memory.
#[derive(Default)]
struct QuantizedRows {
    halves: HalfRows,
    bytes: ByteRows,
}

pub(crate) struct Linear {
    pub(crate) weights: Packed,
    pub(crate) bias: Vec<f32>,
}

pub(crate) struct Norm {
    pub(crate) gamma: Vec<f32>,
    pub(crate) beta: Vec<f32>,
}

impl Encoder {
    /// Checks that the weights fit the configuration, without reading them.
    pub(crate) fn check(weights: &Weights, config: &EncoderConfig) -> Result<(), LoadError> {
        load::check(weights, config)
    }

    /// Reads the weights. [`Self::check`] must have passed: sizes of the configuration are trusted here.
    pub(crate) fn load(
        weights: &Weights,
        config: EncoderConfig,
        quantize: Option<Quantize>,
    ) -> Result<Self, LoadError> {
        load::encoder(weights, config, quantize)
    }
}

impl Projection {
    fn from_rows(weights: &[f32], bias: Vec<f32>, depth: usize, quantize: Option<Quantize>) -> Self {
        match (quantize, Native::detect()) {
            (Some(Quantize::Int8), _) => Self::Int8(ByteWeights::from_rows(weights, &bias, depth)),
            (None, Some(native)) => Self::Bf16(HalfWeights::from_rows(native, weights, &bias, depth)),
            _ => Self::Float(Linear {
                weights: Packed::from_rows(weights, depth, bias.len()),
                bias,
            }),
        }
    }

    /// As [`Linear::apply`], with scratch memory for quantized rows.
    fn apply(
        &self,
        threads: &ThreadGroup,
        quantized: &mut QuantizedRows,
        rows: &[f32],
        into: &mut [f32],
        (accumulate, activation): (Accumulate, Activation),
    ) {
        match self {
            Self::Float(linear) => linear.apply(threads, rows, into, accumulate, activation),
            Self::Bf16(weights) => {
                quantized.halves.round(weights.native(), rows, weights.depth());
                let product = HalfProduct {
                    a: &quantized.halves,
                    b: weights,
                    accumulate,
                    activation,
                };
                bf16::run(threads, &product, into);
            }
            Self::Int8(weights) => {
                let isa = simd::Isa::detect();
                quantized.bytes.quantize(isa, rows, weights.depth());
                let product = ByteProduct {
                    a: &quantized.bytes,
                    b: weights,
                    accumulate,
                    activation,
                };
                int8::run(isa, threads, &product, into);
            }
        }
    }
}

impl Linear {
    /// `into = finish(rows · weights + bias)`, or added to what `into` holds.
    pub(crate) fn apply(
        &self,
        threads: &ThreadGroup,
        rows: &[f32],
        into: &mut [f32],
        accumulate: Accumulate,
        activation: Activation,
    ) {
        let b = self.weights.view();
        let count = rows.len() / b.depth;
        let product = Product {
            a: rows,
            lda: b.depth,
            rows: count,
            b,
            bias: Some(&self.bias),
            accumulate,
            activation,
        };
        simd::run(simd::Isa::detect(), threads, &product, into, b.columns);
    }

    pub(crate) fn width(&self) -> usize {
        self.weights.columns()
    }
}

impl Norm {
    pub(crate) fn apply(&self, rows: &mut [f32], epsilon: f32) {
        simd::layer_norm(simd::Isa::detect(), rows, &self.gamma, &self.beta, epsilon);
    }
}
