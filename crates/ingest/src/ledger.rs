//! The embedding ledger: vectors by content and model, so that no content is embedded twice.
//!
//! The key of an entry is the content's hash, the model, the model's version and the entry's owner.
//! Entries are written once. Of two concurrent writers of an entry, one learns that it came second.

mod contract;
mod remote;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, Expect, RecordChange, RecordRange, Records};
use ragstone_core::storage::StorageError;
use sha2::{Digest, Sha256};
use tokio::sync::Notify;

pub use contract::{ChunkRequest, Embedded, EmbeddedChunk, EmbeddingRequest, SkippedChunk, embed_chunks};
pub use remote::{ContractEmbedder, ContractSettings, probe};

use crate::chunk::hex;

const KIND: &str = "embedding";
/// Entries deleted in one transaction.
const PRUNE_BATCH: usize = 1000;

/// The owner of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerScope<'a> {
    /// A knowledge base of the embedding contract.
    KnowledgeBase(&'a str),
    /// Content that an external service embedded for us, by our knowledge base there. Separate from
    /// the knowledge bases of clients, who choose the hashes of their content themselves.
    Service(&'a str),
    /// Ingested content of any collection.
    Ingestion,
}

impl LedgerScope<'_> {
    /// The group of its records. Ingestion has none: it deletes its entries by their keys.
    fn group(self) -> String {
        match self {
            Self::KnowledgeBase(id) => format!("kb:{id}"),
            Self::Service(id) => format!("service:{id}"),
            Self::Ingestion => String::new(),
        }
    }
}

/// The key of an entry.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LedgerKey(String);

impl LedgerKey {
    pub fn new(scope: LedgerScope<'_>, content_hash: &str, model: &ModelIdentity) -> Self {
        let (kind, owner) = match scope {
            LedgerScope::KnowledgeBase(id) => ("kb", id),
            LedgerScope::Service(id) => ("service", id),
            LedgerScope::Ingestion => ("ingestion", ""),
        };
        let mut hash = Sha256::new();
        for part in [kind, owner, content_hash, &model.id, &model.version] {
            // The length keeps the parts apart: ("a", "bc") is not ("ab", "c").
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hex(&hash.finalize()))
    }

