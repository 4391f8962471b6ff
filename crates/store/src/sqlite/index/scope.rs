//! The part of a collection that is indexed in memory.

use std::borrow::Cow;

use ragstone_core::filter::Test;
use ragstone_core::{Filter, Metadata};
use serde_json::Value;

/// The part of every collection that is indexed in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum IndexScope {
    /// Everything that filters and searches need.
    #[default]
    Everything,
    /// Only the values of some metadata fields and the presence of others: write-only mode. For a
    /// process that writes much and never searches, so that its memory does not grow with what it
    /// writes. Searches, exports, and filters on other fields are refused.
    Fields {
        values: &'static [&'static str],
        presence: &'static [&'static str],
    },
}

impl IndexScope {
    /// Whether the index can evaluate a filter.
    pub(crate) fn covers(self, filter: &Filter) -> bool {
        let Self::Fields { values, presence } = self else {
            return true;
        };
        match filter {
            Filter::All(parts) | Filter::Any(parts) => parts.iter().all(|part| self.covers(part)),
            Filter::Not(part) => self.covers(part),
            Filter::Field { name, test } => {
                values.contains(&name.as_str())
                    || (*test == Test::Exists && presence.contains(&name.as_str()))
            }
        }
    }

    pub(crate) fn has_values_of(self, field: &str) -> bool {
        match self {
            Self::Everything => true,
            Self::Fields { values, .. } => values.contains(&field),
        }
    }

    /// The part of a document's metadata that is indexed.
    pub(crate) fn of(self, metadata: &Metadata) -> Cow<'_, Metadata> {
        let Self::Fields { values, presence } = self else {
            return Cow::Borrowed(metadata);
        };
        let kept = values
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), metadata.get(*name)?.clone())));
        let noted = presence
            .iter()
            .filter(|name| metadata.contains_key(**name))
            .map(|name| ((*name).to_owned(), Value::Null));
        Cow::Owned(kept.chain(noted).collect())
    }
}
