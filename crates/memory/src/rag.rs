//! Retrieval: agent memory and collections, searched at once and merged.

use std::collections::HashMap;
use std::sync::Arc;

use ragstone_core::collection::{CollectionName, shorten};
use ragstone_core::conversation::QueryVariant;
use ragstone_core::document::Metadata;
use ragstone_core::error::InvalidInput;
use ragstone_core::filter::{Filter, Scalar};
use ragstone_core::model::{Embedder, ModelError};
use ragstone_core::search::{SearchHit, SearchMode, SearchQuery};
use ragstone_core::storage::{StorageError, StorageQuery};
use ragstone_search::QueryVectors;
use ragstone_search::fanout::{self, FanoutQuery, Limit, ModeChoice, Target};
use ragstone_search::gateway::NamedBackend;

use super::entry::MemoryKind;
use super::removal;
use super::source::Memory;
use super::stored::{EmbeddingState, StoredEntry};
use ragstone_core::backend::BackendError;

/// The most collections in one retrieval.
const MAX_COLLECTIONS: usize = 64;

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
            collections: MemoryKind::ALL.map(|kind| kind.collection().to_owned()).into(),
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
pub struct RetrievedItem {
    pub collection: String,
    pub id: String,
    pub content: String,
    pub distance: f32,
    pub metadata: Metadata,
}

#[derive(Debug, Default)]
pub struct Retrieved {
    /// By ascending distance.
    pub found: Vec<RetrievedItem>,
    /// Collections that could not be searched, each with the reason.
    pub warnings: Vec<String>,
}

/// Answers questions from memory and collections.
pub struct Rag {
    memory: Memory,
    embedder: Arc<dyn Embedder>,
    /// The backend of this process, for collections.
    local: NamedBackend,
    vectors: QueryVectors,
    defaults: RagDefaults,
}

enum MemoryOrCollection {
    Memory(MemoryKind),
    Collection(CollectionName),
}

/// The parameters of one retrieval, with defaults filled in.
struct RetrieveParams<'a> {
    text: &'a str,
    limit: usize,
    session_key: Option<&'a str>,
    max_distance: Option<f32>,
}

impl RetrieveParams<'_> {
    /// Vectors and entries are written one after the other, and a vector of an earlier text must not
    /// lead to the present one, least of all to that of another session.
    fn may_see(&self, entry: &StoredEntry) -> bool {
        let of_session = match (self.session_key, entry.entry.session_key()) {
            (Some(own), Some(session)) => own == session,
            _ => true,
        };
        of_session && entry.embedding == EmbeddingState::Embedded
    }
}

/// What a search of vectors leads to.
#[derive(Default)]
struct Looked {
    found: Vec<RetrievedItem>,
    /// How many are of a text that the entry no longer has.
    stale: usize,
    /// The ids of those whose entries are gone.
    orphans: Vec<String>,
}

impl Rag {
    pub fn new(
        memory: Memory,
        embedder: Arc<dyn Embedder>,
        local: NamedBackend,
        vectors: QueryVectors,
        defaults: RagDefaults,
    ) -> Self {
        Self {
            memory,
            embedder,
            local,
            vectors,
            defaults,
        }
    }

    /// The embedder of agent memory.
    pub fn embedder(&self) -> &dyn Embedder {
        self.embedder.as_ref()
    }

    /// Searches all collections at once. One that fails is logged and reported, and the others
    /// answer; only a query that cannot be embedded for any of them is an error.
    pub async fn retrieve(&self, retrieval: &Retrieval) -> Result<Retrieved, BackendError> {
        if retrieval.query.trim().is_empty() {
            return Err(InvalidInput::new("'query' must not be empty").into());
        }
        let names = retrieval
            .collections
            .as_deref()
            .unwrap_or(&self.defaults.collections);
        let sources = parse_sources(names)?;
        let max_distance = match retrieval.max_distance {
            None => self.defaults.max_distance,
            Some(far) if far.is_finite() && far >= 0.0 => Some(far).filter(|far| *far > 0.0),
            Some(other) => {
                return Err(
                    InvalidInput::new(format!("'max_distance' must not be negative, it is {other}")).into(),
                );
            }
        };
        let params = RetrieveParams {
            text: &retrieval.query,
            limit: retrieval.limit.unwrap_or(self.defaults.max_results),
            session_key: retrieval.session_key.as_deref(),
            max_distance,
        };
        let mut kinds = Vec::new();
        let mut collections = Vec::new();
        for source in sources {
            match source {
                MemoryOrCollection::Memory(kind) => kinds.push(kind),
                MemoryOrCollection::Collection(name) => collections.push(name),
            }
        }
        let memory = futures::future::join_all(kinds.iter().map(|kind| self.search_memory(*kind, &params)));
        let (memory, collections) = tokio::join!(memory, self.search_collections(collections, &params));
        let mut answers = collections;
        for (kind, answer) in kinds.into_iter().zip(memory) {
            answers.add(kind.collection(), answer);
        }
        answers.finish(params.limit)
    }

