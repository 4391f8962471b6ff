//! Collections and their names.

use std::fmt;

use crate::document::Metadata;
use crate::error::InvalidInput;

/// The metadata key that says which model embeds a collection's documents.
pub const EMBEDDING_MODEL: &str = "embedding_model";
/// The metadata key that says which provider the model belongs to; stored, never interpreted.
pub const EMBEDDING_PROVIDER: &str = "embedding_provider";

const MAX_NAME_BYTES: usize = 128;

/// A name that matches `[A-Za-z0-9][A-Za-z0-9._-]{0,127}`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CollectionName(String);

impl CollectionName {
    pub fn parse(name: impl Into<String>) -> Result<Self, InvalidInput> {
        let name = name.into();
        let mut bytes = name.bytes();
        let starts_well = bytes.next().is_some_and(|b| b.is_ascii_alphanumeric());
        let goes_on_well = bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
        if starts_well && goes_on_well && name.len() <= MAX_NAME_BYTES {
            return Ok(Self(name));
        }
        Err(InvalidInput::new(format!(
            "Invalid collection name {:?}: it must start with a letter or digit, go on with letters, digits, '.', '_' or '-', \
             and have 1 to {MAX_NAME_BYTES} characters",
            shorten(&name)
        )))
    }

    /// A collection of Ragstone's own, such as agent memory. Its name begins with a dot, which no
    /// parsed name does, so no client can reach it; stores do not list it.
    pub fn internal(name: &str) -> Self {
        Self(format!(".{name}"))
    }

    pub fn is_internal(&self) -> bool {
        self.0.starts_with('.')
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for CollectionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A collection as it stands: how many documents it has and what is known of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Collection {
    pub name: CollectionName,
    pub count: u64,
    pub metadata: Metadata,
    /// The width of its vectors; `None` until the first document is stored.
    pub dimensions: Option<usize>,
}

impl Collection {
    /// The model its metadata names, if it names one.
    pub fn embedding_model(&self) -> Option<&str> {
        self.metadata
            .get(EMBEDDING_MODEL)
            .and_then(|v| v.as_str())
            .filter(|id| !id.is_empty())
    }
}

/// Cuts what a client sent to a length that is fit for an error message.
pub fn shorten(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    match text.char_indices().nth(MAX_CHARS) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rule() {
        for good in ["a", "A9", "docs.v1_2-x", &"x".repeat(128)] {
            assert!(CollectionName::parse(good).is_ok(), "{good}");
        }
        for bad in ["", ".a", "-a", "a b", "a/b", "ä", "a\n", &"x".repeat(129)] {
            assert!(CollectionName::parse(bad).is_err(), "{bad:?}");
        }
    }
}