    /// The id of the embedding, which is always the same for the same key.
    pub fn embedding_id(&self) -> String {
        format!("emb_{}", &self.0[..32])
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct LedgerEntry {
    pub embedding_id: String,
    pub vector: Vec<f32>,
}

/// Clones share the content in flight: no two of them embed the same content at the same time.
#[derive(Clone)]
pub struct Ledger {
    records: Arc<dyn Records>,
    in_flight: Arc<InFlight>,
}

/// Content that is being embedded.
#[derive(Default)]
struct InFlight {
    keys: Mutex<HashSet<LedgerKey>>,
    released: Notify,
}

impl InFlight {
    fn release(&self, keys: &[LedgerKey]) {
        let mut held = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        for key in keys {
            held.remove(key);
        }
        drop(held);
        self.released.notify_waiters();
    }
}

/// The exclusive right to embed some content, until it is dropped.
pub(crate) struct EmbeddingTurn {
    in_flight: Arc<InFlight>,
    keys: Vec<LedgerKey>,
}

impl EmbeddingTurn {
    pub(crate) fn has(&self, key: &LedgerKey) -> bool {
        self.keys.contains(key)
    }

    /// Gives up the right to all other content.
    pub(crate) fn keep(&mut self, wanted: impl Fn(&LedgerKey) -> bool) {
        let (kept, released): (Vec<_>, Vec<_>) = std::mem::take(&mut self.keys).into_iter().partition(wanted);
        self.keys = kept;
        self.in_flight.release(&released);
    }
}

impl Drop for EmbeddingTurn {
    fn drop(&mut self) {
        self.in_flight.release(&self.keys);
    }
}

impl Ledger {
    pub fn new(records: Arc<dyn Records>) -> Self {
        Self {
            records,
            in_flight: Arc::default(),
        }
    }

    /// Waits until none of this content is in flight, then takes the right to embed it. Others may have
    /// embedded it meanwhile, so look it up again. All keys are taken together, which avoids deadlocks.
    pub(crate) async fn turn(&self, keys: Vec<LedgerKey>) -> EmbeddingTurn {
        loop {
            let released = self.in_flight.released.notified();
            tokio::pin!(released);
            // From here on no release is missed.
            released.as_mut().enable();
            {
                let held = self.in_flight.keys.lock();
                let mut held = held.unwrap_or_else(PoisonError::into_inner);
                if keys.iter().all(|key| !held.contains(key)) {
                    held.extend(keys.iter().cloned());
                    return EmbeddingTurn {
                        in_flight: Arc::clone(&self.in_flight),
                        keys,
                    };
                }
            }
            released.await;
        }
    }

    /// Takes the right to embed the content that is not in flight, without waiting for the rest.
    pub(crate) fn claim(&self, keys: &[LedgerKey]) -> EmbeddingTurn {
        let mut held = self.in_flight.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let free = keys.iter().filter(|key| held.insert((*key).clone()));
        let keys = free.cloned().collect();
        drop(held);
        EmbeddingTurn {
            in_flight: Arc::clone(&self.in_flight),
            keys,
        }
    }

    /// The entries of those keys that have one.
    pub async fn find(&self, keys: &[LedgerKey]) -> Result<HashMap<LedgerKey, LedgerEntry>, StorageError> {
        if keys.is_empty() {
            return Ok(HashMap::new());
        }
        let keys: Vec<String> = keys.iter().map(|key| key.0.clone()).collect();
        let records = self.records.get(KIND, &keys).await?;
        Ok(records
            .into_iter()
            .filter_map(|record| Some((LedgerKey(record.key), decode(&record.value)?)))
            .collect())
    }

    /// Writes new entries of ingestion; see [`Self::record_in`].
    pub async fn record(&self, entries: Vec<(LedgerKey, LedgerEntry)>) -> Result<Vec<bool>, StorageError> {
        self.record_in(LedgerScope::Ingestion, entries).await
    }

    /// Writes new entries, which are durable when this returns. Returns for each whether it was
    /// written; an entry that exists stays as it is.
    pub async fn record_in(
        &self,
        scope: LedgerScope<'_>,
        entries: Vec<(LedgerKey, LedgerEntry)>,
    ) -> Result<Vec<bool>, StorageError> {
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        let group = scope.group();
        let changes = entries
            .into_iter()
            .map(|(key, entry)| RecordChange::Put {
                kind: KIND.to_owned(),
                key: key.0,
                group: group.clone(),
                value: encode(&entry),
                run_at: None,
                expect: Expect::Absent,
            })
            .collect();
        let applied = self.records.apply(changes).await?;
        Ok(applied
            .into_iter()
            .map(|applied| matches!(applied, Applied::Done { .. }))
            .collect())
    }

    /// Deletes all entries of a knowledge base and returns how many there were. Entries of versions
    /// before this one belong to no group and stay.
    pub async fn forget_knowledge_base(&self, id: &str) -> Result<u64, StorageError> {
        let mut deleted = 0;
        loop {
            let range = RecordRange {
                group: Some(LedgerScope::KnowledgeBase(id).group()),
                limit: PRUNE_BATCH,
                ..RecordRange::default()
            };
            let page = self.records.list(KIND, range).await?;
            if page.is_empty() {
                return Ok(deleted);
            }
            deleted += page.len() as u64;
            let keys = page.into_iter().map(|record| LedgerKey(record.key)).collect();
            self.forget(keys).await?;
        }
    }

    /// Deletes those of the entries that exist.
    pub async fn forget(&self, keys: Vec<LedgerKey>) -> Result<(), StorageError> {
        if keys.is_empty() {
            return Ok(());
        }
        let changes = keys
            .into_iter()
            .map(|key| RecordChange::Delete {
                kind: KIND.to_owned(),
                key: key.0,
                expect: Expect::Anything,
            })
            .collect();
        self.records.apply(changes).await.map(|_| ())
    }
}

/// The id's length, the id, then the numbers, all little-endian.
fn encode(entry: &LedgerEntry) -> Vec<u8> {
    let id = entry.embedding_id.as_bytes();
    let length = u16::try_from(id.len()).unwrap_or(u16::MAX);
    let id = &id[..usize::from(length)];
    let mut bytes = Vec::with_capacity(2 + id.len() + entry.vector.len() * 4);
    bytes.extend(length.to_le_bytes());
    bytes.extend(id);
    bytes.extend(entry.vector.iter().flat_map(|x| x.to_le_bytes()));
    bytes
}

/// `None` for damaged bytes: such content is embedded anew.
fn decode(bytes: &[u8]) -> Option<LedgerEntry> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (id, numbers) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    let (numbers, []) = numbers.as_chunks::<4>() else {
        return None;
    };
    let vector: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let embedding_id = String::from_utf8(id.to_vec()).ok()?;
    (!vector.is_empty()).then_some(LedgerEntry { embedding_id, vector })
}
