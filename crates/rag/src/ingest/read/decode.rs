//! Text of unknown encoding.

use encoding_rs::{Encoding, WINDOWS_1252};

use super::Unreadable;

/// A zero byte within this much of the beginning means that a file is not text.
const LOOK_AT: usize = 8192;

/// UTF-8, or what a byte order mark says. Bytes that are not UTF-8 are read as Windows-1252 (which
/// has Latin-1 within it) in a file without any other sign of UTF-8, and replaced elsewhere.
pub fn decode(bytes: &[u8]) -> Result<String, Unreadable> {
    if let Some((encoding, mark)) = Encoding::for_bom(bytes) {
        return Ok(clean(
            encoding
                .decode_without_bom_handling(&bytes[mark..])
                .0
                .into_owned(),
        ));
    }
    if bytes[..bytes.len().min(LOOK_AT)].contains(&0) {
        return Err(Unreadable::new("it is a binary file, not text"));
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(clean(text.to_owned())),
        Err(_) if has_multibyte(bytes) => Ok(clean(String::from_utf8_lossy(bytes).into_owned())),
        Err(_) => Ok(clean(
            WINDOWS_1252.decode_without_bom_handling(bytes).0.into_owned(),
        )),
    }
}

/// True when some character beyond ASCII is valid UTF-8, which other encodings hardly ever are by chance.
fn has_multibyte(bytes: &[u8]) -> bool {
    bytes.utf8_chunks().any(|chunk| !chunk.valid().is_ascii())
}

/// Line ends are those of Unix, and there are no zero characters, which no store takes gladly.
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
        assert!(decode(b"\x7fELF\0\0\0").is_err());
    }
}
