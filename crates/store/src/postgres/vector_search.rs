//! The part of a search statement that ranks documents by vector.

use ragstone_core::storage::StorageQuery;
use tokio_postgres::types::Type;

use super::PostgresThresholds;
use super::maintenance::HalfPrecision;
use super::statement::Statement;
use super::stats_cache::TableStats;
use crate::ranking::fusion_depth;

/// Number of rows sampled to estimate how many match a filter.
const SAMPLE: u64 = 1000;
/// Candidates taken from the index per requested document. The exact order is computed from the full
/// vectors.
const OVERSAMPLE: usize = 2;
/// `hnsw.ef_search` for few requested documents and no filter; the minimum for each requested
/// document; and the maximum that pgvector allows.
const EF_SEARCH: usize = 200;
const EF_SEARCH_EACH: usize = 6;
const EF_SEARCH_MAX: usize = 1000;

/// Number of documents each ranking needs: the limit of the query, or the depth of fusion.
pub(super) fn depth(query: &StorageQuery) -> usize {
    match (&query.vector, &query.text) {
        (Some(_), Some(_)) => fusion_depth(query.limit),
        _ => query.limit,
    }
}

/// With a smaller value, the farther of many neighbours are missed more often than those of a few.
fn ef_search(query: &StorageQuery) -> usize {
    depth(query)
        .saturating_mul(EF_SEARCH_EACH)
        .clamp(EF_SEARCH, EF_SEARCH_MAX)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VectorSearchStrategy {
    /// Compares every document that matches.
    Exhaustive,
    /// Walks the index.
    Index { ef_search: usize },
    /// Estimates from a sample, within the statement, which of the two is better.
    Sampled,
}

impl VectorSearchStrategy {
    pub(super) fn new(
        thresholds: PostgresThresholds,
        stats: &TableStats,
        query: &StorageQuery,
        selectivity: Option<f64>,
    ) -> Self {
        let indexable = stats.dimensions.and_then(HalfPrecision::of).is_some();
        if !indexable || stats.count < thresholds.index_from || query.ids.is_some() {
            return Self::Exhaustive;
        }
        if query.filter.is_everything() {
            return Self::Index {
                ef_search: ef_search(query),
            };
        }
        let Some(selectivity) = selectivity else {
            return Self::Sampled;
        };
        let matching = selectivity * stats.count as f64;
        if matching <= thresholds.exact_up_to as f64 {
            return Self::Exhaustive;
        }
        // The walk has to see more matching documents than it would see without the filter, because
        // those that match are less well connected.
        let widened = 1.5 * ef_search(query) as f64 / selectivity;
        Self::Index {
            ef_search: (widened as usize).clamp(EF_SEARCH, EF_SEARCH_MAX),
        }
    }

    /// The value of `hnsw.ef_search` for the statement.
    pub(super) fn ef_search(self) -> Option<usize> {
        match self {
            Self::Exhaustive => None,
            Self::Index { ef_search } => Some(ef_search),
            Self::Sampled => Some(EF_SEARCH_MAX),
        }
    }
}

pub(super) struct VectorRanking<'a> {
    pub(super) stats: &'a TableStats,
    pub(super) query: &'a StorageQuery,
    /// Refers to the bound query vector, of length one.
    pub(super) vector: &'a str,
    pub(super) strategy: VectorSearchStrategy,
    pub(super) exact_up_to: u64,
}

