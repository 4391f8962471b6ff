//! Tensors by name, from one or several safetensors files.
//!
//! Opening a file reads and checks its header. Afterwards every tensor is known to lie within the file,
//! so reading one allocates no more than the file is long. Tensors are read one by one, because most are
//! repacked at once and need not be in memory twice.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::{json_optional, open};
use crate::error::LoadError;

pub(crate) const SINGLE_FILE: &str = "model.safetensors";
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";
/// Real headers have some hundred KB. Bounds the allocation that a damaged length causes.
const LARGEST_HEADER: u64 = 64 << 20;
const CHUNK: usize = 1 << 20;

pub(crate) struct Weights {
    directory: PathBuf,
    files: Vec<WeightFile>,
    tensors: HashMap<String, TensorLocation>,
}

struct WeightFile {
    path: PathBuf,
    file: File,
    data_start: u64,
}

struct TensorLocation {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    start: u64,
}

#[derive(Deserialize)]
struct WeightIndex {
    weight_map: HashMap<String, String>,
}

impl Weights {
    /// Opens `model.safetensors`, or the parts that `model.safetensors.index.json` names.
    pub(crate) fn open(directory: &Path) -> Result<Self, LoadError> {
        let mut weights = Self {
            directory: directory.to_owned(),
            files: Vec::new(),
            tensors: HashMap::new(),
        };
        for file in weight_files(directory)? {
            weights.add_file(directory.join(file))?;
        }
        Ok(weights)
    }

    fn add_file(&mut self, path: PathBuf) -> Result<(), LoadError> {
        let unreadable = |source| LoadError::Unreadable {
            path: path.clone(),
            source,
        };
        let (mut file, length) = open(&path).map_err(unreadable)?;
        let mut size = [0; 8];
        file.read_exact(&mut size)
            .map_err(|_| LoadError::malformed(&path, "it ends before its header"))?;
        let header_length = u64::from_le_bytes(size);
        if header_length > LARGEST_HEADER || header_length > length.saturating_sub(8) {
            let reason = format!("the length of its header is {header_length} bytes");
            return Err(LoadError::malformed(&path, reason));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(unreadable)?;
        let metadata: Metadata =
            serde_json::from_slice(&header).map_err(|error| LoadError::malformed(&path, error))?;
        let data_start = 8 + header_length;
        let expected = data_start + metadata.data_len() as u64;
        if expected != length {
            let reason =
                format!("its length is {length} bytes instead of {expected} (an interrupted download?)");
            return Err(LoadError::malformed(&path, reason));
        }
        for (name, info) in metadata.tensors() {
            let location = TensorLocation {
                file: self.files.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                start: info.data_offsets.0 as u64,
            };
            self.tensors.insert(name, location);
        }
        self.files.push(WeightFile {
            path,
            file,
            data_start,
        });
        Ok(())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The shape of a tensor, if it exists.
    pub(crate) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|location| &location.shape[..])
    }

    /// Fails where the tensor is missing or has another shape.
    pub(crate) fn check_shape(&self, name: &str, expected: &[usize]) -> Result<(), LoadError> {
        self.locate(name, expected).map(|_| ())
    }

    fn locate(&self, name: &str, expected: &[usize]) -> Result<&TensorLocation, LoadError> {
        let location = self.tensors.get(name).ok_or_else(|| LoadError::MissingTensor {
            path: self.directory.clone(),
            name: name.to_owned(),
        })?;
        if location.shape != expected {
            return Err(LoadError::WrongShape {
                name: name.to_owned(),
                found: location.shape.clone(),
                expected: expected.to_vec(),
            });
        }
        Ok(location)
    }

    /// Reads a tensor of the expected shape as `f32`.
    pub(crate) fn read(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, LoadError> {
        let location = self.locate(name, expected)?;
        let WeightFile {
            path,
            file,
            data_start,
        } = &self.files[location.file];
        let bytes_each = match location.dtype {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::BF16 => 2,
            other => {
                return Err(LoadError::unsupported(
                    format!("tensor '{name}' of type {other:?}"),
                    "F32, F16, BF16",
                ));
            }
        };
        let unreadable = |source| LoadError::Unreadable {
            path: path.clone(),
            source,
        };
        let mut reader = file;
        reader
            .seek(SeekFrom::Start(data_start + location.start))
            .map_err(unreadable)?;
        let count: usize = expected.iter().product();
        let mut values = Vec::with_capacity(count);
        let mut chunk = vec![0; CHUNK.min(count * bytes_each)];
        while values.len() < count {
            let wanted = chunk.len().min((count - values.len()) * bytes_each);
            let part = &mut chunk[..wanted];
            reader.read_exact(part).map_err(unreadable)?;
            extend(&mut values, part, location.dtype);
        }
        if values.iter().any(|value| !value.is_finite()) {
            return Err(LoadError::malformed(
                path,
                format!("tensor '{name}' has values that are not finite"),
            ));
        }
        Ok(values)
    }
}

fn extend(values: &mut Vec<f32>, bytes: &[u8], dtype: Dtype) {
    let pairs = || bytes.as_chunks::<2>().0.iter();
    match dtype {
        Dtype::F16 => {
            let halves: Vec<half::f16> = pairs().map(|b| half::f16::from_le_bytes(*b)).collect();
            let start = values.len();
            values.resize(start + halves.len(), 0.0);
            halves.convert_to_f32_slice(&mut values[start..]);
        }
        Dtype::BF16 => {
            values.extend(pairs().map(|b| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16)));
        }
        _ => values.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b))),
    }
}

/// The names of the weight files, in a stable order.
pub(crate) fn weight_files(directory: &Path) -> Result<Vec<String>, LoadError> {
    if !directory.is_dir() {
        return Err(LoadError::NoDirectory(directory.to_owned()));
    }
    if directory.join(SINGLE_FILE).exists() {
        return Ok(vec![SINGLE_FILE.to_owned()]);
    }
    let index_path = directory.join(INDEX_FILE);
    if let Some(index) = json_optional::<WeightIndex>(&index_path)? {
        return index_parts(&index_path, index);
    }
    for pickled in ["pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin"] {
        if directory.join(pickled).exists() {
            return Err(LoadError::PickledWeights {
                directory: directory.to_owned(),
                file: pickled.to_owned(),
            });
        }
    }
    Err(LoadError::MissingFile {
        directory: directory.to_owned(),
        file: SINGLE_FILE,
    })
}

fn index_parts(path: &Path, index: WeightIndex) -> Result<Vec<String>, LoadError> {
    let mut parts: Vec<String> = index.weight_map.into_values().collect();
    parts.sort();
    parts.dedup();
    match parts.iter().find(|part| !is_plain_part_name(part)) {
        Some(part) => Err(LoadError::malformed(
            path,
            format!("'{part}' is not the name of a safetensors file next to it"),
        )),
        None => Ok(parts),
    }
}

/// An index is untrusted: it may name only files next to it.
fn is_plain_part_name(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\\']) && !name.starts_with('.')
}
