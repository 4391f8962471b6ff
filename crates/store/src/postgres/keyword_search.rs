//! The part of a search statement that ranks documents by words.

use ragstone_core::CollectionName;
use ragstone_core::analysis::analyze_query;
use ragstone_core::storage::StorageQuery;
use tokio_postgres::types::Type;

use super::encode::{COUNT_WEIGHTS, LARGEST_UNIT, tsquery};
use super::statement::Statement;
use super::vector_search::depth;

pub(super) struct KeywordRanking<'a> {
    pub(super) name: &'a CollectionName,
    pub(super) table: &'a str,
    pub(super) query: &'a StorageQuery,
    pub(super) text: &'a str,
    /// Refers to the bound query vector, where there is one.
    pub(super) vector: Option<&'a str>,
}

impl KeywordRanking<'_> {
    /// Appends the common table expression `keyword` (place, score, rank) and those it is made of.
    ///
    /// The score is BM25 with the constants of the embedded store. `ts_rank_cd` of one word gives its
    /// number of occurrences: the sum of the weights of its positions, which stand for the units that
    /// `encode` writes a count in.
    pub(super) fn push(&self, sql: &mut Statement) {
        let terms = analyze_query(self.text);
        let words: Vec<String> = terms.iter().map(|term| tsquery(&term.text)).collect();
        let weights: Vec<f32> = terms.iter().map(|term| term.weight).collect();
        let table = self.table;
        sql.push("wanted AS (SELECT word::tsquery AS word, weight FROM unnest(")
            .bind(words, Type::TEXT_ARRAY)
            .push(", ")
            .bind(weights, Type::FLOAT4_ARRAY)
            .push(
                ") AS given (word, weight)), totals AS MATERIALIZED (
                     SELECT greatest(documents, 1)::float8 AS documents,
                            greatest(words::float8 / greatest(documents, 1), 1) AS average
                     FROM ragstone.collections WHERE name = ",
            )
            .text(self.name.as_str())
            .push(&format!(
                "), posting AS MATERIALIZED (
                     SELECT place, words, word, weight,
                            ts_rank_cd('{COUNT_WEIGHTS}', terms, word)::float8 * {LARGEST_UNIT} AS count, ("
            ))
            .matching(self.query)
            .push(&format!(
                ") AS matches FROM wanted JOIN {table} ON terms @@ word), known AS (
                     SELECT word, ln(1 + ((SELECT documents FROM totals) - count(*) + 0.5) / (count(*) + 0.5)) AS idf
                     FROM posting GROUP BY word), scored AS (
                     SELECT place, sum(weight * idf * count * 2.2
                         / (count + 1.2 * (0.25 + 0.75 * words / (SELECT average FROM totals)))) AS score
                     FROM posting JOIN known USING (word) WHERE matches GROUP BY place
                     ORDER BY score DESC, place"
            ))
            .limit(depth(self.query))
            .push(
                "), keyword AS (
                     SELECT place, score, row_number() OVER (ORDER BY score DESC, place) AS rank FROM scored",
            );
        if let (Some(vector), Some(max_distance)) = (self.vector, self.query.max_distance) {
            let far = format!("(embedding <#> (SELECT {vector}::vector))");
            sql.push(&format!(" JOIN {table} USING (place) WHERE "))
                .within(&far, max_distance);
        }
        sql.push(")");
    }
}
