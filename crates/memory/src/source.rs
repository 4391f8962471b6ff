//! The source stores: saving, reading, listing and deleting entries.

use std::sync::Arc;

use ragstone_core::document::DocumentId;
use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, Expect, Millis, Record, RecordRange, Records};
use ragstone_core::storage::{Storage, StorageError};
use uuid::Uuid;

use super::entry::{MemoryEntry, MemoryKind};
use super::removal;
use super::stored::{EntryRecord, FAILED, StoredEntry, forget_note};
use super::{Buffer, reconcile};
use ragstone_core::backend::BackendError;
use ragstone_lease::now;

/// An entry with an old vector becomes due when that vector is deleted, or after this delay if that
/// fails. If it were due at once, a quick worker would embed it twice.
const REMOVAL_DELAY: Millis = 5_000;

/// The entries of an agent. Works with and without embedding.
#[derive(Clone)]
pub struct Memory {
    records: Arc<dyn Records>,
    store: Arc<dyn Storage>,
    embedding: Option<Buffer>,
}

#[derive(Debug, Clone, Default)]
pub struct PageRequest {
    pub session_key: Option<String>,
    /// Only entries after this id.
    pub after: Option<String>,
    pub limit: usize,
}

#[derive(Debug)]
pub struct EntryPage {
    /// In the order of their ids, which for generated ids is the order of saving.
    pub entries: Vec<StoredEntry>,
    /// The `after` of the next page, if there are more.
    pub next: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryStatus {
    pub enabled: bool,
    /// Entries that wait to be embedded, now or after a delay.
    pub queued: u64,
    /// Entries that have a vector of the present model.
    pub embedded: u64,
    /// Entries that were given up for now, each with its error.
    pub failed: u64,
    /// Always 0: the queue is the database, which drops nothing.
    pub dropped: u64,
    /// The error of the last call of the embedder, if it failed.
    pub last_error: Option<String>,
}

impl Memory {
    /// The buffer embeds what is saved.
    pub fn with_embedding(records: Arc<dyn Records>, store: Arc<dyn Storage>, buffer: Buffer) -> Self {
        Self {
            records,
            store,
            embedding: Some(buffer),
        }
    }

    /// Nothing is embedded. Entries that are saved meanwhile are embedded when embedding is on again.
    pub async fn without_embedding(
        records: Arc<dyn Records>,
        store: Arc<dyn Storage>,
    ) -> Result<Self, BackendError> {
        reconcile::without_model(records.as_ref(), store.as_ref()).await?;
        Ok(Self {
            records,
            store,
            embedding: None,
        })
    }

    /// Saves an entry, and replaces the one with the same id. It is durable when this returns. The
    /// vector of a different text is deleted; that of the same entry stays.
    pub async fn save(&self, id: Option<DocumentId>, entry: MemoryEntry) -> Result<DocumentId, BackendError> {
        entry.check()?;
        let kind = entry.kind();
        match id {
            Some(id) => {
                self.replace(&id, entry).await?;
                Ok(self.saved(kind, id))
            }
            None => {
                // Ids of version 7 ascend with time, so entries are listed in the order of saving.
                let id = DocumentId::parse(Uuid::now_v7().to_string())?;
                let saved_at = now();
                let new = EntryRecord::new(entry, saved_at);
                let change = new.put(id.as_str(), self.run_at(saved_at), Expect::Anything)?;
                self.records.apply(vec![change]).await?;
                Ok(self.saved(kind, id))
            }
        }
    }

    async fn replace(&self, id: &DocumentId, entry: MemoryEntry) -> Result<(), StorageError> {
        let kind = entry.kind();
        let key = [id.to_string()];
        let mut removal = None;
        loop {
            let saved_at = now();
            let mut new = EntryRecord::new(entry.clone(), saved_at);
            let (mut run_at, mut expect, mut has_old_vector) = (self.run_at(saved_at), Expect::Absent, false);
            if let Some(record) = self.records.get(kind.records(), &key).await?.first() {
                expect = Expect::Version(record.version);
                // A damaged entry is replaced like any other.
                if let Ok(old) = EntryRecord::read(record)
                    && old.embedded_by.is_some()
                {
                    if old.entry == entry {
                        new.embedded_by = old.embedded_by;
                        run_at = record.run_at;
                    } else {
                        has_old_vector = true;
                        run_at = self.run_at(saved_at + REMOVAL_DELAY);
                    }
                }
            }
            let mut changes = vec![
                new.put(id.as_str(), run_at, expect)?,
                forget_note(FAILED, kind, id.as_str()),
            ];
            changes.extend(has_old_vector.then(|| removal::note(kind, id.as_str())));
            let applied = self.records.apply(changes).await?;
            if let Some(Applied::Done { version }) = applied.get(2) {
                removal = Some(*version);
            }
            // Otherwise another request wrote it in between.
            if matches!(applied.first(), Some(Applied::Done { .. })) {
                break;
            }
        }
        if let Some(note) = removal {
            let (records, store) = (self.records.as_ref(), self.store.as_ref());
            // The entry is saved, and hidden from retrieval until it is embedded. A sweep retries this.
            if let Err(error) = removal::finish(records, store, kind, id.as_str(), note).await {
                tracing::warn!(%id, %error, "the vector of an older text could not be deleted; retrying later");
            }
        }
        Ok(())
    }

