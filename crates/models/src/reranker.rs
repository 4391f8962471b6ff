//! A cross-encoder in this process: question and text are read together and scored.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use ragstone_core::model::{ModelError, Reranker, Scored};
use serde::Deserialize;

use crate::background::{Asked, tokenising};
use crate::config::Quantize;
use crate::encoder::config::{Architecture, EncoderConfig, RawConfig};
use crate::encoder::{Encoder, Linear, Scratch, Sequence, Wanted, linear};
use crate::engine::{Compute, Engine};
use crate::error::LoadError;
use crate::files::json_optional;
use crate::files::weights::Weights;
use crate::kernel::{Finish, Start};
use crate::modules::{activate_one, torch_activation};
use crate::sentence::tokenizer_options;
use crate::team::Team;
use crate::tokenize::{FirstText, TextTokenizer};

/// A request goes to the engine in slices of about so many tokens: what it holds in memory does not grow
/// with it, it takes its turns among others, and what nobody waits for any more is not even tokenised.
const SLICE_TOKENS: usize = 1 << 16;

#[derive(Debug, Clone)]
pub struct CrossEncoderOptions {
    /// Shown to people: the hub id or directory that the model came from.
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
    head: Head,
    activation: Finish,
}

/// A dense layer over the first token, and one number out of that.
struct Head {
    dense: Linear,
    dense_activation: Finish,
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

    /// Question and text together are cut to this many tokens.
    pub fn max_tokens(&self) -> usize {
        self.model.tokenizer.max_tokens()
    }
}

/// All of a model but the weights of its encoder, which take the time.
struct Parts {
    config: EncoderConfig,
    weights: Weights,
    tokenizer: TextTokenizer,
    head: Head,
    activation: Finish,
}

/// Whether a directory holds a cross-encoder, as far as that can be told without reading all of it.
pub(crate) fn check(directory: &Path) -> Result<(), LoadError> {
    Parts::read(directory).map(|_| ())
}

impl CrossEncoderModel {
    fn load(directory: &Path) -> Result<Self, LoadError> {
        let parts = Parts::read(directory)?;
        Ok(Self {
            // Scores are read as they are, so every bit of them counts.
            encoder: Encoder::load(&parts.weights, parts.config, Some(Quantize::Never))?,
            tokenizer: parts.tokenizer,
            head: parts.head,
            activation: parts.activation,
        })
    }
}

impl Parts {
    fn read(directory: &Path) -> Result<Self, LoadError> {
        let raw = RawConfig::read(directory)?;
        let config = raw.encoder(directory)?;
        let weights = Weights::open(directory)?;
        let head = Head::load(&weights, config.architecture, config.hidden, directory)?;
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
            None => Finish::Sigmoid,
        };
        let tokenizer = TextTokenizer::load(directory, &config, &tokenizer_options(directory)?)?;
        Ok(Self {
            config,
            weights,
            tokenizer,
            head,
            activation,
        })
    }
}

impl Head {
    fn load(
        weights: &Weights,
        architecture: Architecture,
        hidden: usize,
        directory: &Path,
    ) -> Result<Self, LoadError> {
        let (dense, dense_activation, output) = match architecture {
            Architecture::Bert => ("bert.pooler.dense", Finish::Tanh, "classifier"),
            Architecture::Roberta | Architecture::Mpnet => {
                ("classifier.dense", Finish::Tanh, "classifier.out_proj")
            }
            Architecture::DistilBert => ("pre_classifier", Finish::Relu, "classifier"),
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
    fn compute(&self, team: &Team, scratch: &mut Scratch, sequences: &[&Sequence]) -> Vec<Vec<f32>> {
        let hidden = self.encoder.config.hidden;
        self.encoder.forward(team, scratch, sequences, Wanted::First);
        let states = scratch.states(hidden);
        let mut pooled = vec![0.0; states.len()];
        self.head
            .dense
            .apply(team, states, &mut pooled, Start::Zero, self.head.dense_activation);
        let mut scores = vec![0.0; sequences.len()];
        self.head
            .output
            .apply(team, &pooled, &mut scores, Start::Zero, Finish::Nothing);
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
        // The query is assembled anew with every text, so it counts each time.
        let bytes: usize = texts.iter().map(|text| text.len() + query.len()).sum();
        let (model, query) = (self.model.clone(), query.to_owned());
        let query = tokenising(bytes, move |_| model.tokenizer.first_text(&query)).await?;
        let pairs = Arc::new(Pairs {
            query,
            texts,
            max_text_tokens,
            slice_tokens: SLICE_TOKENS.min(self.engine.queue_tokens()),
        });
        let mut scored = Scored::default();
        while scored.scores.len() < pairs.texts.len() {
            let (model, pairs, from) = (self.model.clone(), pairs.clone(), scored.scores.len());
            let sequences = tokenising(bytes, move |asked| model.slice(&pairs, from, asked)).await?;
            scored.tokens += sequences.iter().map(|sequence| sequence.ids.len()).sum::<usize>();
            let scores = self.engine.compute(self.model.clone(), sequences).await?;
            scored.scores.extend(scores.into_iter().flatten());
        }
        Ok(scored)
    }
}

/// What one request asks for.
struct Pairs {
    query: FirstText,
    texts: Vec<String>,
    max_text_tokens: Option<usize>,
    slice_tokens: usize,
}

impl CrossEncoderModel {
    /// The next pairs, at least one.
    fn slice(&self, pairs: &Pairs, from: usize, asked: &Asked) -> Result<Vec<Sequence>, ModelError> {
        let mut sequences = Vec::new();
        let mut tokens = 0;
        for text in &pairs.texts[from..] {
            asked.still()?;
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
