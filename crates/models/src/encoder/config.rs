//! What `config.json` says about an encoder, brought to one form for all architectures.

use std::path::Path;

use serde::Deserialize;

use crate::error::LoadError;
use crate::files::json_required;
use crate::kernel::Finish;

/// Named in error messages, in the order people look for them.
pub(crate) const SUPPORTED_ARCHITECTURES: &str = "bert, roberta, xlm-roberta, distilbert, mpnet";
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
    pub(crate) activation: Finish,
    pub(crate) vocabulary: usize,
    pub(crate) positions: usize,
    /// 0 where the architecture has no token types.
    pub(crate) token_types: usize,
    /// The position of the first token; RoBERTa and MPNet begin after the padding token's id.
    pub(crate) first_position: usize,
    pub(crate) padding_token: u32,
    pub(crate) norm_epsilon: f32,
    pub(crate) relative_buckets: usize,
}

impl EncoderConfig {
    /// How many tokens the position embeddings can tell apart.
    pub(crate) fn longest_sequence(&self) -> usize {
        self.positions - self.first_position
    }
}

/// The fields of `config.json` that matter here, under the names of all architectures.
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

    /// The number of outputs of a classification head; `transformers` assumes two where nothing is said.
    pub(crate) fn labels(&self) -> usize {
        self.id2label
            .as_ref()
            .map(serde_json::Map::len)
            .or(self.num_labels)
            .unwrap_or(2)
    }

    /// The activation a cross-encoder was saved with, as the path of a Python class.
    pub(crate) fn score_activation(&self) -> Option<&str> {
        let section = self.sentence_transformers.as_ref();
        section
            .and_then(|section| section.activation_fn.as_deref())
            .or(self.sbert_ce_default_activation_function.as_deref())
    }

    pub(crate) fn model_type(&self) -> Option<&str> {
        self.model_type.as_deref()
    }

    /// The files hold a classification head as well.
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
            // No encoder of these families is near this; it keeps products of sizes from overflowing.
            Some(value) if value > 10_000_000 => {
                Err(LoadError::malformed(&path, format!("'{name}' is {value}")))
            }
            Some(value) => Ok(value),
        };
        let hidden = required(self.hidden_size, "hidden_size")?;
        let heads = required(self.num_attention_heads, "num_attention_heads")?;
        if hidden % heads != 0 {
            let reason = format!("hidden_size {hidden} cannot be divided among {heads} attention heads");
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
                format!("max_position_embeddings is only {positions}"),
            ));
        }
        Ok(EncoderConfig {
            architecture,
            hidden,
            layers: required(self.num_hidden_layers, "num_hidden_layers")?.min(1_000),
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
            relative_buckets: match architecture {
                Architecture::Mpnet => self.relative_attention_num_buckets.unwrap_or(32),
                _ => 0,
            },
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
            let what = "a checkpoint quantised beforehand (quantization_config)";
            return Err(LoadError::unsupported(what, "f32, f16 and bf16 weights"));
        }
        Ok(())
    }

    fn activation(&self) -> Result<Finish, LoadError> {
        match self.hidden_act.as_deref().unwrap_or("gelu") {
            "gelu" | "gelu_python" => Ok(Finish::Gelu),
            "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Ok(Finish::GeluTanh),
            "relu" => Ok(Finish::Relu),
            "silu" | "swish" => Ok(Finish::Silu),
            "tanh" => Ok(Finish::Tanh),
            other => Err(LoadError::unsupported(
                format!("hidden_act '{other}'"),
                SUPPORTED_ACTIVATIONS,
            )),
        }
    }
}
