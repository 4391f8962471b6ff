//! Text of unknown encoding.

use chardetng::{EncodingDetector, Iso2022JpDetection, Utf8Detection};
use encoding_rs::{Encoding, UTF_8, WINDOWS_1252};

use super::Unreadable;

/// A zero byte within this much of the beginning means that a file is not text.
pub(crate) const BINARY_WITHIN: usize = 8192;
/// A page that declares its encoding has to do so within this much of the beginning.
const DECLARED_WITHIN: usize = 1024;
const CHARSET: &[u8] = b"charset";

pub(crate) fn is_binary(bytes: &[u8]) -> bool {
    Encoding::for_bom(bytes).is_none() && bytes[..bytes.len().min(BINARY_WITHIN)].contains(&0)
}

/// Decodes by the byte order mark, as UTF-8, or in the encoding that fits best. A text that is UTF-8
/// but for a few bytes is read as UTF-8 with these bytes replaced.
pub fn decode(bytes: &[u8]) -> Result<String, Unreadable> {
    if is_binary(bytes) {
        return Err(Unreadable::new("it is a binary file, not text"));
    }
    let encoding = match Encoding::for_bom(bytes) {
        Some((encoding, _)) => encoding,
        None if std::str::from_utf8(bytes).is_ok() || has_multibyte(bytes) => UTF_8,
        None => guess(bytes),
    };
    Ok(clean(encoding.decode(bytes).0.into_owned()))
}

fn guess(bytes: &[u8]) -> &'static Encoding {
    let mut detector = EncodingDetector::new(Iso2022JpDetection::Deny);
    detector.feed(bytes, true);
    detector.guess(None, Utf8Detection::Deny)
}

/// Decodes a page in the encoding it declares, unless it is UTF-8 or has a byte order mark.
pub(super) fn decode_page(bytes: &[u8]) -> Result<String, Unreadable> {
    let is_clear = Encoding::for_bom(bytes).is_some() || std::str::from_utf8(bytes).is_ok();
    match declared(bytes).filter(|_| !is_clear) {
        Some(encoding) => Ok(clean(encoding.decode_without_bom_handling(bytes).0.into_owned())),
        None => decode(bytes),
    }
}

/// The encoding after the first `charset=`. A declaration in ASCII cannot be about UTF-16.
fn declared(bytes: &[u8]) -> Option<&'static Encoding> {
    let head = bytes[..bytes.len().min(DECLARED_WITHIN)].to_ascii_lowercase();
    let at = head.windows(CHARSET.len()).position(|window| window == CHARSET)?;
    let rest = head[at + CHARSET.len()..].trim_ascii_start();
    let label = rest.strip_prefix(b"=")?.trim_ascii_start();
    let label = label
        .strip_prefix(b"\"")
        .or(label.strip_prefix(b"'"))
        .unwrap_or(label);
    let end = label.iter().position(|byte| b"\"'/>; \t\r\n".contains(byte));
    let encoding = Encoding::for_label(&label[..end.unwrap_or(label.len())])?;
    (encoding.is_ascii_compatible() && encoding != UTF_8).then_some(encoding)
}

/// Decodes the fields of one row in one encoding: UTF-8, or Windows-1252 where no field is UTF-8.
pub(crate) fn decode_row<'b>(fields: impl Iterator<Item = &'b [u8]> + Clone) -> Vec<String> {
    let is_text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok();
    let other = !fields.clone().all(is_text) && !fields.clone().any(has_multibyte);
    fields
        .map(|field| {
            if other {
                WINDOWS_1252.decode_without_bom_handling(field).0.into_owned()
            } else {
                String::from_utf8_lossy(field).into_owned()
            }
        })
        .collect()
}

/// True when some character beyond ASCII is valid UTF-8, which other encodings hardly ever are by chance.
fn has_multibyte(bytes: &[u8]) -> bool {
    bytes.utf8_chunks().any(|chunk| !chunk.valid().is_ascii())
}

/// Normalizes line ends and replaces zero characters, which stores refuse.
fn clean(text: String) -> String {
    let text = if text.contains('\r') {
        text.replace("\r\n", "\n").replace('\r', "\n")
    } else {
        text
    };
    if text.contains('\0') {
        text.replace('\0', "\u{fffd}")
    } else {
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodings_are_told_apart() {
        assert_eq!(decode("caf\u{e9} \u{4f60}".as_bytes()).unwrap(), "café 你");
        assert_eq!(decode(b"caf\xe9\r\nau lait").unwrap(), "café\nau lait");
        assert_eq!(decode(b"\xef\xbb\xbfplain").unwrap(), "plain");
        assert_eq!(decode(b"\xff\xfeh\0i\0").unwrap(), "hi");
        // One broken byte in a text that is UTF-8 otherwise costs that byte only.
        assert_eq!(decode(b"na\xc3\xafve \xff end").unwrap(), "naïve \u{fffd} end");
        assert_eq!(decode(b"").unwrap(), "");
        let russian = encoding_rs::WINDOWS_1251.encode("Купол открывается в сумерках").0;
        assert_eq!(decode(&russian).unwrap(), "Купол открывается в сумерках");
        assert!(decode(b"\x7fELF\0\0\0").is_err());
    }

    #[test]
    fn a_page_is_read_in_the_encoding_it_declares() {
        let page = |head: &str, body: &[u8]| {
            let text = decode_page(&[head.as_bytes(), body].concat()).unwrap();
            text[head.len()..].to_owned()
        };
        let japanese = b"\x93\x56\x95\xb6\x91\xe4";
        assert_eq!(page("<meta charset=Shift_JIS>", japanese), "天文台");
        let older = "<META content='text/html; charset = \"shift_jis\"'>";
        assert_eq!(page(older, japanese), "天文台");
        let russian = b"\xea\xf3\xef\xee\xeb";
        assert_eq!(page("<meta charset='windows-1251'/>", russian), "купол");
        // A declaration is ignored where the page is UTF-8, and where it is unknown.
        assert_eq!(page("<meta charset=shift_jis>", "天文台".as_bytes()), "天文台");
        assert_eq!(page("<meta charset=klingon>", b"caf\xe9"), "café");
        assert_eq!(page("<meta charset=utf-16>", b"caf\xe9"), "café");
        let late = format!("{}<meta charset=windows-1251>", " ".repeat(DECLARED_WITHIN));
        assert_eq!(page(&late, b"caf\xe9"), "café");
        assert!(decode_page(b"<meta charset=shift_jis>\xff\0\0").is_ok_and(|page| !page.contains('\0')));
    }
}
