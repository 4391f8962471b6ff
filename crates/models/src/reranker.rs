//! Cross-encoders that run in this process: they read query and text together and score the pair.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use ragstone_core::model::{ModelError, Reranker, Scored};
use serde::Deserialize;

use crate::blocking::{Cancellation, tokenize_blocking};
use crate::config::Quantize;
use crate::encoder::config::{Architecture, EncoderConfig, RawConfig};
use crate::encoder::{Encoder, Linear, OutputRows, Scratch, Sequence, linear};
use crate::engine::{Compute, Engine};
use crate::error::LoadError;
use crate::files::json_optional;
use crate::files::weights::Weights;
use crate::kernel::{Accumulate, Activation};
use crate::modules::{activate_one, torch_activation};
use crate::sentence::tokenizer_options;
use crate::thread_group::ThreadGroup;
use crate::tokenize::{FirstText, TextTokenizer};

/// Tokens per slice of a request. Slicing bounds the memory of a large request, lets other requests in
/// between, and avoids tokenizing texts of cancelled requests.
const SLICE_TOKENS: usize = 1 << 16;

#[derive(Debug, Clone)]
pub struct CrossEncoderOptions {
    /// Display name: the hub id or directory that the model came from.
    pub name: String,
    pub directory: PathBuf,
}

pub struct CrossEncoder {
    engine: Engine,
    model: Arc<CrossEncoderModel>,
    name: String,
}

struct CrossEncoderModel {
    encoder: Encoder,
    tokenizer: TextTokenizer,
    head: ClassificationHead,
    activation: Activation,
}

/// A dense layer over the first token, followed by a projection to one score.
struct ClassificationHead {
    dense: Linear,
    dense_activation: Activation,
    output: Linear,
}

#[derive(Default, Deserialize)]
struct SavedConfig {
    activation_fn: Option<String>,
}

impl CrossEncoder {
    pub fn load(engine: &Engine, options: &CrossEncoderOptions) -> Result<Self, LoadError> {
        if !options.directory.is_dir() {
            return Err(LoadError::NoDirectory(options.directory.clone()));
        }
        let model = CrossEncoderModel::load(&options.directory)?;
        Ok(Self {
            engine: engine.clone(),
            model: Arc::new(model),
            name: options.name.clone(),
        })
    }

    /// Query and text together are truncated to this many tokens.
    pub fn max_tokens(&self) -> usize {
        self.model.tokenizer.max_tokens()
    }
}

/// All parts of a model except the weights of its encoder, which take long to read.
struct CrossEncoderFiles {
    config: EncoderConfig,
    weights: Weights,
    tokenizer: TextTokenizer,
    head: ClassificationHead,
    activation: Activation,
}

/// Checks all files of a cross-encoder without reading its weights.
pub fn inspect_cross_encoder(directory: &Path) -> Result<(), LoadError> {
    if !directory.is_dir() {
        return Err(LoadError::NoDirectory(directory.to_owned()));
    }
    CrossEncoderFiles::read(directory).map(|_| ())
}

impl CrossEncoderModel {
    fn load(directory: &Path) -> Result<Self, LoadError> {
        let parts = CrossEncoderFiles::read(directory)?;
        Ok(Self {
            // Scores are compared directly, so they keep full precision.
            encoder: Encoder::load(&parts.weights, parts.config, Some(Quantize::Never))?,
            tokenizer: parts.tokenizer,
            head: parts.head,
            activation: parts.activation,
        })
    }
}

impl CrossEncoderFiles {
    fn read(directory: &Path) -> Result<Self, LoadError> {
        let raw = RawConfig::read(directory)?;
        let config = raw.encoder(directory)?;
        let weights = Weights::open(directory)?;
        let head = ClassificationHead::load(&weights, config.architecture, config.hidden, directory)?;
        if raw.labels() != 1 {
            return Err(LoadError::NotAReranker(format!(
                "{} classifies into {} labels; a reranker has exactly one output, the relevance",
                directory.display(),
                raw.labels()
            )));
        }
        let saved: SavedConfig =
            json_optional(&directory.join("config_sentence_transformers.json"))?.unwrap_or_default();
        let activation = match saved.activation_fn.as_deref().or(raw.score_activation()) {
            Some(path) => torch_activation(path)?,
            None => Activation::Sigmoid,
        };
        let tokenizer = TextTokenizer::load(directory, &config, &tokenizer_options(directory)?)?;
        Encoder::check(&weights, &config)?;
        Ok(Self {
            config,
            weights,
            tokenizer,
            head,
            activation,
        })
    }
}

