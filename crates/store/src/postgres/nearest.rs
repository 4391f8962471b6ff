//! The statements of a search by meaning.

use ragstone_core::storage::StorageQuery;
use tokio_postgres::types::Type;

use super::Thresholds;
use super::keeper::Indexed;
use super::last_seen::Seen;
use super::statement::Statement;
use crate::search::fusion_depth;

/// How many rows are drawn to estimate how many match.
const SAMPLE: u64 = 1000;
/// How many more than asked for the index gives, to be put in their exact order.
const OVERSAMPLE: usize = 2;
/// How many candidates a walk through the index keeps in view (`hnsw.ef_search`) where few are asked
/// for and everything matches, how many for each that is asked for, and how many it can at most.
pub(super) const BREADTH: usize = 200;
const BREADTH_EACH: usize = 6;
const BROADEST: usize = 1000;

/// How many of the nearest a request needs: those it asks for, or those that are fused with the ranking
/// by words.
pub(super) fn depth(request: &StorageQuery) -> usize {
    match request.text {
        None => request.limit,
        Some(_) => fusion_depth(request.limit),
    }
}

/// Without more in view, the farther of many neighbours are missed more often than those of a few.
fn breadth(request: &StorageQuery) -> usize {
    depth(request)
        .saturating_mul(BREADTH_EACH)
        .clamp(BREADTH, BROADEST)
}

/// What is read of the nearest documents.
#[derive(Clone, Copy)]
pub(super) enum Columns {
    /// Place and distance.
    Place,
    /// These, and the document: one journey less.
    Document,
}

impl Columns {
    fn further(self) -> &'static str {
        match self {
            Self::Place => "",
            Self::Document => ", id, metadata, body",
        }
    }
}

/// How the nearest are found.
#[derive(Clone, Copy)]
pub(super) enum Way {
    /// By a look at every document that matches.
    All,
    /// By a walk through the index, so broad.
    Index(Indexed, usize),
    /// A sample has to tell how many match.
    Sample,
}

impl Way {
    pub(super) fn new(thresholds: Thresholds, seen: &Seen, request: &StorageQuery) -> Self {
        let index = match seen.dimensions.and_then(Indexed::of) {
            Some(index) if seen.count >= thresholds.index_from && request.among.is_none() => index,
            _ => return Self::All,
        };
        let matching = seen.share.map(|share| share * seen.count as f64);
        match matching {
            _ if request.filter.is_everything() => Self::Index(index, breadth(request)),
            None => Self::Sample,
            Some(matching) if matching > thresholds.exact_up_to as f64 => {
                // Of those in view, more are to match than would be in view without the filter: those
                // that match are less well connected.
                let broader = 1.5 * breadth(request) as f64 * seen.count as f64 / matching;
                Self::Index(index, (broader as usize).clamp(BREADTH, BROADEST))
            }
            Some(_) => Self::All,
        }
    }
}

pub(super) struct Nearest<'a> {
    pub(super) table: &'a str,
    pub(super) request: &'a StorageQuery,
    /// Of length one.
    pub(super) vector: &'a [f32],
    pub(super) limit: usize,
    pub(super) columns: Columns,
}

impl Nearest<'_> {
    /// The statement that this way begins with.
    pub(super) fn first(&self, way: Way, count: u64) -> Statement {
        match way {
            Way::All => self.of_all(),
            Way::Index(index, breadth) => self.by_index(index, breadth),
            Way::Sample => sample(self.table, self.request, count),
        }
    }

    /// Looks at every document that matches: what is added to the distance keeps the index out. Without
    /// a query of its own, the vector would be read anew for every document once Postgres plans for any
    /// vector, which takes four times as long.
    pub(super) fn of_all(&self) -> Statement {
        let mut nearest = Statement::new("SELECT place, (embedding <#> (SELECT ");
        nearest
            .bind(self.vector.to_vec(), Type::FLOAT4_ARRAY)
            .push("::vector)) + 0 AS far")
            .push(self.columns.further())
            .push(&format!(" FROM {} WHERE ", self.table))
            .matching(self.request)
            .push(" ORDER BY far, place")
            .fixed_limit(self.limit);
        self.recurring(nearest)
    }

    /// Walks through the index until enough documents match. The walk is only roughly in order.
    pub(super) fn by_index(&self, index: Indexed, breadth: usize) -> Statement {
        let mut nearest = Statement::default();
        let near = nearest.remember(self.vector.to_vec(), Type::FLOAT4_ARRAY);
        let near = format!("{near}::vector");
        nearest
            .push(&format!(
                "WITH found AS MATERIALIZED (SELECT place, embedding <#> {near} AS far{} FROM {} WHERE ",
                self.columns.further(),
                self.table
            ))
            .matching(self.request)
            .push(&format!(
                " ORDER BY {} <#> {}",
                index.expression("embedding"),
                index.expression(&near)
            ))
            .fixed_limit(self.limit.saturating_mul(OVERSAMPLE))
            .push(") SELECT * FROM found ORDER BY far, place")
            .fixed_limit(self.limit);
        if breadth != BREADTH {
            nearest.with_setting(format!("SET LOCAL hnsw.ef_search = {breadth}"));
        }
        self.recurring(nearest)
    }

    /// How a filter is best applied depends on what it asks for, so only searches of everything recur.
    fn recurring(&self, mut nearest: Statement) -> Statement {
        if self.request.filter.is_everything() && self.request.among.is_none() {
            nearest.recurring();
        }
        nearest
    }
}

/// Counts a few rows, and how many of them match.
pub(super) fn sample(table: &str, request: &StorageQuery, count: u64) -> Statement {
    let percent = 100.0 * SAMPLE as f64 / count.max(1) as f64;
    let mut sample = Statement::new("SELECT count(*), count(*) FILTER (WHERE ");
    sample
        .matching(request)
        .push(&format!(") FROM {table} TABLESAMPLE SYSTEM ("))
        .bind(percent.min(100.0) as f32, Type::FLOAT4)
        .push(")");
    sample
}

#[cfg(test)]
mod tests {
    use ragstone_core::Filter;
    use serde_json::json;

    use super::*;

    const THRESHOLDS: Thresholds = Thresholds {
        index_from: 10_000,
        exact_up_to: 25_000,
        settle: std::time::Duration::ZERO,
    };

    fn broad(limit: usize, text: Option<&str>, share: Option<f64>) -> usize {
        let seen = Seen {
            table: "t".into(),
            dimensions: Some(384),
            count: 100_000,
            share,
        };
        let filter = share.map_or_else(|| json!({}), |_| json!({"n": 1}));
        let request = StorageQuery {
            filter: Filter::parse(&filter).unwrap(),
            text: text.map(str::to_owned),
            limit,
            ..StorageQuery::default()
        };
        match Way::new(THRESHOLDS, &seen, &request) {
            Way::Index(_, breadth) => breadth,
            Way::All | Way::Sample => 0,
        }
    }

    #[test]
    fn a_walk_is_the_broader_the_more_is_asked_for_and_the_fewer_match() {
        assert_eq!(broad(10, None, None), BREADTH);
        assert_eq!(broad(100, None, None), 600);
        // Fusion looks deeper than the answer.
        assert_eq!(broad(10, Some("words"), None), 600);
        assert_eq!(broad(10, None, Some(0.5)), 600);
        assert_eq!(broad(50, None, Some(0.6)), 750);
        assert_eq!(broad(100, None, Some(0.5)), BROADEST);
        assert_eq!(broad(1000, None, None), BROADEST);
        assert_eq!(broad(usize::MAX, None, Some(0.3)), BROADEST);
    }
}
