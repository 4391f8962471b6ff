//! Reading a model's files: small JSON files here, weights in [`weights`], and in [`version`] the
//! digest that tells one state of the files from another.

pub(crate) mod version;
pub(crate) mod weights;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::LoadError;

/// A tokenizer of 250,000 pieces takes 17 MB; anything far beyond is not one.
const LARGEST_JSON: u64 = 256 << 20;

/// The content of a file that may be absent.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let unreadable = |source| LoadError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(unreadable(source)),
    };
    let mut bytes = Vec::new();
    file.take(LARGEST_JSON + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > LARGEST_JSON {
        return Err(LoadError::malformed(
            path,
            format!("larger than {} MB", LARGEST_JSON >> 20),
        ));
    }
    Ok(Some(bytes))
}

pub(crate) fn json_optional<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, LoadError> {
    read_optional(path)?
        .map(|bytes| serde_json::from_slice(&bytes).map_err(|error| LoadError::malformed(path, error)))
        .transpose()
}

pub(crate) fn json_required<T: DeserializeOwned>(
    directory: &Path,
    file: &'static str,
) -> Result<T, LoadError> {
    json_optional(&directory.join(file))?.ok_or_else(|| LoadError::MissingFile {
        directory: directory.to_owned(),
        file,
    })
}

/// The bytes of a file that a model cannot be without.
pub(crate) fn read_required(directory: &Path, file: &'static str) -> Result<Vec<u8>, LoadError> {
    read_optional(&directory.join(file))?.ok_or_else(|| LoadError::MissingFile {
        directory: directory.to_owned(),
        file,
    })
}
