//! The sentence-transformers modules after the encoder: pooling, dense layers, normalization.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::encoder::{Linear, Norm, OutputRows, Sequence, linear, norm};
use crate::error::LoadError;
use crate::files::weights::Weights;
use crate::files::{json_optional, json_required};
use crate::kernel::{Accumulate, Activation, Packed, simd};
use crate::thread_group::ThreadGroup;

const SUPPORTED_MODULES: &str = "Transformer, Pooling, Dense, LayerNorm, Normalize, Dropout";
const SUPPORTED_POOLINGS: &str = "cls, max, mean, mean_sqrt_len_tokens, weightedmean, lasttoken";
const SUPPORTED_ACTIVATIONS: &str = "Identity, Tanh, ReLU, GELU, SiLU, Sigmoid (of torch.nn)";

/// The modules after the transformer, in order.
pub(crate) struct Modules {
    pooling: Pooling,
    post_pooling: Vec<PostPooling>,
    dimensions: usize,
}

struct Pooling {
    modes: Vec<PoolingMode>,
    include_prompt: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PoolingMode {
    Cls,
    Max,
    Mean,
    MeanSqrtLength,
    WeightedMean,
    LastToken,
}

enum PostPooling {
    Dense(Linear, Activation),
    LayerNorm(Norm),
    Normalize,
}

#[derive(Deserialize)]
struct ModuleEntry {
    path: String,
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Deserialize)]
struct PoolingConfig {
    #[serde(alias = "word_embedding_dimension")]
    embedding_dimension: Option<usize>,
    pooling_mode: Option<OneOrMany>,
    #[serde(default)]
    pooling_mode_cls_token: bool,
    #[serde(default)]
    pooling_mode_max_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_tokens: bool,
    #[serde(default)]
    pooling_mode_mean_sqrt_len_tokens: bool,
    #[serde(default)]
    pooling_mode_weightedmean_tokens: bool,
    #[serde(default)]
    pooling_mode_lasttoken: bool,
    include_prompt: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct DenseConfig {
    in_features: usize,
    out_features: usize,
    #[serde(default = "yes")]
    bias: bool,
    activation_function: Option<String>,
    #[serde(default)]
    use_residual: bool,
}

fn yes() -> bool {
    true
}

/// Paths of the parts of a model. The encoder may have its own directory.
pub(crate) struct Layout {
    pub(crate) encoder: PathBuf,
    modules: Vec<(String, PathBuf)>,
    /// Small files that affect the output of the model, relative to its directory.
    pub(crate) files: Vec<String>,
}

impl Layout {
    pub(crate) fn read(directory: &Path) -> Result<Self, LoadError> {
        let entries: Vec<ModuleEntry> = json_optional(&directory.join("modules.json"))?.unwrap_or_default();
        let mut layout = Self {
            encoder: directory.to_owned(),
            modules: Vec::new(),
            files: Vec::new(),
        };
        let mut encoders = 0;
        for entry in entries {
            // The path comes from an untrusted file and must stay inside the model's directory.
            if entry.path.split(['/', '\\']).any(|part| part == "..") || Path::new(&entry.path).is_absolute()
            {
                let reason = format!("'{}' is not inside the directory of the model", entry.path);
                return Err(LoadError::malformed(&directory.join("modules.json"), reason));
            }
            let path = directory.join(&entry.path);
            let kind = entry.kind.rsplit('.').next().unwrap_or_default().to_owned();
            if kind == "Transformer" {
                encoders += 1;
                layout.encoder = path;
            } else {
                for file in ["config.json", "model.safetensors"] {
                    layout.files.push(format!("{}/{file}", entry.path));
                }
                layout.modules.push((kind, path));
            }
        }
        if encoders > 1 {
            return Err(LoadError::unsupported(
                "more than one Transformer module",
                SUPPORTED_MODULES,
            ));
        }
        Ok(layout)
    }
}

impl Layout {
    /// The configuration files of all modules that have one.
    pub(crate) fn required_files(&self) -> Vec<PathBuf> {
        let with_config = self
            .modules
            .iter()
            .filter(|(kind, _)| kind == "Pooling" || kind == "Dense");
        with_config.map(|(_, path)| path.join("config.json")).collect()
    }
}

impl Modules {
    /// Without a list of modules, tokens are averaged, as in sentence-transformers.
    pub(crate) fn load(layout: &Layout, hidden: usize) -> Result<Self, LoadError> {
        let mut modules = layout.modules.iter();
        let pooling = match modules.next() {
            None => Pooling {
                modes: vec![PoolingMode::Mean],
                include_prompt: true,
            },
            Some((kind, path)) if kind == "Pooling" => Pooling::load(path, hidden)?,
            Some((kind, _)) => {
                let what = format!("module '{kind}' right after the Transformer");
                return Err(LoadError::unsupported(what, "Pooling there"));
            }
        };
        let mut dimensions = hidden * pooling.modes.len();
        let mut post_pooling = Vec::new();
        for (kind, path) in modules {
            match kind.as_str() {
                "Dense" => {
                    let (layer, activation) = dense(path, dimensions)?;
                    dimensions = layer.width();
                    post_pooling.push(PostPooling::Dense(layer, activation));
                }
                "LayerNorm" => post_pooling.push(PostPooling::LayerNorm(norm(
                    &Weights::open(path)?,
                    "norm",
                    dimensions,
                )?)),
                "Normalize" => post_pooling.push(PostPooling::Normalize),
                "Dropout" => {}
                other => {
                    return Err(LoadError::unsupported(
                        format!("module '{other}'"),
                        SUPPORTED_MODULES,
                    ));
                }
            }
        }
        Ok(Self {
            pooling,
            post_pooling,
            dimensions,
        })
    }

