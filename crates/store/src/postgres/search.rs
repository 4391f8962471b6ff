//! One search: rank by meaning and by word within the filter, fuse, and fetch the documents.

use std::collections::HashMap;

use deadpool_postgres::Pool;
use ragstone_core::CollectionName;
use ragstone_core::analysis::analyze_query;
use ragstone_core::fusion::{RankTrail, StageRank, fuse};
use ragstone_core::store::{SearchHit, SearchOutcome, SearchRequest};
use ragstone_core::vector::normalise;
use tokio_postgres::types::Type;

use super::Thresholds;
use super::encode::tsquery;
use super::keeper::IndexKind;
use super::pool::Session;
use super::read::{View, read_document, view};
use super::siblings::Siblings;
use super::statement::Statement;
use crate::error::{Error, Result};
use crate::index::dense::distance;
use crate::search::{StageClock, dense_score, fusion_depth};

/// How many rows are drawn to estimate how many match.
const SAMPLE: u64 = 1000;
/// How many more than asked for the index gives, to be put in their exact order.
const OVERSAMPLE: usize = 2;

/// A document's place, and how similar it is or how well its words fit.
type Scored = (i64, f64);

struct Ranked {
    place: i64,
    trail: RankTrail,
}

pub(super) async fn search(
    pool: &Pool,
    thresholds: Thresholds,
    name: &CollectionName,
    request: &SearchRequest,
) -> Result<SearchOutcome> {
    let (session, view) = view(pool, name).await?;
    let vector = unit_vector(name, &view, request)?;
    let mut clock = StageClock::default();
    let mut hits = Vec::new();
    let mut siblings_cut = false;
    if let Some(table) = &view.table
        && request.limit > 0
    {
        let search = Search {
            session: &session,
            view: &view,
            table,
            request,
            thresholds,
            vector: vector.as_deref(),
        };
        let ranked = search.rank(&mut clock).await?;
        hits = clock.time_async("fetch", search.fetch(&ranked)).await?;
        if let Some(request) = &request.siblings {
            let siblings = Siblings::new(&session, table, request);
            let expanded = expand(siblings, &ranked, &mut hits);
            siblings_cut = clock.time_async("expand", expanded).await?;
        }
    }
    Ok(SearchOutcome {
        hits,
        siblings_cut,
        collection: view.collection,
        stages: clock.stages,
    })
}

/// Returns whether siblings were left out.
async fn expand(mut siblings: Siblings<'_>, ranked: &[Ranked], hits: &mut [SearchHit]) -> Result<bool> {
    for (hit, Ranked { place, .. }) in hits.iter_mut().zip(ranked) {
        hit.siblings = siblings.of(*place, &hit.document).await?;
    }
    Ok(siblings.cut())
}

fn unit_vector(name: &CollectionName, view: &View, request: &SearchRequest) -> Result<Option<Vec<f32>>> {
    let Some(mut vector) = request.vector.clone() else {
        return Ok(None);
    };
    let actual = vector.len();
    if let Some(expected) = view.collection.dimensions.filter(|width| *width != actual) {
        return Err(Error::DimensionMismatch {
            collection: name.clone(),
            expected,
            actual,
        });
    }
    normalise(&mut vector);
    Ok(Some(vector))
}

struct Search<'a> {
    session: &'a Session,
    view: &'a View,
    table: &'a str,
    request: &'a SearchRequest,
    thresholds: Thresholds,
    /// Of length one.
    vector: Option<&'a [f32]>,
}

