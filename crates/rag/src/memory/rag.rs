//! Retrieval: agent memory and collections, searched at once and merged.

use std::collections::HashMap;
use std::sync::Arc;

use moka::future::Cache;
use ragstone_core::collection::{CollectionName, shorten};
use ragstone_core::document::Metadata;
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::{Filter, Scalar};
use ragstone_core::model::{Embedder, ModelError};
use ragstone_core::storage::{SearchHit, StorageError, StorageQuery};

use super::entry::Kind;
use super::removal;
use super::source::Memory;
use super::stored::{EmbeddingState, StoredEntry};
use crate::Service;
use crate::error::ServiceError;
use crate::models::embed_query;

/// The most collections in one retrieval.
const MAX_COLLECTIONS: usize = 64;

/// How much memory the vectors of past queries may take.
#[derive(Debug, Clone, Copy)]
pub struct CacheLimits {
    pub bytes: u64,
}

impl Default for CacheLimits {
    fn default() -> Self {
        Self { bytes: 16 << 20 }
    }
}

/// What counts where a request says nothing.
#[derive(Debug, Clone)]
pub struct RagDefaults {
    pub max_results: usize,
    /// `None` for no limit.
    pub max_distance: Option<f32>,
    pub collections: Vec<String>,
}

impl Default for RagDefaults {
    fn default() -> Self {
        Self {
            max_results: 5,
            max_distance: None,
            collections: Kind::ALL.map(|kind| kind.collection().to_owned()).into(),
        }
    }
}

#[derive(Debug, Clone, Default)]
pub struct Retrieval {
    pub query: String,
    /// Kinds of memory and names of collections; a kind wins over a collection of the same name.
    pub collections: Option<Vec<String>>,
    pub limit: Option<usize>,
    /// Leaves out what belongs to other sessions.
    pub session_key: Option<String>,
    /// Zero is no limit.
    pub max_distance: Option<f32>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Found {
    pub collection: String,
    pub id: String,
    pub content: String,
    pub distance: f32,
    pub metadata: Metadata,
}

#[derive(Debug, Default)]
pub struct Retrieved {
    /// By ascending distance.
    pub found: Vec<Found>,
    /// Collections that could not be searched, each with the reason.
    pub warnings: Vec<String>,
}

/// Answers questions from memory and collections.
pub struct Rag {
    memory: Memory,
    embedder: Arc<dyn Embedder>,
    service: Service,
    defaults: RagDefaults,
    vectors: Cache<(String, String), Arc<[f32]>>,
}

enum Place {
    Memory(Kind),
    Collection(CollectionName),
}

/// What is asked of every collection.
struct Wanted<'a> {
    text: &'a str,
    limit: usize,
    session_key: Option<&'a str>,
    max_distance: Option<f32>,
}

impl Wanted<'_> {
    /// Vectors and entries are written one after the other, and a vector of an earlier text must not
    /// lead to the present one, least of all to that of another session.
    fn may_see(&self, entry: &StoredEntry) -> bool {
        let of_session = match (self.session_key, entry.entry.session_key()) {
            (Some(wanted), Some(session)) => wanted == session,
            _ => true,
        };
        of_session && entry.embedding == EmbeddingState::Embedded
    }
}

/// What a search of vectors leads to.
#[derive(Default)]
struct Looked {
    found: Vec<Found>,
    /// How many are of a text that the entry no longer has.
    stale: usize,
    /// The ids of those whose entries are gone.
    orphans: Vec<String>,
}

impl Rag {
    pub fn new(
        memory: Memory,
        embedder: Arc<dyn Embedder>,
        service: Service,
        defaults: RagDefaults,
        cache: CacheLimits,
    ) -> Self {
        let weigh = |key: &(String, String), vector: &Arc<[f32]>| {
            u32::try_from(key.1.len() + 4 * vector.len() + 128).unwrap_or(u32::MAX)
        };
        let vectors = Cache::builder().weigher(weigh).max_capacity(cache.bytes).build();
        Self {
            memory,
            embedder,
            service,
            defaults,
            vectors,
        }
    }

    /// The embedder of agent memory.
    pub fn embedder(&self) -> &dyn Embedder {
        self.embedder.as_ref()
    }