impl VectorRanking<'_> {
    /// Appends the common table expression `dense` (place, rank) and those it is made of.
    pub(super) fn push(&self, sql: &mut Statement) {
        let limit = depth(self.query);
        match (self.strategy, self.stats.dimensions.and_then(HalfPrecision::of)) {
            (VectorSearchStrategy::Exhaustive, _) | (_, None) => {
                sql.push("nearest AS (");
                self.push_exhaustive(sql);
                sql.push(")");
            }
            (strategy, Some(index)) => {
                if strategy == VectorSearchStrategy::Sampled {
                    self.push_sample(sql);
                    sql.push(", ");
                }
                self.push_walk(sql, index, strategy);
                // An incomplete walk gave up, or so few match: only comparing all of them can tell.
                sql.push(&format!(
                    ", nearest AS (
                         SELECT place, far FROM walk WHERE (SELECT count(*) FROM walk) >= {limit}
                         UNION ALL SELECT place, far FROM ("
                ));
                self.push_exhaustive(sql);
                sql.push(&format!(
                    ") AS compared WHERE (SELECT count(*) FROM walk) < {limit})"
                ));
            }
        }
        sql.push(", dense AS (SELECT place, row_number() OVER (ORDER BY far, place) AS rank FROM nearest");
        if let Some(max_distance) = self.query.max_distance {
            sql.push(" WHERE ").within("far", max_distance);
        }
        sql.push(")");
    }

    /// Adding zero to the distance keeps the index out. Without a query of its own, the vector would
    /// be decoded again for every document once Postgres plans for any vector, which takes four times
    /// as long.
    fn push_exhaustive(&self, sql: &mut Statement) {
        sql.push(&format!(
            "SELECT place, (embedding <#> (SELECT {}::vector)) + 0 AS far FROM {} WHERE ",
            self.vector, self.stats.table
        ))
        .matching(self.query)
        .push(" ORDER BY far, place")
        .fixed_limit(depth(self.query));
    }

    /// Walks the index until enough documents match. The walk is only roughly in order.
    fn push_walk(&self, sql: &mut Statement, index: HalfPrecision, strategy: VectorSearchStrategy) {
        let limit = depth(self.query);
        let vector = format!("{}::vector", self.vector);
        sql.push(&format!(
            "walk AS MATERIALIZED (SELECT place, far FROM (
                 SELECT place, embedding <#> {vector} AS far FROM {} WHERE ",
            self.stats.table
        ))
        .matching(self.query)
        .push(&format!(
            " ORDER BY {} <#> {}",
            index.expression("embedding"),
            index.expression(&vector)
        ))
        .fixed_limit(limit.saturating_mul(OVERSAMPLE))
        .push(") AS candidate");
        if strategy == VectorSearchStrategy::Sampled {
            sql.push(" WHERE (SELECT use_index FROM sample)");
        }
        sql.push(" ORDER BY far, place").fixed_limit(limit).push(")");
    }

    fn push_sample(&self, sql: &mut Statement) {
        let percent = 100.0 * SAMPLE as f64 / self.stats.count.max(1) as f64;
        sql.push("sample AS MATERIALIZED (SELECT drawn, matching, matching::float8 * ")
            .bind(self.stats.count as f64, Type::FLOAT8)
            .push(" > drawn * ")
            .bind(self.exact_up_to as f64, Type::FLOAT8)
            .push(" AS use_index FROM (SELECT count(*) AS drawn, count(*) FILTER (WHERE ")
            .matching(self.query)
            .push(&format!(
                ") AS matching FROM {} TABLESAMPLE SYSTEM (",
                self.stats.table
            ))
            .bind(percent.min(100.0) as f32, Type::FLOAT4)
            .push(")) AS counted)");
    }
}

#[cfg(test)]
mod tests {
    use ragstone_core::Filter;
    use serde_json::json;

    use super::*;

    const THRESHOLDS: PostgresThresholds = PostgresThresholds {
        index_from: 10_000,
        exact_up_to: 25_000,
        settle: std::time::Duration::ZERO,
    };

    fn strategy(
        limit: usize,
        text: Option<&str>,
        filter: serde_json::Value,
        selectivity: Option<f64>,
    ) -> VectorSearchStrategy {
        let stats = TableStats {
            table: "t".into(),
            dimensions: Some(384),
            count: 100_000,
        };
        let query = StorageQuery {
            filter: Filter::parse(&filter).unwrap(),
            text: text.map(str::to_owned),
            vector: Some(vec![1.0]),
            limit,
            ..StorageQuery::default()
        };
        VectorSearchStrategy::new(THRESHOLDS, &stats, &query, selectivity)
    }

    fn width(limit: usize, text: Option<&str>, selectivity: Option<f64>) -> usize {
        let filter = selectivity.map_or_else(|| json!({}), |_| json!({"n": 1}));
        strategy(limit, text, filter, selectivity).ef_search().unwrap()
    }

    #[test]
    fn a_walk_is_wider_for_more_documents_and_for_fewer_matches() {
        assert_eq!(width(10, None, None), EF_SEARCH);
        assert_eq!(width(100, None, None), 600);
        // Fusion ranks more documents than it returns.
        assert_eq!(width(10, Some("words"), None), 600);
        assert_eq!(width(10, None, Some(0.5)), 600);
        assert_eq!(width(50, None, Some(0.6)), 750);
        assert_eq!(width(100, None, Some(0.5)), EF_SEARCH_MAX);
        assert_eq!(width(1000, None, None), EF_SEARCH_MAX);
        assert_eq!(width(usize::MAX, None, Some(0.3)), EF_SEARCH_MAX);
    }

    #[test]
    fn a_filter_of_unknown_selectivity_is_sampled_and_a_narrow_one_compared() {
        assert_eq!(
            strategy(10, None, json!({"n": 1}), None),
            VectorSearchStrategy::Sampled
        );
        assert_eq!(
            strategy(10, None, json!({"n": 1}), Some(0.25)),
            VectorSearchStrategy::Exhaustive
        );
    }
}
