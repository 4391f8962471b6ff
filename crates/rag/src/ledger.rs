//! The ledger: which content was embedded by which model, and the vector it got.
//!
//! An entry is found by what decides a vector: the content's hash, the model and its version; and by
//! whom it belongs to. Entries are written once. Of two that write the same entry at the same
//! time, one is told that it came second.

mod contract;
mod remote;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};

use ragstone_core::model::ModelIdentity;
use ragstone_core::records::{Applied, Expect, RecordChange, Records};
use ragstone_core::storage::StorageError;
use sha2::{Digest, Sha256};
use tokio::sync::Notify;

pub use contract::{ChunkRequest, Embedded, EmbeddedChunk, EmbeddingRequest, SkippedChunk, embed_chunks};
pub use remote::{ContractEmbedder, ContractSettings, probe};

use crate::ingest::chunk::hex;

const KIND: &str = "embedding";

/// Whom an entry belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope<'a> {
    /// A knowledge base of the embedding contract.
    KnowledgeBase(&'a str),
    /// What an external service embedded for us, by the knowledge base it has us under. Kept apart
    /// from what clients bring, whose hashes are their own word for what the content is.
    Service(&'a str),
    /// What was ingested, whatever the collection.
    Ingestion,
}

/// What an entry is found by.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LedgerKey(String);

impl LedgerKey {
    pub fn new(scope: Scope<'_>, content_hash: &str, model: &ModelIdentity) -> Self {
        let (kind, owner) = match scope {
            Scope::KnowledgeBase(id) => ("kb", id),
            Scope::Service(id) => ("service", id),
            Scope::Ingestion => ("ingestion", ""),
        };
        let mut hash = Sha256::new();
        for part in [kind, owner, content_hash, &model.id, &model.version] {
            // The length keeps the parts apart: ("a", "bc") is not ("ab", "c").
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hex(&hash.finalize()))
    }

    /// A name for the embedding that is the same wherever and whenever it is made.
    pub fn embedding_id(&self) -> String {
        format!("emb_{}", &self.0[..32])
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub embedding_id: String,
    pub vector: Vec<f32>,
}

/// Clones share what is being embedded: content that one of them has taken is left to it by the others.
#[derive(Clone)]
pub struct Ledger {
    records: Arc<dyn Records>,
    in_flight: Arc<InFlight>,
}

/// Content that somebody is having embedded.
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

/// The right to have some content embedded, until it is dropped.
pub(crate) struct Turn {
    in_flight: Arc<InFlight>,
    keys: Vec<LedgerKey>,
}

impl Turn {
    pub(crate) fn has(&self, key: &LedgerKey) -> bool {
        self.keys.contains(key)
    }

    /// Leaves the others to whoever wants them.
    pub(crate) fn keep(&mut self, wanted: impl Fn(&LedgerKey) -> bool) {
        let (kept, released): (Vec<_>, Vec<_>) = std::mem::take(&mut self.keys).into_iter().partition(wanted);
        self.keys = kept;
        self.in_flight.release(&released);
    }
}

impl Drop for Turn {
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

    /// Waits until nobody has any of this content embedded, then keeps others from doing so. What
    /// they had embedded meanwhile is found in the ledger, so it is to be looked for again. All or
    /// none are taken, so that no two wait for each other.
    pub(crate) async fn turn(&self, keys: Vec<LedgerKey>) -> Turn {
        loop {
            let released = self.in_flight.released.notified();
            tokio::pin!(released);
            // From here on, whatever is released is heard of.
            released.as_mut().enable();
            {
                let held = self.in_flight.keys.lock();
                let mut held = held.unwrap_or_else(PoisonError::into_inner);
                if keys.iter().all(|key| !held.contains(key)) {
                    held.extend(keys.iter().cloned());
                    return Turn {
                        in_flight: Arc::clone(&self.in_flight),
                        keys,
                    };
                }
            }
            released.await;
        }
    }

    /// Takes those of the keys whose content nobody has embedded, without waiting for the others.
    pub(crate) fn claim(&self, keys: &[LedgerKey]) -> Turn {
        let mut held = self.in_flight.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let free = keys.iter().filter(|key| held.insert((*key).clone()));
        let keys = free.cloned().collect();
        drop(held);
        Turn {
            in_flight: Arc::clone(&self.in_flight),
            keys,
        }
    }

    /// Those of the keys that have an entry.
    pub async fn find(&self, keys: &[LedgerKey]) -> Result<HashMap<LedgerKey, Entry>, StorageError> {
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

    /// Writes entries that are not there yet; durable when it returns. For each, in order: whether
    /// it was written, and not there already.
    pub async fn record(&self, entries: Vec<(LedgerKey, Entry)>) -> Result<Vec<bool>, StorageError> {
        if entries.is_empty() {
            return Ok(Vec::new());
        }
        let changes = entries
            .into_iter()
            .map(|(key, entry)| RecordChange::Put {
                kind: KIND.to_owned(),
                key: key.0,
                group: String::new(),
                value: encode(&entry),
                due: None,
                expect: Expect::Absent,
            })
            .collect();
        let applied = self.records.apply(changes).await?;
        Ok(applied
            .into_iter()
            .map(|applied| matches!(applied, Applied::Done { .. }))
            .collect())
    }

    /// Removes entries, where they are there.
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
fn encode(entry: &Entry) -> Vec<u8> {
    let id = entry.embedding_id.as_bytes();
    let length = u16::try_from(id.len()).unwrap_or(u16::MAX);
    let id = &id[..usize::from(length)];
    let mut bytes = Vec::with_capacity(2 + id.len() + entry.vector.len() * 4);
    bytes.extend(length.to_le_bytes());
    bytes.extend(id);
    bytes.extend(entry.vector.iter().flat_map(|x| x.to_le_bytes()));
    bytes
}

/// `None` for bytes that are no entry: such content is embedded again.
fn decode(bytes: &[u8]) -> Option<Entry> {
    let (length, rest) = bytes.split_first_chunk::<2>()?;
    let (id, numbers) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    let (numbers, []) = numbers.as_chunks::<4>() else {
        return None;
    };
    let vector: Vec<f32> = numbers.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let embedding_id = String::from_utf8(id.to_vec()).ok()?;
    (!vector.is_empty()).then_some(Entry { embedding_id, vector })
}
