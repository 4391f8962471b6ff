//! Searches of one collection, in one transaction.
//!
//! A query is one statement: it ranks by vector and by words within the filter, fuses the rankings
//! and reads the documents. The statements need the collection's table, so they are planned from
//! cached statistics and sent together with the statement that reads the collection. If the
//! statistics turn out to be outdated, they are planned and sent again.

use ragstone_core::CollectionName;
use ragstone_core::fusion::{HitRanks, RANK_CONSTANT, Rank};
use ragstone_core::model::ModelIdentity;
use ragstone_core::search::SearchHit;
use ragstone_core::storage::{SearchHits, StorageQuery};
use ragstone_core::vector::normalise;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::PostgresThresholds;
use super::keyword_search::KeywordRanking;
use super::pool::{Pool, Session};
use super::read::{CollectionState, find_collection, find_models, read_document, read_model};
use super::siblings::SiblingReader;
use super::statement::Statement;
use super::stats_cache::{StatsCache, TableStats};
use super::vector_search::{VectorRanking, VectorSearchStrategy};
use crate::error::{Error, Result};
use crate::ranking::{StageClock, dense_score, distance};

/// A smaller sample says too little about the selectivity of a filter to be kept.
const MIN_SAMPLE: i64 = 200;
/// How often a search is planned anew because the collection got another table meanwhile. More than
/// one change between two round trips is rare.
const PLAN_ATTEMPTS: usize = 4;

pub(super) struct Searcher<'a> {
    pub(super) pool: &'a Pool,
    pub(super) cache: &'a StatsCache,
    pub(super) thresholds: PostgresThresholds,
    pub(super) name: &'a CollectionName,
    /// With vectors of length one.
    queries: Vec<StorageQuery>,
}

/// The statements of all queries for one table.
struct SearchPlan {
    stats: TableStats,
    models: Option<Statement>,
    /// One per query; `None` where the answer is empty or an error.
    rankings: Vec<Option<Statement>>,
}

impl SearchPlan {
    fn statements(&self) -> impl Iterator<Item = &Statement> {
        self.models.iter().chain(self.rankings.iter().flatten())
    }
}

/// The rows that a [`SearchPlan`] returned.
#[derive(Default)]
struct Answers {
    models: Vec<ModelIdentity>,
    rankings: Vec<Vec<Row>>,
}

impl<'a> Searcher<'a> {
    pub(super) fn new(
        pool: &'a Pool,
        cache: &'a StatsCache,
        thresholds: PostgresThresholds,
        name: &'a CollectionName,
        queries: &[StorageQuery],
    ) -> Self {
        let mut queries = queries.to_vec();
        for vector in queries.iter_mut().filter_map(|query| query.vector.as_mut()) {
            normalise(vector);
        }
        Self {
            pool,
            cache,
            thresholds,
            name,
            queries,
        }
    }

    pub(super) async fn search(&self) -> Result<Vec<SearchHits>> {
        let mut clock = StageClock::default();
        let (session, state, answers) = clock.time_async("search", self.rank()).await?;
        let mut results = Vec::with_capacity(self.queries.len());
        for (number, query) in self.queries.iter().enumerate() {
            let rows = answers.rankings.get(number).map_or(&[][..], Vec::as_slice);
            let mut places = Vec::with_capacity(rows.len());
            let mut hits = Vec::with_capacity(rows.len());
            for row in rows {
                places.push(row.try_get(0)?);
                hits.push(read_hit(row, hits.len() + 1)?);
            }
            self.note_selectivity(query, rows)?;
            let mut timings = clock.stages.clone();
            let mut siblings_truncated = false;
            if let (Some(table), Some(request)) = (&state.table, &query.siblings) {
                let mut expand = StageClock::default();
                let siblings = SiblingReader::new(&session, table, request);
                siblings_truncated = expand
                    .time_async("expand", siblings.add_to(&places, &mut hits))
                    .await?;
                timings.extend(expand.stages);
            }
            results.push(SearchHits {
                hits,
                metadata: state.collection.metadata.clone(),
                models: match query.vector {
                    Some(_) => answers.models.clone(),
                    None => Vec::new(),
                },
                siblings_truncated,
                timings,
            });
        }
        Ok(results)
    }

