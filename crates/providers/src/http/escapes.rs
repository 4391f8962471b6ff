//! Text as JSON and most languages, addresses and pages escape it, found anywhere in a text.

use std::ops::Range;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Escapes {
    /// `\n`, `\u0041`
    Backslash,
    /// `%2F`, of the bytes of UTF-8.
    Percent,
    /// `&amp;`, `&#39;`
    Html,
}

impl Escapes {
    /// What every one of them begins with.
    fn sign(self) -> char {
        match self {
            Self::Backslash => '\\',
            Self::Percent => '%',
            Self::Html => '&',
        }
    }

    /// The text without escapes, or nothing where it has none.
    pub(super) fn undo(self, text: &str) -> Option<String> {
        text.contains(self.sign()).then(|| {
            let mut plain = String::with_capacity(text.len());
            plain.extend(self.characters(text).map(|(c, _)| c));
            plain
        })
    }

    /// From places in the text without its escapes to those in the text with them. Places are in order
    /// and do not overlap.
    pub(super) fn widen(self, text: &str, places: &[Range<usize>]) -> Vec<Range<usize>> {
        let mut widened = Vec::with_capacity(places.len());
        let mut places = places.iter();
        let mut next = places.next();
        let (mut plain, mut at, mut start) = (0, 0, 0);
        for (c, length) in self.characters(text) {
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

    fn characters(self, text: &str) -> Characters<'_> {
        Characters { text, escapes: self }
    }

    /// The character that an escape at the beginning of a text stands for, and its length.
    fn read(self, text: &str) -> Option<(char, usize)> {
        match self {
            Self::Backslash => after_backslash(text),
            Self::Percent => percent_encoded(text),
            Self::Html => entity(text),
        }
    }
}

/// The characters of a text, each with how many bytes it is written in. What is no escape stays as it is.
struct Characters<'a> {
    text: &'a str,
    escapes: Escapes,
}

impl Iterator for Characters<'_> {
    type Item = (char, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let first = self.text.chars().next()?;
        let plain = (first, first.len_utf8());
        let (c, length) = if first == self.escapes.sign() {
            self.escapes.read(self.text).unwrap_or(plain)
        } else {
            plain
        };
        self.text = &self.text[length..];
        Some((c, length))
    }
}

fn after_backslash(text: &str) -> Option<(char, usize)> {
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

fn percent_encoded(text: &str) -> Option<(char, usize)> {
    let byte = |place: usize| {
        let digits = text.get(3 * place..3 * place + 3)?.strip_prefix('%')?;
        let all = digits.bytes().all(|b| b.is_ascii_hexdigit());
        u8::from_str_radix(digits, 16).ok().filter(|_| all)
    };
    let count = match byte(0)? {
        0..0x80 => 1,
        0x80..0xe0 => 2,
        0xe0..0xf0 => 3,
        0xf0.. => 4,
    };
    let bytes: Vec<u8> = (0..count).map(byte).collect::<Option<_>>()?;
    let c = std::str::from_utf8(&bytes).ok()?.chars().next()?;
    Some((c, 3 * count))
}

fn entity(text: &str) -> Option<(char, usize)> {
    /// As long as `&#x10ffff;`, with zeros before the number.
    const LONGEST: usize = 12;
    let end = text.bytes().take(LONGEST).position(|byte| byte == b';')?;
    let c = match text.get(1..end)? {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        number => {
            let number = number.strip_prefix('#')?;
            let code = match number.strip_prefix(['x', 'X']) {
                Some(digits) => u32::from_str_radix(digits, 16),
                None => number.parse(),
            };
            char::from_u32(code.ok()?)?
        }
    };
    Some((c, end + 1))
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
            assert_eq!(Escapes::Backslash.undo(text).unwrap(), plain);
        }
        assert_eq!(Escapes::Backslash.undo("plain"), None);
    }

    #[test]
    fn places_are_found_again_among_escapes() {
        let text = r"x\u0041\\yé\nz";
        let plain = Escapes::Backslash.undo(text).unwrap();
        let place = |what: &str| {
            let at = plain.find(what).unwrap();
            at..at + what.len()
        };
        let widened = Escapes::Backslash.widen(text, &[place(r"A\"), place("é\n")]);
        let found: Vec<&str> = widened.into_iter().map(|at| &text[at]).collect();
        assert_eq!(found, [r"\u0041\\", r"é\n"]);
    }
    #[test]
    fn addresses_and_pages_escape_in_their_own_ways() {
        for (escapes, text, plain) in [
            (Escapes::Percent, "a%2Fb%2f%C3%BC%F0%9F%97%9D", "a/b/ü🗝"),
            (
                Escapes::Percent,
                "100%, %2, %+2f %C3 %ab%C3%41 é%",
                "100%, %2, %+2f %C3 %ab%C3A é%",
            ),
            (
                Escapes::Html,
                "&lt;a&#62; &amp;amp; &#x27;&#X1f5dd;",
                "<a> &amp; '🗝",
            ),
            (
                Escapes::Html,
                "a & b; &nothing; &#; &#x; &é;&",
                "a & b; &nothing; &#; &#x; &é;&",
            ),
        ] {
            assert_eq!(escapes.undo(text).unwrap(), plain);
        }
        assert_eq!(
            Escapes::Percent.widen("x%C3%BCy%2F", &[1..3, 4..5]),
            [1..7, 8..11]
        );
    }
}