    /// Searches all collections at once. One that fails is logged and reported, and the others
    /// answer; only a query that cannot be embedded for any of them is an error.
    pub async fn retrieve(&self, retrieval: &Retrieval) -> Result<Retrieved, ServiceError> {
        if retrieval.query.trim().is_empty() {
            return Err(InvalidInput::new("'query' must not be empty").into());
        }
        let names = retrieval
            .collections
            .as_deref()
            .unwrap_or(&self.defaults.collections);
        let places = parse_places(names)?;
        let max_distance = match retrieval.max_distance {
            None => self.defaults.max_distance,
            Some(far) if far.is_finite() && far >= 0.0 => Some(far).filter(|far| *far > 0.0),
            Some(other) => {
                return Err(
                    InvalidInput::new(format!("'max_distance' must not be negative, it is {other}")).into(),
                );
            }
        };
        let wanted = Wanted {
            text: &retrieval.query,
            limit: retrieval.limit.unwrap_or(self.defaults.max_results),
            session_key: retrieval.session_key.as_deref(),
            max_distance,
        };
        let searches = places.iter().map(|place| self.search(place, &wanted));
        let answers = futures::future::join_all(searches).await;
        merge(names, answers, wanted.limit)
    }

    async fn search(&self, place: &Place, wanted: &Wanted<'_>) -> Result<Vec<Found>, ServiceError> {
        match place {
            Place::Memory(kind) => self.search_memory(*kind, wanted).await,
            Place::Collection(name) => self.search_collection(name, wanted).await,
        }
    }

    async fn search_memory(&self, kind: Kind, wanted: &Wanted<'_>) -> Result<Vec<Found>, ServiceError> {
        let vector = self.query_vector(&self.embedder, wanted.text).await?;
        let filter = match wanted.session_key.filter(|_| kind.has_session()) {
            Some(session) => Filter::equals("session_key", Scalar::Text(session.into())),
            None => Filter::default(),
        };
        let first = self
            .search_vectors(kind, &vector, filter.clone(), wanted, wanted.limit)
            .await?;
        if first.orphans.is_empty() && first.stale == 0 {
            return Ok(first.found);
        }
        // Vectors that lead to nothing took the places of others.
        removal::remove_vectors(self.memory.store(), kind, &first.orphans).await?;
        let limit = wanted.limit.saturating_add(first.stale);
        let mut second = self.search_vectors(kind, &vector, filter, wanted, limit).await?;
        second.found.truncate(wanted.limit);
        Ok(second.found)
    }

