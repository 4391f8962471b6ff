//! A search of this process, between the gateway's terms and its own.

use std::sync::Arc;

use ragstone_core::document::{Document, Metadata};
use ragstone_core::error::InvalidInput;
use ragstone_core::fusion::{FusionWeights, Rank};
use ragstone_core::provider::{ProviderAnswer, ProviderHit, ProviderQuery};
use serde::Deserialize;
use serde_json::{Value, json};

use super::as_written;
use crate::search::{Answer, Expand, Hit, Mode, Query, TopK};

/// What may stand in the options of a query, besides what is ignored.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Options {
    mode: Option<String>,
    weights: Option<Weights>,
    rerank: Option<bool>,
    expand: Option<ExpandOption>,
    explain: Option<bool>,
}

#[derive(Deserialize)]
struct Weights {
    dense: Option<f64>,
    keyword: Option<f64>,
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "'expand' is the name of a metadata field, or an object with 'field' and, optionally, 'max_chars'"
)]
enum ExpandOption {
    Field(String),
    Budget { field: String, max_chars: Option<usize> },
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Explain {
    No,
    Yes,
}

pub(super) fn read(query: ProviderQuery) -> Result<(Query, Explain), InvalidInput> {
    let options: Options = serde_json::from_value(Value::Object(query.options))
        .map_err(|error| InvalidInput::new(format!("The options of the query are wrong: {error}")))?;
    let weights = options
        .weights
        .map_or_else(FusionWeights::default, |weights| FusionWeights {
            dense: weights.dense.unwrap_or(1.0),
            keyword: weights.keyword.unwrap_or(1.0),
        });
    let expand = options.expand.map(|expand| match expand {
        ExpandOption::Field(field) => Expand {
            field,
            max_chars: None,
        },
        ExpandOption::Budget { field, max_chars } => Expand { field, max_chars },
    });
    let checked = Query {
        text: query.text,
        vector: query.vector,
        top_k: query.top_k,
        top_k_of: TopK::default(),
        filter: query.filter,
        among: query.among,
        max_distance: query.max_distance,
        mode: options.mode.as_deref().map_or(Ok(Mode::Dense), Mode::parse)?,
        weights,
        rerank: options.rerank.unwrap_or(false),
        expand,
    }
    .check()?;
    let explain = if options.explain.unwrap_or(false) {
        Explain::Yes
    } else {
        Explain::No
    };
    Ok((checked, explain))
}

pub(super) fn answer(answer: Answer, query: &Query, explain: Explain) -> ProviderAnswer {
    let mut extra = Metadata::new();
    if query.rerank {
        extra.insert("reranked".into(), answer.reranked.into());
    }
    if explain == Explain::Yes {
        let millis = |time: std::time::Duration| Value::from((time.as_secs_f64() * 1e6).round() / 1e3);
        let timings: Metadata = answer
            .stages
            .iter()
            .map(|time| (time.stage.to_owned(), millis(time.took)))
            .collect();
        extra.insert("timings_ms".into(), timings.into());
    }
    let metadata = answer
        .collections
        .into_iter()
        .next()
        .map(|(_, metadata)| metadata);
    ProviderAnswer {
        hits: answer
            .hits
            .into_iter()
            .enumerate()
            .map(|(place, hit)| provider_hit(place, hit, explain))
            .collect(),
        collection_metadata: metadata.unwrap_or_default(),
        warnings: answer.warnings,
        extra,
    }
}

fn provider_hit(place: usize, hit: Hit, explain: Explain) -> ProviderHit {
    let mut extra = Metadata::new();
    if let Some(stage) = hit.ranks.keyword {
        extra.insert("keyword_score".into(), stage.score.into());
    }
    if let Some(reranked) = hit.rerank {
        extra.insert("rerank_score".into(), as_written(reranked.score).into());
        extra.insert("original_rank".into(), reranked.original_rank.into());
    }
    if let Some(siblings) = hit.siblings {
        extra.insert(
            "siblings".into(),
            siblings
                .into_iter()
                .map(|sibling| document_json(Arc::unwrap_or_clone(sibling)))
                .collect(),
        );
    }
    if explain == Explain::Yes {
        let rerank = hit.rerank.map(|reranked| Rank {
            rank: place + 1,
            score: reranked.score.into(),
        });
        let stages = [
            ("dense", hit.ranks.dense),
            ("keyword", hit.ranks.keyword),
            ("fused", hit.ranks.fused),
            ("rerank", rerank),
        ];
        let places: Metadata = stages
            .into_iter()
            .filter_map(|(name, stage)| {
                stage.map(|stage| (name.to_owned(), json!({"rank": stage.rank, "score": stage.score})))
            })
            .collect();
        extra.insert("explain".into(), places.into());
    }
    ProviderHit {
        document: hit.document,
        distance: hit.distance,
        score: hit.distance.map(|distance| as_written(1.0 - distance / 2.0)),
        extra,
    }
}

pub(crate) fn document_json(document: Document) -> Value {
    json!({"id": document.id.as_str(), "text": document.text, "metadata": document.metadata})
}
