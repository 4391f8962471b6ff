//! From named tensors to packed weights: the names differ by architecture, the result does not.

use super::config::{Architecture, EncoderConfig};
use super::{Encoder, Layer, Linear, Norm, Projection};
use crate::config::Quantize;
use crate::error::LoadError;
use crate::files::weights::Weights;
use crate::kernel::Packed;

/// Tensor names of one architecture; `{}` stands for the number of the layer.
struct Names {
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

const BERT: Names = Names {
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

const MPNET: Names = Names {
    query: "attention.attn.q",
    key: "attention.attn.k",
    value: "attention.attn.v",
    attention_output: "attention.attn.o",
    attention_norm: "attention.LayerNorm",
    ..BERT
};

const DISTILBERT: Names = Names {
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

/// Models saved with a head have their encoder under one of these.
const PREFIXES: [&str; 6] = ["", "bert.", "roberta.", "distilbert.", "mpnet.", "model."];

pub(super) fn encoder(
    weights: &Weights,
    config: EncoderConfig,
    quantize: Option<Quantize>,
) -> Result<Encoder, LoadError> {
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
    let hidden = config.hidden;
    let embedding =
        |name: &str, rows| weights.read(&format!("{prefix}embeddings.{name}.weight"), &[rows, hidden]);
    let token_types = match config.token_types {
        0 => Vec::new(),
        count => embedding("token_type_embeddings", count)?,
    };
    let relative_bias = match config.relative_buckets {
        0 => Vec::new(),
        buckets => {
            let name = format!("{prefix}encoder.relative_attention_bias.weight");
            weights.read(&name, &[buckets, config.heads])?
        }
    };
    let layers = (0..config.layers)
        .map(|number| {
            let at = format!("{prefix}{}.{number}", names.layer);
            layer(weights, &config, names, &at, quantize)
        })
        .collect::<Result<_, _>>()?;
    Ok(Encoder {
        words: embedding("word_embeddings", config.vocabulary)?,
        positions: embedding("position_embeddings", config.positions)?,
        token_types,
        relative_bias,
        embedding_norm: norm(weights, &format!("{prefix}embeddings.LayerNorm"), hidden)?,
        layers,
        config,
    })
}

fn layer(
    weights: &Weights,
    config: &EncoderConfig,
    names: &Names,
    at: &str,
    quantize: Option<Quantize>,
) -> Result<Layer, LoadError> {
    let (hidden, inner) = (config.hidden, config.intermediate);
    let scale = 1.0 / ((hidden / config.heads) as f32).sqrt();
    let mut fused = Vec::with_capacity(3 * hidden * hidden);
    let mut bias = Vec::with_capacity(3 * hidden);
    // The scores' scale goes into the query's weights, where it costs nothing later.
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

/// Checkpoints converted from TensorFlow say gamma and beta instead of weight and bias.
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