    /// Collections are searched like those of `/query`, with the same check of their models.
    async fn search_collections(&self, names: Vec<CollectionName>, params: &RetrieveParams<'_>) -> Answers {
        let mut answers = Answers::default();
        if names.is_empty() {
            return answers;
        }
        let targets = names.iter().map(|name| Target {
            service: self.local.clone(),
            name: name.clone(),
        });
        let query = FanoutQuery {
            wordings: vec![QueryVariant {
                text: params.text.to_owned(),
                keywords: params.text.to_owned(),
                weight: 1.0,
                alone: true,
            }],
            reported: 0,
            targets: targets.collect(),
            options: SearchQuery {
                top_k: params.limit,
                max_distance: params.max_distance,
                ..SearchQuery::default()
            },
            mode: ModeChoice::Given(SearchMode::Dense),
            limit: Limit::AllTogether,
            local: self.local.clone(),
        };
        let response = fanout::search(&query).await;
        answers.searched += response.metadata.iter().flatten().count();
        for warning in response.warnings {
            let of = warning
                .target
                .map(|target| format!("Collection '{}': ", names[target]));
            answers
                .warnings
                .push(format!("{}{}", of.unwrap_or_default(), warning.message));
        }
        for (target, error) in response.failures {
            answers.fail(names[target].as_str(), error);
        }
        answers
            .found
            .extend(response.hits.into_iter().map(|hit| RetrievedItem {
                collection: names[hit.target].to_string(),
                distance: distance(&hit.hit),
                id: hit.hit.document.id.into_string(),
                content: hit.hit.document.text,
                metadata: hit.hit.document.metadata,
            }));
        answers
    }

    async fn search_memory(
        &self,
        kind: MemoryKind,
        params: &RetrieveParams<'_>,
    ) -> Result<Vec<RetrievedItem>, BackendError> {
        let cached = self.vectors.get(self.embedder.as_ref(), params.text).await?;
        let vector = &cached.embedding.vector;
        let filter = match params.session_key.filter(|_| kind.has_session()) {
            Some(session) => Filter::equals("session_key", Scalar::Text(session.into())),
            None => Filter::default(),
        };
        let first = self
            .search_vectors(kind, vector, filter.clone(), params, params.limit)
            .await?;
        if first.orphans.is_empty() && first.stale == 0 {
            return Ok(first.found);
        }
        // Vectors that lead to nothing took the places of others.
        removal::remove_vectors(self.memory.store(), kind, &first.orphans).await?;
        let limit = params.limit.saturating_add(first.stale);
        let mut second = self.search_vectors(kind, vector, filter, params, limit).await?;
        second.found.truncate(params.limit);
        Ok(second.found)
    }

    async fn search_vectors(
        &self,
        kind: MemoryKind,
        vector: &[f32],
        filter: Filter,
        params: &RetrieveParams<'_>,
        limit: usize,
    ) -> Result<Looked, BackendError> {
        let request = StorageQuery {
            limit,
            ..dense(vector, filter, params)
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
                Some(entry) if params.may_see(&entry) => looked.found.push(RetrievedItem {
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
}

/// The answers of all sources, while they are merged.
#[derive(Default)]
struct Answers {
    found: Vec<RetrievedItem>,
    warnings: Vec<String>,
    searched: usize,
    /// Why a query could not be embedded.
    unembedded: Option<ModelError>,
}

impl Answers {
    fn add(&mut self, name: &str, answer: Result<Vec<RetrievedItem>, BackendError>) {
        match answer {
            Ok(found) => {
                self.searched += 1;
                self.found.extend(found);
            }
            Err(error) => {
                tracing::warn!(collection = name, %error, "a collection could not be searched");
                self.fail(name, error);
            }
        }
    }

    fn fail(&mut self, name: &str, error: BackendError) {
        self.warnings
            .push(format!("Collection '{name}' could not be searched: {error}"));
        if let BackendError::Model(error) = error {
            self.unembedded = Some(error);
        }
    }

    fn finish(mut self, limit: usize) -> Result<Retrieved, BackendError> {
        match self.unembedded {
            Some(error) if self.searched == 0 => Err(error.into()),
            _ => {
                self.found.sort_by(|a, b| a.distance.total_cmp(&b.distance));
                self.found.truncate(limit);
                Ok(Retrieved {
                    found: self.found,
                    warnings: self.warnings,
                })
            }
        }
    }
}

/// Whether retrieval can be asked for these collections.
pub fn check_collections(names: &[String]) -> Result<(), InvalidInput> {
    parse_sources(names).map(|_| ())
}

fn parse_sources(names: &[String]) -> Result<Vec<MemoryOrCollection>, InvalidInput> {
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
        .map(|name| match MemoryKind::from_collection(name) {
            Some(kind) => Ok(MemoryOrCollection::Memory(kind)),
            None => CollectionName::parse(name.as_str()).map(MemoryOrCollection::Collection),
        })
        .collect()
}

fn dense(vector: &[f32], filter: Filter, params: &RetrieveParams<'_>) -> StorageQuery {
    StorageQuery {
        vector: Some(vector.to_vec()),
        filter,
        limit: params.limit,
        max_distance: params.max_distance,
        ..StorageQuery::default()
    }
}

fn distance(hit: &SearchHit) -> f32 {
    hit.distance.unwrap_or(f32::MAX)
}
