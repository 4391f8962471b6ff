//! The siblings of a hit: documents that share a value with it, the nearest around it in document
//! order.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use serde_json::Value;

use crate::document::{Document, Metadata};
use crate::error::InvalidInput;
use crate::filter::{Filter, Scalar};

/// A hit has at most this many siblings, itself included.
pub const MAX_SIBLINGS: usize = 100;
/// The siblings of all hits of an answer are at most this large, with their metadata.
pub const SIBLING_BYTES: usize = 4 << 20;
/// On either side of a hit, so many documents of its section are looked at, in the order of
/// insertion. Only in larger sections can that differ from document order.
pub const SECTION_REACH: usize = 500;

/// Which field makes documents siblings, and how much of their text is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expand {
    pub field: String,
    /// Siblings are left out, farthest from the hit first, until the rest fits.
    pub max_chars: Option<usize>,
}

impl Expand {
    /// Reads the `expand` of a query: the name of a field, or an object with it and a budget.
    pub fn from_json(value: &Value) -> Result<Self, InvalidInput> {
        let wrong = || {
            InvalidInput::new(
                "'expand' is the name of a metadata field, or an object with 'field' and, optionally, 'max_chars'",
            )
        };
        let budget = match value.get("max_chars") {
            None | Some(Value::Null) => None,
            Some(budget) => Some(budget.as_u64().ok_or_else(wrong)?),
        };
        let field = value.as_str().or_else(|| value.get("field")?.as_str());
        Ok(Self {
            field: field.ok_or_else(wrong)?.to_owned(),
            max_chars: budget.map(|chars| usize::try_from(chars).unwrap_or(usize::MAX)),
        })
    }

    /// The value that the siblings of a document share; `None` where it has none of its own.
    pub fn section(&self, hit: &Document) -> Option<Scalar> {
        hit.metadata.get(&self.field).and_then(Scalar::from_json)
    }

    pub fn filter(&self, section: Scalar) -> Filter {
        Filter::equals(self.field.clone(), section)
    }
}

/// Where a document stands among its siblings. Ingested chunks know their source and their place in
/// it; others are equal, and stay in the order they were added.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct DocumentPosition {
    source: Option<String>,
    position: Option<i64>,
}

impl DocumentPosition {
    pub fn of(metadata: &Metadata) -> Self {
        Self {
            source: metadata.get("source").and_then(Value::as_str).map(str::to_owned),
            position: metadata.get("position").and_then(Value::as_i64),
        }
    }
}

/// Gathers the siblings of one hit after the other, until all of them together are large enough.
/// From then on a hit has none but itself.
#[derive(Debug)]
pub struct Gathering<'a> {
    pub expand: &'a Expand,
    bytes_left: usize,
    /// Whether some were left out because they are too many for one answer.
    pub cut: bool,
}

impl<'a> Gathering<'a> {
    pub fn new(expand: &'a Expand, max_bytes: usize) -> Self {
        Self {
            expand,
            bytes_left: max_bytes,
            cut: false,
        }
    }

    /// The hit, then its neighbours outwards while they fit, in document order. `hit` is its place
    /// among the `members` of its section, which `read` gives one by one.
    pub fn around<E>(
        &mut self,
        members: usize,
        hit: usize,
        mut read: impl FnMut(usize) -> Result<Arc<Document>, E>,
    ) -> Result<Vec<Arc<Document>>, E> {
        let center = read(hit)?;
        let mut chars_left = self.expand.max_chars.map_or(usize::MAX, |budget| {
            budget.saturating_sub(center.text.chars().count())
        });
        self.bytes_left = self.bytes_left.saturating_sub(size(&center));
        let mut kept = VecDeque::from([center]);
        let (mut after, mut before) = (Some(hit + 1), hit.checked_sub(1));
        while after.is_some() || before.is_some() {
            let may_grow = |kept: &VecDeque<_>| kept.len() < MAX_SIBLINGS;
            if let Some(place) = after.take().filter(|place| *place < members && may_grow(&kept))
                && let Some(next) = self.fitting(read(place)?, &mut chars_left)
            {
                kept.push_back(next);
                after = Some(place + 1);
            }
            if let Some(place) = before.take().filter(|_| may_grow(&kept))
                && let Some(next) = self.fitting(read(place)?, &mut chars_left)
            {
                kept.push_front(next);
                before = place.checked_sub(1);
            }
        }
        Ok(kept.into())
    }

    /// The same of a section that is at hand, in document order.
    pub fn within(&mut self, section: &[Arc<Document>], hit: &Document) -> Vec<Arc<Document>> {
        let mut section = section.to_vec();
        let place = section.iter().position(|member| member.id == hit.id);
        let place = place.unwrap_or_else(|| {
            // It went meanwhile, or the section was too large to be had whole.
            let standing = DocumentPosition::of(&hit.metadata);
            let place = section.partition_point(|member| DocumentPosition::of(&member.metadata) <= standing);
            section.insert(place, Arc::new(hit.clone()));
            place
        });
        let read = |at: usize| Ok::<_, Infallible>(section[at].clone());
        self.around(section.len(), place, read)
            .unwrap_or_else(|never| match never {})
    }

