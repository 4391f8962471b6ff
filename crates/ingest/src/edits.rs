//! Replacements in a text that are applied to its pieces after splitting.
//!
//! They are found in the whole text, because a piece alone does not say whether it begins within code.

use std::borrow::Cow;
use std::ops::Range;

/// Ranges in order, without overlap, and their replacements.
#[derive(Debug, Default)]
pub(super) struct Edits(Vec<(Range<usize>, &'static str)>);

impl Edits {
    pub(super) fn new(mut edits: Vec<(Range<usize>, &'static str)>) -> Self {
        edits.sort_by_key(|(range, _)| range.start);
        let mut end = 0;
        edits.retain(|(range, _)| {
            let apart = range.start >= end;
            end = end.max(range.end);
            apart
        });
        Self(edits)
    }

    /// Applies the edits to a piece that begins at `offset` of the text.
    pub(super) fn applied<'t>(&self, offset: usize, piece: &'t str) -> Cow<'t, str> {
        let end = offset + piece.len();
        let first = self.0.partition_point(|(range, _)| range.end <= offset);
        let mut text = String::new();
        let mut copied = offset;
        for (range, instead) in self.0[first..].iter().take_while(|(range, _)| range.start < end) {
            text.push_str(&piece[copied - offset..range.start.max(offset) - offset]);
            if range.start >= offset {
                text.push_str(instead);
            }
            copied = range.end.min(end);
        }
        if copied == offset && text.is_empty() {
            return Cow::Borrowed(piece);
        }
        text.push_str(&piece[copied - offset..]);
        Cow::Owned(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_edited_where_they_stand() {
        let edits = Edits::new(vec![(6..9, "|"), (2..4, ""), (3..5, "never")]);
        assert_eq!(edits.applied(0, "abcdefghij"), "abef|j");
        assert_eq!(edits.applied(2, "cd"), "");
        assert_eq!(edits.applied(3, "defgh"), "ef|");
        assert_eq!(edits.applied(7, "hij"), "j");
        assert_eq!(edits.applied(9, "j"), "j");
    }
}
