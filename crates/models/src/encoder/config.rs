//! `config.json` of an encoder, in one form for all architectures.

use std::path::Path;

use serde::Deserialize;

use crate::error::LoadError;
use crate::files::json_required;
use crate::kernel::Activation;

/// Listed in error messages, the most common first.
pub(crate) const SUPPORTED_ARCHITECTURES: &str = "bert, roberta, xlm-roberta, distilbert, mpnet";
/// Far more than any encoder of these families has; keeps products of two sizes from overflowing.
const MAX_SIZE: usize = 10_000_000;
const MAX_LAYERS: usize = 1_000;
const SUPPORTED_ACTIVATIONS: &str =
    "gelu, gelu_python, gelu_new, gelu_fast, gelu_pytorch_tanh, relu, silu, swish, tanh";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    Bert,
    /// RoBERTa and XLM-RoBERTa, which differ only in their vocabulary.
    Roberta,
    DistilBert,
    Mpnet,
}

#[derive(Debug, Clone)]
pub(crate) struct EncoderConfig {
    pub(crate) architecture: Architecture,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) intermediate: usize,
    pub(crate) activation: Activation,
    pub(crate) vocabulary: usize,
    pub(crate) positions: usize,
    /// 0 if the architecture has no token types.
    pub(crate) token_types: usize,
    /// Position of the first token; RoBERTa and MPNet start after the id of the padding token.
    pub(crate) first_position: usize,
    pub(crate) padding_token: u32,
    pub(crate) norm_epsilon: f32,
    pub(crate) relative_buckets: usize,
}

impl EncoderConfig {
    /// The longest sequence that the position embeddings allow.
    pub(crate) fn longest_sequence(&self) -> usize {
        self.positions - self.first_position
    }
}

/// The fields of `config.json` that are used, under the names of all architectures.
#[derive(Debug, Deserialize)]
pub(crate) struct RawConfig {
    model_type: Option<String>,
    #[serde(default)]
    architectures: Vec<String>,
    #[serde(alias = "dim")]
    hidden_size: Option<usize>,
    #[serde(alias = "n_layers")]
    num_hidden_layers: Option<usize>,
    #[serde(alias = "n_heads")]
    num_attention_heads: Option<usize>,
    #[serde(alias = "hidden_dim")]
    intermediate_size: Option<usize>,
    #[serde(alias = "activation")]
    hidden_act: Option<String>,
    vocab_size: Option<usize>,
    max_position_embeddings: Option<usize>,
    type_vocab_size: Option<usize>,
    pad_token_id: Option<u32>,
    layer_norm_eps: Option<f32>,
    relative_attention_num_buckets: Option<usize>,
    position_embedding_type: Option<String>,
    is_decoder: Option<bool>,
    quantization_config: Option<serde_json::Value>,
    num_labels: Option<usize>,
    id2label: Option<serde_json::Map<String, serde_json::Value>>,
    sentence_transformers: Option<SentenceTransformersSection>,
    sbert_ce_default_activation_function: Option<String>,
}

#[derive(Debug, Deserialize)]
struct SentenceTransformersSection {
    activation_fn: Option<String>,
}

impl RawConfig {
    pub(crate) fn read(directory: &Path) -> Result<Self, LoadError> {
        json_required(directory, "config.json")
    }

    /// Number of outputs of a classification head; `transformers` defaults to two.
    pub(crate) fn labels(&self) -> usize {
        self.id2label
            .as_ref()
            .map(serde_json::Map::len)
            .or(self.num_labels)
            .unwrap_or(2)
    }

    /// Activation that a cross-encoder was saved with, as the path of a Python class.
    pub(crate) fn score_activation(&self) -> Option<&str> {
        let section = self.sentence_transformers.as_ref();
        section
            .and_then(|section| section.activation_fn.as_deref())
            .or(self.sbert_ce_default_activation_function.as_deref())
    }

    pub(crate) fn model_type(&self) -> Option<&str> {
        self.model_type.as_deref()
    }

    /// Whether the model has a classification head.
    pub(crate) fn is_classifier(&self) -> bool {
        self.architectures
            .iter()
            .any(|name| name.ends_with("ForSequenceClassification"))
    }

