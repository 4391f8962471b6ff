//! Splits streams of lines into parts that fit into a request. A line that is longer than a server reads
//! is truncated just above the limit, so that the server refuses it by its number.

use std::io::{BufRead, BufReader, Read, Result};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::{ROW_BYTES, UPLOAD_BYTES};

/// Lines wait no longer than this for more lines.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

/// The lines of a file.
pub(super) struct LineParts<R>(R);

impl<R: BufRead> LineParts<R> {
    pub(super) fn new(reader: R) -> Self {
        Self(reader)
    }
}

impl<R: BufRead> Iterator for LineParts<R> {
    type Item = Result<Vec<u8>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut part = Vec::new();
        while (part.len() as u64) < UPLOAD_BYTES {
            match read_line(&mut self.0, &mut part) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => return Some(Err(error)),
            }
        }
        (!part.is_empty()).then_some(Ok(part))
    }
}

/// Lines of a stream, sent as they arrive.
pub(super) struct LiveLines {
    /// One or more lines each.
    arrived: mpsc::Receiver<Result<Vec<u8>>>,
}

impl LiveLines {
    /// Reads on a thread that may block, so that an interrupt takes effect at once.
    pub(super) fn of(stream: impl Read + Send + 'static) -> Self {
        let (sender, arrived) = mpsc::channel(1);
        std::thread::spawn(move || {
            let mut reader = BufReader::with_capacity(1 << 16, stream);
            while let Some(lines) = available_lines(&mut reader).transpose() {
                if sender.blocking_send(lines).is_err() {
                    return;
                }
            }
        });
        Self { arrived }
    }

    /// The next lines, once they fill a request or the first of them waited long enough.
    pub(super) async fn part(&mut self) -> Option<Result<Vec<u8>>> {
        let mut part = match self.arrived.recv().await? {
            Ok(lines) => lines,
            error => return Some(error),
        };
        let waited = Instant::now() + FLUSH_INTERVAL;
        while (part.len() as u64) < UPLOAD_BYTES {
            match timeout_at(waited, self.arrived.recv()).await {
                Ok(Some(Ok(lines))) => part.extend(lines),
                Ok(Some(error)) => return Some(error),
                Ok(None) | Err(_) => break,
            }
        }
        Some(Ok(part))
    }
}

/// Waits for one line, and takes those that arrived with it. `None` at the end.
fn available_lines(reader: &mut BufReader<impl Read>) -> Result<Option<Vec<u8>>> {
    let mut lines = Vec::new();
    if !read_line(reader, &mut lines)? {
        return Ok(None);
    }
    while reader.buffer().contains(&b'\n') {
        read_line(reader, &mut lines)?;
    }
    Ok(Some(lines))
}

/// Whether there was a line.
fn read_line(reader: &mut impl BufRead, lines: &mut Vec<u8>) -> Result<bool> {
    let too_long = ROW_BYTES as u64 + 1;
    let read = reader.by_ref().take(too_long).read_until(b'\n', lines)?;
    if read as u64 == too_long && lines.last() != Some(&b'\n') {
        reader.skip_until(b'\n')?;
        lines.push(b'\n');
    }
    Ok(read > 0)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn the_last_line_waits_for_no_other() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut lines = LiveLines::of(reader);
        for part in ["one\ntwo\n", "three\n"] {
            writer.write_all(part.as_bytes()).unwrap();
            assert_eq!(lines.part().await.unwrap().unwrap(), part.as_bytes());
        }
        writer.write_all(b"without an end").unwrap();
        drop(writer);
        assert_eq!(lines.part().await.unwrap().unwrap(), b"without an end");
        assert!(lines.part().await.is_none());
    }

    #[tokio::test]
    async fn live_lines_are_those_of_a_file() {
        let text: Vec<u8> = (0..200_000)
            .flat_map(|n| format!("line {n}\n").into_bytes())
            .collect();
        let mut lines = LiveLines::of(std::io::Cursor::new(text.clone()));
        let mut live = Vec::new();
        while let Some(part) = lines.part().await {
            live.extend(part.unwrap());
        }
        assert!(live == text);
        let file: Vec<u8> = LineParts::new(&text[..]).flat_map(Result::unwrap).collect();
        assert!(file == text);
    }
}