impl Search<'_> {
    async fn rank(&self, clock: &mut StageClock) -> Result<Vec<Ranked>> {
        let limit = self.request.limit;
        match (self.vector, &self.request.text) {
            (Some(vector), None) => {
                let found = clock.time_async("dense", self.dense(vector, limit)).await?;
                Ok(only(found, |stage| RankTrail {
                    dense: Some(stage),
                    ..RankTrail::default()
                }))
            }
            (None, Some(text)) => {
                let found = clock.time_async("keyword", self.keyword(text, limit)).await?;
                Ok(only(found, |stage| RankTrail {
                    keyword: Some(stage),
                    ..RankTrail::default()
                }))
            }
            (Some(vector), Some(text)) => {
                let depth = fusion_depth(limit);
                let dense = clock.time_async("dense", self.dense(vector, depth)).await?;
                let keyword = clock.time_async("keyword", self.keyword(text, depth)).await?;
                let fused = clock.time("fusion", || fuse(&dense, &keyword, self.request.weights));
                let ranked = fused.into_iter().take(limit);
                Ok(ranked.map(|(place, trail)| Ranked { place, trail }).collect())
            }
            (None, None) => Ok(Vec::new()),
        }
    }

    async fn dense(&self, vector: &[f32], limit: usize) -> Result<Vec<Scored>> {
        let mut found = match self.index_to_use().await? {
            Some(index) => self.nearest_by_index(vector, limit, index).await?,
            None => self.nearest_of_all(vector, limit).await?,
        };
        if let Some(farthest) = self.request.max_distance {
            found.retain(|(_, similarity)| distance(*similarity) <= farthest);
        }
        Ok(found
            .into_iter()
            .map(|(place, similarity)| (place, dense_score(similarity)))
            .collect())
    }

    /// The index, where it is worth to go through it.
    async fn index_to_use(&self) -> Result<Option<IndexKind>> {
        let count = self.view.collection.count;
        let index = self.view.collection.dimensions.and_then(IndexKind::of);
        if count < self.thresholds.index_from || index.is_none() {
            return Ok(None);
        }
        if self.request.filter.is_everything() {
            return Ok(index);
        }
        let percent = 100.0 * SAMPLE as f64 / count as f64;
        let mut sample = Statement::new("SELECT count(*), count(*) FILTER (WHERE ");
        sample
            .filter(&self.request.filter)
            .push(&format!(") FROM {} TABLESAMPLE SYSTEM (", self.table))
            .bind(percent.min(100.0) as f32, Type::FLOAT4)
            .push(")");
        let row = self.session.query_one(&sample).await?;
        let (drawn, matching): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        let expected = count as f64 * matching as f64 / drawn.max(1) as f64;
        Ok(index.filter(|_| expected > self.thresholds.exact_up_to as f64))
    }

    /// Looks at every document that matches.
    async fn nearest_of_all(&self, vector: &[f32], limit: usize) -> Result<Vec<(i64, f32)>> {
        let mut nearest = Statement::new("WITH found AS MATERIALIZED (SELECT place, embedding <#> ");
        nearest
            .bind(vector.to_vec(), Type::FLOAT4_ARRAY)
            .push(&format!("::vector AS far FROM {} WHERE ", self.table))
            .filter(&self.request.filter)
            .push(") SELECT place, far FROM found ORDER BY far, place")
            .limit(limit);
        self.read_nearest(&nearest).await
    }

    /// Walks through the index until enough documents match. The walk is only roughly in order.
    async fn nearest_by_index(
        &self,
        vector: &[f32],
        limit: usize,
        index: IndexKind,
    ) -> Result<Vec<(i64, f32)>> {
        let mut nearest = Statement::default();
        let near = nearest.remember(vector.to_vec(), Type::FLOAT4_ARRAY);
        let near = format!("{near}::vector");
        nearest
            .push(&format!(
                "WITH found AS MATERIALIZED (SELECT place, embedding <#> {near} AS far FROM {} WHERE ",
                self.table
            ))
            .filter(&self.request.filter)
            .push(&format!(
                " ORDER BY {} <#> {}",
                index.expression("embedding"),
                index.expression(&near)
            ))
            .limit(limit.saturating_mul(OVERSAMPLE))
            .push(") SELECT place, far FROM found ORDER BY far, place")
            .limit(limit);
        let found = self.read_nearest(&nearest).await?;
        let possible = usize::try_from(self.view.collection.count).unwrap_or(usize::MAX);
        if found.len() < limit.min(possible) {
            // It gave up on the way, or so few match: only a look at all of them can tell.
            return self.nearest_of_all(vector, limit).await;
        }
        Ok(found)
    }

    async fn read_nearest(&self, statement: &Statement) -> Result<Vec<(i64, f32)>> {
        let rows = self.session.query(statement).await?;
        rows.iter()
            .map(|row| Ok((row.try_get(0)?, similarity(row.try_get(1)?))))
            .collect()
    }

    /// BM25 with the constants of the embedded store. How often a word is in a document is what
    /// `ts_rank_cd` gives for that word alone with all weights one: the number of its positions.
    async fn keyword(&self, text: &str, limit: usize) -> Result<Vec<Scored>> {
        let terms = analyze_query(text);
        if terms.is_empty() {
            return Ok(Vec::new());
        }
        let words: Vec<String> = terms.iter().map(|term| tsquery(&term.text)).collect();
        let weights: Vec<f32> = terms.iter().map(|term| term.weight).collect();
        let documents = self.view.collection.count.max(1) as f64;
        let average = (self.view.words as f64 / documents).max(1.0);
        let table = self.table;
        let mut best = Statement::new("WITH wanted AS (SELECT word::tsquery AS word, weight FROM unnest(");
        best.bind(words, Type::TEXT_ARRAY)
            .push(", ")
            .bind(weights, Type::FLOAT4_ARRAY)
            .push(
                ") AS given (word, weight)), posting AS MATERIALIZED (
                     SELECT place, words, word, weight,
                            ts_rank_cd('{1,1,1,1}', terms, word)::float8 AS count, (",
            )
            .filter(&self.request.filter)
            .push(&format!(
                ") AS matches FROM wanted JOIN {table} ON terms @@ word), known AS (
                     SELECT word, ln(1 + ("
            ))
            .bind(documents, Type::FLOAT8)
            .push(
                " - count(*) + 0.5) / (count(*) + 0.5)) AS idf FROM posting GROUP BY word), score AS (
                     SELECT place, sum(weight * idf * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * words / ",
            )
            .bind(average, Type::FLOAT8)
            .push(
                "))) AS score
                     FROM posting JOIN known USING (word) WHERE matches GROUP BY place
                     ORDER BY score DESC, place",
            )
            .limit(limit)
            .push(") SELECT score.place, score.score");
        if let Some(vector) = self.vector {
            best.push(", embedding <#> ")
                .bind(vector.to_vec(), Type::FLOAT4_ARRAY)
                .push(&format!("::vector FROM score JOIN {table} USING (place)"));
        } else {
            best.push(" FROM score");
        }
        best.push(" ORDER BY score.score DESC, score.place");
        let mut found = Vec::new();
        for row in self.session.query(&best).await? {
            let near_enough = match (self.vector, self.request.max_distance) {
                (Some(_), Some(farthest)) => distance(similarity(row.try_get(2)?)) <= farthest,
                _ => true,
            };
            if near_enough {
                found.push((row.try_get(0)?, row.try_get(1)?));
            }
        }
        Ok(found)
    }

    async fn fetch(&self, ranked: &[Ranked]) -> Result<Vec<SearchHit>> {
        if ranked.is_empty() {
            return Ok(Vec::new());
        }
        let places: Vec<i64> = ranked.iter().map(|hit| hit.place).collect();
        let mut fetch = Statement::new("SELECT place, id, metadata, body");
        if let Some(vector) = self.vector {
            fetch
                .push(", embedding <#> ")
                .bind(vector.to_vec(), Type::FLOAT4_ARRAY)
                .push("::vector");
        }
        fetch
            .push(&format!(" FROM {} WHERE place = ANY (", self.table))
            .bind(places, Type::INT8_ARRAY)
            .push(")");
        let mut found = HashMap::with_capacity(ranked.len());
        for row in self.session.query(&fetch).await? {
            let distance = match self.vector {
                Some(_) => Some(distance(similarity(row.try_get(4)?))),
                None => None,
            };
            found.insert(row.try_get::<_, i64>(0)?, (read_document(&row, 1)?, distance));
        }
        ranked
            .iter()
            .map(|hit| {
                let (document, distance) = found
                    .remove(&hit.place)
                    .ok_or_else(|| Error::Damaged(format!("place {} has no row", hit.place)))?;
                Ok(SearchHit {
                    document,
                    distance,
                    trail: hit.trail,
                    siblings: None,
                })
            })
            .collect()
    }
}

fn only(found: Vec<Scored>, trail: impl Fn(StageRank) -> RankTrail) -> Vec<Ranked> {
    found
        .into_iter()
        .enumerate()
        .map(|(number, (place, score))| Ranked {
            place,
            trail: trail(StageRank {
                rank: number + 1,
                score,
            }),
        })
        .collect()
}

/// pgvector orders by the negative inner product.
fn similarity(far: f64) -> f32 {
    -far as f32
}
