//! Text of unknown encoding.

use std::io::{self, Read};

use encoding_rs::{Encoding, UTF_8, UTF_16BE, UTF_16LE, WINDOWS_1252};

use super::Unreadable;

/// A zero byte within this much of the beginning means that a file is not text.
const LOOK_AT: usize = 8192;
/// A page that says what encoding it is in has to say so within this much of the beginning.
const DECLARED_WITHIN: usize = 1024;
const CHARSET: &[u8] = b"charset";

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

/// A page is in the encoding it declares, unless it is UTF-8 or begins with a mark.
pub(super) fn decode_page(bytes: &[u8]) -> Result<String, Unreadable> {
    let is_clear = Encoding::for_bom(bytes).is_some() || std::str::from_utf8(bytes).is_ok();
    match declared(bytes).filter(|_| !is_clear) {
        Some(encoding) => Ok(clean(encoding.decode_without_bom_handling(bytes).0.into_owned())),
        None => decode(bytes),
    }
}

/// What follows the first `charset=`, where browsers look for it and where it can be true: a
/// declaration that can be read byte by byte is not in UTF-16.
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

/// Fields of one row, each decoded like the others: by the same rules, but for the row alone.
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

/// Gives what it reads as it is, but for text that begins with the mark of UTF-16, which it gives as
/// UTF-8.
pub(crate) struct Utf16AsUtf8<R> {
    inner: R,
    state: State,
}

enum State {
    Beginning,
    AsItIs(Vec<u8>),
    Decoding(Box<Decoding>),
}

struct Decoding {
    decoder: encoding_rs::Decoder,
    /// Decoded and not yet given, from the second on.
    ready: Vec<u8>,
    given: usize,
    ended: bool,
}

impl<R: Read> Utf16AsUtf8<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            inner,
            state: State::Beginning,
        }
    }

    fn begin(&mut self) -> io::Result<State> {
        let mut mark = Vec::new();
        self.inner.by_ref().take(2).read_to_end(&mut mark)?;
        let encoding = match mark[..] {
            [0xff, 0xfe] => UTF_16LE,
            [0xfe, 0xff] => UTF_16BE,
            _ => return Ok(State::AsItIs(mark)),
        };
        Ok(State::Decoding(Box::new(Decoding {
            decoder: encoding.new_decoder_without_bom_handling(),
            ready: Vec::new(),
            given: 0,
            ended: false,
        })))
    }
}

impl<R: Read> Read for Utf16AsUtf8<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if matches!(self.state, State::Beginning) {
            self.state = self.begin()?;
        }
        match &mut self.state {
            State::AsItIs(mark) if !mark.is_empty() => {
                let count = mark.len().min(buffer.len());
                buffer[..count].copy_from_slice(&mark[..count]);
                mark.drain(..count);
                // And what follows: readers guess by the first they are given.
                Ok(count + self.inner.read(&mut buffer[count..])?)
            }
            State::Beginning | State::AsItIs(_) => self.inner.read(buffer),
            State::Decoding(decoding) => decoding.read(&mut self.inner, buffer),
        }
    }
}

impl Decoding {
    fn read(&mut self, inner: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
        while self.given == self.ready.len() && !self.ended {
            let mut raw = [0; LOOK_AT];
            let count = inner.read(&mut raw)?;
            self.ended = count == 0;
            let room = self.decoder.max_utf8_buffer_length(count).unwrap_or(4 * LOOK_AT);
            self.ready.resize(room, 0);
            let (_, _, written, _) = self
                .decoder
                .decode_to_utf8(&raw[..count], &mut self.ready, self.ended);
            self.ready.truncate(written);
            self.given = 0;
        }
        let left = &self.ready[self.given..];
        let count = left.len().min(buffer.len());
        buffer[..count].copy_from_slice(&left[..count]);
        self.given += count;
        Ok(count)
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
        // What it declares is not believed where it is UTF-8, and where nobody knows it.
        assert_eq!(page("<meta charset=shift_jis>", "天文台".as_bytes()), "天文台");
        assert_eq!(page("<meta charset=klingon>", b"caf\xe9"), "café");
        assert_eq!(page("<meta charset=utf-16>", b"caf\xe9"), "café");
        let late = format!("{}<meta charset=windows-1251>", " ".repeat(DECLARED_WITHIN));
        assert_eq!(page(&late, b"caf\xe9"), "café");
        assert!(decode_page(b"<meta charset=shift_jis>\xff\0\0").is_ok_and(|page| !page.contains('\0')));
    }
}
