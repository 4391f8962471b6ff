//! The service side of the embedding contract.

use std::collections::HashSet;

use ragstone_core::error::InvalidInput;
use ragstone_core::model::{EmbedInput, ModelError, Role};

use super::{Ledger, LedgerEntry, LedgerKey, LedgerScope};
use ragstone_core::backend::BackendError;
use ragstone_core::models::Models;
use ragstone_core::models::embed_all;

/// Every chunk of an answer repeats the ids of its request.
const MAX_ID_BYTES: usize = 512;

/// A request before validation: every field may be missing.
#[derive(Debug, Clone, Default)]
pub struct EmbeddingRequest {
    pub knowledgebase_id: Option<String>,
    pub chunks: Vec<ChunkRequest>,
    pub model_id: Option<String>,
    /// Answer skipped chunks with their vectors, so that a request whose answer was lost can be
    /// repeated.
    pub include_vectors: bool,
}

#[derive(Debug, Clone, Default)]
pub struct ChunkRequest {
    pub chunk_id: Option<String>,
    pub content: Option<String>,
    pub content_hash: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddedChunk {
    pub embedding_id: String,
    pub chunk_id: String,
    pub knowledgebase_id: String,
    pub content_hash: String,
    pub model_id: String,
    pub model_version: String,
    pub vector: Vec<f32>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct SkippedChunk {
    pub chunk_id: String,
    pub embedding_id: String,
    /// Only if the request asks for it.
    pub vector: Option<Vec<f32>>,
}

/// Every chunk of the request is in `embeddings` or in `skipped`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Embedded {
    pub embeddings: Vec<EmbeddedChunk>,
    pub skipped: Vec<SkippedChunk>,
    /// Indexes of the chunks that were truncated before embedding.
    pub truncated: Vec<usize>,
}

struct LedgerChunk {
    index: usize,
    id: String,
    content: String,
    content_hash: String,
    key: LedgerKey,
}

/// Embeds content that is not in the ledger. Every vector of the answer is stored in the ledger.
pub async fn embed_chunks(
    models: &Models,
    ledger: &Ledger,
    request: EmbeddingRequest,
) -> Result<Embedded, BackendError> {
    let include_vectors = request.include_vectors;
    let knowledge_base = identifier(request.knowledgebase_id, "knowledgebase_id", None)?;
    let mut checked = Vec::with_capacity(request.chunks.len());
    for (index, raw) in request.chunks.into_iter().enumerate() {
        let id = identifier(raw.chunk_id, "chunk_id", Some(index))?;
        let content = required(raw.content, "content", Some(index))?;
        let content_hash = identifier(raw.content_hash, "content_hash", Some(index))?;
        checked.push((id, content, content_hash));
    }
    if checked.is_empty() {
        return Ok(Embedded::default());
    }
    let embedder = match request.model_id.filter(|id| !id.trim().is_empty()) {
        Some(id) => models.embedder(&id)?,
        None => models
            .default_embedder()
            .ok_or_else(|| InvalidInput::new("model id is required"))?,
    };
    let model = embedder.info().identity.clone();
    if !model.has_stated_version() {
        return Err(InvalidInput::new(format!(
            "model version is required: model '{}' has none; give its entry a version",
            model.id
        ))
        .into());
    }
    let scope = LedgerScope::KnowledgeBase(&knowledge_base);
    let chunks: Vec<LedgerChunk> = checked
        .into_iter()
        .enumerate()
        .map(|(index, (id, content, content_hash))| {
            let key = LedgerKey::new(scope, &content_hash, &model);
            LedgerChunk {
                index,
                id,
                content,
                content_hash,
                key,
            }
        })
        .collect();

    let keys: Vec<LedgerKey> = chunks.iter().map(|chunk| chunk.key.clone()).collect();
    let mut known = ledger.find(&keys).await?;
    let unknown: Vec<LedgerKey> = keys.into_iter().filter(|key| !known.contains_key(key)).collect();
    // Held until new content is in the ledger, where waiting requests find it.
    let _turn = ledger.turn(unknown.clone()).await;
    known.extend(ledger.find(&unknown).await?);
    let mut skipped = Vec::new();
    let mut new: Vec<LedgerChunk> = Vec::new();
    let mut keys_of_new = HashSet::new();
    for chunk in chunks {
        if known.contains_key(&chunk.key) || !keys_of_new.insert(chunk.key.clone()) {
            skipped.push(chunk);
        } else {
            new.push(chunk);
        }
    }

    let inputs = new
        .iter()
        .map(|chunk| EmbedInput::Text(chunk.content.clone()))
        .collect();
    let vectors = embed_all(embedder.as_ref(), inputs, Role::Passage).await?;
    if vectors.len() != new.len() {
        return Err(ModelError::Failed("the model gave another number of vectors than texts".into()).into());
    }
    let entries = new
        .iter()
        .zip(&vectors)
        .map(|(chunk, embedding)| {
            let embedding_id = chunk.key.embedding_id();
            (
                chunk.key.clone(),
                LedgerEntry {
                    embedding_id,
                    vector: embedding.vector.clone(),
                },
            )
        })
        .collect();
    let written = ledger.record_in(scope, entries).await?;
    let cut = new
        .iter()
        .zip(&vectors)
        .filter(|(_, embedding)| embedding.truncated);
    let truncated = cut.map(|(chunk, _)| chunk.index).collect();
    let mut embeddings = Vec::with_capacity(new.len());
    for ((chunk, embedding), written) in new.into_iter().zip(vectors).zip(written) {
        // The id follows from the key, so it is also that of the request that came first.
        let embedding_id = chunk.key.embedding_id();
        if !skipped.is_empty() || !written {
            let entry = LedgerEntry {
                embedding_id: embedding_id.clone(),
                vector: embedding.vector.clone(),
            };
            known.insert(chunk.key.clone(), entry);
        }
        if !written {
            skipped.push(chunk);
            continue;
        }
        embeddings.push(EmbeddedChunk {
            embedding_id,
            chunk_id: chunk.id,
            knowledgebase_id: knowledge_base.clone(),
            content_hash: chunk.content_hash,
            model_id: model.id.clone(),
            model_version: model.version.clone(),
            vector: embedding.vector,
        });
    }
    let skipped = skipped
        .into_iter()
        .map(|chunk| {
            let entry = known.get(&chunk.key);
            SkippedChunk {
                chunk_id: chunk.id,
                embedding_id: entry
                    .map_or_else(|| chunk.key.embedding_id(), |entry| entry.embedding_id.clone()),
                vector: entry
                    .filter(|_| include_vectors)
                    .map(|entry| entry.vector.clone()),
            }
        })
        .collect();
    Ok(Embedded {
        embeddings,
        skipped,
        truncated,
    })
}

/// Checks that a field is present and not blank.
fn required(value: Option<String>, name: &str, chunk: Option<usize>) -> Result<String, InvalidInput> {
    value
        .filter(|value| !value.trim().is_empty())
        .ok_or_else(|| wrong(format!("{name} is required"), chunk))
}

/// Checks a required id.
fn identifier(value: Option<String>, name: &str, chunk: Option<usize>) -> Result<String, InvalidInput> {
    let value = required(value, name, chunk)?;
    if value.len() > MAX_ID_BYTES {
        let problem = format!("{name} has {} bytes; it may have {MAX_ID_BYTES}", value.len());
        return Err(wrong(problem, chunk));
    }
    Ok(value)
}

fn wrong(problem: String, chunk: Option<usize>) -> InvalidInput {
    match chunk {
        Some(index) => InvalidInput::new(format!("{problem} (chunk at index {index})")),
        None => InvalidInput::new(problem),
    }
}
