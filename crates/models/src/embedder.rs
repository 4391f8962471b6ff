//! Embedding models that run in this process.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use ragstone_core::model::{EmbedInput, Embedder, Embedding, ModelError, ModelIdentity, ModelInfo, Role};
use serde::Deserialize;

use crate::blocking::{Cancellation, tokenize_blocking};
use crate::config::{Normalize, Quantize};
use crate::encoder::config::{EncoderConfig, RawConfig};
use crate::encoder::{Encoder, Scratch, Sequence};
use crate::engine::{Compute, Engine};
use crate::error::LoadError;
use crate::files::weights::Weights;
use crate::files::{json_optional, version};
use crate::modules::{Layout, Modules};
use crate::sentence::{SENTENCE_CONFIGS, tokenizer_options};
use crate::thread_group::ThreadGroup;
use crate::tokenize::{TextTokenizer, Tokenized};

#[derive(Debug, Clone)]
pub struct EmbedderOptions {
    /// The name that collections use.
    pub id: String,
    /// Display name: the hub id or directory that the model came from.
    pub name: String,
    pub directory: PathBuf,
    /// Defaults to a digest of the model's files.
    pub version: Option<String>,
    /// Defaults to the modules of the model.
    pub normalize: Option<Normalize>,
    /// Defaults to bfloat16 if the processor supports it, and else to `f32`.
    pub quantize: Option<Quantize>,
}

pub struct LocalEmbedder {
    engine: Engine,
    model: Arc<EmbeddingModel>,
    info: ModelInfo,
}

struct EmbeddingModel {
    encoder: Encoder,
    tokenizer: TextTokenizer,
    modules: Modules,
    query: Prompt,
    passage: Prompt,
}

/// Prefix of every text of a role, and the number of its tokens that pooling skips.
#[derive(Default)]
struct Prompt {
    text: String,
    pool_from: usize,
}

#[derive(Default, Deserialize)]
struct PromptConfig {
    #[serde(default)]
    prompts: HashMap<String, Option<String>>,
    default_prompt_name: Option<String>,
}

/// Files that affect the output of a model, besides the weights.
/// Their order is part of the digest that stored vectors refer to.
const DECIDING_FILES: [&str; 6] = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",
    SENTENCE_CONFIGS[0],
    "config_sentence_transformers.json",
];

impl LocalEmbedder {
    /// Reads all files of a model and repacks its weights.
    pub fn load(engine: &Engine, options: &EmbedderOptions) -> Result<Self, LoadError> {
        if !options.directory.is_dir() {
            return Err(LoadError::NoDirectory(options.directory.clone()));
        }
        let layout = Layout::read(&options.directory)?;
        let (model, version) = std::thread::scope(|scope| {
            let version = options
                .version
                .clone()
                .map_or_else(|| Err(scope.spawn(|| digest(&layout, &options.directory))), Ok);
            let model = EmbeddingModel::load(&layout, options);
            let version = version.or_else(|thread| {
                thread.join().unwrap_or_else(|_| {
                    Err(LoadError::malformed(
                        &options.directory,
                        "its digest could not be computed",
                    ))
                })
            });
            (model, version)
        });
        let model = model?;
        let info = ModelInfo {
            identity: ModelIdentity {
                id: options.id.clone(),
                version: with_precision(version?, options.quantize),
                dimensions: model.modules.dimensions(),
            },
            name: options.name.clone(),
            max_tokens: Some(model.tokenizer.max_tokens()),
        };
        Ok(Self {
            engine: engine.clone(),
            model: Arc::new(model),
            info,
        })
    }
}

/// Adds the precision to the version. Vectors of int8 weights are close to the exact ones, but not
/// interchangeable with them, so they count as another version, even where the entry names one. Vectors of
/// bfloat16 weights are interchangeable, so that machines with and without support for it share a store.
fn with_precision(version: String, quantize: Option<Quantize>) -> String {
    match quantize {
        None | Some(Quantize::Never) => version,
        Some(Quantize::Int8) => format!("{version}-int8"),
    }
}

fn digest(layout: &Layout, directory: &Path) -> Result<String, LoadError> {
    let small = DECIDING_FILES.iter().chain(&SENTENCE_CONFIGS[1..]);
    let mut files: Vec<String> = small.map(ToString::to_string).collect();
    files.extend(layout.files.iter().cloned());
    version::of_directory(directory, &layout.encoder, &files)
}

/// All parts of a model except the weights of its encoder, which take long to read.
struct EmbedderFiles {
    config: EncoderConfig,
    weights: Weights,
    tokenizer: TextTokenizer,
    modules: Modules,
    is_classifier: bool,
}

/// Checks all files of an embedding model without reading its weights, and returns the width of its
/// vectors.
pub fn inspect_embedder(directory: &Path) -> Result<usize, LoadError> {
    if !directory.is_dir() {
        return Err(LoadError::NoDirectory(directory.to_owned()));
    }
    let files = EmbedderFiles::read(&Layout::read(directory)?)?;
    Ok(files.modules.dimensions())
}

impl EmbedderFiles {
    fn read(layout: &Layout) -> Result<Self, LoadError> {
        let directory = &layout.encoder;
        let raw = RawConfig::read(directory)?;
        let config = raw.encoder(directory)?;
        let modules = Modules::load(layout, config.hidden)?;
        let tokenizer = TextTokenizer::load(directory, &config, &tokenizer_options(directory)?)?;
        let weights = Weights::open(directory)?;
        Encoder::check(&weights, &config)?;
        Ok(Self {
            modules,
            tokenizer,
            weights,
            is_classifier: raw.is_classifier(),
            config,
        })
    }
}

