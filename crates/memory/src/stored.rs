//! Entries as records.

use ragstone_core::document::DocumentId;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Expect, Millis, Record, RecordChange};
use ragstone_core::storage::StorageError;
use serde::{Deserialize, Serialize};

use super::entry::{MemoryEntry, MemoryKind};

/// Notes of entries whose embedding was given up, to count them and retry them much later.
pub(super) const FAILED: &str = "memory.failed";

/// A saved entry and the state of its embedding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredEntry {
    pub id: String,
    pub entry: MemoryEntry,
    pub saved_at: Millis,
    pub embedding: EmbeddingState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmbeddingState {
    /// Saved while embedding was not configured.
    None,
    Queued,
    Embedded,
    Failed(String),
}

/// The value of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct EntryRecord {
    pub(super) entry: MemoryEntry,
    pub(super) saved_at: Millis,
    /// The version of the model that made its vector from this very text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) embedded_by: Option<String>,
    /// How often embedding it has failed since it was saved.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) attempts: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl EntryRecord {
    pub(super) fn new(entry: MemoryEntry, saved_at: Millis) -> Self {
        Self {
            entry,
            saved_at,
            embedded_by: None,
            attempts: 0,
            error: None,
        }
    }

    pub(super) fn read(record: &Record) -> Result<Self, StorageError> {
        serde_json::from_slice(&record.value).map_err(|error| StorageError::Failed(Box::new(error)))
    }

    pub(super) fn put(
        &self,
        key: &str,
        run_at: Option<Millis>,
        expect: Expect,
    ) -> Result<RecordChange, StorageError> {
        Ok(RecordChange::Put {
            kind: self.entry.kind().records().to_owned(),
            key: key.to_owned(),
            group: self.entry.session_key().unwrap_or_default().to_owned(),
            value: serde_json::to_vec(self).map_err(|error| StorageError::Failed(Box::new(error)))?,
            run_at,
            expect,
        })
    }

    /// The entry as if it had just been saved.
    pub(super) fn reset(mut self) -> Self {
        self.embedded_by = None;
        self.attempts = 0;
        self.error = None;
        self
    }
}

impl StoredEntry {
    /// With a model, an entry counts as embedded only if this model made its vector.
    pub(super) fn read(record: &Record, model: Option<&ModelIdentity>) -> Result<Self, StorageError> {
        let stored = EntryRecord::read(record)?;
        let embedding = match (record.run_at, &stored.error, &stored.embedded_by, model) {
            (Some(_), ..) => EmbeddingState::Queued,
            (None, Some(error), ..) => EmbeddingState::Failed(error.clone()),
            (None, None, Some(version), Some(model)) if *version != model.version => EmbeddingState::Queued,
            (None, None, Some(_), _) => EmbeddingState::Embedded,
            (None, None, None, _) => EmbeddingState::None,
        };
        Ok(Self {
            id: record.key.clone(),
            entry: stored.entry,
            saved_at: stored.saved_at,
            embedding,
        })
    }
}

/// The key of a note about an entry of any kind.
pub(super) fn note_key(kind: MemoryKind, id: &str) -> String {
    format!("{}/{id}", kind.collection())
}

pub(super) fn parse_note_key(key: &str) -> Option<(MemoryKind, &str)> {
    let (collection, id) = key.split_once('/')?;
    Some((MemoryKind::from_collection(collection)?, id))
}

pub(super) fn forget_note(notes: &str, kind: MemoryKind, id: &str) -> RecordChange {
    RecordChange::Delete {
        kind: notes.to_owned(),
        key: note_key(kind, id),
        expect: Expect::Anything,
    }
}

/// Ids of entries obey the rules of document ids, because vectors have the same ids.
pub(super) fn vector_id(key: &str) -> Result<DocumentId, StorageError> {
    DocumentId::parse(key).map_err(|error| StorageError::Failed(Box::new(error)))
}