    pub(crate) fn dimensions(&self) -> usize {
        self.dimensions
    }

    pub(crate) fn include_prompt(&self) -> bool {
        self.pooling.include_prompt
    }

    /// Overrides whether vectors are normalized to length one.
    pub(crate) fn normalize(&mut self, choice: crate::config::Normalize) {
        self.post_pooling
            .retain(|module| !matches!(module, PostPooling::Normalize));
        if choice == crate::config::Normalize::Always {
            self.post_pooling.push(PostPooling::Normalize);
        }
    }

    /// If only first tokens are pooled, the last layer of the encoder need not compute the others.
    pub(crate) fn wanted(&self, sequences: &[&Sequence]) -> OutputRows {
        let only_first = self.pooling.modes == [PoolingMode::Cls];
        if only_first && sequences.iter().all(|sequence| sequence.pool_from == 0) {
            OutputRows::First
        } else {
            OutputRows::All
        }
    }

    /// Computes the vector of one sequence from the states of its tokens.
    pub(crate) fn apply(
        &self,
        threads: &ThreadGroup,
        states: &[f32],
        hidden: usize,
        pool_from: usize,
    ) -> Vec<f32> {
        let mut vector = Vec::with_capacity(hidden * self.pooling.modes.len());
        for mode in &self.pooling.modes {
            mode.pool(states, hidden, pool_from, &mut vector);
        }
        for module in &self.post_pooling {
            match module {
                PostPooling::Dense(layer, activation) => {
                    let mut out = vec![0.0; layer.width()];
                    layer.apply(threads, &vector, &mut out, Accumulate::Overwrite, *activation);
                    vector = out;
                }
                PostPooling::LayerNorm(norm) => norm.apply(&mut vector, 1e-5),
                PostPooling::Normalize => normalize(&mut vector),
            }
        }
        vector
    }
}

impl Pooling {
    fn load(path: &Path, hidden: usize) -> Result<Self, LoadError> {
        let config: PoolingConfig = json_required(path, "config.json")?;
        if let Some(width) = config.embedding_dimension.filter(|width| *width != hidden) {
            let reason = format!("it expects vectors of width {width}, but the encoder has width {hidden}");
            return Err(LoadError::malformed(&path.join("config.json"), reason));
        }
        let names = match config.pooling_mode {
            Some(OneOrMany::One(name)) => vec![name],
            Some(OneOrMany::Many(names)) => names,
            None => Vec::new(),
        };
        let mut modes = names
            .iter()
            .map(|name| PoolingMode::parse(name))
            .collect::<Result<Vec<_>, _>>()?;
        if modes.is_empty() {
            let flags = [
                (config.pooling_mode_cls_token, PoolingMode::Cls),
                (config.pooling_mode_max_tokens, PoolingMode::Max),
                (config.pooling_mode_mean_tokens, PoolingMode::Mean),
                (
                    config.pooling_mode_mean_sqrt_len_tokens,
                    PoolingMode::MeanSqrtLength,
                ),
                (config.pooling_mode_weightedmean_tokens, PoolingMode::WeightedMean),
                (config.pooling_mode_lasttoken, PoolingMode::LastToken),
            ];
            modes.extend(flags.iter().filter(|(on, _)| *on).map(|(_, mode)| *mode));
        }
        if modes.is_empty() {
            modes.push(PoolingMode::Mean);
        }
        Ok(Self {
            modes,
            include_prompt: config.include_prompt.unwrap_or(true),
        })
    }
}

impl PoolingMode {
    fn parse(name: &str) -> Result<Self, LoadError> {
        match name {
            "cls" => Ok(Self::Cls),
            "max" => Ok(Self::Max),
            "mean" => Ok(Self::Mean),
            "mean_sqrt_len_tokens" => Ok(Self::MeanSqrtLength),
            "weightedmean" => Ok(Self::WeightedMean),
            "lasttoken" => Ok(Self::LastToken),
            other => Err(LoadError::unsupported(
                format!("pooling mode '{other}'"),
                SUPPORTED_POOLINGS,
            )),
        }
    }