impl EmbeddingModel {
    fn load(layout: &Layout, options: &EmbedderOptions) -> Result<Self, LoadError> {
        let EmbedderFiles {
            config,
            weights,
            tokenizer,
            mut modules,
            is_classifier,
        } = EmbedderFiles::read(layout)?;
        if is_classifier {
            tracing::warn!(
                model = %options.id,
                path = %options.name,
                "this is a cross-encoder, whose vectors are not useful for search: pass it with --cross-encoder, \
                 and configure an embedding model here"
            );
        }
        if let Some(choice) = options.normalize {
            modules.normalize(choice);
        }
        let encoder = Encoder::load(&weights, config, options.quantize)?;
        let path = options.directory.join("config_sentence_transformers.json");
        let prompts: PromptConfig = json_optional(&path)?.unwrap_or_default();
        if let Some(name) = prompts.missing_default() {
            let reason = format!("'default_prompt_name' is '{name}', which is not one of its prompts");
            return Err(LoadError::malformed(&path, reason));
        }
        let prompt = |names: &[&str]| -> Result<Prompt, LoadError> {
            let text = prompts.of_role(names);
            let pool_from = if modules.include_prompt() || text.is_empty() {
                0
            } else {
                tokenizer
                    .prompt_length(&text)
                    .map_err(|error| LoadError::malformed(&path, error))?
            };
            Ok(Prompt { text, pool_from })
        };
        let (query, passage) = (prompt(&["query"])?, prompt(&["document", "passage", "corpus"])?);
        Ok(Self {
            encoder,
            tokenizer,
            modules,
            query,
            passage,
        })
    }

    fn prompt(&self, role: Role) -> &Prompt {
        match role {
            Role::Query => &self.query,
            Role::Passage => &self.passage,
        }
    }

    fn tokenize(
        &self,
        inputs: &[EmbedInput],
        role: Role,
        cancellation: &Cancellation,
    ) -> Result<Vec<Tokenized>, ModelError> {
        let prompt = self.prompt(role);
        let tokenize = |input: &EmbedInput| {
            cancellation.check()?;
            let mut tokenized = match input {
                EmbedInput::Text(text) if prompt.text.is_empty() => self.tokenizer.encode(text)?,
                EmbedInput::Text(text) => self.tokenizer.encode(&format!("{}{text}", prompt.text))?,
                EmbedInput::Tokens(ids) => self.tokenizer.encode_ids(&prompt.text, ids)?,
            };
            tokenized.sequence.pool_from = prompt.pool_from;
            Ok(tokenized)
        };
        inputs.iter().map(tokenize).collect()
    }
}

impl PromptConfig {
    fn missing_default(&self) -> Option<&str> {
        // sentence-transformers defines these two implicitly.
        const IMPLIED: [&str; 2] = ["query", "document"];
        let name = self.default_prompt_name.as_deref()?;
        (!self.prompts.contains_key(name) && !IMPLIED.contains(&name)).then_some(name)
    }

    /// The prompt under the first of the names. The default prompt applies to models without roles, as in
    /// `encode` of sentence-transformers. If any prompt is named after a role, the other role has none, as
    /// in its `encode_query` and `encode_document`.
    fn of_role(&self, names: &[&str]) -> String {
        const ROLES: [&str; 4] = ["query", "document", "passage", "corpus"];
        let named = names
            .iter()
            .find_map(|name| self.prompts.get(*name).cloned().flatten());
        let default = || {
            let has_roles = ROLES
                .iter()
                .any(|name| matches!(self.prompts.get(*name), Some(Some(text)) if !text.is_empty()));
            let name = self.default_prompt_name.as_ref().filter(|_| !has_roles)?;
            self.prompts.get(name).cloned().flatten()
        };
        named
            .filter(|text| !text.is_empty())
            .or_else(default)
            .unwrap_or_default()
    }
}

impl Compute for EmbeddingModel {
    fn compute(
        &self,
        threads: &ThreadGroup,
        scratch: &mut Scratch,
        sequences: &[&Sequence],
    ) -> Vec<Vec<f32>> {
        let hidden = self.encoder.config.hidden;
        self.encoder
            .forward(threads, scratch, sequences, self.modules.wanted(sequences));
        let states = scratch.states(hidden);
        let rows = |span: &std::ops::Range<usize>| &states[span.start * hidden..span.end * hidden];
        scratch
            .spans()
            .iter()
            .zip(sequences)
            .map(|(span, sequence)| {
                self.modules
                    .apply(threads, rows(span), hidden, sequence.pool_from)
            })
            .collect()
    }
}

#[async_trait]
impl Embedder for LocalEmbedder {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    async fn embed(&self, inputs: Vec<EmbedInput>, role: Role) -> Result<Vec<Embedding>, ModelError> {
        let bytes: usize = inputs.iter().map(input_bytes).sum();
        let model = self.model.clone();
        let tokenized = tokenize_blocking(bytes, move |cancellation| {
            model.tokenize(&inputs, role, cancellation)
        })
        .await?;
        let (sequences, facts): (Vec<Sequence>, Vec<(usize, bool)>) = tokenized
            .into_iter()
            .map(|text| {
                let facts = (text.sequence.ids.len(), text.truncated);
                (text.sequence, facts)
            })
            .unzip();
        let vectors = self.engine.compute(self.model.clone(), sequences).await?;
        let embedding = |(vector, (tokens, truncated))| Embedding {
            vector,
            tokens,
            truncated,
        };
        Ok(vectors.into_iter().zip(facts).map(embedding).collect())
    }

    fn count_tokens(&self, text: &str) -> Option<usize> {
        self.model.tokenizer.count(text)
    }
}

fn input_bytes(input: &EmbedInput) -> usize {
    match input {
        EmbedInput::Text(text) => text.len(),
        EmbedInput::Tokens(ids) => ids.len(),
    }
}
