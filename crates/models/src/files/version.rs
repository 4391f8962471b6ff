//! A version that changes whenever the files of a model do.
//!
//! Every byte counts, since a single changed weight changes the vectors. The digest is computed on
//! another thread while the model loads, and takes no longer than that.

use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::{open, read_optional, weights};
use crate::error::LoadError;

const CHUNK: usize = 1 << 20;

/// Twelve hexadecimal digits of a digest over all files that affect the output of the model.
pub(crate) fn of_directory(
    directory: &Path,
    encoder: &Path,
    small_files: &[String],
) -> Result<String, LoadError> {
    let mut hash = Sha256::new();
    let directories = if directory == encoder {
        vec![directory]
    } else {
        vec![directory, encoder]
    };
    for directory in directories {
        for name in small_files {
            if let Some(bytes) = read_optional(&directory.join(name))? {
                add(&mut hash, name, &bytes);
            }
        }
    }
    for name in weights::weight_files(encoder)? {
        add_file(&mut hash, &name, &encoder.join(&name))?;
    }
    Ok(hash
        .finalize()
        .iter()
        .take(6)
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// Includes names and lengths, so that no two sets of files give the same bytes.
fn add(hash: &mut Sha256, name: &str, bytes: &[u8]) {
    hash.update((name.len() as u64).to_le_bytes());
    hash.update(name);
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn add_file(hash: &mut Sha256, name: &str, path: &Path) -> Result<(), LoadError> {
    let unreadable = |source| LoadError::Unreadable {
        path: path.to_owned(),
        source,
    };
    let (mut file, length) = open(path).map_err(unreadable)?;
    add(hash, name, &length.to_le_bytes());
    let mut chunk = vec![0; CHUNK];
    loop {
        match file.read(&mut chunk).map_err(unreadable)? {
            0 => return Ok(()),
            read => hash.update(&chunk[..read]),
        }
    }
}
