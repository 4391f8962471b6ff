//! Exports that are read.

use std::collections::HashSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use async_trait::async_trait;
use ragstone_core::collection::shorten;
use ragstone_core::error::InvalidInput;
use ragstone_core::storage::ExportedDocument;
use sha2::{Digest, Sha256};

use crate::format::{ExportClaim, Head, Sum, Summing, head_sha256};
use crate::transfer::check_claim;
use crate::{BATCH, DocumentLine, DocumentSource, TransferError};

/// A line may not be longer than this.
const LONGEST_LINE: u64 = 1 << 30;
/// A batch ends early when its lines are this long together.
const BATCH_BYTES: usize = 32 << 20;

type Reader = Box<dyn BufRead + Send>;

/// An export that is read.
pub struct FileSource {
    pub head: Head,
    /// Of the line that it was read from.
    head_sha256: String,
    lines: Option<Lines>,
    claim: Option<ExportClaim>,
}

pub(super) struct Lines {
    reader: Reader,
    /// Of the last line that was read, from 1.
    number: u64,
    /// The ids that were read, by half of their SHA-256: a file may have millions.
    ids: HashSet<[u8; 16]>,
}

impl FileSource {
    /// A file that lacks its beginning or its end is refused before anything of it is used.
    pub fn open(path: &Path) -> Result<Self, TransferError> {
        let failed = |source| TransferError::File {
            what: format!("{} cannot be read", path.display()),
            source,
        };
        let shown = path.display().to_string();
        let mut file = File::open(path).map_err(failed)?;
        const TAIL: u64 = 1024;
        let length = file.metadata().map_err(failed)?.len();
        let mut tail = Vec::new();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))
            .and_then(|_| file.read_to_end(&mut tail))
            .and_then(|_| file.rewind())
            .map_err(failed)?;
        let source = Self::begin(Lines::of(file), &shown)?;
        let mut last = tail.trim_ascii_end().rsplit(|byte| *byte == b'\n');
        let is_end = |line: &[u8]| ExportClaim::parse(line).map(|claim| claim.is_some());
        let end = last.next();
        if let Some(Ok(Some(claim))) = end.map(ExportClaim::parse) {
            let damaged = |problem: InvalidInput| InvalidInput::new(format!("{shown}: {problem}"));
            claim.check_head(&source.head_sha256).map_err(damaged)?;
        }
        if end.is_none_or(|line| matches!(is_end(line), Ok(false))) {
            return Err(match last.any(|line| matches!(is_end(line), Ok(true))) {
                true => InvalidInput::new(format!("{shown}: {AFTER_THE_END}")),
                false => incomplete(&shown),
            }
            .into());
        }
        Ok(source)
    }

    pub fn read(reader: Reader) -> Result<Self, TransferError> {
        Self::begin(Lines::new(reader), "the export")
    }

    fn begin(mut lines: Lines, shown: &str) -> Result<Self, TransferError> {
        let line = match lines.next()? {
            Some(line) => line,
            None => {
                return Err(
                    InvalidInput::new(format!("{shown} is empty: an export has at least two lines")).into(),
                );
            }
        };
        let head = Head::parse(&line)
            .map_err(|problem| InvalidInput::new(format!("{shown} is not an export: {problem}")))?;
        Ok(Self {
            head,
            head_sha256: head_sha256(&line),
            lines: Some(lines),
            claim: None,
        })
    }
}

const AFTER_THE_END: &str = "there is more after the line that counts the documents, which must be the last";

fn incomplete(what: &str) -> InvalidInput {
    InvalidInput::new(format!(
        "{what} is not a whole export: its last line, which counts the documents, is missing; it is one such as \
         {{\"end\": {{\"documents\": 3}}}}"
    ))
}

#[async_trait]
impl DocumentSource for FileSource {
    async fn next(&mut self) -> Result<Vec<ExportedDocument>, TransferError> {
        if self.claim.is_some() {
            return Ok(Vec::new());
        }
        let Some(mut lines) = self.lines.take() else {
            return Err(incomplete("this").into());
        };
        let read = tokio::task::spawn_blocking(move || {
            let batch = lines.batch();
            (lines, batch)
        });
        let (lines, batch) = read.await.map_err(|error| TransferError::File {
            what: "reading was given up".into(),
            source: std::io::Error::other(error),
        })?;
        let (documents, end) = batch?;
        if let Some(claim) = &end {
            claim.check_head(&self.head_sha256)?;
        }
        self.claim = end;
        self.lines = Some(lines);
        Ok(documents)
    }

    fn claim(&self) -> Option<&ExportClaim> {
        self.claim.as_ref()
    }
}

impl Lines {
    pub(super) fn of(file: File) -> Self {
        Self::new(Box::new(BufReader::with_capacity(1 << 20, file)))
    }

    fn new(reader: Reader) -> Self {
        Self {
            reader,
            number: 0,
            ids: HashSet::new(),
        }
    }

    /// Documents, and the last line if it was reached.
    fn batch(&mut self) -> Result<(Vec<ExportedDocument>, Option<ExportClaim>), TransferError> {
        let mut documents = Vec::new();
        let mut bytes = 0;
        while documents.len() < BATCH && bytes < BATCH_BYTES {
            let Some(line) = self.next()? else {
                return Err(incomplete("this").into());
            };
            let claim = ExportClaim::parse(&line).map_err(|problem| self.at(problem.message()))?;
            if claim.is_some() {
                if self.next()?.is_some() {
                    return Err(self.at(AFTER_THE_END).into());
                }
                return Ok((documents, claim));
            }
            bytes += line.len();
            let document = DocumentLine::parse(&line).and_then(DocumentLine::check);
            let document = document.map_err(|problem| self.at(problem.message()))?;
            if !self.ids.insert(digest(document.document.id.as_str())) {
                let id = shorten(document.document.id.as_str());
                return Err(self
                    .at(&format!("an earlier document has the same id: {id:?}"))
                    .into());
            }
            documents.push(document);
        }
        Ok((documents, None))
    }

    /// The next line that is not empty.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, TransferError> {
        loop {
            let mut line = Vec::new();
            let read = self
                .reader
                .by_ref()
                .take(LONGEST_LINE)
                .read_until(b'\n', &mut line);
            let read = read.map_err(|source| TransferError::File {
                what: "the export cannot be read".into(),
                source,
            })?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            if read as u64 == LONGEST_LINE {
                return Err(self.at("the line is too long").into());
            }
            if !line.trim_ascii().is_empty() {
                return Ok(Some(line));
            }
        }
    }

    fn at(&self, problem: &str) -> InvalidInput {
        InvalidInput::new(format!("line {}: {problem}", self.number))
    }
}

fn digest(id: &str) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&Sha256::digest(id)[..16]);
    half
}

/// Reads a whole export and checks every line of it. Blocks.
pub fn verify_file(path: &Path) -> Result<Sum, TransferError> {
    let mut lines = match FileSource::open(path)?.lines {
        Some(lines) => lines,
        None => return Err(incomplete("this").into()),
    };
    let mut sum = Summing::default();
    loop {
        let (documents, end) = lines.batch()?;
        documents.iter().for_each(|moved| sum.add(moved));
        if let Some(claim) = end {
            let sum = sum.finish();
            check_claim(Some(&claim), &sum)?;
            return Ok(sum);
        }
    }
}