    /// Reads the collection and ranks, in one round trip if the cached statistics are right.
    async fn rank(&self) -> Result<(Session, CollectionState, Answers)> {
        let find = find_collection(self.name);
        let mut plan = self.cache.get(self.name).map(|stats| self.plan(stats));
        for _ in 0..PLAN_ATTEMPTS {
            let mut statements = vec![&find];
            statements.extend(plan.iter().flat_map(SearchPlan::statements));
            let (session, results) = Session::read_all(self.pool, &statements).await?;
            let mut results = results.into_iter();
            let found = results.next().unwrap_or_else(|| Ok(Vec::new()))?;
            let state = CollectionState::first(&found, self.name)?;
            self.cache.update(&state);
            self.check_dimensions(&state)?;
            let Some(stats) = state.stats() else {
                return Ok((session, state, Answers::default()));
            };
            let results: Vec<_> = results.collect();
            if let Some(plan) = plan.take_if(|plan| plan.stats.same_table(&stats)) {
                return Ok((session, state, plan.read(results)?));
            }
            let failed = results.iter().any(Result::is_err);
            let current = self.plan(stats);
            if !failed {
                let statements: Vec<_> = current.statements().collect();
                let results = session.query_all(&statements).await?;
                return Ok((session, state, current.read(results)?));
            }
            // The failed statement ended the transaction.
            plan = Some(current);
        }
        Err(Error::Conflict)
    }

    fn check_dimensions(&self, state: &CollectionState) -> Result<()> {
        let Some(expected) = state.collection.dimensions else {
            return Ok(());
        };
        let vectors = self.queries.iter().filter_map(|query| query.vector.as_ref());
        match vectors.map(Vec::len).find(|actual| *actual != expected) {
            None => Ok(()),
            Some(actual) => Err(Error::DimensionMismatch {
                collection: self.name.clone(),
                expected,
                actual,
            }),
        }
    }

    fn plan(&self, stats: TableStats) -> SearchPlan {
        let any_vector = self.queries.iter().any(|query| query.vector.is_some());
        SearchPlan {
            models: any_vector.then(|| find_models(&stats.table)),
            rankings: self
                .queries
                .iter()
                .map(|query| self.ranking(&stats, query))
                .collect(),
            stats,
        }
    }

    /// Returns rows of place, dense rank, keyword rank, keyword score, fused score, negative inner
    /// product, id, metadata, text, and the size of the sample and of its matching part.
    fn ranking(&self, stats: &TableStats, query: &StorageQuery) -> Option<Statement> {
        let width = query.vector.as_ref().map(Vec::len);
        if query.limit == 0 || width.is_some_and(|width| stats.dimensions != Some(width)) {
            return None;
        }
        let mut sql = Statement::new("WITH ");
        let vector = query
            .vector
            .as_ref()
            .map(|vector| sql.remember(vector.clone(), Type::FLOAT4_ARRAY));
        let selectivity = self.cache.selectivity(self.name, &query.filter);
        let strategy = VectorSearchStrategy::new(self.thresholds, stats, query, selectivity);
        if let Some(vector) = &vector {
            let dense = VectorRanking {
                stats,
                query,
                vector,
                strategy,
                exact_up_to: self.thresholds.exact_up_to,
            };
            dense.push(&mut sql);
            if let Some(ef_search) = strategy.ef_search() {
                sql.with_setting(format!("SET LOCAL hnsw.ef_search = {ef_search}"));
            }
        }
        if let Some(text) = &query.text {
            if vector.is_some() {
                sql.push(", ");
            }
            let keyword = KeywordRanking {
                name: self.name,
                table: &stats.table,
                query,
                text,
                vector: vector.as_deref(),
            };
            keyword.push(&mut sql);
        }
        match (&vector, &query.text) {
            (Some(_), None) => sql.push(
                ", ranked AS (SELECT place, rank AS dense_rank, NULL::bigint AS keyword_rank,
                     NULL::float8 AS score, NULL::float8 AS fused FROM dense)",
            ),
            (None, Some(_)) => sql.push(
                ", ranked AS (SELECT place, NULL::bigint AS dense_rank, rank AS keyword_rank,
                     score, NULL::float8 AS fused FROM keyword)",
            ),
            (Some(_), Some(_)) => push_fusion(&mut sql, query),
            (None, None) => return None,
        };
        sql.push("SELECT place, dense_rank, keyword_rank, score, fused, ");
        match &vector {
            Some(vector) => sql.push(&format!("embedding <#> (SELECT {vector}::vector)")),
            None => sql.push("NULL::float8"),
        };
        sql.push(", id, metadata, body, ")
            .push(match (&vector, strategy) {
                (Some(_), VectorSearchStrategy::Sampled) => {
                    "(SELECT drawn FROM sample), (SELECT matching FROM sample)"
                }
                _ => "NULL::bigint, NULL::bigint",
            })
            .push(&format!(
                " FROM ranked JOIN {} USING (place)
                 ORDER BY fused DESC NULLS LAST, dense_rank NULLS LAST, keyword_rank NULLS LAST, place",
                stats.table
            ));
        // The best plan for a filter depends on its values.
        if query.filter.is_everything() && query.ids.is_none() {
            sql.cached();
        }
        Some(sql)
    }

    fn note_selectivity(&self, query: &StorageQuery, rows: &[Row]) -> Result<()> {
        if let Some(row) = rows.first()
            && let (Some(drawn), Some(matching)) = (
                row.try_get::<_, Option<i64>>(9)?,
                row.try_get::<_, Option<i64>>(10)?,
            )
            && drawn >= MIN_SAMPLE
        {
            let selectivity = matching as f64 / drawn as f64;
            self.cache
                .update_selectivity(self.name, &query.filter, selectivity);
        }
        Ok(())
    }
}

