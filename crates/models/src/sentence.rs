//! The sentence-transformers configuration of an encoder's input.

use std::path::Path;

use serde::Deserialize;

use crate::error::LoadError;
use crate::files::json_optional;
use crate::tokenize::TokenizerOptions;

/// Names of the configuration file, in the order in which sentence-transformers tries them.
pub(crate) const SENTENCE_CONFIGS: [&str; 7] = [
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
];

#[derive(Default, Deserialize)]
struct SentenceConfig {
    max_seq_length: Option<usize>,
    #[serde(default)]
    do_lower_case: bool,
}

/// Reads the first of the files that is not empty.
pub(crate) fn tokenizer_options(directory: &Path) -> Result<TokenizerOptions, LoadError> {
    let mut config = SentenceConfig::default();
    for name in SENTENCE_CONFIGS {
        let path = directory.join(name);
        let found: serde_json::Map<String, serde_json::Value> = json_optional(&path)?.unwrap_or_default();
        if !found.is_empty() {
            config =
                serde_json::from_value(found.into()).map_err(|error| LoadError::malformed(&path, error))?;
            break;
        }
    }
    Ok(TokenizerOptions {
        max_tokens: config.max_seq_length,
        lower_case: config.do_lower_case,
    })
}
