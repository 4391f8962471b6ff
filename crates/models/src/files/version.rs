//! A version for a model's files that changes whenever they do.
//!
//! Every byte counts: a single changed weight gives other vectors. The digest is computed beside
//! the loading, on another thread, and takes no longer than that.

use std::io::Read;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::{open, read_optional, weights};
use crate::error::LoadError;

const CHUNK: usize = 1 << 20;

/// Twelve hexadecimal digits over everything that decides what the model computes.
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

/// Names and lengths are part of the digest, so that no two sets of files read the same.
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