impl SearchPlan {
    fn read(&self, results: Vec<Result<Vec<Row>>>) -> Result<Answers> {
        let mut results = results.into_iter();
        let mut next = || results.next().unwrap_or_else(|| Ok(Vec::new()));
        let models = match self.models {
            Some(_) => next()?
                .iter()
                .map(|row| read_model(row, 0))
                .collect::<Result<_>>()?,
            None => Vec::new(),
        };
        let rankings = self.rankings.iter().map(|ranking| match ranking {
            Some(_) => next(),
            None => Ok(Vec::new()),
        });
        Ok(Answers {
            models,
            rankings: rankings.collect::<Result<_>>()?,
        })
    }
}

/// Reciprocal rank fusion as in [`ragstone_core::fusion::fuse`], with the same order of ties.
fn push_fusion<'a>(sql: &'a mut Statement, query: &StorageQuery) -> &'a mut Statement {
    sql.push(", ranked AS (SELECT place, d.rank AS dense_rank, k.rank AS keyword_rank, k.score, coalesce(")
        .bind(query.weights.dense, Type::FLOAT8)
        .push(&format!(" / ({RANK_CONSTANT} + d.rank)::float8, 0) + coalesce("))
        .bind(query.weights.keyword, Type::FLOAT8)
        .push(&format!(
            " / ({RANK_CONSTANT} + k.rank)::float8, 0) AS fused
             FROM dense d FULL JOIN keyword k USING (place)
             ORDER BY fused DESC, d.rank NULLS LAST, place"
        ))
        .fixed_limit(query.limit)
        .push(")")
}

/// See [`Searcher::ranking`] for the columns.
fn read_hit(row: &Row, fused_rank: usize) -> Result<SearchHit> {
    let rank = |column: usize| -> Result<Option<usize>> {
        let rank: Option<i64> = row.try_get(column)?;
        Ok(rank.and_then(|rank| usize::try_from(rank).ok()))
    };
    // pgvector orders by the negative inner product.
    let similarity = row.try_get::<_, Option<f64>>(5)?.map(|far| -far as f32);
    let keyword_score: Option<f64> = row.try_get(3)?;
    let fused_score: Option<f64> = row.try_get(4)?;
    Ok(SearchHit {
        document: read_document(row, 6)?,
        distance: similarity.map(distance),
        ranks: HitRanks {
            dense: rank(1)?.zip(similarity).map(|(rank, similarity)| Rank {
                rank,
                score: dense_score(similarity),
            }),
            keyword: rank(2)?
                .zip(keyword_score)
                .map(|(rank, score)| Rank { rank, score }),
            fused: fused_score.map(|score| Rank {
                rank: fused_rank,
                score,
            }),
        },
        rerank: None,
        siblings: None,
    })
}
