//! `embeddings.yml`: the embedding models and their sources.

use std::collections::HashSet;
use std::path::Path;

use serde::Deserialize;

/// Printed if the configuration is missing or empty.
pub const EXAMPLE_CONFIG: &str = "\
embeddings:
  - id: minilm                                        # the name collections use
    path: sentence-transformers/all-MiniLM-L6-v2      # a Hugging Face model id, or a directory
  - id: bge-small
    path: /models/bge-small-en-v1.5
    version: \"1.5\"                                    # optional; derived from the files otherwise
    quantize: int8                                    # optional; int8 is faster and slightly less exact, none is exact
";

const LOCAL_KEYS: &str = "id, path, version, normalize, quantize";
const REMOTE_KEYS: &str = "id, provider, model, dimensions, version, knowledgebase_id";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbeddingsConfig {
    /// At least one, with unique ids.
    pub embeddings: Vec<ModelEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelEntry {
    /// Runs in this process.
    Local(LocalEntry),
    /// Runs at a provider, an entry of `providers` in the main configuration.
    Remote(RemoteEntry),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalEntry {
    pub id: String,
    /// A hub id or a directory, see [`crate::hub::ModelSource::parse`].
    pub path: String,
    /// Version of the model; defaults to a digest of its files.
    pub version: Option<String>,
    /// Normalization of vectors to length one; defaults to the modules of the model.
    pub normalize: Option<Normalize>,
    /// Defaults to bfloat16 if the processor supports it, and else to `f32`.
    pub quantize: Option<Quantize>,
}

/// Overrides the normalization of the model's own modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Normalize {
    Always,
    Never,
}

/// Weight quantization. The default is bfloat16 on processors with `avx512_bf16`, and else `f32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantize {
    /// Eight-bit weights: faster, with less memory, and slightly less exact.
    Int8,
    /// `f32`: the most exact, and the same on every processor up to the order of sums.
    Never,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteEntry {
    pub id: String,
    /// The name of an entry of `providers`.
    pub provider: String,
    pub model: String,
    pub dimensions: usize,
    pub version: Option<String>,
    /// Namespace of our content at an embedding service.
    pub knowledgebase_id: Option<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum ModelConfigError {
    #[error("{path} cannot be read: {source}")]
    Unreadable { path: String, source: std::io::Error },
    #[error("{0}")]
    Invalid(String),
    /// Display [`EXAMPLE_CONFIG`] with it.
    #[error("no embedding models are configured")]
    Empty,
}

impl ModelEntry {
    pub fn id(&self) -> &str {
        match self {
            Self::Local(entry) => &entry.id,
            Self::Remote(entry) => &entry.id,
        }
    }
}

impl EmbeddingsConfig {
    pub fn from_file(path: &Path) -> Result<Self, ModelConfigError> {
        let unreadable = |source| ModelConfigError::Unreadable {
            path: path.display().to_string(),
            source,
        };
        Self::from_yaml(&std::fs::read_to_string(path).map_err(unreadable)?)
    }

    pub fn from_yaml(text: &str) -> Result<Self, ModelConfigError> {
        if text
            .lines()
            .all(|line| line.trim().is_empty() || line.trim_start().starts_with('#'))
        {
            return Err(ModelConfigError::Empty);
        }
        let entries = entries(text)?;
        let embeddings = entries
            .into_iter()
            .enumerate()
            .map(|(index, entry)| entry.validate(index + 1))
            .collect::<Result<Vec<_>, _>>()?;
        let mut seen = HashSet::new();
        match embeddings.iter().find(|entry| !seen.insert(entry.id())) {
            Some(twice) => Err(ModelConfigError::Invalid(format!(
                "two embedding models have the id '{}'",
                twice.id()
            ))),
            None => Ok(Self { embeddings }),
        }
    }
}

/// Checks the form before the entries, because errors of the parser would mention internal types.
fn entries(text: &str) -> Result<Vec<RawEntry>, ModelConfigError> {
    let invalid = |problem: &str| Err(ModelConfigError::Invalid(problem.to_owned()));
    let parsing = |error: serde_saphyr::Error| ModelConfigError::Invalid(first_line(&error));
    let form: serde_json::Value = serde_saphyr::from_str(text).map_err(parsing)?;
    let Some(document) = form.as_object() else {
        return invalid("it must begin with 'embeddings:', followed by the list of models");
    };
    if let Some(unknown) = document.keys().find(|key| *key != "embeddings") {
        return invalid(&format!("unknown key '{unknown}'; the only key is 'embeddings'"));
    }
    match document.get("embeddings") {
        None => return invalid("the list 'embeddings' is missing"),
        Some(serde_json::Value::Null) => return Err(ModelConfigError::Empty),
        Some(serde_json::Value::Array(entries)) if entries.is_empty() => return Err(ModelConfigError::Empty),
        Some(serde_json::Value::Array(_)) => {}
        Some(_) => return invalid("'embeddings' must be a list of models, each with an 'id' and a 'path'"),
    }
    let document: ModelsDocument = serde_saphyr::from_str(text).map_err(parsing)?;
    Ok(document.embeddings)
}

#[derive(Deserialize)]
struct ModelsDocument {
    embeddings: Vec<RawEntry>,
}

/// All keys of both kinds of entry. Validation afterwards gives better messages than an untagged enum.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    id: Option<String>,
    path: Option<String>,
    version: Option<String>,
    normalize: Option<bool>,
    quantize: Option<String>,
    provider: Option<String>,
    model: Option<String>,
    dimensions: Option<usize>,
    knowledgebase_id: Option<String>,
}

impl RawEntry {
    fn validate(self, number: usize) -> Result<ModelEntry, ModelConfigError> {
        let Some(id) = self.id.clone().filter(|id| !id.trim().is_empty()) else {
            return Err(ModelConfigError::Invalid(format!(
                "embedding model number {number} has no 'id'"
            )));
        };
        let wrong = |what: &str| ModelConfigError::Invalid(format!("embedding model '{id}' {what}"));
        if self.provider.is_some() {
            if self.path.is_some() || self.normalize.is_some() || self.quantize.is_some() {
                return Err(wrong(&format!("has a 'provider'; its keys are {REMOTE_KEYS}")));
            }
            return Ok(ModelEntry::Remote(RemoteEntry {
                provider: text(self.provider).ok_or_else(|| wrong("has an empty 'provider'"))?,
                model: text(self.model)
                    .ok_or_else(|| wrong("has no 'model', which is required with 'provider'"))?,
                dimensions: self
                    .dimensions
                    .filter(|dimensions| (1..=65_536).contains(dimensions))
                    .ok_or_else(|| {
                        wrong("has no valid 'dimensions' (1 to 65536), which are required with 'provider'")
                    })?,
                version: text(self.version),
                knowledgebase_id: text(self.knowledgebase_id),
                id,
            }));
        }
        if self.model.is_some() || self.dimensions.is_some() || self.knowledgebase_id.is_some() {
            return Err(wrong(&format!("has no 'provider'; its keys are {LOCAL_KEYS}")));
        }
        Ok(ModelEntry::Local(LocalEntry {
            path: text(self.path)
                .ok_or_else(|| wrong("has no 'path'; set it to a Hugging Face model id or a directory"))?,
            version: text(self.version),
            normalize: self
                .normalize
                .map(|on| if on { Normalize::Always } else { Normalize::Never }),
            quantize: match self.quantize.as_deref() {
                None => None,
                Some("int8") => Some(Quantize::Int8),
                Some("none") => Some(Quantize::Never),
                Some(other) => {
                    let what = format!("has 'quantize: {other}'; use int8 or none");
                    return Err(wrong(&what));
                }
            },
            id,
        }))
    }
}

fn text(value: Option<String>) -> Option<String> {
    value.filter(|text| !text.trim().is_empty())
}

/// The first line of a parser error, without the excerpt of the file below it.
fn first_line(error: &impl ToString) -> String {
    error
        .to_string()
        .lines()
        .next()
        .unwrap_or("not valid YAML")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(yaml: &str) -> String {
        EmbeddingsConfig::from_yaml(yaml).unwrap_err().to_string()
    }

    #[test]
    fn reads_both_kinds_of_entry() {
        let config = EmbeddingsConfig::from_yaml(
            "embeddings:\n  - {id: a, path: org/name, version: '2', normalize: false, quantize: int8}\n  \
             - {id: b, provider: my-openai, model: m, dimensions: 8}\n",
        )
        .unwrap();
        let local = LocalEntry {
            id: "a".into(),
            path: "org/name".into(),
            version: Some("2".into()),
            normalize: Some(Normalize::Never),
            quantize: Some(Quantize::Int8),
        };
        let remote = RemoteEntry {
            id: "b".into(),
            provider: "my-openai".into(),
            model: "m".into(),
            dimensions: 8,
            version: None,
            knowledgebase_id: None,
        };
        assert_eq!(
            config.embeddings,
            [ModelEntry::Local(local), ModelEntry::Remote(remote)]
        );
    }

    #[test]
    fn the_example_is_valid() {
        assert_eq!(
            EmbeddingsConfig::from_yaml(EXAMPLE_CONFIG)
                .unwrap()
                .embeddings
                .len(),
            2
        );
    }

    #[test]
    fn an_empty_configuration_is_told_apart_from_a_wrong_one() {
        for yaml in ["", "# nothing\n", "embeddings: []\n", "embeddings:\n"] {
            assert!(
                matches!(EmbeddingsConfig::from_yaml(yaml), Err(ModelConfigError::Empty)),
                "{yaml:?}"
            );
        }
    }

    #[test]
    fn errors_name_what_is_wrong() {
        assert!(error("models: []").contains("unknown key 'models'"));
        assert!(error("{}").contains("embeddings"));
        for (yaml, says) in [
            ("embeddings: 3", "'embeddings' must be a list of models"),
            ("embeddings: {}", "'embeddings' must be a list of models"),
            ("- {id: a, path: x}", "it must begin with 'embeddings:'"),
        ] {
            assert!(error(yaml).starts_with(says), "{}", error(yaml));
        }
        assert!(error("embeddings: [{path: x}]").contains("'id'"));
        assert!(error("embeddings: [{id: a}]").contains("'path'"));
        assert!(error("embeddings: [{id: a, path: x, colour: red}]").contains("colour"));
        assert!(error("embeddings: [{id: a, path: x}, {id: a, path: y}]").contains("id 'a'"));
        assert!(error("embeddings: [{id: a, provider: p, dimensions: 3}]").contains("'model'"));
        assert!(error("embeddings: [{id: a, provider: p, model: m}]").contains("'dimensions'"));
        assert!(
            error("embeddings: [{id: a, provider: p, model: m, dimensions: 0}]").contains("'dimensions'")
        );
        assert!(error("embeddings: [{id: a, path: x, model: m}]").contains("'provider'"));
        assert!(error("embeddings: [{id: a, path: x, quantize: int4}]").contains("'quantize: int4'"));
        let exact = EmbeddingsConfig::from_yaml("embeddings: [{id: a, path: x, quantize: none}]").unwrap();
        assert!(
            matches!(&exact.embeddings[0], ModelEntry::Local(entry) if entry.quantize == Some(Quantize::Never))
        );
        assert!(
            error("embeddings: [{id: a, provider: p, model: m, dimensions: 8, quantize: int8}]")
                .contains("'provider'")
        );
        assert!(error("embeddings: [[[").lines().count() == 1);
    }
}