    pub(crate) fn encoder(&self, directory: &Path) -> Result<EncoderConfig, LoadError> {
        let path = directory.join("config.json");
        let architecture = self.architecture()?;
        self.refuse_variants()?;
        let required = |value: Option<usize>, name: &str| match value {
            Some(0) | None => Err(LoadError::malformed(&path, format!("'{name}' is missing or 0"))),
            Some(value) if value > MAX_SIZE => Err(LoadError::malformed(
                &path,
                format!("'{name}' is {value}, more than {MAX_SIZE}"),
            )),
            Some(value) => Ok(value),
        };
        let hidden = required(self.hidden_size, "hidden_size")?;
        let heads = required(self.num_attention_heads, "num_attention_heads")?;
        if hidden % heads != 0 {
            let reason =
                format!("'hidden_size' is {hidden}, which is not a multiple of {heads} attention heads");
            return Err(LoadError::malformed(&path, reason));
        }
        let padding_token = self
            .pad_token_id
            .unwrap_or(if architecture == Architecture::Bert { 0 } else { 1 });
        let first_position = match architecture {
            Architecture::Bert | Architecture::DistilBert => 0,
            Architecture::Roberta => padding_token as usize + 1,
            // transformers fixes the padding index of MPNet's positions, whatever the configuration says.
            Architecture::Mpnet => 2,
        };
        let positions = required(self.max_position_embeddings, "max_position_embeddings")?;
        if positions <= first_position {
            return Err(LoadError::malformed(
                &path,
                format!("'max_position_embeddings' is {positions}; it must be more than {first_position}"),
            ));
        }
        let layers = required(self.num_hidden_layers, "num_hidden_layers")?;
        if layers > MAX_LAYERS {
            let reason = format!("'num_hidden_layers' is {layers}, more than {MAX_LAYERS}");
            return Err(LoadError::malformed(&path, reason));
        }
        let relative_buckets = match architecture {
            Architecture::Mpnet => self.relative_attention_num_buckets.unwrap_or(32),
            _ => 0,
        };
        if relative_buckets == 1 || relative_buckets > MAX_SIZE {
            let reason = format!("'relative_attention_num_buckets' is {relative_buckets}");
            return Err(LoadError::malformed(&path, reason));
        }
        Ok(EncoderConfig {
            architecture,
            hidden,
            layers,
            heads,
            intermediate: required(self.intermediate_size, "intermediate_size")?,
            activation: self.activation()?,
            vocabulary: required(self.vocab_size, "vocab_size")?,
            positions,
            token_types: match architecture {
                Architecture::Bert | Architecture::Roberta => self.type_vocab_size.unwrap_or(2),
                Architecture::DistilBert | Architecture::Mpnet => 0,
            },
            first_position,
            padding_token: if architecture == Architecture::Mpnet {
                1
            } else {
                padding_token
            },
            norm_epsilon: self.layer_norm_eps.unwrap_or(1e-12),
            relative_buckets,
        })
    }

    fn architecture(&self) -> Result<Architecture, LoadError> {
        match self.model_type.as_deref() {
            Some("bert") => Ok(Architecture::Bert),
            Some("roberta" | "xlm-roberta") => Ok(Architecture::Roberta),
            Some("distilbert") => Ok(Architecture::DistilBert),
            Some("mpnet") => Ok(Architecture::Mpnet),
            Some(other) => Err(LoadError::unsupported(
                format!("model architecture '{other}'"),
                SUPPORTED_ARCHITECTURES,
            )),
            None => Err(LoadError::unsupported(
                "a config.json without a model_type",
                SUPPORTED_ARCHITECTURES,
            )),
        }
    }

    fn refuse_variants(&self) -> Result<(), LoadError> {
        if let Some(kind) = self
            .position_embedding_type
            .as_deref()
            .filter(|kind| *kind != "absolute")
        {
            return Err(LoadError::unsupported(
                format!("position_embedding_type '{kind}'"),
                "absolute",
            ));
        }
        if self.is_decoder == Some(true) {
            return Err(LoadError::unsupported("a decoder (is_decoder)", "encoders"));
        }
        if self.quantization_config.is_some() {
            let what = "a quantized checkpoint (quantization_config)";
            return Err(LoadError::unsupported(what, "f32, f16 and bf16 weights"));
        }
        Ok(())
    }

    fn activation(&self) -> Result<Activation, LoadError> {
        match self.hidden_act.as_deref().unwrap_or("gelu") {
            "gelu" | "gelu_python" => Ok(Activation::Gelu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Activation::GeluTanh),
            "relu" => Ok(Activation::Relu),
            "silu" | "swish" => Ok(Activation::Silu),
            "tanh" => Ok(Activation::Tanh),
            other => Err(LoadError::unsupported(
                format!("hidden_act '{other}'"),
                SUPPORTED_ACTIVATIONS,
            )),
        }
    }
}
