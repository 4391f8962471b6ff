//! SQL text with its bound values, and filters as SQL conditions.

use ragstone_core::Filter;
use ragstone_core::filter::{Comparison, Scalar, Test};
use ragstone_core::storage::StorageQuery;
use serde_json::json;
use tokio_postgres::types::{ToSql, Type};

use super::encode::{escape, list_key, scalar_json, scalars_key};

/// Up to this many values of `$in` become conditions that each use the index; more are compared row
/// by row.
const MAX_INDEXED: usize = 64;

/// A statement under construction. User input is always bound, never part of the text.
#[derive(Default)]
pub(super) struct Statement {
    pub(super) sql: String,
    /// Whether connections keep it prepared.
    cached: bool,
    /// A `SET LOCAL` statement to run before it.
    setting: Option<String>,
    values: Vec<(Box<dyn ToSql + Sync + Send>, Type)>,
}

impl Statement {
    pub(super) fn new(sql: impl Into<String>) -> Self {
        Self {
            sql: sql.into(),
            ..Self::default()
        }
    }

    /// Keeps the statement prepared, for one that is run often and always planned the same way.
    pub(super) fn cached(&mut self) -> &mut Self {
        self.cached = true;
        self
    }

    pub(super) fn is_cached(&self) -> bool {
        self.cached
    }

    /// Runs a `SET LOCAL` statement first. It is not escaped, so no user input may be part of it.
    pub(super) fn with_setting(&mut self, sql: String) -> &mut Self {
        self.setting = Some(sql);
        self
    }

    pub(super) fn setting(&self) -> Option<&str> {
        self.setting.as_deref()
    }

    pub(super) fn push(&mut self, sql: &str) -> &mut Self {
        self.sql.push_str(sql);
        self
    }

