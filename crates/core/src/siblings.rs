//! The documents that belong with a hit because they share a value of a metadata field.

use serde_json::Value;

use crate::document::Document;
use crate::error::InvalidInput;

/// So many siblings of one hit are fetched at most, as a page has at most.
pub const MAX_SIBLINGS: usize = 1000;

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
}

/// Puts the members of a section into document order and keeps as much as is wanted.
pub fn arrange_siblings(mut documents: Vec<Document>, hit: &Document, expand: &Expand) -> Vec<Document> {
    // Ingested chunks know their place in the source; others stand in the order they were added.
    documents.sort_by_key(|document| document.metadata.get("position").and_then(Value::as_i64));
    if let Some(budget) = expand.max_chars {
        keep_nearest(&mut documents, hit, budget);
    }
    documents
}

/// Keeps the hit, then its neighbours outwards while they fit into the budget.
fn keep_nearest(documents: &mut Vec<Document>, hit: &Document, budget: usize) {
    let Some(center) = documents.iter().position(|document| document.id == hit.id) else {
        return;
    };
    let length = |at: usize| documents.get(at).map(|document| document.text.chars().count());
    let (mut first, mut last) = (center, center);
    let mut left = budget.saturating_sub(length(center).unwrap_or_default());
    loop {
        let mut grown = false;
        if let Some(size) = length(last + 1).filter(|size| *size <= left) {
            (last, left, grown) = (last + 1, left - size, true);
        }
        if let Some(size) = first.checked_sub(1).and_then(length).filter(|size| *size <= left) {
            (first, left, grown) = (first - 1, left - size, true);
        }
        if !grown {
            break;
        }
    }
    documents.truncate(last + 1);
    documents.drain(..first);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::{DocumentId, Metadata};
    use serde_json::json;

    fn document(id: &str, text: &str) -> Document {
        Document {
            id: DocumentId::parse(id).unwrap(),
            text: text.to_owned(),
            metadata: Metadata::new(),
        }
    }

    #[test]
    fn siblings_are_kept_outwards_from_the_hit() {
        let all: Vec<Document> = ["a", "b", "c", "d", "e"].map(|id| document(id, "12345")).to_vec();
        let kept = |budget: usize| {
            let mut documents = all.clone();
            keep_nearest(&mut documents, &all[2], budget);
            documents
                .iter()
                .map(|d| d.id.as_str().to_owned())
                .collect::<Vec<_>>()
                .join("")
        };
        assert_eq!(kept(0), "c");
        assert_eq!(kept(10), "cd");
        assert_eq!(kept(15), "bcd");
        assert_eq!(kept(1000), "abcde");
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
