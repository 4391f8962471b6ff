//! The analysed words of one document as bytes: sorted, front-coded, with their frequencies.
//!
//! They are stored with the document's row, not in a dictionary, so that no word outlives the
//! document it came from.

use ragstone_core::analysis::TermCounts;

use crate::error::{Error, Result};

pub(crate) fn encode(terms: &TermCounts) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(terms.counts.len() * 6);
    put_number(&mut bytes, terms.length);
    let mut previous: &[u8] = b"";
    for (term, count) in &terms.counts {
        let term = term.as_bytes();
        let shared = previous.iter().zip(term).take_while(|(a, b)| a == b).count();
        put_number(&mut bytes, shared as u32);
        put_number(&mut bytes, (term.len() - shared) as u32);
        bytes.extend_from_slice(&term[shared..]);
        put_number(&mut bytes, *count);
        previous = term;
    }
    bytes
}

/// Visits each word without allocating it, and returns the document's length.
pub(crate) fn for_each(mut bytes: &[u8], mut visit: impl FnMut(&str, u32)) -> Result<u32> {
    let damaged = || Error::Damaged("a document's words cannot be read".into());
    let length = take_number(&mut bytes).ok_or_else(damaged)?;
    let mut term = Vec::with_capacity(64);
    while !bytes.is_empty() {
        let shared = take_number(&mut bytes).ok_or_else(damaged)? as usize;
        let rest = take_number(&mut bytes).ok_or_else(damaged)? as usize;
        if shared > term.len() || rest > bytes.len() {
            return Err(damaged());
        }
        term.truncate(shared);
        let (suffix, after) = bytes.split_at(rest);
        term.extend_from_slice(suffix);
        bytes = after;
        let count = take_number(&mut bytes).ok_or_else(damaged)?;
        visit(std::str::from_utf8(&term).map_err(|_| damaged())?, count);
    }
    Ok(length)
}

fn put_number(bytes: &mut Vec<u8>, mut number: u32) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take_number(bytes: &mut &[u8]) -> Option<u32> {
    let mut number = 0u32;
    for shift in (0..35).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u32::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<TermCounts> {
        let mut counts = std::collections::BTreeMap::new();
        let length = for_each(bytes, |term, count| {
            counts.insert(term.to_owned(), count);
        })?;
        Ok(TermCounts { counts, length })
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let counts = [
            ("aero", 1),
            ("aerodynam", 300),
            ("naïve", 2),
            ("zx-4417", u32::MAX),
        ];
        let terms = TermCounts {
            counts: counts.map(|(term, count)| (term.to_owned(), count)).into(),
            length: 70_000,
        };
        assert_eq!(decode(&encode(&terms)).unwrap(), terms);
        assert_eq!(
            decode(&encode(&TermCounts::default())).unwrap(),
            TermCounts::default()
        );
    }

    #[test]
    fn damaged_bytes_are_an_error() {
        for bytes in [
            &b""[..],
            &[0xff],
            &[1, 5, 1, b'a', 1],
            &[1, 0, 9, b'a'],
            &[1, 0, 1, 0xff, 1],
        ] {
            assert!(decode(bytes).is_err(), "{bytes:?}");
        }
    }
}
