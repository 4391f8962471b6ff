//! Search, as everything between the HTTP edge and a backend speaks of it: one query type, one hit
//! type, one response type.

use std::sync::Arc;
use std::time::Duration;

use crate::collection::shorten;
use crate::document::{Document, DocumentId, Metadata, check_vector};
use crate::error::InvalidInput;
use crate::filter::Filter;
use crate::fusion::{FusionWeights, HitRanks};
use crate::model::ModelIdentity;
use crate::siblings::Expand;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SearchMode {
    /// By meaning: cosine distance between vectors.
    #[default]
    Dense,
    /// By words: BM25.
    Keyword,
    /// Both rankings, fused.
    Hybrid,
}

impl SearchMode {
    pub const ALL: [Self; 3] = [Self::Dense, Self::Keyword, Self::Hybrid];

    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Keyword => "keyword",
            Self::Hybrid => "hybrid",
        }
    }

    pub fn parse(name: &str) -> Result<Self, InvalidInput> {
        Self::ALL
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| {
                InvalidInput::new(format!(
                    "unknown mode '{}': it must be 'dense', 'keyword' or 'hybrid'",
                    shorten(name)
                ))
            })
    }

    pub fn uses_vectors(self) -> bool {
        self != Self::Keyword
    }

    pub fn uses_words(self) -> bool {
        self != Self::Dense
    }
}

/// A query for one collection.
#[derive(Debug, Clone)]
pub struct SearchQuery {
    /// The text to search for. The collection's model embeds it unless `vector` is given.
    pub text: Option<String>,
    /// Words to rank by instead of those of `text`.
    pub keywords: Option<String>,
    pub vector: Option<QueryVector>,
    pub top_k: usize,
    pub filter: Filter,
    /// Only these documents; unknown ids are ignored.
    pub ids: Option<Vec<DocumentId>>,
    /// Leave out hits farther than this.
    pub max_distance: Option<f32>,
    pub mode: SearchMode,
    pub weights: FusionWeights,
    /// Reorder the hits by a cross-encoder.
    pub rerank: bool,
    /// Attach the documents that share a metadata field with a hit.
    pub expand: Option<Expand>,
}

impl Default for SearchQuery {
    fn default() -> Self {
        Self {
            text: None,
            keywords: None,
            vector: None,
            top_k: 10,
            filter: Filter::default(),
            ids: None,
            max_distance: None,
            mode: SearchMode::default(),
            weights: FusionWeights::default(),
            rerank: false,
            expand: None,
        }
    }
}

/// A query's vector, and the model that made it where this process did.
#[derive(Debug, Clone, PartialEq)]
pub struct QueryVector {
    pub values: Vec<f32>,
    pub model: Option<ModelIdentity>,
}

impl QueryVector {
    /// A vector that a client sent.
    pub fn from_client(values: Vec<f32>) -> Self {
        Self { values, model: None }
    }
}

impl SearchQuery {
    /// Rejects a query that is incomplete or contradictory for its mode, before anything is computed.
    pub fn validate(self) -> Result<Self, InvalidInput> {
        let text = self.text.as_deref().map(str::trim);
        if text.is_some_and(str::is_empty) {
            return Err(InvalidInput::new("'query' must not be empty"));
        }
        if text.is_none() && self.vector.is_none() {
            return Err(InvalidInput::new("'query' or 'query_embedding' is required"));
        }
        if text.is_none() && self.mode.uses_words() {
            return Err(InvalidInput::new(format!(
                "mode '{}' needs a 'query' text",
                self.mode.name()
            )));
        }
        if text.is_none() && self.rerank {
            return Err(InvalidInput::new("'rerank' needs a 'query' text"));
        }
        if self.mode == SearchMode::Keyword && self.max_distance.is_some() {
            return Err(InvalidInput::new(
                "'max_distance' needs a mode with vectors: 'dense' or 'hybrid'",
            ));
        }
        if let Some(vector) = &self.vector {
            check_vector(&vector.values).map_err(|e| InvalidInput::new(format!("'query_embedding': {e}")))?;
        }
        Ok(self)
    }

    /// The words that keyword ranking looks for.
    pub fn words(&self) -> Option<&str> {
        self.keywords.as_deref().or(self.text.as_deref())
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct SearchHit {
    pub document: Document,
    /// Cosine distance, 0 to 2; `None` where no vector was compared.
    pub distance: Option<f32>,
    pub ranks: HitRanks,
    pub rerank: Option<RerankedFrom>,
    /// In document order, the hit itself included; `None` where none were asked for, or where the hit
    /// lacks the field.
    pub siblings: Option<Vec<Arc<Document>>>,
}

impl SearchHit {
    /// 1 for the same direction, 0 for the opposite one; `None` where there is no distance.
    pub fn score(&self) -> Option<f32> {
        self.distance.map(|distance| 1.0 - distance / 2.0)
    }
}

/// The cross-encoder's score of a hit, and its rank before reranking, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RerankedFrom {
    pub score: f32,
    pub original_rank: usize,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct SearchResponse {
    /// Best first.
    pub hits: Vec<SearchHit>,
    pub collection_metadata: Metadata,
    /// Requested steps that could not be done, where the hits are still correct without them.
    pub warnings: Vec<String>,
    pub reranked: bool,
    pub timings: Vec<StageTime>,
}

impl SearchResponse {
    /// Adds a warning unless it is there already.
    pub fn warn(&mut self, warning: String) {
        if !self.warnings.contains(&warning) {
            self.warnings.push(warning);
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageTime {
    pub stage: std::borrow::Cow<'static, str>,
    pub took: Duration,
}

impl StageTime {
    pub fn new(stage: &'static str, took: Duration) -> Self {
        Self {
            stage: stage.into(),
            took,
        }
    }
}
