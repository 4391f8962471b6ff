//! Reads the files of a model: small JSON files here, weights in [`weights`], a digest of all of them in
//! [`version`].

pub(crate) mod version;
pub(crate) mod weights;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::error::LoadError;

/// A tokenizer of 250,000 tokens has 17 MB.
const LARGEST_JSON: u64 = 256 << 20;

/// Reads a file that may be absent.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, LoadError> {
    let unreadable = |source| LoadError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let (file, length) = match open(path) {
        Ok(opened) => opened,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(unreadable(source)),
    };
    let too_large = || LoadError::malformed(path, format!("it is larger than {} MB", LARGEST_JSON >> 20));
    if length > LARGEST_JSON {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    // The file may grow while it is read.
    file.take(LARGEST_JSON + 1)
        .read_to_end(&mut bytes)
        .map_err(unreadable)?;
    if bytes.len() as u64 > LARGEST_JSON {
        return Err(too_large());
    }
    Ok(Some(bytes))
}

/// Opens a regular file and returns its length. Anything else, such as a pipe without a writer, could
/// block forever.
pub(crate) fn open(path: &Path) -> std::io::Result<(File, u64)> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    Ok((file, length))
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

/// Reads a file that every model needs.
pub(crate) fn read_required(directory: &Path, file: &'static str) -> Result<Vec<u8>, LoadError> {
    read_optional(&directory.join(file))?.ok_or_else(|| LoadError::MissingFile {
        directory: directory.to_owned(),
        file,
    })
}