impl ClassificationHead {
    fn load(
        weights: &Weights,
        architecture: Architecture,
        hidden: usize,
        directory: &Path,
    ) -> Result<Self, LoadError> {
        let (dense, dense_activation, output) = match architecture {
            Architecture::Bert => ("bert.pooler.dense", Activation::Tanh, "classifier"),
            Architecture::Roberta | Architecture::Mpnet => {
                ("classifier.dense", Activation::Tanh, "classifier.out_proj")
            }
            Architecture::DistilBert => ("pre_classifier", Activation::Relu, "classifier"),
        };
        let Some(shape) = weights.shape(&format!("{output}.weight")) else {
            return Err(LoadError::NotAReranker(format!(
                "{} has no classification head, so it is an embedding model or a bare encoder, not a cross-encoder",
                directory.display()
            )));
        };
        if let Some(labels) = shape.first().filter(|labels| **labels != 1) {
            return Err(LoadError::NotAReranker(format!(
                "{} classifies into {labels} labels; a reranker has exactly one output, the relevance",
                directory.display()
            )));
        }
        Ok(Self {
            dense: linear(weights, dense, hidden, hidden)?,
            dense_activation,
            output: linear(weights, output, hidden, 1)?,
        })
    }
}

impl Compute for CrossEncoderModel {
    fn compute(
        &self,
        threads: &ThreadGroup,
        scratch: &mut Scratch,
        sequences: &[&Sequence],
    ) -> Vec<Vec<f32>> {
        let hidden = self.encoder.config.hidden;
        self.encoder
            .forward(threads, scratch, sequences, OutputRows::First);
        let states = scratch.states(hidden);
        let mut pooled = vec![0.0; states.len()];
        self.head.dense.apply(
            threads,
            states,
            &mut pooled,
            Accumulate::Overwrite,
            self.head.dense_activation,
        );
        let mut scores = vec![0.0; sequences.len()];
        self.head.output.apply(
            threads,
            &pooled,
            &mut scores,
            Accumulate::Overwrite,
            Activation::Identity,
        );
        scores
            .into_iter()
            .map(|score| vec![activate_one(self.activation, score)])
            .collect()
    }
}

#[async_trait]
impl Reranker for CrossEncoder {
    fn name(&self) -> &str {
        &self.name
    }

    async fn score(
        &self,
        query: &str,
        texts: Vec<String>,
        max_text_tokens: Option<usize>,
    ) -> Result<Scored, ModelError> {
        // The query is part of every pair, so it counts each time.
        let bytes: usize = texts.iter().map(|text| text.len() + query.len()).sum();
        let (model, query) = (self.model.clone(), query.to_owned());
        let query = tokenize_blocking(bytes, move |_| model.tokenizer.first_text(&query)).await?;
        let pairs = Arc::new(ScoringPairs {
            query,
            texts,
            max_text_tokens,
            slice_tokens: SLICE_TOKENS.min(self.engine.queue_tokens()),
        });
        let mut scored = Scored::default();
        while scored.scores.len() < pairs.texts.len() {
            let (model, pairs, from) = (self.model.clone(), pairs.clone(), scored.scores.len());
            let sequences =
                tokenize_blocking(bytes, move |cancellation| model.slice(&pairs, from, cancellation)).await?;
            scored.tokens += sequences.iter().map(|sequence| sequence.ids.len()).sum::<usize>();
            let scores = self.engine.compute(self.model.clone(), sequences).await?;
            scored.scores.extend(scores.into_iter().flatten());
        }
        Ok(scored)
    }
}

/// The pairs of one request.
struct ScoringPairs {
    query: FirstText,
    texts: Vec<String>,
    max_text_tokens: Option<usize>,
    slice_tokens: usize,
}

impl CrossEncoderModel {
    /// Tokenizes the next slice of pairs, at least one.
    fn slice(
        &self,
        pairs: &ScoringPairs,
        from: usize,
        cancellation: &Cancellation,
    ) -> Result<Vec<Sequence>, ModelError> {
        let mut sequences = Vec::new();
        let mut tokens = 0;
        for text in &pairs.texts[from..] {
            cancellation.check()?;
            let pair = self
                .tokenizer
                .encode_pair(&pairs.query, text, pairs.max_text_tokens)?;
            tokens += pair.sequence.ids.len();
            sequences.push(pair.sequence);
            if tokens >= pairs.slice_tokens {
                break;
            }
        }
        Ok(sequences)
    }
}
