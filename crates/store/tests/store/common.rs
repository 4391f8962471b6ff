//! What the tests of the store share.
#![allow(dead_code)]

use ragstone_core::store::{DocumentBatch, Page, StoredDocument};
use ragstone_core::{CollectionName, Document, DocumentId, Metadata};
use ragstone_store::{SqliteStore, StoreOptions};
use serde_json::Value;

pub(crate) fn open(directory: &std::path::Path) -> SqliteStore {
    SqliteStore::open(directory, StoreOptions::default()).unwrap()
}

pub(crate) fn name(name: &str) -> CollectionName {
    CollectionName::parse(name).unwrap()
}

pub(crate) fn id(id: &str) -> DocumentId {
    DocumentId::parse(id).unwrap()
}

pub(crate) fn metadata(value: Value) -> Metadata {
    match value {
        Value::Object(metadata) => metadata,
        other => panic!("metadata must be an object, not {other}"),
    }
}

pub(crate) fn stored(document_id: &str, text: &str, fields: Value, vector: &[f32]) -> StoredDocument {
    StoredDocument {
        document: Document {
            id: id(document_id),
            text: text.into(),
            metadata: metadata(fields),
        },
        vector: vector.to_vec(),
    }
}

pub(crate) fn batch(documents: Vec<StoredDocument>) -> DocumentBatch {
    DocumentBatch {
        documents,
        model: None,
    }
}

pub(crate) const ALL: Page = Page {
    limit: usize::MAX,
    offset: 0,
};

/// Numbers without pattern that are the same in every run.
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Between -1 and 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    pub(crate) fn vector(&mut self, dimensions: usize) -> Vec<f32> {
        (0..dimensions).map(|_| self.float()).collect()
    }
}