    /// Binds a value and refers to it here.
    pub(super) fn bind(&mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> &mut Self {
        let reference = self.remember(value, kind);
        self.sql.push_str(&reference);
        self
    }

    /// Binds a value without referring to it yet. Returns the reference, for use any number of times.
    pub(super) fn remember(&mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> String {
        self.values.push((Box::new(value), kind));
        format!("${}", self.values.len())
    }

    pub(super) fn text(&mut self, value: impl Into<String>) -> &mut Self {
        self.bind(value.into(), Type::TEXT)
    }

    pub(super) fn number(&mut self, value: i64) -> &mut Self {
        self.bind(value, Type::INT8)
    }

    pub(super) fn limit(&mut self, limit: usize) -> &mut Self {
        self.push(" LIMIT ")
            .number(i64::try_from(limit).unwrap_or(i64::MAX))
    }

    /// A limit that the planner sees, because the best plan depends on it.
    pub(super) fn fixed_limit(&mut self, limit: usize) -> &mut Self {
        self.push(&format!(" LIMIT {limit}"))
    }

    /// A condition on a negative inner product of unit vectors, computed as in `ranking::distance`.
    pub(super) fn within(&mut self, far: &str, max_distance: f32) -> &mut Self {
        self.push(&format!("least(1::real + ({far})::real, 2) <= "))
            .bind(max_distance, Type::FLOAT4)
    }

    pub(super) fn types(&self) -> Vec<Type> {
        self.values.iter().map(|(_, kind)| kind.clone()).collect()
    }

    pub(super) fn values(&self) -> Vec<&(dyn ToSql + Sync)> {
        self.values
            .iter()
            .map(|(value, _)| &**value as &(dyn ToSql + Sync))
            .collect()
    }

    pub(super) fn parameters(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        self.values
            .iter()
            .map(|(value, kind)| (&**value as &(dyn ToSql + Sync), kind.clone()))
            .collect()
    }

    /// A condition on the column `fields`. It is never null, so it can be negated.
    pub(super) fn filter(&mut self, filter: &Filter) -> &mut Self {
        match filter {
            Filter::All(parts) => self.joined(parts, " AND ", "TRUE"),
            Filter::Any(parts) => self.joined(parts, " OR ", "FALSE"),
            Filter::Not(part) => self.push("NOT (").filter(part).push(")"),
            Filter::Field { name, test } => self.test(name, test),
        }
    }

    /// The condition of the documents that a query searches.
    pub(super) fn matching(&mut self, query: &StorageQuery) -> &mut Self {
        match &query.ids {
            None => self.filter(&query.filter),
            Some(ids) => {
                let ids: Vec<String> = ids.iter().map(|id| escape(id.as_str()).into_owned()).collect();
                self.push("id = ANY (")
                    .bind(ids, Type::TEXT_ARRAY)
                    .push(") AND (")
                    .filter(&query.filter)
                    .push(")")
            }
        }
    }

    fn joined(&mut self, parts: &[Filter], operator: &str, of_none: &str) -> &mut Self {
        if parts.is_empty() {
            return self.push(of_none);
        }
        for (number, part) in parts.iter().enumerate() {
            self.push(if number == 0 { "(" } else { operator })
                .push("(")
                .filter(part)
                .push(")");
        }
        self.push(")")
    }

    fn test(&mut self, field: &str, test: &Test) -> &mut Self {
        match test {
            Test::OneOf(wanted) => self.one_of(field, wanted),
            Test::Compare(comparison, operand) => self.compare(field, *comparison, operand),
            Test::Contains(operand) => self.contains(field, operand),
            Test::Exists => self.push("fields ? ").text(scalars_key(field)),
        }
    }

    fn one_of(&mut self, field: &str, wanted: &[Scalar]) -> &mut Self {
        let key = scalars_key(field);
        let has = |scalar: &Scalar| json!({ &key: [scalar_json(scalar)] }).to_string();
        if wanted.is_empty() {
            return self.push("FALSE");
        }
        if wanted.len() > MAX_INDEXED {
            let any: Vec<String> = wanted.iter().map(has).collect();
            return self
                .push("fields @> ANY (")
                .bind(any, Type::TEXT_ARRAY)
                .push("::text[]::jsonb[])");
        }
        for (number, scalar) in wanted.iter().enumerate() {
            self.push(if number == 0 { "(" } else { " OR " });
            self.push("fields @> ").text(has(scalar)).push("::text::jsonb");
        }
        self.push(")")
    }

    /// A JSON path compares numbers by value, strings by code point, and different kinds not at all.
    fn compare(&mut self, field: &str, comparison: Comparison, operand: &Scalar) -> &mut Self {
        let path = match comparison {
            Comparison::Greater => "$[*] ? (@ > $x)",
            Comparison::GreaterOrEqual => "$[*] ? (@ >= $x)",
            Comparison::Less => "$[*] ? (@ < $x)",
            Comparison::LessOrEqual => "$[*] ? (@ <= $x)",
        };
        // In a JSON path null equals itself; in a filter it has no order.
        if !matches!(operand, Scalar::Number(_) | Scalar::Text(_)) {
            return self.push("FALSE");
        }
        self.push("coalesce(jsonb_path_exists(fields -> ")
            .text(scalars_key(field))
            .push(&format!(", '{path}', "))
            .text(json!({ "x": scalar_json(operand) }).to_string())
            .push("::text::jsonb), FALSE)")
    }

    fn contains(&mut self, field: &str, operand: &Scalar) -> &mut Self {
        let element = json!({ list_key(field): [scalar_json(operand)] }).to_string();
        self.push("(fields @> ").text(element).push("::text::jsonb");
        if let Scalar::Text(part) = operand {
            let scalars = self.remember(scalars_key(field), Type::TEXT);
            self.push(" OR coalesce(NOT fields ? ")
                .text(list_key(field))
                .push(&format!(
                    " AND jsonb_typeof(fields -> {scalars} -> 0) = 'string' AND strpos(fields -> {scalars} ->> 0, "
                ))
                .text(escape(part))
                .push(") > 0, FALSE)");
        }
        self.push(")")
    }
}
