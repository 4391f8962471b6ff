//! How good a hit is, by the thresholds of its collection.
//!
//! A collection says in its metadata how near a document must be: `match_threshold` is the largest
//! cosine distance (0 to 2) that answers the question, `partial_threshold` the largest that is still
//! about it. Models differ in what distances they give, so a collection with another model or other
//! texts sets its own.

use ragstone_core::document::Metadata;

pub const MATCH_THRESHOLD: &str = "match_threshold";
pub const PARTIAL_THRESHOLD: &str = "partial_threshold";

/// Ordered from worst to best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grade {
    None,
    Partial,
    Match,
}

impl Grade {
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Partial => "partial",
            Self::Match => "match",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    pub matching: f32,
    /// Never below `matching`.
    pub partial: f32,
}

impl Default for Thresholds {
    /// Fits sentence-embedding models of the MiniLM kind.
    fn default() -> Self {
        Self {
            matching: 0.5,
            partial: 0.75,
        }
    }
}

impl Thresholds {
    /// Reads them from a collection's metadata. One that is no distance is reported and counts as not
    /// given. One that is given alone takes the default of the other along where that would contradict it:
    /// a hit that is not even `partial` is no `match`.
    pub(super) fn read(metadata: &Metadata, mut warn: impl FnMut(String)) -> Self {
        let defaults = Self::default();
        let mut given = |key: &str| {
            let value = metadata.get(key).filter(|value| !value.is_null())?;
            let distance = value.as_f64().filter(|far| (0.0..=2.0).contains(far));
            if distance.is_none() {
                warn(format!(
                    "'{key}' in its metadata must be a distance from 0 to 2; it is ignored"
                ));
            }
            distance.map(|far| far as f32)
        };
        let (matching, partial) = match (given(MATCH_THRESHOLD), given(PARTIAL_THRESHOLD)) {
            (None, None) => (defaults.matching, defaults.partial),
            (Some(matching), None) => (matching, defaults.partial.max(matching)),
            (None, Some(partial)) => (defaults.matching.min(partial), partial),
            (Some(matching), Some(partial)) if partial < matching => {
                warn(format!(
                    "'{PARTIAL_THRESHOLD}' in its metadata must not be less than '{MATCH_THRESHOLD}'; the smaller \
                     distance makes a match"
                ));
                (partial, matching)
            }
            (Some(matching), Some(partial)) => (matching, partial),
        };
        Self { matching, partial }
    }

    /// A hit without a distance was found by its words: it is about the question, and how near it is
    /// to an answer is not known.
    pub(super) fn grade(self, distance: Option<f32>) -> Grade {
        match distance {
            Some(distance) if distance <= self.matching => Grade::Match,
            Some(distance) if distance <= self.partial => Grade::Partial,
            Some(_) => Grade::None,
            None => Grade::Partial,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(metadata: Value) -> (Thresholds, Vec<String>) {
        let mut warnings = Vec::new();
        let thresholds = Thresholds::read(metadata.as_object().unwrap(), |warning| warnings.push(warning));
        (thresholds, warnings)
    }

    #[test]
    fn thresholds_are_distances_from_the_metadata() {
        let (thresholds, warnings) = read(json!({"match_threshold": 0.3, "partial_threshold": 0.6}));
        assert!(warnings.is_empty());
        let grade = |distance: f32| thresholds.grade(Some(distance)).name();
        assert_eq!(
            [0.0, 0.3, 0.31, 0.6, 0.61, 2.0].map(grade),
            ["match", "match", "partial", "partial", "none", "none"]
        );
        assert_eq!(thresholds.grade(None), Grade::Partial);
    }

    #[test]
    fn a_wide_match_widens_the_partial() {
        let (thresholds, _) = read(json!({"match_threshold": 0.9}));
        assert_eq!(thresholds.partial, 0.9);
    }

    #[test]
    fn a_narrow_partial_narrows_the_match() {
        let (thresholds, warnings) = read(json!({"partial_threshold": 0.2}));
        assert_eq!((thresholds.matching, thresholds.partial), (0.2, 0.2));
        assert_eq!(thresholds.grade(Some(0.28)), Grade::None);
        assert!(warnings.is_empty());
        let (wide, _) = read(json!({"partial_threshold": 0.9}));
        assert_eq!((wide.matching, wide.partial), (0.5, 0.9));
    }

    #[test]
    fn thresholds_that_contradict_each_other_are_reported() {
        let (thresholds, warnings) = read(json!({"match_threshold": 0.9, "partial_threshold": 0.5}));
        assert_eq!((thresholds.matching, thresholds.partial), (0.5, 0.9));
        assert!(
            warnings[0].contains("match_threshold") && warnings[0].contains("partial_threshold"),
            "{warnings:?}"
        );
        let (_, equal) = read(json!({"match_threshold": 0.5, "partial_threshold": 0.5}));
        assert!(equal.is_empty());
    }

    #[test]
    fn what_is_no_distance_is_reported() {
        for wrong in [json!("0.3"), json!(-1), json!(2.5), json!([0.1])] {
            let (thresholds, warnings) = read(json!({"match_threshold": wrong}));
            assert_eq!(thresholds, Thresholds::default());
            assert!(warnings[0].contains("match_threshold"), "{warnings:?}");
        }
        assert_eq!(
            read(json!({"match_threshold": null})),
            (Thresholds::default(), vec![])
        );
    }
}