    fn fitting(&mut self, document: Arc<Document>, chars_left: &mut usize) -> Option<Arc<Document>> {
        let (chars, bytes) = (document.text.chars().count(), size(&document));
        if chars > *chars_left {
            return None;
        }
        self.cut |= bytes > self.bytes_left;
        if self.cut {
            return None;
        }
        *chars_left -= chars;
        self.bytes_left -= bytes;
        Some(document)
    }
}

/// Puts the members of a section, which come in the order of insertion, into document order.
pub fn in_document_order(members: Vec<Document>) -> Vec<Arc<Document>> {
    let mut members: Vec<Arc<Document>> = members.into_iter().map(Arc::new).collect();
    members.sort_by_cached_key(|member| DocumentPosition::of(&member.metadata));
    members
}

/// About how many bytes a document is in an answer.
fn size(document: &Document) -> usize {
    const NAMES_AND_BRACES: usize = 32;
    let metadata = document.metadata.iter();
    let metadata: usize = metadata
        .map(|(name, value)| name.len() + 4 + value_size(value))
        .sum();
    NAMES_AND_BRACES + document.id.as_str().len() + document.text.len() + metadata
}

fn value_size(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 6,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => 2 + items.iter().map(|item| value_size(item) + 1).sum::<usize>(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| name.len() + 4 + value_size(value))
            .sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::DocumentId;
    use serde_json::json;

    fn document(id: &str, metadata: Value) -> Document {
        Document {
            id: DocumentId::parse(id).unwrap(),
            text: "12345".to_owned(),
            metadata: serde_json::from_value(metadata).unwrap(),
        }
    }

    fn ids(documents: &[Arc<Document>]) -> String {
        documents.iter().map(|document| document.id.as_str()).collect()
    }

    #[test]
    fn siblings_are_kept_outwards_from_the_hit() {
        let all = in_document_order(["a", "b", "c", "d", "e"].map(|id| document(id, json!({}))).into());
        let kept = |hit: usize, max_chars: usize| {
            let expand = Expand {
                field: "section".to_owned(),
                max_chars: Some(max_chars),
            };
            ids(&Gathering::new(&expand, 10_000).within(&all, &all[hit]))
        };
        assert_eq!(kept(2, 0), "c");
        assert_eq!(kept(2, 10), "cd");
        assert_eq!(kept(2, 15), "bcd");
        assert_eq!(kept(2, 1000), "abcde");
        assert_eq!(kept(0, 15), "abc");
        assert_eq!(kept(4, 15), "cde");
    }

    #[test]
    fn all_hits_together_have_so_many_siblings_and_no_more() {
        let members = (0..500).map(|n| document(&format!("d{n}"), json!({})));
        let all = in_document_order(members.collect());
        let expand = Expand {
            field: "section".to_owned(),
            max_chars: None,
        };
        let mut gathering = Gathering::new(&expand, 10_000);
        assert_eq!(gathering.within(&all, &all[250]).len(), MAX_SIBLINGS);
        assert!(!gathering.cut);
        let mut total = 0;
        for hit in &all {
            let siblings = gathering.within(&all, hit);
            assert!(
                siblings.iter().any(|sibling| sibling.id == hit.id),
                "the hit itself"
            );
            total += siblings.len();
        }
        assert!(gathering.cut);
        assert!(total < 700, "{total}");
    }

    #[test]
    fn sources_follow_each_other() {
        let chunk = |id, source, position| document(id, json!({"source": source, "position": position}));
        let members = vec![
            chunk("d", "two", 1),
            chunk("b", "one", 2),
            chunk("a", "one", 1),
            chunk("e", "two", 2),
        ];
        let ordered = in_document_order(members);
        assert_eq!(ids(&ordered), "abde");
        let expand = Expand {
            field: "section".to_owned(),
            max_chars: None,
        };
        let missing = chunk("c", "one", 3);
        let siblings = Gathering::new(&expand, 10_000).within(&ordered, &missing);
        assert_eq!(
            ids(&siblings),
            "abcde",
            "a hit that is not among them has its place too"
        );
    }

    #[test]
    fn expand_is_a_field_or_a_field_with_a_budget() {
        let read = |value: Value| Expand::from_json(&value).map(|expand| (expand.field, expand.max_chars));
        assert_eq!(read(json!("s")).unwrap(), ("s".to_owned(), None));
        assert_eq!(
            read(json!({"field": "s", "max_chars": 9})).unwrap(),
            ("s".to_owned(), Some(9))
        );
        for wrong in [json!(3), json!({}), json!({"field": "s", "max_chars": "9"})] {
            assert!(read(wrong).is_err());
        }
    }
}
