//! Loads an encoder from named tensors. The names differ by architecture, the result does not.

use super::config::{Architecture, EncoderConfig};
use super::{Encoder, Layer, Linear, Norm, Projection};
use crate::config::Quantize;
use crate::error::LoadError;
use crate::files::weights::Weights;
use crate::kernel::Packed;

/// Tensor names of one architecture; `{}` stands for the number of the layer.
struct TensorNames {
    layer: &'static str,
    query: &'static str,
    key: &'static str,
    value: &'static str,
    attention_output: &'static str,
    attention_norm: &'static str,
    up: &'static str,
    down: &'static str,
    output_norm: &'static str,
}

const BERT: TensorNames = TensorNames {
    layer: "encoder.layer",
    query: "attention.self.query",
    key: "attention.self.key",
    value: "attention.self.value",
    attention_output: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    output_norm: "output.LayerNorm",
};

const MPNET: TensorNames = TensorNames {
    query: "attention.attn.q",
    key: "attention.attn.k",
    value: "attention.attn.v",
    attention_output: "attention.attn.o",
    attention_norm: "attention.LayerNorm",
    ..BERT
};

const DISTILBERT: TensorNames = TensorNames {
    layer: "transformer.layer",
    query: "attention.q_lin",
    key: "attention.k_lin",
    value: "attention.v_lin",
    attention_output: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    output_norm: "output_layer_norm",
};

/// Prefixes of the encoder in models that were saved with a head.
const PREFIXES: [&str; 6] = ["", "bert.", "roberta.", "distilbert.", "mpnet.", "model."];

/// The tensors of one encoder within its weight files.
struct Tensors<'a> {
    weights: &'a Weights,
    config: &'a EncoderConfig,
    names: &'static TensorNames,
    prefix: &'static str,
}

impl<'a> Tensors<'a> {
    fn new(weights: &'a Weights, config: &'a EncoderConfig) -> Self {
        let prefix = PREFIXES
            .iter()
            .find(|prefix| weights.has(&format!("{prefix}embeddings.word_embeddings.weight")))
            .copied()
            .unwrap_or_default();
        let names = match config.architecture {
            Architecture::Bert | Architecture::Roberta => &BERT,
            Architecture::DistilBert => &DISTILBERT,
            Architecture::Mpnet => &MPNET,
        };
        Self {
            weights,
            config,
            names,
            prefix,
        }
    }

    fn embedding(&self, name: &str) -> String {
        format!("{}embeddings.{name}.weight", self.prefix)
    }

    fn relative_bias(&self) -> String {
        format!("{}encoder.relative_attention_bias.weight", self.prefix)
    }

    fn layer(&self, number: usize) -> String {
        format!("{}{}.{number}", self.prefix, self.names.layer)
    }

    /// Compares the sizes in `config.json` with the shapes of all large tensors.
    ///
    /// Tensors lie within their files, so memory for a checked configuration is bounded by the size of
    /// the files.
    fn check_shapes(&self) -> Result<(), LoadError> {
        let EncoderConfig {
            hidden, intermediate, ..
        } = *self.config;
        let check = |name: &str, shape: [usize; 2]| self.weights.check_shape(name, &shape);
        check(
            &self.embedding("word_embeddings"),
            [self.config.vocabulary, hidden],
        )?;
        check(
            &self.embedding("position_embeddings"),
            [self.config.positions, hidden],
        )?;
        if self.config.token_types > 0 {
            check(
                &self.embedding("token_type_embeddings"),
                [self.config.token_types, hidden],
            )?;
        }
        if self.config.relative_buckets > 0 {
            check(
                &self.relative_bias(),
                [self.config.relative_buckets, self.config.heads],
            )?;
        }
        for number in 0..self.config.layers {
            let at = self.layer(number);
            let TensorNames {
                query, key, value, ..
            } = self.names;
            for name in [query, key, value, self.names.attention_output] {
                check(&format!("{at}.{name}.weight"), [hidden, hidden])?;
            }
            check(&format!("{at}.{}.weight", self.names.up), [intermediate, hidden])?;
            check(
                &format!("{at}.{}.weight", self.names.down),
                [hidden, intermediate],
            )?;
        }
        Ok(())
    }
}

