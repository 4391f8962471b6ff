//! Text as JSON and most languages escape it, found anywhere in a text.

use std::ops::Range;

/// The text without escapes, or nothing where it has none.
pub(super) fn unescape(text: &str) -> Option<String> {
    text.contains('\\').then(|| {
        let mut plain = String::with_capacity(text.len());
        plain.extend(Characters(text).map(|(c, _)| c));
        plain
    })
}

/// From places in the text without its escapes to those in the text with them. Places are in order and
/// do not overlap.
pub(super) fn widen(text: &str, places: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut widened = Vec::with_capacity(places.len());
    let mut places = places.iter();
    let mut next = places.next();
    let (mut plain, mut at, mut start) = (0, 0, 0);
    for (c, length) in Characters(text) {
        let Some(place) = next else { break };
        if plain == place.start {
            start = at;
        }
        plain += c.len_utf8();
        at += length;
        if plain == place.end {
            widened.push(start..at);
            next = places.next();
        }
    }
    widened
}

/// The characters of a text, each with how many bytes it is written in. What is no escape stays as it is.
struct Characters<'a>(&'a str);

impl Iterator for Characters<'_> {
    type Item = (char, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.0.chars().next()?;
        let (c, length) = match first {
            '\\' => escaped(self.0).unwrap_or((first, 1)),
            _ => (first, first.len_utf8()),
        };
        self.0 = &self.0[length..];
        Some((c, length))
    }
}

/// The character that an escape at the beginning of a text stands for.
fn escaped(text: &str) -> Option<(char, usize)> {
    let c = match text.as_bytes().get(1)? {
        b @ (b'"' | b'\\' | b'/' | b'\'') => char::from(*b),
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let unit = code_unit(text)?;
            if let Some(c) = char::from_u32(unit.into()) {
                return Some((c, 6));
            }
            // Half a character: the other half has to follow.
            let pair = [unit, code_unit(text.get(6..)?)?];
            let c = char::decode_utf16(pair).next()?.ok()?;
            return Some((c, 12));
        }
        _ => return None,
    };
    Some((c, 2))
}

/// The number of an escape like `\u0041`.
fn code_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    let all = digits.bytes().all(|b| b.is_ascii_hexdigit());
    u16::from_str_radix(digits, 16).ok().filter(|_| all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_read_wherever_they_stand() {
        for (text, plain) in [
            (r#"a\"b\\c\/d"#, r#"a"b\c/d"#),
            (r"\u0041\n\ud83d\uddDD!", "A\n🗝!"),
            // Not escapes, or only halves of one.
            (
                r"\w \u00 \ud83d \ud83dx \u+041 é\",
                r"\w \u00 \ud83d \ud83dx \u+041 é\",
            ),
        ] {
            assert_eq!(unescape(text).unwrap(), plain);
        }
        assert_eq!(unescape("plain"), None);
    }

    #[test]
    fn places_are_found_again_among_escapes() {
        let text = r"x\u0041\\yé\nz";
        let plain = unescape(text).unwrap();
        let place = |what: &str| {
            let at = plain.find(what).unwrap();
            at..at + what.len()
        };
        let widened = widen(text, &[place(r"A\"), place("é\n")]);
        let found: Vec<&str> = widened.into_iter().map(|at| &text[at]).collect();
        assert_eq!(found, [r"\u0041\\", r"é\n"]);
    }
}