    async fn search_vectors(
        &self,
        kind: Kind,
        vector: &[f32],
        filter: Filter,
        wanted: &Wanted<'_>,
        limit: usize,
    ) -> Result<Looked, ServiceError> {
        let request = StorageQuery {
            limit,
            ..dense(vector, filter, wanted)
        };
        let hits = match self.memory.store().search(&kind.vectors(), request).await {
            Ok(outcome) => outcome.hits,
            // Nothing of this kind was embedded yet.
            Err(StorageError::CollectionNotFound(_)) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let ids: Vec<String> = hits.iter().map(|hit| hit.document.id.to_string()).collect();
        let entries = self.memory.resolve(kind, &ids).await?;
        let mut entries: HashMap<String, StoredEntry> = entries
            .into_iter()
            .map(|entry| (entry.id.clone(), entry))
            .collect();
        let mut looked = Looked::default();
        for (id, hit) in ids.into_iter().zip(hits) {
            match entries.remove(&id) {
                Some(entry) if wanted.may_see(&entry) => looked.found.push(Found {
                    collection: kind.collection().to_owned(),
                    id,
                    content: entry.entry.content(),
                    distance: distance(&hit),
                    metadata: entry.entry.metadata(),
                }),
                Some(_) => looked.stale += 1,
                None => looked.orphans.push(id),
            }
        }
        Ok(looked)
    }

    async fn search_collection(
        &self,
        name: &CollectionName,
        wanted: &Wanted<'_>,
    ) -> Result<Vec<Found>, ServiceError> {
        let collection = self.service.store.collection(name).await?;
        let embedder = self.service.models.for_collection(&collection)?;
        let vector = self.query_vector(embedder, wanted.text).await?;
        let request = dense(&vector, Filter::default(), wanted);
        let hits = self.service.store.search(name, request).await?.hits;
        Ok(hits
            .into_iter()
            .map(|hit| Found {
                collection: name.to_string(),
                distance: distance(&hit),
                id: hit.document.id.into_string(),
                content: hit.document.text,
                metadata: hit.document.metadata,
            })
            .collect())
    }

    /// The query's vector, made once however many collections and requests want it at a time.
    async fn query_vector(
        &self,
        embedder: &Arc<dyn Embedder>,
        text: &str,
    ) -> Result<Arc<[f32]>, ServiceError> {
        let identity = &embedder.info().identity;
        let key = (format!("{}:{}", identity.id, identity.version), text.to_owned());
        let made = async {
            let vector = embed_query(embedder.as_ref(), text).await?.vector;
            Ok::<Arc<[f32]>, ServiceError>(vector.into())
        };
        self.vectors
            .try_get_with(key, made)
            .await
            .map_err(|error| ServiceError::Model(copy_of(&error)))
    }
}

/// Everybody who waited for the same vector gets the reason of its own.
fn copy_of(error: &ServiceError) -> ModelError {
    match error {
        ServiceError::Model(ModelError::Overloaded { retry_after }) => ModelError::Overloaded {
            retry_after: *retry_after,
        },
        ServiceError::Model(ModelError::InvalidInput(message)) => ModelError::InvalidInput(message.clone()),
        ServiceError::Model(ModelError::Unavailable(message)) => ModelError::Unavailable(message.clone()),
        ServiceError::Model(ModelError::Remote(failure)) => ModelError::Remote(failure.clone()),
        other => ModelError::Failed(other.to_string()),
    }
}

/// Whether retrieval can be asked for these collections.
pub fn check_collections(names: &[String]) -> Result<(), InvalidInput> {
    parse_places(names).map(|_| ())
}

fn parse_places(names: &[String]) -> Result<Vec<Place>, InvalidInput> {
    if names.is_empty() || names.len() > MAX_COLLECTIONS {
        return Err(InvalidInput::new(format!(
            "'collections' must name 1 to {MAX_COLLECTIONS} collections, not {}",
            names.len()
        )));
    }
    let mut seen = std::collections::HashSet::new();
    if let Some(twice) = names.iter().find(|name| !seen.insert(name.as_str())) {
        return Err(InvalidInput::new(format!(
            "'collections' names '{}' twice",
            shorten(twice)
        )));
    }
    names
        .iter()
        .map(|name| match Kind::from_collection(name) {
            Some(kind) => Ok(Place::Memory(kind)),
            None => CollectionName::parse(name.as_str()).map(Place::Collection),
        })
        .collect()
}

fn dense(vector: &[f32], filter: Filter, wanted: &Wanted<'_>) -> StorageQuery {
    StorageQuery {
        vector: Some(vector.to_vec()),
        filter,
        limit: wanted.limit,
        max_distance: wanted.max_distance,
        ..StorageQuery::default()
    }
}

fn distance(hit: &SearchHit) -> f32 {
    hit.distance.unwrap_or(f32::MAX)
}

fn merge(
    names: &[String],
    answers: Vec<Result<Vec<Found>, ServiceError>>,
    limit: usize,
) -> Result<Retrieved, ServiceError> {
    let mut merged = Retrieved::default();
    let mut unembedded = None;
    let mut searched = 0;
    for (name, answer) in names.iter().zip(answers) {
        match answer {
            Ok(found) => {
                searched += 1;
                merged.found.extend(found);
            }
            Err(error) => {
                tracing::warn!(collection = %name, %error, "a collection could not be searched");
                merged
                    .warnings
                    .push(format!("Collection '{name}' could not be searched: {error}"));
                if let ServiceError::Model(error) = error {
                    unembedded = Some(error);
                }
            }
        }
    }
    match unembedded {
        Some(error) if searched == 0 => Err(error.into()),
        _ => {
            merged.found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
            merged.found.truncate(limit);
            Ok(merged)
        }
    }
}