/// Checks that the weights have the shapes of the configuration, without reading them.
pub(super) fn check(weights: &Weights, config: &EncoderConfig) -> Result<(), LoadError> {
    Tensors::new(weights, config).check_shapes()
}

/// Reads an encoder whose configuration passed [`check`].
pub(super) fn encoder(
    weights: &Weights,
    config: EncoderConfig,
    quantize: Option<Quantize>,
) -> Result<Encoder, LoadError> {
    let tensors = Tensors::new(weights, &config);
    let hidden = config.hidden;
    let embedding = |name: &str, rows| weights.read(&tensors.embedding(name), &[rows, hidden]);
    let token_types = match config.token_types {
        0 => Vec::new(),
        count => embedding("token_type_embeddings", count)?,
    };
    let relative_bias = match config.relative_buckets {
        0 => Vec::new(),
        buckets => weights.read(&tensors.relative_bias(), &[buckets, config.heads])?,
    };
    let layers = (0..config.layers)
        .map(|number| layer(&tensors, &tensors.layer(number), quantize))
        .collect::<Result<_, _>>()?;
    let norm_name = format!("{}embeddings.LayerNorm", tensors.prefix);
    Ok(Encoder {
        words: embedding("word_embeddings", config.vocabulary)?,
        positions: embedding("position_embeddings", config.positions)?,
        token_types,
        relative_bias,
        embedding_norm: norm(weights, &norm_name, hidden)?,
        layers,
        config,
    })
}

fn layer(tensors: &Tensors<'_>, at: &str, quantize: Option<Quantize>) -> Result<Layer, LoadError> {
    let Tensors {
        weights,
        config,
        names,
        ..
    } = *tensors;
    let (hidden, inner) = (config.hidden, config.intermediate);
    let scale = 1.0 / ((hidden / config.heads) as f32).sqrt();
    let mut fused = Vec::with_capacity(3 * hidden * hidden);
    let mut bias = Vec::with_capacity(3 * hidden);
    // The query weights include the scale of the attention scores.
    for (name, scale) in [(names.query, scale), (names.key, 1.0), (names.value, 1.0)] {
        let part = weights.read(&format!("{at}.{name}.weight"), &[hidden, hidden])?;
        fused.extend(part.iter().map(|value| value * scale));
        let part = weights.read(&format!("{at}.{name}.bias"), &[hidden])?;
        bias.extend(part.iter().map(|value| value * scale));
    }
    let projection = |name: &str, from: usize, to: usize| -> Result<Projection, LoadError> {
        let (rows, bias) = rows_and_bias(weights, &format!("{at}.{name}"), from, to)?;
        Ok(Projection::from_rows(&rows, bias, from, quantize))
    };
    Ok(Layer {
        query_key_value: Projection::from_rows(&fused, bias, hidden, quantize),
        attention_output: projection(names.attention_output, hidden, hidden)?,
        attention_norm: norm(weights, &format!("{at}.{}", names.attention_norm), hidden)?,
        up: projection(names.up, hidden, inner)?,
        down: projection(names.down, inner, hidden)?,
        output_norm: norm(weights, &format!("{at}.{}", names.output_norm), hidden)?,
    })
}

pub(crate) fn linear(weights: &Weights, name: &str, from: usize, to: usize) -> Result<Linear, LoadError> {
    let (rows, bias) = rows_and_bias(weights, name, from, to)?;
    Ok(Linear {
        weights: Packed::from_rows(&rows, from, to),
        bias,
    })
}

fn rows_and_bias(
    weights: &Weights,
    name: &str,
    from: usize,
    to: usize,
) -> Result<(Vec<f32>, Vec<f32>), LoadError> {
    let rows = weights.read(&format!("{name}.weight"), &[to, from])?;
    let bias = weights.read(&format!("{name}.bias"), &[to])?;
    Ok((rows, bias))
}

/// Checkpoints converted from TensorFlow name these tensors gamma and beta instead of weight and bias.
pub(crate) fn norm(weights: &Weights, name: &str, width: usize) -> Result<Norm, LoadError> {
    let old = format!("{name}.gamma");
    let (gamma, beta) = if weights.has(&old) {
        (old, format!("{name}.beta"))
    } else {
        (format!("{name}.weight"), format!("{name}.bias"))
    };
    Ok(Norm {
        gamma: weights.read(&gamma, &[width])?,
        beta: weights.read(&beta, &[width])?,
    })
}
