//! Bodies of our own HTTP API, as a client writes and reads them.

use std::collections::BTreeMap;

use ragstone_core::document_line::DocumentLine;
use ragstone_core::fusion::Rank;
use ragstone_core::{Document, Metadata};
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Serialize)]
pub(super) struct NewCollection<'a> {
    pub(super) name: &'a str,
    pub(super) metadata: &'a Metadata,
}

#[derive(Deserialize)]
pub(super) struct CollectionBody {
    pub(super) name: String,
    pub(super) count: u64,
    #[serde(default)]
    pub(super) metadata: Option<Metadata>,
}

#[derive(Deserialize)]
pub(super) struct CollectionList {
    pub(super) collections: Vec<CollectionBody>,
}

#[derive(Serialize, Deserialize)]
pub(super) struct MetadataBody {
    #[serde(default)]
    pub(super) metadata: Metadata,
}

/// A document with its vector, where the client has it.
#[derive(Serialize)]
pub(super) struct NewDocumentBody<'a> {
    pub(super) id: &'a str,
    pub(super) text: &'a str,
    pub(super) metadata: &'a Metadata,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) embedding: Option<&'a [f32]>,
}

#[derive(Serialize)]
pub(super) struct NewDocuments<'a> {
    pub(super) documents: Vec<NewDocumentBody<'a>>,
}

#[derive(Deserialize)]
pub(super) struct AddedBody {
    pub(super) ids: Vec<String>,
    #[serde(default)]
    pub(super) truncated: Vec<String>,
}

#[derive(Deserialize)]
pub(super) struct DocumentBody {
    pub(super) id: String,
    #[serde(default)]
    pub(super) text: Option<String>,
    #[serde(default)]
    pub(super) metadata: Option<Metadata>,
}

#[derive(Deserialize)]
pub(super) struct DocumentList {
    pub(super) documents: Vec<DocumentBody>,
    pub(super) total: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum DeletionBody<'a> {
    Ids {
        ids: Vec<&'a str>,
    },
    Matching {
        #[serde(rename = "where")]
        filter: Value,
    },
}

#[derive(Deserialize)]
pub(super) struct CountBody {
    pub(super) count: u64,
}

#[derive(Deserialize)]
pub(super) struct EmptiedBody {
    pub(super) count_deleted: u64,
}

#[derive(Deserialize)]
pub(super) struct ValuesBody {
    pub(super) values: Vec<Value>,
}

#[derive(Deserialize)]
pub(super) struct ExportBody {
    pub(super) documents: Vec<DocumentLine<'static>>,
    pub(super) last: Option<i64>,
    pub(super) more: bool,
}

#[derive(Serialize)]
pub(super) struct ImportBody<'a> {
    pub(super) documents: Vec<DocumentLine<'a>>,
}

/// A query, for one collection by its path, or for the collections that it names.
#[derive(Serialize)]
pub(super) struct QueryBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) collection: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) collections: Option<Vec<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) per_collection: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) query: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) query_embedding: Option<&'a [f32]>,
    pub(super) top_k: usize,
    #[serde(rename = "where", skip_serializing_if = "Option::is_none")]
    pub(super) filter: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ids: Option<Vec<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_distance: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mode: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) weights: Option<WeightsBody>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rerank: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) expand: Option<ExpandBody<'a>>,
    /// Ranks and timings are part of every [`ragstone_core::search::SearchResponse`].
    pub(super) explain: bool,
}

#[derive(Serialize)]
pub(super) struct WeightsBody {
    pub(super) dense: f64,
    pub(super) keyword: f64,
}

#[derive(Serialize)]
pub(super) struct ExpandBody<'a> {
    pub(super) field: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_chars: Option<usize>,
}

#[derive(Deserialize)]
pub(super) struct AnswerBody {
    pub(super) results: Vec<HitBody>,
    /// Of several collections: the metadata of each, by name.
    #[serde(default)]
    pub(super) collection_metadata: Option<Metadata>,
    #[serde(default)]
    pub(super) warnings: Vec<String>,
    #[serde(default)]
    pub(super) failures: Vec<FailureBody>,
    #[serde(default)]
    pub(super) reranked: Option<bool>,
    #[serde(default)]
    pub(super) timings_ms: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
pub(super) struct FailureBody {
    pub(super) collection: String,
}

#[derive(Deserialize)]
pub(super) struct HitBody {
    /// Absent in the answers of servers of the original make.
    #[serde(default)]
    pub(super) id: Option<String>,
    #[serde(default)]
    pub(super) text: Option<String>,
    #[serde(default)]
    pub(super) metadata: Option<Metadata>,
    #[serde(default)]
    pub(super) collection: Option<String>,
    #[serde(default)]
    pub(super) distance: Option<f32>,
    #[serde(default)]
    pub(super) score: Option<f32>,
    #[serde(default)]
    pub(super) keyword_score: Option<f64>,
    #[serde(default)]
    pub(super) rerank_score: Option<f32>,
    #[serde(default)]
    pub(super) original_rank: Option<usize>,
    #[serde(default)]
    pub(super) siblings: Option<Vec<DocumentBody>>,
    #[serde(default)]
    pub(super) explain: Option<ExplainBody>,
}

#[derive(Deserialize)]
pub(super) struct ExplainBody {
    #[serde(default)]
    pub(super) dense: Option<RankBody>,
    #[serde(default)]
    pub(super) keyword: Option<RankBody>,
    #[serde(default)]
    pub(super) fused: Option<RankBody>,
}

#[derive(Deserialize)]
pub(super) struct RankBody {
    rank: usize,
    score: f64,
}

impl From<RankBody> for Rank {
    fn from(body: RankBody) -> Self {
        Self {
            rank: body.rank,
            score: body.score,
        }
    }
}

#[derive(Serialize)]
pub(super) struct RerankBody<'a> {
    pub(super) query: &'a str,
    pub(super) documents: Vec<RerankDocument<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) top_k: Option<usize>,
}

#[derive(Serialize)]
pub(super) struct RerankDocument<'a> {
    pub(super) id: String,
    pub(super) text: &'a str,
}

#[derive(Deserialize)]
pub(super) struct RerankedBody {
    pub(super) reranked: Vec<RerankedEntry>,
}

#[derive(Deserialize)]
pub(super) struct RerankedEntry {
    pub(super) id: String,
    pub(super) score: f32,
}

impl<'a> NewDocumentBody<'a> {
    pub(super) fn new(document: &'a Document, embedding: Option<&'a [f32]>) -> Self {
        Self {
            id: document.id.as_str(),
            text: &document.text,
            metadata: &document.metadata,
            embedding,
        }
    }
}
