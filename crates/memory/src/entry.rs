//! The entries of agent memory.

use ragstone_core::CollectionName;
use ragstone_core::document::Metadata;
use ragstone_core::error::InvalidInput;
use serde::{Deserialize, Serialize};

/// No embedding model reads more of one text: longer texts belong into a collection, split into
/// documents. It also bounds the memory of the worker.
pub const MAX_TEXT_BYTES: usize = 64 << 10;

const MAX_LABEL_BYTES: usize = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    Knowledge,
    Observation,
    Reflection,
    Learning,
}

impl MemoryKind {
    pub const ALL: [Self; 4] = [
        Self::Knowledge,
        Self::Observation,
        Self::Reflection,
        Self::Learning,
    ];

    /// Its name in retrieval, and of its vector collection.
    pub fn collection(self) -> &'static str {
        match self {
            Self::Knowledge => "knowledge",
            Self::Observation => "observation",
            Self::Reflection => "reflection",
            Self::Learning => "learning",
        }
    }

    /// The name of its source store.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Knowledge => "knowledge",
            Self::Observation => "observations",
            Self::Reflection => "reflections",
            Self::Learning => "learnings",
        }
    }

    pub fn from_collection(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.collection() == name)
    }

    pub fn from_plural(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.plural() == name)
    }

    /// Whether its entries belong to a session, and are not retrieved in others.
    pub fn has_session(self) -> bool {
        matches!(self, Self::Observation | Self::Reflection)
    }

    pub(super) fn records(self) -> &'static str {
        match self {
            Self::Knowledge => "memory.knowledge",
            Self::Observation => "memory.observation",
            Self::Reflection => "memory.reflection",
            Self::Learning => "memory.learning",
        }
    }

    /// The collection of its vectors.
    pub fn vectors(self) -> CollectionName {
        CollectionName::internal(self.records())
    }

    /// Its index in [`MemoryKind::ALL`].
    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// One entry of memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum MemoryEntry {
    Knowledge {
        content: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        category: Option<String>,
    },
    Observation {
        session_key: String,
        content: String,
    },
    Reflection {
        session_key: String,
        content: String,
    },
    Learning {
        trigger: String,
        fix: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        category: Option<String>,
    },
}

impl MemoryEntry {
    pub fn kind(&self) -> MemoryKind {
        match self {
            Self::Knowledge { .. } => MemoryKind::Knowledge,
            Self::Observation { .. } => MemoryKind::Observation,
            Self::Reflection { .. } => MemoryKind::Reflection,
            Self::Learning { .. } => MemoryKind::Learning,
        }
    }

    /// The text that is embedded and retrieved.
    pub fn content(&self) -> String {
        match self {
            Self::Knowledge { content, .. }
            | Self::Observation { content, .. }
            | Self::Reflection { content, .. } => content.clone(),
            Self::Learning { trigger, fix, .. } => format!("Trigger: {trigger}\nFix: {fix}"),
        }
    }

    pub fn session_key(&self) -> Option<&str> {
        match self {
            Self::Observation { session_key, .. } | Self::Reflection { session_key, .. } => Some(session_key),
            Self::Knowledge { .. } | Self::Learning { .. } => None,
        }
    }

    pub fn category(&self) -> Option<&str> {
        match self {
            Self::Knowledge { category, .. } | Self::Learning { category, .. } => category.as_deref(),
            Self::Observation { .. } | Self::Reflection { .. } => None,
        }
    }

    /// The metadata of its vector, for filters.
    pub fn metadata(&self) -> Metadata {
        let fields = [("session_key", self.session_key()), ("category", self.category())];
        fields
            .into_iter()
            .filter_map(|(name, value)| Some((name.to_owned(), value?.into())))
            .collect()
    }

    /// Checks the fields; the error names the field and the rule.
    pub fn check(&self) -> Result<(), InvalidInput> {
        let texts: &[(&str, &str)] = match self {
            Self::Knowledge { content, .. }
            | Self::Observation { content, .. }
            | Self::Reflection { content, .. } => &[("content", content)],
            Self::Learning { trigger, fix, .. } => &[("trigger", trigger), ("fix", fix)],
        };
        for (field, text) in texts {
            check_text(field, text, MAX_TEXT_BYTES)?;
        }
        for (field, label) in [("session_key", self.session_key()), ("category", self.category())] {
            label.map_or(Ok(()), |label| check_text(field, label, MAX_LABEL_BYTES))?;
        }
        Ok(())
    }
}

fn check_text(field: &str, text: &str, limit: usize) -> Result<(), InvalidInput> {
    if text.trim().is_empty() {
        return Err(InvalidInput::new(format!("'{field}' must not be empty")));
    }
    if text.len() > limit {
        return Err(InvalidInput::new(format!(
            "'{field}' has {} bytes; at most {limit} are allowed",
            text.len()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_in_the_order_of_their_index() {
        for (index, kind) in MemoryKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.index(), index);
            assert_eq!(MemoryKind::from_collection(kind.collection()), Some(kind));
            assert_eq!(MemoryKind::from_plural(kind.plural()), Some(kind));
        }
    }

    #[test]
    fn a_learnings_content_is_its_trigger_and_its_fix() {
        let learning = MemoryEntry::Learning {
            trigger: "build fails".into(),
            fix: "clear the cache".into(),
            category: Some("ci".into()),
        };
        assert_eq!(learning.content(), "Trigger: build fails\nFix: clear the cache");
        assert_eq!(learning.metadata()["category"], "ci");
    }

    #[test]
    fn what_breaks_a_rule_is_named() {
        let knowledge = |content: &str, category: Option<&str>| MemoryEntry::Knowledge {
            content: content.to_owned(),
            category: category.map(str::to_owned),
        };
        assert!(knowledge("a", None).check().is_ok());
        for (entry, field) in [
            (knowledge(" \n", None), "'content'"),
            (knowledge(&"x".repeat(MAX_TEXT_BYTES + 1), None), "'content'"),
            (knowledge("a", Some("")), "'category'"),
            (
                MemoryEntry::Reflection {
                    session_key: "s".repeat(513),
                    content: "a".into(),
                },
                "'session_key'",
            ),
        ] {
            let message = entry.check().unwrap_err().to_string();
            assert!(message.starts_with(field), "{message}");
        }
    }
}