    /// Appends the pooled vector of one sequence.
    fn pool(self, states: &[f32], hidden: usize, from: usize, into: &mut Vec<f32>) {
        let count = states.len() / hidden;
        // If truncation left only tokens of the prompt, all of them are pooled.
        let from = if from < count { from } else { 0 };
        let row = |index: usize| &states[index * hidden..(index + 1) * hidden];
        match self {
            Self::Cls => into.extend_from_slice(row(from)),
            Self::LastToken => into.extend_from_slice(row(count - 1)),
            Self::Max => {
                let start = into.len();
                into.extend_from_slice(row(from));
                for index in from + 1..count {
                    into[start..]
                        .iter_mut()
                        .zip(row(index))
                        .for_each(|(highest, value)| *highest = highest.max(*value));
                }
            }
            Self::Mean | Self::MeanSqrtLength | Self::WeightedMean => {
                let weight = |index: usize| {
                    if self == Self::WeightedMean {
                        (index + 1) as f32
                    } else {
                        1.0
                    }
                };
                let total: f32 = (from..count).map(weight).sum();
                let scale = if self == Self::MeanSqrtLength {
                    total.sqrt()
                } else {
                    total
                };
                let start = into.len();
                into.resize(start + hidden, 0.0);
                for index in from..count {
                    let weight = weight(index) / scale;
                    into[start..]
                        .iter_mut()
                        .zip(row(index))
                        .for_each(|(sum, value)| *sum += weight * value);
                }
            }
        }
    }
}

fn dense(path: &Path, from: usize) -> Result<(Linear, Activation), LoadError> {
    let config: DenseConfig = json_required(path, "config.json")?;
    if config.use_residual {
        return Err(LoadError::unsupported(
            "a Dense module with use_residual",
            "Dense modules without it",
        ));
    }
    if config.in_features != from {
        let reason = format!(
            "'in_features' is {}, but its input has width {from}",
            config.in_features
        );
        return Err(LoadError::malformed(&path.join("config.json"), reason));
    }
    let activation = match config.activation_function.as_deref() {
        None => Activation::Tanh,
        Some(path) => torch_activation(path)?,
    };
    let weights = Weights::open(path)?;
    if config.bias {
        return Ok((linear(&weights, "linear", from, config.out_features)?, activation));
    }
    let rows = weights.read("linear.weight", &[config.out_features, from])?;
    let bias = vec![0.0; config.out_features];
    Ok((
        Linear {
            weights: Packed::from_rows(&rows, from, config.out_features),
            bias,
        },
        activation,
    ))
}

/// Parses an activation, given as the path of a Python class.
pub(crate) fn torch_activation(path: &str) -> Result<Activation, LoadError> {
    match path.rsplit('.').next().unwrap_or_default() {
        "Identity" => Ok(Activation::Identity),
        "Tanh" => Ok(Activation::Tanh),
        "ReLU" => Ok(Activation::Relu),
        "GELU" => Ok(Activation::Gelu),
        "SiLU" => Ok(Activation::Silu),
        "Sigmoid" => Ok(Activation::Sigmoid),
        _ => Err(LoadError::unsupported(
            format!("activation function '{path}'"),
            SUPPORTED_ACTIVATIONS,
        )),
    }
}

/// Scales a vector to length one; a zero vector stays zero, as in sentence-transformers.
fn normalize(vector: &mut [f32]) {
    let length = vector
        .iter()
        .map(|value| f64::from(*value).powi(2))
        .sum::<f64>()
        .sqrt()
        .max(1e-12);
    vector
        .iter_mut()
        .for_each(|value| *value = (f64::from(*value) / length) as f32);
}

/// Applies an activation to one value.
pub(crate) fn activate_one(activation: Activation, value: f32) -> f32 {
    let mut values = [value];
    simd::activate(simd::Isa::detect(), activation, &mut values);
    values[0]
}
