//! The state of a source when it was last ingested completely.
//!
//! A manifest is a shortcut: it is trusted only while the collection still has as many chunks of the
//! source as were stored. The documents themselves decide everything else.

use ragstone_core::collection::CollectionName;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Expect, RecordChange, RecordRange, Records};
use ragstone_core::storage::StorageError;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::chunk::hex;
use super::prepare::InputOptions;

const KIND: &str = "ingested";
const PAGE: usize = 1000;
/// Raised when the same bytes would be split in another way.
const SPLITTING: u32 = 6;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// Absent in what older versions wrote.
    #[serde(default)]
    pub(super) source: String,
    /// Machine and absolute path that it was read from, see [`origin`](super::known::origin); absent
    /// where it was no file. Older versions wrote the path alone.
    #[serde(default)]
    pub(super) origin: Option<String>,
    /// Identifies the bytes and all settings that decide how they are split.
    pub(super) fingerprint: String,
    /// The model that made the vectors.
    pub(super) model: String,
    pub(super) chunks: u64,
    pub(super) documents: u64,
}

impl Manifest {
    /// For a source that is not ingested completely; no fingerprint equals it.
    pub(super) fn begun(source: &str, origin: Option<String>, model: &str) -> Self {
        Self {
            source: source.to_owned(),
            origin,
            fingerprint: String::new(),
            model: model.to_owned(),
            chunks: 0,
            documents: 0,
        }
    }
}

pub(super) fn fingerprint(
    bytes_digest: &[u8],
    kind: &str,
    chunk_tokens: usize,
    options: &InputOptions,
) -> String {
    let mut fingerprint = format!("{}/{kind}/{chunk_tokens}/{SPLITTING}", hex(bytes_digest));
    if options.csv_as_text {
        fingerprint.push_str("/text");
    }
    if !options.metadata.is_empty() {
        let metadata = serde_json::to_vec(&options.metadata).unwrap_or_default();
        fingerprint.push('/');
        fingerprint.push_str(&hex(&Sha256::digest(metadata)));
    }
    fingerprint
}

pub(super) fn model_name(model: &ModelIdentity) -> String {
    format!("{}@{}", model.id, model.version)
}

fn key(collection: &CollectionName, source: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(collection.as_str());
    hash.update([0]);
    hash.update(source);
    hex(&hash.finalize())
}

pub(super) async fn load(
    records: &dyn Records,
    collection: &CollectionName,
    source: &str,
) -> Result<Option<Manifest>, StorageError> {
    let found = records.get(KIND, &[key(collection, source)]).await?;
    Ok(found
        .first()
        .and_then(|record| serde_json::from_slice(&record.value).ok()))
}

/// All manifests of a collection.
pub(super) async fn list(
    records: &dyn Records,
    collection: &CollectionName,
) -> Result<Vec<Manifest>, StorageError> {
    let mut manifests: Vec<Manifest> = Vec::new();
    let mut range = RecordRange {
        group: Some(collection.to_string()),
        limit: PAGE,
        ..RecordRange::default()
    };
    loop {
        let page = records.list(KIND, range.clone()).await?;
        range.after = page.last().map(|record| record.key.clone());
        let read = page
            .iter()
            .filter_map(|record| serde_json::from_slice(&record.value).ok());
        manifests.extend(read);
        if page.len() < PAGE {
            return Ok(manifests);
        }
    }
}

pub(super) fn put(collection: &CollectionName, source: &str, manifest: &Manifest) -> RecordChange {
    RecordChange::Put {
        kind: KIND.to_owned(),
        key: key(collection, source),
        group: collection.to_string(),
        value: serde_json::to_vec(manifest).unwrap_or_default(),
        run_at: None,
        expect: Expect::Anything,
    }
}

pub(super) fn remove(collection: &CollectionName, source: &str) -> RecordChange {
    RecordChange::Delete {
        kind: KIND.to_owned(),
        key: key(collection, source),
        expect: Expect::Anything,
    }
}
