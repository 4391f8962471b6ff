//! Looking at a model's files without reading its weights.

use std::path::Path;

use crate::encoder::config::RawConfig;
use crate::error::LoadError;
use crate::files::weights::Weights;
use crate::modules::{Layout, Modules};
use crate::tokenize::{TextTokenizer, TokenizerOptions};

/// The width of the vectors an embedding model makes, once all its files but the weights themselves
/// were read and found sound.
pub fn inspect_embedder(directory: &Path) -> Result<usize, LoadError> {
    if !directory.is_dir() {
        return Err(LoadError::NoDirectory(directory.to_owned()));
    }
    let layout = Layout::read(directory)?;
    let hidden = inspect(&layout.encoder)?;
    Ok(Modules::load(&layout, hidden)?.dimensions())
}

/// The same for a cross-encoder.
pub fn inspect_cross_encoder(directory: &Path) -> Result<(), LoadError> {
    if !directory.is_dir() {
        return Err(LoadError::NoDirectory(directory.to_owned()));
    }
    inspect(directory).map(|_| ())
}

fn inspect(directory: &Path) -> Result<usize, LoadError> {
    let config = RawConfig::read(directory)?.encoder(directory)?;
    let options = TokenizerOptions {
        max_tokens: None,
        lower_case: false,
    };
    TextTokenizer::load(directory, &config, &options)?;
    Weights::open(directory)?;
    Ok(config.hidden)
}
