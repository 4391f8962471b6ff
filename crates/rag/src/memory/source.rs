//! The source stores: saving, reading, listing and deleting entries.

use std::sync::Arc;

use ragstone_core::document::DocumentId;
use ragstone_core::records::{Applied, Expect, Millis, RecordRange, Records};
use ragstone_core::storage::{Storage, StorageError};
use uuid::Uuid;

use super::entry::{Entry, Kind};
use super::removal;
use super::stored::{FAILED, Stored, StoredEntry, forget_note};
use super::{Buffer, now, reconcile};
use crate::error::ServiceError;

/// An entry whose old vector has to go is due when that is done, which makes it so itself; or after
/// this long, should nobody come to it. Due at once, a quick worker would embed it twice.
const REMOVING_MS: Millis = 5_000;

/// What an agent has saved. Works the same with and without embedding; only with it are saves due.
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
    /// What to ask for `after`, where there is more.
    pub next: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryStatus {
    pub enabled: bool,
    /// Entries that wait to be embedded, now or after a pause.
    pub queued: u64,
    /// Entries that have a vector.
    pub embedded: u64,
    /// Entries that were given up for now, each with its error.
    pub failed: u64,
    /// Always 0, because the queue is the database; here for those who watch buffers that drop.
    pub dropped: u64,
    /// Why this process embedded nothing the last time it tried; nothing where it did.
    pub last_error: Option<String>,
}

impl Memory {
    /// Whatever is saved is embedded by this buffer.
    pub fn with_embedding(records: Arc<dyn Records>, store: Arc<dyn Storage>, buffer: Buffer) -> Self {
        Self {
            records,
            store,
            embedding: Some(buffer),
        }
    }

    /// Nothing is embedded and nothing is due; everything else works. What is saved meanwhile is
    /// embedded when embedding is on again.
    pub async fn without_embedding(
        records: Arc<dyn Records>,
        store: Arc<dyn Storage>,
    ) -> Result<Self, ServiceError> {
        reconcile::without_model(records.as_ref(), store.as_ref()).await?;
        Ok(Self {
            records,
            store,
            embedding: None,
        })
    }

    /// Saves an entry, in the place of the one with the same id. Durable when it returns. A vector of
    /// another text goes with that text; that of the very same entry stays.
    pub async fn save(&self, id: Option<DocumentId>, entry: Entry) -> Result<DocumentId, ServiceError> {
        entry.check()?;
        let kind = entry.kind();
        match id {
            Some(id) => {
                self.replace(&id, entry).await?;
                Ok(self.saved(kind, id))
            }
            None => {
                // Ids of version 7 ascend with time, so that listing by id is listing by time.
                let id = DocumentId::parse(Uuid::now_v7().to_string())?;
                let saved_at = now();
                let new = Stored::new(entry, saved_at);
                let change = new.put(id.as_str(), self.due(saved_at), Expect::Anything)?;
                self.records.apply(vec![change]).await?;
                Ok(self.saved(kind, id))
            }
        }
    }

    async fn replace(&self, id: &DocumentId, entry: Entry) -> Result<(), StorageError> {
        let kind = entry.kind();
        let key = [id.to_string()];
        let mut removal = None;
        loop {
            let saved_at = now();
            let mut new = Stored::new(entry.clone(), saved_at);
            let (mut due, mut expect, mut has_old_vector) = (self.due(saved_at), Expect::Absent, false);
            if let Some(record) = self.records.get(kind.records(), &key).await?.first() {
                expect = Expect::Version(record.version);
                // One that cannot be read is replaced like any other.
                if let Ok(old) = Stored::read(record)
                    && old.embedded_by.is_some()
                {
                    if old.entry == entry {
                        new.embedded_by = old.embedded_by;
                        due = record.due;
                    } else {
                        has_old_vector = true;
                        due = self.due(saved_at + REMOVING_MS);
                    }
                }
            }
            let mut changes = vec![
                new.put(id.as_str(), due, expect)?,
                forget_note(FAILED, kind, id.as_str()),
            ];
            changes.extend(has_old_vector.then(|| removal::note(kind, id.as_str())));
            let applied = self.records.apply(changes).await?;
            if let Some(Applied::Done { version }) = applied.get(2) {
                removal = Some(*version);
            }
            // Otherwise somebody else wrote it in between.
            if matches!(applied.first(), Some(Applied::Done { .. })) {
                break;
            }
        }
        if let Some(note) = removal {
            let (records, store) = (self.records.as_ref(), self.store.as_ref());
            // The entry is saved, and hidden from retrieval until it is embedded; a sweep will do as well.
            if let Err(error) = removal::finish(records, store, kind, id.as_str(), note).await {
                tracing::warn!(%id, %error, "the vector of an older text is removed later");
            }
        }
        Ok(())
    }

    /// When an entry that is saved now is due for embedding.
    fn due(&self, saved_at: Millis) -> Option<Millis> {
        self.embedding.is_some().then_some(saved_at)
    }

    fn saved(&self, kind: Kind, id: DocumentId) -> DocumentId {
        metrics::counter!("ragstone_memory_saves_total", "kind" => kind.collection()).increment(1);
        if let Some(buffer) = &self.embedding {
            buffer.enqueued(kind);
        }
        id
    }

    pub async fn entry(&self, kind: Kind, id: &str) -> Result<Option<StoredEntry>, ServiceError> {
        let found = self.records.get(kind.records(), &[id.to_owned()]).await?;
        Ok(found.first().map(StoredEntry::read).transpose()?)
    }

    pub async fn entries(&self, kind: Kind, request: PageRequest) -> Result<EntryPage, ServiceError> {
        let range = RecordRange {
            group: request.session_key,
            after: request.after,
            // One more tells whether this page is the last.
            limit: request.limit.saturating_add(1),
        };
        let mut records = self.records.list(kind.records(), range).await?;
        let is_last = records.len() <= request.limit;
        records.truncate(request.limit);
        let next = records
            .last()
            .filter(|_| !is_last)
            .map(|record| record.key.clone());
        Ok(EntryPage {
            entries: records.iter().map(StoredEntry::read).collect::<Result<_, _>>()?,
            next,
        })
    }

    /// Deletes an entry and its vector; `false` if there is none.
    pub async fn delete(&self, kind: Kind, id: &str) -> Result<bool, ServiceError> {
        Ok(removal::delete(self.records.as_ref(), self.store.as_ref(), kind, id).await?)
    }

    pub async fn status(&self) -> Result<MemoryStatus, ServiceError> {
        let (mut queued, mut embedded) = (0, 0);
        for kind in Kind::ALL {
            queued += self.records.counts(kind.records()).await?.due;
            embedded += match self.store.collection(&kind.vectors()).await {
                Ok(collection) => collection.count,
                Err(StorageError::CollectionNotFound(_)) => 0,
                Err(error) => return Err(error.into()),
            };
        }
        Ok(MemoryStatus {
            enabled: self.embedding.is_some(),
            queued,
            embedded,
            failed: self.records.counts(FAILED).await?.total,
            dropped: 0,
            last_error: self.embedding.as_ref().and_then(Buffer::last_error),
        })
    }

    pub(super) fn store(&self) -> &dyn Storage {
        self.store.as_ref()
    }

    pub(super) async fn resolve(&self, kind: Kind, ids: &[String]) -> Result<Vec<StoredEntry>, StorageError> {
        let records = self.records.get(kind.records(), ids).await?;
        records.iter().map(StoredEntry::read).collect()
    }
}