    /// When an entry that is saved now becomes due for embedding.
    fn run_at(&self, saved_at: Millis) -> Option<Millis> {
        self.embedding.is_some().then_some(saved_at)
    }

    fn saved(&self, kind: MemoryKind, id: DocumentId) -> DocumentId {
        metrics::counter!("ragstone_memory_saves_total", "kind" => kind.collection()).increment(1);
        if let Some(buffer) = &self.embedding {
            buffer.enqueued(kind);
        }
        id
    }

    pub async fn entry(&self, kind: MemoryKind, id: &str) -> Result<Option<StoredEntry>, BackendError> {
        let found = self.records.get(kind.records(), &[id.to_owned()]).await?;
        Ok(found.first().map(|record| self.read(record)).transpose()?)
    }

    pub async fn entries(&self, kind: MemoryKind, request: PageRequest) -> Result<EntryPage, BackendError> {
        let range = RecordRange {
            group: request.session_key,
            after: request.after,
            // One more shows whether this page is the last.
            limit: request.limit.saturating_add(1),
            descending: false,
        };
        let mut records = self.records.list(kind.records(), range).await?;
        let is_last = records.len() <= request.limit;
        records.truncate(request.limit);
        let next = records
            .last()
            .filter(|_| !is_last)
            .map(|record| record.key.clone());
        Ok(EntryPage {
            entries: records
                .iter()
                .map(|record| self.read(record))
                .collect::<Result<_, _>>()?,
            next,
        })
    }

    /// Deletes an entry and its vector; `false` if there is none.
    pub async fn delete(&self, kind: MemoryKind, id: &str) -> Result<bool, BackendError> {
        Ok(removal::delete(self.records.as_ref(), self.store.as_ref(), kind, id).await?)
    }

    pub async fn status(&self) -> Result<MemoryStatus, BackendError> {
        let model = self.model();
        let (mut total, mut due, mut embedded) = (0, 0, 0);
        for kind in MemoryKind::ALL {
            let counts = self.records.counts(kind.records()).await?;
            total += counts.total;
            due += counts.waiting;
            embedded += match self.store.collection(&kind.vectors()).await {
                Ok(vectors) if model.is_none_or(|model| reconcile::fits(&vectors, model)) => vectors.count,
                Ok(_) | Err(StorageError::CollectionNotFound(_)) => 0,
                Err(error) => return Err(error.into()),
            };
        }
        let failed = self.records.counts(FAILED).await?.total;
        let queued = match model {
            // Entries with a vector of another model wait as well, even if they are not due yet.
            Some(_) => due.max(total.saturating_sub(embedded + failed)),
            None => due,
        };
        Ok(MemoryStatus {
            enabled: self.embedding.is_some(),
            queued,
            embedded,
            failed,
            dropped: 0,
            last_error: self.embedding.as_ref().and_then(Buffer::last_error),
        })
    }

    fn model(&self) -> Option<&ModelIdentity> {
        self.embedding.as_ref().map(Buffer::model)
    }

    fn read(&self, record: &Record) -> Result<StoredEntry, StorageError> {
        StoredEntry::read(record, self.model())
    }

    pub(super) fn store(&self) -> &dyn Storage {
        self.store.as_ref()
    }

    pub(super) async fn resolve(
        &self,
        kind: MemoryKind,
        ids: &[String],
    ) -> Result<Vec<StoredEntry>, StorageError> {
        let records = self.records.get(kind.records(), ids).await?;
        records.iter().map(|record| self.read(record)).collect()
    }
}
