//! SQL text with the values that are bound to it, and filters written as such.

use ragstone_core::Filter;
use ragstone_core::filter::{Comparison, Scalar, Test};
use ragstone_core::storage::StorageQuery;
use serde_json::json;
use tokio_postgres::types::{ToSql, Type};

use super::encode::{escape, list_key, scalar_json, scalars_key};

/// More values than this are compared one after the other; up to here each can use the index.
const MAX_INDEXED: usize = 64;

/// A statement in the making. Whatever comes from outside is bound, never part of the text.
#[derive(Default)]
pub(super) struct Statement {
    pub(super) sql: String,
    /// It comes again and again, with other values, and is best carried out the same way each time.
    recurs: bool,
    /// What the transaction is set to before it, if anything.
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

    /// Lets the database keep how it carries this statement out.
    pub(super) fn recurring(&mut self) -> &mut Self {
        self.recurs = true;
        self
    }

    pub(super) fn recurs(&self) -> bool {
        self.recurs
    }

    /// Sets the transaction to something before this statement; nothing from outside may be part of it.
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

    /// Refers to a value at this place of the text.
    pub(super) fn bind(&mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> &mut Self {
        let place = self.remember(value, kind);
        self.sql.push_str(&place);
        self
    }

    /// Binds a value without referring to it yet; returns what refers to it, as often as needed.
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

    /// As part of the text: how many rows are wanted decides how they are best found.
    pub(super) fn fixed_limit(&mut self, limit: usize) -> &mut Self {
        self.push(&format!(" LIMIT {limit}"))
    }

    pub(super) fn parameters(&self) -> Vec<(&(dyn ToSql + Sync), Type)> {
        self.values
            .iter()
            .map(|(value, kind)| (&**value as &(dyn ToSql + Sync), kind.clone()))
            .collect()
    }

    /// A condition on the column `fields` that is true or false, never null, so that it can be negated.
    pub(super) fn filter(&mut self, filter: &Filter) -> &mut Self {
        match filter {
            Filter::All(parts) => self.joined(parts, " AND ", "TRUE"),
            Filter::Any(parts) => self.joined(parts, " OR ", "FALSE"),
            Filter::Not(part) => self.push("NOT (").filter(part).push(")"),
            Filter::Field { name, test } => self.test(name, test),
        }
    }

    /// The documents that a search is for.
    pub(super) fn matching(&mut self, request: &StorageQuery) -> &mut Self {
        match &request.among {
            None => self.filter(&request.filter),
            Some(ids) => {
                let ids: Vec<String> = ids.iter().map(|id| escape(id.as_str()).into_owned()).collect();
                self.push("id = ANY (")
                    .bind(ids, Type::TEXT_ARRAY)
                    .push(") AND (")
                    .filter(&request.filter)
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
        // Null compares as equal to itself there; here it has no order.
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
